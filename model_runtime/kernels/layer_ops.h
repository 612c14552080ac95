// The operations of a layer beside products of matrices, as the layer program and the C interface call them. Those that
// index memory by numbers from the batch return false, having done nothing, if one is out of range.
#pragma once

#include <cstdint>

// A row of a layer's q/k/v product: H D query, then G D key, then G D value channels.
struct Heads {
    int64_t H, G, D;
};

// Cosines and sines [P][R / 2].
struct Rope {
    const float *cos, *sin;
    int64_t P, R, interleaved;
};

// The arrays of a step, as `batch.py` describes them: T tokens, S sequences, B tokens in a block.
struct StepBatch {
    const int32_t *query_starts, *kv_lens, *block_tables, *table_starts, *rope_rows;
    const int64_t* slots;
    const int32_t* visible_ends;  // or null: a token sees its sequence up to itself
    int64_t T, S, B;
};

// One layer's cache: keys [blocks][G][D][B], values [blocks][G][B][D]; storage is 0 float32, 1 bfloat16, 2 float16, 3 int8,
// as in `ops/cpu.py`. int8 has scales [blocks][G][2][B], of keys and then of values; the others have null.
struct KVLayer {
    void *key, *value;
    float* scales;
    int64_t storage, num_slots;
};

// Rotate queries and keys of qkv [T][(H + 2 G) D] in place, and write keys and values to the batch's slots.
bool rope_and_cache(float* qkv, const Rope& rope, const StepBatch& batch, const KVLayer& kv, const Heads& heads);

// out[T][H D]: attention of each query over the keys of its sequence; a window > 0 hides older keys.
bool paged_attention(const float* qkv, const KVLayer& kv, const StepBatch& batch, const Heads& heads, float scale,
                     int64_t window, float* out);

// Sum rows and norm them in one pass: x[T][C] += result, or += norm(result) in place where `result_norm` is given; then
// normed = norm(x) with the weights of the next block, if they are given. The sum is left out if `result` is null.
struct ResidualNorm {
    float *result, *normed;
    const float *result_norm, *next_norm;
    float eps;
};
void add_and_norm(float* x, const ResidualNorm& norms, int64_t T, int64_t C);

// norm of every query head and every key head of qkv [T][(H + 2 G) D], in place.
void qk_norm(float* qkv, const float* q_weight, const float* k_weight, float eps, int64_t T, const Heads& heads);

// y[T][F] = silu, or gelu with tanh, of the first F numbers of a row times its last F.
void gate(const float* gate_up, bool gelu, int64_t T, int64_t F, float* y);
