// The operations of layers that go through a text with a state: a short convolution and the gated delta rule. Runs of rows
// are taken in their order, since one may go on from what the one before it left; channels and columns of a state have
// nothing to do with each other, and are divided among the threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t CHANNELS = 256;  // of a convolution that a chunk has
constexpr int64_t COLUMNS = 32;    // of a head's state
constexpr int64_t LANES = sizeof(vec) / 4;
constexpr int VECTORS = COLUMNS / LANES;

// G runs: rows starts[g] to starts[g + 1] of T go from the state in slot reads[g], or from zeros if that is negative, to
// slot writes[g] of N.
struct Runs {
    const int32_t *starts, *reads, *writes;
    int64_t G, T, N;

    bool valid() const {
        if (starts[0] != 0 || starts[G] != T) return false;
        for (int64_t g = 0; g < G; g++) {
            if (starts[g] >= starts[g + 1] || reads[g] < -1 || reads[g] >= N || writes[g] < 0 || writes[g] >= N) return false;
        }
        return true;
    }
};

// y[c] = silu of the sum of the rows at and before x, each times its weight [W][CHANNELS]; `past` are rows before the run.
void convolve(const float* x, int64_t row, int64_t C, const float* past, const float* weight, int64_t W, int64_t first,
              int64_t count, float* y) {
    float sum[CHANNELS] = {};
    for (int64_t w = 0; w < W; w++) {
        const int64_t from = row - (W - 1) + w;
        const float* in = (from < 0 ? past + (W - 1 + from) * C : x + from * C) + first;
        for (int64_t c = 0; c < count; c++) sum[c] = fused(in[c], weight[w * CHANNELS + c], sum[c]);
    }
    for (int64_t c = 0; c < count; c += 8) {
        const v8 v = load<v8>(sum + c);
        store(sum + c, v / (1.0f + exp_v8(-v)));
    }
    std::copy_n(sum, count, y + first);
}

// One run's rows x[n][C] for some channels; its state of P = W - 1 rows goes from `read`, or zeros, to `write`.
void convolve_run(const float* x, int64_t n, int64_t C, const float* weight, int64_t W, const float* read, float* write,
                  int64_t first, int64_t count, float* past, float* y) {
    const int64_t P = W - 1;
    for (int64_t p = 0; p < P; p++) {
        float* row = past + p * C + first;
        if (read)
            std::copy_n(read + p * C + first, count, row);
        else
            std::fill_n(row, count, 0.0f);
    }
    for (int64_t t = 0; t < n; t++) convolve(x, t, C, past, weight, W, first, count, y + t * C);
    for (int64_t p = 0; p < P; p++) {
        const int64_t from = n - P + p;
        const float* row = from < 0 ? past + (P + from) * C : x + from * C;
        std::copy_n(row + first, count, write + p * C + first);
    }
}

// y[K] = x / sqrt(sum of squares + 1e-6) * factor.
void unit(const float* x, int64_t K, float factor, float* y) {
    float sum = 0.0f;
    for (int64_t k = 0; k < K; k++) sum = fused(x[k], x[k], sum);
    factor /= std::sqrt(sum + 1e-6f);
    for (int64_t k = 0; k < K; k++) y[k] = x[k] * factor;
}

// A row through COLUMNS columns of a head's state [K][COLUMNS]: decay, the part of the value that the state does not say,
// the output.
void step(float* state, int64_t K, const float* query, const float* key, const float* value, const float* decay,
          int64_t decay_step, float beta, float* out) {
    vec sum[VECTORS] = {}, mixed[VECTORS] = {};
    for (int64_t k = 0; k < K; k++) {
        const vec left = splat<vec>(decay[k * decay_step]), keys = splat<vec>(key[k]);
        for (int v = 0; v < VECTORS; v++)
            sum[v] = fused(load<vec>(state + k * COLUMNS + v * LANES) * left, keys, sum[v]);
    }
    for (int v = 0; v < VECTORS; v++) sum[v] = (load<vec>(value + v * LANES) - sum[v]) * beta;
    for (int64_t k = 0; k < K; k++) {
        const vec left = splat<vec>(decay[k * decay_step]), keys = splat<vec>(key[k]), queries = splat<vec>(query[k]);
        for (int v = 0; v < VECTORS; v++) {
            float* place = state + k * COLUMNS + v * LANES;
            const vec row = fused(sum[v], keys, load<vec>(place) * left);
            store(place, row);
            mixed[v] = fused(row, queries, mixed[v]);
        }
    }
    for (int v = 0; v < VECTORS; v++) store(out + v * LANES, mixed[v]);
}

