// The same product in the processor's matrix unit (Intel AMX): 16 rows x 16 outputs x a block of 32 k in one instruction.
// The integers of a tile go through memory to the vector registers, where the floats are added as integer.h says.
#pragma once

#include "amx.h"
#include "integer_tile.h"

#ifdef HAVE_AMX
namespace amx {

constexpr int64_t GROUP = QuantizedRows::GROUP;

// Registers for tiles of `rows` rows. 0 to 3 are sums [rows][16 int32] of the first and second plane of an even and an
// odd block, 4 and 5 the planes of rows [rows][32 int8], 6 outputs [8 groups][16][4 int8]. Rows of 8 bits have one plane.
inline Shapes integer_shapes(int64_t rows) {
    Shapes shapes;
    std::fill_n(shapes.row_bytes, 7, 64);
    std::fill_n(shapes.row_bytes + 4, 2, 32);
    std::fill_n(shapes.rows, 6, uint8_t(rows));
    shapes.rows[6] = 8;
    return shapes;
}

// Integers of a panel as signed bytes [block][8 groups][16][4]: those of 4 bits less 8, or as they are.
template <int64_t FORMAT> const uint8_t* signed_bytes(const Panel& p, int64_t blocks, uint8_t* out) {
    if (FORMAT == Q8_0) return p.quants;
    const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(has_second(FORMAT) ? 0 : 8);
    for (int64_t i = 0; i < blocks * 4; i++) {
        const __m512i bytes = _mm512_loadu_si512(p.quants + i * 64);
        const __m512i near = _mm512_and_si512(bytes, low), far = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
        uint8_t* to = out + (i / 4 * 8 + i % 4) * 64;
        _mm512_storeu_si512(to, _mm512_sub_epi8(near, offset));
        _mm512_storeu_si512(to + 4 * 64, _mm512_sub_epi8(far, offset));
    }
    return out;
}

// The product of one plane of rows and the outputs over a block of k, whose sums are in registers 0 and 1, or 2 and 3.
// (The intrinsics take literal registers only.)
template <bool ODD> INLINE void multiply_first(const int8_t* rows, const uint8_t* outputs) {
    _tile_loadd(6, outputs, 64);
    _tile_loadd(4, rows, 32);
    if constexpr (ODD) {
        _tile_zero(2);
        _tile_dpbssd(2, 4, 6);
    } else {
        _tile_zero(0);
        _tile_dpbssd(0, 4, 6);
    }
}
template <bool ODD> INLINE void multiply_second(const int8_t* rows) {
    _tile_loadd(5, rows + PLANE, 32);
    if constexpr (ODD) {
        _tile_zero(3);
        _tile_dpbssd(3, 5, 6);
    } else {
        _tile_zero(1);
        _tile_dpbssd(1, 5, 6);
    }
}

// Sums of integers [plane][16][16] to memory.
template <bool ODD> INLINE void store_first(int32_t* out) {
    if constexpr (ODD)
        _tile_stored(2, out, 64);
    else
        _tile_stored(0, out, 64);
}
template <bool ODD> INLINE void store_second(int32_t* out) {
    if constexpr (ODD)
        _tile_stored(3, out + GROUP * PANEL, 64);
    else
        _tile_stored(1, out + GROUP * PANEL, 64);
}

// What a tile multiplies: a group of rows and a panel, as signed bytes, of a matrix. Meanwhile `ahead` bytes a block of the
// panel at `next` come to the first-level cache, and of the second panel behind it to the second-level cache.
struct Operands {
    const Panel& panel;
    const uint8_t *quants, *next;
    int64_t ahead;
    const QuantizedRows& x;
    int64_t blocks, group;
};

// Floats of the rows [FROM, TO) over a block: their sums of integers, and their scales.
template <int64_t FORMAT, int PLANES, int FROM, int TO>
INLINE void add_floats(const int32_t* integers, const Panel& panel, int64_t b, const float* row_scales,
                       const float* row_sums, v16* sums) {
    const v16 scale = scales_of<FORMAT, v16>(panel, b, 0), minimum = minima_of<FORMAT>(panel, b, 0, scale);
#pragma GCC unroll 16
    for (int r = FROM; r < TO; r++) {
        ivec exact = load_bytes(integers + r * PANEL);
        if constexpr (PLANES == 2) exact = (exact << 8) + load_bytes(integers + (GROUP + r) * PANEL);
        sums[r] = fused(to_float(exact), scale * splat<v16>(row_scales[r]), sums[r]);
        if constexpr (has_second(FORMAT)) sums[r] = fused(minimum, splat<v16>(row_sums[r]), sums[r]);
    }
}

// The floats of block b of R rows; the integers of the next block go to memory meanwhile, and those of the block after it
// are multiplied. In turns: in one piece each would keep the others from the few places where instructions wait.
template <int64_t FORMAT, int PLANES, int R, bool ODD>
INLINE void add_block(const Operands& o, int64_t b, int32_t (&integers)[2][PLANES * GROUP * PANEL], v16* sums) {
    const int64_t at = o.group * o.blocks * GROUP + b * GROUP;
    const int8_t* rows = o.x.values + (at + 2 * GROUP) * BLOCK * PLANES;
    const float *row_scales = o.x.scales + at, *row_sums = o.x.sums + at;
    const bool next = b + 1 < o.blocks, later = b + 2 < o.blocks;
    if (later) multiply_first<ODD>(rows, o.quants + (b + 2) * PANEL * BLOCK);
    add_floats<FORMAT, PLANES, 0, R / 2>(integers[ODD], o.panel, b, row_scales, row_sums, sums);
    if (next) store_first<!ODD>(integers[!ODD]);
    if (PLANES == 2 && later) multiply_second<ODD>(rows);
    add_floats<FORMAT, PLANES, R / 2, R>(integers[ODD], o.panel, b, row_scales, row_sums, sums);
    if constexpr (PLANES == 2)
        if (next) store_second<!ODD>(integers[!ODD]);
}

// The first R rows, block by block.
template <int64_t FORMAT, int PLANES, int R>
__attribute__((noinline)) void tile(const Operands& o, const Matrix& w, int64_t column, int64_t rows, float* y) {
    const int8_t* values = o.x.values + o.group * o.blocks * GROUP * BLOCK * PLANES;
    float* out = y + o.group * GROUP * w.N;
    alignas(64) int32_t integers[2][PLANES * GROUP * PANEL];
    v16 sums[R] = {};
    for (int64_t r = 0; r < rows; r++) __builtin_prefetch(out + r * w.N + column, 1);
    multiply_first<false>(values, o.quants);
    if (PLANES == 2) multiply_second<false>(values);
    store_first<false>(integers[0]);
    if constexpr (PLANES == 2) store_second<false>(integers[0]);
    if (o.blocks > 1) {
        multiply_first<true>(values + PLANE * PLANES, o.quants + PANEL * BLOCK);
        if (PLANES == 2) multiply_second<true>(values + PLANE * PLANES);
    }
    for (int64_t b = 0; b < o.blocks; b += 2) {
        for (int64_t at = b * o.ahead; at < (b + 2) * o.ahead; at += 64) {
            __builtin_prefetch(o.next + at);
            __builtin_prefetch(o.next + 2 * o.panel.layout.bytes + at, 0, SECOND_LEVEL);
        }
        add_block<FORMAT, PLANES, R, false>(o, b, integers, sums);
        if (b + 1 < o.blocks) add_block<FORMAT, PLANES, R, true>(o, b + 1, integers, sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
        if (r < rows) store_outputs(w, column, sums[r], out + r * w.N);
}

// `rows` of a group times one panel, in a tile of the next multiple of 4 rows.
template <int64_t FORMAT, int PLANES>
void tile_of(const Operands& o, const Matrix& w, int64_t column, int64_t rows, float* y) {
    if (rows <= 4) return tile<FORMAT, PLANES, 4>(o, w, column, rows, y);
    if (rows <= 8) return tile<FORMAT, PLANES, 8>(o, w, column, rows, y);
    if (rows <= 12) return tile<FORMAT, PLANES, 12>(o, w, column, rows, y);
    tile<FORMAT, PLANES, 16>(o, w, column, rows, y);
}

// A tile computes rows behind the last too. Their scales become zero: denormal numbers, which may lie there, are slow.
inline void clear_rest(const QuantizedRows& x, int64_t M, int64_t blocks) {
    const int64_t rows = M % GROUP;
    if (!rows) return;
    const __mmask16 rest = 0xffff << rows;
    for (int64_t at = M / GROUP * blocks * GROUP; at < row_groups(M) * blocks * GROUP; at += GROUP) {
        _mm512_mask_storeu_ps(x.scales + at, rest, _mm512_setzero_ps());
        _mm512_mask_storeu_ps(x.sums + at, rest, _mm512_setzero_ps());
    }
}

// Rows [row, row_end) of M, from the first of a group, times panels.
template <int64_t FORMAT, int PLANES>
void multiply_panels(const Matrix& w, int64_t panel, int64_t panel_end, const QuantizedRows& x, int64_t M, int64_t row,
                     int64_t row_end, float* y) {
    static thread_local std::vector<uint8_t> scratch;
    scratch.resize(std::max<size_t>(scratch.size(), FORMAT == Q8_0 ? 0 : w.K * PANEL));
    const Registers registers(integer_shapes(std::min(M, GROUP)));
    for (; panel < panel_end; panel++) {
        const Panel p(w, panel);
        const uint8_t* quants = signed_bytes<FORMAT>(p, w.K / BLOCK, scratch.data());
        for (int64_t r = row; r < row_end; r += GROUP) {
            const int64_t blocks = w.K / BLOCK, ahead = r == row ? p.layout.bytes / blocks : 0;
            const Operands o{p, quants, p.scales + p.layout.bytes, ahead, x, blocks, r / GROUP};
            tile_of<FORMAT, PLANES>(o, w, panel * PANEL, std::min(GROUP, row_end - r), y);
        }
    }
}

}  // namespace amx

#endif
