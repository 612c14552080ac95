"""Plans for people, at most 120 characters wide. Called by `command.py`."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from model_runtime.config import RuntimeConfig
from model_runtime.memory.planning import Outline
from scheduler.config import SchedulerConfig
from server.plan.candidates import Asked, Candidate, Fit
from server.plan.choice import nearest, recommended, shortest
from server.plan.devices import Devices
from server.plan.offloading import with_offload
from server.plan.roofline import rates
from server.plan.units import count, size

MAX_ROWS = 16
HEADER = ("layout", "weights as", "KV as", "weights", "KV", "other", "free", "seqs", "prefill/s", "decode/s", "verdict")
LEFT = {"layout", "verdict"}


def as_text(
    name: str, model: Outline, devices: Devices, asked: Asked, found: Sequence[Candidate], *, show_all: bool
) -> str:
    """The command line first, then what its fullest rank takes, then the other ways."""
    lines = [*_about(name, model, devices, asked), ""]
    chosen = recommended(found, devices, asked)
    shown = chosen or nearest(found, devices, asked)
    lines += [*_nothing_fits(shown)] if chosen is None else [f"  {command_line(name, chosen, asked)}"]
    if (offloaded := with_offload(model, devices, asked, found)) is not None:
        lines += _with_offload(name, model, devices, asked, offloaded)
        shown = offloaded
    lines.append("")
    if shown is not None and shown.fit is not None:
        lines += [*_rank(shown, shown.fit), ""]
    rows = list(found) if show_all else shortest(found, devices, asked)
    lines += _table(rows[: None if show_all else MAX_ROWS], devices, asked)
    if not show_all:
        lines.append(f"Each layout in the first precision that fits; all {len(found)} ways: --all")
    if devices.speed.bandwidth is None or devices.speed.flops is None:
        lines.append("Rates need --bandwidth and --flops, or the name of a card.")
    elif asked.runtime.offload_weights and devices.speed.host_link is None:
        lines.append("Rates with --offload-weights need --host-link, or the name of a card.")
    else:
        lines.append("Rates are upper bounds: what must be read, computed and sent, over what the devices can.")
    return "\n".join(lines)


def _about(name: str, model: Outline, devices: Devices, asked: Asked) -> Iterator[str]:
    config = model.opened.config
    where = "no weights are there" if model.opened.is_declared else "headers of the weights are read"
    parameters = f"{count(model.num_parameters)} parameters"
    yield f"{_title(name)}: {model.opened.family}, {parameters}, {config.num_layers} layers; {where}"
    machines = f"{devices.nodes} machines, each {devices.count} x " if devices.nodes > 1 else f"{devices.count} x "
    yield (
        f"{machines}{devices.name} ({size(devices.memory)}{' in all' if devices.kind == 'cpu' else ''}); sequences of "
        f"{asked.runtime.max_model_len} tokens, {asked.concurrency} at a time"
    )


def _title(name: str) -> str:
    """What a path is about: the folder of a config.json says more than its name."""
    path = Path(name).expanduser().absolute()
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")


def command_line(name: str, candidate: Candidate, asked: Asked) -> str:
    """That serves a candidate; options that have their defaults are left out."""
    fit, split = candidate.fit, candidate.split
    assert fit is not None, "a command line of what cannot be"
    options: list[tuple[str, object, object]] = [
        ("device", fit.runtime.device, "cpu"),
        ("nnodes", fit.runtime.nnodes, 1),
        ("tensor-parallel-size", split.tensor, 1),
        ("pipeline-parallel-size", split.stages, 1),
        ("context-parallel-size", split.context, 1),
        ("data-parallel-size", split.replicas, 1),
        ("quantization", candidate.quantization, "none"),
        ("kv-cache-dtype", candidate.kv_type, "auto"),
        ("activation-dtype", asked.runtime.activation_dtype, RuntimeConfig().activation_dtype),
        ("memory-budget", asked.runtime.memory_budget, 0),
        ("offload-weights", fit.runtime.offload_weights, 0),
        ("encoder-cache-bytes", asked.runtime.encoder_cache_bytes, RuntimeConfig().encoder_cache_bytes),
        ("max-model-len", fit.length, None),
        ("max-num-seqs", fit.scheduler.max_num_seqs, None),
        (
            "max-num-batched-tokens",
            fit.scheduler.max_num_batched_tokens,
            SchedulerConfig().max_num_batched_tokens,
        ),
    ]
    flags = [f"--{option} {value}" for option, value, default in options if value != default]
    flags += ["--enable-expert-parallel"] if split.whole_experts else []
    served = str(Path(name).parent) if name.endswith(".json") else name
    return " ".join(["firstlight serve", shlex.quote(served), *flags])


def _nothing_fits(closest: Candidate | None) -> Iterator[str]:
    if closest is None:
        yield "No layout can divide this model among these devices."
        return
    way = f"{closest.split}, weights {closest.quantization}, KV {closest.kv_type}"
    if closest.refused and closest.fits:
        yield f"What fits, this version refuses. {way} fits:"
        yield f"{closest.refused}."
    elif closest.fit is not None and closest.fit.pool is not None:
        yield f"Not all sequences fit at full length. Closest is {way}: {closest.problem}."
        yield "Lower --context or --concurrency; serve would start, and let sequences wait."
    else:
        yield f"Nothing fits. Closest is {way}: {closest.problem}."


def _with_offload(name: str, model: Outline, devices: Devices, asked: Asked, candidate: Candidate) -> Iterator[str]:
    """What fits with layers in host memory."""
    fit, speed = candidate.fit, rates(candidate, devices, asked.concurrency)
    assert fit is not None and fit.fullest.offload is not None, "a way without layers in host memory"
    way = f"{candidate.split}, weights {candidate.quantization}, KV {candidate.kv_type}"
    left = f"{len(fit.fullest.offload.layers)} of {model.opened.config.num_layers} layers"
    rate = "" if speed is None else f", and writes at most {count(speed.decode)} tokens/s"
    yield f"{way} fits with {left} ({size(fit.fullest.offload.host_bytes)}) in host memory{rate}:"
    yield f"  {command_line(name, candidate, asked)}"


def parts(fit: Fit) -> dict[str, int]:
    """What the fullest rank takes on its device, by part; less what is in host memory."""
    needs = fit.fullest
    found: dict[str, int] = dict([*needs.weights.parts.items(), *needs.vision.items()])
    if needs.offload is not None:
        found |= {"in host memory": -needs.offload.taken_bytes, "layer buffers": needs.offload.device_bytes}
    found |= {
        "rotations": needs.position_bytes * fit.length,
        "keys and values": fit.kv(needs),
        "largest step": needs.largest_step,
    }
    if needs.score_bytes:
        found["scores"] = needs.score_bytes * fit.length
    if needs.states:
        found["states"] = needs.states
    if needs.images is not None:
        found["encoded images"] = needs.images.cache
    if needs.exchange:
        found["exchange of ranks"] = needs.exchange
    return found


def _rank(candidate: Candidate, fit: Fit) -> Iterator[str]:
    needs, taken = fit.fullest, parts(fit)
    which = "the only rank" if len(fit.ranks) == 1 else f"rank {needs.layout.rank} of {len(fit.ranks)}, the fullest"
    weights = "as stored" if candidate.quantization == "none" else candidate.quantization
    kv = str(needs.kv_type).removeprefix("torch.")
    yield f"{candidate.split}: {which}; weights {weights}, keys and values {kv}"
    for part, bytes_taken in taken.items():
        note = ""
        if part == "keys and values":
            blocks = "room for none" if fit.pool is None else f"{fit.pool.num_blocks} blocks"
            a_token = needs.block_bytes / (needs.block_tokens // needs.layout.context_size)
            note = f"  {blocks} of {needs.block_tokens} tokens, {a_token:.0f} bytes a token"
        if part == "in host memory" and needs.offload is not None:
            note = f"  {len(needs.offload.layers)} of {needs.own.num_layers} layers"
        yield f"  {part:<18}{_signed(bytes_taken):>11}{note}"
    total = sum(taken.values())
    yield f"  {'together':<18}{size(total):>11}  of {size(fit.budget)} that it may take: {_free(fit.budget - total)}"


def _signed(number: int) -> str:
    return size(number) if number >= 0 else f"-{size(-number)}"


def _free(left: int) -> str:
    return f"{size(left)} left" if left >= 0 else f"{size(-left)} too much"


def _table(rows: Sequence[Candidate], devices: Devices, asked: Asked) -> Iterator[str]:
    notes: dict[str, int] = {}
    cells = [HEADER, *(_row(candidate, devices, asked, notes) for candidate in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    for row in cells:
        aligned = (
            text.ljust(width) if name in LEFT else text.rjust(width)
            for text, width, name in zip(row, widths, HEADER, strict=True)
        )
        yield "  ".join(aligned).rstrip()
    yield from (f"  [{number}] {text}" for text, number in notes.items())


def _row(candidate: Candidate, devices: Devices, asked: Asked, notes: dict[str, int]) -> tuple[str, ...]:
    head = (str(candidate.split), candidate.quantization, candidate.kv_type)
    fit = candidate.fit
    if fit is None:
        return (*head, *("",) * 7, f"cannot {_note(candidate.problem, notes)}")
    needs, speed = fit.fullest, rates(candidate, devices, asked.concurrency)
    left = fit.budget - fit.without_kv(needs) - fit.kv(needs)
    return (
        *head,
        size(needs.weight_bytes),
        size(fit.kv(needs)),
        size(fit.without_kv(needs) - needs.weight_bytes),
        _signed(left),
        str(fit.sequences * candidate.split.replicas),
        "" if speed is None else count(speed.prefill),
        "" if speed is None else count(speed.decode),
        _verdict(candidate, fit, notes),
    )


def _verdict(candidate: Candidate, fit: Fit, notes: dict[str, int]) -> str:
    if fit.pool is None:
        return "too large"
    found = "fits" if candidate.fits else f"{fit.sequences} of {fit.scheduler.max_num_seqs}"
    return f"{found}, refused {_note(candidate.refused, notes)}" if candidate.refused else found


def _note(text: str, notes: dict[str, int]) -> str:
    return f"[{notes.setdefault(text, len(notes) + 1)}]"


def as_json(
    name: str, model: Outline, devices: Devices, asked: Asked, found: Sequence[Candidate]
) -> Mapping[str, object]:
    """All of it, sizes in bytes and times in seconds."""
    chosen, offloaded = recommended(found, devices, asked), with_offload(model, devices, asked, found)
    return {
        "model": name,
        "family": model.opened.family,
        "parameters": model.num_parameters,
        "devices": {"kind": devices.kind, "count": devices.count, "nodes": devices.nodes, "memory": devices.memory},
        "context": asked.runtime.max_model_len,
        "concurrency": asked.concurrency,
        "recommended": None if chosen is None else command_line(name, chosen, asked),
        "with_offload": None if offloaded is None else command_line(name, offloaded, asked),
        "candidates": [_candidate_json(candidate, devices, asked) for candidate in found],
    }


def _candidate_json(candidate: Candidate, devices: Devices, asked: Asked) -> Mapping[str, object]:
    split, fit, speed = candidate.split, candidate.fit, rates(candidate, devices, asked.concurrency)
    common: dict[str, object] = {
        "tensor_parallel_size": split.tensor,
        "pipeline_parallel_size": split.stages,
        "context_parallel_size": split.context,
        "data_parallel_size": split.replicas,
        "enable_expert_parallel": split.whole_experts,
        "quantization": candidate.quantization,
        "kv_cache_dtype": candidate.kv_type,
        "fits": candidate.fits,
        "problem": candidate.problem,
        "refused": candidate.refused,
    }
    if fit is None:
        return common
    return common | {
        "budget": fit.budget,
        "sequences": fit.sequences * split.replicas,
        "num_blocks": 0 if fit.pool is None else fit.pool.num_blocks,
        "block_tokens": fit.fullest.block_tokens,
        "fullest_rank": {"rank": fit.fullest.layout.rank, "parts": parts(fit)},
        "ranks": [
            {
                "rank": needs.layout.rank,
                "weights": needs.weight_bytes,
                "host_memory": 0 if needs.offload is None else needs.offload.host_bytes,
                "kv": fit.kv(needs),
                "step": needs.largest_step,
            }
            for needs in fit.ranks
        ],
        "prefill_tokens_per_second": None if speed is None else speed.prefill,
        "decode_tokens_per_second": None if speed is None else speed.decode,
        "seconds_per_token": None if speed is None else speed.token_seconds,
    }
