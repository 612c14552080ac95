"""Options come from the command line, the environment and a file, in that order, and nothing unknown passes."""

import argparse
import re
from pathlib import Path

import pytest

from scheduler.config import SpeculativeConfig
from server.config import ServeConfig, add_arguments, from_json, resolve, to_json
from server.options import OptionError, parse_bytes, spell_bytes


def _resolve(arguments: list[str], environment: dict[str, str] | None = None) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return resolve(parser.parse_args(arguments), environment or {})


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 3\nport: 1111\nblock_size: 8\nmodel: somewhere\n")
    environment = {"FIRSTLIGHT_PORT": "2222", "FIRSTLIGHT_BLOCK_SIZE": "32", "FIRSTLIGHT_CONFIG": str(file)}
    config = _resolve(["--block-size", "64"], environment)
    assert (config.scheduler.max_num_seqs, config.process.port, config.scheduler.block_size) == (3, 2222, 64)
    assert config.model == "somewhere"
    assert _resolve([], environment | {"FIRSTLIGHT_MODEL": "other"}).model == "other"
    assert _resolve(["mine"], environment | {"FIRSTLIGHT_MODEL": "other"}).model == "mine"


def test_kinds_of_values() -> None:
    config = _resolve(
        ["m", "--api-key", "a,b", "--api-key", "c", "--memory-budget", "1.5GiB", "--no-enable-prefix-caching"]
    )
    assert config.gateway.api_key == ("a", "b", "c")
    assert config.runtime.memory_budget == 3 * 2**29
    assert config.scheduler.enable_prefix_caching is False
    assert _resolve([], {"FIRSTLIGHT_ENABLE_PREFIX_CACHING": "off"}).scheduler.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ('{"image": 4}', 4),
        ("image=4", 4),
        ('{"image": 0, "video": 0}', 0),
        ("image=7,audio=0", 7),
        (' {"image": "3"}', 3),
    ],
)
def test_images_of_a_prompt_are_limited_in_the_spelling_of_vllm(text: str, images: int, tmp_path: Path) -> None:
    assert _resolve(["--limit-mm-per-prompt", text]).images.limit_mm_per_prompt == images
    assert _resolve([], {"FIRSTLIGHT_LIMIT_MM_PER_PROMPT": text}).images.limit_mm_per_prompt == images
    file = tmp_path / "serve.yaml"
    file.write_text(f"limit-mm-per-prompt: '{text}'\n")
    assert _resolve(["--config", str(file)]).images.limit_mm_per_prompt == images


NGRAM = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}'


