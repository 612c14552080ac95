// paged_attention: causal softmax attention straight from the block table.
//
// The arithmetic of one query head is fixed by its own position: its keys are cut into tiles of 64 and segments of 256
// absolute positions. Inside a segment an online softmax runs over the tiles in order (Milakov and Gimelshein, arXiv
// 1805.02867); the segments are then merged in order. Keys past the query, or before its window, are never added in.
// Queries of a chunk and heads of a group share each load of keys and values. Long contexts with few sequences are
// shared between threads by segment. None of this changes the arithmetic.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
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
    int64_t S, H, G, D, B, window;
    float scale;
};

// Some queries of one sequence and one key/value head, and the segments [segment, segment_end) that they see.
struct Item {
    int64_t sequence, group, query, num_queries, position;  // position of the first query
    int64_t segment, segment_end;
};

// Softmax state of rows: maximum, sum of exponentials, weighted sum of values.
struct State {
    float *max, *sum, *out;
};

struct Scratch {
    std::vector<float> memory;
    float *query, *scores, *keys, *values;
    State segment, total;

    Scratch(int64_t rows, int64_t D) : memory(rows * (3 * D + TILE + 4) + 2 * TILE * D) {
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

// Fold a row of a segment's state into the total.
void merge_row(const State& total, const State& part, int64_t row, int64_t D) {
    const float max = part.max[row] > total.max[row] ? part.max[row] : total.max[row];
    const float keep = exp_scalar(total.max[row] - max), add = exp_scalar(part.max[row] - max);
    total.max[row] = max;
    total.sum[row] = fused(part.sum[row], add, total.sum[row] * keep);
    float* out = total.out + row * D;
    const float* more = part.out + row * D;
    for (int64_t d = 0; d < D; d++) out[d] = fused(more[d], add, out[d] * keep);
}

// One tile of keys and values: where its panels of 16 positions lie.
struct Tile {
    int64_t start;
    const float *key[PANELS], *value[PANELS];
    int64_t key_step;  // from a channel to the next

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
                continue;
            }
            float *keys = scratch.keys + panel * PANEL * p.D, *values = scratch.values + panel * PANEL * p.D;
            for (int64_t at = 0; at < PANEL && position + at <= last; at += p.B) {
                const int64_t block = (table[(position + at) / p.B] * p.G + item.group) * p.D * p.B;
                for (int64_t d = 0; d < p.D; d++) std::copy_n(p.key + block + d * p.B, p.B, keys + d * PANEL + at);
                std::copy_n(p.value + block, p.B * p.D, values + at * p.D);
            }
            key[panel] = keys;
            value[panel] = values;
        }
    }
};

