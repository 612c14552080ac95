"""From a checkpoint's configuration files to the recipe for its images and the tokens that stand for them.

`read_preprocessor` is called once while the API process starts; its answer serves every request. One function for each
model family; a family, processor class or option that is not known is refused by name.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import PIL

from vision.placeholders import AnyResolutionTiles, Markup, NamedTiles, Patches, PatchRows, Tiles
from vision.preprocess import clip, idefics3, internvl, kimi, llava_next, pixtral, qwen2_vl
from vision.preprocess.common import Recipe
from vision.preprocess.values import Json, PreprocessorError, Values

R = TypeVar("R", bound=Recipe)

PIXTRAL_TOKENS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessor:
    """How images become pixels and tokens for one checkpoint."""

    recipe: Recipe
    markup: Markup
    image_token_id: int
    """Stands for one embedding in the expanded prompt."""
    placeholder_id: int
    """What the chat template writes for an image, and `expand` replaces; mostly the same id."""
    around: tuple[str, str] = ("", "")
    """Text before and after each placeholder, to be put in before the prompt is tokenized: it merges with its
    neighbours."""
    has_mrope: bool = False
    """Whether the model wants the row and the column of each embedding in its picture; the markup is `Patches` then."""
    several: tuple[Recipe, Markup] | None = None
    """Recipe and markup where a request has more than one image, if the family has them apart."""

    def for_images(self, count: int) -> "Preprocessor":
        """The preprocessor for a request with `count` images."""
        if count < 2 or self.several is None:
            return self
        return replace(self, recipe=self.several[0], markup=self.several[1], several=None)

    def fingerprint(self) -> str:
        """64 hex digits: part of every cache key of pixels and embeddings. Another setting, another Pillow or another
        recipe gives another one."""
        return hashlib.sha256(f"{PIL.__version__} {self!r}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The files, as a family's function reads them."""

    kind: str
    """Class of the image processor, without its backend's suffix."""
    values: Values
    model: Values
    vision: Values
    processor: Values

    def refuse(self, why: str) -> NoReturn:
        raise PreprocessorError(f"preprocessor: {why}")

    def choose(self, readers: Mapping[str, Callable[[Values], R]]) -> R:
        """The recipe of the processor class; the first reader where no file names one."""
        kind = self.kind or next(iter(readers))
        if kind not in readers:
            self.refuse(f"image_processor_type {kind!r} is not supported for this model; {', '.join(readers)} are")
        return readers[kind](self.values)

    def patch(self, default: int) -> int:
        """Pixels of a patch's side."""
        height, width = self.vision.square_or_pair("patch_size", (default, default))
        if height != width:
            self.refuse(f"patches of {height} x {width} pixels are not supported, only square ones")
        return height

    def patches(self, recipe: Recipe, image_size: int, patch: int) -> tuple[int, int]:
        """(rows, columns) of patches of a tile, which must be what the tower was made for."""
        layout, patch = recipe.layout(64, 64), self.patch(patch)
        wanted = self.vision.square_or_pair("image_size", (image_size, image_size))
        if (layout.height, layout.width) != wanted:
            tile = f"{layout.height} x {layout.width}"
            self.refuse(f"tiles are {tile} pixels, but the tower takes {wanted[0]} x {wanted[1]}")
        if patch > min(wanted):
            self.refuse(f"patches of {patch} pixels do not fit into tiles of {wanted[0]} x {wanted[1]}")
        return layout.height // patch, layout.width // patch

    def tower(self) -> tuple[int, int]:
        """(class tokens, default patch size) of LLaVA's towers."""
        name = self.vision.text("model_type", "clip_vision_model")
        towers = {"clip_vision_model": (1, 32), "siglip_vision_model": (0, 16)}
        if name not in towers:
            self.refuse(f"vision_config.model_type {name!r} is not supported here; {', '.join(towers)} are")
        return towers[name]

    def classes(self) -> int:
        """Embeddings that the tower gives beside those of the patches, after the model's selection."""
        default = "full" if self.model.text("model_type", "") == "llava_onevision" else "default"
        strategy = self.model.text("vision_feature_select_strategy", default)
        if strategy not in ("default", "full"):
            self.refuse(f"vision_feature_select_strategy must be default or full, not {strategy!r}")
        return self.tower()[0] - (strategy == "default")

    def token(self, *keys: str) -> int:
        """The token id under the first of `keys` that the model's configuration has."""
        for key in keys:
            if self.model.has(key):
                value = self.model.data[key]
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    self.refuse(f"{key} must be a token id, not {value!r}")
                return value
        self.refuse(f"the model's configuration lacks {keys[0]}")

    def build(self, recipe: Recipe, markup: Markup) -> Preprocessor:
        """For the families whose placeholder is the image token."""
        token = self.token("image_token_id", "image_token_index")
        return Preprocessor(recipe=recipe, markup=markup, image_token_id=token, placeholder_id=token)


