"""A long prompt in chunks over the paged cache equals transformers, and its rows are the same however computed.

8192 tokens; `LONG_CONTEXT=32768 python -m pytest tests/model_runtime/test_long_text.py` takes a minute.
"""

import os
import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from model_runtime.align.product import Product, load_product
from model_runtime.config import RuntimeConfig
from model_runtime.long_reference import reference_decoder
from model_runtime.long_text import LongText, checked_positions, compared_again, compared_alone
from tests.checkpoints import HYBRID, VOCAB_SIZE, make_checkpoint
from tests.model_runtime.deepseek import make_model

LENGTH = int(os.environ.get("LONG_CONTEXT", "8192"))
CHUNK, LAYERS, WINDOW = 256, 2, 512
TOLERANCE = 1e-4
IDS = tuple(random.Random(0).randrange(3, VOCAB_SIZE) for _ in range(LENGTH))


def made(folder: Path, family: str, **overrides: object) -> tuple[PreTrainedModel, Product]:
    sizes: dict[str, object] = {"max_position_embeddings": LENGTH, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_checkpoint(folder, family, sizes | overrides)
    return model, load_product(folder, RuntimeConfig(), lambda fraction: None)


def positions(product: Product) -> list[int]:
    return checked_positions(LENGTH, CHUNK, product.block_size, product.decoder.own.sliding_windows)


@pytest.mark.timeout(1200)
def test_full_attention(tmp_path: Path) -> None:
    model, product = made(tmp_path, "llama")
    text, wanted, done = LongText(product, IDS), positions(product), list[int]()
    logits = text.compute(CHUNK, wanted, lambda tokens: done.append(tokens) is None)
    assert done == list(range(CHUNK, LENGTH + 1, CHUNK)) and list(logits) == wanted
    with torch.inference_mode():
        hidden_TC = model.model(torch.tensor([IDS]), use_cache=False).last_hidden_state[0]
        expected_PV = model.lm_head(hidden_TC[torch.tensor(wanted)])
    worst = max(float((logits[at] - row_V).abs().max()) for at, row_V in zip(wanted, expected_PV, strict=True))
    assert worst <= TOLERANCE
    alone = compared_alone(text, logits)
    assert (alone.logits, alone.cache) == (0.0, 0.0)
    other = compared_again(product, IDS, text, logits, 1000)
    assert (other.logits, other.cache) == (0.0, 0.0)
    exact = compared_alone(text, logits, reference_decoder(tmp_path, "none", LENGTH))
    assert 0.0 < max(exact.logits, exact.cache) < 1e-5


@pytest.mark.timeout(1200)
def test_sliding_windows(tmp_path: Path) -> None:
    """What a row sees of a model whose layers all have windows are the last tokens, which transformers gets alone."""
    model, product = made(tmp_path, "mistral", sliding_window=WINDOW)
    text, wanted = LongText(product, IDS), positions(product)
    assert product.decoder.own.sliding_windows == (WINDOW, WINDOW)
    assert {WINDOW - 1, WINDOW, WINDOW + 1} <= set(wanted)
    logits = text.compute(CHUNK, wanted, lambda tokens: True)
    for at in wanted:
        first = max(0, at - LAYERS * (WINDOW - 1))
        place = torch.arange(first, at + 1)[None]
        with torch.inference_mode():
            expected_V = model(torch.tensor([IDS[first : at + 1]]), position_ids=place, use_cache=False).logits[0, -1]
        assert float((logits[at] - expected_V).abs().max()) <= TOLERANCE, at
    alone = compared_alone(text, logits)
    assert (alone.logits, alone.cache) == (0.0, 0.0)


def test_a_token_that_was_overwritten_shows_in_the_rows_behind_it(tmp_path: Path) -> None:
    product = made(tmp_path, "llama")[1]
    text = LongText(product, IDS[:600])
    logits = text.compute(CHUNK, [100, 299, 500], lambda tokens: True)
    text.restore(200, text.cached(201))
    changed = {at: compared_alone(text, {at: row_V}).logits for at, row_V in logits.items()}
    assert changed[100] == 0.0 and changed[299] > 0.0 and changed[500] > 0.0


def test_a_text_may_end_early(tmp_path: Path) -> None:
    product = made(tmp_path, "llama")[1]
    logits = LongText(product, IDS[:1000]).compute(CHUNK, [10, 600], lambda tokens: tokens < 400)
    assert list(logits) == [10]


def test_latent_attention(tmp_path: Path) -> None:
    """Rows by themselves, in other chunks and in plain float64, of a cache with one row a token."""
    make_model({"max_position_embeddings": 1024}).save_pretrained(tmp_path)
    product = load_product(tmp_path, RuntimeConfig(), lambda fraction: None)
    text, wanted = LongText(product, IDS[:600]), [0, 17, 300, 599]
    logits = text.compute(CHUNK, wanted, lambda tokens: True)
    alone, other = compared_alone(text, logits), compared_again(product, IDS, text, logits, 400)
    assert (alone.logits, alone.cache, other.logits, other.cache) == (0.0, 0.0, 0.0, 0.0)
    exact = compared_alone(text, logits, reference_decoder(tmp_path, "none", 600))
    assert 0.0 < max(exact.logits, exact.cache) < 1e-5


def test_states(tmp_path: Path) -> None:
    """Chunks of other lengths hand on the same states but for rounding, and plain torch in float64 is near."""
    make_checkpoint(tmp_path, "qwen3_next", HYBRID)
    product = load_product(tmp_path, RuntimeConfig(), lambda fraction: None)
    ids = IDS[:250]
    text, wanted = LongText(product, ids), [0, 17, 130, 249]
    assert text.has_states
    logits = text.compute(CHUNK // 4, wanted, lambda tokens: True)
    other = compared_again(product, ids, text, logits, len(ids))
    assert (other.logits, other.cache) == (0.0, 0.0)
    exact = compared_again(product, ids, text, logits, len(ids), reference_decoder(tmp_path, "none", len(ids)))
    assert 0.0 < min(exact.logits, exact.cache) <= max(exact.logits, exact.cache) < 1e-4
