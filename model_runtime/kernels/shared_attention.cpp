// Attention over the keys of several ranks, as `stripes.py` says it, for the call that runs all layers of a step.
#include <algorithm>
#include <numeric>
#include <vector>

#include "layer_ops.h"
#include "shared_attention.h"

namespace {

constexpr int64_t OUT_OF_RANGE = -1;

// How many of a rank's positions come before this one, in stripes of B positions.
int64_t before(const Collective& ranks, int64_t B, int64_t position) {
    const int64_t block = ranks.size * B;
    return position / block * B + std::clamp<int64_t>(position % block - ranks.rank * B, 0, B);
}

// The first of this rank's keys that each row sees.
std::vector<int32_t> first_keys(const SharedRows& shared, int64_t window) {
    std::vector<int32_t> begins(shared.keys.T);
    for (int64_t row = 0; window && row < shared.keys.T; row++) {
        const int64_t first = first_key(shared.positions[row], window);
        begins[row] = int32_t(before(*shared.ranks, shared.keys.B, first));
    }
    return begins;
}

}  // namespace

int64_t shared_attention_numbers(const Heads& heads, const SharedRows& shared) {
    const int64_t own = shared.counts[shared.ranks->rank], state = heads.H * (heads.D + STATE_NUMBERS);
    return shared.keys.T * (heads.H * heads.D + state) + shared.ranks->size * own * state;
}

int64_t shared_attention(const float* qkv, const KVLayer& kv, const SharedRows& shared, const Heads& heads,
                         const Scoring& scoring, float* workspace, float* out) {
    Collective& ranks = *shared.ranks;
    const int64_t width = heads.H * heads.D, state = heads.H * (heads.D + STATE_NUMBERS), all = shared.keys.T;
    const int64_t own = shared.counts[ranks.rank];
    const int64_t first = std::accumulate(shared.counts, shared.counts + ranks.rank, int64_t(0));
    float *queries = workspace, *states = queries + all * width, *found = states + all * state;
    std::vector<int64_t> bytes(ranks.size), begins(ranks.size), ends(ranks.size);
    std::vector<char*> into(ranks.size);
    char* next = reinterpret_cast<char*>(queries);
    for (int64_t rank = 0; rank < ranks.size; rank++) {
        bytes[rank] = ends[rank] = shared.counts[rank] * width * int64_t(sizeof(float));
        into[rank] = next;
        next += bytes[rank];
    }
    for (int64_t row = 0; row < own; row++)
        std::copy_n(qkv + row * (heads.H + 2 * heads.G) * heads.D, width, queries + (first + row) * width);
    if (const int64_t lost = exchange(ranks, into[ranks.rank], bytes.data(), into.data(), begins.data(), ends.data()))
        return lost;
    const std::vector<int32_t> seen_from = first_keys(shared, scoring.window);
    if (!partial_attention(queries, kv, shared.keys, seen_from.data(), heads, scoring, states)) return OUT_OF_RANGE;
    for (int64_t rank = 0; rank < ranks.size; rank++) {
        bytes[rank] = all * state * int64_t(sizeof(float));
        begins[rank] = first * state * int64_t(sizeof(float));
        ends[rank] = begins[rank] + own * state * int64_t(sizeof(float));
        into[rank] = reinterpret_cast<char*>(found + rank * own * state);
    }
    char* mine = reinterpret_cast<char*>(states);
    if (const int64_t lost = exchange(ranks, mine, bytes.data(), into.data(), begins.data(), ends.data())) return lost;
    merge_attention(found, ranks.size, own * heads.H, heads.D, out);
    return 0;
}
