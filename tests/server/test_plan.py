"""`firstlight plan`: what is typed means what it says, the best way comes first, and what cannot be has a reason."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from model_runtime.config import RuntimeConfig
from model_runtime.executor import load_executor
from scheduler.config import SchedulerConfig
from server.cli import main
from server.options import OptionError
from server.plan.candidates import Split, factors
from server.plan.devices import GIB, Devices, Speed, parse_devices, parse_rate
from server.plan.units import count, size
from tests.apart import write_apart
from tests.checkpoints import SMALL, make_checkpoint
from tests.model_runtime import kimi_k3
from tests.vlm import make_vlm

LLAMA = {
    **SMALL,
    "model_type": "llama",
    "dtype": "bfloat16",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["plan", *map(str, words)])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def devices(text: str, nodes: int = 1) -> Devices:
    return parse_devices(text, nodes, Speed(), None)


def test_device_strings() -> None:
    eight = devices("8x96GiB", 4)
    assert (eight.kind, eight.count, eight.total, eight.memory) == ("cuda", 8, 32, 96 * GIB)
    assert eight.budget(8, 0) == 96 * GIB * 9 // 10
    card = devices("h100")
    assert (card.count, card.memory, card.speed.bandwidth) == (1, 79 * GIB, 3.35e12)
    ranks = devices("2xcpu:8GiB")
    assert (ranks.kind, ranks.count, ranks.budget(2, 0), ranks.budget(2, 3 * GIB)) == ("cpu", 2, 2 * GIB, 3 * GIB // 2)
    assert devices("cpu").memory > 0
    given = parse_devices("A100-80GB", 1, Speed(bandwidth=1e12), None)
    assert (given.speed.bandwidth, given.speed.flops) == (1e12, 312e12)


@pytest.mark.parametrize("text", ["", "x", "8x", "8 x lots", "cpu:", "cpu:much", "96GiBs", "8x96GiB,4x80GiB"])
def test_other_device_strings_are_explained(text: str) -> None:
    with pytest.raises(OptionError, match=r"not of the form 8x96GiB .* 4xH100 .*A100-80GB.* 2xcpu"):
        devices(text)


@pytest.mark.parametrize(("text", "nodes"), [("0x96GiB", 1), ("4097x96GiB", 1), ("2048x96GiB", 3)])
def test_devices_are_counted(text: str, nodes: int) -> None:
    with pytest.raises(OptionError, match="from 1 to 4096 can be planned for"):
        devices(text, nodes)


def test_rates() -> None:
    assert [parse_rate(text, "B/s") for text in ("3.35TB/s", "400 gb/s", "50G")] == [3.35e12, 4e11, 5e10]
    assert parse_rate("989TFLOP/s", "FLOP/s") == 989e12
    for text in ("fast", "0", "3.35TB/s"):
        with pytest.raises(ValueError, match="is not a rate"):
            parse_rate(text, "FLOP/s")


def test_numbers_for_people() -> None:
    assert [size(number) for number in (10, 2**20, 1536 * 2**30)] == ["10 B", "1.0 MiB", "1.5 TiB"]
    assert [count(number) for number in (12, 8.03e9, 671e9)] == ["12", "8.03 G", "671.0 G"]


def test_every_product() -> None:
    assert list(factors(4, 2)) == [(4, 1), (2, 2), (1, 4)]
    assert len(list(factors(8, 4))) == 20
    assert str(Split(tensor=4, context=1, stages=2, replicas=1, whole_experts=True)) == "TP 4 PP 2 EP"


def test_the_command_line_comes_first_and_lines_are_short(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (config, "--devices", "4xcpu:2GiB", "--concurrency", 3, "--context", 100)
    code, out, _ = run(capsys, *words)
    lines = out.splitlines()
    assert code == 0
    assert lines[3] == f"  firstlight serve {shlex.quote(str(config.parent))} --max-model-len 100 --max-num-seqs 3"
    assert max(len(line) for line in lines if "serve" not in line) <= 120
    table = lines[next(index for index, line in enumerate(lines) if line.startswith("layout")) :]
    assert [line.split("  ")[0] for line in table[1:7]] == [
        "one rank",
        "DP 4",
        "TP 2 DP 2",
        "CP 2 DP 2",
        "PP 2 DP 2",
        "TP 4",
    ]
    assert table[11].split() == ["PP", "4", "none", "auto", "cannot", "[1]"]
    _, everything, _ = run(capsys, *words, "--all")
    assert len(everything.splitlines()) > len(lines)


def test_json_has_every_number(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, config, "--devices", "2xcpu:1GiB", "--context", 64, "--concurrency", 2, "--json")
    plan = json.loads(out)
    assert code == 0
    found = {
        (way["tensor_parallel_size"], way["quantization"], way["kv_cache_dtype"]): way
        for way in plan["candidates"]
        if way["data_parallel_size"] == way["pipeline_parallel_size"] == way["context_parallel_size"] == 1
    }
    one, two = found[1, "none", "auto"], found[2, "none", "auto"]
    heads, hidden, inner, layers, vocabulary = 8, 64, 96, 3, 259
    matrices = hidden * 16 * (2 * heads + 2 * 4) + 3 * hidden * inner
    assert plan["parameters"] == 2 * vocabulary * hidden + layers * (matrices + 2 * hidden) + hidden
    parts = one["fullest_rank"]["parts"]
    assert parts["attention"] == 2 * layers * hidden * 16 * (2 * heads + 2 * 4)
    assert parts["keys and values"] == 2 * (64 // 16) * 16 * 2 * layers * 4 * 16 * 4
    assert two["ranks"][1]["kv"] == parts["keys and values"] // 2
    assert two["budget"] == GIB // 4
    assert plan["recommended"].startswith("firstlight serve")


def test_rates_are_bounded_by_what_a_step_reads(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (config, "--devices", "cpu:1GiB", "--context", 64, "--quantization", "none", "--kv-cache-dtype", "auto")
    _, out, _ = run(capsys, *words, "--bandwidth", "1GB/s", "--flops", "1PFLOP/s", "--json")
    (way,) = json.loads(out)["candidates"]
    parts = way["fullest_rank"]["parts"]
    read = sum(parts[part] for part in ("attention", "mlp", "norms", "head")) + parts["keys and values"] / 2
    assert way["decode_tokens_per_second"] == pytest.approx(1e9 / read)


def test_attention_over_latents_is_in_the_layers_that_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With half of 64 more keys, each token of a tiny Kimi K3 meets 32 more rows of latents, twice in each head."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kimi_k3.CONFIG))
    seconds = []
    for context in (64, 128):
        words = (path, "--devices", "cpu:1GiB", "--context", context, "--quantization", "none")
        _, out, _ = run(
            capsys, *words, "--kv-cache-dtype", "auto", "--bandwidth", "1PB/s", "--flops", "1GFLOP/s", "--json"
        )
        (way,) = json.loads(out)["candidates"]
        seconds.append(1 / way["decode_tokens_per_second"])
    row, latent = kimi_k3.LATENT_RANK + kimi_k3.SHARED, kimi_k3.LATENT_RANK
    products = len(kimi_k3.FULL) * kimi_k3.HEADS * (row + latent) * 32
    assert seconds[1] - seconds[0] == pytest.approx(2 * products / 1e9)


def test_what_does_not_fit_has_numbers(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, config, "--devices", "cpu", "--memory-budget", "1MiB")
    assert code == 1
    assert "Nothing fits. Closest is one rank, weights int4-g128, KV int8: needs" in out
    assert "for one sequence, has 1.0 MiB." in out
    fixed = (config, "--quantization", "none", "--kv-cache-dtype", "auto", "--concurrency", 40, "--memory-budget")
    _, out, _ = run(capsys, *fixed, "1GiB", "--json")
    parts = json.loads(out)["candidates"][0]["fullest_rank"]["parts"]
    code, out, _ = run(capsys, *fixed, str(sum(parts.values()) - parts["keys and values"] // 40))
    assert code == 1
    assert "Not all sequences fit at full length. Closest is one rank, weights none, KV auto: holds 39 of 40" in out


def test_rows_of_8_bits_are_planned_beside_integers_of_8_bits_alone(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (config, "--devices", "cpu:1GiB", "--context", 64, "--kv-cache-dtype", "auto", "--activation-dtype", "int8")
    _, out, _ = run(capsys, *asked, "--json")
    found = json.loads(out)
    problems = {way["quantization"]: way["problem"] for way in found["candidates"]}
    assert problems["int8"] == ""
    assert "all matrices of this model are floats" in problems["none"]
    assert "is q4_0: set activation_dtype to auto" in problems["int4"]
    assert "--quantization int8" in found["recommended"] and "--activation-dtype int8" in found["recommended"]
    code, _, _ = run(capsys, *asked, "--quantization", "none")
    assert code == 1


def test_what_serve_refuses_is_said(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, config, "--devices", "2x1GiB")
    assert "firstlight serve" in out and "--device cuda" in out
    assert "fits, refused [1]" in out
    assert "] several ranks, as by tensor_parallel_size, are only for --device cpu" in out
    _, out, _ = run(capsys, config, "--devices", "16xcpu:8GiB", "--all")
    assert "8 query heads cannot be divided among 16 ranks: set tensor_parallel_size to less" in out
    assert "3 layers cannot be divided among 16 stages: set pipeline_parallel_size to less" in out


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"model_type": "gpt5"}, (), "model_type 'gpt5' is not supported; supported are cohere"),
        ({"dtype": "int3"}, (), "dtype 'int3' is not supported; float32, float16, bfloat16 are"),
        ({"num_hidden_layers": 10**9}, (), "num_hidden_layers must be at most 4096, not 1000000000"),
        ({"num_attention_heads": 2**17}, (), "num_attention_heads must be at most 65536"),
        ({"intermediate_size": 10**12}, (), "intermediate_size must be at most 4194304"),
        ({"vocab_size": 10**12}, (), "vocab_size must be at most 16777216"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, (), "num_local_experts must be at most 65536"),
        (
            {"model_type": "mixtral", "num_local_experts": 2**16, "num_hidden_layers": 17},
            (),
            "17 layers of 65536 experts are more than 1048576 experts together",
        ),
        ({}, ("--context", 257), "--context must be from 2 to the 256 positions of the model"),
        ({}, ("--context", 1), "--context must be from 2 to the 256 positions of the model"),
        ({}, ("--concurrency", 0), "--concurrency must be at least 1"),
        ({}, ("--nodes", 0), "--nodes must be at least 1"),
        ({}, ("--bandwidth", "fast"), "--bandwidth: 'fast' is not a rate such as 3.35TB/s"),
        ({}, ("--memory-budget", "some"), "--memory-budget: 'some' is not a size"),
        ({}, ("--max-num-batched-tokens", -1), "--max-num-batched-tokens must be positive"),
        ({}, ("--max-num-batched-tokens", 0), "--max-num-batched-tokens must be positive"),
    ],
)
def test_mistakes_are_explained(
    change: dict[str, object],
    words: tuple[object, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    code, _, err = run(capsys, tmp_path / "config.json", *words)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_serve_makes_the_same_plan(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = 2**18
    if name == "llama":
        make_checkpoint(tmp_path, "llama", {})
    else:
        make_vlm(tmp_path, name)

    def planned(budget: int) -> dict[str, Any]:
        flags = ("--context", 128, "--concurrency", 40, "--memory-budget", budget, "--encoder-cache-bytes", cache)
        _, out, _ = run(capsys, tmp_path, *flags, "--quantization", "none", "--kv-cache-dtype", "auto", "--json")
        (way,) = json.loads(out)["candidates"]
        return dict(way)

    ample = planned(2**28)
    parts = ample["fullest_rank"]["parts"]
    budget = sum(parts.values()) - parts["keys and values"] * 3 // 4
    way = planned(budget)
    runtime = RuntimeConfig(memory_budget=budget, max_model_len=128, encoder_cache_bytes=cache)
    info = load_executor(tmp_path, runtime, SchedulerConfig(max_num_seqs=40), lambda stage, done: None).info
    assert (way["num_blocks"], way["block_tokens"]) == (info.num_blocks, info.block_size)
    assert info.num_blocks == ample["num_blocks"] // 4 == 80
    (rank,) = way["ranks"]
    assert (rank["weights"], rank["kv"], rank["step"]) == (info.weight_bytes, info.kv_bytes, info.step_bytes)
    assert parts.get("encoded images", 0) == info.encoder_cache_bytes == (cache if name == "qwen2_vl" else 0)


def test_an_image_side_apart_is_planned_as_in_one_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, text, images = tmp_path / "whole", tmp_path / "text", tmp_path / "images"
    make_vlm(whole, "llava-siglip")
    write_apart(whole, text, images)
    flags = ("--context", 128, "--memory-budget", 2**28, "--quantization", "none", "--json")
    found = [json.loads(run(capsys, *model, *flags)[1]) for model in ((whole,), (text, "--mmproj", images))]
    assert found[0]["candidates"] == found[1]["candidates"]
    assert found[1]["candidates"][0]["fullest_rank"]["parts"]["encoded images"] > 0
    code, _, error = run(capsys, text / "config.json", "--mmproj", images)
    assert code == 2 and "--mmproj is for a model with weights" in error
