"""What folders and files say of their embeddings, and what is refused by name."""

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter

from model_runtime.pooling_config import PoolingChoice, PoolingRecipe, read_pooling
from model_runtime.weights.errors import CheckpointError
from tests.model_runtime.test_gguf_file import finish

FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
MEAN, LAST = PoolingRecipe(kind="mean", normalise=False), PoolingRecipe(kind="last")


def flags(*on: str) -> dict[str, object]:
    """As sentence-transformers writes them."""
    return {"word_embedding_dimension": 8} | {f"pooling_mode_{name}": name in on for name in FLAGS}


def write(folder: Path, pooling: object, *types: str, config: dict[str, object] | None = None) -> Path:
    """A folder with these modules, of which only the pooling has a file."""
    modules = [
        {"idx": index, "path": f"{index}_{name}" if index else "", "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(types)
    ]
    (folder / "config.json").write_text(json.dumps(config or {}))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "types", "recipe"),
    [
        (flags("mean_tokens"), ("Transformer", "Pooling"), MEAN),
        (flags("lasttoken"), ("Transformer", "Pooling", "Normalize"), LAST),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, ("Transformer", "Pooling", "Normalize"), LAST),
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling"), MEAN),
    ],
)
def test_folders_of_sentence_transformers(
    tmp_path: Path, pooling: object, types: tuple[str, ...], recipe: PoolingRecipe
) -> None:
    assert read_pooling(write(tmp_path, pooling, *types), "auto") == recipe


@pytest.mark.parametrize(
    ("pooling", "types", "message"),
    [
        (flags("cls_token"), ("Transformer", "Pooling"), "the pooling mode cls is not supported; mean, lasttoken are"),
        (flags("mean_tokens", "max_tokens"), ("Transformer", "Pooling"), "the pooling mode mean [+] max is not"),
        (flags(), ("Transformer", "Pooling"), "the pooling mode none is not supported"),
        ({"pooling_mode": "weightedmean"}, ("Transformer", "Pooling"), "the pooling mode weightedmean is not"),
        (flags("mean_tokens"), ("Transformer", "Pooling", "Dense"), "not Transformer, Pooling, Dense"),
        (flags("mean_tokens"), ("Transformer",), "not Transformer;"),
        (flags("mean_tokens"), (), "not none"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, pooling: object, types: tuple[str, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"{message}.*--pooling mean or --pooling last serves"):
        read_pooling(write(tmp_path, pooling, *types), "auto")
    assert read_pooling(tmp_path, "last") == LAST, "the server's user may choose"


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"type": "a.Transformer"}]', "[", '[{"type": 1, "path": ""}]'])
def test_modules_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_pooling(tmp_path, "auto")


@pytest.mark.parametrize(
    ("config", "can_be_cut", "lengths"),
    [
        ({}, False, ()),
        ({"is_matryoshka": False}, False, ()),
        ({"is_matryoshka": True}, True, ()),
        ({"matryoshka_dimensions": [4, 8]}, True, (4, 8)),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "mean"])
def test_vectors_that_may_be_cut(
    tmp_path: Path, config: dict[str, object], can_be_cut: bool, lengths: tuple[int, ...], choice: PoolingChoice
) -> None:
    recipe = read_pooling(write(tmp_path, flags("mean_tokens"), "Transformer", "Pooling", config=config), choice)
    assert recipe is not None
    assert (recipe.kind, recipe.can_be_cut, recipe.lengths) == ("mean", can_be_cut, lengths)


@pytest.mark.parametrize("lengths", [[], 4, ["4"], [0], [True]])
def test_lengths_that_are_none(tmp_path: Path, lengths: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"matryoshka_dimensions": lengths}))
    with pytest.raises(CheckpointError, match="matryoshka_dimensions must be a list of lengths"):
        read_pooling(tmp_path, "auto")


def test_a_generative_checkpoint_says_nothing(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, "auto") is None
    assert read_pooling(tmp_path, "mean") == PoolingRecipe(kind="mean")


@pytest.mark.parametrize(
    ("number", "recipe"),
    [(None, None), (0, None), (1, PoolingRecipe(kind="mean")), (3, LAST), (2, "refused"), (4, "refused")],
)
def test_gguf_files(tmp_path: Path, number: int | None, recipe: PoolingRecipe | str | None) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "qwen3")
    if number is not None:
        writer.add_uint32("qwen3.pooling_type", number)
    finish(writer)
    if recipe == "refused":
        with pytest.raises(CheckpointError, match=rf"pooling_type {number} is not supported; 1 \(mean\) and 3"):
            read_pooling(path, "auto")
    else:
        assert read_pooling(path, "auto") == recipe
