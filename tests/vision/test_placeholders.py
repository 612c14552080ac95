"""Token counts, expansions and positions equal those of transformers' processors and models; nothing is searched."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.vision.preprocess_pictures import SIZES, as_pil, picture
from vision.placeholders import (
    AnyResolutionTiles,
    ImageTokens,
    Markup,
    NamedTiles,
    Patches,
    PatchRows,
    Piece,
    PlaceholderMismatch,
    Span,
    Tiles,
    expand,
    image_tokens,
    mrope_positions,
)
from vision.preprocess import clip, idefics3, internvl, llava_next, pixtral, qwen2_vl
from vision.preprocess.common import Recipe
from vision.preprocess.values import Values

SPECIALS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<start_of_image>"),
    *("<end_of_image>", "<image_soft_token>", "[IMG]", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>"),
)
TRIPLES = ((56, 40), (97, 41), (33, 32))
"""Images of three sizes for one prompt."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, one merge (two line breaks), and the special tokens of the families."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*symbols, "ĊĊ"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )


def encoded(fast: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(fast(text, add_special_tokens=False)["input_ids"])


def images(sizes: tuple[tuple[int, int], ...]) -> list[np.ndarray]:
    return [picture(height, width, seed) for seed, (height, width) in enumerate(sizes)]


def ours(
    recipe: Recipe, markup: Markup, fast: PreTrainedTokenizerFast, prompt: str, mark: str, token: str
) -> list[int]:
    """The prompt's ids with its placeholders expanded, for images of TRIPLES."""
    ids, placeholder = encoded(fast, prompt), fast.convert_tokens_to_ids(mark)
    token_id = fast.convert_tokens_to_ids(token)
    pieces = [markup.pieces(recipe.layout(*size)) for size in TRIPLES]
    made = [image_tokens(one, token_id, lambda text: encoded(fast, text)) for one in pieces]
    expansion = expand(ids, [index for index, one in enumerate(ids) if one == placeholder], made)
    for span in expansion.spans:
        assert expansion.ids[span.offset : span.offset + span.length] == [token_id] * span.length
    assert sum(span.length for span in expansion.spans) == expansion.ids.count(token_id)
    return expansion.ids


def theirs(processor: object, prompt: str) -> list[int]:
    pictures = [as_pil(image_HWC) for image_HWC in images(TRIPLES)]
    return list(processor(images=[pictures], text=[prompt], return_tensors=None)["input_ids"][0])  # type: ignore[operator]


def embeddings(pieces: tuple[Piece, ...]) -> int:
    return sum(piece for piece in pieces if isinstance(piece, int))


def text(pieces: tuple[Piece, ...], token: str) -> str:
    return "".join(token * piece if isinstance(piece, int) else piece for piece in pieces)


PROMPT = "a <image>\nb\n<image><image> c\n\n"


def test_llava_expansion() -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config, fast = {"size": 56, "crop_size": 56}, tokenizer()
    processor = LlavaProcessor(
        CLIPImageProcessorPil(**config),
        fast,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    processor.image_token, processor.image_token_id = "<image>", fast.convert_tokens_to_ids("<image>")
    found = ours(clip.read_clip(Values(config)), Tiles(per_tile=16), fast, PROMPT, "<image>", "<image>")
    assert found == theirs(processor, PROMPT)
    assert found.count(processor.image_token_id) == 3 * 16


def next_processor(config: dict[str, object], fast: PreTrainedTokenizerFast) -> LlavaNextProcessor:
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(**config),
        fast,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor.image_token, processor.image_token_id = "<image>", fast.convert_tokens_to_ids("<image>")
    return processor


NEXT = {
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
    "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
}


def test_llava_next_expansion_and_counts() -> None:
    fast = tokenizer()
    processor, recipe = next_processor(NEXT, fast), llava_next.read_llava_next(Values(NEXT))
    markup = AnyResolutionTiles(side=4, max_tiles=None)
    assert ours(recipe, markup, fast, PROMPT, "<image>", "<image>") == theirs(processor, PROMPT)
    sizes = [*SIZES, *[(height, width) for height in range(1, 400, 17) for width in range(1, 400, 19)]]
    expected = processor._get_num_multimodal_tokens(sizes)["num_image_tokens"]
    assert [embeddings(markup.pieces(recipe.layout(*size))) for size in sizes] == expected


def test_llava_onevision_counts_with_and_without_shrinking() -> None:
    pinpoints = [[28 * rows, 28 * cols] for rows in range(1, 7) for cols in range(1, 7)]
    recipe = llava_next.read_llava_onevision(
        Values({"size": {"height": 28, "width": 28}, "image_grid_pinpoints": pinpoints})
    )
    for most in (2, 9):
        processor = object.__new__(LlavaOnevisionProcessor)
        processor.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints)
        processor.num_image_tokens, processor.vision_aspect_ratio = 49, f"anyres_max_{most}"
        markup = AnyResolutionTiles(side=7, max_tiles=most)
        shrunk = 0
        for height in range(1, 300, 13):
            for width in range(1, 300, 11):
                layout = recipe.layout(height, width)
                found = embeddings(markup.pieces(layout))
                assert found == processor._get_number_of_features(height, width, 28, 28), (height, width)
                shrunk += found < embeddings(AnyResolutionTiles(side=7, max_tiles=None).pieces(layout))
        assert shrunk > 100


@pytest.mark.parametrize("split", [True, False])
def test_idefics3_expansion(split: bool) -> None:
    config = {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": split}
    fast = tokenizer()
    processor = Idefics3Processor(Idefics3ImageProcessorPil(**config), fast, image_seq_len=4)
    found = ours(idefics3.read(Values(config)), NamedTiles(per_tile=4), fast, PROMPT, "<image>", "<image>")
    assert found == theirs(processor, PROMPT)


def test_smolvlm_markup() -> None:
    config = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}}
    recipe = idefics3.read(Values(config))
    for size in SIZES:
        layout = recipe.layout(*size)
        expected = get_image_prompt_string(
            layout.rows, layout.cols, 9, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        assert text(NamedTiles(per_tile=9).pieces(layout), "<image>") == expected


def test_internvl_markup() -> None:
    config = {"size": {"height": 28, "width": 28}, "crop_to_patches": True}
    recipe, image_processor = internvl.read(Values(config)), GotOcr2ImageProcessorPil(**config)
    processor = object.__new__(InternVLProcessor)
    processor.start_image_token, processor.end_image_token, processor.image_token = "<img>", "</img>", "<IMG_CONTEXT>"
    processor.image_seq_length = 4
    for image_HWC in images(SIZES):
        inputs = image_processor(as_pil(image_HWC), return_tensors="np")
        pieces = Tiles(per_tile=4, start="<img>", end="</img>").pieces(recipe.layout(*image_HWC.shape[:2]))
        assert text(pieces, "<IMG_CONTEXT>") == processor.replace_image_token(inputs, 0)


@pytest.mark.parametrize(("patch", "merge"), [(14, 2), (16, 1)])
def test_pixtral_markup(patch: int, merge: int) -> None:
    config, unit = {"size": {"longest_edge": 140}}, patch * merge
    recipe, image_processor = pixtral.read(Values(config), unit), PixtralImageProcessorPil(**config, patch_size=unit)
    for image_HWC in images(SIZES):
        ((height, width),) = image_processor(as_pil(image_HWC), return_tensors="np")["image_sizes"].tolist()
        # PixtralProcessor.replace_image_token; the class itself cannot be imported without torchvision
        tokens = (["[IMG]"] * (width // unit) + ["[IMG_BREAK]"]) * (height // unit)
        tokens[-1] = "[IMG_END]"
        pieces = PatchRows(unit=unit).pieces(recipe.layout(*image_HWC.shape[:2]))
        assert text(pieces, "[IMG]") == "".join(tokens)


def test_gemma3_expansion_with_the_line_breaks_put_in_before_tokenizing() -> None:
    config, fast = {"size": {"height": 56, "width": 56}}, tokenizer()
    processor = Gemma3Processor(Gemma3ImageProcessorPil(**config), fast, image_seq_length=4)
    prompt = "user\n<start_of_image>\nb\n<start_of_image><start_of_image> c\n\n"
    around = prompt.replace("<start_of_image>", "\n\n<start_of_image>\n\n")
    markup = Tiles(per_tile=4, start="<start_of_image>", end="<end_of_image>")
    found = ours(clip.read_gemma3(Values(config)), markup, fast, around, "<start_of_image>", "<image_soft_token>")
    assert found == theirs(processor, prompt)


def test_qwen_counts_and_mrope_positions() -> None:
    config = {"patch_size": 14, "size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 20}}
    recipe, processor = qwen2_vl.read(Values(config)), Qwen2VLImageProcessorPil(**config)
    markup = Patches(unit=28)
    layouts = [recipe.layout(*size) for size in SIZES]
    made = [image_tokens(markup.pieces(layout), 9, lambda _: ()) for layout in layouts]
    for layout, size, one in zip(layouts, SIZES, made, strict=True):
        assert len(one.ids) == processor.get_number_of_image_patches(*size) // 4
        assert len(one.ids) == np.prod(markup.grid(layout))
    for chosen in ([], [5], [3, 40, 41], [60, 0, 30, 2]):
        prompt = [1, 2, *[token for _ in chosen for token in (8, 0, 7)], 3, 4, 5]
        positions = [index for index, token in enumerate(prompt) if token == 0]
        expansion = expand(prompt, positions, [made[index] for index in chosen])
        grids = [markup.grid(layouts[index]) for index in chosen]
        found_3L, delta = mrope_positions(len(expansion.ids), expansion.spans, grids)
        model = object.__new__(Qwen2_5_VLModel)
        torch.nn.Module.__init__(model)
        model.config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=4))
        ids_1L = torch.tensor([expansion.ids])
        thw = torch.tensor([[1, 2 * rows, 2 * cols] for rows, cols in grids]).reshape(-1, 3)
        expected_31L, expected_delta = model.get_rope_index(ids_1L, (ids_1L == 9).int(), thw)
        assert np.array_equal(found_3L, expected_31L[:, 0].numpy())
        assert delta == expected_delta.item()


def test_mrope_positions_of_images_side_by_side() -> None:
    spans = [Span(offset=1, length=2, image=0, first=0), Span(offset=3, length=3, image=1, first=0)]
    positions_3L, delta = mrope_positions(7, spans, [(1, 2), (3, 1)])
    assert positions_3L.tolist() == [[0, 1, 1, 3, 3, 3, 6], [0, 1, 1, 3, 4, 5, 6], [0, 1, 2, 3, 3, 3, 6]]
    assert delta == 0


def test_expansion_by_hand() -> None:
    split = image_tokens(("<", 2, "|", 1, ">"), 9, lambda markup: [ord(markup)])
    assert split == ImageTokens((60, 9, 9, 124, 9, 62), ((1, 2), (4, 1)))
    expansion = expand([5, 9, 9, 6], [1], [split])
    assert expansion.ids == [5, 60, 9, 9, 124, 9, 62, 9, 6]
    assert expansion.spans == (Span(offset=2, length=2, image=0, first=0), Span(offset=5, length=1, image=0, first=2))
    assert expand([1, 2], [], []).ids == [1, 2]


def test_what_a_user_types_is_no_placeholder() -> None:
    one = image_tokens((3,), 9, lambda _: ())
    typed = [9, 1, 9, 2, 9]
    assert expand(typed, [], []).spans == ()
    expansion = expand(typed, [2], [one])
    assert expansion.ids == [9, 1, 9, 9, 9, 2, 9]
    assert expansion.spans == (Span(offset=2, length=3, image=0, first=0),)


@pytest.mark.parametrize(("positions", "count"), [([0], 0), ([], 2), ([0, 1, 2], 2)])
def test_a_mismatch_says_both_numbers(positions: list[int], count: int) -> None:
    one = image_tokens((3,), 9, lambda _: ())
    with pytest.raises(PlaceholderMismatch, match=f"{len(positions)} image placeholders for {count} images") as error:
        expand([9, 9, 9], positions, [one] * count)
    assert (error.value.placeholders, error.value.images) == (len(positions), count)


@pytest.mark.parametrize("positions", [[1, 1], [2, 1], [0, 3], [-1, 0]])
def test_positions_out_of_order_are_a_broken_promise(positions: list[int]) -> None:
    one = image_tokens((3,), 9, lambda _: ())
    with pytest.raises(AssertionError, match="out of order"):
        expand([9, 9, 9], positions, [one, one])
