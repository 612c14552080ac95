// The operations that treat every row by itself: embedding, norms, rotary embedding with the write to the KV cache, and
// activations, gated or not. Sums over a row use eight lanes twice and are folded in a fixed order.
#include <algorithm>
#include <cmath>

#include "integer.h"
#include "kv.h"
#include "layer_ops.h"
#include "linear_fp8.h"
#include "pool.h"
#include "vec.h"

namespace {

// function(row) for every row, by several threads if there are many numbers; one takes a nanosecond or so.
template <class Function> void for_rows(int64_t rows, int64_t numbers, Function function) {
    pool::parallel_ranges(rows, numbers * 4, [&](int64_t row, int64_t end) {
        for (; row < end; row++) function(row);
    });
}

// y = x less its mean.
void center_row(const float* x, int64_t K, float* y) {
    v8 even{}, odd{};
    int64_t k = 0;
    for (; k + 16 <= K; k += 16) {
        even += load<v8>(x + k);
        odd += load<v8>(x + k + 8);
    }
    float sum = lane_sum(even + odd);
    for (; k < K; k++) sum += x[k];
    const float mean = sum / float(K);
    for (k = 0; k < K; k++) y[k] = x[k] - mean;
}

// y may be x.
void norm_row(const float* x, const float* weight, float eps, int64_t K, float* y, bool centered = false) {
    if (centered) center_row(x, K, y), x = y;
    v8 even{}, odd{};
    int64_t k = 0;
    for (; k + 16 <= K; k += 16) {
        const v8 a = load<v8>(x + k), b = load<v8>(x + k + 8);
        even = fused(a, a, even);
        odd = fused(b, b, odd);
    }
    float sum = lane_sum(even + odd);
    for (; k < K; k++) sum = fused(x[k], x[k], sum);
    const float factor = 1.0f / std::sqrt(sum / float(K) + eps);
    for (k = 0; k < K; k++) y[k] = x[k] * factor * weight[k];
}

INLINE v8 silu(v8 x) { return x / (1.0f + exp_v8(-x)); }

// x (1 + tanh(u)) / 2 is x / (1 + e^-2u); u = sqrt(2 / pi) (x + 0.044715 x^3).
INLINE v8 gelu_tanh(v8 x) {
    const v8 twice = x * fused(x * x, splat<v8>(0.07135481282f), splat<v8>(1.5957691216f));
    return x / (1.0f + exp_v8(-twice));
}

INLINE v8 quick_gelu(v8 x) { return x / (1.0f + exp_v8(splat<v8>(-1.702f) * x)); }

// The error function within 2 ulp: a polynomial near zero, 1 - e^polynomial further out.
INLINE v8 erf(v8 x) {
    const i8 sign = bit_copy<i8>(x) & int32_t(0x80000000);
    const v8 t = bit_copy<v8>(bit_copy<i8>(x) & 0x7fffffff), s = x * x;
    v8 far = fused(splat<v8>(-1.72853470e-5f), t, splat<v8>(3.83197126e-4f));
    far = fused(far, s, fused(splat<v8>(-3.88396438e-3f), t, splat<v8>(2.42546219e-2f)));
    for (const float c : {-1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f}) far = fused(far, t, splat<v8>(c));
    far = 1.0f - exp_v8(fused(far, t, -t));
    v8 near = splat<v8>(-5.96761703e-4f);
    for (const float c : {4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f})
        near = fused(near, s, splat<v8>(c));
    // beyond 10 the polynomial is of no use, and the function is 1; NaN compares false and takes the near branch
    far = select(t > 10.0f, splat<v8>(1.0f), far);
    return select(t > 0.927734375f, bit_copy<v8>(bit_copy<i8>(far) | sign), fused(near, x, x));
}

INLINE v8 gelu(v8 x) { return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f)); }

INLINE v8 sigmoid(v8 x) { return 1.0f / (1.0f + exp_v8(-x)); }

// log(1 + e^x), of which the larger part is x itself where x is positive.
INLINE v8 softplus(v8 x) {
    v8 rest = exp_v8(-bit_copy<v8>(bit_copy<i8>(x) & 0x7fffffff));
    for (int lane = 0; lane < 8; lane++) rest[lane] = std::log1p(rest[lane]);
    return rest + select(x < 0.0f, splat<v8>(0.0f), x);
}

// y = activation(x) for `count` numbers.
template <v8 activation(v8)> void activate(const float* x, int64_t count, float* y) {
    constexpr int64_t PIECE = 1024;
    for_rows((count + PIECE - 1) / PIECE, count * 4, [=](int64_t piece) {
        const int64_t end = std::min(count, (piece + 1) * PIECE);
        int64_t i = piece * PIECE;
        for (; i + 8 <= end; i += 8) store(y + i, activation(load<v8>(x + i)));
        if (i == end) return;
        float tail[8] = {};
        std::copy_n(x + i, end - i, tail);
        store(tail, activation(load<v8>(tail)));
        std::copy_n(tail, end - i, y + i);
    });
}

