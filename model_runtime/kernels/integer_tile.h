// Tiles of the product of quantised rows and a matrix of integers, with integers and floats in vector registers.
#pragma once

#include <algorithm>
#include <vector>

#include "integer.h"
#include "integer_dot.h"

constexpr int MAX_TILE_ROWS = LANES == 16 ? 8 : 4;  // sums of integers and of floats fit in the registers
constexpr int64_t STREAM_AHEAD = 2048;              // bytes that are fetched ahead of a tile, to the first-level cache
constexpr int64_t FAR_AHEAD = 8192;                 // and to the second-level cache, which can wait for more at a time
constexpr int SECOND_LEVEL = 2;                     // as __builtin_prefetch counts: 3 is the first
constexpr int64_t PAST_CACHES = 32768;              // outputs of a row that is not kept in the caches

// Bytes from a row's values in a block to its second plane.
constexpr int64_t PLANE = QuantizedRows::GROUP * BLOCK;

// Where a row's values of a block are, which is number `at` of all rows of all blocks.
template <int PLANES> INLINE const int8_t* values_at(const QuantizedRows& x, int64_t at) {
    constexpr int64_t GROUP = QuantizedRows::GROUP;
    return x.values + (at / GROUP * PLANES * GROUP + at % GROUP) * BLOCK;
}

// Twice the numbers of 4 bits of MXFP4 (E2M1), of which the highest is the sign.
alignas(16) constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Four bytes from 0 to 15 of each output become what a table has there.
INLINE ivec looked_up(ivec places, const int8_t (&table)[16]) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    return bit_copy<ivec>(_mm512_shuffle_epi8(all, bit_copy<__m512i>(places)));
#elif defined(__AVX2__)
    const __m256i all = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    return bit_copy<ivec>(_mm256_shuffle_epi8(all, bit_copy<__m256i>(places)));
#else
    struct Bytes {
        uint8_t b[sizeof(ivec)];
    };
    Bytes bytes = bit_copy<Bytes>(places);
    for (uint8_t& b : bytes.b) b = uint8_t(table[b]);
    return bit_copy<ivec>(bytes);
#endif
}

// Four bytes of each output: group g of a block as signed integers; those of 4 bits less 8, or as they are, or looked up.
template <int64_t FORMAT> INLINE ivec signed_group(const uint8_t* quants, int g, int v) {
    if (FORMAT == Q8_0) return load_bytes(quants + (g * VECTORS + v) * sizeof(ivec));
    const ivec bytes = load_bytes(quants + (g % 4 * VECTORS + v) * sizeof(ivec));
    const ivec integers = (g < 4 ? bytes : bytes >> 4) & 0x0f0f0f0f;
    if (FORMAT == MXFP4) return looked_up(integers, E2M1);
    if (FORMAT == Q6_K) {
        const ivec upper = load_bytes(quants + (4 * VECTORS + g % 2 * VECTORS + v) * sizeof(ivec)) >> g / 2 * 2;
        return ((integers | (upper & 0x03030303) << 4) + 0x60606060) ^ int32_t(0x80808080);  // less 32
    }
    return has_minimum(FORMAT) ? integers : (integers + 0x78787878) ^ int32_t(0x80808080);  // no carry from byte to byte
}

