// Products with matrices of floats of 8 bits (E4M3, arXiv 2209.05433), of which 128 neighbours of a row share a scale.
//
// A panel is 16 outputs: first its scales float32 [K / 128][16], then its numbers [K][16]. A weight is its number times
// its scale, rounded to float32. A number of y is the sum, in order, of one chain of fused multiply-adds per 128 k, each
// of which starts from zero; the bias comes last. How many rows and panels are computed at once, and whether weights are
// expanded for several tiles or in each, moves work around and never changes that.
#include <algorithm>

#include "linear_fp8.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t SPAN = FP8_SPAN;
constexpr int WIDTH = sizeof(vec) / 4, NV = PANEL / WIDTH;
constexpr int64_t ROW_BLOCK = 240;  // rows that share an expanded panel, at most
constexpr int64_t AHEAD = 2048;     // bytes between what a tile of few rows reads and what it fetches
#ifdef __AVX512F__
constexpr int TALL = 12, TALL_PANELS = 2, FEW = 4, FEW_PANELS = 4;
#else
constexpr int TALL = 5, TALL_PANELS = 1, FEW = 2, FEW_PANELS = 2;
#endif

struct Panel {
    const float* scales;
    const uint8_t* numbers;

    Panel(const Matrix& w, int64_t panel) {
        const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * fp8_panel_bytes(w.K);
        scales = reinterpret_cast<const float*>(data);
        numbers = data + w.K / SPAN * PANEL * sizeof(float);
    }
};

constexpr float FROM_HALF = 256;  // the exponents of float16 begin eight lower

// Numbers of a k, times FROM_HALF times their scales. Sign, exponent and mantissa move to where float16 has them; between
// sign and exponent there is one bit more.
INLINE vec expand(const uint8_t* p, vec scales) {
    typename Lanes<vec>::s8 bytes;
    memcpy(&bytes, p, sizeof(bytes));
    const auto wide = __builtin_convertvector(bytes, typename Lanes<vec>::s16);
    return from_halves<vec>(bit_copy<typename Lanes<vec>::u16>(wide << 7) & 0xbfff) * scales;
}

INLINE vec scales_of(const Panel& panel, int64_t k, int v) {
    return load<vec>(panel.scales + k / SPAN * PANEL + v * WIDTH) * splat<vec>(FROM_HALF);
}

// Weights as they are stored, for few rows.
template <int NP> struct Stored {
    const uint8_t* numbers[NP];
    vec scales[NP * NV];

    Stored(const Matrix& w, int64_t panel, int64_t k) {
        for (int q = 0; q < NP; q++) {
            const Panel p(w, panel + q);
            numbers[q] = p.numbers + k * PANEL;
            for (int v = 0; v < NV; v++) scales[q * NV + v] = scales_of(p, k, v);
        }
    }
    INLINE vec at(int64_t k, int i) const {
        const uint8_t* p = numbers[i / NV] + k * PANEL;
        if (i % NV == 0) __builtin_prefetch(p + AHEAD);
        return expand(p + i % NV * WIDTH, scales[i]);
    }
};

// The weights of NP panels over a span, expanded for many rows.
template <int NP> struct Expanded {
    alignas(64) float weights[NP][SPAN * PANEL];

    Expanded(const Matrix& w, int64_t panel, int64_t k) {
        const Stored<NP> stored(w, panel, k);
        for (int64_t i = 0; i < SPAN; i++)
            for (int q = 0; q < NP * NV; q++)
                store(weights[q / NV] + i * PANEL + q % NV * WIDTH, stored.at(i, q));
    }
    INLINE vec at(int64_t k, int i) const { return load<vec>(weights[i / NV] + k * PANEL + i % NV * WIDTH); }
};

// The chain of a span becomes part of y.
INLINE void add(const Matrix& w, int64_t column, int64_t k, const vec (&chain)[NV], float* y) {
    const int64_t count = std::min(PANEL, w.N - column);
    float numbers[PANEL], bias[PANEL] = {};
    if (w.bias) std::copy_n(w.bias + column, count, bias);
    if (k) std::copy_n(y + column, count, numbers);
    for (int v = 0; v < NV; v++) {
        vec sum = k ? load<vec>(numbers + v * WIDTH) + chain[v] : chain[v];
        if (w.bias && k + SPAN == w.K) sum += load<vec>(bias + v * WIDTH);
        store(numbers + v * WIDTH, sum);
    }
    std::copy_n(numbers, count, y + column);
}

