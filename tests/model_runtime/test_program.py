"""All layers in one compiled call give what the operations one by one give, bit for bit: hidden states and KV cache."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_runtime.architecture import Adapter, ModelConfig, QueryGrowth, RopeConfig
from model_runtime.batch import Batch, ImageRows
from model_runtime.kv_store import KVLayer
from model_runtime.models.decoder import Decoder, decoder_table
from model_runtime.models.layer import EagerLayers
from model_runtime.ops import set_threads
from model_runtime.ops.program import LayerProgram
from model_runtime.ops.registry import HeadShape, Ops, PackedWeight, select
from model_runtime.parallel import Alone, Collectives
from model_runtime.quantized import quantize
from model_runtime.share import Share, split
from model_runtime.shared_collectives import SharedMemoryCollectives
from model_runtime.shared_memory import make_region
from model_runtime.weights.table import Parameter, Parameters
from tests.model_runtime.deepseek import EXPERTS
from tests.model_runtime.memory import MODEL
from tests.model_runtime.op_cases import CPU, Span, batch_of, compiled, fill_cache, kv_cache, randn
from tests.model_runtime.ranks import on_shared_memory

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 40, 128
QUERY_LENS, KV_LENS = [1, 7, 1, 20], [1, 40, 70, 20]
PLAIN = replace(
    MODEL, vocab_size=50, intermediate_size=96, num_layers=3, max_position=MAX_LEN, sliding_windows=(0, 0, 0)
)
LOCAL = RopeConfig(theta=100.0, rotary_dim=16)
MROPE = RopeConfig(theta=10000.0, rotary_dim=16, mrope_sections=(2, 3, 3))
ADAPTER = Adapter(rank=4, scale=0.7, matrices=("q_proj", "k_proj", "v_proj", "o_proj"))
CONFIGS = {
    "plain": PLAIN,
    "biases": replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qk norm": replace(PLAIN, qk_norm="head", num_heads=6, num_kv_heads=2, tie_word_embeddings=False),
    "a cut group": replace(PLAIN, num_heads=9, num_kv_heads=3, head_dim=32),
    "windows": replace(PLAIN, sliding_windows=(0, 9, 30), attention_scale=0.3),
    "half rotated in pairs": replace(PLAIN, rope=RopeConfig(theta=10000.0, rotary_dim=8, interleaved=True)),
    "sandwich": replace(
        PLAIN,
        qk_norm="head",
        norm_places="around",
        norm_weights_less_one=True,
        activation="gelu_tanh",
        other_rope=LOCAL,
        other_rope_layers=(True, True, False),
        sliding_windows=(9, 9, 0),
        embedding_scale=8.0,
    ),
    "after, rows normalised": replace(PLAIN, norm_places="after", qk_norm="row", num_heads=6),
    "parallel": replace(
        PLAIN,
        norm="layer",
        norm_places="parallel",
        other_rope=replace(LOCAL, rotary_dim=0),
        other_rope_layers=(False, False, True),
        logit_scale=0.3,
    ),
    "scaled and capped": replace(
        PLAIN, residual_scale=0.4, attention_softcap=2.0, logit_softcap=3.0, attention_sinks="layers"
    ),
    "three positions": replace(PLAIN, rope=MROPE, qkv_bias=True),
    "chunks": replace(PLAIN, attention_chunks=(9, 0, 30), qk_norm="rotated"),
    "queries that grow": replace(
        PLAIN,
        rope=replace(MROPE, growth=QueryGrowth(rate=0.7, length=9)),
        other_rope=replace(LOCAL, rotary_dim=0, growth=QueryGrowth(rate=0.4, length=4, offset=1)),
        other_rope_layers=(False, True, False),
        qk_norm="rotated",
    ),
    "an adapter": replace(PLAIN, adapter=ADAPTER, qk_norm="head"),
    "an adapter, norms after": replace(
        PLAIN, adapter=replace(ADAPTER, matrices=("v_proj",)), norm_places="after", qkv_bias=True
    ),
    "an adapter, no output": replace(PLAIN, adapter=replace(ADAPTER, matrices=("q_proj", "o_proj")), norm="layer"),
    "deepstack": replace(PLAIN, rope=replace(MROPE, mrope_interleaved=True), num_deepstack=2),
}


def parameter_of(parameter: Parameter, seed: int) -> Tensor:
    if parameter.columns is None:
        return 1.0 + 0.2 * randn(parameter.rows, seed=seed)
    return 0.2 * randn(parameter.rows, parameter.columns, seed=seed)


def packed(ops: Ops, weight: Tensor, storage: str) -> PackedWeight:
    match storage:
        case "q8_0" | "q4_0" | "q4_0_128":
            return ops.pack_quantized(quantize(weight, storage), 16)
        case "rows of 8 bits":
            return ops.pack_quantized(quantize(weight, "q8_0"), 8)
        case _:
            return ops.pack(weight.to({"float32": torch.float32, "bfloat16": torch.bfloat16}[storage]))


def part_of(parameter: Parameter, tensor: Tensor, share: Share) -> Tensor:
    slots = tensor.split([slot.rows for slot in parameter.slots])
    parts = zip(parameter.slots, slots, strict=True)
    return torch.cat([rows[parameter.index(slot, share)] for slot, rows in parts])


def make_decoder(
    config: ModelConfig, ops: Ops, storage: str = "float32", collectives: Collectives | None = None
) -> Decoder:
    """One rank's, if there are several."""
    ranks = collectives or Alone()
    share, parameters = split(config, ranks.size)[ranks.rank], Parameters({}, {})
    for seed, parameter in enumerate(decoder_table(config)):
        tensor = part_of(parameter, parameter_of(parameter, seed), share)
        if parameter.columns is not None:
            chosen = ("q8_0", "float32", "q4_0")[seed % 3] if storage == "mixed" else storage
            chosen = "bfloat16" if parameter.fewest_bits > 8 else chosen
            parameters.matrices[parameter.name] = packed(ops, tensor, chosen)
        elif parameter.belongs_to(share):
            parameters.vectors[parameter.name] = tensor
    return Decoder(config, parameters, ops, CPU, MAX_LEN, collectives=ranks, share=share)


