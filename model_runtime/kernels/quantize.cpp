// Rows become integers; matrices of integers are packed into panels and expanded again.
#include <algorithm>
#include <cmath>
#include <limits>

#include "integer.h"
#include "integer_dot.h"
#include "integer_tile.h"
#include "linear_fp8.h"
#include "pool.h"

namespace {

constexpr int64_t GROUP = QuantizedRows::GROUP;

constexpr int64_t VECTORS_OF_BLOCK = BLOCK / LANES;
typedef typename Lanes<fvec>::s16 halves;

// All lanes combined by `function`, halves with halves.
template <class Function> INLINE int32_t fold(i8 v, Function function) {
    v = function(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = function(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    return function(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}
template <class Function> INLINE int32_t fold(i16 v, Function function) {
    struct Pair {
        i8 low, high;
    };
    const Pair pair = bit_copy<Pair>(v);
    return fold(function(pair.low, pair.high), function);
}

// Largest |x| of a block. Compared as bits: infinity is larger than any number, a NaN larger still.
INLINE float largest(const fvec (&x)[VECTORS_OF_BLOCK]) {
    const auto larger = [](auto a, auto b) { return a > b ? a : b; };
    ivec lanes{};
    for (const fvec& v : x) lanes = larger(lanes, bit_copy<ivec>(v) & 0x7fffffff);
    return bit_copy<float>(fold(lanes, larger));
}

struct BlockSums {
    float scale;
    int32_t all, first;  // of the values, and of the first 16
};

// One block, to the row's place in `values`.
template <int PLANES> INLINE BlockSums quantize_block(const float* x, int8_t* values) {
    constexpr float LARGEST = PLANES == 1 ? 127 : 127 * 256;
    fvec numbers[VECTORS_OF_BLOCK];
    for (int64_t v = 0; v < VECTORS_OF_BLOCK; v++) numbers[v] = load<fvec>(x + v * LANES);
    const float scale = largest(numbers) / LARGEST, inverse = 1.0f / scale;
    const bool usable = inverse > 0 && inverse <= std::numeric_limits<float>::max();  // not of zeros, infinity, NaN
    const fvec magic = splat<fvec>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    ivec sum{}, first{};
    int16_t integers[BLOCK] = {};
    if (usable)
        for (int64_t v = 0; v < VECTORS_OF_BLOCK; v++) {
            const ivec rounded = bit_copy<ivec>(numbers[v] * inverse + magic) - 0x4b400000;
            sum += rounded;
            if (v == VECTORS_OF_BLOCK / 2 - 1) first = sum;
            const halves narrow = __builtin_convertvector(rounded, halves);
            memcpy(integers + v * LANES, &narrow, sizeof(narrow));
        }
    if constexpr (PLANES == 1)
        std::copy_n(integers, BLOCK, values);
    else
        BlockDot<2>::split(integers, values, values + GROUP * BLOCK);
    const auto add = [](auto a, auto b) { return a + b; };
    return {scale, fold(sum, add), fold(first, add)};
}

}  // namespace

void quantize_row(const float* x, int64_t row, int64_t K, const QuantizedRows& out) {
    const int64_t blocks = K / BLOCK;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t group = row / GROUP * blocks + b, at = group * GROUP + row % GROUP;
        int8_t* values = out.values + (group * out.planes * GROUP + row % GROUP) * BLOCK;
        const float* from = x + b * BLOCK;
        const BlockSums block = out.planes == 1 ? quantize_block<1>(from, values) : quantize_block<2>(from, values);
        out.scales[at] = block.scale;
        out.sums[at] = block.scale * float(block.all);
        out.offsets[group * 2 * GROUP + row % GROUP] = -128 * block.all;
        out.offsets[group * 2 * GROUP + GROUP + row % GROUP] = -128 * block.first;
    }
}

namespace {

// A row in a file: of each block its scales, then its integers; scales that blocks have in common are all in front.
struct StoredRow {
    int64_t head, integers, shared, blocks;  // bytes of scales and of integers of a block, blocks of a scale, all blocks

    StoredRow(int64_t format, int64_t K)
        : head(head_bytes(format)), integers(format == Q8_0 ? BLOCK : BLOCK / 2), shared(blocks_of_scale(format)),
          blocks(K / BLOCK) {}
    int64_t heads() const { return divide_up(blocks, shared) * head; }
    int64_t bytes() const { return heads() + blocks * integers; }
    int64_t head_at(int64_t b) const { return shared > 1 ? b / shared * head : b * (head + integers); }
    int64_t integers_at(int64_t b) const { return shared > 1 ? heads() + b * integers : head_at(b) + head; }
};

// Row `lane` of a panel.
void pack_row(const uint8_t* row, int64_t format, int64_t K, int64_t lane, const PanelLayout& at, uint8_t* panel) {
    const StoredRow stored(format, K);
    const int64_t size = std::min<int64_t>(2, stored.head);  // of a scale
    for (int64_t b = 0; b < stored.blocks; b++) {
        uint8_t *scales = panel + b / stored.shared * at.scale_step, *quants = panel + at.quants + b * at.quant_step;
        const uint8_t *head = row + stored.head_at(b), *integers = row + stored.integers_at(b);
        memcpy(scales + size * lane, head, size);
        if (has_second(format)) memcpy(scales + 2 * (PANEL + lane), head + 2, 2);
        for (int64_t four = 0; four < stored.integers; four += 4)
            memcpy(quants + four * PANEL + lane * 4, integers + four, 4);
    }
}

}  // namespace

int64_t quantized_rows_bytes(int64_t M, const Matrix& w) {
    return row_groups(M) * GROUP * (w.row_bits / 8 * w.K + w.K / BLOCK * 16);
}

QuantizedRows quantized_rows_at(void* memory, int64_t M, const Matrix& w) {
    const int64_t planes = w.row_bits / 8, count = row_groups(M) * GROUP * (w.K / BLOCK);
    int8_t* values = static_cast<int8_t*>(memory);
    float* scales = reinterpret_cast<float*>(values + planes * count * BLOCK);
    return {planes, values, scales, scales + count, reinterpret_cast<int32_t*>(scales + 2 * count)};
}

void quantize_rows(const float* x, int64_t M, int64_t K, const QuantizedRows& out) {
    pool::parallel_ranges(M, M * K * 2, [&](int64_t row, int64_t end) {
        for (; row < end; row++) quantize_row(x + row * K, row, K, out);
    });
}

namespace {

// Numbers of 4 bits are integers in `E2M1`; in a panel 4 of a row lie together.
void expand_mxfp4(const uint8_t* quants, uint8_t exponent, float* out) {
    const float scale = std::ldexp(0.5f, int(exponent) - 127);
    for (int64_t k = 0; k < BLOCK; k++) {
        const int64_t place = k % (BLOCK / 2);
        const uint8_t byte = quants[place / 4 * 4 * PANEL + place % 4];
        out[k] = float(E2M1[k < BLOCK / 2 ? byte & 15 : byte >> 4]) * scale;
    }
}

}  // namespace

void expand_row(const Matrix& w, int64_t row, float* out) {
    if (is_super(w.format)) return expand_super_row(w, row, out);
    const Panel panel(w, row / PANEL);
    const int64_t lane = row % PANEL;
    for (int64_t b = 0; b < w.K / BLOCK; b++, out += BLOCK) {
        const uint8_t* head = panel.scales_at(b, blocks_of_scale(w.format));
        if (w.format == MXFP4) {
            expand_mxfp4(panel.quants + b * panel.layout.quant_step + lane * 4, head[lane], out);
            continue;
        }
        const fp16* scales = reinterpret_cast<const fp16*>(head) + lane;
        const uint8_t* bytes = panel.quants + b * panel.layout.quant_step + lane * 4;
        const float scale = load_one(scales), second = has_second(w.format) ? load_one(scales + PANEL) : 0.0f;
        for (int64_t k = 0; k < BLOCK; k++) {
            const bool upper = w.format != Q8_0 && k >= BLOCK / 2;
            const int64_t place = upper ? k - BLOCK / 2 : k;
            const uint8_t byte = bytes[place / 4 * 4 * PANEL + place % 4];
            int integer = w.format == Q8_0 ? int8_t(byte) : upper ? byte >> 4 : byte & 15;
            if (w.format == Q4_0 || w.format == Q4_0_128) integer -= 8;
            const float zero = has_zero(w.format) ? second : 0.0f, minimum = w.format == Q4_1 ? second : 0.0f;
            out[k] = (float(integer) - zero) * scale + minimum;
        }
    }
}

extern "C" {

// Rows of blocks as in a file become panels, outputs behind the last row zero. `panels` has fl_quantized_bytes.
void fl_pack_quantized(const uint8_t* rows, uint8_t* panels, int64_t format, int64_t N, int64_t K) {
    if (format == FP8) return pack_fp8(rows, panels, N, K);
    const PanelLayout layout = panel_layout(format, K);
    const int64_t row_bytes = is_super(format) ? K / SUPER * super_bytes(format) : StoredRow(format, K).bytes();
    pool::parallel_ranges(panels_of(N), N * K * 4, [&](int64_t panel, int64_t end) {
        for (; panel < end; panel++) {
            uint8_t* to = panels + panel * layout.bytes;
            std::fill_n(to, layout.bytes, 0);
            const int64_t row = panel * PANEL;
            for (int64_t lane = 0; lane < std::min(PANEL, N - row); lane++)
                if (is_super(format))
                    pack_super_row(rows + (row + lane) * row_bytes, format, K, lane, layout, to);
                else
                    pack_row(rows + (row + lane) * row_bytes, format, K, lane, layout, to);
        }
    });
}

int64_t fl_quantized_bytes(int64_t format, int64_t N, int64_t K) {
    return panels_of(N) * (format == FP8 ? fp8_panel_bytes(K) : panel_layout(format, K).bytes);
}
}
