// linear: y[M][N] = x[M][K] w[N][K]^T + bias, and the packing of w into panels [ceil(N / 16)][K][16], zero padded. Where
// the processor has a matrix unit for floats, linear_amx.cpp computes it; what follows is for the others.
//
// Each number of y is the sum, in order, of one partial sum per block of 256 k; that is the sum, in order, of chains of
// 64 fused multiply-adds in the order of k, each of which starts from zero; the bias comes last. Short chains keep
// rounding errors small (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Everything else here (how many
// rows and panels are in registers at once, the order of loops, the threads) moves work around and never changes that.
//
// A tile is some rows times some panels over one block of k, its sums in registers. Up to TALLEST rows are one tile,
// which reads the panels once, as they are stored. More rows are tiles of two panels side by side (AVX-512; one with
// AVX2), for which the panels are expanded to float32 first.
#include "linear.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "integer.h"
#include "linear_fp8.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t K_BLOCK = 256;
constexpr int64_t CHAIN = 64;
constexpr int64_t ROW_STEP = K_BLOCK + PANEL;  // from a copied row to the next: no multiple of a page
constexpr int64_t ROW_BLOCK = 240;             // rows that share an expanded panel, at most
constexpr int64_t CACHED = 1 << 16;            // numbers of x that stay in the second-level cache
constexpr int64_t COPIED = 1 << 21;            // numbers of x that are copied at a time
constexpr int64_t STREAM_AHEAD = 2048;         // bytes between what a lone tile reads and what it fetches

#ifdef __AVX512F__
constexpr int MAX_SUMS = 28;                                                                 // registers for sums
constexpr int HEIGHTS[] = {1, 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 16, 20, 24, 28}, WIDE = 14;  // rows of a tile
#else
constexpr int MAX_SUMS = 12;
constexpr int HEIGHTS[] = {1, 2, 3, 4, 5, 6}, WIDE = 6;
#endif
constexpr int NUM_HEIGHTS = std::size(HEIGHTS), TALLEST = HEIGHTS[NUM_HEIGHTS - 1];
constexpr int WIDTH = sizeof(vec) / 4, NV = PANEL / WIDTH;

// Panels of a tile: enough independent sums to hide latency, few loads for each of them.
constexpr int panels_at_once(int rows) { return std::max(1, std::min(4, MAX_SUMS / (rows * NV))); }
constexpr int MOST_PANELS = panels_at_once(1);

struct Problem {
    const float* x;      // rows as `copy_rows` leaves them: [blocks of k][M][ROW_STEP]
    int64_t block_step;  // numbers from a block of k of x to the next
    const void* w;
    const float* bias;
    float* y;
    int64_t M, N, K;
};

// The operands of a tile: `rows` rows from `row` on, some panels from `panel` on, k numbers from `k0` on.
struct Operands {
    const float* a;
    const void* b;
    int64_t panel_step;  // numbers from a panel of b to the next
    int64_t row, rows, panel, k0, k;
    const char* ahead;  // to be fetched meanwhile, `ahead_step` bytes further for each k, of each panel
    int64_t ahead_step, ahead_panel;
};

// Add the sums of one panel to y; the first block of k overwrites, the last one adds the bias.
template <int MR, int NP>
INLINE void finish(const Problem& p, const Operands& o, const vec (&sums)[MR][NP * NV], int q) {
    const int64_t column = (o.panel + q) * PANEL, count = std::min(PANEL, p.N - column);
    const bool first = o.k0 == 0, add_bias = p.bias && o.k0 + o.k == p.K;
    float bias[PANEL] = {}, tail[PANEL] = {};
    if (add_bias) std::copy_n(p.bias + column, count, bias);
    for (int64_t r = 0; r < o.rows; r++) {
        float* y = p.y + (o.row + r) * p.N + column;
        float* target = count == PANEL ? y : tail;
        if (count < PANEL && !first) std::copy_n(y, count, tail);
        for (int v = 0; v < NV; v++) {
            const vec part = sums[r][q * NV + v];
            vec sum = first ? part : load<vec>(target + v * WIDTH) + part;
            if (add_bias) sum += load<vec>(bias + v * WIDTH);
            store(target + v * WIDTH, sum);
        }
        if (count < PANEL) std::copy_n(tail, count, y);
    }
}

