// paged_attention: causal softmax attention straight from the block table; tokens of an image may see all of it.
//
// The arithmetic of one query head is fixed by its own position: its keys are cut into tiles of 64 and segments of 256
// absolute positions. Inside a segment an online softmax runs over the tiles in order (Milakov and Gimelshein, arXiv
// 1805.02867); the segments are then merged in order. Keys that the query does not see are never added in.
// Queries of a chunk and heads of a group share each load of keys and values. Long contexts with few sequences are
// shared between threads by segment. None of this changes the arithmetic.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "attention_tile.h"
#include "kv.h"
#include "layer_ops.h"
#include "pool.h"

namespace {

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

// The item's rows over one tile: read in place, or expanded to float32 first if it lies in pieces or has many readers.
template <class T>
void attend_keys(const Problem& p, const Item& item, int64_t start, const Scratch& scratch, const State& state) {
    constexpr bool SCALED = std::is_same<T, int8_t>(), PLAIN = std::is_same<T, float>();
    const Viewers viewers(p, item, start);
    if (viewers.from == viewers.to) return;
    if (SCALED) load_scales(p, item, start, viewers.last, scratch);
    const int64_t rows = (viewers.to - viewers.from) * item.num_heads;
    if (p.B >= PANEL && (PLAIN || (rows < EXPAND_ROWS && p.D % 8 == 0))) {
        const Tile<T> tile = tile_in_place<T>(p, item, start, (viewers.last - start) / PANEL + 1);
        attend_tile<SCALED>(p, item, start, viewers, tile, scratch, state);
    } else {
        const Tile<float> tile = expanded_tile<T>(p, item, start, viewers.last, scratch);
        attend_tile<SCALED>(p, item, start, viewers, tile, scratch, state);
    }
}

// The item's rows over one segment.
template <class T>
void attend_segment(const Problem& p, const Item& item, int64_t segment, const Scratch& scratch,
                    const State& state) {
    const int64_t rows = item.rows();
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = item.token + row / item.num_heads, head = item.head + row % item.num_heads;
        const float* query = p.qkv + token * p.query_step + head * p.D;
        for (int64_t d = 0; d < p.D; d++) scratch.query[row * p.D + d] = query[d] * p.scale;
    }
    clear(state, rows, p.D);
    for (int64_t start = segment * SEGMENT; start < (segment + 1) * SEGMENT; start += TILE)
        attend_keys<T>(p, item, start, scratch, state);
}

// Fold a segment into the total of those rows that see it.
void merge_segment(const Problem& p, const Item& item, int64_t segment, const State& total, const State& part) {
    for (int64_t row = 0; row < item.rows(); row++) {
        const Keys keys(p, item, row / item.num_heads);
        if (keys.meet(segment * SEGMENT, (segment + 1) * SEGMENT)) merge_row(total, part, row, p.D);
    }
}

void write_out(const Problem& p, const Item& item, const State& total) {
    for (int64_t row = 0; row < item.rows(); row++) {
        const int64_t token = item.token + row / item.num_heads, head = item.head + row % item.num_heads;
        const float* mixed = total.out + row * p.D;
        if (p.states) {
            float* out = std::copy_n(mixed, p.D, p.out + (token * p.H + head) * (p.D + STATE_NUMBERS));
            out[0] = total.max[row];
            out[1] = total.sum[row];
            continue;
        }
        float* out = p.out + (token * p.H + head) * p.D;
        float sum = total.sum[row], keep = 1.0f;
        if (p.sinks) {
            const float sink = p.sinks[head], max = std::max(total.max[row], sink);
            keep = exp_scalar(total.max[row] - max);
            sum = fused(sum, keep, exp_scalar(sink - max));
        }
        for (int64_t d = 0; d < p.D; d++) out[d] = mixed[d] * keep / sum;
    }
}

std::vector<Item> make_items(const Problem& p) {
    const int64_t queries = std::max<int64_t>(1, ITEM_ROWS / p.group);
    std::vector<Item> items;
    for (int64_t s = 0; s < p.S; s++) {
        const int64_t length = p.query_starts[s + 1] - p.query_starts[s], start = p.kv_lens[s] - length;
        for (int64_t query = 0; query < length; query += queries)
            for (int64_t g = 0; g < p.G; g++) {
                const int64_t head = std::max<int64_t>(0, g * p.group - p.absent);
                const int64_t heads = std::min(p.H, (g + 1) * p.group - p.absent) - head;
                const int64_t count = std::min(queries, length - query), first = p.query_starts[s] + query;
                Item item{s, g, head, heads, query, count, start + query, first, p.kv_lens[s] / SEGMENT, 0};
                for (int64_t at = 0; at < count; at++) {
                    const Keys keys(p, item, at);
                    item.segment = std::min(item.segment, keys.begin / SEGMENT);
                    item.segment_end = std::max(item.segment_end, (keys.end - 1) / SEGMENT + 1);
                }
                items.push_back(item);
            }
    }
    for (size_t i = pool::threads(); i < items.size(); i++) items[i].following = &items[i - pool::threads()];
    return items;
}

// Every item by one thread, its segments in order.
template <class T> void attend_items(const Problem& p, const std::vector<Item>& items, int64_t rows) {
    pool::parallel(int64_t(items.size()), [&](int64_t chunk) {
        const Item& item = items[items.size() - 1 - chunk];  // later queries see more keys: begin with them
        Scratch scratch(rows, p.D);
        clear(scratch.total, item.rows(), p.D);
        for (int64_t segment = item.segment; segment < item.segment_end; segment++) {
            attend_segment<T>(p, item, segment, scratch, scratch.segment);
            merge_segment(p, item, segment, scratch.total, scratch.segment);
        }
        write_out(p, item, scratch.total);
    });
}