// y[F] = activation(gate) * up; y may be gate.
template <v8 activation(v8)> void gate_row(const float* gate, const float* up, int64_t F, float* y) {
    int64_t f = 0;
    for (; f + 8 <= F; f += 8) store(y + f, activation(load<v8>(gate + f)) * load<v8>(up + f));
    if (f == F) return;
    float tail[3][8] = {};
    std::copy_n(gate + f, F - f, tail[0]);
    std::copy_n(up + f, F - f, tail[1]);
    store(tail[2], activation(load<v8>(tail[0])) * load<v8>(tail[1]));
    std::copy_n(tail[2], F - f, y + f);
}

constexpr int64_t EXPONENTIAL = 4;  // plain operations that one costs

// Keys [G][D], then values, to their slot.
void store_token(const KVLayer& kv, const float* keys, int64_t slot, int64_t G, int64_t D, int64_t B) {
    const int64_t block = slot / B, offset = slot % B;
    with_storage(kv.storage, [=](auto number) {
        typedef decltype(number) T;
        for (int64_t g = 0; g < G; g++) {
            const int64_t head = block * G + g;
            float* scales[2] = {};
            if (kv.scales) scales[0] = kv.scales + head * 2 * B + offset, scales[1] = scales[0] + B;
            store_head(keys + g * D, D, static_cast<T*>(kv.key) + head * D * B + offset, B, scales[0]);
            store_head(keys + (G + g) * D, D, static_cast<T*>(kv.value) + (head * B + offset) * D, 1, scales[1]);
        }
    });
}

template <class T> void embedding(const int32_t* ids, const T* table, int64_t num_ids, int64_t K, float* y) {
    for_rows(num_ids, num_ids * K, [=](int64_t t) {
        const T* row = table + ids[t] / PANEL * PANEL * K + ids[t] % PANEL;
        for (int64_t k = 0; k < K; k++) y[t * K + k] = load_one(row + k * PANEL);
    });
}

bool within(const int32_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [=](int32_t n) { return 0 <= n && n < end; });
}

}  // namespace

void norm_or_copy(const float* x, const float* weight, float eps, int64_t C, bool centered, float* y) {
    weight ? norm_row(x, weight, eps, C, y, centered) : void(std::copy_n(x, C, y));
}

void add_and_norm(float* x, const ResidualNorm& norms, int64_t T, int64_t C, const ProductRows& rows) {
    for_rows(T, T * C * 2, [&](int64_t row) {
        float *sum = x + row * C, *result = norms.result + row * C;
        if (norms.add) {
            if (norms.result_norm) norm_row(result, norms.result_norm, norms.eps, C, result, norms.centered);
            for (int64_t k = 0; k < C; k++) sum[k] += norms.scale * result[k];
        }
        if (!norms.next) return;
        float* normed = rows.quantized ? result : rows.floats + row * C;
        norm_or_copy(sum, norms.next_norm, norms.eps, C, norms.centered, normed);
        if (rows.quantized) quantize_row(normed, row, C, rows.integers);
    });
}

void qk_norm(float* qkv, const float* q_weight, const float* k_weight, float eps, bool whole, int64_t T,
             const Heads& heads) {
    const int64_t H = heads.H, G = heads.G, D = heads.D;
    for_rows(T, T * (H + G) * D, [=](int64_t t) {
        float* row = qkv + t * (H + 2 * G) * D;
        if (whole) {
            norm_row(row, q_weight, eps, H * D, row);
            return norm_row(row + H * D, k_weight, eps, G * D, row + H * D);
        }
        for (int64_t h = 0; h < H + G; h++) norm_row(row + h * D, h < H ? q_weight : k_weight, eps, D, row + h * D);
    });
}

void gate(float* gate_up, bool gelu, int64_t T, int64_t F, const ProductRows& rows) {
    for_rows(T, T * F * EXPONENTIAL, [&](int64_t row) {
        float *gate = gate_up + row * 2 * F, *product = rows.quantized ? gate : rows.floats + row * F;
        gelu ? gate_row<gelu_tanh>(gate, gate + F, F, product) : gate_row<silu>(gate, gate + F, F, product);
        if (rows.quantized) quantize_row(product, row, F, rows.integers);
    });
}

