"""Runs firstlight and its peers in turns on this machine and prints the tables of docs/benchmarks.md.

    python docs/benchmarks/compare.py MODELS --llamacpp PYTHON --vllm PYTHON --transformers PYTHON --output runs.json

in the project's own environment. Each PYTHON is the interpreter of a peer's environment; a peer without one is left
out, and the tables say so. MODELS is a folder with one model as `q8_0.gguf`, `q4_0.gguf`, `q4_1.gguf` and the folders
`float32` and `bfloat16` (docs/benchmarks.md says how they are made).

In each round every engine runs once, in a process of its own: A B C ..., A B C ...; the figures are medians over the
rounds. FILE is written after each of these runs, so that what was measured outlives a round that is cut off;
`--from runs.json` prints its tables. An engine that fails is named with its reason, and the others go on.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loadtest.conditions import surroundings

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUSY_PERCENT = 10
"""Share of the processors that other programs may take before a run is called disturbed."""
RUN_SECONDS = 1800
PEERS = ("llamacpp", "vllm", "transformers")
LAYER_FLOP = 2 * 30 * (960 * 576 + 576 * 576 + 3 * 1536 * 576)
"""Of one prompt token of SmolLM2-135M in the matrices of its 30 layers; the output matrix is for last tokens only."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One engine with one kind of weights."""

    name: str
    engine: str
    """firstlight or one of PEERS, whose option names its Python."""
    model: str
    """File or folder in MODELS."""
    options: tuple[str, ...] = ()
    """firstlight's flags; a peer's words after the numbers of sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """How many times as fast one subject is to be as another: by number of sequences, and `prefill` for all of them."""

    ours: str
    theirs: str
    decode: Mapping[int, float]
    prefill: float = 0.0


SUBJECTS = (
    Subject(name="firstlight Q8_0", engine="firstlight", model="q8_0.gguf"),
    Subject(name="firstlight int8", engine="firstlight", model="bfloat16", options=("--quantization", "int8")),
    Subject(name="llama.cpp Q8_0", engine="llamacpp", model="q8_0.gguf"),
    Subject(name="firstlight Q4_0", engine="firstlight", model="q4_0.gguf"),
    Subject(name="firstlight int4", engine="firstlight", model="bfloat16", options=("--quantization", "int4")),
    Subject(name="llama.cpp Q4_0", engine="llamacpp", model="q4_0.gguf"),
    Subject(name="firstlight Q4_1", engine="firstlight", model="q4_1.gguf"),
    Subject(name="llama.cpp Q4_1", engine="llamacpp", model="q4_1.gguf"),
    Subject(name="firstlight float32", engine="firstlight", model="float32"),
    Subject(name="firstlight bfloat16", engine="firstlight", model="bfloat16"),
    Subject(name="vLLM float32", engine="vllm", model="float32", options=("float32",)),
    Subject(name="transformers float32", engine="transformers", model="float32", options=("float32",)),
)
EIGHT, FOUR, FLOAT = {1: 1.5, 4: 2.0, 16: 2.5, 64: 2.5}, {1: 1.5, 4: 1.75, 16: 2.0, 64: 2.0}, {1: 3.0, 16: 3.0, 64: 2.5}
BARS = (
    Bar(ours="firstlight Q8_0", theirs="llama.cpp Q8_0", decode=EIGHT, prefill=1.5),
    Bar(ours="firstlight int8", theirs="llama.cpp Q8_0", decode=EIGHT, prefill=1.5),
    Bar(ours="firstlight Q4_0", theirs="llama.cpp Q4_0", decode=FOUR, prefill=1.5),
    Bar(ours="firstlight int4", theirs="llama.cpp Q4_0", decode=FOUR, prefill=1.5),
    Bar(ours="firstlight Q4_1", theirs="llama.cpp Q4_1", decode={1: 2.0, 4: 3.0, 16: 3.0, 64: 3.0}),
    Bar(ours="firstlight float32", theirs="vLLM float32", decode=FLOAT),
    Bar(ours="firstlight float32", theirs="transformers float32", decode=FLOAT),
    Bar(ours="firstlight bfloat16", theirs="vLLM float32", decode=FLOAT),
    Bar(ours="firstlight bfloat16", theirs="transformers float32", decode=FLOAT),
)


@dataclass(slots=True)
class Results:
    """What the rounds gave."""

    conditions: Row
    rows: list[Row] = field(default_factory=list)
    """JSON lines of the engines with `subject`, `round` and `busy_percent` added."""
    failures: list[Row] = field(default_factory=list)
    """`subject`, `round` and `reason` of runs that failed. What they printed before is in `rows`."""

    def median(self, subject: str, key: str, sequences: int | None = None) -> float | None:
        """Over the rounds; None where the subject did not run."""
        values = [
            row[key]
            for row in self.rows
            if row["subject"] == subject and (sequences is None or row["sequences"] == sequences)
        ]
        return statistics.median(values) if values else None

    def write(self, path: Path) -> None:
        """In one go: the file is never a part of one."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self), indent=1))
        part.replace(path)


