// From a row of logits to a token and to log-probabilities. The meaning is that of model_runtime/ops/sampling.py; here
// is how it is had without sorting the vocabulary.
//
// A first pass takes the maximum of every block of 64 logits (sample_blocks.h). That finds the first maximum of all
// (greedy), and lets later passes skip blocks. Probabilities are integers, in units of 2^-40 of the largest, whose sums
// are exact in any order; a draw without filters sums them by block, then looks at one block again. Top-k and top-p
// select among a few candidates (sample_candidates.h).
#include <numeric>

#include "pool.h"
#include "sample_candidates.h"

namespace {

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
    int64_t num_masks;
    const int32_t *mask_rows, *masks;
};

struct Saved {
    int32_t id;
    float logit;
};

// Memory of one thread, kept from call to call: a vocabulary's worth is too much to get from the system each time.
struct Scratch {
    std::vector<float> maxima;
    std::vector<int64_t> sums;
    Candidates candidates;
    std::vector<Saved> saved;
    std::vector<uint32_t> times;  // by token; 0 between calls
    std::vector<float> masked;
};

thread_local Scratch scratch;

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

// A number below `total`, from 52 random bits.
int64_t part_of(int64_t total, uint64_t bits) { return int64_t((unsigned __int128)bits * uint64_t(total) >> 52); }

// The first index at which the cumulative weight exceeds `target`, which is taken down by the weight before it.
int64_t find_weight(const int64_t* weights, int64_t& target) {
    int64_t i = 0;
    for (; target >= weights[i]; i++) target -= weights[i];
    return i;
}

int32_t draw_from_all(const Blocks& blocks, const Weigher& weigh, uint64_t bits) {
    const int64_t total = sum_weights(blocks, weigh, scratch.sums);
    int64_t target = part_of(total, bits);
    const int64_t b = find_weight(scratch.sums.data(), target);
    int64_t weights[BLOCK];
    for (int64_t i = 0; i < BLOCK; i += 16) {
        l8 some[2];
        weigh(blocks[b] + i, some);
        memcpy(weights + i, some, sizeof(some));
    }
    return int32_t(b * BLOCK + find_weight(weights, target));
}

int32_t draw_filtered(const Blocks& blocks, const Weigher& weigh, int64_t top_k, double top_p, uint64_t bits) {
    Candidates& some = scratch.candidates;
    const Weigher all{weigh.best, weigh.temperature, 0.0f};
    int64_t total;
    if (top_k < blocks.V) {
        some.collect_top(blocks, scratch.maxima, top_k);
        total = some.weigh(all);
    } else {
        total = sum_weights(blocks, all, scratch.sums);
        some.collect(blocks, scratch.maxima, nucleus_bound(blocks, all, top_p, total));
        some.weigh(all);
    }
    // the most likely token always stays, though a top_p below all float32 has come as 0
    if (top_p < 1) some.keep_first(std::max<int64_t>(1, int64_t(std::ceil(top_p * double(total)))));
    int64_t target = part_of(some.weigh(weigh), bits);
    return some.id[find_weight(some.weight.data(), target)];
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
    return draw_filtered(blocks, weigh, top_k, rows.top_p[r], bits);
}

void change(float* x, int32_t id, float logit) {
    scratch.saved.push_back({id, x[id]});
    x[id] = logit;
}