template <int MR> void score_rows(const float* query, const Tile& tile, int64_t panels, int64_t D, float* scores) {
    for (int64_t panel = 0; panel < panels; panel++) {
        v8 acc[MR][2] = {};
        multiply_add<v8, MR, 2>(query, D, tile.key[panel], tile.key_step, D, acc);
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
        const float* value = tile.value[panel] + at % PANEL * D + d;
        multiply_add<V, MR, NV>(weights + at, TILE, value, D, stop - at, acc);
        at = stop;
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

void attend_tile(const Problem& p, const Item& item, int64_t start, Scratch& scratch, const State& state) {
    // Queries [from, to) see a key of this tile: the causal rule bounds them from below, the window from above.
    const int64_t group_size = p.H / p.G, first = item.position;
    const int64_t from = std::max<int64_t>(0, start - first);
    const int64_t to = p.window ? std::min(item.num_queries, start + TILE - 1 + p.window - first) : item.num_queries;
    if (from >= to) return;
    const int64_t last = std::min(start + TILE - 1, first + to - 1), panels = (last - start) / PANEL + 1;
    const Tile tile(p, item, start, last, scratch);
    in_groups(from * group_size, to * group_size, [&](int64_t row, auto count) {
        score_rows<count>(scratch.query + row * p.D, tile, panels, p.D, scratch.scores + row * TILE);
    });
    int64_t whole = from * group_size;  // first row of a run of rows that see the whole tile
    const auto add = [&](int64_t row, int64_t end, int64_t key, int64_t key_end) {
        in_groups(row, end, [&](int64_t at, auto count) {
            add_rows<count>(scratch.scores + at * TILE, tile, key, key_end, p.D, state.out + at * p.D);
        });
    };
    for (int64_t query = from; query < to; query++) {
        const int64_t position = first + query, row = query * group_size;
        const int64_t begin = p.window ? std::max<int64_t>(0, position - p.window + 1 - start) : 0;
        const int64_t end = std::min(TILE, position - start + 1);
        for (int64_t h = 0; h < group_size; h++)
            weigh_row(scratch.scores + (row + h) * TILE, begin, end, state, row + h, p.D);
        if (begin == 0 && end == TILE) continue;
        add(whole, row, 0, TILE);
        add(row, row + group_size, begin, end);
        whole = row + group_size;
    }
    add(whole, to * group_size, 0, TILE);
}

// First segment that a query at `position` sees.
int64_t first_segment(const Problem& p, int64_t position) {
    return p.window ? std::max<int64_t>(0, position - p.window + 1) / SEGMENT : 0;
}

// The item's rows over one segment.
void attend_segment(const Problem& p, const Item& item, int64_t segment, Scratch& scratch, const State& state) {
    const int64_t group_size = p.H / p.G, rows = item.num_queries * group_size;
    const int64_t stop = std::min((segment + 1) * SEGMENT, item.position + item.num_queries);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = p.query_starts[item.sequence] + item.query + row / group_size;
        const float* query = p.qkv + (token * (p.H + 2 * p.G) + item.group * group_size + row % group_size) * p.D;
        for (int64_t d = 0; d < p.D; d++) scratch.query[row * p.D + d] = query[d] * p.scale;
    }
    clear(state, rows, p.D);
    for (int64_t start = segment * SEGMENT; start < stop; start += TILE) attend_tile(p, item, start, scratch, state);
}

// Fold a segment into the total of those rows that see it.
void merge_segment(const Problem& p, const Item& item, int64_t segment, const State& total, const State& part) {
    const int64_t group_size = p.H / p.G;
    for (int64_t row = 0; row < item.num_queries * group_size; row++) {
        const int64_t position = item.position + row / group_size;
        if (first_segment(p, position) <= segment && segment * SEGMENT <= position) merge_row(total, part, row, p.D);
    }
}

void write_out(const Problem& p, const Item& item, const State& total) {
    const int64_t group_size = p.H / p.G;
    for (int64_t row = 0; row < item.num_queries * group_size; row++) {
        const int64_t token = p.query_starts[item.sequence] + item.query + row / group_size;
        float* out = p.out + (token * p.H + item.group * group_size + row % group_size) * p.D;
        for (int64_t d = 0; d < p.D; d++) out[d] = total.out[row * p.D + d] / total.sum[row];
    }
}

std::vector<Item> make_items(const Problem& p) {
    const int64_t queries = std::max<int64_t>(1, ITEM_ROWS / (p.H / p.G));
    std::vector<Item> items;
    for (int64_t s = 0; s < p.S; s++) {
        const int64_t length = p.query_starts[s + 1] - p.query_starts[s], start = p.kv_lens[s] - length;
        for (int64_t query = 0; query < length; query += queries)
            for (int64_t g = 0; g < p.G; g++) {
                const int64_t count = std::min(queries, length - query), position = start + query;
                items.push_back({s, g, query, count, position, first_segment(p, position),
                                 (position + count - 1) / SEGMENT + 1});
            }
    }
    return items;
}

// Every item by one thread, its segments in order.
void attend_items(const Problem& p, const std::vector<Item>& items, int64_t rows, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Scratch scratch(rows, p.D);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = int64_t(items.size()) - 1; i >= 0; i--) {  // later queries see more keys: begin with them
            const Item& item = items[i];
            clear(scratch.total, item.num_queries * (p.H / p.G), p.D);
            for (int64_t segment = item.segment; segment < item.segment_end; segment++) {
                attend_segment(p, item, segment, scratch, scratch.segment);
                merge_segment(p, item, segment, scratch.total, scratch.segment);
            }
            write_out(p, item, scratch.total);
        }
    }
}

// The segments of each item by different threads, then merged in order.
void attend_segments(const Problem& p, const std::vector<Item>& items, int64_t rows, int threads) {
    std::vector<std::pair<const Item*, int64_t>> parts;
    std::vector<int64_t> first_part;
    for (const Item& item : items) {
        first_part.push_back(int64_t(parts.size()));
        for (int64_t segment = item.segment; segment < item.segment_end; segment++) parts.push_back({&item, segment});
    }
    const int64_t part_size = rows * (p.D + 2);
    const std::unique_ptr<float[]> memory(new float[parts.size() * part_size]);
    const auto state_of = [&](int64_t part) {
        float* at = memory.get() + part * part_size;
        return State{at, at + rows, at + 2 * rows};
    };
#pragma omp parallel num_threads(threads)
    {
        Scratch scratch(rows, p.D);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < int64_t(parts.size()); i++)
            attend_segment(p, *parts[i].first, parts[i].second, scratch, state_of(i));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < int64_t(items.size()); i++) {
            const Item& item = items[i];
            clear(scratch.total, item.num_queries * (p.H / p.G), p.D);
            for (int64_t segment = item.segment; segment < item.segment_end; segment++)
                merge_segment(p, item, segment, scratch.total, state_of(first_part[i] + segment - item.segment));
            write_out(p, item, scratch.total);
        }
    }
}

}  // namespace

extern "C" void fl_paged_attention(const float* qkv, const float* key, const float* value, float* out,
                                   const int32_t* query_starts, const int32_t* kv_lens, const int32_t* tables,
                                   const int32_t* table_starts, int64_t S, int64_t H, int64_t G, int64_t D, int64_t B,
                                   float scale, int64_t window) {
    const Problem p{qkv, key, value, out, query_starts, kv_lens, tables, table_starts, S, H, G, D, B, window, scale};
    const std::vector<Item> items = make_items(p);
    int64_t rows = 0, segments = 0, work = 0;
    for (const Item& item : items) {
        const int64_t item_rows = item.num_queries * (H / G), item_segments = item.segment_end - item.segment;
        rows = std::max(rows, item_rows);
        segments += item_segments;
        work += item_rows * std::min(item.position + item.num_queries, item_segments * SEGMENT) * D;
    }
    const int threads = work < 1 << 15 ? 1 : thread_count;
    if (int64_t(items.size()) < 4 * threads && segments > int64_t(items.size()) && threads > 1)
        attend_segments(p, items, rows, threads);
    else
        attend_items(p, items, rows, threads);
}
