"""The search for the cause of a divergence, by the kind of operation. Called by `align.compare`."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from model_runtime.align.suspects.attending import of_attention
from model_runtime.align.suspects.mixture import of_experts, of_routing
from model_runtime.align.suspects.norms import of_norm, of_qk_norm
from model_runtime.align.suspects.products import of_activation, of_linear
from model_runtime.align.suspects.rotations import of_rope
from model_runtime.align.suspects.scene import Scene
from model_runtime.align.suspects.stream import of_embedding, of_logits, of_stream

SEARCHES: Mapping[str, Callable[[Scene], Iterator[str]]] = MappingProxyType(
    {
        "activation": of_activation,
        "attention": of_attention,
        "embedding": of_embedding,
        "experts": of_experts,
        "linear": of_linear,
        "logits": of_logits,
        "norm": of_norm,
        "qk_norm": of_qk_norm,
        "residual": of_stream,
        "rope": of_rope,
        "router": of_linear,
        "routing": of_routing,
    }
)
UNKNOWN: Mapping[str, str] = MappingProxyType(
    {
        "activation": "the activation, a clamp, or gate and up exchanged",
        "attention": "the scale, the window, a cap, sinks, values that are normalised, or the cache",
        "embedding": "the scale of embeddings, or the table",
        "experts": "experts' weights or activation, the shared block, its gate",
        "linear": "the weight: another tensor, another slice of a fused one, its type or scales",
        "logits": "scale and cap of logits",
        "norm": "the norm's weight, epsilon, mean, or place",
        "qk_norm": "what is normalised together, the weight, epsilon, or place before the rotation",
        "residual": "what is added, multipliers, the places of norms",
        "rope": "layout, base, scaling, rotated channels, positions",
        "router": "the router's weight or bias",
        "tower": "positions of patches, their order, attention and its rotations, activations",
        "routing": "scores, groups, bias, the sum that weights are divided by, their scale",
    }
)
"""Where nothing explains the numbers: what to look at."""


def suspects(scene: Scene, kind: str) -> tuple[str, ...]:
    """What would make the product's operation the reference's, or else what to look at."""
    found = tuple(SEARCHES[kind](scene)) if kind in SEARCHES else ()
    return found or (f"nothing simple explains the numbers; look at {UNKNOWN[kind]}",)
