// The product of one row in vector registers, which read weights as fast as memory gives them: the same float
// operations as in the matrix unit, so the same bits.
#pragma once

#include "linear_pieces.h"

#ifdef HAVE_AMX
namespace pieces {

constexpr int64_t ROW_AHEAD = 2048;  // bytes between what is read and what is fetched

// Weights of one k of some panels as pieces [piece][panel].
template <class T, int NP, int PIECES = Storage<T>::PIECES>
INLINE void cut(const T* from, int64_t panel_step, v16 (&pieces)[PIECES][NP]) {
#pragma GCC unroll 4
    for (int q = 0; q < NP; q++) {
        __builtin_prefetch(reinterpret_cast<const char*>(from + q * panel_step) + ROW_AHEAD);
        v16 rest = load<v16>(from + q * panel_step);
#pragma GCC unroll 3
        for (int i = 0; i < PIECES; i++) {
            pieces[i][q] = i + 1 < PIECES ? upper_half(rest) : rest;
            rest -= pieces[i][q];
        }
    }
}

// Sums of NP panels for k up to `end`. `x` are the row's pieces [piece][K]. Intel's manual on TDPBF16PS: even and odd k
// have chains of their own, which are added to each other and then to the sum.
template <class T, int NP>
void row_sums(const Matrix& w, int64_t panel, const float* x, int64_t k, int64_t end, float* sums) {
    constexpr auto& PRODUCTS = Storage<T>::PRODUCTS;
    constexpr int COUNT = std::size(PRODUCTS);
    const int64_t K = w.K, panel_step = K * PANEL;
    const T* from = static_cast<const T*>(w.data) + panel * panel_step + k * PANEL;
    v16 total[NP] = {};
    while (k < end) {
        v16 chains[2][COUNT][NP] = {};
        for (const int64_t stop = std::min(end, k + STEP); k < stop; k += 2)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++, from += PANEL) {
                if (k + odd >= stop) break;
                v16 pieces[Storage<T>::PIECES][NP];
                cut<T, NP>(from, panel_step, pieces);
#pragma GCC unroll 6
                for (int i = 0; i < COUNT; i++) {
                    const v16 piece = splat<v16>(x[PRODUCTS[i].row * K + k + odd]);
#pragma GCC unroll 4
                    for (int q = 0; q < NP; q++)
                        chains[odd][i][q] = fused(piece, pieces[PRODUCTS[i].weight][q], chains[odd][i][q]);
                }
            }
#pragma GCC unroll 6
        for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 4
            for (int q = 0; q < NP; q++) total[q] += chains[0][i][q] + chains[1][i][q];
    }
    for (int q = 0; q < NP; q++) store(sums + q * PANEL, total[q]);
}

// NP panels of y, a block of k after the other.
template <class T, int NP> void row_panels(const Matrix& w, int64_t panel, const float* x, float* y) {
    const int64_t block = block_steps(w.K) * STEP;
    float sums[NP * PANEL];
    for (int64_t k = 0; k < w.K; k += block) {
        const int64_t end = std::min(w.K, k + block);
        row_sums<T, NP>(w, panel, x, k, end, sums);
        for (int64_t q = 0; q < NP; q++) finish(w, panel + q, sums + q * PANEL, 1, k == 0, end == w.K, y);
    }
}

// The pieces of a row as floats [piece][K].
inline const float* cut_row(const float* x, int64_t K) {
    static thread_local std::vector<float> memory;
    memory.resize(std::max<size_t>(memory.size(), ROW_PIECES * K));
    for (int64_t k = 0; k < K; k++) {
        float rest = x[k];
        for (int i = 0; i < ROW_PIECES; i++) {
            memory[i * K + k] = bit_copy<float>(bit_copy<uint32_t>(rest) & 0xffff0000u);
            rest -= memory[i * K + k];
        }
    }
    return memory.data();
}

// y[N] = x[K] w[N][K]^T + bias.
template <class T> void multiply_row(const Matrix& w, const float* x, float* y) {
    constexpr int NP = Storage<T>::PIECES == 1 ? 4 : 2;  // as many panels as registers hold chains of
    const int64_t panels = divide_up(w.N, PANEL);
    pool::parallel_ranges(divide_up(panels, NP), w.N * w.K, [&, row = cut_row(x, w.K)](int64_t unit, int64_t end) {
        constexpr unsigned ZERO_SUBNORMALS = 0x8040;  // as the unit does
        const unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | ZERO_SUBNORMALS);
        for (; unit < end; unit++) {
            const int64_t panel = unit * NP, panel_end = std::min(panels, panel + NP);
            if (panel_end - panel == NP) row_panels<T, NP>(w, panel, row, y);
            else for (int64_t q = panel; q < panel_end; q++) row_panels<T, 1>(w, q, row, y);
        }
        _mm_setcsr(mode);
    });
}

}  // namespace pieces
#endif
