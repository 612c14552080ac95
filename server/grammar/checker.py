"""Checks grammars before the engine sees them, in a process of their own, within limits of time. API process.

The grammar library has no limit of its own for some schemas (`multipleOf` of a large number takes minutes), and some
grammars overflow its stack. Mostly a check takes a millisecond: so all begin in a few quick slots, and those few that
take longer go on in slow ones, of which there are so few that quick ones are served beside them.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable

from scheduler.request import OutputGrammar
from server.errors import BadRequest, Overloaded, Unavailable
from server.grammar.check_process import CheckProcess, start_process
from server.grammar.errors import GrammarError
from server.grammar.frames import Verdict
from server.grammar.grammar import Grammar
from server.grammar.vocabulary import Vocabulary

MAX_GRAMMAR_BYTES = 128 * 1024
CHECK_SECONDS = 1.5
QUICK_SECONDS = 0.1
"""What takes longer goes on in a slow slot. 115 KB of schema take 0.12 s."""
WAIT_SECONDS = 0.4
"""For a quick slot: what waits longer gets 429, so that every answer comes within two seconds."""
QUICK_SLOTS, SLOW_SLOTS = 4, 2
MAX_WAITING = 64
"""Grammars that are being checked or wait for it; further ones get 429."""
MAX_KEPT = 64
"""Verdicts that are kept for grammars that come again."""


class ProcessChecker:
    """Implements `grammar.Checker`. Close it with `aclose()`."""

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        """`read_vocabulary` is called when the first grammar comes; it may raise ApiError or GrammarError."""
        self._read_vocabulary = read_vocabulary
        self._start: asyncio.Task[CheckProcess] | None = None
        self._quick, self._slow = asyncio.Semaphore(QUICK_SLOTS), asyncio.Semaphore(SLOW_SLOTS)
        self._checks: dict[Grammar, asyncio.Task[Verdict]] = {}
        self._kept: OrderedDict[Grammar, Verdict] = OrderedDict()

    async def check(self, grammar: Grammar) -> OutputGrammar:
        """See `grammar.Checker`."""
        if (size := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
            raise BadRequest(f"The grammar has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}.", param=grammar.param)
        verdict = self._kept.get(grammar)
        if verdict is None:
            # Others may wait for it too: so it outlives its request.
            verdict = await asyncio.shield(self._check(grammar))
        if verdict.grammar is None:
            raise BadRequest(f"{grammar.param}: {verdict.error}", param=grammar.param, code="invalid_grammar")
        return verdict.grammar

    def _check(self, grammar: Grammar) -> "asyncio.Task[Verdict]":
        if grammar not in self._checks:
            if len(self._checks) >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} grammars wait to be checked; try again")
            task = self._checks[grammar] = asyncio.create_task(self._verdict(grammar))
            task.add_done_callback(lambda task: self._end(grammar, task))
        return self._checks[grammar]

    def _end(self, grammar: Grammar, task: "asyncio.Task[Verdict]") -> None:
        del self._checks[grammar]
        if not task.cancelled():
            task.exception()  # seen, should whoever asked be gone

    async def _verdict(self, grammar: Grammar) -> Verdict:
        """Twice where the process ends meanwhile, which it does for reasons of its own."""
        for _ in range(2):
            try:
                return await self._in_turn(await self._started(), grammar)
            except GrammarError as error:
                return Verdict(error=str(error))
            except EOFError:
                continue
        raise Unavailable("the process that checks grammars ends again and again")

    async def _in_turn(self, process: CheckProcess, grammar: Grammar) -> Verdict:
        """Raises EOFError."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._quick.acquire()
        except TimeoutError:
            raise Overloaded("other grammars are being checked; try again") from None
        check = asyncio.create_task(process.ask(grammar))
        try:
            try:
                await asyncio.wait([check], timeout=QUICK_SECONDS)
            finally:
                self._quick.release()
            if not check.done():
                await self._go_on(check)
            if not check.done():
                return Verdict(error=f"it takes more than {CHECK_SECONDS:g} s to compile")
            verdict = check.result()
        finally:
            check.cancel()
        if verdict is None:
            return Verdict(error="it is too complex to compile")
        self._kept[grammar] = verdict
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return verdict

    async def _go_on(self, check: "asyncio.Task[Verdict | None]") -> None:
        if self._slow.locked():
            raise Overloaded("other grammars that take long are being checked; try again")
        async with self._slow:
            await asyncio.wait([check], timeout=CHECK_SECONDS - QUICK_SECONDS)

    async def _started(self) -> CheckProcess:
        """The process, ready. Raises Unavailable, GrammarError for a model that no grammar fits."""
        if self._start is None:
            self._start = asyncio.create_task(start_process(self._read_vocabulary()))
        start = self._start
        try:
            process = await asyncio.shield(start)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self._start = None
            raise Unavailable(f"the process that checks grammars does not start: {error}") from None
        if process.is_running:
            return process
        if self._start is start:
            self._start = None
        return await self._started()

    async def aclose(self) -> None:
        """End the process; those who wait for a verdict are cancelled."""
        checks = list(self._checks.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        if self._start is not None:
            with contextlib.suppress(OSError, EOFError):
                await (await self._start).end()
