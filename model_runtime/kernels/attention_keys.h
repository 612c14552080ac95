// What attention computes, and where the keys and values of a tile lie. The part of `attention.cpp` that knows the block
// table. T is the type that keys and values are stored in.
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
constexpr int64_t EXPAND_ROWS = 6 * MAX_ROWS;  // from here on, a tile is expanded to float32 once for all of its rows
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int W = sizeof(vec) / 4, MAX_SUMS = W == 16 ? 24 : 12;  // lanes; registers for sums

struct Problem {
    const float* qkv;
    KVLayer kv;
    float* out;
    const int32_t *query_starts, *kv_lens, *tables, *table_starts;
    const int32_t* visible_ends;  // for each token one past the last position that it sees; or null: its own
    const int32_t* visible_begins = nullptr;  // the first, with `visible_ends`; or null: as the window says
    int64_t query_step;                       // numbers from a token's queries to the next one's
    bool states = false;                      // `out` gets the state of each row, to be merged with others
    int64_t S, H, G, D, B, window, absent, group;
    float scale, softcap;
    const float* sinks;

    Problem(const float* qkv, const KVLayer& kv, const StepBatch& batch, const Heads& heads, const Scoring& scoring,
            float* out)
        : qkv(qkv), kv(kv), out(out), query_starts(batch.query_starts), kv_lens(batch.kv_lens),
          tables(batch.block_tables), table_starts(batch.table_starts), visible_ends(batch.visible_ends),
          query_step((heads.H + 2 * heads.G) * heads.D), S(batch.S), H(heads.H), G(heads.G), D(heads.D), B(batch.B),
          window(scoring.window), absent(heads.absent), group(heads.group), scale(scoring.scale),
          softcap(scoring.softcap), sinks(scoring.sinks) {}
};

// Some queries of one sequence in the heads of one group, and the segments [segment, segment_end) that they see.
struct Item {
    int64_t sequence, group, head, num_heads;  // the first of the group's query heads, and how many there are
    int64_t query, num_queries, position;      // position of the first query
    int64_t token;                             // row of the first query in the batch
    int64_t segment = 0, segment_end = 0;
    const Item* following = nullptr;  // that the same thread probably does next

    int64_t rows() const { return num_queries * num_heads; }
};

// The keys [begin, end) that query number `query` of an item sees.
struct Keys {
    int64_t begin, end;

    Keys(const Problem& p, const Item& item, int64_t query) {
        const int64_t position = item.position + query;
        begin = p.visible_begins ? p.visible_begins[item.token + query] : first_key(position, p.window);
        end = p.visible_ends ? p.visible_ends[item.token + query] : position + 1;
    }

    bool meet(int64_t start, int64_t stop) const { return std::max(begin, start) < std::min(end, stop); }
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

}  // namespace
