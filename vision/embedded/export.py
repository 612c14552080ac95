"""From training to files: the eyes as a checkpoint of LLaVA in Hugging Face's format, the adapters in that of PEFT.

Run by `vision.embedded.train` after the alignment. `write_eyes` makes what is kept in the repository: tower, projector
and adapters. `write_merged` makes a whole checkpoint with the adapters added to the language model's matrices, which
any program that knows LLaVA can run, though its answers to text alone are no longer SmolLM2's.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from server.embedded import SUMS
from server.prompt.source import TokenizerSource
from vision.embedded.language import ADAPTED, ALPHA, CHANNELS, EPS, RANK, THETA, Adapter
from vision.embedded.projector import Projector
from vision.embedded.tower import MEAN, STD, Tower, TowerConfig
from vision.embedded.turns import IMAGE_TOKEN

TOWER_PREFIX, PROJECTOR_PREFIX, LANGUAGE_PREFIX = (
    "vision_tower.vision_model.",
    "multi_modal_projector.",
    "language_model.",
)
CONFIG, PREPROCESSOR, EYES = "config.json", "preprocessor_config.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
FILES = (ADAPTER, ADAPTER_CONFIG, CONFIG, EYES, PREPROCESSOR)
"""Of the eyes alone."""
KEPT = torch.bfloat16
"""Of the eyes alone."""
MAX_POSITIONS = 8192
END_OF_TURN = 2


def vision_config(config: TowerConfig) -> dict[str, object]:
    """SigLIP's."""
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": config.width,
        "intermediate_size": 4 * config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "image_size": config.side,
        "patch_size": config.patch,
        "vision_use_head": False,
    }


def text_config(weights: Mapping[str, Tensor]) -> dict[str, object]:
    """Llama's, from the shapes of a checkpoint of that architecture with tied embeddings."""
    vocabulary, hidden = weights["model.embed_tokens.weight"].shape
    first = "model.layers.0."
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": weights[f"{first}mlp.up_proj.weight"].shape[0],
        "num_hidden_layers": sum(name.endswith(".input_layernorm.weight") for name in weights),
        "num_attention_heads": weights[f"{first}self_attn.q_proj.weight"].shape[0] // CHANNELS,
        "num_key_value_heads": weights[f"{first}self_attn.k_proj.weight"].shape[0] // CHANNELS,
        "head_dim": CHANNELS,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": True,
    }


def llava_config(config: TowerConfig, weights: Mapping[str, Tensor]) -> dict[str, object]:
    """Tower and language model; all patches of the last layer are taken."""
    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "image_seq_length": config.grid**2,
        "tie_word_embeddings": True,
        "eos_token_id": END_OF_TURN,
        "text_config": text_config(weights),
        "vision_config": vision_config(config),
    }


def processor_config(config: TowerConfig) -> dict[str, object]:
    """A picture that is not square is padded, so that shapes stay what they are."""
    side = {"height": config.side, "width": config.side}
    return {
        "image_processor_type": "LlavaImageProcessor",
        "do_pad": True,
        "do_center_crop": False,
        "size": side,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
    }


def adapter_config() -> dict[str, object]:
    """PEFT's."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(ADAPTED),
        "bias": "none",
    }


def _adapters(adapters: nn.ModuleDict) -> list[tuple[str, Adapter]]:
    """With the name of the matrix that each changes."""
    found = []
    for name, adapter in adapters.items():
        layer, _, matrix = name.partition("_")
        assert isinstance(adapter, Adapter)
        found.append((f"model.layers.{layer}.self_attn.{matrix}", adapter))
    return found


def eyes_tensors(tower: Tower, projector: Projector) -> dict[str, Tensor]:
    """Under the names of Hugging Face. The last norm, which LLaVA does not use, is there because its files have it."""
    width = tower.config.width
    unused = {"post_layernorm.weight": torch.ones(width), "post_layernorm.bias": torch.zeros(width)}
    seen = {TOWER_PREFIX + name: value for name, value in (tower.state_dict() | unused).items()}
    return seen | {PROJECTOR_PREFIX + name: value for name, value in projector.state_dict().items()}


def merged_weights(weights: Mapping[str, Tensor], adapters: nn.ModuleDict) -> dict[str, Tensor]:
    """Float32, with the products of the adapters as they are kept added."""
    found = {name: value.float() for name, value in weights.items()}
    for matrix, adapter in _adapters(adapters):
        change = _kept(adapter.b) @ _kept(adapter.a) * (ALPHA / RANK)
        found[f"{matrix}.weight"] = found[f"{matrix}.weight"] + change
    return found


def _kept(value: Tensor) -> Tensor:
    """The numbers that are left in the repository's files, in float32."""
    return value.detach().cpu().to(KEPT).float()


def _save(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    values = {name: value.detach().cpu().to(dtype).contiguous() for name, value in tensors.items()}
    save_file(values, path, metadata={"format": "pt"})


def _save_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def write_eyes(
    folder: Path, tower: Tower, projector: Projector, adapters: nn.ModuleDict, weights: Mapping[str, Tensor]
) -> None:
    """Everything but the language model, in bfloat16, with the hash of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_json(folder / CONFIG, llava_config(tower.config, weights))
    _save_json(folder / PREPROCESSOR, processor_config(tower.config))
    _save_json(folder / ADAPTER_CONFIG, adapter_config())
    _save(folder / EYES, eyes_tensors(tower, projector), KEPT)
    changes = {
        f"base_model.model.{matrix}.{part}.weight": value
        for matrix, adapter in _adapters(adapters)
        for part, value in (("lora_A", adapter.a), ("lora_B", adapter.b))
    }
    _save(folder / ADAPTER, changes, KEPT)
    _write_sums(folder)


def _write_sums(folder: Path) -> None:
    """As sha256sum writes and checks them. Of the model's files: what is written about it may change."""
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES]
    (folder / SUMS).write_text("".join(sums))


def write_merged(
    folder: Path,
    tower: Tower,
    projector: Projector,
    adapters: nn.ModuleDict,
    weights: Mapping[str, Tensor],
    source: TokenizerSource,
) -> None:
    """A checkpoint that needs nothing else and computes what the eyes beside the language model do, in float32;
    `source` gives tokenizer and template."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_json(folder / CONFIG, llava_config(tower.config, weights))
    _save_json(folder / PREPROCESSOR, processor_config(tower.config))
    _save_json(folder / "tokenizer_config.json", source.special_variables)
    (folder / "chat_template.jinja").write_text(source.chat_template or "")
    source.fast.save(str(folder / "tokenizer.json"))
    language = {LANGUAGE_PREFIX + name: value for name, value in merged_weights(weights, adapters).items()}
    eyes = {name: _kept(value) for name, value in eyes_tensors(tower, projector).items()}
    _save(folder / EYES, eyes | language, torch.float32)