// MR rows times NP panels over one block of k; rows from o.rows on are computed and dropped.
template <class T, int MR, int NP> void tile(const Problem& p, const Operands& o) {
    vec sums[MR][NP * NV] = {};
    const float* a = o.a;
    const T* b = static_cast<const T*>(o.b);
    const char* ahead = o.ahead;
    const int64_t panel_step = o.panel_step, ahead_step = o.ahead_step, ahead_panel = o.ahead_panel;
    for (int64_t i = 0; i < o.k;) {
        vec acc[MR][NP * NV] = {};
        for (const int64_t end = std::min(o.k, i + CHAIN); i < end; i++, a++, b += PANEL, ahead += ahead_step) {
#pragma GCC unroll 4
            for (int q = 0; q < NP; q++) __builtin_prefetch(ahead + q * ahead_panel);
            vec column[NP * NV];
#pragma GCC unroll 8
            for (int v = 0; v < NP * NV; v++) column[v] = load<vec>(b + v / NV * panel_step + v % NV * WIDTH);
#pragma GCC unroll 28
            for (int r = 0; r < MR; r++) {
                const vec x = splat<vec>(a[r * ROW_STEP]);
#pragma GCC unroll 8
                for (int v = 0; v < NP * NV; v++) acc[r][v] = fused(x, column[v], acc[r][v]);
            }
        }
        asm volatile("" ::"r"(sums) : "memory");  // sums stay in memory: the registers are for the chain
#pragma GCC unroll 28
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
            for (int v = 0; v < NP * NV; v++) sums[r][v] += acc[r][v];
        asm volatile("" ::"r"(sums) : "memory");
    }
    for (int q = 0; q < NP; q++) finish<MR, NP>(p, o, sums, q);
}

typedef void Tile(const Problem&, const Operands&);

struct Kernel {
    Tile *several, *one;  // for `panels` panels, and for one
    int64_t panels;
};

// The lowest tile that takes this many rows.
template <class T, int I = 0> Kernel kernel_for(int64_t rows) {
    constexpr int MR = HEIGHTS[I], NP = panels_at_once(MR);
    if constexpr (I + 1 < NUM_HEIGHTS)
        if (rows > MR) return kernel_for<T, I + 1>(rows);
    return {tile<T, MR, NP>, tile<T, MR, 1>, NP};
}

// Rows that are computed together, in `tiles` tiles of nearly equal height.
struct Rows {
    int64_t begin, count, tiles, height;
};

Rows rows_between(int64_t begin, int64_t end) {
    const int64_t count = end - begin, tiles = count <= TALLEST ? 1 : divide_up(count, WIDE);
    return {begin, count, tiles, divide_up(count, tiles)};
}

// Panels as they are stored, for any rows.
template <class T> Operands stored(const Problem& p, int64_t panel, int64_t k0, int64_t k) {
    constexpr int64_t SIZE = sizeof(T);
    const int64_t panel_step = p.K * PANEL;
    const T* b = static_cast<const T*>(p.w) + panel * panel_step + k0 * PANEL;
    return {nullptr, b, panel_step, 0, 0, panel, k0, k, nullptr, PANEL * SIZE, panel_step * SIZE};
}

// All tiles of some rows. Each fetches its part of what is to be fetched.
void tile_rows(const Problem& p, Operands o, const Rows& rows, Tile* tile) {
    const char* ahead = o.ahead;
    const float* x = p.x + o.k0 / K_BLOCK * p.block_step;
    const int64_t bytes = o.ahead_step * o.k;
    o.ahead_step = divide_up(o.ahead_step, rows.tiles);
    for (int64_t t = 0; t < rows.tiles; t++) {
        const int64_t from = rows.count * t / rows.tiles, to = rows.count * (t + 1) / rows.tiles;
        o.row = rows.begin + from;
        o.rows = to - from;
        o.a = x + o.row * ROW_STEP;
        o.ahead = ahead + bytes * t / rows.tiles;
        tile(p, o);
    }
}

// The operands with panels expanded to float32, for the tiles that follow each other.
template <class T> Operands expand(Operands o, int64_t panels, float* expanded) {
    for (int64_t q = 0; q < panels; q++) {
        const T* from = static_cast<const T*>(o.b) + q * o.panel_step;
        float* to = expanded + q * K_BLOCK * PANEL;
        for (int64_t i = 0; i < o.k * PANEL; i += WIDTH) store(to + i, load<vec>(from + i));
    }
    o.b = expanded;
    o.panel_step = K_BLOCK * PANEL;
    return o;
}

