"""Grammars are checked in a process of their own: it is replaced when one takes too long or ends it."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from server.errors import ApiError, BadRequest, Overloaded, Unavailable
from server.grammar import checker
from server.grammar.checker import MAX_GRAMMAR_BYTES, ProcessChecker
from server.grammar.errors import GrammarError
from server.grammar.grammar import Grammar
from server.grammar.vocabulary import Vocabulary
from tests.server.fakes import LocalChecker

GOOD = Grammar(kind="regex", text="a+", param="structured_outputs.regex")
SLOW = Grammar(kind="json_schema", text='{"type":"integer","multipleOf":1234567}')
RULES = "\n".join(f"a{index}: a{index + 1}" for index in range(6000))
OVERFLOWING = Grammar(kind="grammar", text=f'start: a0\n{RULES}\na6000: "x"')
Result = TypeVar("Result")


def make_checker() -> ProcessChecker:
    return ProcessChecker(lambda: LocalChecker().vocabulary)


def _run(session: Coroutine[Any, Any, Result]) -> Result:
    """On the loop that the API process has, whose pipes fail in a way of their own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(session)


async def _error(process: ProcessChecker, grammar: Grammar) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await process.check(grammar)
    return caught.value


def test_what_takes_too_long_or_crashes_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
        process = make_checker()
        try:
            expected = await LocalChecker().check(GOOD)
            assert await process.check(GOOD) == expected
            monkeypatch.setattr(checker, "CHECK_SECONDS", 0.3)
            slow, waiting = await asyncio.gather(_error(process, SLOW), _error(process, SLOW))
            assert slow.message == waiting.message == "structured_outputs: it takes more than 0.3 s to compile"
            assert (slow.status, slow.param) == (400, "structured_outputs")
            monkeypatch.setattr(checker, "CHECK_SECONDS", 30.0)
            crash = await _error(process, OVERFLOWING)
            assert crash.message == "structured_outputs: it is too complex to compile"
            fault = await _error(process, Grammar(kind="regex", text="(", param="structured_outputs.regex"))
            assert fault.message == "structured_outputs.regex: at character 0 of a regular expression: unclosed group"
            assert (await process.check(Grammar(kind="choice", text='["a"]'))).json_after is None
        finally:
            await process.aclose()

    _run(session())


def _slow(number: int) -> Grammar:
    return Grammar(kind="json_schema", text=f'{{"type":"integer","multipleOf":{1234567 + number}}}')


def test_slow_ones_are_answered_in_time_and_quick_ones_are_served_beside_them() -> None:
    """Two go on to the end of their time, the others are told at once to come again."""

    async def session() -> None:
        process = make_checker()
        try:
            await process.check(GOOD)
            slow = [asyncio.create_task(_error(process, _slow(number))) for number in range(6)]
            quick = [_served(process, Grammar(kind="regex", text=f"a{{{number}}}")) for number in range(1, 7)]
            await asyncio.gather(*quick)
            errors = await asyncio.gather(*slow)
            assert {error.status for error in errors} == {400, 429}
            assert errors[0].message == "structured_outputs: it takes more than 1.5 s to compile"
            assert (await process._started())._asked == {}
        finally:
            await process.aclose()

    _run(session())


async def _served(process: ProcessChecker, grammar: Grammar) -> None:
    """As clients do: one that is told to come again does."""
    for _ in range(100):
        try:
            await process.check(grammar)
            return
        except Overloaded:
            await asyncio.sleep(0.05)
    raise AssertionError("never served")


def test_what_waits_too_long_for_its_turn_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
        process = make_checker()
        try:
            await process.check(GOOD)
            monkeypatch.setattr(checker, "WAIT_SECONDS", 0.01)
            for _ in range(checker.QUICK_SLOTS):
                await process._quick.acquire()
            refused = await _error(process, Grammar(kind="regex", text="b"))
            assert (refused.message, refused.retry_after) == ("other grammars are being checked; try again", 1)
            process._quick.release()
            monkeypatch.setattr(checker, "WAIT_SECONDS", 10.0)
            await process.check(Grammar(kind="regex", text="b"))
        finally:
            await process.aclose()

    _run(session())


def test_verdicts_are_kept_and_requests_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
        process = make_checker()
        try:
            leaving = asyncio.create_task(process.check(GOOD))
            await asyncio.sleep(0)
            leaving.cancel()
            first = await process.check(GOOD)
            monkeypatch.setattr(process, "_started", None)
            assert await process.check(GOOD) is first
        finally:
            await process.aclose()

    _run(session())


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
        process = make_checker()
        try:
            at_limit = Grammar(kind="regex", text="a" * MAX_GRAMMAR_BYTES)
            assert "limit is 131072" not in (await _maybe_error(process, at_limit))
            above = await _error(process, Grammar(kind="regex", text="a" * (MAX_GRAMMAR_BYTES + 1)))
            assert isinstance(above, BadRequest)
            assert above.message == "The grammar has 131073 bytes; the limit is 131072."
            monkeypatch.setattr(checker, "MAX_WAITING", 1)
            first = asyncio.create_task(process.check(Grammar(kind="regex", text="b")))
            await asyncio.sleep(0)
            assert isinstance(await _error(process, Grammar(kind="regex", text="c")), Overloaded)
            await first
        finally:
            await process.aclose()

    _run(session())


async def _maybe_error(process: ProcessChecker, grammar: Grammar) -> str:
    try:
        await process.check(grammar)
    except ApiError as error:
        return error.message
    return ""


def test_a_killed_process_is_replaced_and_no_grammar_blamed() -> None:
    async def session() -> None:
        process = make_checker()
        try:
            await process.check(GOOD)
            running = await process._started()
            os.kill(running.pid, signal.SIGKILL)
            assert (await process.check(Grammar(kind="regex", text="b"))).source.find("/b/") > 0
            assert (await process._started()).pid != running.pid
        finally:
            await process.aclose()

    _run(session())


def test_what_keeps_it_from_starting_is_said() -> None:
    def loading() -> Vocabulary:
        raise Unavailable("the model is loading")

    def endless() -> Vocabulary:
        raise GrammarError("the model has no token that ends an output")

    async def session() -> None:
        assert isinstance(await _error(ProcessChecker(loading), GOOD), Unavailable)
        refused = await _error(ProcessChecker(endless), GOOD)
        assert (refused.status, refused.param) == (400, "structured_outputs.regex")
        assert refused.message.endswith("the model has no token that ends an output")

    _run(session())


def test_the_process_and_its_checks_end_with_whoever_started_it() -> None:
    async def session() -> None:
        process = make_checker()
        await process.check(GOOD)
        running = await process._started()
        slow = asyncio.create_task(running.ask(SLOW))
        while not (children := _children(running.pid)):
            await asyncio.sleep(0.01)
        stdin = running._process.stdin
        assert stdin is not None
        stdin.close()
        assert await asyncio.wait_for(running._process.wait(), 5) == 0
        with pytest.raises(EOFError):
            await slow
        async with asyncio.timeout(5):
            while any(Path(f"/proc/{child}").exists() for child in children):
                await asyncio.sleep(0.01)

    _run(session())


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
