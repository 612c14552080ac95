"""The process that checks grammars, as `checker.py` sees it. API process."""

import asyncio
import contextlib
import sys
from itertools import count

import msgspec

from server.grammar.frames import LENGTH_BYTES, Answer, Ask, Stop, Verdict, pack
from server.grammar.grammar import Grammar
from server.grammar.vocabulary import Vocabulary

START_SECONDS = 30.0
END_SECONDS = 2.0


class CheckProcess:
    """One that is ready. Make it with `start_process`, end it with `end`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Verdict | None]] = {}
        self._reader = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        """The operating system's."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it can be asked."""
        return not self._reader.done()

    async def ask(self, grammar: Grammar) -> Verdict | None:
        """None where the check ended without one. Who is cancelled has the check stopped. Raises EOFError where the
        process has ended."""
        number = next(self._numbers)
        self._send(Ask(number, grammar))
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._asked[number]
        finally:
            if self._asked.pop(number).cancelled():
                with contextlib.suppress(EOFError):
                    self._send(Stop(number))

    def _send(self, message: Ask | Stop) -> None:
        """The number of checks that go on is bounded, and so is what waits to be sent."""
        assert self._process.stdin is not None, "made with pipes"
        if not self.is_running:
            raise EOFError("the process that checks grammars has ended")
        try:
            self._process.stdin.write(pack(message))
        except (OSError, RuntimeError) as error:  # the latter is how uvloop says that the pipe is closed
            raise EOFError(str(error)) from None

    async def _read(self) -> None:
        try:
            while True:
                answer = await _next_answer(self._process)
                future = self._asked.get(answer.number)
                if future is not None and not future.done():
                    future.set_result(answer.verdict)
        except (OSError, EOFError):
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(EOFError("the process that checks grammars has ended"))

    async def end(self) -> None:
        """It, its checks, and those who wait for them."""
        assert self._process.stdin is not None, "made with pipes"
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            await _kill(self._process)
        await self._reader


async def start_process(vocabulary: Vocabulary) -> CheckProcess:
    """Raises OSError or EOFError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server.grammar.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None, "made with pipes"
    try:
        async with asyncio.timeout(START_SECONDS):
            process.stdin.write(pack(vocabulary))
            await process.stdin.drain()
            await _next_answer(process)
    except BaseException:
        await _kill(process)
        raise
    return CheckProcess(process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _next_answer(process: asyncio.subprocess.Process) -> Answer:
    assert process.stdout is not None, "made with pipes"
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Answer)
