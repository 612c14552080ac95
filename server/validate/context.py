"""A long text: does memory grow as planned, and is every row what it is however the text is computed? And, for people,
whether the model finds a needle in it.
"""

import signal
import subprocess
from collections.abc import Sequence

import msgspec

from server.child_entry import following
from server.config import to_json
from server.report.axis import Axis
from server.report.plot import Plot, Series
from server.validate.answers import TEXT
from server.validate.asking import Refused, chat, post
from server.validate.context_found import CannotDo, ContextFound, ContextWanted, Difference, Done, Line, Told
from server.validate.gate import LOG, Gate
from server.validate.memory import FORMULAS
from server.validate.result import Check, StageResult, Table, checked, skipped

MIB = 2**20
MEMORY_SHARE, MEMORY_SLACK = 0.03, 16 * MIB
"""By how much memory may be off the planned line: of the keys and values, and what allocators keep."""
FLOAT32_LIMIT, ROUNDED_LIMIT = 1e-4, 2e-2
"""Of the difference from plain torch in float64, relative to the largest number of a row."""
CLOSE = 1e-3
"""The same of rows that were computed in two ways by the same operations, where the same bits are not promised."""
PART = "attention over many blocks: tables, positions, windows, or where a chunk begins"
OTHER_CHUNKS, REFERENCE_ROWS = 1024, 8
"""Tokens that are computed again from the beginning, and rows that plain torch computes."""
ALONE = "rows of chunks and rows by themselves"
NEEDLE = "The secret number of the lighthouse is 7391."
QUESTION = "What is the secret number of the lighthouse? Answer with the number."
DEPTHS = (0.1, 0.5, 0.9)
NEEDLE_ROOM = 96
"""Tokens for the chat template, the question and the answer."""


def run(gate: Gate) -> StageResult:
    """The stage. Raises Refused, httpx.HTTPError, ServerDidNotStart, OSError."""
    model = gate.facts()
    ids = post(gate.server().http, "/tokenize", {"prompt": TEXT.read_text(encoding="utf-8")[: model.max_model_len]})
    needles = _needles(gate, ids["tokens"])
    gate.close()  # its memory is wanted
    effort = gate.effort
    wanted = ContextWanted(
        model=str(gate.model.path),
        token_ids=tuple(ids["tokens"]),
        tokens=min(model.max_model_len, effort.context_tokens),
        seconds=effort.context_seconds,
        other_chunks=OTHER_CHUNKS,
        reference_rows=REFERENCE_ROWS,
    )
    found = _compute(gate, wanted)
    if isinstance(found, str):
        return StageResult(checks=(skipped("a long text", found),), tables=needles)
    facts = [f"{found.tokens} tokens in chunks of {found.chunk}, of {model.max_model_len} that the model takes."]
    if found.tokens < wanted.tokens:
        limit = "memory" if found.room <= found.tokens else "time"
        facts.append(f"No more for want of {limit}.")
    return StageResult(checks=tuple(context_checks(found)), facts=tuple(facts), plots=plots(found), tables=needles)