def make_batch(config: ModelConfig, spans: tuple[Span, ...] = ()) -> Batch:
    """Sequences that decode, continue a prompt and begin one; with image rows where the model has use for them."""
    batch = batch_of(QUERY_LENS, KV_LENS, BLOCK_SIZE, NUM_BLOCKS, spans=spans)
    ids = torch.arange(batch.num_tokens, dtype=torch.int32)
    if config.adapter is not None:
        batch = replace(batch, adapted_A=torch.tensor([*range(1, 8), *range(9, 29)]))
    if not config.rope.mrope_sections:
        return replace(batch, token_ids_T=ids)
    embeddings = [randn(5, config.hidden_size, seed=index) for index in range(1 + config.num_deepstack)]
    images = (ImageRows(start=3, embeddings_NC=embeddings[0], deepstack_NC=tuple(embeddings[1:])),)
    positions = (ids[:, None] + torch.tensor([[0, 1, 2]], dtype=torch.int32)).contiguous()
    return replace(batch, token_ids_T=ids, rope_positions_T3=positions, images=images)


def caches(config: ModelConfig, batch: Batch, dtype: torch.dtype = torch.float32) -> list[KVLayer]:
    shape = HeadShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        absent_heads=config.absent_heads,
    )
    layers = [kv_cache(shape, NUM_BLOCKS, BLOCK_SIZE, dtype) for _ in range(config.num_layers)]
    for seed, layer in enumerate(layers):
        fill_cache(layer, batch, seed)
    return layers


def contents(layer: KVLayer) -> list[Tensor]:
    tensors = (layer.key_NHDB, layer.value_NHBD, layer.scales_NH2B)
    return [tensor.float().nan_to_num(1e9) for tensor in tensors if tensor is not None]


def assert_same(decoder: Decoder, batch: Batch, kv_dtype: torch.dtype = torch.float32) -> None:
    """The program against the operations one by one, with one thread and two."""
    before = torch.get_num_threads()
    for threads in (1, 2):
        set_threads(threads)
        assert_same_once(decoder, batch, kv_dtype)
    set_threads(before)


