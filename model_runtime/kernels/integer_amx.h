// The same product in the processor's matrix unit (Intel AMX): 16 rows x 16 outputs x a block of 32 k in one instruction.
// The integers of a tile go through memory to the vector registers, where the floats are added as integer.h says.
#pragma once

#include "integer_tile.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#define HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace amx {

constexpr int64_t GROUP = QuantizedRows::GROUP;

// Whether the system lets this process use the unit; it must be asked once.
inline bool allowed() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

// The unit's registers of the calling thread, for tiles of `rows` rows, until the end of this object. 0 to 3 are sums
// [rows][16 int32] of the first and second plane of an even and an odd block, 4 and 5 the planes of rows [rows][32 int8],
// 6 outputs [8 groups][16][4 int8].
struct Registers {
    explicit Registers(int64_t rows) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 32, 32, 64};
            uint8_t rows[16] = {};
        } config;
        std::fill_n(config.rows, 6, uint8_t(rows));
        config.rows[6] = 8;
        asm volatile("" ::"r"(&config) : "memory");  // GCC's intrinsic says that it reads the first 8 bytes alone
        _tile_loadconfig(&config);
    }
    ~Registers() { _tile_release(); }
    Registers(const Registers&) = delete;
};

// Integers of a panel as signed bytes [block][8 groups][16][4]: those of 4 bits less 8, in Q4_1 as they are.
template <int64_t FORMAT> const uint8_t* signed_bytes(const Panel& p, int64_t blocks, uint8_t* out) {
    if (FORMAT == Q8_0) return p.quants;
    const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(FORMAT == Q4_0 ? 8 : 0);
    for (int64_t i = 0; i < blocks * 4; i++) {
        const __m512i bytes = _mm512_loadu_si512(p.quants + i * 64);
        const __m512i near = _mm512_and_si512(bytes, low), far = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
        uint8_t* to = out + (i / 4 * 8 + i % 4) * 64;
        _mm512_storeu_si512(to, _mm512_sub_epi8(near, offset));
        _mm512_storeu_si512(to + 4 * 64, _mm512_sub_epi8(far, offset));
    }
    return out;
}

// Multiply rows and outputs over a block of k. (The intrinsics take literal registers only.)
INLINE void multiply_even(const int8_t* rows, const uint8_t* outputs) {
    _tile_loadd(6, outputs, 64);
    _tile_zero(0);
    _tile_loadd(4, rows, 32);
    _tile_dpbssd(0, 4, 6);
    _tile_zero(1);
    _tile_loadd(5, rows + PLANE, 32);
    _tile_dpbssd(1, 5, 6);
}
INLINE void multiply_odd(const int8_t* rows, const uint8_t* outputs) {
    _tile_loadd(6, outputs, 64);
    _tile_zero(2);
    _tile_loadd(4, rows, 32);
    _tile_dpbssd(2, 4, 6);
    _tile_zero(3);
    _tile_loadd(5, rows + PLANE, 32);
    _tile_dpbssd(3, 5, 6);
}

// Sums of integers [plane][16][16] to memory.
INLINE void store_even(int32_t* out) {
    _tile_stored(0, out, 64);
    _tile_stored(1, out + GROUP * PANEL, 64);
}
INLINE void store_odd(int32_t* out) {
    _tile_stored(2, out, 64);
    _tile_stored(3, out + GROUP * PANEL, 64);
}

// What a tile multiplies: a group of rows and a panel, as signed bytes, of a matrix; `next` is fetched meanwhile.
struct Operands {
    const Panel& panel;
    const uint8_t *quants, *next;
    const QuantizedRows& x;
    int64_t blocks, group;
};

// The first R rows, block by block: while the floats of one are added, the integers of the next go to memory and those
// after it are multiplied.
template <int64_t FORMAT, int R>
__attribute__((noinline)) void tile(const Operands& o, const Matrix& w, int64_t column, int64_t rows, float* y) {
    const int64_t blocks = o.blocks, at = o.group * blocks * GROUP, ahead = o.panel.layout.bytes / blocks;
    const int8_t* values = o.x.values + at * BLOCK * PLANES;
    alignas(64) int32_t integers[2][PLANES * GROUP * PANEL];
    v16 sums[R] = {};
    multiply_even(values, o.quants);
    store_even(integers[0]);
    if (blocks > 1) multiply_odd(values + PLANE * PLANES, o.quants + PANEL * BLOCK);
    for (int64_t b = 0; b < blocks; b++) {
        const int8_t* later_rows = values + (b + 2) * PLANE * PLANES;
        const uint8_t* later_outputs = o.quants + (b + 2) * PANEL * BLOCK;
        if (b % 2 == 0) {
            if (b + 1 < blocks) store_odd(integers[1]);
            if (b + 2 < blocks) multiply_even(later_rows, later_outputs);
        } else {
            if (b + 1 < blocks) store_even(integers[0]);
            if (b + 2 < blocks) multiply_odd(later_rows, later_outputs);
        }
        for (int64_t line = 0; line < ahead; line += 64) __builtin_prefetch(o.next + b * ahead + line);
        const fp16* halves = reinterpret_cast<const fp16*>(o.panel.scales + b * o.panel.layout.scale_step);
        const float *row_scales = o.x.scales + at + b * GROUP, *row_sums = o.x.sums + at + b * GROUP;
        const v16 scale = load<v16>(halves), minimum = load<v16>(halves + (FORMAT == Q4_1 ? PANEL : 0));
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const int32_t* high = integers[b % 2] + r * PANEL;
            const ivec exact = (load_bytes(high) << 8) + load_bytes(high + GROUP * PANEL);
            sums[r] = fused(to_float(exact), scale * splat<v16>(row_scales[r]), sums[r]);
            if constexpr (FORMAT == Q4_1) sums[r] = fused(minimum, splat<v16>(row_sums[r]), sums[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
        if (r < rows) store_outputs(w, column, sums[r], y + (o.group * GROUP + r) * w.N);
}

// `rows` of a group times one panel, in a tile of the next multiple of 4 rows.
template <int64_t FORMAT>
void tile_of(const Operands& o, const Matrix& w, int64_t column, int64_t rows, float* y) {
    if (rows <= 4) return tile<FORMAT, 4>(o, w, column, rows, y);
    if (rows <= 8) return tile<FORMAT, 8>(o, w, column, rows, y);
    if (rows <= 12) return tile<FORMAT, 12>(o, w, column, rows, y);
    tile<FORMAT, 16>(o, w, column, rows, y);
}

// Rows [row, row_end) of M, from the first of a group, times panels.
template <int64_t FORMAT>
void multiply_panels(const Matrix& w, int64_t panel, int64_t panel_end, const QuantizedRows& x, int64_t M, int64_t row,
                     int64_t row_end, float* y) {
    static thread_local std::vector<uint8_t> scratch;
    scratch.resize(std::max<size_t>(scratch.size(), FORMAT == Q8_0 ? 0 : w.K * PANEL));
    const Registers registers(std::min(M, GROUP));
    for (; panel < panel_end; panel++) {
        const Panel p(w, panel);
        const uint8_t* quants = signed_bytes<FORMAT>(p, w.K / BLOCK, scratch.data());
        for (int64_t r = row; r < row_end; r += GROUP) {
            const Operands o{p, quants, p.scales + p.layout.bytes, x, w.K / BLOCK, r / GROUP};
            tile_of<FORMAT>(o, w, panel * PANEL, std::min(GROUP, row_end - r), y);
        }
    }
}

}  // namespace amx

#endif
