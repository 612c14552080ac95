// Products of quantised rows and matrices of integers. integer.h defines the result; tiles, their order, the threads and
// the instructions only move work around: sums of integers are exact.
#include "integer.h"

#include <algorithm>
#include <vector>

#include "integer_amx.h"
#include "integer_tile.h"
#include "pool.h"

namespace {

constexpr int64_t GROUP = QuantizedRows::GROUP;
constexpr int64_t ROW_BLOCK = 128;  // rows that stay in the second-level cache while panels pass

#ifdef HAVE_AMX
// With fewer rows vectors are faster: numbers of 4 bits go through memory to the matrix unit.
template <int64_t FORMAT> bool in_matrix_unit(int64_t M) {
    return FORMAT != MXFP4 && !is_super(FORMAT) && M >= (FORMAT == Q8_0 ? 3 : 8) && amx::allowed();
}
#endif

// Rows [row, row_end) of M, from the first of a group, times panels.
template <int64_t FORMAT, int PLANES>
void multiply_panels(const Matrix& w, int64_t panel, int64_t panel_end, const QuantizedRows& x, int64_t M, int64_t row,
                     int64_t row_end, float* y) {
#ifdef HAVE_AMX
    if (in_matrix_unit<FORMAT>(M))
        return amx::multiply_panels<FORMAT, PLANES>(w, panel, panel_end, x, M, row, row_end, y);
#endif
    for (; panel < panel_end; panel++)
        for (int64_t r = row; r < row_end; r += GROUP)
            vector_tiles<FORMAT, PLANES>(w, panel, x, r, std::min(row_end, r + GROUP), y);
}

template <int64_t FORMAT, int PLANES = 2> void multiply(const Matrix& w, const QuantizedRows& x, int64_t M, float* y) {
    const int64_t panels = panels_of(w.N), groups = row_groups(M), wanted = 4 * pool::threads();
    int64_t row_blocks = divide_up(M, ROW_BLOCK);
    if (panels < wanted)  // few columns for many threads: split rows too
        row_blocks = std::max(row_blocks, std::min(groups, divide_up(wanted, panels)));
#ifdef HAVE_AMX
    if (in_matrix_unit<FORMAT>(M)) amx::clear_rest(x, M, w.K / BLOCK);
#endif
    const int64_t work = w.N * w.K * std::max<int64_t>(1, M / 8);
    pool::parallel_ranges(row_blocks * panels, work, [&](int64_t unit, int64_t end) {
        while (unit < end) {
            const int64_t index = unit / panels, panel = unit % panels;
            const int64_t panel_end = std::min(panels, panel + end - unit);
            const int64_t row = groups * index / row_blocks * GROUP;
            const int64_t row_end = std::min(M, groups * (index + 1) / row_blocks * GROUP);
            multiply_panels<FORMAT, PLANES>(w, panel, panel_end, x, M, row, row_end, y);
            unit += panel_end - panel;
        }
        stores_done();
    });
}

// Memory of the calling thread that lasts, aligned to 64 bytes.
uint8_t* memory_of(std::vector<uint8_t>& memory, int64_t bytes) {
    memory.resize(std::max<size_t>(memory.size(), bytes + 63));
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

}  // namespace

void linear_integer(const Matrix& w, const float* x, int64_t M, float* y) {
    static thread_local std::vector<uint8_t> memory;
    const QuantizedRows rows = quantized_rows_at(memory_of(memory, quantized_rows_bytes(M, w)), M, w);
    quantize_rows(x, M, w.K, rows);
    linear_quantized(w, rows, M, y);
}

void linear_quantized(const Matrix& w, const QuantizedRows& x, int64_t M, float* y) {
    if (w.format == Q8_0) x.planes == 1 ? multiply<Q8_0, 1>(w, x, M, y) : multiply<Q8_0>(w, x, M, y);
    if (w.format == Q4_0) multiply<Q4_0>(w, x, M, y);
    if (w.format == Q4_1) multiply<Q4_1>(w, x, M, y);
    if (w.format == Q4_Z) multiply<Q4_Z>(w, x, M, y);
    if (w.format == MXFP4) multiply<MXFP4>(w, x, M, y);
    if (w.format == Q4_K) multiply<Q4_K>(w, x, M, y);
    if (w.format == Q6_K) multiply<Q6_K>(w, x, M, y);
    if (w.format == Q4_0_128) multiply<Q4_0_128>(w, x, M, y);
    if (w.format == Q4_Z_128) multiply<Q4_Z_128>(w, x, M, y);
}