// Columns of a state [K][V] into a tile [K][COLUMNS], whose other columns are zeros, or back.
void load_tile(const float* state, int64_t K, int64_t V, int64_t count, float* tile) {
    std::fill_n(tile, K * COLUMNS, 0.0f);
    for (int64_t k = 0; k < K && state; k++) std::copy_n(state + k * V, count, tile + k * COLUMNS);
}

void store_tile(const float* tile, int64_t K, int64_t V, int64_t count, float* state) {
    for (int64_t k = 0; k < K; k++) std::copy_n(tile + k * COLUMNS, count, state + k * V);
}

}  // namespace

extern "C" {

// x[T][C], weight[C][W], state[N][W - 1][C] -> y[T][C]; `scratch` has room for W - 1 rows. Not 0: a number of the
// runs is out of range, and nothing is done.
int64_t fl_short_conv(const float* x, const float* weight, const int32_t* starts, const int32_t* reads, const int32_t* writes,
                      float* state, int64_t T, int64_t C, int64_t W, int64_t G, int64_t N, float* scratch, float* y) {
    const Runs runs{starts, reads, writes, G, T, N};
    if (!runs.valid()) return 1;
    const int64_t slot = (W - 1) * C;
    pool::parallel(divide_up(C, CHANNELS), [=](int64_t chunk) {
        const int64_t first = chunk * CHANNELS, count = std::min(CHANNELS, C - first);
        std::vector<float> turned(W * CHANNELS);
        for (int64_t c = 0; c < count; c++) {
            for (int64_t w = 0; w < W; w++) turned[w * CHANNELS + c] = weight[(first + c) * W + w];
        }
        for (int64_t g = 0; g < G; g++) {
            const float* read = reads[g] < 0 ? nullptr : state + reads[g] * slot;
            convolve_run(x + starts[g] * C, starts[g + 1] - starts[g], C, turned.data(), W, read, state + writes[g] * slot, first,
                         count, scratch, y + starts[g] * C);
        }
    });
    return 0;
}

// unit_qk[T][2][G][K] are made of qkv[T][2 G K + H V]; decay[T][H][D] with D of 1 or K, beta[T][H], state[N][H][K][V]
// -> y[T][H V]. Result as above.
int64_t fl_delta_rule(const float* qkv, const float* decay, const float* beta, const int32_t* starts, const int32_t* reads,
                      const int32_t* writes, float* state, int64_t T, int64_t H, int64_t heads, int64_t K, int64_t V, int64_t D,
                      int64_t G, int64_t N, float* unit_qk, float* y) {
    const Runs runs{starts, reads, writes, G, T, N};
    if (!runs.valid()) return 1;
    const int64_t width = 2 * heads * K + H * V, group = H / heads, tiles = divide_up(V, COLUMNS);
    const float scale = 1.0f / std::sqrt(float(K));
    pool::parallel_ranges(T, T * heads * K * 4, [=](int64_t t, int64_t end) {
        for (; t < end; t++) {
            for (int64_t h = 0; h < 2 * heads; h++)
                unit(qkv + t * width + h * K, K, h < heads ? scale : 1.0f, unit_qk + (t * 2 * heads + h) * K);
        }
    });
    pool::parallel(H * tiles, [=](int64_t chunk) {
        const int64_t h = chunk / tiles, first = chunk % tiles * COLUMNS, count = std::min(COLUMNS, V - first);
        std::vector<float> tile(K * COLUMNS);
        for (int64_t g = 0; g < G; g++) {
            const int64_t place = h * K * V + first, slot = H * K * V;
            if (g == 0 || reads[g] != writes[g - 1])  // else it is in the tile: a draft is a run of a row
                load_tile(reads[g] < 0 ? nullptr : state + reads[g] * slot + place, K, V, count, tile.data());
            for (int64_t t = starts[g]; t < starts[g + 1]; t++) {
                const float *query = unit_qk + (t * 2 * heads + h / group) * K, *row = qkv + t * width;
                float value[COLUMNS] = {}, out[COLUMNS];
                std::copy_n(row + 2 * heads * K + h * V + first, count, value);
                step(tile.data(), K, query, query + heads * K, value, decay + (t * H + h) * D, D > 1 ? 1 : 0,
                     beta[t * H + h], out);
                std::copy_n(out, count, y + (t * H + h) * V + first);
            }
            store_tile(tile.data(), K, V, count, state + writes[g] * slot + place);
        }
    });
    return 0;
}

}  // extern "C"
