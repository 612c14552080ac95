// Products of rows and a packed matrix, as other operations use them.
#pragma once

#include <cstdint>

// How the numbers of a packed matrix are stored; `ops/cpu.py` has the same numbers. Those from Q8_0 on are integers with
// scales, laid out as integer.h says.
enum Format : int64_t {
    FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FP8 = 3, Q8_0 = 4, Q4_0 = 5, Q4_1 = 6, Q4_Z = 7, MXFP4 = 8, Q4_K = 9,
    Q6_K = 10, Q4_0_128 = 11, Q4_Z_128 = 12
};

struct Matrix {
    const void* data;   // as packed: panels of 16 outputs
    const float* bias;  // [N], or null
    int64_t format, N, K;
    int64_t row_bits;  // of what rows become for a product with integers: 8 (Q8_0 alone) or 16
};

// A change of columns of a product y = x W^T from `first` on: scale x down^T up^T.
struct LowRank {
    Matrix down, up;
    int64_t first;
    float scale;
};

// y[M][N] = x[M][K] w[N][K]^T + bias.
void linear(const Matrix& w, const float* x, int64_t M, float* y);

// The same for matrices of floats in the processor's matrix unit; false, having done nothing, where there is none.
bool linear_amx(const Matrix& w, const float* x, int64_t M, float* y);
