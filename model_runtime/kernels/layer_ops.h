// The operations of a layer beside products of matrices, as the layer program and the C interface call them. Those that
// index memory by numbers from the batch return false, having done nothing, if one is out of range.
#pragma once

#include <algorithm>
#include <cstdint>

#include "integer.h"
#include "linear.h"

// A row of a layer's q/k/v product: H D query, then G D key, then G D value channels. `group` query heads share a key/value
// head; the first group lacks its first `absent` ones, the last group what is missing at the end. Only attention needs
// these two.
struct Heads {
    int64_t H, G, D, absent = 0, group = 0;
};

// Cosines and sines [P][R / 2]; growth[P], or null, is what queries are multiplied with.
struct Rope {
    const float *cos, *sin;
    int64_t P, R, interleaved;
    const float* growth;
};

// The arrays of a step, as `batch.py` describes them: T tokens, S sequences, B tokens in a block.
struct StepBatch {
    const int32_t *query_starts, *kv_lens, *block_tables, *table_starts, *rope_rows;
    const int64_t* slots;
    const int32_t* visible_ends;  // or null: a token sees its sequence up to itself
    int64_t T, S, B;
};

// One layer's cache: keys [blocks][G][D][B], values [blocks][G][B][D]; storage is 0 float32, 1 bfloat16, 2 float16, 3 int8,
// as in `ops/cpu_attention.py`. int8 has scales [blocks][G][2][B], of keys and then of values; the others have null.
struct KVLayer {
    void *key, *value;
    float* scales;
    int64_t storage, num_slots;
};

// Rotate queries and keys of qkv [T][(H + 2 G) D] in place, let queries grow, and write keys and values to the batch's slots.
bool rope_and_cache(float* qkv, const Rope& rope, const StepBatch& batch, const KVLayer& kv, const Heads& heads);

// How a query weighs keys: products times `scale`, through softcap * tanh(score / softcap) if softcap > 0; a window > 0
// hides older keys, and with one < 0 sight begins at the last multiple of -window; sinks[H], or null, are scores beside
// those of the keys, which no value belongs to.
struct Scoring {
    float scale, softcap;
    int64_t window;
    const float* sinks;
};

// The first key that a query sees.
inline int64_t first_key(int64_t position, int64_t window) {
    if (window < 0) return position - position % -window;
    return window ? std::max<int64_t>(0, position - window + 1) : 0;
}

// Whether all blocks of a sequence with so many keys are among the cache's.
inline bool has_blocks(const int32_t* table, int64_t kv_len, int64_t B, int64_t num_slots) {
    return std::all_of(table, table + (kv_len + B - 1) / B, [=](int64_t b) { return 0 <= b && b < num_slots / B; });
}

// out[T][H D]: attention of each query over the keys of its sequence.
bool paged_attention(const float* qkv, const KVLayer& kv, const StepBatch& batch, const Heads& heads,
                     const Scoring& scoring, float* out);

// Of a row's state beside the D mixed values: the largest score, and the sum of the weights.
constexpr int64_t STATE_NUMBERS = 2;

// What queries [T][H D] make of some of their keys, `begins` to `visible_ends` of each: states [T][H][D + 2], for
// merge_attention. Of no keys, the sum is 0. Sequences may have the same table.
bool partial_attention(const float* query, const KVLayer& kv, const StepBatch& keys, const int32_t* begins,
                       const Heads& heads, const Scoring& scoring, float* states);

// out[rows][D]: attention of rows over all the keys of `count` parts, from states [count][rows][D + 2] in their order.
void merge_attention(float* states, int64_t count, int64_t rows, int64_t D, float* out);

// Rows [T][K] that a product reads: floats, or in the same memory integers where the matrix wants them.
struct ProductRows {
    float* floats;
    bool quantized;
    QuantizedRows integers;

    ProductRows(const Matrix& w, int64_t T, float* memory) : floats(memory), quantized(is_integer(w.format)) {
        if (quantized) integers = quantized_rows_at(memory, T, w);
    }
};

// What happens to hidden states x[T][C] between two blocks, in one pass: x += scale * result, or norm(result) in its place
// where it has a norm of its own, then rows = norm(x) for the block that comes next. Overwrites `result`.
struct ResidualNorm {
    float* result;
    bool add;                  // false: there is no block before
    const float* result_norm;  // or null
    bool next;                 // false: there is no block behind, or it takes what the one before took
    const float* next_norm;    // null: it takes x
    float scale, eps;
    bool centered;             // norms subtract the mean first
};
void add_and_norm(float* x, const ResidualNorm& norms, int64_t T, int64_t C, const ProductRows& rows);

// y[C] = norm(x), or x where `weight` is null.
void norm_or_copy(const float* x, const float* weight, float eps, int64_t C, bool centered, float* y);

// norm of every query head and every key head of qkv [T][(H + 2 G) D], or of all query heads and all key heads of a row
// together, in place.
void qk_norm(float* qkv, const float* q_weight, const float* k_weight, float eps, bool whole, int64_t T,
             const Heads& heads);

// rows [T][F] = silu, or gelu with tanh, of the first F numbers of a row times its last F. Overwrites `gate_up`.
void gate(float* gate_up, bool gelu, int64_t T, int64_t F, const ProductRows& rows);
