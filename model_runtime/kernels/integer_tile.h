// Tiles of the product of quantised rows and a matrix of integers, with integers and floats in vector registers.
#pragma once

#include <algorithm>
#include <vector>

#include "integer.h"
#include "integer_dot.h"

constexpr int MAX_TILE_ROWS = LANES == 16 ? 8 : 4;  // sums of integers and of floats fit in the registers
constexpr int64_t STREAM_AHEAD = 2048;              // bytes that are fetched ahead of a tile

// Bytes from a row's values in a block to its second plane.
constexpr int64_t PLANE = QuantizedRows::GROUP * BLOCK;

// Exact sums over a block of 8-bit weights, for R rows.
template <int R> INLINE void dot_wide(const uint8_t* quants, const int8_t* x, const ivec (&offsets)[R],
                                      ivec (&exact)[R][VECTORS]) {
    Wide::Sum sums[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = Wide::start(offsets[r]);
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        Wide::Weights w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = Wide::weights(load_bytes(quants + (g * VECTORS + v) * sizeof(ivec)));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const ivec x0 = broadcast4(x + r * BLOCK + g * 4), x1 = broadcast4(x + PLANE + r * BLOCK + g * 4);
            for (int v = 0; v < VECTORS; v++) Wide::add(sums[r][v], w[v], x0, x1);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) exact[r][v] = Wide::finish(sums[r][v]);
}

// The same of 4-bit weights.
template <int R> INLINE void dot_narrow(const uint8_t* quants, const int8_t* x, const ivec (&offsets)[R],
                                        ivec (&exact)[R][VECTORS]) {
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) exact[r][v] = Narrow::start(offsets[r]);
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
        ivec low[VECTORS], high[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            const ivec bytes = load_bytes(quants + (g * VECTORS + v) * sizeof(ivec));
            low[v] = bytes & 0x0f0f0f0f;
            high[v] = bytes >> 4 & 0x0f0f0f0f;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const ivec near = broadcast4(x + r * BLOCK + g * 4), far = broadcast4(x + r * BLOCK + 16 + g * 4);
            for (int v = 0; v < VECTORS; v++) exact[r][v] = Narrow::add(exact[r][v], low[v], near);
            for (int v = 0; v < VECTORS; v++) exact[r][v] = Narrow::add(exact[r][v], high[v], far);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) exact[r][v] = Narrow::finish(exact[r][v], offsets[r]);
}

// One block of R rows, the first of which is number `at` of all blocks: integers, then floats as integer.h says.
template <int64_t FORMAT, int R>
INLINE void add_block(const uint8_t* scales, const uint8_t* quants, const QuantizedRows& x, int64_t at,
                      fvec (&sums)[R][VECTORS]) {
    constexpr int64_t GROUP = QuantizedRows::GROUP;
    ivec offsets[R], exact[R][VECTORS];
    for (int r = 0; r < R; r++) offsets[r] = FORMAT == Q4_1 ? ivec{} : x.offsets[at + r] - ivec{};
    if constexpr (FORMAT == Q8_0)
        dot_wide<R>(quants, x.values + (at / GROUP * 2 * GROUP + at % GROUP) * BLOCK, offsets, exact);
    else
        dot_narrow<R>(quants, x.values + at * BLOCK, offsets, exact);
    const fp16* halves = reinterpret_cast<const fp16*>(scales);
    for (int v = 0; v < VECTORS; v++) {
        const fvec scale = load<fvec>(halves + v * LANES);
        fvec minimum{};
        if constexpr (FORMAT == Q4_1) minimum = load<fvec>(halves + PANEL + v * LANES);
        for (int r = 0; r < R; r++) {
            sums[r][v] = fused(to_float(exact[r][v]), scale * splat<fvec>(x.scales[at + r]), sums[r][v]);
            if constexpr (FORMAT == Q4_1) sums[r][v] = fused(minimum, splat<fvec>(x.sums[at + r]), sums[r][v]);
        }
    }
}

// A vector of one row's sums becomes outputs, from `column` on: with the bias, and no more than there are.
inline __attribute__((noinline)) void store_outputs(const Matrix& w, int64_t column, fvec sum, float* row) {
    const int64_t count = std::min<int64_t>(LANES, w.N - column);
    if (count <= 0) return;
    if (count == LANES) return store(row + column, w.bias ? sum + load<fvec>(w.bias + column) : sum);
    float out[LANES];
    store(out, sum);
    for (int64_t i = 0; i < count; i++) row[column + i] = w.bias ? out[i] + w.bias[column + i] : out[i];
}

// R rows from `row` on, all in one group, times one panel.
template <int64_t FORMAT, int R>
__attribute__((noinline)) void vector_tile(const Matrix& w, int64_t panel, const QuantizedRows& x, int64_t row,
                                           float* y) {
    constexpr int64_t GROUP = QuantizedRows::GROUP;
    const Panel p(w, panel);
    const int64_t blocks = w.K / BLOCK;
    const uint8_t *scales = p.scales, *quants = p.quants;
    fvec sums[R][VECTORS] = {};
    int64_t at = row / GROUP * blocks * GROUP + row % GROUP;
    for (int64_t b = 0; b < blocks; b++, at += GROUP) {
        for (int64_t line = 0; line < p.layout.quant_step; line += 64) __builtin_prefetch(quants + STREAM_AHEAD + line);
        add_block<FORMAT, R>(scales, quants, x, at, sums);
        scales += p.layout.scale_step;
        quants += p.layout.quant_step;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++)
            store_outputs(w, panel * PANEL + v * LANES, sums[r][v], y + (row + r) * w.N);
}

// `rows` <= R rows in one tile.
template <int64_t FORMAT, int R>
INLINE void vector_tile_of(int64_t rows, const Matrix& w, int64_t panel, const QuantizedRows& x, int64_t row, float* y) {
    if (rows == R) return vector_tile<FORMAT, R>(w, panel, x, row, y);
    if constexpr (R > 1) vector_tile_of<FORMAT, R - 1>(rows, w, panel, x, row, y);
}

// Rows [row, end) of one group times one panel, in tiles of nearly equal height.
template <int64_t FORMAT>
void vector_tiles(const Matrix& w, int64_t panel, const QuantizedRows& x, int64_t row, int64_t end, float* y) {
    while (row < end) {
        const int64_t tiles = (end - row + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS, rows = (end - row + tiles - 1) / tiles;
        vector_tile_of<FORMAT, MAX_TILE_ROWS>(rows, w, panel, x, row, y);
        row += rows;
    }
}