// The segments of each item by different threads, then merged in order.
template <class T> void attend_segments(const Problem& p, const std::vector<Item>& items, int64_t rows) {
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
    pool::parallel(int64_t(parts.size()), [&](int64_t part) {
        Scratch scratch(rows, p.D);
        attend_segment<T>(p, *parts[part].first, parts[part].second, scratch, state_of(part));
    });
    for (size_t i = 0; i < items.size(); i++) {
        const Item& item = items[i];
        Scratch scratch(rows, p.D);
        clear(scratch.total, item.rows(), p.D);
        for (int64_t segment = item.segment; segment < item.segment_end; segment++)
            merge_segment(p, item, segment, scratch.total, state_of(first_part[i] + segment - item.segment));
        write_out(p, item, scratch.total);
    }
}

// Every sequence has blocks that exist; every token sees keys that exist, and unless they are some of its keys alone,
// itself.
bool within(const Problem& p) {
    for (int64_t s = 0; s < p.S; s++) {
        if (!has_blocks(p.tables + p.table_starts[s], p.kv_lens[s], p.B, p.kv.num_slots)) return false;
        if (!p.visible_ends) continue;
        const int64_t first = p.query_starts[s], position = p.kv_lens[s] - (p.query_starts[s + 1] - first);
        for (int64_t token = first; token < p.query_starts[s + 1]; token++) {
            const int64_t end = p.visible_ends[token], own = position + token - first;
            if (p.visible_begins ? p.visible_begins[token] < 0 || p.visible_begins[token] > end : end <= own) return false;
            if (end > p.kv_lens[s]) return false;
        }
    }
    return true;
}

bool attend(const Problem& p) {
    if (!within(p)) return false;
    const std::vector<Item> items = make_items(p);
    int64_t rows = 0, segments = 0;
    for (const Item& item : items) {
        rows = std::max(rows, item.rows());
        segments += item.segment_end - item.segment;
    }
    const int64_t count = int64_t(items.size());
    with_storage(p.kv.storage, [&](auto number) {
        if (count < 4 * pool::threads() && segments > count && pool::threads() > 1)
            attend_segments<decltype(number)>(p, items, rows);
        else
            attend_items<decltype(number)>(p, items, rows);
    });
    return true;
}

}  // namespace

bool paged_attention(const float* qkv, const KVLayer& kv, const StepBatch& batch, const Heads& heads,
                     const Scoring& scoring, float* out) {
    return attend({qkv, kv, batch, heads, scoring, out});
}

bool partial_attention(const float* query, const KVLayer& kv, const StepBatch& keys, const int32_t* begins,
                       const Heads& heads, const Scoring& scoring, float* states) {
    Problem p{query, kv, keys, heads, scoring, states};
    p.visible_begins = begins;
    p.query_step = heads.H * heads.D;
    p.states = true;
    return attend(p);
}

void merge_attention(float* states, int64_t count, int64_t rows, int64_t D, float* out) {
    const int64_t step = D + STATE_NUMBERS;
    pool::parallel_ranges(rows, 8 * count * rows * D, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            float max = NEVER, sum = 0, *mixed = out + row * D;
            std::fill_n(mixed, D, 0.0f);
            for (int64_t part = 0; part < count; part++) {
                float* state = states + (part * rows + row) * step;
                if (state[D + 1] != 0) merge_row({&max, &sum, mixed}, {state + D, state + D + 1, state}, 0, D);
            }
            for (int64_t d = 0; d < D; d++) mixed[d] /= sum;
        }
    });
}

// `scales` is null unless the cache is int8, `visible_ends` may be null. Returns 1, having done nothing, if a table or
// `visible_ends` names what does not exist.
extern "C" int64_t fl_paged_attention(const float* qkv, void* key, void* value, float* scales, int64_t storage,
                                      int64_t num_slots, float* out, const int32_t* query_starts, const int32_t* kv_lens,
                                      const int32_t* tables, const int32_t* table_starts, const int32_t* visible_ends,
                                      int64_t S, int64_t H, int64_t G, int64_t D, int64_t absent, int64_t group,
                                      int64_t B, float scale, int64_t window, float softcap, const float* sinks) {
    const StepBatch batch{query_starts, kv_lens, tables, table_starts, nullptr, nullptr, visible_ends, 0, S, B};
    const Heads heads{H, G, D, absent, group};
    const KVLayer kv{key, value, scales, storage, num_slots};
    return !paged_attention(qkv, kv, batch, heads, {scale, softcap, window, sinks}, out);
}

// See partial_attention. Returns 1, having done nothing, for blocks or keys that do not exist.
extern "C" int64_t fl_partial_attention(const float* query, void* key, void* value, float* scales, int64_t storage,
                                        int64_t num_slots, float* states, const int32_t* query_starts, const int32_t* kv_lens,
                                        const int32_t* tables, const int32_t* table_starts, const int32_t* begins,
                                        const int32_t* ends, int64_t S, int64_t H, int64_t G, int64_t D,
                                        int64_t absent, int64_t group, int64_t B, float scale, float softcap) {
    const StepBatch keys{query_starts, kv_lens, tables, table_starts, nullptr, nullptr, ends, 0, S, B};
    const Heads heads{H, G, D, absent, group};
    const KVLayer kv{key, value, scales, storage, num_slots};
    return !partial_attention(query, kv, keys, begins, heads, {scale, softcap, 0}, states);
}

// See merge_attention.
extern "C" void fl_merge_attention(float* states, int64_t count, int64_t rows, int64_t D, float* out) {
    merge_attention(states, count, rows, D, out);
}
