"""A decoder on a GPU as the runner sees it: batches come from host memory, and steps in which every sequence has one
token replay a captured graph, so that the CPU starts one piece of work instead of hundreds. Made by the executor,
called by the runner, engine and worker processes.

A graph (`torch.cuda.CUDAGraph`) repeats the same kernels on the same memory. So there is one for each of a few numbers
of sequences, with a buffer of its own for the step's arrays; a step takes the next larger one and fills up with
sequences in a spare block. All other steps run kernel by kernel: those with longer chunks, images, rows that
an adapter changes, or M-RoPE.

Not yet run on a card. What to capture with is an argument, so tests run all but the capture itself on CPU.

Legend: S sequences, C hidden size, V vocabulary, R rows whose logits are wanted.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.batch import Batch, make_batch
from model_runtime.caches import Caches, paged
from model_runtime.device_batch import pack, padded, unpack, upload
from model_runtime.kv_store import KVLayer
from model_runtime.memory.budget import PlanError
from model_runtime.models.decoder import Decoder
from model_runtime.ops.cuda import PAGE, suits_flash_attention
from model_runtime.ops.registry import select
from scheduler.plan import SampleRows, ScoreRows, StepPlan, ints

logger = logging.getLogger(__name__)

SPARE_BLOCKS = 1
"""Of a KV pool on a GPU, after those that the scheduler gives out: sequences that only fill a graph are there."""

WARM_UPS = 2
"""Runs before a capture: libraries choose kernels and reserve memory in the first, which a capture must not hold."""

Step = Callable[[], Tensor]
Capture = Callable[[Step], tuple[Callable[[], None], Tensor]]
"""Takes a step that returns its result; gives what repeats it, and the tensor that then holds the result."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of sequences that graphs are captured for, ascending: powers of two, and the most there can be."""
    powers = [2**exponent for exponent in range(max_num_seqs.bit_length()) if 2**exponent < max_num_seqs]
    return (*powers, max_num_seqs)


def cuda_capture() -> Capture:
    """Captures with torch. All graphs share the memory of their temporary tensors: one runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Step) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = step()
        return graph.replay, result

    return capture


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step of `batch.num_sequences` sequences."""

    buffer: Tensor
    """On the device: the arrays of the step."""
    batch: Batch
    """Views of it."""
    replay: Callable[[], None]
    hidden_SC: Tensor
    """Holds the result until the next replay of any graph."""


class DecodeGraphs:
    """Captured steps of one token a sequence."""

    def __init__(
        self,
        decoder: Decoder,
        kv: Caches,
        capture: Capture,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Captures all graphs, the largest first: its memory is enough for the others. `kv` has a block beyond those
        that the scheduler gives out."""
        num_blocks, self._block_size = paged(kv).num_blocks, paged(kv).block_size
        self._table_length = -(-max_model_len // self._block_size)
        self._spare_block = num_blocks - 1
        largest_first = [self._captured(decoder, kv, capture, size) for size in reversed(graph_sizes(max_num_seqs))]
        self._graphs = largest_first[::-1]

    def run(self, batch: Batch) -> Tensor | None:
        """[S, C]: the hidden states of a step, valid until the next one; None where no graph fits the batch."""
        graph = self._fitting(batch)
        if graph is None:
            return None
        ready = self._padded(batch, graph.batch.num_sequences)
        graph.buffer.copy_(pack(ready, pinned=graph.buffer.is_cuda), non_blocking=True)
        graph.replay()
        return graph.hidden_SC[: batch.num_sequences]

    def _fitting(self, batch: Batch) -> _Graph | None:
        """The smallest graph that holds the batch."""
        is_plain = batch.rope_positions_T3 is None and batch.visible_ends_T is None and not batch.images
        is_plain = is_plain and batch.adapted_A is None
        if not is_plain or batch.num_tokens != batch.num_sequences:
            return None
        return next((graph for graph in self._graphs if graph.batch.num_sequences >= batch.num_sequences), None)

    def _padded(self, batch: Batch, size: int) -> Batch:
        return padded(batch, num_sequences=size, table_length=self._table_length, spare_block=self._spare_block)

    def _captured(self, decoder: Decoder, kv: Caches, capture: Capture, size: int) -> _Graph:
        """A graph of a step in which all sequences are in the spare block."""
        plan = StepPlan(
            step_id=0,
            token_ids=ints([0] * size),
            query_lens=ints([1] * size),
            kv_lens=ints([1] * size),
            block_tables=ints([self._spare_block] * size),
            sample=SampleRows(),
            score=ScoreRows(),
        )
        ready = self._padded(make_batch(plan, self._block_size), size)
        buffer = pack(ready, pinned=False).to(paged(kv).pools[0].device)
        batch = unpack(buffer, ready)
        replay, hidden_SC = capture(lambda: decoder.forward(batch, kv))
        return _Graph(buffer=buffer, batch=batch, replay=replay, hidden_SC=hidden_SC)


class DeviceDecoder:
    """A decoder whose batches come from host memory."""

    def __init__(self, decoder: Decoder, graphs: DecodeGraphs | None) -> None:
        self._decoder, self._graphs = decoder, graphs

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        """[T, C] on the device, valid until the next step."""
        hidden_TC = None if self._graphs is None else self._graphs.run(batch)
        return self._decoder.forward(upload(batch, paged(kv).pools[0].device), kv) if hidden_TC is None else hidden_TC

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] float32 on the device."""
        return self._decoder.logits(hidden_RC)


def block_size(device: torch.device, configured: int) -> int:
    """Tokens in a KV block: as configured, or on a GPU of NVIDIA what flash attention takes. Raises PlanError."""
    if configured & (configured - 1) or configured > PAGE:
        raise PlanError(f"block_size must be a power of two from 1 to {PAGE}, not {configured}")
    return PAGE if device.type == "cuda" else configured


def has_own_scores(config: ModelConfig) -> bool:
    """Whether flash attention does not weigh keys as the architecture does."""
    return config.attention_softcap > 0 or config.attention_sinks != "none" or any(config.attention_chunks)


@torch.inference_mode()
def on_device(decoder: Decoder, kv: Caches, max_model_len: int, max_num_seqs: int) -> DeviceDecoder:
    """A decoder whose weights and KV pool are on a GPU, with graphs unless its steps wait for the device: as they do
    where attention falls back to the reference, and in mixtures of experts, which look up who has tokens. Nor with
    layers in host memory."""
    graphs = None
    first = kv[0]
    suits = decoder.ops == select("cuda") and isinstance(first, KVLayer) and suits_flash_attention(decoder.dtype, first)
    if decoder.parameters.staging is not None:
        logger.info("layers in host memory: steps are not captured in graphs, which could not tell what is in a buffer")
    elif suits and decoder.config.experts is None and not has_own_scores(decoder.config):
        graphs = DecodeGraphs(decoder, kv, cuda_capture(), max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    return DeviceDecoder(decoder, graphs)
