"""The structures of `linear.h`, `layer_ops.h` and `layers.cpp`, field by field; a test compares the two. Filled by
`program.py`, engine and worker processes.
"""

from ctypes import Structure, c_float, c_int64, c_void_p


class CMatrix(Structure):
    """A packed matrix and its bias."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("format", c_int64),
        ("N", c_int64),
        ("K", c_int64),
        ("row_bits", c_int64),
    )


class CHeads(Structure):
    """How a row of queries, keys and values is cut."""

    _fields_ = (("H", c_int64), ("G", c_int64), ("D", c_int64), ("absent", c_int64), ("group", c_int64))


class CScoring(Structure):
    """A `Scoring`."""

    _fields_ = (("scale", c_float), ("softcap", c_float), ("window", c_int64), ("sinks", c_void_p))


class CRope(Structure):
    """A table of rotations."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("P", c_int64),
        ("R", c_int64),
        ("interleaved", c_int64),
        ("growth", c_void_p),
    )


class CStepBatch(Structure):
    """The arrays of a `Batch`."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("kv_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_starts", c_void_p),
        ("rope_rows", c_void_p),
        ("slots", c_void_p),
        ("visible_ends", c_void_p),
        ("T", c_int64),
        ("S", c_int64),
        ("B", c_int64),
    )


class CLowRank(Structure):
    """A `LowRank`."""

    _fields_ = (("down", CMatrix), ("up", CMatrix), ("first", c_int64), ("scale", c_float))


class CKVLayer(Structure):
    """The cache of a layer."""

    _fields_ = (
        ("key", c_void_p),
        ("value", c_void_p),
        ("scales", c_void_p),
        ("storage", c_int64),
        ("num_slots", c_int64),
    )


class CLayer(Structure):
    """A `DenseLayer`."""

    _fields_ = (
        ("qkv", CMatrix),
        ("output", CMatrix),
        ("gate_up", CMatrix),
        ("down", CMatrix),
        ("attention_norm", c_void_p),
        ("attention_result_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_result_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("heads", CHeads),
        ("scoring", CScoring),
        ("whole_qk_norm", c_int64),
        ("other_rope", c_int64),
        ("gelu", c_int64),
        ("centered", c_int64),
        ("parallel", c_int64),
        ("residual_scale", c_float),
        ("eps", c_float),
        ("qkv_changes", c_void_p),
        ("num_qkv_changes", c_int64),
        ("output_changes", c_void_p),
        ("num_output_changes", c_int64),
    )


class CSharedRows(Structure):
    """The `SharedRows` of a batch, and the ranks whose they are."""

    _fields_ = (("ranks", c_void_p), ("counts", c_void_p), ("positions", c_void_p), ("keys", CStepBatch))


class CStep(Structure):
    """What all layers of a step share."""

    _fields_ = (
        ("batch", CStepBatch),
        ("rope", CRope),
        ("other_rope", CRope),
        ("workspace", c_void_p),
        ("collective", c_void_p),
        ("shared", c_void_p),
        ("shared_workspace", c_void_p),
        ("adapted", c_void_p),
        ("num_adapted", c_int64),
    )
