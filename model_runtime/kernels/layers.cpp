// The layers of a step in one call: what `blocks/attention.py` and `blocks/mlp.py` say, one operation after the other,
// without returning to Python between them. The operations are those that `ops/cpu.py` registers, so the result is the
// same bit for bit; what is fused here (a sum with the norm that follows, and either with making integers of the row)
// keeps the order of every float operation.
#include <algorithm>
#include <atomic>
#include <vector>

#include "collective.h"
#include "layer_ops.h"
#include "linear.h"
#include "pool.h"
#include "shared_attention.h"

// The structures are filled by `program.py`; the order of their fields is the same there.

// A layer of grouped-query attention and a gated feed-forward block. Norms and biases that it lacks are null.
struct Layer {
    Matrix qkv, output, gate_up, down;
    const float *attention_norm, *attention_result_norm, *mlp_norm, *mlp_result_norm, *query_norm, *key_norm;
    Heads heads;
    Scoring scoring;
    int64_t whole_qk_norm, other_rope, gelu;
    int64_t centered;  // norms of hidden states subtract the mean first
    int64_t parallel;  // the feed-forward block takes what attention takes
    float residual_scale, eps;
    const LowRank *qkv_changes;
    int64_t num_qkv_changes;
    const LowRank *output_changes;
    int64_t num_output_changes;
};

// What all layers of a step share.
struct Step {
    StepBatch batch;
    Rope rope, other_rope;
    float* workspace;        // of fl_workspace bytes, aligned to 64
    Collective* collective;  // of the ranks that have parts of the layers, or null
    const SharedRows* shared;  // with ranks that have other rows and keys of the sequences, or null
    float* shared_workspace;   // of fl_shared_workspace bytes
    const int64_t* adapted;    // [num_adapted], ascending: the rows that changes of matrices are for
    int64_t num_adapted;
};

namespace {

constexpr int64_t CHANGED_ROWS = 16;                 // that are changed at once
constexpr int64_t FEWEST_ROWS = 32, MOST_ROWS = 64;  // that one thread takes through a layer
constexpr int64_t OUT_OF_RANGE = -1;                 // what a step returns; else 0, or 1 + the rank that did not come

// Rows that a layer has memory for: integers come in groups.
int64_t rows_of(const Layer& layer, int64_t T) {
    const Matrix* matrices[] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
    const bool integers = std::any_of(matrices, matrices + 4, [](const Matrix* w) { return is_integer(w->format); });
    return integers ? row_groups(T) * QuantizedRows::GROUP : T;
}

// Rows [row, row + count) of a step.
struct Rows {
    int64_t row, count;
};

// Working memory of some rows in a layer. Every number of a row has its own place, so that rows may be in different parts
// of a layer. Integers lie where floats would, or where those were that are not needed any more.
struct Workspace {
    float *normed, *result, *qkv, *mixed, *gate_up, *product;