def assert_same_once(decoder: Decoder, batch: Batch, kv_dtype: torch.dtype = torch.float32) -> None:
    program, eager = decoder.stack, EagerLayers(decoder.ops, decoder.layers)
    assert isinstance(program, LayerProgram)
    kv, kv_expected = (caches(decoder.own, batch, kv_dtype) for _ in range(2))
    decoder.stack = eager
    expected = decoder.forward(batch, kv_expected)
    assert expected.isfinite().all()
    decoder.stack = program
    assert torch.equal(decoder.forward(batch, kv), expected)
    for layer, layer_expected in zip(kv, kv_expected, strict=True):
        assert all(map(torch.equal, contents(layer), contents(layer_expected)))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_dense_layer(name: str) -> None:
    decoder = make_decoder(CONFIGS[name], compiled())
    assert_same(decoder, make_batch(decoder.config))


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("biases", "bfloat16"),
        ("biases", "q8_0"),
        ("biases", "rows of 8 bits"),
        ("parallel", "rows of 8 bits"),
        ("an adapter", "q8_0"),
        ("an adapter", "mixed"),
        ("sandwich", "q4_0"),
        ("qk norm", "q4_0_128"),
        ("plain", "mixed"),
        ("parallel", "q8_0"),
        ("after, rows normalised", "q4_0"),
    ],
)
def test_every_storage_of_weights(name: str, storage: str) -> None:
    """Rows are quantised within the operation that makes them, where the product wants integers."""
    decoder = make_decoder(CONFIGS[name], compiled(), storage)
    assert_same(decoder, make_batch(decoder.config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_every_storage_of_the_cache(dtype: torch.dtype) -> None:
    decoder = make_decoder(PLAIN, compiled())
    assert_same(decoder, make_batch(PLAIN), dtype)


def test_images_that_attend_to_themselves_both_ways() -> None:
    decoder = make_decoder(CONFIGS["sandwich"], compiled())
    assert_same(decoder, make_batch(decoder.config, spans=((1, 34, 38), (3, 2, 9))))


@pytest.mark.parametrize("storage", ["float32", "mixed", "rows of 8 bits"])
def test_a_long_step_passes_a_layer_in_parts(storage: str) -> None:
    """With two threads, 200 rows are four parts of 48 and 56, the last of which ends within a group of 16."""
    config = replace(
        CONFIGS["an adapter"], hidden_size=128, intermediate_size=192, num_layers=2, sliding_windows=(0, 0)
    )
    decoder = make_decoder(config, compiled(), storage)
    batch = batch_of([100, 100], [100, 110], BLOCK_SIZE, NUM_BLOCKS)
    assert_same(decoder, replace(batch, adapted_A=torch.arange(100, 200)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("biases", "mixed"),
        ("qk norm", "float32"),
        ("sandwich", "bfloat16"),
        ("deepstack", "q4_0"),
        ("a cut group", "mixed"),
        ("parallel", "q8_0"),
        ("sandwich", "rows of 8 bits"),
        ("an adapter", "mixed"),
        ("scaled and capped", "float32"),
    ],
)
def test_ranks_sum_within_the_call(name: str, storage: str, threads: int) -> None:
    """The batch is longer than a part, so that ranks come to several sums in each block."""
    config = CONFIGS[name]
    batch = (
        make_batch(config)
        if config.rope.mrope_sections or config.adapter
        else batch_of([60, 70], [60, 80], BLOCK_SIZE, NUM_BLOCKS)
    )

    def one(collectives: SharedMemoryCollectives) -> None:
        assert_same_once(make_decoder(config, compiled(), storage, collectives), batch)

    before = torch.get_num_threads()
    set_threads(threads)
    on_shared_memory(2, one)
    set_threads(before)


def test_a_rank_that_does_not_come_is_named() -> None:
    descriptor = make_region(2)
    alone = SharedMemoryCollectives(descriptor, 0, 2, timeout_seconds=0.05)
    os.close(descriptor)
    decoder = make_decoder(PLAIN, compiled(), collectives=alone)
    batch = make_batch(PLAIN)
    x_TC, ropes = randn(batch.num_tokens, 64), (decoder.rotations.table, decoder.rotations.table)
    with pytest.raises(AssertionError, match="rank 1 ended or did not come"):
        decoder.stack.run(x_TC, range(3), ropes, batch, caches(decoder.own, batch))


def test_a_second_cache_takes_the_place_of_the_first() -> None:
    decoder = make_decoder(PLAIN, compiled())
    batch = make_batch(PLAIN)
    first, second = caches(PLAIN, batch), caches(PLAIN, batch)
    expected = decoder.forward(batch, first)
    assert torch.equal(decoder.forward(batch, second), expected)
    assert torch.equal(first[0].key_NHDB.nan_to_num(), second[0].key_NHDB.nan_to_num())


def test_other_layers_and_plain_torch_run_one_by_one() -> None:
    ops = compiled()
    assert isinstance(make_decoder(replace(PLAIN, experts=replace(EXPERTS, dense_layers=(0,))), ops).stack, EagerLayers)
    assert isinstance(make_decoder(PLAIN, select("any")).stack, EagerLayers)
    # rows for attention are integers, those for the block beside it are not
    assert isinstance(make_decoder(CONFIGS["parallel"], ops, "mixed").stack, EagerLayers)


def test_numbers_that_index_memory_are_checked() -> None:
    decoder, batch = make_decoder(PLAIN, compiled()), make_batch(PLAIN)
    kv, beyond = caches(PLAIN, batch), torch.full_like(batch.slots_T, NUM_BLOCKS * BLOCK_SIZE)
    for wrong in (
        replace(batch, slots_T=beyond),
        replace(batch, rope_rows_T=batch.rope_rows_T + MAX_LEN),
        replace(batch, block_tables=batch.block_tables + NUM_BLOCKS),
    ):
        with pytest.raises(AssertionError, match="outside"):
            decoder.forward(wrong, kv)
    with pytest.raises(AssertionError, match="caches for 3 layers"):
        decoder.forward(batch, kv[:2])
