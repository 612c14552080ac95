// Attention of a step's rows over the keys of ranks that share its sequences.
#pragma once

#include <cstdint>

#include "collective.h"
#include "layer_ops.h"

// `SharedRows` of `batch.py`. Rows of all ranks, rank after rank, and what they see of this rank's keys: of `keys`, the
// groups of rows, and `visible_ends`; T is all rows.
struct SharedRows {
    Collective* ranks;
    const int64_t* counts;     // rows of each rank
    const int32_t* positions;  // of all rows
    StepBatch keys;
};

// Numbers of working memory that it takes.
int64_t shared_attention_numbers(const Heads& heads, const SharedRows& shared);

// out[own T][H D]: what this rank's rows see in all ranks, from their queries in qkv [own T][(H + 2 G) D]. Returns 0; -1 if
// the rows name keys that do not exist; 1 + the rank that did not come.
int64_t shared_attention(const float* qkv, const KVLayer& kv, const SharedRows& shared, const Heads& heads,
                         const Scoring& scoring, float* workspace, float* out);