    Workspace(const Layer& layer, const Step& step, Rows rows) {
        const int64_t all = rows_of(layer, step.batch.T);
        float* next = step.workspace;
        const auto take = [&](int64_t width) { return next += all * width, next - (all - rows.row) * width; };
        normed = take(layer.output.N);
        result = take(layer.output.N);
        qkv = take(layer.qkv.N);
        mixed = take(layer.output.K);
        gate_up = take(layer.gate_up.N);
        product = take(layer.down.K);
    }
};

void multiply(const Matrix& w, const ProductRows& rows, int64_t T, float* y) {
    rows.quantized ? linear_quantized(w, rows.integers, T, y) : linear(w, rows.floats, T, y);
}

// y [rows.count][N] += the changes of a product, for those of some rows that are adapted. take(row, to) copies what row
// number `row` of them is multiplied with.
template <class Take>
void change(const LowRank* changes, int64_t count, const Step& step, Rows rows, int64_t N, float* y, Take take) {
    const int64_t* end = step.adapted + step.num_adapted;
    const int64_t* row = std::lower_bound(step.adapted, end, rows.row);
    end = std::lower_bound(row, end, rows.row + rows.count);
    if (row == end || !count) return;
    const int64_t K = changes->down.K;
    std::vector<float> x(CHANGED_ROWS * K), low, product;
    for (; row < end; row += CHANGED_ROWS) {
        const int64_t some = std::min(end - row, CHANGED_ROWS);
        for (int64_t r = 0; r < some; r++) take(row[r] - rows.row, x.data() + r * K);
        for (const LowRank* each = changes; each < changes + count; each++) {
            low.resize(some * each->down.N), product.resize(some * each->up.N);
            linear(each->down, x.data(), some, low.data());
            for (float& number : low) number *= each->scale;
            linear(each->up, low.data(), some, product.data());
            for (int64_t r = 0; r < some; r++) {
                float* to = y + (row[r] - rows.row) * N + each->first;
                for (int64_t n = 0; n < each->up.N; n++) to[n] += product[r * each->up.N + n];
            }
        }
    }
}

// What the layer before left, and with it x, becomes the layer's queries, keys and values; the latter two go to the cache.
bool before_attention(const Layer& layer, const KVLayer& kv, const Step& step, Rows rows, const float* x) {
    const Workspace at(layer, step, rows);
    multiply(layer.qkv, {layer.qkv, rows.count, at.normed}, rows.count, at.qkv);
    // normed rows may be integers by now
    change(layer.qkv_changes, layer.num_qkv_changes, step, rows, layer.qkv.N, at.qkv, [&](int64_t row, float* to) {
        norm_or_copy(x + row * layer.qkv.K, layer.attention_norm, layer.eps, layer.qkv.K, layer.centered, to);
    });
    if (layer.query_norm)
        qk_norm(at.qkv, layer.query_norm, layer.key_norm, layer.eps, layer.whole_qk_norm, rows.count, layer.heads);
    StepBatch batch = step.batch;
    batch.rope_rows += rows.row;
    batch.slots += rows.row;
    batch.T = rows.count;
    return rope_and_cache(at.qkv, layer.other_rope ? step.other_rope : step.rope, batch, kv, layer.heads);
}

// A block's result [count] in all ranks together.
int64_t sum_of_ranks(const Step& step, float* result, int64_t count) {
    return step.collective ? all_reduce(*step.collective, result, count) : 0;
}

// What a layer's queries see, of all ranks' keys. Returns 0, -1 or 1 + the rank that did not come.
int64_t attention(const Layer& layer, const KVLayer& kv, const Step& step, const Workspace& at) {
    if (step.shared)
        return shared_attention(at.qkv, kv, *step.shared, layer.heads, layer.scoring, step.shared_workspace, at.mixed);
    return paged_attention(at.qkv, kv, step.batch, layer.heads, layer.scoring, at.mixed) ? 0 : OUT_OF_RANGE;
}

// From what attention mixed to x, and to the norm that the layer `next` begins with, unless it is null. Returns 0, or
// 1 + the rank that did not come.
int64_t after_attention(const Layer& layer, const Layer* next, const Step& step, Rows rows, float* x) {
    const Workspace at(layer, step, rows);
    const int64_t T = rows.count, C = layer.output.N;
    // integers lie where q, k and v are not needed any more
    const ProductRows mixed(layer.output, T, is_integer(layer.output.format) ? at.qkv : at.mixed);
    if (mixed.quantized) quantize_rows(at.mixed, T, layer.output.K, mixed.integers);
    multiply(layer.output, mixed, T, at.result);
    change(layer.output_changes, layer.num_output_changes, step, rows, C, at.result, [&](int64_t row, float* to) {
        std::copy_n(at.mixed + row * layer.output.K, layer.output.K, to);
    });
    if (const int64_t lost = sum_of_ranks(step, at.result, T * C)) return lost;
    const float scale = layer.residual_scale, eps = layer.eps;
    const bool centered = layer.centered;
    const ResidualNorm middle{at.result, true,  layer.attention_result_norm, !layer.parallel, layer.mlp_norm,
                              scale,     eps,   centered};
    add_and_norm(x, middle, T, C, {layer.gate_up, T, at.normed});
    multiply(layer.gate_up, {layer.gate_up, T, at.normed}, T, at.gate_up);
    const ProductRows product(layer.down, T, at.product);
    gate(at.gate_up, layer.gelu, T, layer.down.K, product);
    multiply(layer.down, product, T, at.result);
    if (const int64_t lost = sum_of_ranks(step, at.result, T * C)) return lost;
    const float* next_norm = next ? next->attention_norm : nullptr;
    const ResidualNorm end{at.result, true, layer.mlp_result_norm, next != nullptr, next_norm, scale, eps, centered};
    add_and_norm(x, end, T, C, {next ? next->qkv : layer.qkv, T, at.normed});
    return 0;
}

// function(rows) for all rows of a step, in parts that one thread takes through all operations between two attentions:
// what it wrote is in its own cache. With too few rows for that, all are one part, and the threads share each operation.
// So they do where ranks sum, which must all come to the same sums in the same order: there one part follows the other.
template <class Function> void for_parts(const Step& step, Function function) {
    const int64_t T = step.batch.T, threads = step.collective ? 1 : pool::threads(), groups = row_groups(T);
    if (T < threads * FEWEST_ROWS) return function(Rows{0, T});
    const int64_t parts = threads * divide_up(T, threads * MOST_ROWS);
    const auto take = [&](int64_t part) {
        const int64_t row = groups * part / parts * QuantizedRows::GROUP;
        const int64_t end = std::min(T, groups * (part + 1) / parts * QuantizedRows::GROUP);
        function(Rows{row, end - row});
    };
    if (!step.collective) return pool::parallel(parts, take);
    for (int64_t part = 0; part < parts; part++) take(part);
}

}  // namespace

