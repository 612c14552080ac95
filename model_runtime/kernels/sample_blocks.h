// A row of logits, looked at in blocks of 64: their maxima, the weights of tokens and their sums by block. Later passes
// skip blocks by what the first one found. The first part of `sample.cpp`.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace {

typedef double d8 __attribute__((vector_size(64)));
typedef int64_t l8 __attribute__((vector_size(64)));

constexpr int64_t BLOCK = 64;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr double WEIGHT_ONE = 0x1p40;  // of the most likely token

// A row as blocks of 64, the last one filled up with -inf.
struct Blocks {
    const float* x;
    int64_t V, count;
    float tail[BLOCK];

    Blocks(const float* x, int64_t V) : x(x), V(V), count((V + BLOCK - 1) / BLOCK) {
        std::fill_n(tail, BLOCK, -INF);
        std::copy(x + V / BLOCK * BLOCK, x + V, tail);
    }
    const float* operator[](int64_t block) const { return block < V / BLOCK ? x + block * BLOCK : tail; }
};

// The largest number of every block to `maxima`; returns the largest of all, or NaN if the row has a NaN or +inf, or
// nothing but -inf.
float find_maxima(const Blocks& blocks, std::vector<float>& maxima) {
    maxima.resize(blocks.count);
    i8 below{-1, -1, -1, -1, -1, -1, -1, -1};
    float best = -INF;
    for (int64_t b = 0; b < blocks.count; b++) {
        const float* x = blocks[b];
        v8 most = load<v8>(x);
        below &= most < INF;
        for (int64_t i = 8; i < BLOCK; i += 8) {
            const v8 v = load<v8>(x + i);
            below &= v < INF;
            most = v > most ? v : most;
        }
        maxima[b] = lane_max(most);
        best = std::max(best, maxima[b]);
    }
    for (int i = 0; i < 8; i++)
        if (!below[i]) return NAN;
    return best > -INF ? best : NAN;
}

int32_t first_maximum(const Blocks& blocks, const std::vector<float>& maxima, float best) {
    const int64_t b = std::find(maxima.begin(), maxima.end(), best) - maxima.begin();
    return int32_t(b * BLOCK + (std::find(blocks[b], blocks[b] + BLOCK, best) - blocks[b]));
}

// How probable tokens are, relative to the most likely one.
struct Weigher {
    float best, temperature, min_p;

    // The weights of 16 logits. Adding 1.5 * 2^12 to a number below 1 leaves its multiple of 2^-40 in the low bits.
    INLINE void operator()(const float* x, l8 (&weights)[2]) const {
        float p[16];
        for (int i = 0; i < 16; i += sizeof(vec) / 4) {
            const vec likely = exp_lanes((load<vec>(x + i) - best) / temperature);
            store(p + i, select(likely < min_p, vec{}, likely));
        }
        constexpr double magic = 0x1.8p12;
        for (int i = 0; i < 2; i++) {
            const d8 shifted = __builtin_convertvector(load<v8>(p + 8 * i), d8) + magic;
            weights[i] = bit_copy<l8>(shifted) - bit_copy<int64_t>(magic);
        }
    }
};

int64_t lane_sum(l8 v) { return v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7]; }

// The weight of every block to `sums`, returns that of all.
int64_t sum_weights(const Blocks& blocks, const Weigher& weigh, std::vector<int64_t>& sums) {
    sums.resize(blocks.count);
    int64_t total = 0;
    for (int64_t b = 0; b < blocks.count; b++) {
        l8 sum{}, weights[2];
        for (int64_t i = 0; i < BLOCK; i += 16) {
            weigh(blocks[b] + i, weights);
            sum += weights[0] + weights[1];
        }
        total += sums[b] = lane_sum(sum);
    }
    return total;
}

}  // namespace
