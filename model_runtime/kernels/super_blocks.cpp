// GGUF's blocks of 256 numbers (ggml-common.h) become panels as integer.h lays them out, and numbers again.
#include <algorithm>

#include "integer.h"

namespace {

constexpr int64_t PARTS = SUPER / BLOCK;

// A block of one row, taken apart: integers as they are stored, and for each 32 of them two bytes: scale and minimum, or
// the scales of two halves.
struct Parts {
    uint8_t integers[SUPER], bytes[PARTS][2];
    fp16 factors[2];  // of scales and minima
};

void read_q4_k(const uint8_t* block, Parts& out) {
    const uint8_t *packed = block + 4, *numbers = block + 16;
    memcpy(out.factors, block, 4);
    for (int64_t part = 0; part < PARTS; part++) {
        const int64_t j = part % 4;
        const bool upper = part >= 4;
        out.bytes[part][0] = upper ? (packed[8 + j] & 15) | packed[j] >> 6 << 4 : packed[j] & 63;
        out.bytes[part][1] = upper ? packed[8 + j] >> 4 | packed[4 + j] >> 6 << 4 : packed[4 + j] & 63;
        for (int64_t k = 0; k < BLOCK; k++) {
            const uint8_t byte = numbers[part / 2 * BLOCK + k];
            out.integers[part * BLOCK + k] = part % 2 ? byte >> 4 : byte & 15;
        }
    }
}

void read_q6_k(const uint8_t* block, Parts& out) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    memcpy(out.factors, block + 208, 2);
    for (int64_t part = 0; part < PARTS; part++) {
        const int64_t half = part / 4, quarter = part % 4;
        memcpy(out.bytes[part], scales + 2 * part, 2);
        for (int64_t k = 0; k < BLOCK; k++) {
            const uint8_t byte = low[half * 64 + quarter % 2 * BLOCK + k];
            const uint8_t lower = quarter / 2 ? byte >> 4 : byte & 15;
            out.integers[part * BLOCK + k] = lower | (high[half * BLOCK + k] >> 2 * quarter & 3) << 4;
        }
    }
}

// Where number k of a block of 32 of a lane is: in the low or high half of a byte, and in Q6_K two bits of another.
int64_t low_place(int64_t k, int64_t lane) { return k % 16 / 4 * 4 * PANEL + lane * 4 + k % 4; }
int64_t high_place(int64_t k, int64_t lane) { return 16 * PANEL + k / 4 % 2 * 4 * PANEL + lane * 4 + k % 4; }

}  // namespace

int64_t super_bytes(int64_t format) { return format == Q4_K ? 144 : 210; }

void pack_super_row(const uint8_t* row, int64_t format, int64_t K, int64_t lane, const PanelLayout& at, uint8_t* panel) {
    Parts parts;
    for (int64_t block = 0; block < K / SUPER; block++, row += super_bytes(format)) {
        format == Q4_K ? read_q4_k(row, parts) : read_q6_k(row, parts);
        uint8_t* factors = panel + at.factors + block * at.factor_step;
        memcpy(factors + 2 * lane, parts.factors, 2);
        if (format == Q4_K) memcpy(factors + 2 * (PANEL + lane), parts.factors + 1, 2);
        for (int64_t part = 0; part < PARTS; part++) {
            uint8_t* scales = panel + (block * PARTS + part) * at.scale_step;
            uint8_t* quants = panel + at.quants + (block * PARTS + part) * at.quant_step;
            for (int64_t i = 0; i < 2; i++) scales[i * PANEL + lane] = parts.bytes[part][i];
            for (int64_t k = 0; k < BLOCK; k++) {
                const uint8_t integer = parts.integers[part * BLOCK + k];
                quants[low_place(k, lane)] |= (integer & 15) << (k < 16 ? 0 : 4);
                if (format == Q6_K) quants[high_place(k, lane)] |= integer >> 4 << k / 8 * 2;
            }
        }
    }
}

void expand_super_row(const Matrix& w, int64_t row, float* out) {
    const Panel panel(w, row / PANEL);
    const int64_t lane = row % PANEL;
    for (int64_t b = 0; b < w.K / BLOCK; b++, out += BLOCK) {
        const uint8_t *scales = panel.scales_at(b, 1) + lane, *quants = panel.quants_at(b);
        const float factor = load_one(panel.factors_at(b) + lane);
        const float minimum = w.format == Q4_K ? load_one(panel.factors_at(b) + PANEL + lane) * float(scales[PANEL]) : 0;
        for (int64_t k = 0; k < BLOCK; k++) {
            const uint8_t byte = quants[low_place(k, lane)];
            const int lower = k < 16 ? byte & 15 : byte >> 4;
            if (w.format == Q4_K) {
                out[k] = float(lower) * (factor * float(scales[0])) - minimum;
            } else {
                const int integer = (lower | (quants[high_place(k, lane)] >> k / 8 * 2 & 3) << 4) - 32;
                out[k] = float(integer) * (factor * float(int8_t(scales[k < 16 ? 0 : PANEL])));
            }
        }
    }
}