def _llava(source: _Source) -> Preprocessor:
    if source.vision.text("model_type", "") == "pixtral":
        return _pixtral(source, merge=1)
    recipe = source.choose(
        {
            "CLIPImageProcessor": clip.read_clip,
            "LlavaImageProcessor": clip.read_llava,
            "SiglipImageProcessor": clip.read_siglip,
        }
    )
    rows, cols = source.patches(recipe, 224, source.tower()[1])
    return source.build(recipe, Tiles(per_tile=rows * cols + source.classes()))


def _any_resolution_side(source: _Source, recipe: llava_next.AnyResolution) -> int:
    """Patches of a tile's side, for the families that put tiles together to one picture."""
    rows, cols = source.patches(recipe, 224, source.tower()[1])
    if rows != cols:
        source.refuse(f"tiles of {rows} x {cols} patches are not supported, only square ones")
    if recipe.tile != recipe.layout(64, 64).height:
        source.refuse(f"tiles of {recipe.tile} pixels must reach the tower in that size")
    pinpoints = source.model.data.get("image_grid_pinpoints")
    if pinpoints is not None and pinpoints != [list(pair) for pair in recipe.pinpoints]:
        source.refuse("image_grid_pinpoints differ between the processor and the model")
    if source.classes():
        source.refuse("vision_feature_select_strategy must leave one embedding for each patch")
    return rows


def _llava_next(source: _Source) -> Preprocessor:
    recipe = source.choose({"LlavaNextImageProcessor": llava_next.read_llava_next})
    return source.build(recipe, AnyResolutionTiles(side=_any_resolution_side(source, recipe), max_tiles=None))


def _llava_onevision(source: _Source) -> Preprocessor:
    recipe = source.choose({"LlavaOnevisionImageProcessor": llava_next.read_llava_onevision})
    side = _any_resolution_side(source, recipe)
    name, _, most = source.model.text("vision_aspect_ratio", "anyres_max_9").rpartition("_")
    if name != "anyres_max" or not most.isdecimal() or not 1 <= int(most) <= llava_next.MAX_TILES:
        source.refuse(f"vision_aspect_ratio must be anyres_max_N, not {source.model.data['vision_aspect_ratio']!r}")
    single = source.build(recipe, AnyResolutionTiles(side=side, max_tiles=int(most)))
    # among several images each has one view and one newline embedding
    return replace(single, several=(recipe.one_of_many(), Tiles(per_tile=side * side + 1)))