# Running


def _command(subject: Subject, arguments: argparse.Namespace) -> list[str]:
    model = str(arguments.models / subject.model)
    counts, threads = ",".join(map(str, arguments.sequences)), str(arguments.threads)
    if subject.engine == "firstlight":
        sizes = ["--prompt", str(arguments.prompt), "--decode", str(arguments.decode), "--sequences", counts]
        words = [model, *sizes, "--runs", "1", "--threads", threads, "--json", *subject.options]
        return [sys.executable, "-m", "server.engine_bench", *words]
    sizes = [str(arguments.prompt), str(arguments.decode), counts]
    script = str(HERE / f"peer_{subject.engine}.py")
    return [vars(arguments)[subject.engine], script, model, *sizes, *subject.options, threads]


def _run(command: Sequence[str]) -> tuple[list[Row], str]:
    """The JSON lines that a command prints, and why it failed: "" where it did not."""
    print(" ".join(command), file=sys.stderr, flush=True)
    reason = ""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=RUN_SECONDS)
        output = done.stdout
        if done.returncode:
            errors = done.stderr.decode(errors="replace").strip()
            print(errors[-2000:], file=sys.stderr, flush=True)
            reason = f"status {done.returncode}: {errors.splitlines()[-1] if errors else 'no message'}"
    except subprocess.TimeoutExpired as late:
        output, reason = late.stdout or b"", f"not done after {RUN_SECONDS} s"
    if reason:
        print(f"failed: {reason}", file=sys.stderr, flush=True)
    return [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")], reason


def _busy_percent() -> float:
    """Of the processors, by others, in the second before a run."""
    percent = psutil.cpu_percent(interval=1.0)
    if percent > BUSY_PERCENT:
        print(f"warning: other programs take {percent:.0f} % of the processors", file=sys.stderr, flush=True)
    return percent


def measure(arguments: argparse.Namespace) -> Results:
    """All rounds."""
    asked = {name: vars(arguments)[name] for name in ("threads", "prompt", "decode", "sequences", "rounds")}
    results = Results(surroundings() | asked | {"left_out": _left_out(arguments)})
    for number in range(arguments.rounds):
        for name, command in _jobs(arguments):
            run, busy = {"subject": name, "round": number}, {"busy_percent": _busy_percent()}
            rows, reason = _run(command)
            results.rows += [run | busy | row for row in rows]
            if reason:
                results.failures.append(run | {"reason": reason})
            if arguments.output is not None:
                results.write(arguments.output)
    return results


def _left_out(arguments: argparse.Namespace) -> list[str]:
    return [peer for peer in PEERS if vars(arguments)[peer] is None]


def _jobs(arguments: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Name and command of each run of a round."""
    jobs = [("machine", [sys.executable, str(HERE / "machine_limits.py"), str(arguments.threads)])]
    for subject in SUBJECTS:
        wanted = not arguments.only or any(word in subject.name for word in arguments.only)
        if wanted and subject.engine not in _left_out(arguments):
            jobs.append((subject.name, _command(subject, arguments)))
    return jobs


# Tables


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def rates_table(results: Results) -> str:
    """Tokens a second of every subject that ran, and where it failed."""
    failed = {failure["subject"] for failure in results.failures}
    counts = results.conditions["sequences"]
    header = ["", *(f"prefill, {count}" for count in counts), *(f"decode, {count}" for count in counts)]
    rows = []
    for subject in SUBJECTS:
        rates = [
            results.median(subject.name, key, count) for key in ("prefill_tok_s", "decode_tok_s") for count in counts
        ]
        missing = "failed" if subject.name in failed else ""
        if any(rates) or missing:
            rows.append([subject.name, *(missing if rate is None else _number(rate) for rate in rates)])
    return _table(header, rows)


def _ratio(results: Results, bar: Bar, key: str, count: int, wanted: float) -> str:
    ours, theirs = results.median(bar.ours, key, count), results.median(bar.theirs, key, count)
    if ours is None or theirs is None:
        return ""
    mark = f" (bar {wanted:g}{'' if ours >= wanted * theirs else ': **missed**'})" if wanted else ""
    return f"{ours / theirs:.2f}{mark}"


def ratios_table(results: Results) -> str:
    """firstlight over peer, with the bar that each ratio is held against."""
    counts = results.conditions["sequences"]
    header = ["ratio", *(f"prefill, {count}" for count in counts), *(f"decode, {count}" for count in counts)]
    rows = []
    for bar in BARS:
        prefill = [_ratio(results, bar, "prefill_tok_s", count, bar.prefill) for count in counts]
        decode = [_ratio(results, bar, "decode_tok_s", count, bar.decode.get(count, 0.0)) for count in counts]
        if any(prefill + decode):
            rows.append([f"{bar.ours} / {bar.theirs}", *prefill, *decode])
    return _table(header, rows)


def limits_table(results: Results) -> str:
    """firstlight against the machine: decode of one sequence over what reading the weights allows, and the best prefill
    over the rate of a large float32 product."""
    read, product = results.median("machine", "read_gb_s"), results.median("machine", "fp32_gflop_s")
    rows = []
    for subject in SUBJECTS:
        decode = results.median(subject.name, "decode_tok_s", 1)
        size = results.median(subject.name, "weight_bytes") if subject.engine == "firstlight" else None
        if decode is None or size is None or read is None or product is None:
            continue
        prefills = [results.median(subject.name, "prefill_tok_s", n) or 0.0 for n in results.conditions["sequences"]]
        gbytes, gflops = decode * size / 1e9, max(prefills) * LAYER_FLOP / 1e9
        reading = f"{gbytes:.1f} GB/s, {gbytes / read:.0%}"
        rows.append([subject.name, f"{size / 2**20:.0f}", reading, f"{gflops:.0f} GFLOP/s, {gflops / product:.0%}"])
    header = ["", "weights, MiB", f"decode, 1: of {_number(read)} GB/s", f"prefill: of {_number(product)} GFLOP/s"]
    return _table(header, rows)


def report(results: Results) -> str:
    """All tables and the conditions, as Markdown."""
    versions = {row["engine"]: row["version"] for row in results.rows if "version" in row}
    features = {row["features"] for row in results.rows if "features" in row}
    busy = max((row["busy_percent"] for row in results.rows), default=0.0)
    failures = [f"{failure['subject']}, round {failure['round']}: {failure['reason']}" for failure in results.failures]
    found = {"versions": versions, "llama.cpp": sorted(features), "others_busy_percent": busy, "failures": failures}
    facts = results.conditions | found
    conditions = "\n".join(f"* {key}: {value}" for key, value in facts.items())
    tables = (rates_table(results), ratios_table(results), limits_table(results), conditions)
    return "\n\n".join(tables)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(sys.modules[__name__].__doc__ or "").splitlines()[0])
    parser.add_argument("models", type=Path, nargs="?", help="folder with the model in all its forms")
    for peer in PEERS:
        parser.add_argument(f"--{peer}", metavar="PYTHON", help=f"Python that has {peer} (default: left out)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--decode", type=int, default=64, help="tokens")
    parser.add_argument("--sequences", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--only", action="append", metavar="WORD", help="subjects whose name has this; may repeat")
    file = parser.add_mutually_exclusive_group()
    file.add_argument("--output", type=Path, metavar="FILE", help="write all rows as JSON, after each engine's run")
    file.add_argument("--from", dest="source", type=Path, metavar="FILE", help="print the tables of that file")
    return parser


def main() -> None:
    """Measure, or read what was measured; print the report."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.source is not None:
        results = Results(**json.loads(arguments.source.read_text()))
    elif arguments.models is None:
        parser.error("name the folder of the models")
    else:
        results = measure(arguments)
    print(report(results))


if __name__ == "__main__":
    main()
