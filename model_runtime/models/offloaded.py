"""A layer whose matrices are in host memory: it has them brought to the device before it computes. Made by the decoder,
engine process.

Legend: T tokens of the step, C hidden size.
"""

from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.batch import Batch
from model_runtime.blocks.expert_exchange import ExpertExchange
from model_runtime.caches import LayerCache
from model_runtime.models.layer import Layer
from model_runtime.offload import Staging
from model_runtime.ops.registry import DenseLayer, Ops, RopeTable
from model_runtime.parallel import Collectives
from model_runtime.weights.table import Parameters


class OffloadedLayer(Layer):
    """A layer like any other to who runs it; it cannot be part of a compiled stack."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        parameters: Parameters,
        collectives: Collectives,
        exchange: ExpertExchange | None,
        staging: Staging,
    ) -> None:
        """As `Layer`; `staging` has it."""
        super().__init__(config, layer, parameters, collectives, exchange)
        self._staging, self._number = staging, layer

    def forward(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: LayerCache) -> Tensor:
        """As `Layer`."""
        self._staging.enter(self._number)
        x_TC = super().forward(ops, x_TC, rope, batch, kv)
        self._staging.leave(self._number)
        return x_TC

    def dense(self) -> DenseLayer | None:
        """None: a compiled stack would compute from what is in a buffer at that time."""
        return None


def make_layer(
    config: ModelConfig,
    layer: int,
    parameters: Parameters,
    collectives: Collectives,
    exchange: ExpertExchange | None,
) -> Layer:
    """Of either kind, by where its matrices are."""
    if (staging := parameters.staging) is not None and layer in staging:
        assert not config.depth_group, "layers in host memory, of a model that runs them in parts"
        return OffloadedLayer(config, layer, parameters, collectives, exchange, staging)
    return Layer(config, layer, parameters, collectives, exchange)