// MR rows times NP panels over one span.
template <int MR, int NP, class Weights>
__attribute__((noinline)) void tile(const Matrix& w, const Weights& weights, int64_t panel, int64_t k, const float* x,
                                    float* y) {
    vec chains[MR][NP][NV] = {};
    for (int64_t i = 0; i < SPAN; i++) {
        vec column[NP * NV];
#pragma GCC unroll 8
        for (int q = 0; q < NP * NV; q++) column[q] = weights.at(i, q);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const vec number = splat<vec>(x[r * w.K + k + i]);
#pragma GCC unroll 8
            for (int q = 0; q < NP * NV; q++)
                chains[r][q / NV][q % NV] = fused(number, column[q], chains[r][q / NV][q % NV]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int q = 0; q < NP; q++) add(w, (panel + q) * PANEL, k, chains[r][q], y + r * w.N);
}

// `rows` <= MR rows in one tile.
template <int MR, int NP, class Weights>
void tile_of(int64_t rows, const Matrix& w, const Weights& weights, int64_t panel, int64_t k, const float* x, float* y) {
    if (rows == MR) return tile<MR, NP>(w, weights, panel, k, x, y);
    if constexpr (MR > 1) tile_of<MR - 1, NP>(rows, w, weights, panel, k, x, y);
}

template <int NP> void few_rows(const Matrix& w, int64_t panel, const float* x, int64_t M, float* y) {
    for (int64_t k = 0; k < w.K; k += SPAN) tile_of<FEW, NP>(M, w, Stored<NP>(w, panel, k), panel, k, x, y);
}

template <int NP> void many_rows(const Matrix& w, int64_t panel, const float* x, int64_t M, float* y) {
    const int64_t tiles = divide_up(M, TALL);
    for (int64_t k = 0; k < w.K; k += SPAN) {
        const Expanded<NP> weights(w, panel, k);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = M * t / tiles, rows = M * (t + 1) / tiles - row;
            tile_of<TALL, NP>(rows, w, weights, panel, k, x + row * w.K, y + row * w.N);
        }
    }
}

// Some rows times panels.
void multiply_panels(const Matrix& w, int64_t panel, int64_t end, const float* x, int64_t M, float* y) {
    const int64_t step = M <= FEW ? FEW_PANELS : TALL_PANELS;
    for (; panel + step <= end; panel += step)
        M <= FEW ? few_rows<FEW_PANELS>(w, panel, x, M, y) : many_rows<TALL_PANELS>(w, panel, x, M, y);
    for (; panel < end; panel++) M <= FEW ? few_rows<1>(w, panel, x, M, y) : many_rows<1>(w, panel, x, M, y);
}

}  // namespace

void linear_fp8(const Matrix& w, const float* x, int64_t M, float* y) {
    const int64_t groups = divide_up(divide_up(w.N, PANEL), FEW_PANELS), wanted = 4 * pool::threads();
    int64_t row_blocks = divide_up(M, ROW_BLOCK);
    if (groups < wanted)  // few columns for many threads: split rows too
        row_blocks = std::max(row_blocks, std::min(divide_up(M, 2 * TALL), divide_up(wanted, groups)));
    pool::parallel_ranges(row_blocks * groups, M * w.N * w.K, [&](int64_t unit, int64_t end) {
        for (; unit < end; unit++) {
            const int64_t block = unit / groups, panel = unit % groups * FEW_PANELS;
            const int64_t row = M * block / row_blocks, rows = M * (block + 1) / row_blocks - row;
            const int64_t panel_end = std::min(divide_up(w.N, PANEL), panel + FEW_PANELS);
            multiply_panels(w, panel, panel_end, x + row * w.K, rows, y + row * w.N);
        }
    });
}

void expand_fp8_row(const Matrix& w, int64_t row, float* out) {
    const Panel panel(w, row / PANEL);
    for (int64_t k = 0; k < w.K; k++) {
        float lanes[PANEL];
        for (int v = 0; v < NV; v++)
            store(lanes + v * WIDTH, expand(panel.numbers + k * PANEL + v * WIDTH, scales_of(panel, k, v)));
        out[k] = lanes[row % PANEL];
    }
}

void pack_fp8(const uint8_t* rows, uint8_t* panels, int64_t N, int64_t K) {
    const int64_t row_bytes = K / SPAN * (SPAN + sizeof(float)), panel_bytes = fp8_panel_bytes(K);
    pool::parallel_ranges(divide_up(N, PANEL), N * K * 4, [=](int64_t panel, int64_t end) {
        for (; panel < end; panel++) {
            uint8_t *scales = panels + panel * panel_bytes, *numbers = scales + K / SPAN * PANEL * sizeof(float);
            std::fill_n(scales, panel_bytes, 0);
            for (int64_t lane = 0; lane < std::min(PANEL, N - panel * PANEL); lane++) {
                const uint8_t* from = rows + (panel * PANEL + lane) * row_bytes;
                for (int64_t k = 0; k < K; k++) {
                    if (k % SPAN == 0) {
                        memcpy(scales + (k / SPAN * PANEL + lane) * sizeof(float), from, sizeof(float));
                        from += sizeof(float);
                    }
                    numbers[k * PANEL + lane] = *from++;
                }
            }
        }
    });
}
