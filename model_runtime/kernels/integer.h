// Matrices of integers with scales, quantised rows, and their products.
//
// A panel is 16 outputs: first its scales, then its integers, in blocks of 32 k. A block of integers is eight groups of
// 4 k, each [16 outputs][4 k] bytes: one 64-byte load meets four numbers of a row in one instruction. Numbers of 4 bits
// share bytes: group g has the low half, group g + 4 the high half, which is how GGUF pairs them.
#pragma once

#include "linear.h"
#include "pool.h"
#include "vec.h"

constexpr int64_t BLOCK = 32;

inline bool is_integer(int64_t format) { return format >= Q8_0; }
inline int64_t panels_of(int64_t N) { return divide_up(N, PANEL); }

// Whether a block has a zero point, which is subtracted before the product with the scale.
constexpr bool has_zero(int64_t format) { return format == Q4_Z || format == Q4_Z_128; }

// Whether it has a number beside its scale: a zero point, or Q4_1 a minimum, which is added.
constexpr bool has_second(int64_t format) { return format == Q4_1 || has_zero(format); }

constexpr bool has_minimum(int64_t format) { return has_second(format) || format == Q4_K; }

// Blocks of a row that have these in common; the last ones may be fewer.
constexpr int64_t blocks_of_scale(int64_t format) { return format == Q4_0_128 || format == Q4_Z_128 ? 4 : 1; }

// Bytes in front of the integers of a block, or of blocks with a scale in common, of one row in a file.
constexpr int64_t head_bytes(int64_t format) { return format == MXFP4 ? 1 : has_second(format) ? 4 : 2; }

// Formats of GGUF whose scales of a block are bytes, times float16 that SUPER numbers have in common.
constexpr int64_t SUPER = 256;
constexpr bool is_super(int64_t format) { return format == Q4_K || format == Q6_K; }

// Where things are in a panel of K columns. Scales are float16, [block][16], with a second number [block][2][16]; where
// blocks have them in common, `block` counts these together. Those of MXFP4 are exponents of 8 bits. Q4_K has scales and
// minima of 8 bits [block][2][16], Q6_K signed scales of the halves of a block; of both, float16 factors follow,
// [super][scale, minimum][16] and [super][16].
struct PanelLayout {
    int64_t scale_step;  // bytes from the scales of a block, or blocks that share them, to the next
    int64_t factors;     // offset of the factors
    int64_t factor_step; // bytes from those of 256 numbers to the next
    int64_t quants;      // offset of the integers
    int64_t quant_step;  // bytes from the integers of a block to those of the next
    int64_t bytes;       // of the panel, a multiple of 64
};

constexpr PanelLayout panel_layout(int64_t format, int64_t K) {
    const int64_t blocks = K / BLOCK, scale_step = PANEL * (is_super(format) ? 2 : head_bytes(format));
    const int64_t factor_step = format == Q4_K ? 4 * PANEL : format == Q6_K ? 2 * PANEL : 0;
    const int64_t scales = divide_up(blocks, blocks_of_scale(format)) * scale_step;
    const int64_t heads = scales + K / SUPER * factor_step;
    const int64_t quants = (heads + 63) / 64 * 64, quant_step = format == Q8_0 ? 512 : format == Q6_K ? 384 : 256;
    return {scale_step, scales, factor_step, quants, quant_step, quants + blocks * quant_step};
}

// One panel of a matrix.
struct Panel {
    PanelLayout layout;
    const uint8_t *scales, *quants;

    Panel(const Matrix& w, int64_t panel) : layout(panel_layout(w.format, w.K)) {
        scales = static_cast<const uint8_t*>(w.data) + panel * layout.bytes;
        quants = scales + layout.quants;
    }
    // Of block b; scales are in one place for so many blocks.
    const uint8_t* scales_at(int64_t b, int64_t shared) const { return scales + b / shared * layout.scale_step; }
    const uint8_t* quants_at(int64_t b) const { return quants + b * layout.quant_step; }
    const fp16* factors_at(int64_t b) const {
        return reinterpret_cast<const fp16*>(scales + layout.factors + b * BLOCK / SUPER * layout.factor_step);
    }
};

// Rows quantised in blocks of 32 to 16 bits, or to 8: scale = largest |x| / (127 * 256), or / 127, value = x * (1 / scale)
// rounded to the nearest integer, ties to even. A value is a byte, or one of 16 bits two bytes in two planes, which
// integer_dot.h chooses. Rows lie in groups of 16, anything behind the last.
struct QuantizedRows {
    static constexpr int64_t GROUP = 16;
    int64_t planes;
    int8_t* values;    // [group][block][plane][16][32]
    float* scales;     // [group][block][16]; not finite where a number of the block is not
    float* sums;       // scale * sum of the values
    int32_t* offsets;  // [group][block][2][16]: -128 * sum of the values, and of the first 16 alone
};

inline int64_t row_groups(int64_t M) { return divide_up(M, QuantizedRows::GROUP); }

// Memory that M quantised rows for a matrix take, and their places in memory that floats may lie in.
int64_t quantized_rows_bytes(int64_t M, const Matrix& w);
QuantizedRows quantized_rows_at(void* memory, int64_t M, const Matrix& w);

// Quantise one row [K] as number `row` of `out`, or all rows [M][K].
void quantize_row(const float* x, int64_t row, int64_t K, const QuantizedRows& out);
void quantize_rows(const float* x, int64_t M, int64_t K, const QuantizedRows& out);

// y[M][N] = x[M][K] w[N][K]^T + bias. With s the exact integer sum of a block, dw, mw its scale and minimum, dx and sx
// the row's scale and scaled sum, a number of y is over the blocks in order fused(s, dw * dx, y), with a minimum followed
// by fused(mw, sx, y). That of a zero point is -zero * dw. Q6_K's halves of a block are added one after the other.
// MXFP4's integers are twice its numbers, and its scales half as large. The bias comes last.
void linear_quantized(const Matrix& w, const QuantizedRows& x, int64_t M, float* y);

// The same from rows of floats, which are quantised first.
void linear_integer(const Matrix& w, const float* x, int64_t M, float* y);

// Rows of Q4_K and Q6_K as in a file become panels, and one of them floats again, as `fl_pack_quantized` and
// `expand_row` do it.
int64_t super_bytes(int64_t format);
void pack_super_row(const uint8_t* row, int64_t format, int64_t K, int64_t lane, const PanelLayout& at, uint8_t* panel);
void expand_super_row(const Matrix& w, int64_t row, float* out);

// Row `row` of a matrix as floats [K], as the file's format defines them.
void expand_row(const Matrix& w, int64_t row, float* out);
