// How numbers are stored in the KV cache (`KVLayer` in layer_ops.h); `kv_store.py` says what an int8 number means. And
// how they are rotated before.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

// function(a number of the storage type)
template <class Function> void with_storage(int64_t storage, Function function) {
    if (storage == 0) function(float());
    if (storage == 1) function(bf16());
    if (storage == 2) function(fp16());
    if (storage == 3) function(int8_t());
}

// Rotate the channel pairs of one head: pair i is (first[i * step], second[i * step]).
INLINE void rotate(float* first, float* second, int64_t step, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = first[i * step], b = second[i * step];
        first[i * step] = fused(a, cos[i], -(b * sin[i]));
        second[i * step] = fused(b, cos[i], a * sin[i]);
    }
}

// Numbers of a storage type to float32.
template <class T> void expand(const T* from, int64_t count, float* to) {
    constexpr int64_t W = sizeof(vec) / 4;
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load<vec>(from + i));
    for (; i < count; i++) to[i] = load_one(from + i);
}

// Eight numbers to a storage type, rounded to nearest even.
INLINE void narrow(v8 x, float* to) { store(to, x); }

INLINE void put_low_halves(i8 bits, void* to) {
    const Lanes<v8>::u16 halves = __builtin_convertvector(bits, Lanes<v8>::u16);
    memcpy(to, &halves, sizeof(halves));
}

INLINE void narrow(v8 x, bf16* to) {
    const i8 bits = bit_copy<i8>(x), high = (bits >> 16) & 0xffff;
    const i8 rounded = ((bits + 0x7fff + (high & 1)) >> 16) & 0xffff;
    put_low_halves(x == x ? rounded : high | 0x40, to);  // adding to the bits of a NaN could make it a number
}

// By the same means as its load: normal numbers are rounded in their bits, subnormal ones by adding 0.5, whose last bit
// is that of a subnormal float16. From 65520 on it is infinity.
INLINE void narrow(v8 x, fp16* to) {
    const i8 bits = bit_copy<i8>(x), size = bits & 0x7fffffff;
    const i8 normal = (size - (112 << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    const i8 subnormal = bit_copy<i8>(bit_copy<v8>(size) + 0.5f) - 0x3f000000;
    i8 half = size < (113 << 23) ? subnormal : normal;
    half = size >= 0x477ff000 ? half * 0 + 0x7c00 : half;
    half = x == x ? half : half * 0 + 0x7e00;
    put_low_halves(half | ((bits >> 16) & 0x8000), to);
}

// To the integer in [-127, 127]; NaN to 0.
INLINE void narrow(v8 x, int8_t* to) {
    x = select(x == x, x, v8{});
    x = select(x < -127.0f, splat<v8>(-127.0f), x);
    x = select(x > 127.0f, splat<v8>(127.0f), x);
    const i8 integers = bit_copy<i8>(x + 12582912.0f) - 0x4b400000;  // 1.5 * 2^23
    const Lanes<v8>::s8 bytes = __builtin_convertvector(integers, Lanes<v8>::s8);
    memcpy(to, &bytes, sizeof(bytes));
}

// The largest magnitude; NaN if there is one.
INLINE float magnitude(const float* x, int64_t count) {
    int32_t best = 0;
    for (int64_t i = 0; i < count; i++) best = std::max(best, bit_copy<int32_t>(x[i]) & 0x7fffffff);
    return bit_copy<float>(best);
}

// One head of D numbers, `step` apart; int8 as multiples of *scale. A head that is not finite gets a scale that is not,
// so that it shows in whatever attends to it.
template <class T> void store_head(const float* x, int64_t D, T* to, int64_t step, float* scale) {
    constexpr bool scaled = std::is_same<T, int8_t>();
    if (scaled) *scale = magnitude(x, D) / 127.0f;
    const auto put = [=](const float* from, int64_t count, T* at) {
        T stored[8];
        narrow(scaled ? load<v8>(from) / *scale : load<v8>(from), stored);
        for (int64_t i = 0; i < count; i++) at[i * step] = stored[i];
    };
    int64_t d = 0;
    for (; d + 8 <= D; d += 8) put(x + d, 8, to + d * step);
    float tail[8] = {};
    std::copy_n(x + d, D - d, tail);
    put(tail, D - d, to + d * step);
}
