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

// Whether a block has a number beside its scale: Q4_1 a minimum, which is added, Q4_Z a zero point, which is subtracted
// before the product with the scale.
constexpr bool has_second(int64_t format) { return format == Q4_1 || format == Q4_Z; }

// Bytes in front of the integers of a block of one row in a file.
constexpr int64_t head_bytes(int64_t format) { return format == MXFP4 ? 1 : has_second(format) ? 4 : 2; }

// Where things are in a panel of K columns. Scales are float16, [block][16], with a second number [block][2][16]; those
// of MXFP4 are exponents of 8 bits.
struct PanelLayout {
    int64_t scale_step;  // bytes from the scales of a block to those of the next
    int64_t quants;      // offset of the integers
    int64_t quant_step;  // bytes from the integers of a block to those of the next
    int64_t bytes;       // of the panel, a multiple of 64
};

constexpr PanelLayout panel_layout(int64_t format, int64_t K) {
    const int64_t blocks = K / BLOCK, scale_step = PANEL * head_bytes(format);
    const int64_t quants = (blocks * scale_step + 63) / 64 * 64, quant_step = format == Q8_0 ? 512 : 256;
    return {scale_step, quants, quant_step, quants + blocks * quant_step};
}

// One panel of a matrix.
struct Panel {
    PanelLayout layout;
    const uint8_t *scales, *quants;

    Panel(const Matrix& w, int64_t panel) : layout(panel_layout(w.format, w.K)) {
        scales = static_cast<const uint8_t*>(w.data) + panel * layout.bytes;
        quants = scales + layout.quants;
    }
};

// Rows quantised in blocks of 32 to 16 bits: scale = largest |x| / (127 * 256), value = x * (1 / scale) rounded to the
// nearest integer, ties to even. (Rows of 8 bits change one in thirty of the most likely tokens.) A value is two bytes in
// two planes, which integer_dot.h chooses. Rows lie in groups of 16, anything behind the last.
constexpr int64_t PLANES = 2;
struct QuantizedRows {
    static constexpr int64_t GROUP = 16;
    int8_t* values;    // [group][block][plane][16][32]
    float* scales;     // [group][block][16]; not finite where a number of the block is not
    float* sums;       // scale * sum of the values
    int32_t* offsets;  // -128 * sum of the values
};

inline int64_t row_groups(int64_t M) { return divide_up(M, QuantizedRows::GROUP); }

// Memory that M quantised rows take, and their places in memory aligned to 64 bytes.
int64_t quantized_rows_bytes(int64_t M, int64_t K);
QuantizedRows quantized_rows_at(void* memory, int64_t M, int64_t K);

// Quantise one row [K] as number `row` of `out`, or all rows [M][K].
void quantize_row(const float* x, int64_t row, int64_t K, const QuantizedRows& out);
void quantize_rows(const float* x, int64_t M, int64_t K, const QuantizedRows& out);

// y[M][N] = x[M][K] w[N][K]^T + bias. With s the exact integer sum of a block, dw, mw its scale and minimum, dx and sx
// the row's scale and scaled sum, a number of y is over the blocks in order fused(s, dw * dx, y), with a minimum followed
// by fused(mw, sx, y). That of Q4_Z is -zero * dw. MXFP4's integers are twice its numbers, and its scales half as large.
// The bias comes last.
void linear_quantized(const Matrix& w, const QuantizedRows& x, int64_t M, float* y);

// The same from rows of floats, which are quantised first.
void linear_integer(const Matrix& w, const float* x, int64_t M, float* y);

// Row `row` of a matrix as floats [K], as the file's format defines them.
void expand_row(const Matrix& w, int64_t row, float* out);
