// linear: y[M][N] = x[M][K] w[N][K]^T + bias, and the packing of w into panels [ceil(N / 16)][K][16], zero padded.
//
// Each number of y is the sum, in order, of one partial sum per block of 256 k; that is the sum, in order, of chains of
// 32 fused multiply-adds in the order of k, each of which starts from zero; the bias comes last. Short chains keep
// rounding errors small (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Everything else here (how many
// rows and panels are in registers at once, the order of loops, the threads) moves work around and never changes that.
#include <algorithm>
#include <memory>

#include "integer.h"
#include "linear.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t K_BLOCK = 256;
constexpr int64_t CHAIN = 32;
constexpr int64_t ROW_BLOCK = 240;  // rows whose K_BLOCK columns stay in the second-level cache
constexpr int64_t ROW_STEP = K_BLOCK + PANEL;  // from a copied row to the next: no multiple of a page
constexpr int64_t STREAM_AHEAD = 32;  // k that a lone tile fetches ahead

#ifdef __AVX512F__
typedef v16 vec;
constexpr int MAX_ROWS = 12, MAX_SUMS = 24;  // rows of a tile, vector registers for sums
#else
typedef v8 vec;
constexpr int MAX_ROWS = 6, MAX_SUMS = 12;
#endif
constexpr int NV = PANEL * 4 / sizeof(vec);

// Panels computed at once by a tile of MR rows when it is the only tile: enough independent sums to hide latency.
constexpr int panels_at_once(int rows) { return std::max(1, std::min(4, MAX_SUMS / (rows * NV))); }

struct Problem {
    const float* x;
    const void* w;
    const float* bias;
    float* y;
    int64_t M, N, K;
};

// Add the sums of one tile to y; the first block of k overwrites, the last one adds the bias.
template <int MR, int NP>
INLINE void finish(const Problem& p, const vec (&acc)[MR][NP * NV], int q, int64_t row, int64_t panel, bool first,
                   bool last) {
    constexpr int W = sizeof(vec) / 4;
    const int64_t column = panel * PANEL, count = std::min(PANEL, p.N - column);
    float bias[PANEL] = {}, tail[PANEL] = {};
    const bool add_bias = last && p.bias;
    if (add_bias) std::copy_n(p.bias + column, count, bias);
    for (int r = 0; r < MR; r++) {
        float* y = p.y + (row + r) * p.N + column;
        float* target = count == PANEL ? y : tail;
        if (count < PANEL && !first) std::copy_n(y, count, tail);
        for (int v = 0; v < NV; v++) {
            const vec part = acc[r][q * NV + v];
            vec sum = first ? part : load<vec>(target + v * W) + part;
            if (add_bias) sum += load<vec>(bias + v * W);
            store(target + v * W, sum);
        }
        if (count < PANEL) std::copy_n(tail, count, y);
    }
}

// What a tile asks the cache for while it computes: `step` bytes further for each k.
struct Ahead {
    const void* start;
    int64_t step;
};

// The operands of tiles over one block of k: some rows from `row` on and some panels from `panel` on.
template <class T> struct Operands {
    const float* a;
    const T* b;
    int64_t row, panel, k0, k;
};

