// One tile of attention: the scores of some rows against 64 keys, their weights, and the weighted sum of the values.
// The part of `attention.cpp` that does the arithmetic. T is the type that keys and values are stored in; int8 keys and
// values are computed with as integers, and the scale of a key multiplies its score, that of a value its weight.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "kv.h"
#include "layer_ops.h"
#include "vec.h"

namespace {

constexpr int64_t TILE = 64, SEGMENT = 256, PANELS = TILE / PANEL;
constexpr int64_t ITEM_ROWS = 48;  // rows (queries x heads of a group) that share a pass over the keys
constexpr int MAX_ROWS = 6;
constexpr int64_t EXPAND_ROWS = 2 * MAX_ROWS;  // from here on, a tile is expanded to float32 once for all of its rows
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int W = sizeof(vec) / 4, MAX_SUMS = W == 16 ? 24 : 12;  // lanes; registers for sums

struct Problem {
    const float* qkv;
    KVLayer kv;
    float* out;
    const int32_t *query_starts, *kv_lens, *tables, *table_starts;
    const int32_t* visible_ends;  // for each token one past the last position that it sees; or null: its own
    int64_t S, H, G, D, B, window;
    float scale;

    Problem(const float* qkv, const KVLayer& kv, const StepBatch& batch, const Heads& heads, int64_t window,
            float scale, float* out)
        : qkv(qkv), kv(kv), out(out), query_starts(batch.query_starts), kv_lens(batch.kv_lens),
          tables(batch.block_tables), table_starts(batch.table_starts), visible_ends(batch.visible_ends), S(batch.S),
          H(heads.H), G(heads.G), D(heads.D), B(batch.B), window(window), scale(scale) {}
};

// Some queries of one sequence and one key/value head, and the segments [segment, segment_end) that they see.
struct Item {
    int64_t sequence, group, query, num_queries, position;  // position of the first query
    int64_t token;                                          // row of the first query in the batch
    int64_t segment = 0, segment_end = 0;
    const Item* following = nullptr;  // that the same thread probably does next
};

// The keys [begin, end) that query number `query` of an item sees.
struct Keys {
    int64_t begin, end;

    Keys(const Problem& p, const Item& item, int64_t query) {
        const int64_t position = item.position + query;
        begin = p.window ? std::max<int64_t>(0, position - p.window + 1) : 0;
        end = p.visible_ends ? p.visible_ends[item.token + query] : position + 1;
    }

    bool meet(int64_t start, int64_t stop) const { return begin < stop && start < end; }
};

// Softmax state of rows: maximum, sum of exponentials, weighted sum of values.
struct State {
    float *max, *sum, *out;
};

// Working memory of one thread, reused from call to call.
struct Scratch {
    float *query, *scores, *keys, *values;
    float *key_scales, *value_scales;  // of an int8 tile
    State segment, total;

    Scratch(int64_t rows, int64_t D) {
        static thread_local std::vector<float> memory;
        memory.resize(std::max<size_t>(memory.size(), rows * (3 * D + TILE + 4) + 2 * TILE * (D + 1)));
        float* next = memory.data();
        const auto take = [&next](int64_t count) { return next += count, next - count; };
        query = take(rows * D);
        scores = take(rows * TILE);
        keys = take(TILE * D);
        values = take(TILE * D);
        key_scales = take(TILE);
        value_scales = take(TILE);
        segment = {take(rows), take(rows), take(rows * D)};
        total = {take(rows), take(rows), take(rows * D)};
    }
};

void clear(const State& state, int64_t rows, int64_t D) {
    std::fill_n(state.max, rows, NEVER);
    std::fill_n(state.sum, rows, 0.0f);
    std::fill_n(state.out, rows * D, 0.0f);
}

// One tile of keys and values: where its panels of 16 positions lie.
template <class T> struct Tile {
    const T *key[PANELS], *value[PANELS];
    const T* next_key[PANELS];  // of the next tile or item, to be fetched meanwhile
    int64_t key_step;           // from a channel to the next
};

// Where a position of an item's sequence lies: the number of its block's head, and the offset in the block.
struct Place {
    int64_t head, offset;