// Exact sums over the groups [FROM, TO) of a block, for R rows.
template <int64_t FORMAT, int PLANES, int R, int FROM = 0, int TO = 8>
INLINE void dot_block(const uint8_t* quants, const int8_t* x, const ivec (&offsets)[R], ivec (&exact)[R][VECTORS]) {
    typedef BlockDot<PLANES> Dot;
    typename Dot::Sum sums[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = Dot::start(offsets[r]);
#pragma GCC unroll 8
    for (int g = FROM; g < TO; g++) {
        typename Dot::Weights w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = Dot::weights(signed_group<FORMAT>(quants, g, v));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            ivec values[PLANES];
            for (int p = 0; p < PLANES; p++) values[p] = broadcast4(x + p * PLANE + r * BLOCK + g * 4);
            for (int v = 0; v < VECTORS; v++) Dot::add(sums[r][v], w[v], values);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) exact[r][v] = Dot::finish(sums[r][v]);
}

// Lanes of bytes, signed or not.
template <class V> INLINE typename Lanes<V>::i32 wide_bytes(const uint8_t* p) {
    typename Lanes<V>::s8 bytes;
    memcpy(&bytes, p, sizeof(bytes));
    return __builtin_convertvector(bytes, typename Lanes<V>::i32);
}

// The scales of a vector's outputs in block b, or in one half of it.
template <int64_t FORMAT, class V> INLINE V scales_of(const Panel& p, int64_t b, int v, int half = 0) {
    const uint8_t* at = p.scales_at(b, blocks_of_scale(FORMAT));
    if constexpr (FORMAT == MXFP4) {
        const auto exponents = wide_bytes<V>(at + v * LANES) & 0xff;
        const auto least = bit_copy<typename Lanes<V>::i32>(exponents == 0) & 0x00400000;  // 2^-127, which is subnormal
        return bit_copy<V>(exponents << 23 | least) * 0.5f;
    }
    if constexpr (is_super(FORMAT)) {
        const auto bytes = wide_bytes<V>(at + half * PANEL + v * LANES);
        return load<V>(p.factors_at(b) + v * LANES) * __builtin_convertvector(FORMAT == Q4_K ? bytes & 0xff : bytes, V);
    }
    return load<V>(reinterpret_cast<const fp16*>(at) + v * LANES);
}

// The minima of outputs with scales.
template <int64_t FORMAT, class V> INLINE V minima_of(const Panel& p, int64_t b, int v, V scales) {
    if constexpr (!has_minimum(FORMAT)) return V{};
    const uint8_t* at = p.scales_at(b, blocks_of_scale(FORMAT));
    if constexpr (FORMAT == Q4_K)
        return -load<V>(p.factors_at(b) + PANEL + v * LANES) *
               __builtin_convertvector(wide_bytes<V>(at + PANEL + v * LANES) & 0xff, V);
    const V second = load<V>(reinterpret_cast<const fp16*>(at) + PANEL + v * LANES);
    return has_zero(FORMAT) ? -second * scales : second;
}

// Half a block of R rows, of a format whose halves have scales of their own.
template <int64_t FORMAT, int PLANES, int R, int HALF>
INLINE void add_half(const Panel& p, int64_t b, const QuantizedRows& x, int64_t at, fvec (&sums)[R][VECTORS]) {
    constexpr int64_t GROUP = QuantizedRows::GROUP;
    const int64_t place = at / GROUP * 2 * GROUP + at % GROUP;
    ivec offsets[R], exact[R][VECTORS];
    for (int r = 0; r < R; r++) {
        const int32_t all = x.offsets[place + r], first = x.offsets[place + GROUP + r];
        offsets[r] = (HALF ? all - first : first) - ivec{};
    }
    dot_block<FORMAT, PLANES, R, 4 * HALF, 4 * HALF + 4>(p.quants_at(b), values_at<PLANES>(x, at), offsets, exact);
    for (int v = 0; v < VECTORS; v++) {
        const fvec scale = scales_of<FORMAT, fvec>(p, b, v, HALF);
        for (int r = 0; r < R; r++)
            sums[r][v] = fused(to_float(exact[r][v]), scale * splat<fvec>(x.scales[at + r]), sums[r][v]);
    }
}

// Block b of R rows, the first of which is number `at` of all blocks: integers, then floats as integer.h says.
template <int64_t FORMAT, int PLANES, int R>
INLINE void add_block(const Panel& p, int64_t b, const QuantizedRows& x, int64_t at, fvec (&sums)[R][VECTORS]) {
    if constexpr (FORMAT == Q6_K) {
        add_half<FORMAT, PLANES, R, 0>(p, b, x, at, sums);
        return add_half<FORMAT, PLANES, R, 1>(p, b, x, at, sums);
    }
    constexpr int64_t GROUP = QuantizedRows::GROUP;
    const int64_t place = at / GROUP * 2 * GROUP + at % GROUP;
    ivec offsets[R], exact[R][VECTORS];
    for (int r = 0; r < R; r++) offsets[r] = x.offsets[place + r] - ivec{};
    dot_block<FORMAT, PLANES, R>(p.quants_at(b), values_at<PLANES>(x, at), offsets, exact);
    for (int v = 0; v < VECTORS; v++) {
        const fvec scale = scales_of<FORMAT, fvec>(p, b, v);
        const fvec minimum = minima_of<FORMAT>(p, b, v, scale);
        for (int r = 0; r < R; r++) {
            sums[r][v] = fused(to_float(exact[r][v]), scale * splat<fvec>(x.scales[at + r]), sums[r][v]);
            if constexpr (has_minimum(FORMAT)) sums[r][v] = fused(minimum, splat<fvec>(x.sums[at + r]), sums[r][v]);
        }
    }
}

// Rows of a vocabulary's length are written past the caches: where their length is a multiple of a page, neighbouring rows
// would push each other out.
INLINE void store_vector(float* p, fvec v, int64_t N) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    if (N >= PAST_CACHES && reinterpret_cast<uintptr_t>(p) % 64 == 0)
        return _mm512_stream_ps(p, bit_copy<__m512>(v));
#endif
    store(p, v);
}

