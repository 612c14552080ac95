// Exact sums of products of integers, in the instructions that the processor has.
//
// A vector of int32 holds, for each of its outputs, 4 signed bytes of weights (a group of k), and meets the same 4 k of a
// row in all lanes: values of 8 bits, or of 16 in two planes of bytes. `offset` is -128 * sum of the row's values in the
// block, for what unsigned weights are too large by.
#pragma once

#include "vec.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
typedef v16 fvec;
typedef int32_t ivec __attribute__((vector_size(64)));
#else
typedef v8 fvec;
typedef i8 ivec;
#endif

constexpr int LANES = sizeof(ivec) / 4;
constexpr int VECTORS = PANEL / LANES;  // of a panel

INLINE ivec load_bytes(const void* p) {
    ivec v;
    memcpy(&v, p, sizeof(v));
    return v;
}

// All lanes the four bytes at p.
INLINE ivec broadcast4(const void* p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return bytes - ivec{};
}

template <int PLANES> struct BlockDot;

INLINE fvec to_float(ivec v) { return __builtin_convertvector(v, fvec); }

#if defined(__AVX2__) && !(defined(__AVX512VNNI__) && defined(__AVX512BW__))

INLINE ivec madd(__m256i a, __m256i b) { return bit_copy<ivec>(_mm256_madd_epi16(a, b)); }

// Values of 8 bits are from -127 to 127, so that no sum of two products with bytes is beyond 16 bits.
template <> struct BlockDot<1> {
    typedef ivec Sum;
    struct Weights {
        __m256i sizes, signs;
    };
    static INLINE Sum start(ivec) { return {}; }
    static INLINE Weights weights(ivec w) {
        const __m256i bytes = bit_copy<__m256i>(w);
        return {_mm256_abs_epi8(bytes), bytes};
    }
    static INLINE void add(Sum& sum, Weights w, const ivec (&x)[1]) {
        const __m256i values = _mm256_sign_epi8(bit_copy<__m256i>(x[0]), w.signs);
        sum += madd(_mm256_maddubs_epi16(w.sizes, values), _mm256_set1_epi16(1));
    }
    static INLINE ivec finish(Sum sum) { return sum; }
};

// Planes: of each group the first and third value, the second and fourth.
template <> struct BlockDot<2> {
    struct Sum {
        ivec all;
    };
    struct Weights {
        __m256i even, odd;
    };
    static INLINE void split(const int16_t* values, int8_t* x0, int8_t* x1) {
        for (int i = 0; i < 16; i++) {
            memcpy(x0 + 2 * i, values + 2 * i, 2);
            memcpy(x1 + 2 * i, values + 2 * i + 1, 2);
        }
    }
    static INLINE Sum start(ivec) { return {ivec{}}; }
    static INLINE Weights weights(ivec w) {
        const __m256i bytes = bit_copy<__m256i>(w);
        return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
    }
    static INLINE void add(Sum& sum, Weights w, const ivec (&x)[2]) {
        sum.all += madd(w.even, bit_copy<__m256i>(x[0])) + madd(w.odd, bit_copy<__m256i>(x[1]));
    }
    static INLINE ivec finish(Sum sum) { return sum.all; }
};

#else

// Sums of the products of four bytes; x is signed, and so is w unless UNSIGNED.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr bool UNSIGNED = true;
INLINE ivec add_products(ivec sum, ivec w, ivec x) {
    return bit_copy<ivec>(_mm512_dpbusd_epi32(bit_copy<__m512i>(sum), bit_copy<__m512i>(w), bit_copy<__m512i>(x)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool UNSIGNED = false;
INLINE ivec add_products(ivec sum, ivec w, ivec x) {
    struct Halves {
        int32x4_t half[2];
    };
    const Halves s = bit_copy<Halves>(sum), a = bit_copy<Halves>(w), b = bit_copy<Halves>(x);
    const auto dot = [&](int i) {
        return vdotq_s32(s.half[i], vreinterpretq_s8_s32(a.half[i]), vreinterpretq_s8_s32(b.half[i]));
    };
    return bit_copy<ivec>(Halves{{dot(0), dot(1)}});
}
#else
constexpr bool UNSIGNED = false;
INLINE ivec add_products(ivec sum, ivec w, ivec x) {
    for (int up = 0; up < 32; up += 8) sum += (w << up >> 24) * (x << up >> 24);
    return sum;
}
#endif

template <> struct BlockDot<1> {
    typedef ivec Sum, Weights;
    static INLINE Sum start(ivec offset) { return UNSIGNED ? offset : ivec{}; }
    static INLINE Weights weights(ivec w) { return UNSIGNED ? w ^ int32_t(0x80808080) : w; }  // + 128
    static INLINE void add(Sum& sum, Weights w, const ivec (&x)[1]) { sum = add_products(sum, w, x[0]); }
    static INLINE ivec finish(Sum sum) { return sum; }
};

// Planes: the high and the low bytes, value = 256 high + low, low in -128 .. 127.
template <> struct BlockDot<2> {
    struct Sum {
        ivec high, low;
    };
    typedef ivec Weights;
    static INLINE void split(const int16_t* values, int8_t* high, int8_t* low) {
        for (int k = 0; k < 32; k++) {
            low[k] = int8_t(values[k]);
            high[k] = int8_t((values[k] + 128) >> 8);
        }
    }
    static INLINE Sum start(ivec offset) { return {ivec{}, UNSIGNED ? offset : ivec{}}; }
    static INLINE Weights weights(ivec w) { return BlockDot<1>::weights(w); }
    static INLINE void add(Sum& sum, Weights w, const ivec (&x)[2]) {
        sum.high = add_products(sum.high, w, x[0]);
        sum.low = add_products(sum.low, w, x[1]);
    }
    static INLINE ivec finish(Sum sum) { return (sum.high << 8) + sum.low; }
};

#endif
