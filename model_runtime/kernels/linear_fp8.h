// Matrices of floats of 8 bits, of which FP8_SPAN neighbours of a row share a float32 scale.
#pragma once

#include "linear.h"
#include "vec.h"

constexpr int64_t FP8_SPAN = 128;

// Of a panel of K columns: a multiple of 64.
inline int64_t fp8_panel_bytes(int64_t K) { return K * PANEL + K / FP8_SPAN * PANEL * int64_t(sizeof(float)); }

// y[M][N] = x[M][K] w[N][K]^T + bias.
void linear_fp8(const Matrix& w, const float* x, int64_t M, float* y);

// Row `row` of a matrix as floats [K].
void expand_fp8_row(const Matrix& w, int64_t row, float* out);

// Rows of blocks, each a scale and its numbers, become panels; outputs behind the last row are zero.
void pack_fp8(const uint8_t* rows, uint8_t* panels, int64_t N, int64_t K);