bool rope_and_cache(float* qkv, const Rope& rope, const StepBatch& batch, const KVLayer& kv, const Heads& heads) {
    const int64_t H = heads.H, G = heads.G, D = heads.D;
    const int64_t B = batch.B, half = rope.R / 2;
    if (!within(batch.rope_rows, batch.T, rope.P)) return false;
    for (int64_t t = 0; t < batch.T; t++)
        if (batch.slots[t] < 0 || batch.slots[t] >= kv.num_slots) return false;
    for_rows(batch.T, batch.T * (H + 16 * G) * D, [=](int64_t t) {  // a line of the cache costs as much as 16 numbers
        float* row = qkv + t * (H + 2 * G) * D;
        const float *c = rope.cos + batch.rope_rows[t] * half, *s = rope.sin + batch.rope_rows[t] * half;
        for (int64_t h = 0; h < H + G; h++) {
            float* head = row + h * D;
            rope.interleaved ? rotate(head, head + 1, 2, c, s, half) : rotate(head, head + half, 1, c, s, half);
        }
        for (int64_t d = 0; rope.growth && d < H * D; d++) row[d] *= rope.growth[batch.rope_rows[t]];
        store_token(kv, row + H * D, batch.slots[t], G, D, B);
    });
    return true;
}

extern "C" {

// Functions that index memory by numbers from the batch return 1, having done nothing, if one is out of range.
int64_t fl_embedding(const int32_t* ids, const void* table, int64_t storage, int64_t num_ids, int64_t V, int64_t K,
                     float* y) {
    if (!within(ids, num_ids, V)) return 1;
    if (storage == 0) embedding(ids, static_cast<const float*>(table), num_ids, K, y);
    if (storage == 1) embedding(ids, static_cast<const bf16*>(table), num_ids, K, y);
    if (storage == 2) embedding(ids, static_cast<const fp16*>(table), num_ids, K, y);
    if (storage >= FP8) {
        const auto expand = storage == FP8 ? expand_fp8_row : expand_row;
        for_rows(num_ids, num_ids * K, [=](int64_t t) { expand({table, nullptr, storage, V, K}, ids[t], y + t * K); });
    }
    return 0;
}

void fl_norm(const float* x, const float* weight, float eps, int64_t centered, int64_t rows, int64_t K, float* y) {
    for_rows(rows, rows * K, [=](int64_t row) { norm_row(x + row * K, weight, eps, K, y + row * K, centered); });
}

void fl_qk_norm(float* qkv, const float* q_weight, const float* k_weight, float eps, int64_t whole, int64_t T, int64_t H,
                int64_t G, int64_t D) {
    qk_norm(qkv, q_weight, k_weight, eps, whole, T, {H, G, D});
}

void fl_silu_mul(const float* gate_up, int64_t rows, int64_t F, float* y) {
    for_rows(rows, rows * F * EXPONENTIAL,
             [=](int64_t row) { gate_row<silu>(gate_up + row * 2 * F, gate_up + row * 2 * F + F, F, y + row * F); });
}

void fl_gelu_tanh_mul(const float* gate_up, int64_t rows, int64_t F, float* y) {
    for_rows(rows, rows * F * EXPONENTIAL,
             [=](int64_t row) { gate_row<gelu_tanh>(gate_up + row * 2 * F, gate_up + row * 2 * F + F, F, y + row * F); });
}

// kind: 0 gelu, 1 gelu with tanh, 2 quick gelu, 3 silu, 4 tanh, 5 exp, 6 sigmoid, 7 softplus.
void fl_activate(const float* x, int64_t kind, int64_t count, float* y) {
    if (kind == 0) activate<gelu>(x, count, y);
    if (kind == 1) activate<gelu_tanh>(x, count, y);
    if (kind == 2) activate<quick_gelu>(x, count, y);
    if (kind == 3) activate<silu>(x, count, y);
    if (kind == 4) activate<tanh_lanes<v8>>(x, count, y);
    if (kind == 5) activate<exp_v8>(x, count, y);
    if (kind == 6) activate<sigmoid>(x, count, y);
    if (kind == 7) activate<softplus>(x, count, y);
}

int64_t fl_rope_and_cache(float* qkv, const float* cos, const float* sin, int64_t P, int64_t R, int64_t interleaved,
                          const float* growth,
                          const int32_t* positions, const int64_t* slots, void* key, void* value, float* scales,
                          int64_t storage, int64_t num_slots, int64_t T, int64_t H, int64_t G, int64_t D, int64_t B) {
    const StepBatch batch{nullptr, nullptr, nullptr, nullptr, positions, slots, nullptr, T, 0, B};
    const KVLayer kv{key, value, scales, storage, num_slots};
    return !rope_and_cache(qkv, {cos, sin, P, R, interleaved, growth}, batch, kv, {H, G, D});
}
}
