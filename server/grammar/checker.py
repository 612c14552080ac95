"""Checks grammars before the engine sees them, in a process of their own, within a time limit. API process.

The grammar library has no limit of its own for some schemas (`multipleOf` of a large number takes minutes), and some
grammars overflow its stack. What happens then is that the process is replaced and the grammar is refused.
"""

import asyncio
import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from scheduler.request import OutputGrammar
from server.errors import BadRequest, Overloaded, Unavailable
from server.grammar.errors import GrammarError
from server.grammar.frames import LENGTH_BYTES, Verdict, pack
from server.grammar.grammar import Grammar
from server.grammar.vocabulary import Vocabulary

MAX_GRAMMAR_BYTES = 128 * 1024
CHECK_SECONDS = 1.5
START_SECONDS = 30.0
MAX_WAITING = 64
"""Grammars that wait for their turn; further ones get 429."""
MAX_KEPT = 64
"""Verdicts that are kept for grammars that come again."""


class ProcessChecker:
    """Implements `grammar.Checker`. Close it with `aclose()`."""

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        """`read_vocabulary` is called when the first grammar comes; it may raise ApiError or GrammarError."""
        self._read_vocabulary = read_vocabulary
        self._start: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._turn = asyncio.Lock()
        self._checks: dict[Grammar, asyncio.Task[Verdict]] = {}
        self._kept: OrderedDict[Grammar, Verdict] = OrderedDict()

    async def check(self, grammar: Grammar) -> OutputGrammar:
        """See `grammar.Checker`."""
        if (size := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
            raise BadRequest(f"The grammar has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}.", param=grammar.param)
        verdict = self._kept.get(grammar)
        if verdict is None:
            # Others may wait for it too, and a question that was asked has to be answered: so it outlives its request.
            verdict = await asyncio.shield(self._check(grammar))
        if verdict.grammar is None:
            raise BadRequest(f"{grammar.param}: {verdict.error}", param=grammar.param, code="invalid_grammar")
        return verdict.grammar

    def _check(self, grammar: Grammar) -> "asyncio.Task[Verdict]":
        if grammar not in self._checks:
            if len(self._checks) >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} grammars wait to be checked; try again")
            task = self._checks[grammar] = asyncio.create_task(self._in_turn(grammar))
            task.add_done_callback(lambda _: self._checks.pop(grammar, None))
        return self._checks[grammar]

    async def _in_turn(self, grammar: Grammar) -> Verdict:
        async with self._turn:
            return await self._ask(grammar)

    async def _ask(self, grammar: Grammar) -> Verdict:
        """Twice where the process ends meanwhile: what ended it may have come before."""
        for _ in range(2):
            try:
                process = await self._started()
            except GrammarError as error:
                return Verdict(error=str(error))
            try:
                verdict = await _answer(process, pack(grammar), CHECK_SECONDS)
            except TimeoutError:
                await self._replace(process)
                return Verdict(error=f"it takes more than {CHECK_SECONDS:g} s to compile")
            except (OSError, EOFError):
                await self._replace(process)
                continue
            self._kept[grammar] = verdict
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return verdict
        return Verdict(error="it is too complex to compile")

    async def _started(self) -> asyncio.subprocess.Process:
        """The process, ready. Raises Unavailable, GrammarError for a model that no grammar fits."""
        if self._start is None:
            self._start = asyncio.create_task(_start_process(self._read_vocabulary()))
        try:
            return await asyncio.shield(self._start)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self._start = None
            raise Unavailable(f"the process that checks grammars does not start: {error}") from None

    async def _replace(self, process: asyncio.subprocess.Process) -> None:
        """A new one starts at once, so that the next grammar need not wait for it."""
        await _end(process)
        self._start = asyncio.create_task(_start_process(self._read_vocabulary()))

    async def aclose(self) -> None:
        """End the process; those who wait for a verdict are cancelled."""
        checks = list(self._checks.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        if self._start is not None:
            with contextlib.suppress(OSError, EOFError):
                await _end(await self._start)


async def _start_process(vocabulary: Vocabulary) -> asyncio.subprocess.Process:
    """A worker that is ready. Raises OSError or EOFError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server.grammar.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await _answer(process, pack(vocabulary), START_SECONDS)
    except BaseException:
        await _end(process)
        raise
    return process


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


async def _answer(process: asyncio.subprocess.Process, frame: bytes, seconds: float) -> Verdict:
    """Raises TimeoutError; OSError or EOFError when the process has ended."""
    assert process.stdin is not None and process.stdout is not None, "made with pipes"
    async with asyncio.timeout(seconds):
        try:
            process.stdin.write(frame)
        except RuntimeError as error:  # that is how uvloop says that the pipe is closed
            raise EOFError(str(error)) from None
        await process.stdin.drain()
        length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
        return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Verdict)