def _compute(gate: Gate, wanted: ContextWanted) -> ContextFound | str:
    """By the process; or why it could not."""
    command = following(signal.SIGKILL, "server.validate.context_process")
    with (gate.folder / LOG).open("a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(to_json(gate.config) + b"\n" + msgspec.json.encode(wanted) + b"\n")
        process.stdin.close()
        for text in process.stdout:
            line: Told | Done | CannotDo = msgspec.json.decode(text, type=Line)
            if isinstance(line, Done):
                return line.found
            if isinstance(line, CannotDo):
                return line.why
            gate.told(line.fraction, line.what)
        raise Refused(f"the process that computes a long text ended with {process.wait()}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def context_checks(found: ContextFound) -> list[Check]:
    """What follows from the figures."""
    same = 0.0 if found.is_exact else CLOSE
    limit = ROUNDED_LIMIT if found.is_rounded else FLOAT32_LIMIT
    checks = [
        _memory(found),
        _rows(ALONE, found.alone, same, PART)
        if found.alone is not None
        else skipped(ALONE, "the model keeps states of whole texts"),
        _rows("rows in other chunks and other blocks", found.other_chunks, same, PART),
    ]
    name = "rows and plain torch in float64"
    if found.reference is None:
        return [*checks, skipped(name, found.why_no_reference)]
    return [*checks, _rows(name, found.reference, limit, "firstlight align names the first operation that differs")]


def _rows(name: str, found: Difference, limit: float, advice: str) -> Check:
    if not found.rows:
        return skipped(name, "no row was computed")
    worst = max(found.logits, found.cache)
    where = f" at token {found.position}" if found.position >= 0 else ""
    problem = (
        "" if worst <= limit else f"logits differ by {found.logits:.2g}{where}, keys and values by {found.cache:.2g}"
    )
    return checked(name, problem, advice, f"{worst:.2g} of {found.rows} rows", f"{limit:g}")


def planned_bytes(found: ContextFound, tokens: int) -> int:
    """The line: what there was when the model was loaded, and the blocks."""
    return found.base_bytes + -(-tokens // found.block_size) * found.block_bytes


def paged_bytes(found: ContextFound, tokens: int) -> int:
    """The line where each tensor takes whole pages."""
    blocks = -(-tokens // found.block_size)
    pages = -(-blocks * found.block_bytes // (found.num_pools * found.page_bytes))
    whole = min(pages * found.page_bytes * found.num_pools, found.text_blocks * found.block_bytes)
    return found.base_bytes + max(whole, blocks * found.block_bytes)


def _memory(found: ContextFound) -> Check:
    slack = MEMORY_SLACK + int(MEMORY_SHARE * found.text_blocks * found.block_bytes)
    most = found.step_bytes + slack
    above = max((one.num_bytes - paged_bytes(found, one.tokens), one.tokens) for one in found.moments)
    below = min((one.num_bytes - planned_bytes(found, one.tokens), one.tokens) for one in found.moments)
    problem = ""
    if above[0] > most:
        problem = f"{above[0] / MIB:.0f} MiB above the line of whole pages at {above[1]} tokens"
    elif below[0] < -slack:
        problem = f"{-below[0] / MIB:.0f} MiB below the line at {below[1]} tokens"
    value = f"{below[0] / MIB:+.0f} MiB, and {above[0] / MIB:+.0f} from whole pages"
    limit = f"{-slack / MIB:+.0f} to {most / MIB:+.0f}, with the step's own"
    return checked("memory is on the planned line", problem, FORMULAS, value, limit)


def plots(found: ContextFound) -> tuple[Plot, ...]:
    """Memory and speed over the length."""
    tokens = Axis(label="tokens")
    measured = [(moment.tokens, moment.num_bytes / MIB) for moment in found.moments]
    planned = [(moment.tokens, planned_bytes(found, moment.tokens) / MIB) for moment in found.moments]
    paged = [(moment.tokens, paged_bytes(found, moment.tokens) / MIB) for moment in found.moments]
    pairs = zip(found.moments, found.moments[1:], strict=False)
    rates = [(b.tokens, (b.tokens - a.tokens) / max(1e-9, b.seconds - a.seconds)) for a, b in pairs]
    return (
        Plot(
            title="Memory of the process",
            x=tokens,
            y=Axis(label="MiB", from_zero=True),
            series=[
                Series(name="measured", points=measured),
                Series(name="planned", points=planned, dashed=True),
                Series(name="planned, in whole pages", points=paged, dashed=True),
            ],
        ),
        Plot(
            title="Speed of a prompt",
            x=tokens,
            y=Axis(label="tokens/s", from_zero=True),
            series=[Series(name="tokens/s", points=rates)],
        ),
    )


def _needles(gate: Gate, ids: Sequence[int]) -> tuple[Table, ...]:
    """A sentence in a text of several lengths: what the model makes of it is for people to judge."""
    rows: list[tuple[str | int | float | None, ...]] = []
    lengths = [length for length in gate.effort.needle_lengths if length + NEEDLE_ROOM <= gate.facts().max_model_len]
    for index, length in enumerate(lengths):
        gate.told(0.1 * index / len(lengths), f"a needle in {length} tokens")
        for depth in DEPTHS:
            try:
                answer = _ask_needle(gate, ids, length, depth)
            except Refused as error:
                return (Table(head=("needle",), rows=((f"the model does not chat: {error}",),)),)
            rows.append((length, f"{depth:.0%}", "found" if "7391" in answer else "not found", answer[:80]))
    return (Table(head=("tokens", "needle at", "", "answer"), rows=tuple(rows)),) if rows else ()


def _ask_needle(gate: Gate, ids: Sequence[int], length: int, depth: float) -> str:
    http, name = gate.server().http, gate.facts().name
    text = post(http, "/detokenize", {"tokens": [ids[place % len(ids)] for place in range(length)]})["prompt"]
    cut = int(len(text) * depth)
    content = f"{text[:cut]}\n{NEEDLE}\n{text[cut:]}\n\n{QUESTION}"
    body = {"model": name, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}
    return str(chat(http, body)["choices"][0]["message"]["content"])