def _idefics3(source: _Source) -> Preprocessor:
    recipe = source.choose({"Idefics3ImageProcessor": idefics3.read, "SmolVLMImageProcessor": idefics3.read})
    rows, cols = source.patches(recipe, 224, 32)
    scale = source.model.integer("scale_factor", 2)
    if rows % scale or cols % scale:
        source.refuse(f"{rows} x {cols} patches do not divide into blocks of scale_factor {scale}")
    return source.build(recipe, NamedTiles(per_tile=rows * cols // scale**2))


def _qwen(source: _Source) -> Preprocessor:
    recipe = source.choose({"Qwen2VLImageProcessor": qwen2_vl.read, "Qwen2_5_VLImageProcessor": qwen2_vl.read})
    default = 16 if source.model.text("model_type", "").startswith("qwen3") else 14
    patch, merge = source.patch(default), source.vision.integer("spatial_merge_size", 2)
    temporal = source.vision.integer("temporal_patch_size", 2)
    if (recipe.patch, recipe.merge, recipe.temporal) != (patch, merge, temporal):
        source.refuse(
            f"patch, merge and temporal size are {recipe.patch}, {recipe.merge}, {recipe.temporal}, "
            f"but the tower takes {patch}, {merge}, {temporal}"
        )
    return replace(source.build(recipe, Patches(unit=patch * merge)), has_mrope=True)


def _kimi_k25(source: _Source) -> Preprocessor:
    recipe = source.choose({"Kimi_K25ImageProcessor": kimi.read_k25, "KimiK25VisionProcessor": kimi.read_k25})
    return _kimi(source, recipe)


def _kimi_vl(source: _Source) -> Preprocessor:
    return _kimi(source, source.choose({"KimiVLImageProcessor": kimi.read_vl}))


def _kimi(source: _Source, recipe: kimi.Kimi) -> Preprocessor:
    patch, merge = source.patch(14), source.vision.square_or_pair("merge_kernel_size", (2, 2))
    if (recipe.patch, (recipe.merge, recipe.merge)) != (patch, merge):
        source.refuse(
            f"patches and merge are {recipe.patch} and {recipe.merge}, but the tower takes {patch} and {merge[0]}"
        )
    token = source.token("image_token_id", "media_placeholder_token_id")
    markup = Patches(unit=patch * recipe.merge)
    return Preprocessor(recipe=recipe, markup=markup, image_token_id=token, placeholder_id=token)


def _internvl(source: _Source) -> Preprocessor:
    recipe = source.choose({"GotOcr2ImageProcessor": internvl.read})
    rows, cols = source.patches(recipe, 448, 14)
    ratio = source.model.number("downsample_ratio", 0.5)
    if (rows * ratio) % 1 or (cols * ratio) % 1:
        source.refuse(f"{rows} x {cols} patches do not divide by downsample_ratio {ratio}")
    per_tile = int(rows * ratio) * int(cols * ratio)
    return source.build(recipe, Tiles(per_tile=per_tile, start="<img>", end="</img>"))


def _pixtral(source: _Source, merge: int) -> Preprocessor:
    unit = source.patch(16) * merge
    recipe = source.choose({"PixtralImageProcessor": lambda values: pixtral.read(values, unit)})
    names = {key: source.processor.text(key, default) for key, default in PIXTRAL_TOKENS.items()}
    return source.build(recipe, PatchRows(unit=unit, row_end=names["image_break_token"], end=names["image_end_token"]))


def _mistral3(source: _Source) -> Preprocessor:
    return _pixtral(source, merge=source.model.integer("spatial_merge_size", 2))


def _gemma3(source: _Source) -> Preprocessor:
    recipe = source.choose({"Gemma3ImageProcessor": clip.read_gemma3})
    source.patches(recipe, 224, 16)
    per_tile = source.model.integer("mm_tokens_per_image", 256)
    return Preprocessor(
        recipe=recipe,
        markup=Tiles(per_tile=per_tile, start="<start_of_image>", end="<end_of_image>"),
        image_token_id=source.token("image_token_id", "image_token_index"),
        placeholder_id=source.token("boi_token_id", "boi_token_index"),
        around=("\n\n", "\n\n"),
    )


FAMILIES: Mapping[str, Callable[[_Source], Preprocessor]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "kimi_k25": _kimi_k25,
    "kimi_vl": _kimi_vl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "mistral3": _mistral3,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "smolvlm": _idefics3,
}
"""By `model_type`."""


TEXT_ONLY = frozenset({"kimi_k3", "llama4"})
"""Models of images whose images are not supported: served as models of text."""


def _kind(values: Values) -> str:
    """The processor class without backend: "CLIPImageProcessor" for its Fast and Pil forms and its old name."""
    name = values.text("image_processor_type", values.text("feature_extractor_type", ""))
    for suffix in ("Fast", "Pil"):
        name = name.removesuffix(suffix)
    return name.replace("FeatureExtractor", "ImageProcessor")


def read_preprocessor(config: Json, processor_config: Json | None, model_config: Json) -> Preprocessor:
    """From preprocessor_config.json (empty if there is none), processor_config.json, whose `image_processor` wins, and
    config.json. Raises PreprocessorError naming what is wrong, missing or not supported; a checkpoint without any
    values is, since published ones differ from the defaults of their class."""
    processor, model = Values(processor_config or {}), Values(model_config)
    values = Values({**config, **processor.section("image_processor").data})
    name = model.text("model_type", "")
    if name not in FAMILIES:
        raise PreprocessorError(f"images for model_type {name!r} are not supported; {', '.join(FAMILIES)} are")
    if not values.data:
        raise PreprocessorError(
            "preprocessor_config.json is missing, and no image_processor in processor_config.json says how images are "
            "resized either; put the file that was published with the checkpoint into its folder"
        )
    vision = model.section("vision_config")
    return FAMILIES[name](_Source(kind=_kind(values), values=values, model=model, vision=vision, processor=processor))