// What `store_vector` wrote is seen by whoever sees what this thread does next.
INLINE void stores_done() {
#ifdef __AVX512F__
    _mm_sfence();
#endif
}

// A vector of one row's sums becomes outputs, from `column` on: with the bias, and no more than there are.
inline __attribute__((noinline)) void store_outputs(const Matrix& w, int64_t column, fvec sum, float* row) {
    const int64_t count = std::min<int64_t>(LANES, w.N - column);
    if (count <= 0) return;
    if (count == LANES) return store_vector(row + column, w.bias ? sum + load<fvec>(w.bias + column) : sum, w.N);
    float out[LANES];
    store(out, sum);
    for (int64_t i = 0; i < count; i++) row[column + i] = w.bias ? out[i] + w.bias[column + i] : out[i];
}

// R rows from `row` on, all in one group, times one panel.
template <int64_t FORMAT, int PLANES, int R>
__attribute__((noinline)) void vector_tile(const Matrix& w, int64_t panel, const QuantizedRows& x, int64_t row,
                                           float* y) {
    constexpr int64_t GROUP = QuantizedRows::GROUP;
    constexpr int64_t SHARE = panel_layout(FORMAT, SUPER).bytes / 8;  // of a block in the bytes of a panel
    const Panel p(w, panel);
    const int64_t blocks = w.K / BLOCK;
    fvec sums[R][VECTORS] = {};
    int64_t at = row / GROUP * blocks * GROUP + row % GROUP;
    for (int64_t b = 0; b < blocks; b++, at += GROUP) {
        const uint8_t* ahead = p.scales + b * SHARE;
#pragma GCC unroll 9
        for (int64_t line = 0; line < SHARE; line += 64) {
            __builtin_prefetch(ahead + STREAM_AHEAD + line);
            __builtin_prefetch(ahead + FAR_AHEAD + line, 0, SECOND_LEVEL);
        }
        add_block<FORMAT, PLANES, R>(p, b, x, at, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++)
            store_outputs(w, panel * PANEL + v * LANES, sums[r][v], y + (row + r) * w.N);
}

// `rows` <= R rows in one tile.
template <int64_t FORMAT, int PLANES, int R>
INLINE void vector_tile_of(int64_t rows, const Matrix& w, int64_t panel, const QuantizedRows& x, int64_t row, float* y) {
    if (rows == R) return vector_tile<FORMAT, PLANES, R>(w, panel, x, row, y);
    if constexpr (R > 1) vector_tile_of<FORMAT, PLANES, R - 1>(rows, w, panel, x, row, y);
}

// Rows [row, end) of one group times one panel, in tiles of nearly equal height.
template <int64_t FORMAT, int PLANES>
void vector_tiles(const Matrix& w, int64_t panel, const QuantizedRows& x, int64_t row, int64_t end, float* y) {
    while (row < end) {
        const int64_t tiles = (end - row + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS, rows = (end - row + tiles - 1) / tiles;
        vector_tile_of<FORMAT, PLANES, MAX_TILE_ROWS>(rows, w, panel, x, row, y);
        row += rows;
    }
}
