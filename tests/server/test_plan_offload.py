"""`firstlight plan` with layers in host memory: what is taken where, how fast it can be, and which way is named where
nothing fits on a device alone."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from server.plan.devices import CARDS
from tests.server.test_plan import LLAMA, run

NUM_LAYERS, HIDDEN, INNER = 8, 64, 96
MODEL = LLAMA | {"num_hidden_layers": NUM_LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER}
LAYER = 2 * (HIDDEN * 16 * (2 * 8 + 2 * 4) + 3 * HIDDEN * INNER)
"""Bytes of a layer's matrices in bfloat16, with 8 heads and 4 key/value heads of 16 channels."""
FLOATS = ("--quantization", "none", "--kv-cache-dtype", "auto")
CONTEXT = 64


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def plan(capsys: pytest.CaptureFixture[str], config: Path, *words: object) -> tuple[int | str | None, dict[str, Any]]:
    code, out, err = run(capsys, config, "--devices", "H100", "--context", CONTEXT, *words, "--json")
    assert not err
    return code, json.loads(out)


def test_the_device_has_less_and_the_host_the_rest(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, plain = plan(capsys, config, *FLOATS)
    code, offloaded = plan(capsys, config, *FLOATS, "--offload-weights", 4 * LAYER + 1)
    assert code == 0 and f"--offload-weights {4 * LAYER + 1} " in offloaded["recommended"]
    (before,), (after,) = plain["candidates"], offloaded["candidates"]
    (rank,) = after["ranks"]
    assert rank["host_memory"] == 5 * LAYER and before["ranks"][0]["host_memory"] == 0
    assert rank["weights"] == before["ranks"][0]["weights"] - 3 * LAYER
    parts = after["fullest_rank"]["parts"]
    assert (parts.pop("in host memory"), parts.pop("layer buffers")) == (-5 * LAYER, 2 * LAYER)
    assert parts == before["fullest_rank"]["parts"]
    _, out, _ = run(capsys, config, "--devices", "H100", "--context", CONTEXT, "--offload-weights", 5 * LAYER)
    assert re.search(r"  in host memory +-\d+\.\d KiB  5 of 8 layers\n  layer buffers +\d+\.\d KiB\n", out)


@pytest.mark.parametrize(("num_layers", "copied"), [(3, 2), (4, 4), (8, 8)])
def test_a_step_waits_for_its_layers(
    num_layers: int, copied: int, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*FLOATS, "--offload-weights", num_layers * LAYER)
    (way,) = plan(capsys, config, *words, "--host-link", "1MB/s")[1]["candidates"]
    assert way["decode_tokens_per_second"] == pytest.approx(1e6 / (copied * LAYER))
    (known,) = plan(capsys, config, *words)[1]["candidates"]
    assert known["decode_tokens_per_second"] == pytest.approx(64e9 / (copied * LAYER))
    assert all(card.speed.host_link for card in CARDS.values())


def test_rates_need_the_link(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (config, "--devices", "80GiB", "--context", CONTEXT, "--bandwidth", "1TB/s", "--flops", "1TFLOP/s")
    _, out, _ = run(capsys, *words, "--offload-weights", 3 * LAYER)
    assert "Rates with --offload-weights need --host-link, or the name of a card." in out
    _, out, _ = run(capsys, *words)
    assert "Rates are upper bounds" in out


def test_the_way_that_fits_is_named_where_nothing_does(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It leaves no layer more there than it must, and serve accepts it."""
    _, ample = plan(capsys, config, *FLOATS)
    budget = sum(ample["candidates"][0]["fullest_rank"]["parts"].values()) - LAYER - 1
    code, found = plan(capsys, config, *FLOATS, "--memory-budget", budget)
    assert code == 1 and found["recommended"] is None and not found["candidates"][0]["fits"]
    assert f" --offload-weights {4 * LAYER} " in found["with_offload"]
    words = (config, "--devices", "H100", "--context", CONTEXT, *FLOATS, "--memory-budget", budget)
    code, out, _ = run(capsys, *words)
    lines = out.splitlines()
    assert lines[3].startswith("Nothing fits. Closest is one rank, weights none, KV auto: needs ")
    assert re.fullmatch(
        r"one rank, weights none, KV auto fits with 4 of 8 layers \(\d+\.\d KiB\) in host memory, and writes at most "
        r"\d+\.\d+ k tokens/s:",
        lines[4],
    )
    assert lines[5].startswith(f"  firstlight serve {shlex.quote(str(config.parent))} --device cuda --memory-budget")
    code, out, _ = run(capsys, *words, "--offload-weights", 4 * LAYER)
    assert code == 0 and out.splitlines()[3] == lines[5]
    assert run(capsys, *words, "--offload-weights", 3 * LAYER)[0] == 1


def test_nothing_is_named_that_does_not_fit(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, config, "--memory-budget", 1000)[1]["with_offload"] is None
    assert plan(capsys, config)[1]["with_offload"] is None
    code, out, _ = run(capsys, config, "--devices", "cpu", "--memory-budget", "1MiB")
    assert code == 1 and "in host memory" not in out


def test_what_cannot_be_left_there_has_a_reason(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (config, "--context", CONTEXT, *FLOATS, "--offload-weights")
    code, out, _ = run(capsys, *words, 9 * LAYER, "--devices", "H100")
    assert code == 1 and f"set it to at most {8 * LAYER}, which is all layers" in out
    code, out, _ = run(capsys, *words, 3 * LAYER, "--devices", "cpu")
    assert code == 1 and "that of the CPU is the host's: leave it out" in out
    code, _, err = run(capsys, *words, "much", "--devices", "H100")
    assert code == 2 and "--offload-weights: 'much' is not a size" in err