// A token's count is 1 if it stands in the history, plus 2 for every time that it stands in the output.
void penalise(float* x, int64_t V, const SampleRows& rows, int64_t r) {
    const int32_t* begin = rows.history_ids + rows.history_offsets[r];
    const int32_t* output = begin + rows.history_output_starts[r];
    const int32_t* end = rows.history_ids + rows.history_offsets[r + 1];
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

// The row's mask, a bit a token, or null.
const int32_t* mask_of(const SampleRows& rows, int64_t V, int64_t r) {
    const int32_t* end = rows.mask_rows + rows.num_masks;
    const int32_t* found = std::lower_bound(rows.mask_rows, end, int32_t(r));
    return found == end || *found != r ? nullptr : rows.masks + (found - rows.mask_rows) * ((V + 31) / 32);
}

// A copy of the row in which tokens without a bit are -inf.
float* masked_copy(const float* x, int64_t V, const int32_t* mask) {
    std::vector<float>& copy = scratch.masked;
    copy.resize(V);
    for (int64_t i = 0; i < V; i += 32) {
        const uint32_t bits = uint32_t(mask[i / 32]);
        const int64_t count = std::min<int64_t>(32, V - i);
        for (int64_t j = 0; j < count; j++) copy[i + j] = bits >> j & 1 ? x[i + j] : -INF;
    }
    return copy.data();
}

// Choose with mask, bias and penalties applied to the row, and take them off again.
int32_t sample_row(float* x, int64_t V, const SampleRows& rows, int64_t r) {
    scratch.saved.clear();
    if (const int32_t* mask = mask_of(rows, V, r)) x = masked_copy(x, V, mask);
    for (int32_t i = rows.bias_offsets[r]; i < rows.bias_offsets[r + 1]; i++)
        change(x, rows.bias_ids[i], x[rows.bias_ids[i]] + rows.bias_values[i]);
    if (rows.history_offsets[r] < rows.history_offsets[r + 1]) penalise(x, V, rows, r);
    const int32_t id = choose(x, V, rows, r);
    for (; !scratch.saved.empty(); scratch.saved.pop_back()) x[scratch.saved.back().id] = scratch.saved.back().logit;
    return id;
}

// The place of token `id`, most likely first, ties by lower id: 1 for the most likely.
int32_t rank_of(const float* x, int64_t V, int32_t id) {
    const float value = x[id];
    int32_t above = 0, ties = 0;
    for (int64_t v = 0; v < V; v++) above += x[v] > value;
    for (int64_t v = 0; v <= id; v++) ties += x[v] == value;
    return above + ties;
}

void row_logprobs(const float* x, int64_t V, int32_t chosen_id, int64_t num_top, float& chosen, int32_t& rank,
                  int32_t* top_ids, float* top_values) {
    const Blocks blocks(x, V);
    const float best = find_maxima(blocks, scratch.maxima);
    if (std::isnan(best)) {
        chosen = LOGPROB_FLOOR;
        rank = 0;
        std::fill_n(top_values, num_top, LOGPROB_FLOOR);
        for (int64_t i = 0; i < num_top; i++) top_ids[i] = int32_t(i);
        return;
    }
    const double log_sum = std::log(double(sum_weights(blocks, {best, 1.0f, 0.0f}, scratch.sums)) / WEIGHT_ONE);
    const auto logprob = [=](float logit) {
        return std::max(LOGPROB_FLOOR, float(double(logit) - double(best) - log_sum));
    };
    chosen = chosen_id < 0 ? LOGPROB_FLOOR : logprob(x[chosen_id]);
    rank = chosen_id < 0 ? 0 : rank_of(x, V, chosen_id);
    if (num_top == 0) return;
    Candidates& top = scratch.candidates;
    top.collect_top(blocks, scratch.maxima, num_top);
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
int64_t fl_sample(float* logits, int64_t R, int64_t V, int64_t num_masks, const float* temperature,
                  const int32_t* top_k, const float* top_p, const float* min_p, const uint64_t* seed, const uint64_t* counter,
                  const float* presence, const float* frequency, const float* repetition, const int32_t* history_ids,
                  const int32_t* history_offsets, const int32_t* history_output_starts, const int32_t* bias_ids,
                  const float* bias_values, const int32_t* bias_offsets, const int32_t* mask_rows, const int32_t* masks,
                  int32_t* token_ids) {
    if (!within(history_ids, history_offsets[R], V) || !within(bias_ids, bias_offsets[R], V)) return 1;
    const SampleRows rows{temperature, top_k, top_p, min_p, seed, counter, presence, frequency, repetition, history_ids,
                          history_offsets, history_output_starts, bias_ids, bias_values, bias_offsets, num_masks,
                          mask_rows, masks};
    for_rows(R, V, [&](int64_t r) { token_ids[r] = sample_row(logits + r * V, V, rows, r); });
    return 0;
}

// Of token_ids [R] (FAILED_TOKEN gets the floor) to `chosen`, their ranks to `ranks`, and of the most likely tokens:
// those of row r to top_offsets[r] .. top_offsets[r + 1]. Rows with NO_LOGPROBS are left alone.
void fl_logprobs(const float* logits, int64_t R, int64_t V, const int32_t* token_ids, const int32_t* top_logprobs,
                 const int32_t* top_offsets, float* chosen, int32_t* ranks, int32_t* top_ids, float* top_values) {
    for_rows(R, V, [&](int64_t r) {
        if (top_logprobs[r] == NO_LOGPROBS) return;
        const int64_t first = top_offsets[r], count = top_offsets[r + 1] - first;
        row_logprobs(logits + r * V, V, token_ids[r], count, chosen[r], ranks[r], top_ids + first, top_values + first);
    });
}
}
