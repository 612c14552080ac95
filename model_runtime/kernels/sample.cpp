// From a row of logits to a token and to log-probabilities. The meaning is that of model_runtime/ops/sampling.py; here
// is how it is had without sorting the vocabulary.
//
// A first pass takes the maximum of every block of 64 logits. That finds the first maximum of all (greedy), and lets
// later passes skip blocks. Probabilities are integers, in units of 2^-40 of the largest, whose sums are exact in any
// order; a draw without filters sums them by block, then looks at one block again. For top-k and top-p a bound that no
// kept token is below leaves a few candidates, and a radix selection over the ordered bits of their logits finds the
// last one that stays.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace {

typedef double d8 __attribute__((vector_size(64)));
typedef int64_t l8 __attribute__((vector_size(64)));
#ifdef __AVX512F__
typedef v16 wide;
#else
typedef v8 wide;
#endif

constexpr int64_t BLOCK = 64;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr double WEIGHT_ONE = 0x1p40;  // of the most likely token
constexpr int32_t FAILED_TOKEN = -1, NO_LOGPROBS = -1;
constexpr float LOGPROB_FLOOR = -9999.0f;

// The columns of scheduler.plan.SampleRows.
struct SampleRows {
    const float* temperature;
    const int32_t* top_k;
    const float *top_p, *min_p;
    const uint64_t *seed, *counter;
    const float *presence, *frequency, *repetition;
    const int32_t *history_ids, *history_offsets, *history_output_starts;
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* bias_offsets;
};

// Tokens that may stay, in the order of ids.
struct Candidates {
    int64_t count = 0;
    std::vector<float> logit;
    std::vector<int32_t> id;
    std::vector<int64_t> weight;

    // Room for a vocabulary, and for 16 weights that begin at the last one.
    void reserve(int64_t V) {
        if (int64_t(logit.size()) >= V + 16) return;
        logit.resize(V + 16);
        id.resize(V + 16);
        weight.resize(V + 16);
    }
};

struct Saved {
    int32_t id;
    float logit;
};

// Memory of one thread, kept from call to call: a vocabulary's worth is too much to get from the system each time.
struct Scratch {
    std::vector<float> maxima, sorted;
    std::vector<int64_t> sums;
    Candidates candidates;
    std::vector<Saved> saved;
    std::vector<uint32_t> times;  // by token; 0 between calls
};

thread_local Scratch scratch;

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
        for (int i = 0; i < 16; i += sizeof(wide) / 4) {
            const wide likely = exp_lanes((load<wide>(x + i) - best) / temperature);
            store(p + i, select(likely < min_p, wide{}, likely));
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

// Philox 4x32-10 at counter (low, high, 0, 0), see model_runtime/random.py: its first 52 bits.
uint64_t random_bits(uint64_t seed, uint64_t counter) {
    uint32_t c[4] = {uint32_t(counter), uint32_t(counter >> 32), 0, 0};
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t(c[0]) * 0xD2511F53, p1 = uint64_t(c[2]) * 0xCD9E8D57;
        const uint32_t next[4] = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1,
                                  uint32_t(p0)};
        std::copy_n(next, 4, c);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return (uint64_t(c[0]) << 32 | c[1]) >> 12;
}

// The first index at which the cumulative weight exceeds `target`, which is taken down by the weight before it.
int64_t find_weight(const int64_t* weights, int64_t& target) {
    int64_t i = 0;
    for (; target >= weights[i]; i++) target -= weights[i];
    return i;
}

int32_t draw_from_all(const Blocks& blocks, const Weigher& weigh, uint64_t bits) {
    const int64_t total = sum_weights(blocks, weigh, scratch.sums);
    int64_t target = int64_t((unsigned __int128)bits * uint64_t(total) >> 52);
    const int64_t b = find_weight(scratch.sums.data(), target);
    int64_t weights[BLOCK];
    for (int64_t i = 0; i < BLOCK; i += 16) {
        l8 some[2];
        weigh(blocks[b] + i, some);
        memcpy(weights + i, some, sizeof(some));
    }
    return int32_t(b * BLOCK + find_weight(weights, target));
}