def test_speculation_is_configured_in_the_spelling_of_vllm(tmp_path: Path) -> None:
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=8, prompt_lookup_max=4)
    config = _resolve(["--speculative-config", NGRAM])
    assert config.scheduler.speculative_config == expected
    assert from_json(to_json(config)) == config
    assert _resolve([], {"FIRSTLIGHT_SPECULATIVE_CONFIG": NGRAM}).scheduler.speculative_config == expected
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config: {method: ngram, num_speculative_tokens: 8, prompt_lookup_max: 4}\n")
    assert _resolve(["--config", str(file)]).scheduler.speculative_config == expected
    assert _resolve([]).scheduler.speculative_config is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        (
            '{"method": "medusa", "num_speculative_tokens": 4}',
            "method 'medusa' is not one of ngram, suffix, draft, self, mtp",
        ),
        ('{"num_speculative_tokens": 4}', "method 'None' is not one of ngram, suffix, draft, self, mtp"),
        ('{"method": "ngram"}', "missing required field `num_speculative_tokens`"),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "model": "x"}',
            "model names the draft model, for the method draft",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 4, "draft_model": "x"}', "'draft_model' is unknown"),
        (
            '{"method": "mtp", "num_speculative_tokens": 2, "num_draft_layers": 1}',
            "num_draft_layers is a positive number, for the method self and no other",
        ),
        ('{"method": "ngram", "num_speculative_tokens": true}', "Expected `int`, got `bool`"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "num_speculative_tokens must be from 1 to 32"),
    ],
)
def test_mistakes_in_speculation_are_named(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        _resolve(["--speculative-config", text])


def test_images_of_a_prompt_as_a_mapping_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("limit-mm-per-prompt: {image: 5, video: 0}\nallowed_media_domains: [a.test, .b.test]\n")
    images = _resolve(["--config", str(file), "--max-image-bytes", "2MiB"]).images
    assert (images.limit_mm_per_prompt, images.max_image_bytes) == (5, 2 * 2**20)
    assert images.allowed_media_domains == ("a.test", ".b.test")
    assert _resolve([]).images.limit_mm_per_prompt == 64


def test_survives_the_way_to_a_child() -> None:
    config = _resolve(["x", "--api-key", "k", "--prefill-share", "0.5", "--limit-mm-per-prompt", "image=2"])
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("512", 512), ("2k", 2000), ("1KiB", 1024), ("3 GB", 3 * 10**9), ("2TiB", 2**41)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_help_shows_sizes_as_they_can_be_given() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert "caches are emptied; 0: do not look (default: 128MiB)" in " ".join(parser.format_help().split())
    for size in (0, 1000, 1024, 3 * 2**20, 2**30 + 2**20, 2**41):
        assert parse_bytes(spell_bytes(size)) == size


@pytest.mark.parametrize(
    ("arguments", "environment", "names"),
    [
        (["--port", "x"], {}, "--port"),
        (["--port", "70000"], {}, "port"),
        ([], {"FIRSTLIGHT_PROT": "1"}, "FIRSTLIGHT_PROT"),
        ([], {"FIRSTLIGHT_KERNELS": "magic"}, "FIRSTLIGHT_KERNELS"),
        (["--memory-budget", "lots"], {}, "--memory-budget"),
        (["--max-model-len", "1"], {}, "max_model_len must be at least 2, a token of the prompt"),
        (["--memory-budget", "9" * 400], {}, "--memory-budget"),
        (["--max-body-bytes", "9" * 20], {}, "--max-body-bytes"),
        (["--max-queued-tokens", "9" * 400], {}, "--max-queued-tokens"),
        (["--body-timeout", "nan"], {}, "--body-timeout"),
        (["--stall-timeout", "inf"], {}, "--stall-timeout"),
        (["--threads", "1025"], {}, "threads must be at most 1024"),
        (["--tensor-parallel-size", "65"], {}, "tensor_parallel_size must be from 1 to 64"),
        (["--pipeline-parallel-size", "0"], {}, "pipeline_parallel_size must be from 1 to 64"),
        (["--context-parallel-size", "65"], {}, "context_parallel_size must be from 1 to 64"),
        (["--tensor-parallel-size", "5", "--pipeline-parallel-size", "13"], {}, "must be at most 64"),
        (["--pipeline-parallel-size", "3", "--nnodes", "2"], {}, "nnodes must divide the number of ranks"),
        (["--tensor-parallel-size", "4", "--nnodes", "3"], {}, "nnodes must divide the number of ranks"),
        (["--node-rank", "1"], {}, "node_rank must be from 0 to 0"),
        (["--master-port", "65535"], {}, "master_port must be from 1 to 65534"),
        (["--collective-timeout", "0"], {}, "collective_timeout must be positive"),
        (["--collective-timeout", "86401"], {}, "collective_timeout must be positive and at most 86400"),
        (["--api-key", ""], {}, "--api-key: must not be empty"),
        ([], {"FIRSTLIGHT_API_KEY": " , "}, "FIRSTLIGHT_API_KEY: must not be empty"),
        (["--config", "/nowhere.yaml"], {}, "/nowhere.yaml"),
        (["--limit-mm-per-prompt", "4"], {}, "--limit-mm-per-prompt: '4' is not of the form"),
        (["--limit-mm-per-prompt", '{"video": 0}'], {}, "does not say how many images"),
        (["--limit-mm-per-prompt", "video=1"], {}, "video is not served"),
        (["--limit-mm-per-prompt", '{"image": 1, "video": 1}'], {}, "video is not served"),
        (["--limit-mm-per-prompt", "image=1,audio=2"], {}, "audio is not served"),
        (["--limit-mm-per-prompt", "image=1,smell=0"], {}, "'smell' is not image"),
        (["--limit-mm-per-prompt", '{"image": true}'], {}, "not of the form"),
        (["--limit-mm-per-prompt", '{"image": {"count": 1}}'], {}, "not of the form"),
        (["--limit-mm-per-prompt", "image=-1"], {}, "not of the form"),
        (["--limit-mm-per-prompt", "{" * 5000], {}, "not of the form"),
        (["--limit-mm-per-prompt", "image=" + "9" * 30], {}, "too large"),
        (["--max-decoding-pixels", "0"], {}, "max_decoding_pixels must be positive"),
        (["--image-cache-bytes", "-1"], {}, "--image-cache-bytes"),
        (["--allowed-media-domains", "*"], {}, "allowed_media_domains"),
    ],
)
def test_errors_name_their_source(arguments: list[str], environment: dict[str, str], names: str) -> None:
    with pytest.raises(OptionError, match=names):
        _resolve(arguments, environment)


@pytest.mark.parametrize(
    "text",
    [
        "prot: 1",
        "- a\n- b",
        "port: [1, 2]",
        "port: {a: 1}",
        "port:",
        "model:",
        "a: b: c",
        "port: 1\nport: 2",
        "max-num-seqs: 1\nmax_num_seqs: 1",
        "\x00",
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(OptionError):
        _resolve(["--config", str(file)])


def test_help_tells_every_option_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="firstlight serve")
    add_arguments(parser)
    parser.print_help()
    text = capsys.readouterr().out
    assert "--max-num-seqs" in text
    assert "(default: 64)" in text