// MR rows times NP panels over one block of k. COPIED: rows and panels are those of `Copies`, not of x and w.
template <int MR, int NP, bool COPIED, class T>
__attribute__((noinline)) void tile(const Problem& p, const Operands<T>& o, Ahead ahead) {
    const int64_t row_step = COPIED ? ROW_STEP : p.K, panel_step = COPIED ? K_BLOCK * PANEL : p.K * PANEL;
    constexpr int W = sizeof(vec) / 4;
    vec sums[MR][NP * NV] = {};
    const char* fetch = static_cast<const char*>(ahead.start);
    for (int64_t i = 0; i < o.k;) {
        vec acc[MR][NP * NV] = {};
        for (const int64_t chain_end = std::min(o.k, i + CHAIN); i < chain_end; i++, fetch += ahead.step) {
            if constexpr (NP == 1 || COPIED) __builtin_prefetch(fetch);
            vec column[NP * NV];
#pragma GCC unroll 8
            for (int v = 0; v < NP * NV; v++)
                column[v] = load<vec>(o.b + v / NV * panel_step + i * PANEL + v % NV * W);
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++) {
                const vec x = splat<vec>(o.a[r * row_step + i]);
#pragma GCC unroll 8
                for (int v = 0; v < NP * NV; v++) acc[r][v] = fused(x, column[v], acc[r][v]);
            }
        }
        asm volatile("" ::"r"(sums) : "memory");  // sums stay in memory: the registers are for the chain
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < NP * NV; v++) sums[r][v] += acc[r][v];
        asm volatile("" ::"r"(sums) : "memory");
    }
    for (int q = 0; q < NP; q++) finish<MR, NP>(p, sums, q, o.row, o.panel + q, o.k0 == 0, o.k0 + o.k == p.K);
}

// One tile of `rows` <= MAX_ROWS copied rows and NP copied panels.
template <int MR, int NP> INLINE void tile_of(int rows, const Problem& p, const Operands<float>& o, Ahead ahead) {
    if (rows == MR) return tile<MR, NP, true>(p, o, ahead);
    if constexpr (MR > 1) tile_of<MR - 1, NP>(rows, p, o, ahead);
}

// All M <= MAX_ROWS rows in one tile: stream the panels through once, several side by side.
template <int MR, class T> void stream_panels(const Problem& p, int64_t panel, int64_t panel_end) {
    constexpr int NP = panels_at_once(MR);
    if constexpr (MR > 1)
        if (p.M < MR) return stream_panels<MR - 1, T>(p, panel, panel_end);
    const T* w = static_cast<const T*>(p.w);
    while (panel < panel_end) {
        const bool several = panel + NP <= panel_end;
        for (int64_t k0 = 0; k0 < p.K; k0 += K_BLOCK) {
            const int64_t k = std::min(K_BLOCK, p.K - k0);
            const T* b = w + (panel * p.K + k0) * PANEL;
            const Operands<T> o{p.x + k0, b, 0, panel, k0, k};
            const Ahead ahead{b + STREAM_AHEAD * PANEL, PANEL * sizeof(T)};
            several ? tile<MR, NP, false>(p, o, ahead) : tile<MR, 1, false>(p, o, ahead);
        }
        panel += several ? NP : 1;
    }
}

// `num_rows` rows times NP panels over one block of k, in tiles of nearly equal height. Meanwhile the block that comes
// next, `next_bytes` at `next`, is fetched, a part by each tile.
template <int NP>
void tile_rows(const Problem& p, Operands<float> o, int64_t num_rows, const void* next, int64_t next_bytes) {
    const int64_t tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t rows = (num_rows + tiles - t - 1) / (tiles - t);
        const Ahead ahead{static_cast<const char*>(next) + next_bytes * t / tiles, next_bytes / (tiles * o.k)};
        tile_of<MAX_ROWS, NP>(int(rows), p, o, ahead);
        o.a += rows * ROW_STEP;
        o.row += rows;
        num_rows -= rows;
    }
}

// Some rows and panels of a block of k, copied together: the rows do not crowd the same places of the cache, and the
// storage type of the panels is expanded once.
struct alignas(64) Copies {
    static constexpr int NP = panels_at_once(MAX_ROWS);  // as many as there are registers for
    float rows[ROW_BLOCK * ROW_STEP], panels[NP * K_BLOCK * PANEL];
};

