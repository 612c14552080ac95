// latent_attention: causal softmax attention over the rows of a latent cache, which are keys of all heads, and in their
// first L numbers values.
//
// Queries lie side by side in the lanes of vectors: a row of the cache is read number by number, and each number meets
// all of them. So one copy of the rows serves as keys and as values, and maxima and sums need nothing across lanes.
// As in attention.cpp, the arithmetic of a lane is fixed by its own position: tiles of 64 and segments of 256 absolute
// positions, an online softmax over the tiles of a segment, segments merged in order, and rows that a query does not see
// are never added in. How lanes are put together and threads share the work changes nothing of it.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "latent_rows.h"
#include "layer_ops.h"

namespace {

// scores[MR rows][lanes] = rows * queries.
template <int NV, int MR> void score_rows(const float* query, const float* tile, int64_t X, float* scores) {
    vec acc[MR][NV] = {};
    for (int64_t x = 0; x < X; x++) {
        vec q[NV];
        for (int v = 0; v < NV; v++) q[v] = load<vec>(query + (x * NV + v) * W);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const vec number = splat<vec>(tile[r * X + x]);
#pragma GCC unroll 2
            for (int v = 0; v < NV; v++) acc[r][v] = fused(number, q[v], acc[r][v]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) store(scores + (r * NV + v) * W, acc[r][v]);
}

// Turn `count` scores of a vector of lanes into weights exp(score - max) of the rows before `ends`, zero elsewhere, and
// scale what the lanes have summed so far to the new maximum.
template <int NV> void weigh(float* scores, int64_t count, ints ends, const State<NV>& state, int v, int64_t L) {
    const vec old_max = load<vec>(state.max + v * W);
    vec max = old_max, sum{};
    for (int64_t row = 0; row < count; row++) {
        const vec score = select(ends > int32_t(row), load<vec>(scores + row * NV * W), splat<vec>(NEVER));
        max = select(score > max, score, max);
    }
    for (int64_t row = 0; row < count; row++) {
        float* at = scores + row * NV * W;
        const vec weight = select(ends > int32_t(row), exp_lanes(load<vec>(at) - max), vec{});
        sum += weight;
        store(at, weight);
    }
    const ints same = max == old_max;
    const vec keep = select(same, splat<vec>(1.0f), exp_lanes(old_max - max));
    store(state.max + v * W, max);
    store(state.sum + v * W, fused(load<vec>(state.sum + v * W), keep, sum));
    bool changed = false;
    for (int lane = 0; lane < W; lane++) changed |= !same[lane];
    for (int64_t l = 0; changed && l < L; l++) {
        float* out = state.out + (l * NV + v) * W;
        store(out, load<vec>(out) * keep);
    }
}

// out[ML numbers][lanes] += rows [begin, end) of the tile times their weights, one after the other; MASKED: in the lanes
// that see them.
template <int NV, int ML, bool MASKED>
void add_numbers(const float* weights, const float* tile, int64_t begin, int64_t end, int64_t X, const ints* ends,
                 float* out) {
    vec acc[ML][NV];
    for (int l = 0; l < ML; l++)
        for (int v = 0; v < NV; v++) acc[l][v] = load<vec>(out + (l * NV + v) * W);
    for (int64_t row = begin; row < end; row++) {
        vec weight[NV];
        for (int v = 0; v < NV; v++) weight[v] = load<vec>(weights + (row * NV + v) * W);
#pragma GCC unroll 16
        for (int l = 0; l < ML; l++) {
            const vec number = splat<vec>(tile[row * X + l]);
#pragma GCC unroll 2
            for (int v = 0; v < NV; v++) {
                const vec sum = fused(number, weight[v], acc[l][v]);
                acc[l][v] = MASKED ? select(ends[v] > int32_t(row), sum, acc[l][v]) : sum;
            }
        }
    }
    for (int l = 0; l < ML; l++)
        for (int v = 0; v < NV; v++) store(out + (l * NV + v) * W, acc[l][v]);
}

template <int NV, bool MASKED>
void add_rows(const Problem& p, const Scratch& scratch, int64_t begin, int64_t end, const ints* ends, float* out) {
    constexpr int ML = SUMS / NV;
    if (begin >= end) return;
    int64_t l = 0;
    for (; l + ML <= p.L; l += ML)
        add_numbers<NV, ML, MASKED>(scratch.scores, scratch.tile + l, begin, end, p.X, ends, out + l * NV * W);
    for (; l < p.L; l++)
        add_numbers<NV, 1, MASKED>(scratch.scores, scratch.tile + l, begin, end, p.X, ends, out + l * NV * W);
}

template <class T, int NV>
void attend_tile(const Problem& p, const Item& item, int64_t start, const Scratch& scratch, const State<NV>& state) {
    constexpr int MR = SUMS / NV;
    ints ends[NV];
    int64_t common = TILE, count = 0;  // rows that all lanes see, and that any does
    for (int64_t lane = 0; lane < NV * W; lane++) {
        const int64_t seen = lane < item.lanes ? std::clamp<int64_t>(item.end(p, lane) - start, 0, TILE) : 0;
        ends[lane / W][lane % W] = int32_t(seen);
        if (lane < item.lanes) common = std::min(common, seen);
        count = std::max(count, seen);
    }
    load_tile<T>(p, item.sequence, start, count, scratch.tile);
    for (int64_t row = 0; row < count; row += MR)
        score_rows<NV, MR>(scratch.query, scratch.tile + row * p.X, p.X, scratch.scores + row * NV * W);
    for (int v = 0; v < NV; v++) weigh<NV>(scratch.scores + v * W, count, ends[v], state, v, p.L);
    add_rows<NV, false>(p, scratch, 0, common, ends, state.out);
    add_rows<NV, true>(p, scratch, common, count, ends, state.out);
}

template <class T, int NV>
void attend_segment(const Problem& p, const Item& item, int64_t segment, const Scratch& scratch, const State<NV>& state) {
    state.clear(p);
    const int64_t end = std::min((segment + 1) * SEGMENT, item.rows);
    for (int64_t start = segment * SEGMENT; start < end; start += TILE) attend_tile<T, NV>(p, item, start, scratch, state);
}

// Fold a segment into the total of those lanes that see it.
template <int NV>
void merge_segment(const Problem& p, const Item& item, int64_t segment, const State<NV>& total, const State<NV>& part) {
    for (int v = 0; v < NV; v++) {
        ints sees{};
        for (int lane = 0; lane < W; lane++)
            if (v * W + lane < item.lanes) sees[lane] = -(item.end(p, v * W + lane) > segment * SEGMENT);
        const vec old_max = load<vec>(total.max + v * W), part_max = load<vec>(part.max + v * W);
        const vec max = select(part_max > old_max, part_max, old_max);
        const vec keep = select(sees, exp_lanes(old_max - max), splat<vec>(1.0f));
        const vec add = select(sees, exp_lanes(part_max - max), vec{});
        const auto fold = [&](float* to, const float* from) {
            const vec old = load<vec>(to);
            store(to, select(sees, fused(load<vec>(from), add, old * keep), old));
        };
        store(total.max + v * W, max);
        fold(total.sum + v * W, part.sum + v * W);
        for (int64_t l = 0; l < p.L; l++) fold(total.out + (l * NV + v) * W, part.out + (l * NV + v) * W);
    }
}

template <int NV> void write_out(const Problem& p, const Item& item, const State<NV>& total) {
    const int64_t step = p.ends ? p.L + STATE_NUMBERS : p.L;
    for (int64_t lane = 0; lane < item.lanes; lane++) {
        float* out = p.out + item.number(p, lane) * step;
        const float sum = total.sum[lane];
        for (int64_t l = 0; l < p.L; l++) out[l] = total.out[l * NV * W + lane] / (p.ends ? 1.0f : sum);
        if (!p.ends) continue;
        out[p.L] = total.max[lane];
        out[p.L + 1] = sum;
    }
}

// All segments of an item in order; `found`, if not null, are their states, by whoever computed them.
template <class T, int NV> void finish_item(const Problem& p, const Item& item, float* found) {
    const Scratch scratch(p);
    const State<NV> total(p, scratch.total);
    total.clear(p);
    if (!found) load_queries<NV>(p, item, scratch.query);
    for (int64_t segment = 0; segment < item.segments(); segment++) {
        const State<NV> part(p, found ? found + segment * State<WIDEST>::numbers(p) : scratch.segment);
        if (!found) attend_segment<T, NV>(p, item, segment, scratch, part);
        merge_segment(p, item, segment, total, part);
    }
    write_out(p, item, total);
}

// One segment of an item, for finish_item.
template <class T, int NV> void begin_item(const Problem& p, const Item& item, int64_t segment, float* found) {
    const Scratch scratch(p);
    load_queries<NV>(p, item, scratch.query);
    attend_segment<T, NV>(p, item, segment, scratch, State<NV>(p, found + segment * State<WIDEST>::numbers(p)));
}

// Calls function(constant number of vectors that hold the item's lanes).
template <class Function> void with_vectors(const Item& item, Function function) {
    item.lanes > W ? function(std::integral_constant<int, WIDEST>()) : function(std::integral_constant<int, 1>());
}

// Every item by one thread; or where there are few, their segments by different threads first.
template <class T> void attend(const Problem& p, const std::vector<Item>& items, int64_t segments) {
    const int64_t count = int64_t(items.size());
    if (count >= 4 * pool::threads() || segments == count || pool::threads() == 1)
        return pool::parallel(count, [&](int64_t chunk) {
            const Item& item = items[count - 1 - chunk];  // later queries see more rows: begin with them
            with_vectors(item, [&](auto vectors) { finish_item<T, vectors>(p, item, nullptr); });
        });
    const std::unique_ptr<float[]> found(new float[segments * State<WIDEST>::numbers(p)]);
    std::vector<std::pair<const Item*, int64_t>> parts;
    std::vector<float*> found_of;
    for (const Item& item : items) {
        found_of.push_back(found.get() + int64_t(parts.size()) * State<WIDEST>::numbers(p));
        for (int64_t segment = 0; segment < item.segments(); segment++) parts.push_back({&item, segment});
    }
    pool::parallel(segments, [&](int64_t part) {
        const auto [item, segment] = parts[part];
        float* states = found_of[item - items.data()];
        with_vectors(*item, [&, item = item, segment = segment](auto vectors) {
            begin_item<T, vectors>(p, *item, segment, states);
        });
    });
    pool::parallel(count, [&](int64_t index) {
        with_vectors(items[index], [&](auto vectors) { finish_item<T, vectors>(p, items[index], found_of[index]); });
    });
}

}  // namespace

// Returns 1, having done nothing, if a table or `ends` names what does not exist.
extern "C" int64_t fl_latent_attention(const float* query, const void* rows, const float* scales, int64_t storage,
                                       int64_t num_slots, float* out, const int32_t* query_starts, const int32_t* kv_lens,
                                       const int32_t* tables, const int32_t* table_starts, const int32_t* ends,
                                       int64_t S, int64_t H, int64_t X, int64_t L, int64_t B, float scale) {
    const Problem p{query, rows, scales, storage, out, query_starts, kv_lens, tables, table_starts,
                    ends,  S,    H,      X,       L,   B,            scale};
    std::vector<Item> items;
    int64_t segments = 0;
    for (int64_t s = 0; s < S; s++) {
        if (!has_blocks(tables + table_starts[s], kv_lens[s], B, num_slots)) return 1;
        for (int64_t token = query_starts[s]; ends && token < query_starts[s + 1]; token++)
            if (ends[token] < 0 || ends[token] > kv_lens[s]) return 1;
        for (int64_t first = 0; first < p.tokens(s) * H; first += WIDEST * W) {
            items.emplace_back(p, s, first, std::min<int64_t>(WIDEST * W, p.tokens(s) * H - first));
            segments += items.back().segments();
        }
    }
    with_storage(storage, [&](auto number) { attend<decltype(number)>(p, items, segments); });
    return 0;
}
