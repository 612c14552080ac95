"""What transformers makes of a checkpoint of `tests/vlm.py`: prompt ids, logits and greedy text, images included.

Independent of the code under test: text is rendered by `apply_chat_template`, expanded by transformers' processor where
it works without torchvision and by hand, as text, where it does not; pictures go through the PIL image processors.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.vlm import make_tokenizer
from tests.vlm_cases import CASES

MIN_GAP = 3e-4
"""Between the most likely token and the next: more than logits that are each within 1e-4 can close."""

Features = dict[str, Any]
Picture = Image.Image
Expanded = tuple[str | list[int], Features]
"""The text with its images' tokens, or already their ids; and what the model takes beside them."""
Messages = Sequence[Mapping[str, Any]]
"""Roles and parts: {"type": "text", "text": ...} or {"type": "image"}."""


def _each(text: str, mark: str, replacements: Sequence[str]) -> str:
    """Each `mark` in turn becomes the next replacement."""
    assert text.count(mark) == len(replacements)
    pieces = text.split(mark)
    return "".join(chain(*zip(pieces, [*replacements, ""], strict=True)))


def _llava(name: str, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    """LLaVA's own processor; LLaVA-NeXT's differs in its class only."""
    case = CASES[name]
    processor_class = LlavaNextProcessor if case.family == "llava_next" else LlavaProcessor
    processor = processor_class(
        case.processor,
        fast,
        patch_size=7,
        vision_feature_select_strategy=case.config.get("vision_feature_select_strategy", "default"),
        num_additional_image_tokens=int(case.vision["model_type"] == "clip_vision_model"),
        image_token="<image>",
    )
    processor.image_token, processor.image_token_id = "<image>", fast.convert_tokens_to_ids("<image>")
    return _from_processor(processor, fast, text, pictures)


def _idefics3(name: str, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    return _from_processor(Idefics3Processor(CASES[name].processor, fast, image_seq_len=4), fast, text, pictures)


def _from_processor(processor: Any, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    made = processor(images=[pictures], text=[text], return_tensors="pt", add_special_tokens=False)
    return made.pop("input_ids")[0].tolist(), dict(made)


def _pixtral(name: str, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    """PixtralProcessor.replace_image_token; the class itself cannot be imported without torchvision."""
    made = CASES[name].processor(pictures, return_tensors="pt", patch_size={"height": 8, "width": 8})
    expanded = []
    for height, width in made["image_sizes"].tolist():
        tokens = (["[IMG]"] * (width // 8) + ["[IMG_BREAK]"]) * (height // 8)
        expanded.append("".join([*tokens[:-1], "[IMG_END]"]))
    return _each(text, "[IMG]", expanded), dict(made)


def _onevision(name: str, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    case = CASES[name]
    made = case.processor([pictures], return_tensors="pt")
    processor = object.__new__(LlavaOnevisionProcessor)
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=case.config["image_grid_pinpoints"])
    processor.num_image_tokens, processor.vision_aspect_ratio = 16, case.config["vision_aspect_ratio"]
    sizes = [(picture.height, picture.width) for picture in pictures]
    alone = len(pictures) == 1
    counts = [processor._get_number_of_features(*size, 28, 28) if alone else 16 + 1 for size in sizes]
    return _each(text, "<image>", ["<image>" * count for count in counts]), dict(made)


def _smolvlm(name: str, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    made = CASES[name].processor([pictures], return_tensors="pt", return_row_col_info=True)
    rows, cols = made.pop("rows")[0], made.pop("cols")[0]
    expanded = [
        get_image_prompt_string(row, col, 1, "<fake_token_around_image>", "<image>", "<global-img>")
        for row, col in zip(rows, cols, strict=True)
    ]
    return _each(text, "<image>", expanded), dict(made)


def _internvl(name: str, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    made = CASES[name].processor(pictures, return_tensors="pt")
    processor = object.__new__(InternVLProcessor)
    processor.start_image_token, processor.end_image_token, processor.image_token = "<img>", "</img>", "<IMG_CONTEXT>"
    processor.image_seq_length = 4
    expanded = [processor.replace_image_token(made, index) for index in range(len(pictures))]
    return _each(text, "<IMG_CONTEXT>", expanded), {"pixel_values": made["pixel_values"]}


def _gemma3(name: str, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    made = CASES[name].processor(pictures, return_tensors="pt")
    expanded = f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"
    return _each(text, "<start_of_image>", [expanded] * len(pictures)), {"pixel_values": made["pixel_values"]}


def _qwen(name: str, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    made = CASES[name].processor(pictures, return_tensors="pt")
    counts = [math.prod(grid) // 4 for grid in made["image_grid_thw"].tolist()]
    return _each(text, "<|image_pad|>", ["<|image_pad|>" * count for count in counts]), dict(made)


def _kimi(name: str, fast: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> Expanded:
    """Kimi_K25ImageProcessor with Pillow's resizing; the class needs torchvision."""
    values, patches, grids = CASES[name].processor, [], []
    for picture in pictures:
        width, height = picture.size
        patch, side = values["patch_size"], values["size"]["max_height"] * values["patch_size"]
        area = math.sqrt(values["max_patches"] / (max(1, height // patch) * max(1, width // patch)))
        scale = min(1.0, area, side / height, side / width)
        new_height, new_width = (min(side, max(1, int(length * scale))) for length in (height, width))
        resized = np.asarray(picture.resize((new_width, new_height), Image.Resampling.BICUBIC))
        unit = patch * values["merge_size"]
        padded = np.zeros((math.ceil(new_height / unit) * unit, math.ceil(new_width / unit) * unit, 3), np.uint8)
        padded[:new_height, :new_width] = resized
        pixels = (torch.from_numpy(padded).double() / 255).float().permute(2, 0, 1).sub(0.5).div(0.5)
        cells = pixels.unfold(1, patch, patch).unfold(2, patch, patch)
        grids.append([1, *cells.shape[1:3]])
        patches.append(cells.permute(1, 2, 0, 3, 4).flatten(0, 1))
    expanded = ["<|media_pad|>" * (math.prod(grid) // 4) for grid in grids]
    return _each(text, "<|media_pad|>", expanded), {
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor(grids),
    }


Expand = Callable[[str, PreTrainedTokenizerFast, str, list[Picture]], Expanded]
EXPANDERS: Mapping[str, Expand] = {
    "llava": _llava,
    "llava_next": _llava,
    "llava_onevision": _onevision,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "internvl": _internvl,
    "gemma3": _gemma3,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_5": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "mistral3": _pixtral,
    "kimi_k25": _kimi,
}
TYPES: Mapping[str, str] = {
    "gemma3": "token_type_ids",
    "qwen2_vl": "mm_token_type_ids",
    "qwen2_5_vl": "mm_token_type_ids",
    "qwen3_5": "mm_token_type_ids",
    "qwen3_vl": "mm_token_type_ids",
    "qwen3_vl_moe": "mm_token_type_ids",
}
"""The argument that tells image tokens from text, without which these models take all for text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What transformers says."""

    prompt_ids: list[int]
    logits_LV: Tensor
    """float32 [prompt + continuation, vocabulary]."""
    continuation: list[int]
    """Greedy, not ended by the end token."""


class Oracle:
    """The reference for one checkpoint."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        self._name, self._model, self._fast = name, model, make_tokenizer(CASES[name])
        family = CASES[name].family
        self._expand = EXPANDERS["mistral3" if name == "llava-pixtral" else family]
        self._types = TYPES.get(family)
        text = next(token for key, token in CASES[name].ids.items() if key.startswith("image_token"))
        self._image_token_id = int(self._fast.convert_tokens_to_ids(text))  # type: ignore[arg-type]

    def inputs(self, messages: Messages, pictures: Sequence[Picture]) -> tuple[list[int], Features]:
        """Ids of the prompt, and what the model takes beside them."""
        text = self._fast.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        expanded, features = self._expand(self._name, self._fast, text, list(pictures)) if pictures else (text, {})
        ids = self._fast(expanded, add_special_tokens=False)["input_ids"] if isinstance(expanded, str) else expanded
        return list(ids), {key: value for key, value in features.items() if not re.match("attention|.*type_ids", key)}

    def answer(self, messages: Messages, pictures: Sequence[Picture], steps: int) -> Answer:
        """Each token by a forward pass over everything before it, without a cache."""
        ids, features = self.inputs(messages, pictures)
        prompt = list(ids)
        logits_LV = self.logits(ids, features)
        for _ in range(steps):
            best, second = logits_LV[-1].topk(2).values.tolist()
            assert best - second > MIN_GAP, "the choice must not depend on rounding"
            ids = [*ids, int(logits_LV[-1].argmax())]
            logits_LV = self.logits(ids, features)
        return Answer(prompt_ids=prompt, logits_LV=logits_LV, continuation=ids[len(prompt) :])

    def logits(self, ids: list[int], features: Features) -> Tensor:
        """Of every row, float32 [L, V]."""
        ids_1L = torch.tensor([ids])
        types = {self._types: (ids_1L == self._image_token_id).int()} if self._types and features else {}
        with torch.inference_mode():
            return self._model(input_ids=ids_1L, **features, **types).logits[0].float()