// Some rows times some panels. Of the rows, as many k as the cache holds meet all panels before the next do. A tile
// that reads panels alone fetches what it will read soon; tiles that share a block of panels fetch the next block.
template <class T> void block(const Problem& p, const Rows& rows, int64_t panel_begin, int64_t panel_end) {
    const bool alone = rows.tiles == 1, expands = !alone && sizeof(T) < sizeof(float);
    const Kernel kernel = expands ? kernel_for<float>(rows.height) : kernel_for<T>(rows.height);
    const int64_t span = std::max<int64_t>(1, CACHED / (rows.count * K_BLOCK)) * K_BLOCK;
    alignas(64) float expanded[MOST_PANELS * K_BLOCK * PANEL];
    for (int64_t begin = 0; begin < p.K; begin += span) {
        const int64_t end = std::min(p.K, begin + span);
        for (int64_t panel = panel_begin, count; panel < panel_end; panel += count) {
            count = panel + kernel.panels <= panel_end ? kernel.panels : 1;
            Tile* tile = count > 1 ? kernel.several : kernel.one;
            for (int64_t k0 = begin, k; k0 < end; k0 += k) {
                k = std::min(K_BLOCK, end - k0);
                Operands o = stored<T>(p, panel, k0, k);
                const char* b = static_cast<const char*>(o.b);
                const int64_t next = k0 + k < end ? k : count * p.K - (k0 - begin);
                o.ahead = b + (alone ? STREAM_AHEAD : next * PANEL * int64_t(sizeof(T)));
                tile_rows(p, expands ? expand<T>(o, count, expanded) : o, rows, tile);
            }
        }
    }
}

// The units [unit, end) of `row_blocks` x `groups` of panels, groups running fastest.
template <class T> void run_units(const Problem& p, int64_t row_blocks, int64_t group_size, int64_t unit, int64_t end) {
    const int64_t panels = divide_up(p.N, PANEL), groups = divide_up(panels, group_size);
    while (unit < end) {
        const int64_t index = unit / groups, group = unit % groups;
        const int64_t group_end = std::min(groups, group + end - unit);
        const Rows rows = rows_between(p.M * index / row_blocks, p.M * (index + 1) / row_blocks);
        block<T>(p, rows, group * group_size, std::min(panels, group_end * group_size));
        unit += group_end - group;
    }
}

// x with its blocks of 256 k one after the other: rows of a tile do not crowd the same places of the cache, and their
// distance is known to the compiler. A tile may read past the last row.
const float* copy_rows(const float* x, int64_t M, int64_t K) {
    static thread_local std::vector<float> copies;
    const size_t size = (divide_up(K, K_BLOCK) * M + TALLEST) * ROW_STEP;
    if (copies.size() < size) copies.resize(size);
    pool::parallel_ranges(M, M * K, [=, to = copies.data()](int64_t row, int64_t end) {
        for (; row < end; row++)
            for (int64_t k0 = 0; k0 < K; k0 += K_BLOCK)
                std::copy_n(x + row * K + k0, std::min(K_BLOCK, K - k0), to + (k0 / K_BLOCK * M + row) * ROW_STEP);
    });
    return copies.data();
}

template <class T> void multiply(Problem p) {
    if (p.M == 1) {
        p.block_step = K_BLOCK;
    } else {
        p.x = copy_rows(p.x, p.M, p.K);
        p.block_step = p.M * ROW_STEP;
    }
    const int64_t wanted = 4 * pool::threads(), group_size = panels_at_once(int(rows_between(0, p.M).height));
    const int64_t groups = divide_up(divide_up(p.N, PANEL), group_size);
    int64_t row_blocks = divide_up(p.M, ROW_BLOCK);
    if (groups < wanted)  // few columns for many threads: split rows too, in tiles of full height
        row_blocks = std::max(row_blocks, std::min(p.M / WIDE, divide_up(wanted, groups)));
    pool::parallel_ranges(row_blocks * groups, p.M * p.N * p.K, [&](int64_t unit, int64_t end) {
        run_units<T>(p, row_blocks, group_size, unit, end);
    });
}

template <class U> void pack(const U* w, U* panels, int64_t N, int64_t K) {
    pool::parallel_ranges(divide_up(N, PANEL), N * K * 4, [=](int64_t panel, int64_t end) {
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
    if (w.format == FP8) return linear_fp8(w, x, M, y);
    const int64_t passes = divide_up(M * w.K, COPIED);
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t row = M * pass / passes, rows = M * (pass + 1) / passes - row;
        if (linear_amx(w, x + row * w.K, rows, y + row * w.N)) continue;
        const Problem p{x + row * w.K, 0, w.data, w.bias, y + row * w.N, rows, w.N, w.K};
        w.format == FLOAT32 ? multiply<float>(p) : w.format == BFLOAT16 ? multiply<bf16>(p) : multiply<fp16>(p);
    }
}

extern "C" {

void fl_linear(const float* x, const void* w, int64_t format, const float* bias, float* y, int64_t M, int64_t N,
               int64_t K, int64_t row_bits) {
    linear({w, bias, format, N, K, row_bits}, x, M, y);
}

void fl_pack(const void* w, void* panels, int64_t item_size, int64_t N, int64_t K) {
    if (item_size == 4)
        pack(static_cast<const uint32_t*>(w), static_cast<uint32_t*>(panels), N, K);
    else
        pack(static_cast<const uint16_t*>(w), static_cast<uint16_t*>(panels), N, K);
}
}