// A number that at least `count` logits reach: the count-th largest maximum of a block.
float reached_by(int64_t count, const std::vector<float>& maxima) {
    if (count > int64_t(maxima.size())) return -INF;
    scratch.sorted = maxima;
    const auto at = scratch.sorted.begin() + (count - 1);
    std::nth_element(scratch.sorted.begin(), at, scratch.sorted.end(), std::greater<float>());
    return *at;
}

// A number that no logit of the nucleus is below: tokens lighter than (1 - top_p) total / V weigh less than 1 - top_p
// together, so heavier ones weigh more than top_p. The margin is far above the error of exp and of rounding to 2^-40.
float nucleus_bound(const Blocks& blocks, const Weigher& weigh, double top_p, int64_t total) {
    const double weight = (1 - top_p) * double(total) / double(blocks.V);
    if (weight < 64) return -INF;
    return float(weigh.best + weigh.temperature * (std::log(weight / WEIGHT_ONE) - 0.02));
}

// The logits from `bound` on become the candidates.
void collect(const Blocks& blocks, const std::vector<float>& maxima, float bound) {
    Candidates& found = scratch.candidates;
    found.reserve(blocks.V);
    int64_t count = 0;
    for (int64_t b = 0; b < blocks.count; b++) {
        if (maxima[b] < bound) continue;
        const float* x = blocks[b];
        const int64_t first = b * BLOCK, size = std::min(BLOCK, blocks.V - first);
        for (int64_t i = 0; i < size; i++) {
            found.logit[count] = x[i];
            found.id[count] = int32_t(first + i);
            count += x[i] >= bound;
        }
    }
    found.count = count;
}

// The weights of the candidates; returns their sum.
int64_t weigh_candidates(const Weigher& weigh) {
    Candidates& some = scratch.candidates;
    l8 sum{}, weights[2];
    std::fill_n(some.logit.begin() + some.count, 16, -INF);
    for (int64_t i = 0; i < some.count; i += 16) {
        weigh(some.logit.data() + i, weights);
        memcpy(some.weight.data() + i, weights, sizeof(weights));
        sum += weights[0] + weights[1];
    }
    return lane_sum(sum);
}

// Ordered as the logits are; -0 is 0.
INLINE uint32_t ordered(float x) {
    const int32_t bits = bit_copy<int32_t>(x + 0.0f);
    return uint32_t(bits) ^ (uint32_t(bits >> 31) | 0x80000000u);
}

