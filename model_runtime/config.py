"""Configuration of the runtime, the architecture of a model, the facts learned at start-up, and the cache's place.

`RuntimeConfig` is parsed in the supervisor and read in the engine; `ModelConfig` is read from a checkpoint in the
engine process. This module does not import torch.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

CACHE_VARIABLE = "FIRSTLIGHT_CACHE_DIR"


def cache_dir() -> Path:
    """Where firstlight keeps what it can make or fetch again: $FIRSTLIGHT_CACHE_DIR, else firstlight/ in
    $XDG_CACHE_HOME or ~/.cache. No option of `serve`, since it is needed before there is a server."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "firstlight"


MAX_THREADS = 1024
"""More than any machine has cores; far more end the engine, since the system refuses to make them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How the engine runs a model."""

    max_model_len: int = field(
        default=0, metadata={"help": "longest sequence in tokens, prompt and output together; 0: what the model allows"}
    )
    memory_budget: int = field(
        default=0,
        metadata={
            "help": "size of weights, activations and KV cache together; 0: half of the free memory at start",
            "unit": "bytes",
        },
    )
    num_kv_blocks: int = field(
        default=0, metadata={"help": "KV blocks in the pool; 0: as many as the memory budget and max-num-seqs can use"}
    )
    kernels: Literal["auto", "reference"] = field(
        default="auto",
        metadata={"help": "auto: compiled CPU kernels where there is a C++ compiler; reference: plain torch"},
    )
    threads: int = field(default=0, metadata={"help": "compute threads; 0: the cores this process may use"})

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the rule."""
        for name in ("max_model_len", "memory_budget", "num_kv_blocks", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.threads > MAX_THREADS:
            raise ValueError(f"threads must be at most {MAX_THREADS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInfo:
    """Facts learned at start-up; they never flow back into configuration."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    weight_bytes: int
    kv_bytes: int
    description: str
    """One line for people: architecture, parameters, storage, kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its context extensions."""

    theta: float
    rotary_dim: int
    """Leading dimensions of a head that are rotated; even."""
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn's mscale)."""
    divisors: tuple[float, ...] = ()
    """One per rotated pair: divides its frequency (GGUF files carry llama3's scaling this way). Empty: all 1."""
    interleaved: bool = False
    """False: rotate (x[i], x[i + rotary_dim / 2]); True: (x[2i], x[2i + 1])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder, independent of the file it was read from."""

    family: str
    """Key of `models.families.FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    sliding_windows: tuple[int, ...]
    """Per layer: keys a query may see including itself, 0 is all."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
