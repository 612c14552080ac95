"""The long context of `firstlight validate`: what its figures come to, and the process that finds them."""

from dataclasses import replace
from pathlib import Path

import pytest

from model_runtime.config import RuntimeConfig
from scheduler.config import SchedulerConfig
from server.config import ServeConfig
from server.validate.context import context_checks, paged_bytes, planned_bytes, plots
from server.validate.context_found import ContextFound, ContextWanted, Difference, Moment
from server.validate.context_process import compute
from tests.checkpoints import make_checkpoint
from tests.family_cases import make_random_model

MIB = 2**20
SAME = Difference(logits=0.0, cache=0.0, position=-1, rows=9)
FOUND = ContextFound(
    tokens=4096,
    chunk=256,
    room=9000,
    is_exact=True,
    is_rounded=False,
    base_bytes=100 * MIB,
    block_bytes=MIB,
    block_size=16,
    num_pools=4,
    page_bytes=2 * MIB,
    text_blocks=256,
    step_bytes=10 * MIB,
    moments=tuple(Moment(tokens=at, seconds=at / 100, num_bytes=(105 + at // 16) * MIB) for at in (1024, 2048, 4096)),
    alone=SAME,
    other_chunks=SAME,
    reference=Difference(logits=2e-5, cache=1e-6, position=7, rows=8),
)


def outcomes(found: ContextFound) -> dict[str, str]:
    return {check.name: check.outcome for check in context_checks(found)}


def test_figures_as_they_should_be() -> None:
    assert planned_bytes(FOUND, 4090) == (100 + 256) * MIB
    assert paged_bytes(FOUND, 4090) == (100 + 256) * MIB
    assert paged_bytes(FOUND, 17) == (100 + 4 * 2) * MIB  # a page of each of four tensors
    assert set(outcomes(FOUND).values()) == {"passed"} and len(outcomes(FOUND)) == 4
    memory, speed = plots(FOUND)
    assert memory.series[0].points == [(1024, 169.0), (2048, 233.0), (4096, 361.0)]
    assert memory.series[1].points == [(1024, 164.0), (2048, 228.0), (4096, 356.0)]
    assert [round(rate, 6) for _, rate in speed.series[0].points] == [100.0, 100.0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"block_bytes": MIB // 2}, "memory is on the planned line"),  # half of what it takes was planned
        ({"block_bytes": 2 * MIB}, "memory is on the planned line"),
        ({"alone": replace(SAME, logits=1e-7, position=3)}, "rows of chunks and rows by themselves"),
        ({"other_chunks": replace(SAME, cache=1e-7)}, "rows in other chunks and other blocks"),
        ({"reference": replace(SAME, logits=1e-3)}, "rows and plain torch in float64"),
        ({"reference": replace(SAME, cache=float("inf")), "is_rounded": True}, "rows and plain torch in float64"),
    ],
)
def test_what_is_off_fails_alone(change: dict[str, object], name: str) -> None:
    found = outcomes(replace(FOUND, **change))  # type: ignore[arg-type]
    assert [one for one, outcome in found.items() if outcome == "failed"] == [name]


def test_what_is_not_promised_may_differ_a_little() -> None:
    other = replace(FOUND, is_exact=False, alone=replace(SAME, logits=1e-4), reference=None, why_no_reference="no room")
    assert outcomes(other)["rows of chunks and rows by themselves"] == "passed"
    assert outcomes(other)["rows and plain torch in float64"] == "skipped"
    rounded = replace(FOUND, is_rounded=True, reference=replace(SAME, logits=1e-3))
    assert outcomes(rounded)["rows and plain torch in float64"] == "passed"


def test_the_process_computes_as_much_as_the_model_takes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mistral", {"max_position_embeddings": 1500, "sliding_window": 300})
    told: list[str] = []
    wanted = ContextWanted(
        model=str(tmp_path), token_ids=tuple(range(3, 90)), tokens=2000, seconds=60, other_chunks=600, reference_rows=5
    )
    config = ServeConfig(runtime=RuntimeConfig(memory_budget=256 * MIB))
    found = compute(config, wanted, lambda fraction, what: told.append(what))
    assert (found.tokens, found.moments[-1].tokens, found.chunk, found.is_exact) == (1500, 1500, 256, True)
    assert found.block_bytes == 2 * 3 * 16 * 2 * 16 * 4  # key and value, layers, tokens, heads, channels, bytes
    assert found.reference is not None and found.reference.rows == 5 and found.alone.rows > 12
    assert set(outcomes(found).values()) == {"passed"}
    assert "512 tokens" in told


def test_plain_torch_has_the_rotations_of_the_product(tmp_path: Path) -> None:
    """LongRoPE (seed 0: factors for texts above 256 tokens) follows what may be served, not the text at hand."""
    make_random_model(tmp_path, "phi3", 0, {"max_position_embeddings": 512})
    wanted = ContextWanted(
        model=str(tmp_path), token_ids=tuple(range(3, 90)), tokens=120, seconds=60, other_chunks=60, reference_rows=3
    )
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=32)
    config = ServeConfig(runtime=RuntimeConfig(memory_budget=64 * MIB), scheduler=scheduler)
    found = outcomes(compute(config, wanted, lambda fraction, what: None))
    assert found["rows and plain torch in float64"] == "passed"
