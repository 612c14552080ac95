"""Configuration of the runtime, the facts learned at start-up, and the cache's place.

`RuntimeConfig` is parsed in the supervisor and read in the engine. This module does not import torch.
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


Quantization = Literal["none", "int8", "int4", "int4-g128"]
ActivationDtype = Literal["auto", "int8", "float32"]
KVCacheDtype = Literal["auto", "float32", "float16", "bfloat16", "int8"]

MAX_THREADS = 1024
"""More than any machine has cores; far more end the engine, since the system refuses to make them."""
LAST_PORT = 65535
MAX_RANKS = 64
"""That share memory; see `kernels/collective.cpp`."""
MAX_COLLECTIVE_TIMEOUT = 24 * 3600
"""Seconds. Sockets and kernels count time in integers, which far more would not fit into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How the engine runs a model."""

    mmproj: str = field(
        default="",
        metadata={
            "help": "folder with an image tower, a projector and, if there is one, an adapter, in the files of a "
            "checkpoint with images but without its language model: with them a MODEL of text takes images (default: "
            "of 'embedded' those that come with it)",
        },
    )
    max_model_len: int = field(
        default=0, metadata={"help": "longest sequence in tokens, prompt and output together; 0: what the model allows"}
    )
    memory_budget: int = field(
        default=0,
        metadata={
            "help": "size of weights, activations and KV cache together; 0: half of the free memory at start, of a "
            "GPU's nine tenths",
            "unit": "bytes",
        },
    )
    offload_weights: int = field(
        default=0,
        metadata={
            "help": "where a device is too small: least size of the layers that each rank leaves in host memory, from "
            "which every step copies them; not for CPU (not yet run on a card)",
            "unit": "bytes",
        },
    )
    encoder_cache_bytes: int = field(
        default=256 * 2**20,
        metadata={"help": "size of the cache of encoded images, within the memory budget", "unit": "bytes"},
    )
    num_kv_blocks: int = field(
        default=0, metadata={"help": "KV blocks in the pool; 0: as many as the memory budget and max-num-seqs can use"}
    )
    kv_cache_dtype: KVCacheDtype = field(
        default="auto",
        metadata={
            "help": "how keys and values are stored; auto: as activations, which is float32 on CPU, but float16 beside "
            "integer weights; int8: with a scale for each token and head, a quarter of the memory"
        },
    )
    device: str = field(
        default="cpu",
        metadata={
            "help": "what computes: cpu; cuda: an NVIDIA GPU of compute capability 8.0 or more (not yet run on one); "
            "or any device that torch knows, such as xpu, mps or npu, which computes with plain torch operations"
        },
    )
    kernels: Literal["auto", "reference"] = field(
        default="auto",
        metadata={
            "help": "auto: compiled CPU kernels where there is a C++ compiler, on a GPU torch's; reference: plain torch"
        },
    )
    quantization: Quantization = field(
        default="none",
        metadata={
            "help": "turn a checkpoint's float matrices into integers of 8 or 4 bits with a scale for every 32 (int4: "
            "embedding and output matrix 8 bits; int4-g128: a scale for every 128 of 4 bits, a twelfth less memory and "
            "less accurate); integers of a GGUF file are kept as they are"
        },
    )
    activation_dtype: ActivationDtype = field(
        default="auto",
        metadata={
            "help": "what is multiplied with matrices; auto: beside integers rows quantised to 16 bits in blocks of "
            "32, on a GPU rows of the checkpoint's float type; int8: beside integers of 8 bits rows of 8 bits, faster "
            "and less exact; float32: exact and slower"
        },
    )
    prepare_weights: bool = field(
        default=True,
        metadata={
            "help": "keep the packed weights in the cache folder (as large as the checkpoint; the last 4 are kept), so "
            "that the next start only reads them"
        },
    )
    weight_pages: Literal["huge", "shared"] = field(
        default="huge",
        metadata={
            "help": "where prepared weights are while they are used; huge: memory of this process in pages of 2 MiB, "
            "up to a half faster with few sequences; shared: the mapped file, of which servers of a model need one copy"
        },
    )
    threads: int = field(
        default=0,
        metadata={"help": "compute threads of a rank; 0: the cores that this process may use, divided among the ranks"},
    )
    tensor_parallel_size: int = field(
        default=1, metadata={"help": "processes (ranks) that share every layer of the model"}
    )
    pipeline_parallel_size: int = field(default=1, metadata={"help": "stages that divide the layers"})
    context_parallel_size: int = field(
        default=1,
        metadata={
            "help": "processes (ranks) that share every sequence, each with a part of its keys and values; the number "
            "of ranks is the product of all three sizes"
        },
    )
    enable_expert_parallel: bool = field(
        default=False,
        metadata={
            "help": "give each rank some experts of a mixture instead of columns of all; where ranks share no layers, "
            "instead of all"
        },
    )
    nnodes: int = field(
        default=1,
        metadata={"help": "machines that share the model; each runs serve with the same options, but for node-rank"},
    )
    node_rank: int = field(default=0, metadata={"help": "of this machine; 0 is the one that clients speak to"})
    master_addr: str = field(default="127.0.0.1", metadata={"help": "address of machine 0 for the others"})
    master_port: int = field(
        default=29500, metadata={"help": "first of the ports there for the others, one a rank and one more"}
    )
    collective_timeout: float = field(
        default=60.0,
        metadata={"help": "seconds that a rank waits for another one within a step before all start again"},
    )

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the rule."""
        sizes_in_bytes = ("memory_budget", "offload_weights", "encoder_cache_bytes")
        for name in ("max_model_len", *sizes_in_bytes, "num_kv_blocks", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.max_model_len == 1:
            raise ValueError("max_model_len must be at least 2, a token of the prompt and one of the answer")
        sizes = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
        for name in sizes:
            if not 1 <= getattr(self, name) <= MAX_RANKS:
                raise ValueError(f"{name} must be from 1 to {MAX_RANKS}")
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"{' times '.join(sizes)} must be at most {MAX_RANKS}")
        if self.nnodes < 1 or self.num_ranks % self.nnodes:
            raise ValueError("nnodes must divide the number of ranks")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank must be from 0 to {self.nnodes - 1}")
        if not 1 <= self.master_port <= LAST_PORT - self.num_ranks:
            raise ValueError(f"master_port must be from 1 to {LAST_PORT - self.num_ranks}")
        if not 0 < self.collective_timeout <= MAX_COLLECTIVE_TIMEOUT:
            raise ValueError(f"collective_timeout must be positive and at most {MAX_COLLECTIVE_TIMEOUT}")
        if self.threads > MAX_THREADS:
            raise ValueError(f"threads must be at most {MAX_THREADS}")

    @property
    def image_folder(self) -> Path | None:
        """Where the image side is, if not in the checkpoint."""
        return Path(self.mmproj).expanduser() if self.mmproj else None

    @property
    def num_ranks(self) -> int:
        """On all machines."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def own_ranks(self) -> range:
        """Those of this machine."""
        count = self.num_ranks // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInfo:
    """Facts learned at start-up; they never flow back into configuration."""

    max_model_len: int
    vocab_size: int
    hidden_size: int
    """Numbers of a pooled hidden state."""
    eos_token_ids: tuple[int, ...]
    generates: bool = True
    """False: the model can be pooled only."""
    num_blocks: int
    block_size: int
    weight_bytes: int
    kv_bytes: int
    has_states: bool = False
    """The model has layers with states."""
    state_bytes: int = 0
    """Of the slots for these, in this rank."""
    step_bytes: int = 0
    """Planned for temporary tensors of the largest step."""
    max_num_batched_tokens: int
    """Tokens of a step at most: as configured, or more where an image's embeddings must fit beside the other
    sequences."""
    bytes_per_embedding: int = 0
    """Memory that one embedding of an image takes in the encoder cache; 0: the model takes no images."""
    max_image_pixels: int = 0
    """That the tower may be given for one image: the memory to encode it is planned."""
    encoder_cache_bytes: int = 0
    """What the encoder cache may hold; 0 for a model without images."""
    draft_cost: float = 0.0
    """What a step of the draft model costs, in steps of the model; 0 without one."""
    adapts_images: bool = False
    """Sequences with images are computed with the model's adapter."""
    whole_span: int = 0
    """Longest span of image embeddings that a step must not cut; 0: spans may be cut anywhere."""
    steps_in_flight: int = 1
    """Steps that may begin before the first one has ended: one a stage of a pipeline, unless a draft model has some."""
    description: str
    """One line for people: architecture, parameters, storage, kernels."""
