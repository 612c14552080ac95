// Floats as pieces of 8 bits, and what their products have in common in the matrix unit (linear_amx.cpp) and in vector
// registers (linear_row.h). Called where the processor has the unit.
//
// A piece is a bfloat16: the first is the upper half of the float, the next that of what remains. Cutting is exact:
// three pieces are a float32, two a float16, one a bfloat16. So are the products of two pieces, and where both sides
// have several, those below 2^-24 of the whole are left out. Numbers below 2^-126 count as zero, and a product with a
// number that is not finite is not finite.
//
// Each number of y is the sum, in order, of one partial sum per block of k, whose length depends on K alone; that is
// the sum, in the order of steps of 32 k and of `PRODUCTS` within each, of what an instruction adds: two chains of 16
// fused multiply-adds, of even and of odd k. The bias comes last. How many rows and panels are multiplied at once, the
// order of loops and the threads never change that.
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "amx.h"
#include "linear.h"
#include "pool.h"
#include "vec.h"

#ifdef HAVE_AMX
namespace pieces {

constexpr int64_t STEP = 32;       // k of an instruction
constexpr int64_t K_BLOCK = 1024;  // k of a block, at most
constexpr int ROW_PIECES = 3;

typedef Lanes<v16>::u32 u32;

// A product of pieces: number `row` of the row's, number `weight` of the weight's.
struct Product {
    int row, weight;
};

// The pieces of a storage type and the products that count, each with a piece of the one before.
template <class T> struct Storage;
template <> struct Storage<bf16> {
    static constexpr int PIECES = 1;
    static constexpr Product PRODUCTS[] = {{2, 0}, {1, 0}, {0, 0}};
};
template <> struct Storage<fp16> {
    static constexpr int PIECES = 2;
    static constexpr Product PRODUCTS[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}};
};
template <> struct Storage<float> {
    static constexpr int PIECES = 3;
    static constexpr Product PRODUCTS[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}};
};

INLINE v16 upper_half(v16 x) { return bit_copy<v16>(bit_copy<u32>(x) & 0xffff0000u); }

// SIZE numbers of which only `count` are there: followed by zeros, in `memory`, if those are fewer.
template <int64_t SIZE, class T> INLINE const T* padded(const T* from, int64_t count, T* memory) {
    if (count >= SIZE) return from;
    std::fill(std::copy(from, from + count, memory), memory + SIZE, T{});
    return memory;
}

// Steps of a block of k, of blocks of nearly equal length.
inline int64_t block_steps(int64_t K) { return divide_up(divide_up(K, STEP), divide_up(K, K_BLOCK)); }

// Add the sums of one panel for some rows to y [rows][N]; the first block of k overwrites, the last one adds the bias.
inline void finish(const Matrix& w, int64_t panel, const float* sums, int64_t rows, bool first, bool last, float* y) {
    const int64_t column = panel * PANEL, count = std::min(PANEL, w.N - column);
    const __mmask16 mask = (1u << count) - 1;
    const bool add_bias = last && w.bias;
    const v16 bias = add_bias ? v16(_mm512_maskz_loadu_ps(mask, w.bias + column)) : v16{};
    for (int64_t r = 0; r < rows; r++, y += w.N) {
        v16 sum = load<v16>(sums + r * PANEL);
        if (!first) sum = v16(_mm512_maskz_loadu_ps(mask, y + column)) + sum;
        if (add_bias) sum += bias;
        _mm512_mask_storeu_ps(y + column, mask, sum);
    }
}

}  // namespace pieces
#endif