    Place(const Problem& p, const Item& item, int64_t position) {
        head = int64_t(p.tables[p.table_starts[item.sequence] + position / p.B]) * p.G + item.group;
        offset = position % p.B;
    }
};

// The tile at `start` as it lies in the cache, in blocks that hold whole panels.
template <class T> Tile<T> tile_in_place(const Problem& p, const Item& item, int64_t start, int64_t panels) {
    const T *keys = static_cast<const T*>(p.kv.key), *values = static_cast<const T*>(p.kv.value);
    Tile<T> tile{{}, {}, {}, p.B};
    for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t position = start + panel * PANEL;
        const Place at(p, item, position);
        tile.key[panel] = tile.next_key[panel] = keys + at.head * p.D * p.B + at.offset;
        tile.value[panel] = values + (at.head * p.B + at.offset) * p.D;
        const bool goes_on = position + TILE < p.kv_lens[item.sequence];
        if (!goes_on && (!item.following || panel * PANEL >= p.kv_lens[item.following->sequence])) continue;
        const Place next = goes_on ? Place(p, item, position + TILE) : Place(p, *item.following, panel * PANEL);
        tile.next_key[panel] = keys + next.head * p.D * p.B + next.offset;
    }
    return tile;
}

template <class T> void expand(const T* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load<vec>(from + i));
    for (; i < count; i++) {
        const T lanes[8] = {from[i]};
        to[i] = load<v8>(lanes)[0];
    }
}

// function(position, its place, how many from there lie together) for the positions from `start` to `last`.
template <class Function>
void for_runs(const Problem& p, const Item& item, int64_t start, int64_t last, Function function) {
    const int64_t run = std::min(p.B, TILE);
    for (int64_t position = start; position <= last; position += run) function(position, Place(p, item, position), run);
}

// A copy of the tile's positions up to `last` in float32, int8 without its scales.
template <class T>
Tile<float> expanded_tile(const Problem& p, const Item& item, int64_t start, int64_t last, const Scratch& scratch) {
    for_runs(p, item, start, last, [&](int64_t position, Place at, int64_t run) {
        const T* keys = static_cast<const T*>(p.kv.key) + at.head * p.D * p.B + at.offset;
        const T* values = static_cast<const T*>(p.kv.value) + (at.head * p.B + at.offset) * p.D;
        for (int64_t d = 0; d < p.D; d++) expand(keys + d * p.B, run, scratch.keys + d * TILE + position - start);
        expand(values, run * p.D, scratch.values + (position - start) * p.D);
    });
    Tile<float> tile{{}, {}, {}, TILE};
    for (int64_t panel = 0; panel < PANELS; panel++) {
        tile.key[panel] = tile.next_key[panel] = scratch.keys + panel * PANEL;
        tile.value[panel] = scratch.values + panel * PANEL * p.D;
    }
    return tile;
}

void load_scales(const Problem& p, const Item& item, int64_t start, int64_t last, const Scratch& scratch) {
    for_runs(p, item, start, last, [&](int64_t position, Place at, int64_t run) {
        const float* scales = p.kv.scales + at.head * 2 * p.B + at.offset;
        std::copy_n(scales, run, scratch.key_scales + position - start);
        std::copy_n(scales + p.B, run, scratch.value_scales + position - start);
    });
}

// Calls function(index, constant count) for [index, end) in groups of at most N.
template <int N, class Function> INLINE void in_groups(int64_t index, int64_t end, Function function) {
    for (; index + N <= end; index += N) function(index, std::integral_constant<int, N>());
    if constexpr (N > 1)
        if (index < end) in_groups<N - 1>(index, end, function);
}

