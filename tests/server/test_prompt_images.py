"""Images stand where the template puts them, whatever users type; counts, spans, positions and limits are right."""

import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.weights.errors import CheckpointError
from scheduler.request import NO_IMAGES, Span
from server.errors import BadRequest
from server.images import PreparedImage
from server.prompt.build import PromptBuilder
from server.prompt.images import ChatPrompt, ImageMarkup
from tests import vlm_templates as templates
from tests.server.image_fakes import FAMILIES, LENGTH, build, family, ids_of, image_part, prepared
from vision.placeholders import Tiles

Message = dict[str, object]


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, object]) -> Message:
    return {"role": "user", "content": list(parts)}


WIDE, TALL = prepared(28, 56), prepared(56, 28)
TILED = prepared(28, 28, rows=1, cols=2)
TWO_IMAGES = [user(text_part("a"), image_part(), text_part("b"), image_part(), text_part("c"))]
ENDS_ANSWERS = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
)
CHATML_END = "<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"

EXPECTED = {
    "llava": ((WIDE, TALL), "USER: <image><image><image>\n<image><image><image>\na b c ASSISTANT:"),
    "idefics3": (
        (TILED, WIDE),
        "<|im_start|>User: a<fake_token_around_image><row_1_col_1><image><image>"
        "<fake_token_around_image><row_1_col_2><image><image>\n\n<fake_token_around_image><global-img><image><image>"
        "<fake_token_around_image>b<fake_token_around_image><global-img><image><image><fake_token_around_image>c"
        "<end_of_utterance>\nAssistant:",
    ),
    "internvl": (
        (WIDE, TILED),
        f"<|im_start|>user\na<img>{'<IMG_CONTEXT>' * 3}</img>\nb<img>{'<IMG_CONTEXT>' * 9}</img>\nc{CHATML_END}",
    ),
    "gemma3": (
        (WIDE, TALL),
        "<start_of_turn>user\na\n\n<start_of_image>{0}<end_of_image>\n\nb\n\n<start_of_image>{0}<end_of_image>\n\nc"
        "<end_of_turn>\n<start_of_turn>model\n".format("<image_soft_token>" * 3),
    ),
    "qwen2_vl": (
        (WIDE, prepared(56, 56)),
        f"{SYSTEM}<|im_start|>user\na<|vision_start|>{'<|image_pad|>' * 2}<|vision_end|>b<|vision_start|>"
        f"{'<|image_pad|>' * 4}<|vision_end|>c{CHATML_END}",
    ),
    "pixtral": (
        (prepared(32, 48), prepared(16, 16)),
        "[INST]a[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]b[IMG][IMG_END]c[/INST]",
    ),
    "strings": (
        (WIDE, TALL),
        f"<|im_start|>user\n<image><image><image>\n<image><image><image>\na\nb\nc{CHATML_END}",
    ),
}


