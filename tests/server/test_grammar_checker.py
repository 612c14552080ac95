"""Grammars are checked in a process of their own: it is replaced when one takes too long or ends it."""

import asyncio
import os
import signal
from collections.abc import Coroutine
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


def test_verdicts_are_kept_and_requests_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
        process = make_checker()
        try:
            leaving = asyncio.create_task(process.check(GOOD))
            await asyncio.sleep(0)
            leaving.cancel()
            first = await process.check(GOOD)
            monkeypatch.setattr(checker, "_answer", None)
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
            await running.wait()
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


def test_the_process_ends_with_whoever_started_it() -> None:
    async def session() -> int | None:
        process = make_checker()
        await process.check(GOOD)
        running = await process._started()
        assert running.stdin is not None
        running.stdin.write(checker.pack(SLOW))
        await running.stdin.drain()
        running.stdin.close()
        return await asyncio.wait_for(running.wait(), 5)

    assert _run(session()) == 0
