// One tile of attention: the scores of some rows against 64 keys, their weights, and the weighted sum of the values.
// The part of `attention.cpp` that does the arithmetic.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "vec.h"

namespace {

constexpr int64_t TILE = 64, SEGMENT = 256, PANELS = TILE / PANEL;
constexpr int64_t ITEM_ROWS = 48;  // rows (queries x heads of a group) that share a pass over the keys
constexpr int MAX_ROWS = 6;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Problem {
    const float *qkv, *key, *value;
    float* out;
    const int32_t *query_starts, *kv_lens, *tables, *table_starts;
    const int32_t* visible_ends;  // for each token one past the last position that it sees; or null: its own
    int64_t S, H, G, D, B, window;
    float scale;
};

// Some queries of one sequence and one key/value head, and the segments [segment, segment_end) that they see.
struct Item {
    int64_t sequence, group, query, num_queries, position;  // position of the first query
    int64_t token;                                          // row of the first query in the batch
    int64_t segment = 0, segment_end = 0;
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
    State segment, total;

    Scratch(int64_t rows, int64_t D) {
        static thread_local std::vector<float> memory;
        memory.resize(std::max<size_t>(memory.size(), rows * (3 * D + TILE + 4) + 2 * TILE * D));
        float* next = memory.data();
        const auto take = [&next](int64_t count) { return next += count, next - count; };
        query = take(rows * D);
        scores = take(rows * TILE);
        keys = take(TILE * D);
        values = take(TILE * D);
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
struct Tile {
    int64_t start;
    const float *key[PANELS], *value[PANELS];
    const float* next_key[PANELS];  // of the following tile, to be fetched meanwhile
    int64_t key_step;               // from a channel to the next

    // Panels up to position `last`. Blocks shorter than a panel are copied together.
    Tile(const Problem& p, const Item& item, int64_t start, int64_t last, Scratch& scratch) : start(start) {
        const int32_t* table = p.tables + p.table_starts[item.sequence];
        key_step = p.B < PANEL ? PANEL : p.B;
        for (int64_t panel = 0; panel < PANELS && start + panel * PANEL <= last; panel++) {
            const int64_t position = start + panel * PANEL;
            if (p.B >= PANEL) {
                const int64_t block = table[position / p.B] * p.G + item.group, offset = position % p.B;
                key[panel] = p.key + block * p.D * p.B + offset;
                value[panel] = p.value + (block * p.B + offset) * p.D;
                next_key[panel] = key[panel];
                if (const int64_t next = position + TILE; next < p.kv_lens[item.sequence])
                    next_key[panel] = p.key + (table[next / p.B] * p.G + item.group) * p.D * p.B + next % p.B;
                continue;
            }
            float *keys = scratch.keys + panel * PANEL * p.D, *values = scratch.values + panel * PANEL * p.D;
            for (int64_t at = 0; at < PANEL && position + at <= last; at += p.B) {
                const int64_t block = (table[(position + at) / p.B] * p.G + item.group) * p.D * p.B;
                for (int64_t d = 0; d < p.D; d++) std::copy_n(p.key + block + d * p.B, p.B, keys + d * PANEL + at);
                std::copy_n(p.value + block, p.B * p.D, values + at * p.D);
            }
            key[panel] = next_key[panel] = keys;
            value[panel] = values;
        }
    }
};

template <int MR> void score_rows(const float* query, const Tile& tile, int64_t panels, int64_t D, float* scores) {
    for (int64_t panel = 0; panel < panels; panel++) {
        v8 acc[MR][2] = {};
        for (int64_t d = 0; d < D; d++) {
            __builtin_prefetch(tile.value[panel] + d * PANEL);
            multiply_add<v8, MR, 2>(query + d, D, tile.key[panel] + d * tile.key_step, 0, 1, acc);
        }
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < 2; v++) store(scores + r * TILE + panel * PANEL + v * 8, acc[r][v]);
    }
}

// Turn a row of scores into weights exp(score - max) over keys [begin, end) of the tile, zero elsewhere, and scale what
// the row has summed so far to the new maximum.
void weigh_row(float* scores, int64_t begin, int64_t end, const State& state, int64_t row, int64_t D) {
    const i8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    v8 masked[TILE / 8], best = splat<v8>(NEVER);
    for (int v = 0; v < TILE / 8; v++) {
        const i8 at = lanes + v * 8;
        masked[v] = select((at >= int32_t(begin)) & (at < int32_t(end)), load<v8>(scores + v * 8), splat<v8>(NEVER));
        best = select(masked[v] > best, masked[v], best);
    }
    const float tile_max = lane_max(best), old_max = state.max[row], max = tile_max > old_max ? tile_max : old_max;
    v8 sum{};
    for (int v = 0; v < TILE / 8; v++) {
        const i8 at = lanes + v * 8;
        const v8 weight = select((at >= int32_t(begin)) & (at < int32_t(end)), exp_v8(masked[v] - max), v8{});
        store(scores + v * 8, weight);
        sum += weight;
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
template <class V, int MR, int NV>
INLINE void add_columns(const float* weights, const Tile& tile, int64_t begin, int64_t end, int64_t D, int64_t d,
                        float* out) {
    constexpr int W = sizeof(V) / 4;
    V acc[MR][NV];
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = load<V>(out + r * D + d + v * W);
    for (int64_t at = begin; at < end;) {
        const int64_t panel = at / PANEL, stop = std::min(end, (panel + 1) * PANEL);
        const float *value = tile.value[panel] + d, *next_key = tile.next_key[panel] + d * tile.key_step;
        for (; at < stop; at++) {
            const int64_t token = at % PANEL;
            for (int line = 0; line < NV / 2; line++)
                __builtin_prefetch(next_key + (token * (NV / 2) + line) * tile.key_step);
            multiply_add<V, MR, NV>(weights + at, TILE, value + token * D, 0, 1, acc);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) store(out + r * D + d + v * W, acc[r][v]);
}

template <int MR>
void add_rows(const float* weights, const Tile& tile, int64_t begin, int64_t end, int64_t D, float* out) {
    constexpr int NV = MR <= 3 ? 4 : 2;
    int64_t d = 0;
    for (; d + 8 * NV <= D; d += 8 * NV) add_columns<v8, MR, NV>(weights, tile, begin, end, D, d, out);
    for (; d + 8 <= D; d += 8) add_columns<v8, MR, 1>(weights, tile, begin, end, D, d, out);
    for (; d < D; d++) add_columns<float, MR, 1>(weights, tile, begin, end, D, d, out);
}

// Calls function(row, constant number of rows) for [row, end) in groups of at most MAX_ROWS.
template <int MR = MAX_ROWS, class Function> INLINE void in_groups(int64_t row, int64_t end, Function function) {
    for (; row + MR <= end; row += MR) function(row, std::integral_constant<int, MR>());
    if constexpr (MR > 1)
        if (row < end) in_groups<MR - 1>(row, end, function);
}

// Rows [row, end) += their weights times the values of keys [key, key_end) of the tile.
__attribute__((noinline)) void add_values(const Scratch& scratch, const State& state, const Tile& tile, int64_t row,
                                          int64_t end, int64_t key, int64_t key_end, int64_t D) {
    in_groups(row, end, [&](int64_t at, auto count) {
        add_rows<count>(scratch.scores + at * TILE, tile, key, key_end, D, state.out + at * D);
    });
}

void attend_tile(const Problem& p, const Item& item, int64_t start, Scratch& scratch, const State& state) {
    // Queries [from, to) from the first to the last that sees a key of this tile.
    const int64_t group_size = p.H / p.G;
    const auto sees = [&](int64_t query) { return Keys(p, item, query).meet(start, start + TILE); };
    int64_t from = 0, to = item.num_queries, last = 0;
    while (from < to && !sees(from)) from++;
    while (from < to && !sees(to - 1)) to--;
    for (int64_t query = from; query < to; query++) last = std::max(last, Keys(p, item, query).end - 1);
    if (from == to) return;
    last = std::min(start + TILE - 1, last);
    const int64_t panels = (last - start) / PANEL + 1;
    const Tile tile(p, item, start, last, scratch);
    in_groups(from * group_size, to * group_size, [&](int64_t row, auto count) {
        score_rows<count>(scratch.query + row * p.D, tile, panels, p.D, scratch.scores + row * TILE);
    });
    int64_t whole = from * group_size;  // first row of a run of rows that see the whole tile
    for (int64_t query = from; query < to; query++) {
        const Keys keys(p, item, query);
        const int64_t row = query * group_size;
        const int64_t begin = std::max<int64_t>(0, keys.begin - start), end = std::min(TILE, keys.end - start);
        for (int64_t h = 0; h < group_size && begin < end; h++)
            weigh_row(scratch.scores + (row + h) * TILE, begin, end, state, row + h, p.D);
        if (begin == 0 && end == TILE) continue;
        add_values(scratch, state, tile, whole, row, 0, TILE, p.D);
        add_values(scratch, state, tile, row, begin < end ? row + group_size : row, begin, end, p.D);
        whole = row + group_size;
    }
    add_values(scratch, state, tile, whole, to * group_size, 0, TILE, p.D);
}

}  // namespace
