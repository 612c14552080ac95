// linear in the processor's matrix unit, which multiplies bfloat16 and adds float32, from the panels that linear.cpp
// packs. linear_pieces.h defines the result.
#include "linear_row.h"

#ifdef HAVE_AMX
namespace {

using namespace pieces;

constexpr int64_t GROUP = 16;           // rows of a tile
constexpr int64_t TILE = GROUP * STEP;  // numbers of a tile: of rows [16 rows][32 k], of weights [16][16 outputs][2 k]
constexpr int64_t SUMS = GROUP * PANEL;
constexpr int64_t ROW_BLOCK = 256;  // rows whose pieces stay in the second-level cache while panels pass
constexpr int64_t AHEAD = 1024;     // bytes between what is cut and what is fetched

typedef Lanes<v16>::u16 u16;

// Pieces of weights of an even and an odd k, side by side as the unit reads them; `to` is where the first goes.
template <int PIECES> INLINE void cut_weights(v16 even, v16 odd, uint16_t* to) {
#pragma GCC unroll 3
    for (int p = 0; p < PIECES; p++) {
        const v16 low = upper_half(even), high = upper_half(odd);
        const u32 both = bit_copy<u32>(low) >> 16 | bit_copy<u32>(high);
        memcpy(to + p * TILE, &both, sizeof(both));
        even -= low;
        odd -= high;
    }
}

// Pieces of 16 numbers of a row.
INLINE void cut_numbers(v16 x, uint16_t* to) {
#pragma GCC unroll 3
    for (int p = 0; p < ROW_PIECES; p++) {
        const v16 upper = upper_half(x);
        const u16 bits = __builtin_convertvector(bit_copy<u32>(upper) >> 16, u16);
        memcpy(to + p * TILE, &bits, sizeof(bits));
        x -= upper;
    }
}

struct Problem {
    const Matrix& w;
    const uint16_t* rows;  // pieces [group][step][piece][16][32], zero from K on, anything from M on
    int64_t M, steps;
    float* y;
};

// Tiles of few rows are wide, of more rows tall: so many groups of rows times so many panels.
template <bool WIDE> constexpr int64_t GROUPS = WIDE ? 1 : 2;
template <bool WIDE> constexpr int64_t PANELS = WIDE ? 4 : 2;

// Numbers of all pieces of the weights of a step [panel][piece][16][16][2], and bytes of a panel's weights as stored.
template <class T, bool WIDE> constexpr int64_t STEP_SIZE = PANELS<WIDE> * Storage<T>::PIECES * TILE;
template <class T> constexpr int64_t STORED_SIZE = STEP * PANEL * int64_t(sizeof(T));

// What a tile multiplies over a block of k.
struct Operands {
    const uint16_t* rows;  // pieces of the first group's rows
    int64_t group_step;    // numbers from a group to the next
    uint16_t* weights;     // pieces [step & mask][panel][piece][16][16][2]
    int64_t mask;
    bool cut;             // whether the pieces are to be made, or are there
    const char* stored;   // the panels that they are cut of
    int64_t panel_bytes;  // from a panel to the next
    int64_t panels, k, steps;
};

// The weights of step s, cut into pieces. In the meantime half of what comes `AHEAD` is fetched, of tall tiles all.
template <class T, bool WIDE> INLINE void cut_step(const Operands& o, int64_t s) {
    constexpr int PIECES = Storage<T>::PIECES;
    constexpr int64_t FETCHED = STORED_SIZE<T> / (WIDE ? 2 : 1);
    T memory[PANELS<WIDE>][STEP * PANEL];
    const T* from[PANELS<WIDE>];
    const char* stored = o.stored + s * STORED_SIZE<T>;
    uint16_t* to = o.weights + (s & o.mask) * STEP_SIZE<T, WIDE>;
    for (int64_t q = 0; q < PANELS<WIDE>; q++) {
        const void* panel = stored + std::min(q, o.panels - 1) * o.panel_bytes;
        from[q] = padded<STEP * PANEL>(static_cast<const T*>(panel), (o.k - s * STEP) * PANEL, memory[q]);
    }
    for (int64_t i = 0; i < STEP; i += 2) {
        for (int64_t line = i * FETCHED / STEP; line < (i + 2) * FETCHED / STEP; line += 64)
#pragma GCC unroll 4
            for (int64_t q = 0; q < PANELS<WIDE>; q++) __builtin_prefetch(stored + q * o.panel_bytes + AHEAD + line);
#pragma GCC unroll 4
        for (int64_t q = 0; q < PANELS<WIDE>; q++) {
            const v16 even = load<v16>(from[q] + i * PANEL), odd = load<v16>(from[q] + (i + 1) * PANEL);
            cut_weights<PIECES>(even, odd, to + q * PIECES * TILE + i * PANEL);
        }
    }
}

// Fetch the other half for one panel.
template <class T> INLINE void fetch_half(const char* stored) {
    constexpr int64_t SIZE = STORED_SIZE<T>;
    for (int64_t line = SIZE / 2; line < SIZE; line += 64) __builtin_prefetch(stored + AHEAD + line);
}

// One step of a tall tile. Registers 0 to 3 are sums of the first and the second group, each with both panels; 4 and 5
// pieces of rows, 6 and 7 of weights. (The intrinsics take literal registers only.)
template <class T, int I = 0>
INLINE void multiply_tall(const uint16_t* rows, int64_t group_step, const uint16_t* weights) {
    constexpr auto& PRODUCTS = Storage<T>::PRODUCTS;
    constexpr Product now = PRODUCTS[I], before = I > 0 ? PRODUCTS[I - 1] : Product{-1, -1};
    if constexpr (now.row != before.row) {
        _tile_loadd(4, rows + now.row * TILE, 64);
        _tile_loadd(5, rows + group_step + now.row * TILE, 64);
    }
    if constexpr (now.weight != before.weight) {
        _tile_loadd(6, weights + now.weight * TILE, 64);
        _tile_loadd(7, weights + (Storage<T>::PIECES + now.weight) * TILE, 64);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if constexpr (I + 1 < std::size(PRODUCTS)) multiply_tall<T, I + 1>(rows, group_step, weights);
}

// One step and panel of a wide tile. Registers 0 to 3 are sums of the panels, 4 to 6 the pieces of rows, 7 weights.
template <class T, int PANEL_INDEX, int I = 0> INLINE void multiply_wide(const uint16_t* weights) {
    constexpr auto& PRODUCTS = Storage<T>::PRODUCTS;
    constexpr Product now = PRODUCTS[I], before = I > 0 ? PRODUCTS[I - 1] : Product{-1, -1};
    if constexpr (now.weight != before.weight) _tile_loadd(7, weights + now.weight * TILE, 64);
    asm volatile("tdpbf16ps %%tmm7, %%tmm%c0, %%tmm%c1" ::"i"(4 + now.row), "i"(PANEL_INDEX));  // _tile_dpbf16ps
    if constexpr (I + 1 < std::size(PRODUCTS)) multiply_wide<T, PANEL_INDEX, I + 1>(weights);
}

template <class T, bool WIDE>
INLINE void multiply_step(const Operands& o, int64_t s) {
    const uint16_t* rows = o.rows + s * ROW_PIECES * TILE;
    const uint16_t* weights = o.weights + (s & o.mask) * STEP_SIZE<T, WIDE>;
    if constexpr (WIDE) {
        constexpr int64_t NEXT = Storage<T>::PIECES * TILE;
        const char* stored = o.stored + (s + 1) * STORED_SIZE<T>;
        _tile_loadd(4, rows, 64);
        _tile_loadd(5, rows + TILE, 64);
        _tile_loadd(6, rows + 2 * TILE, 64);
        fetch_half<T>(stored);
        multiply_wide<T, 0>(weights);
        fetch_half<T>(stored + o.panel_bytes);
        multiply_wide<T, 1>(weights + NEXT);
        fetch_half<T>(stored + 2 * o.panel_bytes);
        multiply_wide<T, 2>(weights + 2 * NEXT);
        fetch_half<T>(stored + 3 * o.panel_bytes);
        multiply_wide<T, 3>(weights + 3 * NEXT);
    } else {
        multiply_tall<T>(rows, o.group_step, weights);
    }
}

// Sums [group][panel][16][16] over a block of k. Weights are cut a step before they are multiplied.
template <class T, bool WIDE> __attribute__((noinline)) void tile(const Operands& o, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (o.cut) cut_step<T, WIDE>(o, 0);
    for (int64_t s = 0; s < o.steps; s++) {
        if (o.cut && s + 1 < o.steps) cut_step<T, WIDE>(o, s + 1);
        multiply_step<T, WIDE>(o, s);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + SUMS, 64);
    _tile_stored(2, sums + 2 * SUMS, 64);
    _tile_stored(3, sums + 3 * SUMS, 64);
}

// Rows [row, row_end) times the panels from `panel` on that are side by side, over the block of k from `step` on.
template <class T, bool WIDE>
void multiply_block(const Problem& p, Operands o, int64_t row, int64_t row_end, int64_t panel, int64_t step) {
    alignas(64) float sums[4 * SUMS];
    for (; row < row_end; row += GROUPS<WIDE> * GROUP) {
        o.rows = p.rows + row / GROUP * o.group_step + step * ROW_PIECES * TILE;
        tile<T, WIDE>(o, sums);
        for (int64_t i = 0; i < 4; i++) {
            const int64_t from = row + i / PANELS<WIDE> * GROUP, q = i % PANELS<WIDE>;
            if (q >= o.panels || from >= row_end) continue;
            const int64_t rows = std::min(GROUP, row_end - from);
            finish(p.w, panel + q, sums + i * SUMS, rows, step == 0, step + o.steps == p.steps, p.y + from * p.w.N);
        }
        o.cut = false;
    }
}

// Rows [row, row_end) times panels [panel, panel_end), a block of k after the other. The first tile cuts the weights
// for those below it; a lone one has room for two steps, in the first-level cache.
template <class T, bool WIDE>
void multiply_panels(const Problem& p, int64_t row, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    alignas(64) uint16_t weights[(WIDE ? 2 : K_BLOCK / STEP) * STEP_SIZE<T, WIDE>];
    const int64_t block = block_steps(p.w.K), panel_bytes = p.w.K * PANEL * int64_t(sizeof(T));
    const int64_t mask = row_end - row <= GROUPS<WIDE> * GROUP ? 1 : -1;
    for (int64_t step = 0; step < p.steps; step += block) {
        const int64_t steps = std::min(block, p.steps - step), k = p.w.K - step * STEP;
        for (int64_t panel = panel_begin; panel < panel_end; panel += PANELS<WIDE>) {
            const char* stored = static_cast<const char*>(p.w.data) + panel * panel_bytes + step * STORED_SIZE<T>;
            const int64_t panels = std::min(PANELS<WIDE>, panel_end - panel), group_step = p.steps * ROW_PIECES * TILE;
            const Operands o{nullptr, group_step, weights, mask, true, stored, panel_bytes, panels, k, steps};
            multiply_block<T, WIDE>(p, o, row, row_end, panel, step);
        }
    }
}

// The pieces of all rows.
const uint16_t* cut_rows(const float* x, int64_t M, int64_t K, int64_t steps) {
    static thread_local std::vector<uint16_t> memory;
    const size_t size = divide_up(M, 2 * GROUP) * 2 * steps * ROW_PIECES * TILE + 32;
    if (memory.size() < size) memory.resize(size);
    uint16_t* pieces = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    pool::parallel_ranges(M, M * K, [=](int64_t row, int64_t end) {
        for (; row < end; row++)
            for (int64_t s = 0; s < steps; s++) {
                uint16_t* to = pieces + (row / GROUP * steps + s) * ROW_PIECES * TILE + row % GROUP * STEP;
                float memory[STEP];
                const float* from = padded<STEP>(x + row * K + s * STEP, K - s * STEP, memory);
                cut_numbers(load<v16>(from), to);
                cut_numbers(load<v16>(from + PANEL), to + PANEL);
            }
    });
    return pieces;
}

template <class T, bool WIDE> void multiply(const Problem& p) {
    constexpr int64_t HEIGHT = GROUPS<WIDE> * GROUP;
    const int64_t panels = divide_up(p.w.N, PANEL), units = divide_up(panels, PANELS<WIDE>);
    const int64_t tiles = divide_up(p.M, HEIGHT);
    const int64_t wanted = 4 * pool::threads(), work = p.w.N * p.w.K * std::max<int64_t>(1, p.M / 4);
    int64_t row_blocks = divide_up(p.M, ROW_BLOCK);
    if (units < wanted)  // few columns for many threads: split rows too
        row_blocks = std::max(row_blocks, std::min(tiles, divide_up(wanted, units)));
    amx::Shapes shapes;
    std::fill_n(shapes.row_bytes, 8, 64);
    std::fill_n(shapes.rows, 8, 16);
    if (WIDE) std::fill_n(shapes.rows, 7, uint8_t(p.M));
    pool::parallel_ranges(row_blocks * units, work, [&](int64_t unit, int64_t end) {
        const amx::Registers registers(shapes);
        while (unit < end) {
            const int64_t index = unit / units, first = unit % units, last = std::min(units, first + end - unit);
            const int64_t row = tiles * index / row_blocks * HEIGHT;
            const int64_t row_end = std::min(p.M, tiles * (index + 1) / row_blocks * HEIGHT);
            multiply_panels<T, WIDE>(p, row, row_end, first * PANELS<WIDE>, std::min(panels, last * PANELS<WIDE>));
            unit += last - first;
        }
    });
}

template <class T> void multiply(const Matrix& w, const float* x, int64_t M, float* y) {
    if (M == 1) return multiply_row<T>(w, x, y);
    const int64_t steps = divide_up(w.K, STEP);
    const Problem p{w, cut_rows(x, M, w.K, steps), M, steps, y};
    M <= GROUP ? multiply<T, true>(p) : multiply<T, false>(p);
}

}  // namespace
#endif

bool linear_amx(const Matrix& w, const float* x, int64_t M, float* y) {
#ifdef HAVE_AMX
    if (!amx::allowed()) return false;
    if (w.format == FLOAT32) multiply<float>(w, x, M, y);
    if (w.format == BFLOAT16) multiply<bf16>(w, x, M, y);
    if (w.format == FLOAT16) multiply<fp16>(w, x, M, y);
    return true;
#else
    return false;
#endif
}