// Of the candidates in the order (logit descending, id ascending) keep the first ones: those before which the others
// weigh less than `limit` together.
void keep_first(Candidates& some, int64_t limit) {
    float* logit = some.logit.data();
    int32_t* id = some.id.data();
    int64_t* weight = some.weight.data();
    constexpr int BITS = 11;
    uint32_t border = 0;  // key of the last one kept, from the highest bits on
    for (const int shift : {21, 10, 0}) {
        int64_t histogram[2][1 << BITS] = {};  // two, since adding to a number that was just stored waits for it
        const int known = shift ? shift + BITS : 10;
        for (int64_t i = 0; i < some.count; i++) {
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
    for (int64_t i = 0; i < some.count; i++) {
        const uint32_t key = ordered(logit[i]);
        const bool at_border = key == border, stays = key > border || (at_border && limit > 0);
        if (at_border) limit -= weight[i];
        logit[kept] = logit[i];
        id[kept] = id[i];
        weight[kept] = weight[i];
        kept += stays;
    }
    some.count = kept;
}

// The `count` largest logits become the candidates.
void keep_top(const Blocks& blocks, const std::vector<float>& maxima, int64_t count) {
    Candidates& some = scratch.candidates;
    collect(blocks, maxima, reached_by(count, maxima));
    std::fill_n(some.weight.begin(), some.count, 1);
    keep_first(some, count);
}

int32_t draw_filtered(const Blocks& blocks, const std::vector<float>& maxima, const Weigher& weigh, int64_t top_k,
                      double top_p, uint64_t bits) {
    const Weigher all{weigh.best, weigh.temperature, 0.0f};
    int64_t total;
    if (top_k < blocks.V) {
        keep_top(blocks, maxima, top_k);
        total = weigh_candidates(all);
    } else {
        total = sum_weights(blocks, all, scratch.sums);
        collect(blocks, maxima, nucleus_bound(blocks, all, top_p, total));
        weigh_candidates(all);
    }
    if (top_p < 1) keep_first(scratch.candidates, int64_t(std::ceil(top_p * double(total))));
    total = weigh_candidates(weigh);
    int64_t target = int64_t((unsigned __int128)bits * uint64_t(total) >> 52);
    return scratch.candidates.id[find_weight(scratch.candidates.weight.data(), target)];
}

int32_t choose(const float* x, int64_t V, const SampleRows& rows, int64_t r) {
    const Blocks blocks(x, V);
    const float best = find_maxima(blocks, scratch.maxima);
    if (std::isnan(best)) return FAILED_TOKEN;
    if (rows.temperature[r] == 0) return first_maximum(blocks, scratch.maxima, best);
    const Weigher weigh{best, rows.temperature[r], rows.min_p[r]};
    const uint64_t bits = random_bits(rows.seed[r], rows.counter[r]);
    const int64_t top_k = rows.top_k[r] > 0 ? std::min<int64_t>(rows.top_k[r], V) : V;
    if (top_k == V && rows.top_p[r] >= 1) return draw_from_all(blocks, weigh, bits);
    return draw_filtered(blocks, scratch.maxima, weigh, top_k, rows.top_p[r], bits);
}

void change(float* x, int32_t id, float logit) {
    scratch.saved.push_back({id, x[id]});
    x[id] = logit;
}

// A token's count is 1 if it stands in the history, plus 2 for every time that it stands in the output.
void penalise(float* x, int64_t V, const SampleRows& rows, int64_t r) {
    const int32_t *begin = rows.history_ids + rows.history_offsets[r], *end = rows.history_ids + rows.history_offsets[r + 1];
    const int32_t* output = begin + rows.history_output_starts[r];
    std::vector<uint32_t>& times = scratch.times;
    if (int64_t(times.size()) < V) times.resize(V);
    for (const int32_t* id = begin; id < end; id++) times[*id] = (times[*id] | 1) + 2 * (id >= output);
    for (const int32_t* id = begin; id < end; id++) {
        if (!times[*id]) continue;  // it came before
        const float n = float(times[*id] >> 1), logit = x[*id];
        times[*id] = 0;
        const float repeated = logit > 0 ? logit / rows.repetition[r] : logit * rows.repetition[r];
        change(x, *id, repeated - rows.frequency[r] * n - (n > 0 ? rows.presence[r] : 0.0f));
    }
}

// Choose with bias and penalties applied to the row, and take them off again.
int32_t sample_row(float* x, int64_t V, const SampleRows& rows, int64_t r) {
    scratch.saved.clear();
    for (int32_t i = rows.bias_offsets[r]; i < rows.bias_offsets[r + 1]; i++)
        change(x, rows.bias_ids[i], x[rows.bias_ids[i]] + rows.bias_values[i]);
    if (rows.history_offsets[r] < rows.history_offsets[r + 1]) penalise(x, V, rows, r);
    const int32_t id = choose(x, V, rows, r);
    for (; !scratch.saved.empty(); scratch.saved.pop_back()) x[scratch.saved.back().id] = scratch.saved.back().logit;
    return id;
}

void row_logprobs(const float* x, int64_t V, int32_t chosen_id, int64_t num_top, float& chosen, int32_t* top_ids,
                  float* top_values) {
    const Blocks blocks(x, V);
    const float best = find_maxima(blocks, scratch.maxima);
    if (std::isnan(best)) {
        chosen = LOGPROB_FLOOR;
        std::fill_n(top_values, num_top, LOGPROB_FLOOR);
        for (int64_t i = 0; i < num_top; i++) top_ids[i] = int32_t(i);
        return;
    }
    const double log_sum = std::log(double(sum_weights(blocks, {best, 1.0f, 0.0f}, scratch.sums)) / WEIGHT_ONE);
    const auto logprob = [=](float logit) {
        return std::max(LOGPROB_FLOOR, float(double(logit) - double(best) - log_sum));
    };
    chosen = chosen_id < 0 ? LOGPROB_FLOOR : logprob(x[chosen_id]);
    if (num_top == 0) return;
    keep_top(blocks, scratch.maxima, num_top);
    const Candidates& top = scratch.candidates;
    std::iota(top_ids, top_ids + num_top, 0);
    std::stable_sort(top_ids, top_ids + num_top, [&](int32_t a, int32_t b) { return top.logit[a] > top.logit[b]; });
    for (int64_t i = 0; i < num_top; i++) {
        top_values[i] = logprob(top.logit[top_ids[i]]);
        top_ids[i] = top.id[top_ids[i]];
    }
}

bool within(const int32_t* ids, int64_t count, int64_t V) {
    return std::all_of(ids, ids + count, [=](int32_t id) { return 0 <= id && id < V; });
}

// function(row) for every row. A pass over a number takes a tenth of a nanosecond, most rows a few passes.
template <class Function> void for_rows(int64_t R, int64_t V, Function function) {
    pool::parallel_ranges(R, 4 * R * V, [&](int64_t row, int64_t end) {
        for (; row < end; row++) function(row);
    });
}

}  // namespace

extern "C" {

// logits [R][V] are as before when it returns. Returns 1, having done nothing, if a token id is out of range.
int64_t fl_sample(float* logits, int64_t R, int64_t V, const float* temperature, const int32_t* top_k,
                  const float* top_p, const float* min_p, const uint64_t* seed, const uint64_t* counter,
                  const float* presence, const float* frequency, const float* repetition, const int32_t* history_ids,
                  const int32_t* history_offsets, const int32_t* history_output_starts, const int32_t* bias_ids,
                  const float* bias_values, const int32_t* bias_offsets, int32_t* token_ids) {
    if (!within(history_ids, history_offsets[R], V) || !within(bias_ids, bias_offsets[R], V)) return 1;
    const SampleRows rows{temperature, top_k,     top_p,      min_p,       seed,
                          counter,     presence,  frequency,  repetition,  history_ids,
                          history_offsets, history_output_starts, bias_ids, bias_values, bias_offsets};
    for_rows(R, V, [&](int64_t r) { token_ids[r] = sample_row(logits + r * V, V, rows, r); });
    return 0;
}

// Of token_ids [R] (FAILED_TOKEN gets the floor) to `chosen`, and of the most likely tokens: those of row r to
// top_offsets[r] .. top_offsets[r + 1]. Rows with NO_LOGPROBS are left alone.
void fl_logprobs(const float* logits, int64_t R, int64_t V, const int32_t* token_ids, const int32_t* top_logprobs,
                 const int32_t* top_offsets, float* chosen, int32_t* top_ids, float* top_values) {
    for_rows(R, V, [&](int64_t r) {
        if (top_logprobs[r] == NO_LOGPROBS) return;
        const int64_t first = top_offsets[r], count = top_offsets[r + 1] - first;
        row_logprobs(logits + r * V, V, token_ids[r], count, chosen[r], top_ids + first, top_values + first);
    });
}
}
