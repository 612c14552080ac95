"""The embedded SmolLM2 gives transformers' logits on the same weights, and answers its first question."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.ops import load_ops
from server.embedded import embedded_path
from server.prompt.tokenizer import Tokenizer, load_tokenizer
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.smollm2 import transformers_model

pytestmark = pytest.mark.model
TOLERANCE = 1e-4
PROMPTS = (
    "日本の首都は東京です。",
    "👩‍👩‍👧‍👦 means family, and 🇨🇿 is a flag.",
    "    \n\n\t tabs   and  spaces",
    "The capital of France is",
    "Once upon a time there was a small robot who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius, which is",
    "import numpy as np\n\nx = np.zeros((3, 4))",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "The quick brown fox jumps over the lazy dog. " * 8,
)
QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(embedded_path())


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return transformers_model()


@pytest.fixture(scope="module")
def load() -> Callable[[str], LoadedModel]:
    """Each kind of kernels is loaded once."""
    loaded: dict[str, LoadedModel] = {}

    def get(kernels: str) -> LoadedModel:
        if kernels not in loaded:
            loaded[kernels] = load_model(embedded_path(), load_ops(DEVICE, kernels), DEVICE, lambda fraction: None)
        return loaded[kernels]

    return get


@pytest.mark.parametrize(("kernels", "count"), [("auto", 10), ("reference", 4)])
def test_logits_equal_transformers(
    load: Callable[[str], LoadedModel],
    reference: LlamaForCausalLM,
    tokenizer: Tokenizer,
    kernels: str,
    count: int,
) -> None:
    """At every position. (transformers' own float32 logits are, on some processors, more than 1e-4 from these at early
    positions, where SmolLM2 has massive activations.)"""
    decoder = load(kernels).decoder
    for text in PROMPTS[:count]:
        ids = list(tokenizer.encode(text, add_special_tokens=False, allow_special=False))
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0]
        logits = PagedRun(decoder).step({0: ids})[0]
        assert (logits - expected).abs().max().item() <= TOLERANCE, text
        assert torch.equal(logits.argmax(-1), expected.argmax(-1)), text


def test_an_int8_kv_cache_changes_little(load: Callable[[str], LoadedModel], tokenizer: Tokenizer) -> None:
    """Mean Kullback-Leibler divergence from the distributions with a float32 cache, and how often the likeliest token
    is the same. (Over all prompts and 1024 positions of prose 0.001 and 98 %; bfloat16: 0.00005 and 99 %.)"""
    prompts = [list(tokenizer.encode(text, add_special_tokens=False, allow_special=False)) for text in PROMPTS]

    def log_probabilities(kv_type: torch.dtype) -> Tensor:
        runs = (PagedRun(load("auto").decoder, kv_type=kv_type).step({0: ids})[0] for ids in prompts)
        return torch.cat([logits.double().log_softmax(-1) for logits in runs])

    exact, changed = log_probabilities(torch.float32), log_probabilities(torch.int8)
    assert 0 < (exact.exp() * (exact - changed)).sum(-1).mean() <= 2e-3
    assert (exact.argmax(-1) == changed.argmax(-1)).double().mean() >= 0.96


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_capital_of_france(load: Callable[[str], LoadedModel], tokenizer: Tokenizer, kernels: str) -> None:
    loaded = load(kernels)
    run = PagedRun(loaded.decoder)
    tokens = list(tokenizer.encode(QUESTION, add_special_tokens=False, allow_special=True))
    assert len(tokens) == 37
    answer: list[int] = []
    while len(answer) < 20 and not set(answer) & set(loaded.config.eos_token_ids):
        tokens = [int(run.step({0: tokens})[0][-1].argmax())]
        answer += tokens
    assert answer == ANSWER
    assert tokenizer.decode(answer[:-1], skip_special_tokens=True) == "The capital of France is Paris."


def test_embedded_config(load: Callable[[str], LoadedModel]) -> None:
    loaded = load("auto")
    config = loaded.config
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (49152, 576, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rms_norm_eps, config.rope.theta, config.max_position) == (1e-5, 100000.0, 8192)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)
    assert "134.5 M parameters" in loaded.description
