"""An adapter's changes to the matrices of attention, added to the rows of some sequences of a step. Other rows are
neither read nor written, so they are what they are without an adapter. Called by attention, engine and worker
processes.

Legend: T tokens of the step, A rows that are changed, K input and N output features of a matrix, E those of queries,
keys and values together.
"""

from dataclasses import dataclass

from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.ops.registry import LowRank, Ops
from model_runtime.share import Axis
from model_runtime.weights.table import Parameter, Parameters, Slot

OUTPUT = "o_proj"
FLOATS = 16
"""The fewest bits of a matrix that `--quantization` leaves alone."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A matrix that may have a change: its size, where its product begins, and how ranks divide it."""

    rows: int
    columns: int
    first: int
    split: Axis | None = None
    columns_split: Axis | None = None


def _places(config: ModelConfig) -> dict[str, _Place]:
    """Of a layer that is as wide as `config`."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    value_dim, hidden = config.value_dim or config.head_dim, config.hidden_size
    return {
        "q_proj": _Place(queries, hidden, 0, "heads"),
        "k_proj": _Place(keys, hidden, queries, "kv_heads"),
        "v_proj": _Place(config.num_kv_heads * value_dim, hidden, queries + keys, "kv_heads"),
        OUTPUT: _Place(hidden, config.num_heads * value_dim, 0, columns_split="heads"),
    }


def adapter_table(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    """The parameters of a layer's changes under `name`, and the checkpoint keys under `key` that fill them."""
    table: list[Parameter] = []
    if (adapter := config.adapter) is None:
        return table
    for matrix in adapter.matrices:
        place, rank = _places(config)[matrix], adapter.rank
        down = (Slot(f"{key}.{matrix}.lora_A.weight", rank),)
        up = (Slot(f"{key}.{matrix}.lora_B.weight", place.rows, place.split),)
        table += [
            Parameter(
                name=f"{name}.{matrix}.down",
                slots=down,
                columns=place.columns,
                columns_split=place.columns_split,
                fewest_bits=FLOATS,
            ),
            Parameter(name=f"{name}.{matrix}.up", slots=up, columns=rank, fewest_bits=FLOATS),
        ]
    return table


def changes_of(
    config: ModelConfig, name: str, parameters: Parameters
) -> tuple[tuple[LowRank, ...], tuple[LowRank, ...]]:
    """What `adapter_table` declared: changes of the product that gives queries, keys and values, and of the output's.
    `config` is as wide as this rank's part."""
    found: dict[str, LowRank] = {}
    if (adapter := config.adapter) is not None:
        places, matrices = _places(config), parameters.matrices
        for matrix in adapter.matrices:
            down, up = matrices[f"{name}.{matrix}.down"], matrices[f"{name}.{matrix}.up"]
            found[matrix] = LowRank(down, up, places[matrix].first, adapter.scale)
    output = found.pop(OUTPUT, None)
    return tuple(found.values()), () if output is None else (output,)


def add_changes(ops: Ops, changes: tuple[LowRank, ...], x_TK: Tensor, rows_A: Tensor | None, y_TN: Tensor) -> None:
    """Change rows of y = x W^T in place."""
    if rows_A is None or not changes:
        return
    x_AK = x_TK[rows_A]
    for change in changes:
        low_AR = ops.linear(x_AK, change.down, None) * change.scale
        columns = slice(change.first, change.first + change.up.num_rows)
        y_TN[:, columns].index_add_(0, rows_A, ops.linear(low_AR, change.up, None))
