"""All that a package which brings a family of models imports from firstlight: version 1 of the contract.

Owns nothing. The package has an entry point in the group `firstlight.families.v1`, whose name is the model_type of
config.json and whose object is a `Family`; docs/new-model.md makes one. Names are added here without a new version; one
that goes, or means something else, makes version 2.

The row:
`Family`, `ExpertKeys`, `sizes`: names and flags, as for the families that firstlight has itself.
`ModelConfig`, `RopeConfig`, `Experts`: what `Family.finish` may change once the row is read.
`Json`, `integer`, `number`, `flag`, `mapping`, `value_of`, `fail`: reading keys of config.json with errors that name
them. `CheckpointError`: what else is wrong with a file.

A feed-forward block of its own:
`OwnFeedForward`, `FeedForwardBlock`: how it is made, and what it must do.
`Slot`, `Parameter`, `Parameters`, `linear_table`: its weight table. `Ops`, `Linear`: what it computes with.
"""

from model_runtime.architecture import Experts, ModelConfig, RopeConfig
from model_runtime.hf.values import Json, fail, flag, integer, mapping, number, value_of
from model_runtime.models.family import ExpertKeys, Family, sizes
from model_runtime.ops.registry import Linear, Ops
from model_runtime.own_block import FeedForwardBlock, OwnFeedForward
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table

__all__ = (
    "CheckpointError",
    "ExpertKeys",
    "Experts",
    "Family",
    "FeedForwardBlock",
    "Json",
    "Linear",
    "ModelConfig",
    "Ops",
    "OwnFeedForward",
    "Parameter",
    "Parameters",
    "RopeConfig",
    "Slot",
    "fail",
    "flag",
    "integer",
    "linear_table",
    "mapping",
    "number",
    "sizes",
    "value_of",
)