// scores[MR][16 NP] = query * keys of NP panels.
template <int MR, int NP, class T>
INLINE void score_panels(const float* query, const Tile<T>& tile, int64_t panel, int64_t D, float* scores) {
    constexpr int NV = PANEL / W;
    constexpr int64_t LINE = 4 / sizeof(T);  // channels of a panel in a cache line
    vec acc[MR][NP * NV] = {};
    for (int64_t d = 0; d < D; d++) {
        vec column[NP * NV];
#pragma GCC unroll 4
        for (int i = 0; i < NP; i++) {
            if (d % LINE == 0) __builtin_prefetch(tile.value[panel + i] + d * PANEL);
            for (int v = 0; v < NV; v++)
                column[i * NV + v] = load<vec>(tile.key[panel + i] + d * tile.key_step + v * W);
        }
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) {
            const vec q = splat<vec>(query[r * D + d]);
#pragma GCC unroll 8
            for (int i = 0; i < NP * NV; i++) acc[r][i] = fused(q, column[i], acc[r][i]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int i = 0; i < NP * NV; i++) store(scores + r * TILE + panel * PANEL + i * W, acc[r][i]);
}

template <int MR, class T>
void score_rows(const float* query, const Tile<T>& tile, int64_t panels, int64_t D, float* scores) {
    constexpr int NP = std::min(int(PANELS), MAX_SUMS * W / (MR * int(PANEL)));
    in_groups<std::max(1, NP)>(0, panels, [&](int64_t panel, auto count) {
        score_panels<MR, count>(query, tile, panel, D, scores);
    });
}

// Turn a row of scores into weights exp(score - max) over keys [begin, end) of the tile, zero elsewhere, and scale what
// the row has summed so far to the new maximum.
template <bool SCALED>
void weigh_row(const Scratch& scratch, const State& state, int64_t row, int64_t begin, int64_t end, int64_t D) {
    typedef typename Lanes<vec>::i32 ints;
    float* scores = scratch.scores + row * TILE;
    ints lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    const auto seen = [&](int v) { return (lanes + v * W >= int32_t(begin)) & (lanes + v * W < int32_t(end)); };
    vec masked[TILE / W], best = splat<vec>(NEVER);
    for (int v = 0; v < TILE / W; v++) {
        vec score = load<vec>(scores + v * W);
        if (SCALED) score *= load<vec>(scratch.key_scales + v * W);
        masked[v] = select(seen(v), score, splat<vec>(NEVER));
        best = select(masked[v] > best, masked[v], best);
    }
    const float tile_max = lane_max(best), old_max = state.max[row], max = tile_max > old_max ? tile_max : old_max;
    vec sum{};
    for (int v = 0; v < TILE / W; v++) {
        const vec weight = select(seen(v), exp_lanes(masked[v] - max), vec{});
        sum += weight;
        store(scores + v * W, SCALED ? select(seen(v), weight * load<vec>(scratch.value_scales + v * W), vec{}) : weight);
    }
    if (max == old_max) {  // the factor would be exactly 1
        state.sum[row] += lane_sum(sum);
        return;
    }
    const float keep = exp_scalar(old_max - max);
    state.max[row] = max;
    state.sum[row] = fused(state.sum[row], keep, lane_sum(sum));
    float* out = state.out + row * D;
    for (int64_t d = 0; d < D; d++) out[d] *= keep;
}

// out[MR][columns from d] += weights[MR][begin..end) * values, one key after the other.
template <class V, int MR, int NV, class T>
INLINE void add_columns(const float* weights, const Tile<T>& tile, int64_t begin, int64_t end, int64_t D, int64_t d,
                        float* out) {
    constexpr int64_t WIDTH = sizeof(V) / 4, LINE = 4 / sizeof(T);
    V acc[MR][NV];
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = load<V>(out + r * D + d + v * WIDTH);
    for (int64_t at = begin; at < end;) {
        const int64_t panel = at / PANEL, stop = std::min(end, (panel + 1) * PANEL);
        const T *value = tile.value[panel] + d, *next_key = tile.next_key[panel] + d * tile.key_step;
        for (; at < stop; at++) {
            const int64_t token = at % PANEL;
            for (int64_t channel = 0; channel < NV * WIDTH / PANEL; channel += LINE)
                __builtin_prefetch(next_key + (token * (NV * WIDTH / PANEL) + channel) * tile.key_step);
            multiply_add<V, MR, NV>(weights + at, TILE, value + token * D, 0, 1, acc);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) store(out + r * D + d + v * WIDTH, acc[r][v]);
}

template <int MR, class T>
void add_rows(const float* weights, const Tile<T>& tile, int64_t begin, int64_t end, int64_t D, float* out) {
    constexpr int NV = std::min(4, MAX_SUMS / MR);
    int64_t d = 0;
    for (; d + W * NV <= D; d += W * NV) add_columns<vec, MR, NV>(weights, tile, begin, end, D, d, out);
    for (; d + W <= D; d += W) add_columns<vec, MR, 1>(weights, tile, begin, end, D, d, out);
    if constexpr (W > 8)
        for (; d + 8 <= D; d += 8) add_columns<v8, MR, 1>(weights, tile, begin, end, D, d, out);
    if constexpr (std::is_same<T, float>())  // the others are expanded where D is no multiple of 8
        for (; d < D; d++) add_columns<float, MR, 1>(weights, tile, begin, end, D, d, out);
}

// Rows [row, end) += their weights times the values of keys [key, key_end) of the tile.
template <class T>
__attribute__((noinline)) void add_values(const Scratch& scratch, const State& state, const Tile<T>& tile, int64_t row,
                                          int64_t end, int64_t key, int64_t key_end, int64_t D) {
    if (key >= key_end) return;
    in_groups<MAX_ROWS>(row, end, [&](int64_t at, auto count) {
        add_rows<count>(scratch.scores + at * TILE, tile, key, key_end, D, state.out + at * D);
    });
}

// The queries [from, to) of an item from the first to the last that sees a key of a tile, and the last key they see.
struct Viewers {
    int64_t from = 0, to, last = 0;

    Viewers(const Problem& p, const Item& item, int64_t start) : to(item.num_queries) {
        const auto sees = [&](int64_t query) { return Keys(p, item, query).meet(start, start + TILE); };
        while (from < to && !sees(from)) from++;
        while (from < to && !sees(to - 1)) to--;
        for (int64_t query = from; query < to; query++) last = std::max(last, Keys(p, item, query).end - 1);
        last = std::min(start + TILE - 1, last);
    }
};

template <bool SCALED, class T>
void attend_tile(const Problem& p, const Item& item, int64_t start, const Viewers& viewers, const Tile<T>& tile,
                 const Scratch& scratch, const State& state) {
    const int64_t group_size = p.H / p.G, row_end = viewers.to * group_size;
    in_groups<MAX_ROWS>(viewers.from * group_size, row_end, [&](int64_t row, auto count) {
        score_rows<count>(scratch.query + row * p.D, tile, (viewers.last - start) / PANEL + 1, p.D,
                          scratch.scores + row * TILE);
    });
    const auto keys_of = [&](int64_t query) {
        const Keys keys(p, item, query);
        return std::pair(std::max<int64_t>(0, keys.begin - start), std::min(TILE, keys.end - start));
    };
    int64_t common = 0, common_end = TILE;  // keys that all of the queries see, and add in groups
    for (int64_t query = viewers.from; query < viewers.to; query++) {
        const auto [begin, end] = keys_of(query);
        common = std::max(common, begin);
        common_end = std::min(common_end, end);
    }
    common_end = std::max(common, common_end);
    for (int64_t query = viewers.from; query < viewers.to; query++) {
        const auto [begin, end] = keys_of(query);
        const int64_t row = query * group_size;
        for (int64_t h = 0; h < group_size && begin < end; h++)
            weigh_row<SCALED>(scratch, state, row + h, begin, end, p.D);
        add_values(scratch, state, tile, row, row + group_size, begin, std::min(common, end), p.D);
    }
    add_values(scratch, state, tile, viewers.from * group_size, row_end, common, common_end, p.D);
    for (int64_t query = viewers.from; query < viewers.to; query++) {
        const auto [begin, end] = keys_of(query);
        const int64_t row = query * group_size;
        add_values(scratch, state, tile, row, row + group_size, std::max(begin, common_end), end, p.D);
    }
}

}  // namespace
