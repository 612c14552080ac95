// Vector types, loads that expand storage types, exp, and the micro-kernel that every product of matrices uses.
//
// GCC/Clang vector extensions: one source for AVX2, AVX-512 and NEON. Rule of the whole library: the float operations
// behind one output number, and their order, depend on nothing but that number's own row (batch invariance). So no
// -ffast-math, no splits of a sum that depend on the batch or the number of threads, and -ffp-contract=off: operations
// are fused where `fused` says so. (Left to itself, GCC fuses a * b + c in one instance of a template and not in another.)
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif

typedef float v8 __attribute__((vector_size(32)));
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef int32_t i16 __attribute__((vector_size(64)));

// The widest vector with its own instructions here.
#ifdef __AVX512F__
typedef v16 vec;
#else
typedef v8 vec;
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int64_t PANEL = 16;  // columns of a packed panel, tokens of a key panel

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

template <class V> struct Lanes;
template <> struct Lanes<v8> {
    typedef i8 i32;
    typedef int8_t s8 __attribute__((vector_size(8)));
    typedef int16_t s16 __attribute__((vector_size(16)));
    typedef uint16_t u16 __attribute__((vector_size(16)));
    typedef uint32_t u32 __attribute__((vector_size(32)));
};
template <> struct Lanes<v16> {
    typedef i16 i32;
    typedef int8_t s8 __attribute__((vector_size(16)));
    typedef int16_t s16 __attribute__((vector_size(32)));
    typedef uint16_t u16 __attribute__((vector_size(32)));
    typedef uint32_t u32 __attribute__((vector_size(64)));
};

template <class To, class From> INLINE To bit_copy(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

// All lanes x: x - 0 is x for every x, so the compiler drops the subtraction.
template <class V> INLINE V splat(float x) { return x - V{}; }

// a * b + c, rounded once where the processor can.
#if defined(__FMA__)
INLINE v8 fused(v8 a, v8 b, v8 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#elif defined(__ARM_FEATURE_FMA)
struct Halves {
    float32x4_t half[2];
};
INLINE v8 fused(v8 a, v8 b, v8 c) {
    const Halves x = bit_copy<Halves>(a), y = bit_copy<Halves>(b), z = bit_copy<Halves>(c);
    return bit_copy<v8>(Halves{{vfmaq_f32(z.half[0], x.half[0], y.half[0]), vfmaq_f32(z.half[1], x.half[1], y.half[1])}});
}
INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE v8 fused(v8 a, v8 b, v8 c) { return a * b + c; }
INLINE float fused(float a, float b, float c) { return a * b + c; }
#endif
#ifdef __AVX512F__
INLINE v16 fused(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
#endif

template <class V> INLINE V load(const float* p) {
    V v;
    memcpy(&v, p, sizeof(v));
    return v;
}

// Sixteen bits to thirty-two in each lane. (GCC needs four instructions for its own __builtin_convertvector.)
template <class V> INLINE typename Lanes<V>::u32 widen(typename Lanes<V>::u16 bits) {
    typedef typename Lanes<V>::u32 U;
#ifdef __AVX512F__
    if constexpr (sizeof(V) == 64) return bit_copy<U>(_mm512_cvtepu16_epi32(bit_copy<__m256i>(bits)));
#endif
#ifdef __AVX2__
    if constexpr (sizeof(V) == 32) return bit_copy<U>(_mm256_cvtepu16_epi32(bit_copy<__m128i>(bits)));
#endif
    return __builtin_convertvector(bits, U);
}

template <class V> INLINE V load(const bf16* p) {
    typename Lanes<V>::u16 bits;
    memcpy(&bits, p, sizeof(bits));
    return bit_copy<V>(widen<V>(bits) << 16);
}

// float16. Where there is no instruction for it: move exponent and mantissa into place, then scale by 2^112, which also
// makes subnormals right; infinities and NaN get the largest exponent. (The compiler's own conversion is scalar in GCC.)
template <class V> INLINE V from_halves(typename Lanes<V>::u16 half) {
#ifdef __AVX512F__
    if constexpr (sizeof(V) == 64) return bit_copy<V>(_mm512_cvtph_ps(bit_copy<__m256i>(half)));
#endif
#ifdef __F16C__
    if constexpr (sizeof(V) == 32) return bit_copy<V>(_mm256_cvtph_ps(bit_copy<__m128i>(half)));
#endif
    typedef typename Lanes<V>::u32 U;
    const U bits = widen<V>(half);
    const V scaled = bit_copy<V>((bits & 0x7fff) << 13) * 0x1p112f;
    const U special = bit_copy<U>((bits & 0x7c00) == 0x7c00) & 0x7f800000u;
    return bit_copy<V>(bit_copy<U>(scaled) | special | (bits & 0x8000) << 16);
}

template <class V> INLINE V load(const fp16* p) {
    typename Lanes<V>::u16 half;
    memcpy(&half, p, sizeof(half));
    return from_halves<V>(half);
}

template <class V> INLINE V load(const int8_t* p) {
    typename Lanes<V>::s8 bytes;
    memcpy(&bytes, p, sizeof(bytes));
#ifdef __AVX512F__
    if constexpr (sizeof(V) == 64)
        return bit_copy<V>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bit_copy<__m128i>(bytes))));
#endif
#ifdef __AVX2__
    if constexpr (sizeof(V) == 32)
        return bit_copy<V>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_copy<int64_t>(bytes)))));
