// What latent attention computes, and what of the cache and the queries a thread has at hand. The part of
// `latent_attention.cpp` that knows the block table.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "kv.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t TILE = 64, SEGMENT = 256;
constexpr int W = sizeof(vec) / 4, SUMS = W == 16 ? 16 : 8;  // lanes of a vector; registers for sums
constexpr int WIDEST = 2;                                    // vectors that meet a number of a row at once
constexpr float NEVER = -std::numeric_limits<float>::infinity();
typedef Lanes<vec>::i32 ints;

struct Problem {
    const float* query;  // [T][H][X]
    const void* rows;    // [slots][X]
    const float* scales;
    int64_t storage;
    float* out;  // [T][H][L]; with `ends` states [T][H][L + 2]
    const int32_t *query_starts, *kv_lens, *tables, *table_starts;
    const int32_t* ends;  // one past the last row that a token sees; or null: its own
    int64_t S, H, X, L, B;
    float scale;

    int64_t tokens(int64_t sequence) const { return query_starts[sequence + 1] - query_starts[sequence]; }
};

// Some lanes of one sequence: its queries in order, of each the heads in order.
struct Item {
    int64_t sequence, first, lanes;
    int64_t rows = 0;  // that any lane sees

    Item(const Problem& p, int64_t sequence, int64_t first, int64_t lanes) : sequence(sequence), first(first), lanes(lanes) {
        for (int64_t lane = 0; lane < lanes; lane++) rows = std::max(rows, end(p, lane));
    }

    int64_t segments() const { return divide_up(rows, SEGMENT); }

    int64_t number(const Problem& p, int64_t lane) const { return p.query_starts[sequence] * p.H + first + lane; }

    // One past the last row that a lane sees.
    int64_t end(const Problem& p, int64_t lane) const {
        const int64_t query = (first + lane) / p.H;
        if (p.ends) return p.ends[p.query_starts[sequence] + query];
        return p.kv_lens[sequence] - p.tokens(sequence) + query + 1;
    }
};

// Softmax state of the lanes: maximum, sum of exponentials, weighted sums [L] of values.
template <int NV> struct State {
    float *max, *sum, *out;

    static int64_t numbers(const Problem& p) { return NV * W * (2 + p.L); }
    State(const Problem&, float* memory) : max(memory), sum(memory + NV * W), out(memory + 2 * NV * W) {}

    void clear(const Problem& p) const {
        std::fill_n(max, NV * W, NEVER);
        std::fill_n(sum, NV * W, 0.0f);
        std::fill_n(out, p.L * NV * W, 0.0f);
    }
};

// Working memory of one thread, reused from call to call.
struct Scratch {
    float *query, *tile, *scores, *segment, *total;

    explicit Scratch(const Problem& p) {
        static thread_local std::vector<float> memory;
        const int64_t lanes = WIDEST * W, state = State<WIDEST>::numbers(p);
        const size_t size = lanes * p.X + TILE * p.X + TILE * lanes + 2 * state;
        if (memory.size() < size) memory.resize(size);
        query = memory.data();
        tile = query + lanes * p.X;
        scores = tile + TILE * p.X;
        segment = scores + TILE * lanes;
        total = segment + state;
    }
};

// query[X][lanes], scaled; zeros in the lanes that are left over.
template <int NV> void load_queries(const Problem& p, const Item& item, float* query) {
    for (int64_t lane = 0; lane < NV * W; lane++) {
        const float* from = p.query + item.number(p, lane) * p.X;
        for (int64_t x = 0; x < p.X; x++) query[x * NV * W + lane] = lane < item.lanes ? from[x] * p.scale : 0.0f;
    }
}

// tile[count][X] in float32: the rows from position `start` on.
template <class T> void load_tile(const Problem& p, int64_t sequence, int64_t start, int64_t count, float* tile) {
    const T* rows = static_cast<const T*>(p.rows);
    for (int64_t at = 0, run; at < count; at += run) {
        const int64_t position = start + at, offset = position % p.B;
        const int64_t slot = p.tables[p.table_starts[sequence] + position / p.B] * p.B + offset;
        run = std::min(p.B - offset, count - at);
        expand(rows + slot * p.X, run * p.X, tile + at * p.X);
        for (int64_t row = 0; p.scales && row < run; row++) {
            const float* scales = p.scales + (slot + row) * 2;
            float* numbers = tile + (at + row) * p.X;
            for (int64_t x = 0; x < p.L; x++) numbers[x] *= scales[0];
            for (int64_t x = p.L; x < p.X; x++) numbers[x] *= scales[1];
        }
    }
}

}  // namespace
