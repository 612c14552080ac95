// One tile of attention: the scores of some rows against 64 keys, their weights, and the weighted sum of the values.
// The part of `attention.cpp` that does the arithmetic. T is the type that keys and values are stored in; int8 keys and
// values are computed with as integers, and the scale of a key multiplies its score, that of a value its weight.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "attention_keys.h"
#include "vec.h"

namespace {

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
void weigh_row(const Problem& p, const Scratch& scratch, const State& state, int64_t row, int64_t begin, int64_t end) {
    const int64_t D = p.D;
    typedef typename Lanes<vec>::i32 ints;
    float* scores = scratch.scores + row * TILE;
    ints lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    const auto seen = [&](int v) { return (lanes + v * W >= int32_t(begin)) & (lanes + v * W < int32_t(end)); };
    vec masked[TILE / W], best = splat<vec>(NEVER);
    for (int v = 0; v < TILE / W; v++) {
        vec score = load<vec>(scores + v * W);
        if (SCALED) score *= load<vec>(scratch.key_scales + v * W);
        if (p.softcap > 0.0f) score = p.softcap * tanh_lanes(score / p.softcap);
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
    const int64_t group_size = item.num_heads, row_end = viewers.to * group_size;
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
            weigh_row<SCALED>(p, scratch, state, row + h, begin, end);
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
