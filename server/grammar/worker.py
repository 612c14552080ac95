"""The process that checks grammars: started by the API process when the first one comes (`check_process.py`). Whatever
a grammar does to the library, it does to a child of this process, which has one for each check.

`python -m server.grammar.worker`: a `Vocabulary` on standard input, then `Ask` and `Stop` as they come; on standard
output `READY`, then an `Answer` to each `Ask`. The end of standard input is the end of the process and its children.
"""

import gc
import os
import resource
import selectors
import signal
import threading
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import setproctitle
from llguidance import LLTokenizer

from server.child_entry import follow_parent
from server.grammar.compiler import token_trie
from server.grammar.frames import LENGTH_BYTES, READY, Answer, Ask, Stop, pack, take_frames
from server.grammar.verdicts import verdict_on
from server.grammar.vocabulary import Vocabulary

STACK_BYTES = 2 * 1024 * 1024
"""Of the checking thread: less than a thread of the engine has, so that what passes here does not overflow there."""
MAX_MEMORY_BYTES = 2**30
"""Of a child, all that it shares with this process included."""
SLOW_AFTER_SECONDS, SLOW_NICENESS = 0.03, 15
"""Checks that take longer give way to those that have just begun, and to the API process."""
STDIN, STDOUT = 0, 1


@dataclass(slots=True)
class _Check:
    """A child."""

    number: int
    pid: int
    written: bytearray = field(default_factory=bytearray)


class _Checks:
    """The children, by the pipe that each writes its answer to."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._trie = vocabulary, token_trie(vocabulary)
        self._running: dict[int, _Check] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(STDIN, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until standard input ends."""
        asked = bytearray()
        while True:
            for key, _ in self._selector.select():
                data = os.read(key.fd, 1 << 20)
                if key.fd != STDIN:
                    self._hear(key.fd, data)
                elif data:
                    asked += data
                    for frame in take_frames(asked):
                        self._obey(msgspec.msgpack.decode(frame, type=Ask | Stop))
                else:
                    self._stop([*self._running.values()])
                    return

    def _obey(self, message: Ask | Stop) -> None:
        if isinstance(message, Stop):
            self._stop([check for check in self._running.values() if check.number == message.number])
            return
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ours)
            _be_child(theirs, message, self._vocabulary, self._trie)
        os.close(theirs)
        self._running[ours] = _Check(message.number, pid)
        self._selector.register(ours, selectors.EVENT_READ)

    def _hear(self, pipe: int, data: bytes) -> None:
        """From a child; nothing means that it has ended."""
        check = self._running[pipe]
        check.written += data
        if data:
            return
        self._selector.unregister(pipe)
        os.close(pipe)
        os.waitpid(check.pid, 0)
        del self._running[pipe]
        is_whole = bool(take_frames(bytearray(check.written)))
        _write(STDOUT, bytes(check.written) if is_whole else pack(Answer(check.number, None)))

    def _stop(self, checks: list[_Check]) -> None:
        for check in checks:
            os.kill(check.pid, signal.SIGKILL)


def _be_child(pipe: int, asked: Ask, vocabulary: Vocabulary, trie: LLTokenizer) -> NoReturn:
    """Check in a thread, whose stack is what it may take."""
    try:
        follow_parent(signal.SIGKILL)

        def check() -> None:
            _write(pipe, pack(Answer(asked.number, verdict_on(asked.grammar, vocabulary, trie))))

        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=check, name="check")
        thread.start()
        thread.join(SLOW_AFTER_SECONDS)
        if thread.native_id is not None and thread.is_alive():
            os.setpriority(os.PRIO_PROCESS, thread.native_id, SLOW_NICENESS)
        thread.join()
    finally:
        os._exit(0)


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


def _read_vocabulary() -> Vocabulary:
    """Raises EOFError."""
    data = bytearray()
    while not (frames := take_frames(data)):
        missing = LENGTH_BYTES - len(data)
        if missing <= 0:
            missing = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big") - len(data)
        if not (part := os.read(STDIN, min(missing, 1 << 20))):
            raise EOFError
        data += part
    return msgspec.msgpack.decode(frames[0], type=Vocabulary)


def main() -> None:
    """Until standard input ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    follow_parent(signal.SIGKILL)
    setproctitle.setproctitle("firstlight: grammars")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        checks = _Checks(_read_vocabulary())
    except EOFError:
        return
    gc.freeze()  # collections in children would copy what they share
    _write(STDOUT, pack(READY))
    checks.serve()


if __name__ == "__main__":
    main()