// Many rows.
template <class T> void block(const Problem& p, int64_t row, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    constexpr int NP = Copies::NP;
    static thread_local const std::unique_ptr<Copies> copies(new Copies);
    const T* w = static_cast<const T*>(p.w);
    for (int64_t k0 = 0; k0 < p.K; k0 += K_BLOCK) {
        const int64_t k = std::min(K_BLOCK, p.K - k0);
        for (int64_t r = row; r < row_end; r++) std::copy_n(p.x + r * p.K + k0, k, copies->rows + (r - row) * ROW_STEP);
        for (int64_t panel = panel_begin; panel < panel_end;) {
            const int64_t count = std::min<int64_t>(NP, panel_end - panel);
            for (int64_t q = 0; q < count; q++) {
                const T* b = w + ((panel + q) * p.K + k0) * PANEL;
                for (int64_t i = 0; i < k * PANEL; i += sizeof(vec) / 4)
                    store(copies->panels + q * K_BLOCK * PANEL + i, load<vec>(b + i));
            }
            const Operands<float> o{copies->rows, copies->panels, row, panel, k0, k};
            const T* next = w + ((panel + count) * p.K + k0) * PANEL;
            const int64_t bytes = k * PANEL * sizeof(T);
            const bool several = count == NP;
            several ? tile_rows<NP>(p, o, row_end - row, next, bytes) : tile_rows<1>(p, o, row_end - row, next, bytes);
            panel += several ? NP : 1;
        }
    }
}

// The units [unit, end) of `row_blocks` x panels, panels running fastest.
template <class T> void run_units(const Problem& p, int64_t row_blocks, int64_t unit, int64_t end) {
    const int64_t panels = (p.N + PANEL - 1) / PANEL;
    while (unit < end) {
        const int64_t index = unit / panels, panel = unit % panels;
        const int64_t panel_end = std::min(panels, panel + end - unit);
        if (p.M <= MAX_ROWS)
            stream_panels<MAX_ROWS, T>(p, panel, panel_end);
        else
            block<T>(p, p.M * index / row_blocks, p.M * (index + 1) / row_blocks, panel, panel_end);
        unit += panel_end - panel;
    }
}

template <class T> void multiply(const Problem& p) {
    const int64_t panels = (p.N + PANEL - 1) / PANEL, wanted = 4 * pool::threads();
    int64_t row_blocks = (p.M + ROW_BLOCK - 1) / ROW_BLOCK;
    if (panels < wanted)  // few columns for many threads: split rows too, in tiles of full height
        row_blocks = std::max(row_blocks, std::min(p.M / MAX_ROWS, (wanted + panels - 1) / panels));
    pool::parallel_ranges(row_blocks * panels, p.M * p.N * p.K, [&](int64_t unit, int64_t end) {
        run_units<T>(p, row_blocks, unit, end);
    });
}

template <class U> void pack(const U* w, U* panels, int64_t N, int64_t K) {
    pool::parallel_ranges((N + PANEL - 1) / PANEL, N * K * 4, [=](int64_t panel, int64_t end) {
        for (; panel < end; panel++) {
            const int64_t count = std::min(PANEL, N - panel * PANEL);
            const U* from = w + panel * PANEL * K;
            U* to = panels + panel * PANEL * K;
            for (int64_t k0 = 0; k0 < K; k0 += PANEL)
                for (int64_t j = 0; j < PANEL; j++)
                    for (int64_t k = k0; k < std::min(K, k0 + PANEL); k++)
                        to[k * PANEL + j] = j < count ? from[j * K + k] : U(0);
        }
    });
}

}  // namespace

void linear(const Matrix& w, const float* x, int64_t M, float* y) {
    if (is_integer(w.format)) return linear_integer(w, x, M, y);
    const Problem p{x, w.data, w.bias, y, M, w.N, w.K};
    w.format == FLOAT32 ? multiply<float>(p) : w.format == BFLOAT16 ? multiply<bf16>(p) : multiply<fp16>(p);
}

extern "C" {

void fl_linear(const float* x, const void* w, int64_t format, int64_t integer_rows, const float* bias, float* y,
               int64_t M, int64_t N, int64_t K) {
    linear({w, bias, format, N, K, integer_rows}, x, M, y);
}

void fl_pack(const void* w, void* panels, int64_t item_size, int64_t N, int64_t K) {
    if (item_size == 4)
        pack(static_cast<const uint32_t*>(w), static_cast<uint32_t*>(panels), N, K);
    else
        pack(static_cast<const uint16_t*>(w), static_cast<uint16_t*>(panels), N, K);
}
}
