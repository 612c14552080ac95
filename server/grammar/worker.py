"""The process that checks grammars: started by the API process when the first one comes (`checker.py`), ended when it
takes too long. Whatever a grammar does to the library, it does it here.

`python -m server.grammar.worker`: a `Vocabulary` on standard input, then one `Grammar` after the other, answered by a
`Verdict` each on standard output. The end of standard input is the end of the process, whatever it is doing: a thread
checks, the main one reads.
"""

import json
import os
import queue
import re
import resource
import signal
import threading

import msgspec
import setproctitle
from llguidance import LLTokenizer

from server.child_entry import follow_parent
from server.grammar.compiler import check_start, compile_grammar, token_trie
from server.grammar.errors import GrammarError
from server.grammar.frames import LENGTH_BYTES, Verdict, pack
from server.grammar.grammar import Grammar
from server.grammar.lark import output_grammar
from server.grammar.schema import check_schema
from server.grammar.vocabulary import Vocabulary

STACK_BYTES = 2 * 1024 * 1024
"""Of the checking thread: less than a thread of the engine has, so that what passes here does not overflow there."""
MAX_MEMORY_BYTES = 2 * 1024**3
STDIN, STDOUT = 0, 1
_OUR_PLACE = re.compile(r"^line \d+, column \d+: (?:failed to compile JSON schema: )?")
"""In a grammar that `output_grammar` made means nothing to whoever asked for something else."""


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := os.read(STDIN, min(count - len(data), 1 << 20))):
            os._exit(0)
        data += part
    return data


def _read_frame() -> bytes:
    return _read(int.from_bytes(_read(LENGTH_BYTES), "big"))


def verdict_on(grammar: Grammar, vocabulary: Vocabulary, trie: LLTokenizer) -> Verdict:
    """Everything that can be found out before an output begins."""
    try:
        _check_schemas(grammar)
        checked = output_grammar(grammar, vocabulary.special_literals())
        check_start(compile_grammar(checked.source, trie))
    except GrammarError as error:
        return Verdict(error=_in_their_words(str(error), grammar))
    return Verdict(grammar=checked)


def _in_their_words(error: str, grammar: Grammar) -> str:
    if grammar.kind == "grammar":
        return error
    message = _OUR_PLACE.sub("", error)
    if message.startswith("oneOf constraints"):
        return "oneOf is only supported where no output can match two of its schemas; use anyOf"
    return message


def _check_schemas(grammar: Grammar) -> None:
    if grammar.kind == "json_schema":
        check_schema(_parsed(grammar.text))
    elif grammar.kind == "calls":
        for call in json.loads(grammar.text)["calls"]:
            try:
                check_schema(call["schema"])
            except GrammarError as error:
                raise GrammarError(f"the parameters of {call['name']}: {error}") from None
        if grammar.answer is not None:
            _check_schemas(grammar.answer)
    elif grammar.kind == "structural_tag":
        for index, structure in enumerate(json.loads(grammar.text)["structures"]):
            try:
                check_schema(structure["schema"])
            except GrammarError as error:
                raise GrammarError(f"structures[{index}].schema: {error}") from None


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not JSON: {error}") from None


def _write(verdict: Verdict) -> None:
    frame = pack(verdict)
    while frame:
        frame = frame[os.write(STDOUT, frame) :]


def _check(asked: "queue.SimpleQueue[Grammar]", vocabulary: Vocabulary) -> None:
    try:
        trie = token_trie(vocabulary)
        _write(Verdict())  # ready
        while True:
            _write(verdict_on(asked.get(), vocabulary, trie))
    finally:
        os._exit(1)


def main() -> None:
    """Until standard input ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    follow_parent(signal.SIGKILL)
    setproctitle.setproctitle("firstlight: grammars")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = msgspec.msgpack.decode(_read_frame(), type=Vocabulary)
    asked: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_check, args=(asked, vocabulary), daemon=True, name="check").start()
    while True:
        asked.put(msgspec.msgpack.decode(_read_frame(), type=Grammar))


if __name__ == "__main__":
    main()
