// The layers of a step in one call: what `blocks/attention.py` and `blocks/mlp.py` say, one operation after the other,
// without returning to Python between them. The operations are those that `ops/cpu.py` registers, so the result is the
// same bit for bit; what is fused here (a sum with the norm that follows) keeps the order of every float operation.
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
    float* workspace;  // fl_workspace floats for each token
};

namespace {

// Working memory of a layer. What attention needs and what the feed-forward block needs lie in the same place.
struct Workspace {
    float *normed, *result, *qkv, *mixed, *gate_up, *product;

    Workspace(const Layer& layer, const Step& step) {
        const int64_t T = step.batch.T, C = layer.output.N;
        normed = step.workspace;
        result = normed + T * C;
        qkv = gate_up = result + T * C;
        mixed = qkv + T * layer.qkv.N;
        product = gate_up + T * layer.gate_up.N;
    }
};

bool attention(const Layer& layer, const KVLayer& kv, const Step& step, const Workspace& at) {
    const StepBatch& batch = step.batch;
    linear(layer.qkv, at.normed, batch.T, at.qkv);
    if (layer.query_norm) qk_norm(at.qkv, layer.query_norm, layer.key_norm, layer.eps, batch.T, layer.heads);
    const Rope& rope = layer.local_rope ? step.local_rope : step.rope;
    if (!rope_and_cache(at.qkv, rope, batch, kv, layer.heads)) return false;
    if (!paged_attention(at.qkv, kv, batch, layer.heads, layer.scale, layer.window, at.mixed)) return false;
    linear(layer.output, at.mixed, batch.T, at.result);
    return true;
}

void feed_forward(const Layer& layer, int64_t T, const Workspace& at) {
    linear(layer.gate_up, at.normed, T, at.gate_up);
    gate(at.gate_up, layer.gelu, T, layer.down.K, at.product);
    linear(layer.down, at.product, T, at.result);
}

}  // namespace

extern "C" {

// Floats of working memory that a token takes in this layer.
int64_t fl_workspace(const Layer* layer) {
    return 2 * layer->output.N + std::max(layer->qkv.N + layer->output.K, layer->gate_up.N + layer->down.K);
}

// x[T][C] passes `count` layers, each with its cache, in place. Returns 1 if a number from the batch that indexes memory
// is out of range; x and the caches are then of no use.
int64_t fl_run_layers(const Layer* layers, const KVLayer* caches, int64_t count, const Step* step, float* x) {
    const int64_t T = step->batch.T, C = layers->output.N;
    float* normed = step->workspace;
    add_and_norm(x, {nullptr, normed, nullptr, layers->attention_norm, layers->eps}, T, C);
    for (int64_t index = 0; index < count; index++) {
        const Layer& layer = layers[index];
        const Workspace at(layer, *step);
        if (!attention(layer, caches[index], *step, at)) return 1;
        add_and_norm(x, {at.result, normed, layer.attention_result_norm, layer.mlp_norm, layer.eps}, T, C);
        feed_forward(layer, T, at);
        const float* next_norm = index + 1 < count ? layers[index + 1].attention_norm : nullptr;
        add_and_norm(x, {at.result, normed, layer.mlp_result_norm, next_norm, layer.eps}, T, C);
    }
    return 0;
}
}
