// The layers of a step in one call: what `blocks/attention.py` and `blocks/mlp.py` say, one operation after the other,
// without returning to Python between them. The operations are those that `ops/cpu.py` registers, so the result is the
// same bit for bit; what is fused here (a sum with the norm that follows, and either with making integers of the row)
// keeps the order of every float operation.
#include <algorithm>

#include "layer_ops.h"
#include "linear.h"

// The structures are filled by `program.py`; the order of their fields is the same there.

// A layer of grouped-query attention and a gated feed-forward block. Norms and biases that it lacks are null.
struct Layer {
    Matrix qkv, output, gate_up, down;
    const float *attention_norm, *attention_result_norm, *mlp_norm, *mlp_result_norm, *query_norm, *key_norm;
    Heads heads;
    int64_t window, local_rope, gelu;
    float scale, eps;
};

// What all layers of a step share.
struct Step {
    StepBatch batch;
    Rope rope, local_rope;
    float* workspace;  // of fl_workspace bytes, aligned to 64
};

namespace {

// Rows that a layer has memory for: integers come in groups.
int64_t rows_of(const Layer& layer, int64_t T) {
    const Matrix* matrices[] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
    const bool integers = std::any_of(matrices, matrices + 4, [](const Matrix* w) { return is_integer(w->format); });
    return integers ? row_groups(T) * QuantizedRows::GROUP : T;
}

// Working memory of a layer. What attention needs and what the feed-forward block needs lie in the same place; integers
// lie where floats would, or where those were that are not needed any more.
struct Workspace {
    float *normed, *result, *qkv, *mixed, *gate_up, *product;

    Workspace(const Layer& layer, const Step& step) {
        const int64_t rows = rows_of(layer, step.batch.T), C = layer.output.N;
        normed = step.workspace;
        result = normed + rows * C;
        qkv = gate_up = result + rows * C;
        mixed = qkv + rows * layer.qkv.N;
        product = gate_up + rows * layer.gate_up.N;
    }
};

void multiply(const Matrix& w, const ProductRows& rows, int64_t T, float* y) {
    rows.quantized ? linear_quantized(w, rows.integers, T, y) : linear(w, rows.floats, T, y);
}

bool attention(const Layer& layer, const KVLayer& kv, const Step& step, const Workspace& at) {
    const StepBatch& batch = step.batch;
    multiply(layer.qkv, {layer.qkv, batch.T, at.normed}, batch.T, at.qkv);
    if (layer.query_norm) qk_norm(at.qkv, layer.query_norm, layer.key_norm, layer.eps, batch.T, layer.heads);
    const Rope& rope = layer.local_rope ? step.local_rope : step.rope;
    if (!rope_and_cache(at.qkv, rope, batch, kv, layer.heads)) return false;
    if (!paged_attention(at.qkv, kv, batch, layer.heads, layer.scale, layer.window, at.mixed)) return false;
    // integers lie where q, k and v are not needed any more
    const ProductRows mixed(layer.output, batch.T, is_integer(layer.output.format) ? at.qkv : at.mixed);
    if (mixed.quantized) quantize_rows(at.mixed, batch.T, layer.output.K, mixed.integers);
    multiply(layer.output, mixed, batch.T, at.result);
    return true;
}

void feed_forward(const Layer& layer, int64_t T, const Workspace& at) {
    multiply(layer.gate_up, {layer.gate_up, T, at.normed}, T, at.gate_up);
    const ProductRows product(layer.down, T, at.product);
    gate(at.gate_up, layer.gelu, T, layer.down.K, product);
    multiply(layer.down, product, T, at.result);
}

}  // namespace

extern "C" {

// Bytes of working memory that any of the layers takes for T tokens.
int64_t fl_workspace(const Layer* layers, int64_t count, int64_t T) {
    int64_t numbers = 0;
    for (const Layer* layer = layers; layer < layers + count; layer++) {
        const int64_t attention = layer->qkv.N + layer->output.K, feed_forward = layer->gate_up.N + layer->down.K;
        const int64_t of_row = 2 * layer->output.N + std::max(attention, feed_forward);
        numbers = std::max(numbers, rows_of(*layer, T) * of_row);
    }
    return numbers * int64_t(sizeof(float));
}

// x[T][C] passes `count` layers, each with its cache, in place. Returns 1 if a number from the batch that indexes memory
// is out of range; x and the caches are then of no use.
int64_t fl_run_layers(const Layer* layers, const KVLayer* caches, int64_t count, const Step* step, float* x) {
    const int64_t T = step->batch.T, C = layers->output.N;
    const Workspace first(*layers, *step);
    const ProductRows normed(layers->qkv, T, first.normed);
    add_and_norm(x, {first.result, false, nullptr, layers->attention_norm, layers->eps}, T, C, normed);
    for (int64_t index = 0; index < count; index++) {
        const Layer &layer = layers[index], *next = index + 1 < count ? &layer + 1 : nullptr;
        const Workspace at(layer, *step);
        if (!attention(layer, caches[index], *step, at)) return 1;
        const ResidualNorm middle{at.result, true, layer.attention_result_norm, layer.mlp_norm, layer.eps};
        add_and_norm(x, middle, T, C, {layer.gate_up, T, at.normed});
        feed_forward(layer, T, at);
        const ResidualNorm end{at.result, true, layer.mlp_result_norm, next ? next->attention_norm : nullptr, layer.eps};
        add_and_norm(x, end, T, C, {next ? next->qkv : layer.qkv, T, at.normed});
    }
    return 0;
}
}