def positions_of_images(prompt: ChatPrompt) -> list[int]:
    return [place for span in prompt.images.spans for place in range(span.offset, span.offset + span.length)]


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_and_images_interleave(name: str) -> None:
    images, text = EXPECTED[name]
    prompt = build(name, TWO_IMAGES, images)
    assert prompt.ids == ids_of(name, text)
    token = FAMILIES[name][1].image_token_id
    assert positions_of_images(prompt) == [place for place, id in enumerate(prompt.ids) if id == token]
    for index, (image, source) in enumerate(zip(prompt.images.images, images, strict=True)):
        runs = [span for span in prompt.images.spans if span.image == index]
        assert [span.first for span in runs] == [0, *itertools.accumulate(span.length for span in runs)][:-1]
        assert image.num_embeddings == sum(span.length for span in runs) > 0
        assert (image.key, image.pixels, image.num_pixels) == (source.key, source.pixels, source.pixels.num_pixels)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_a_user_types_is_text(name: str, count: int) -> None:
    """Every special token of the family, whole and in pieces that the neighbours could complete."""
    tokenizer = FAMILIES[name][0]
    literals = sorted(tokenizer.special_literals)
    texts = ["".join(literals), literals[0][:-1], " ".join(literals), literals[-1][1:]]
    images = [WIDE, TALL][:count]
    pictures = [image_part() for _ in images]

    def conversation(words: Sequence[str]) -> list[Message]:
        parts = [text_part(word) for word in words]
        return [user(*itertools.chain(*itertools.zip_longest(parts, pictures, fillvalue=text_part("|"))))]

    typed = build(name, conversation(texts), images)
    plain = build(name, conversation(["w", "x", "y", "z"]), images)

    def specials(prompt: ChatPrompt) -> list[int]:
        return [id for id in prompt.ids if tokenizer.is_special(id)]

    assert specials(typed) == specials(plain)
    assert [span[1:] for span in typed.images.spans] == [span[1:] for span in plain.images.spans]
    token = FAMILIES[name][1].image_token_id
    assert positions_of_images(typed) == [place for place, id in enumerate(typed.ids) if id == token]
    shown = tokenizer.decode(typed.ids, skip_special_tokens=True)
    assert all(text in shown for text in texts)


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_that_complete_each_other(name: str) -> None:
    tokenizer = FAMILIES[name][0]

    def specials(*words: str) -> list[int]:
        prompt = build(name, [user(*map(text_part, words), image_part())], [WIDE])
        return [id for id in prompt.ids if tokenizer.is_special(id)]

    for literal in sorted(tokenizer.special_literals):
        for cut in (1, len(literal) // 2, len(literal) - 1):
            assert specials(literal[:cut], literal[cut:]) == specials("x", "y")


def pieces_of(literals: list[str]) -> st.SearchStrategy[str]:
    """Beginnings, middles and ends of special tokens in any case, and what might hide them."""
    cut = st.tuples(st.sampled_from(literals), st.integers(0, 30), st.integers(0, 30))
    part = cut.map(lambda drawn: drawn[0][min(drawn[1:]) : max(drawn[1:])])
    other = st.sampled_from([*literals, *map(str.upper, literals), " ", "\n", "\ufdd0", "\ufdd1", "\\ufdd1", "x"])
    return st.lists(part | other, min_size=1, max_size=4).map("".join)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_between_images_completes_a_token(name: str) -> None:
    tokenizer, preprocessor = FAMILIES[name]
    kinds = st.lists(pieces_of(tokenizer.special_literals) | st.none(), min_size=1, max_size=5)

    @settings(max_examples=25, deadline=None)
    @given(kinds, pieces_of(tokenizer.special_literals))
    def check(parts: list[str | None], reply: str) -> None:
        images = [WIDE] * parts.count(None)

        def prompt(spell: Callable[[str], str]) -> ChatPrompt:
            content = [image_part() if part is None else text_part(spell(part)) for part in parts]
            answer: Message = {"role": "assistant", "content": spell(reply)}
            return build(name, [user(*content), answer, user(text_part(spell(reply)))], images)

        typed, plain = prompt(str), prompt(lambda _: "w")
        specials = [[id for id in each.ids if tokenizer.is_special(id)] for each in (typed, plain)]
        assert specials[0] == specials[1]
        token = preprocessor.image_token_id
        assert positions_of_images(typed) == [place for place, id in enumerate(typed.ids) if id == token]

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_text_alone_has_no_images(name: str) -> None:
    parts, string = build(name, [user(text_part("hello"))]), build(name, [{"role": "user", "content": "hello"}])
    assert parts.ids == string.ids
    assert parts.images is NO_IMAGES
    assert build(name, [{"role": "user", "content": []}]).ids == build(name, [{"role": "user", "content": ""}]).ids


@pytest.mark.parametrize("name", FAMILIES)
def test_images_over_several_messages_keep_their_order(name: str) -> None:
    images = (prepared(28, 28), prepared(28, 56), prepared(56, 84))
    messages = [
        user(image_part(), text_part("first")),
        {"role": "assistant", "content": "fine"},
        user(text_part("then"), image_part(), image_part()),
    ]
    prompt = build(name, messages, images)
    assert [image.key for image in prompt.images.images] == [image.key for image in images]
    assert [span.image for span in prompt.images.spans] == sorted(span.image for span in prompt.images.spans)


def test_rope_positions_of_rows_and_columns() -> None:
    """transformers' rule: text counts on, an image spans max(rows, columns), the answer goes on from there."""
    start = len(ids_of("qwen2_vl", f"{SYSTEM}<|im_start|>user\n<|vision_start|>"))
    prompt = build("qwen2_vl", [user(image_part(), text_part("x"))], [prepared(56, 84)])
    assert prompt.images.spans == (Span(start, 6, 0, 0),)
    found = np.array(prompt.images.rope_positions).reshape(-1, 3)
    assert len(found) == len(prompt.ids)
    assert found[: start + 1].tolist() == [[place] * 3 for place in range(start)] + [[start] * 3]
    assert found[start : start + 6].tolist() == [
        [start, start + row, start + col] for row in (0, 1) for col in (0, 1, 2)
    ]
    assert found[start + 6 :].tolist() == [[place - 3] * 3 for place in range(start + 6, len(prompt.ids))]
    assert prompt.images.rope_delta == -3
    assert prompt.images.rope_positions.typecode == "i"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen2_vl"])
def test_other_models_count_positions_as_ever(name: str) -> None:
    prompt = build(name, TWO_IMAGES, EXPECTED[name][0])
    assert (len(prompt.images.rope_positions), prompt.images.rope_delta) == (0, 0)


def refusal(name: str, messages: list[Message], images: Sequence[PreparedImage], length: int = LENGTH) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        build(name, messages, images, length=length)
    assert caught.value.param == "messages"
    return caught.value


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_needs_room(name: str) -> None:
    images, _ = EXPECTED[name]
    needed = len(build(name, TWO_IMAGES, images).ids)
    assert len(build(name, TWO_IMAGES, images, length=needed + 1).ids) == needed
    error = refusal(name, TWO_IMAGES, images, needed)
    assert error.code == "context_length_exceeded"
    assert error.details == {"n_prompt_tokens": needed, "n_ctx": needed}


def test_images_that_cannot_fit_are_not_even_written_out() -> None:
    error = refusal("qwen2_vl", [user(image_part(), image_part())], [prepared(28 * 99, 28 * 99)] * 2, 300)
    assert error.code == "context_length_exceeded"
    assert error.details["n_prompt_tokens"] > 2 * 99 * 99


def test_a_template_that_loses_images() -> None:
    tokenizer, preprocessor = FAMILIES["pixtral"][:2]
    with pytest.raises(BadRequest, match="1 image placeholders for 2 images") as caught:
        ImageMarkup(preprocessor, tokenizer).place(ids_of("pixtral", "a[IMG]b"), [WIDE, WIDE], LENGTH)
    assert (caught.value.code, caught.value.param) == ("image_count", "messages")


@pytest.mark.parametrize("template", [templates.QWEN, templates.ONEVISION])
@pytest.mark.parametrize("literal", ["<|im_start|>", "<|im_end|>"])
def test_a_token_that_the_template_writes_stands_for_no_image(template: str, literal: str) -> None:
    """No request with an image could ever be answered."""
    with pytest.raises(CheckpointError, match=f"says that {re.escape(literal)} stands for an image, and the chat"):
        PromptBuilder(*family(template, Tiles(per_tile=3), [literal]))


def test_nor_does_one_that_only_follows_an_answer() -> None:
    with pytest.raises(CheckpointError, match="says that </s> stands for an image, and the chat"):
        PromptBuilder(*family(ENDS_ANSWERS, Tiles(per_tile=3), ["</s>"]))


def test_images_of_a_tool_are_shown() -> None:
    """Also by templates that do not know the role."""
    messages = [user(image_part()), {"role": "tool", "tool_call_id": "1", "content": [text_part("x"), image_part()]}]
    assert [image.key for image in build("pixtral", messages, [WIDE, TALL]).images.images] == [WIDE.key, TALL.key]


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_roles_that_show_no_images(role: str) -> None:
    message: Message = {"role": role, "content": [text_part("x"), image_part()]}
    error = refusal("qwen2_vl", [user(text_part("y")), message], [WIDE])
    assert error.message == "messages[1].content[1]: only messages of role user and tool may hold images."


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_cut_off_before_the_first_image(name: str) -> None:
    """Spans and positions are those of a prompt that always began there; an image is never cut."""
    messages = [user(text_part("a b c d"), image_part(), text_part("e"), image_part())]
    whole = build(name, messages, [WIDE, TALL])
    first = whole.images.spans[0].offset
    place = 3
    cut = build(name, messages, [WIDE, TALL], keep_last=len(whole.ids) - place)
    assert cut.ids == whole.ids[place:]
    positions = np.array(whole.images.rope_positions).reshape(-1, 3)[place:]
    assert np.array_equal(
        np.array(cut.images.rope_positions).reshape(-1, 3) + (place if positions.size else 0), positions
    )
    assert [(span.offset + place, *span[1:]) for span in cut.images.spans] == list(map(tuple, whole.images.spans))
    with pytest.raises(BadRequest, match="would cut an image"):
        build(name, messages, [WIDE, TALL], keep_last=len(whole.ids) - first - 1)
