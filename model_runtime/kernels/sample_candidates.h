// The few tokens of a row that top-k, top-p and log-probabilities choose among: a bound that no kept token is below
// leaves them, and a radix selection over the ordered bits of their logits finds the last one that stays. A part of
// `sample.cpp`.
#pragma once

#include <functional>

#include "sample_blocks.h"

namespace {

// A number that no logit of the nucleus is below: tokens lighter than (1 - top_p) total / V weigh less than 1 - top_p
// together, so heavier ones weigh more than top_p. The margin is far above the error of exp and of rounding to 2^-40.
float nucleus_bound(const Blocks& blocks, const Weigher& weigh, double top_p, int64_t total) {
    const double weight = (1 - top_p) * double(total) / double(blocks.V);
    if (weight < 64) return -INF;
    return float(weigh.best + weigh.temperature * (std::log(weight / WEIGHT_ONE) - 0.02));
}

// Ordered as the logits are; -0 is 0.
INLINE uint32_t ordered(float x) {
    const int32_t bits = bit_copy<int32_t>(x + 0.0f);
    return uint32_t(bits) ^ (uint32_t(bits >> 31) | 0x80000000u);
}

// Tokens that may stay, in the order of ids.
struct Candidates {
    int64_t count = 0;
    std::vector<float> logit;
    std::vector<int32_t> id;
    std::vector<int64_t> weight;

    // The logits from `bound` on.
    void collect(const Blocks& blocks, const std::vector<float>& maxima, float bound) {
        reserve(blocks.V);
        int64_t found = 0;
        for (int64_t b = 0; b < blocks.count; b++) {
            if (maxima[b] < bound) continue;
            const float* x = blocks[b];
            const int64_t first = b * BLOCK, size = std::min(BLOCK, blocks.V - first);
            for (int64_t i = 0; i < size; i++) {
                logit[found] = x[i];
                id[found] = int32_t(first + i);
                found += x[i] >= bound;
            }
        }
        count = found;
    }

    // The `most` largest logits.
    void collect_top(const Blocks& blocks, const std::vector<float>& maxima, int64_t most) {
        collect(blocks, maxima, reached_by(most, maxima));
        std::fill_n(weight.begin(), count, 1);
        keep_first(most);
    }

    // Their weights; returns the sum.
    int64_t weigh(const Weigher& weigher) {
        l8 sum{}, weights[2];
        std::fill_n(logit.begin() + count, 16, -INF);
        for (int64_t i = 0; i < count; i += 16) {
            weigher(logit.data() + i, weights);
            memcpy(weight.data() + i, weights, sizeof(weights));
            sum += weights[0] + weights[1];
        }
        return lane_sum(sum);
    }

    // In the order (logit descending, id ascending) keep the first ones: those before which the others weigh less than
    // `limit` together.
    void keep_first(int64_t limit) {
        constexpr int BITS = 11;
        const int64_t all = count;
        uint32_t border = 0;  // key of the last one kept, from the highest bits on
        for (const int shift : {21, 10, 0}) {
            int64_t histogram[2][1 << BITS] = {};  // two, since adding to a number that was just stored waits for it
            const int known = shift ? shift + BITS : 10;
            for (int64_t i = 0; i < all; i++) {
                const uint32_t key = ordered(logit[i]);
                if (uint64_t(key) >> known == uint64_t(border) >> known)
                    histogram[i & 1][key >> shift & ((1 << BITS) - 1)] += weight[i];
            }
            int64_t bucket = (1 << BITS) - 1;
            const auto sum = [&] { return histogram[0][bucket] + histogram[1][bucket]; };
            for (; bucket >= 0 && sum() < limit; bucket--) limit -= sum();
            if (bucket < 0) return;  // all of them weigh less
            border |= uint32_t(bucket) << shift;
        }
        int64_t kept = 0;
        for (int64_t i = 0; i < all; i++) {
            const uint32_t key = ordered(logit[i]);
            const bool at_border = key == border, stays = key > border || (at_border && limit > 0);
            if (at_border) limit -= weight[i];
            logit[kept] = logit[i];
            id[kept] = id[i];
            weight[kept] = weight[i];
            kept += stays;
        }
        count = kept;
    }

  private:
    std::vector<float> sorted;

    // Room for a vocabulary, and for 16 weights that begin at the last one.
    void reserve(int64_t V) {
        if (int64_t(logit.size()) >= V + 16) return;
        logit.resize(V + 16);
        id.resize(V + 16);
        weight.resize(V + 16);
    }

    // A number that at least `most` logits reach: the most-th largest maximum of a block.
    float reached_by(int64_t most, const std::vector<float>& maxima) {
        if (most > int64_t(maxima.size())) return -INF;
        sorted = maxima;
        const auto at = sorted.begin() + (most - 1);
        std::nth_element(sorted.begin(), at, sorted.end(), std::greater<float>());
        return *at;
    }
};

}  // namespace