extern "C" {

// Bytes of working memory that any of the layers takes for T tokens.
int64_t fl_workspace(const Layer* layers, int64_t count, int64_t T) {
    int64_t numbers = 0;
    for (const Layer* layer = layers; layer < layers + count; layer++) {
        const int64_t attention = layer->qkv.N + layer->output.K, feed_forward = layer->gate_up.N + layer->down.K;
        const int64_t of_row = 2 * layer->output.N + attention + feed_forward;
        numbers = std::max(numbers, rows_of(*layer, T) * of_row);
    }
    return numbers * int64_t(sizeof(float));
}

// Beside that, what attention over the keys of several ranks takes.
int64_t fl_shared_workspace(const Layer* layers, int64_t count, const SharedRows* shared) {
    int64_t numbers = 0;
    for (const Layer* layer = layers; layer < layers + count; layer++)
        numbers = std::max(numbers, shared_attention_numbers(layer->heads, *shared));
    return numbers * int64_t(sizeof(float));
}

// x[T][C] passes `count` layers, each with its cache, in place. Returns 0; -1 if a number from the batch that indexes
// memory is out of range; 1 + the rank that did not come to a sum. x and the caches are then of no use.
int64_t fl_run_layers(const Layer* layers, const KVLayer* caches, int64_t count, const Step* step, float* x) {
    const StepBatch& batch = step->batch;
    const int64_t C = layers->output.N;
    std::atomic<int64_t> failure = 0;
    for_parts(*step, [&](Rows rows) {
        const Workspace at(*layers, *step, rows);
        const ResidualNorm begin{at.result, false, nullptr, true, layers->attention_norm, 1.0f, layers->eps,
                                 bool(layers->centered)};
        add_and_norm(x + rows.row * C, begin, rows.count, C, {layers->qkv, rows.count, at.normed});
        if (!before_attention(*layers, *caches, *step, rows, x + rows.row * C)) failure = OUT_OF_RANGE;
    });
    for (int64_t index = 0; index < count; index++) {
        const Layer &layer = layers[index], *next = index + 1 < count ? &layer + 1 : nullptr;
        const Workspace at(layer, *step, {0, batch.T});
        if (failure) return failure;
        if (const int64_t failed = attention(layer, caches[index], *step, at)) return failed;
        for_parts(*step, [&](Rows rows) {
            if (failure) return;
            float* rows_x = x + rows.row * C;
            if (const int64_t lost = after_attention(layer, next, *step, rows, rows_x))
                failure = lost;
            else if (next && !before_attention(*next, caches[index + 1], *step, rows, rows_x))
                failure = OUT_OF_RANGE;
        });
    }
    return failure;
}
}