#endif
    return __builtin_convertvector(bytes, V);
}

// One number, expanded as those of a vector are.
template <class T> INLINE float load_one(const T* p) {
    const T lanes[8] = {*p};
    return load<v8>(lanes)[0];
}

template <class V> INLINE void store(float* p, V v) { memcpy(p, &v, sizeof(v)); }

template <class V> INLINE V select(typename Lanes<V>::i32 mask, V yes, V no) { return mask ? yes : no; }

// Sums and maxima over lanes in a fixed order.
INLINE float lane_sum(v8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

INLINE float lane_max(v8 v) {
    const auto larger = [](float a, float b) { return b > a ? b : a; };
    return larger(larger(larger(v[0], v[4]), larger(v[2], v[6])), larger(larger(v[1], v[5]), larger(v[3], v[7])));
}

#ifdef __AVX512F__
struct Pair {
    v8 low, high;
};
INLINE float lane_sum(v16 v) {
    const Pair halves = bit_copy<Pair>(v);
    return lane_sum(halves.low + halves.high);
}
INLINE float lane_max(v16 v) {
    const Pair halves = bit_copy<Pair>(v);
    return lane_max(select(halves.high > halves.low, halves.high, halves.low));
}
#endif

// e^x within 2 ulp; clamped to [e^-87.33, e^88.37]; NaN stays NaN; exactly 1 at 0. Range reduction by ln 2 in two parts
// and the degree-7 polynomial of Cephes' expf.
template <class V> INLINE V exp_lanes(V x) {
    typedef typename Lanes<V>::i32 I;
    const V low = splat<V>(-87.33f), high = splat<V>(88.37f);
    x = select(x < low, low, x);
    x = select(x > high, high, x);
    const V magic = splat<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    const V shifted = fused(x, splat<V>(1.44269504088896341f), magic), n = shifted - magic;
    const V r = fused(n, splat<V>(2.12194440e-4f), fused(n, splat<V>(-0.693359375f), x));
    V p = splat<V>(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fused(p, r, splat<V>(c));
    const V y = fused(p, r * r, r) + 1.0f;
    const I exponent = (bit_copy<I>(shifted) - 0x4b400000 + 127) << 23;
    return y * bit_copy<V>(exponent);
}

// Near zero a polynomial: there 1 - 2 / (1 + e^2x) has lost its digits.
template <class V> INLINE V tanh_lanes(V x) {
    const V s = x * x;
    V near = fused(s, splat<V>(62.0f / 2835.0f), splat<V>(-17.0f / 315.0f));
    for (const float c : {2.0f / 15.0f, -1.0f / 3.0f}) near = fused(near, s, splat<V>(c));
    return select(s < 0.04f, fused(near * s, x, x), 1.0f - 2.0f / (1.0f + exp_lanes(x + x)));
}

INLINE v8 exp_v8(v8 x) { return exp_lanes(x); }
INLINE float exp_scalar(float x) { return exp_lanes(splat<v8>(x))[0]; }

// acc[MR][NV] += a[MR][k] * b[k][NV vectors], one fused multiply-add after the other in the order of k.
template <class V, int MR, int NV, class T>
INLINE void multiply_add(const float* a, int64_t lda, const T* b, int64_t ldb, int64_t k, V (&acc)[MR][NV]) {
    for (int64_t i = 0; i < k; i++) {
        V column[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) column[v] = load<V>(b + i * ldb + v * int64_t(sizeof(V) / 4));
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) acc[r][v] = fused(splat<V>(a[r * lda + i]), column[v], acc[r][v]);
        }
    }
}
