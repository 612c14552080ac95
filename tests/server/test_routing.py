"""Which engine a request goes to: who knows the prompt's beginning, unless it has much more to do than another."""

from array import array

import pytest

from scheduler.request import PromptImages, SamplingParams, Span
from server.generation import GenerationRequest
from server.routing import BLOCK_TOKENS, MAX_PROMPT_BLOCKS, SLACK_TOKENS, Router, prompt_blocks
from tests.server.test_wire import BLUE, RED, image

IDLE = {0: 0, 1: 0, 2: 0}


def asks(*tokens: int, salt: bytes = b"", images: PromptImages | None = None) -> GenerationRequest:
    """A prompt with a block of each of the tokens."""
    ids = array("i", [token for token in tokens for _ in range(BLOCK_TOKENS)])
    request = GenerationRequest(prompt_ids=ids, sampling=SamplingParams(max_tokens=1), cache_salt=salt)
    return request if images is None else GenerationRequest(prompt_ids=ids, sampling=request.sampling, images=images)


def shows(key: bytes, offset: int) -> PromptImages:
    return PromptImages(images=(image(key),), spans=(Span(offset, 4, 0, 0),))


def shared(first: GenerationRequest, second: GenerationRequest) -> int:
    """Blocks with which both begin, as far as can be told."""
    pairs = zip(prompt_blocks(first), prompt_blocks(second), strict=False)
    return [one == other for one, other in [*pairs, (b"", b"x")]].index(False)


def test_keys_stand_for_all_that_comes_before() -> None:
    assert shared(asks(1, 2, 3), asks(1, 2, 4)) == 2
    assert shared(asks(1, 2, 3), asks(2, 2, 3)) == 0
    assert shared(asks(1, 2), asks(1, 2, salt=b"other")) == 0
    seen = asks(1, 2, 3, images=shows(RED, BLOCK_TOKENS))
    assert shared(seen, asks(1, 2, 3, images=shows(RED, BLOCK_TOKENS))) == 3
    assert shared(seen, asks(1, 2, 3, images=shows(BLUE, BLOCK_TOKENS))) == 1
    assert shared(seen, asks(1, 2, 3, images=shows(RED, BLOCK_TOKENS + 1))) == 1


def test_an_adapter_of_images_parts_their_prompts_from_others_as_in_the_prefix_cache() -> None:
    text, seen = asks(1, 2), asks(1, 2, images=shows(RED, BLOCK_TOKENS))
    assert shared(text, seen) == 1
    keys, others = (prompt_blocks(one, adapts_images=True) for one in (text, seen))
    assert keys == prompt_blocks(text)
    assert not {*others} & {*keys, *prompt_blocks(seen)}


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [(BLOCK_TOKENS - 1, 0), (BLOCK_TOKENS, 1), (BLOCK_TOKENS * (MAX_PROMPT_BLOCKS + 1), MAX_PROMPT_BLOCKS)],
)
def test_only_whole_blocks_and_no_more_than_can_be_remembered(tokens: int, blocks: int) -> None:
    request = GenerationRequest(prompt_ids=array("i", [5]) * tokens, sampling=SamplingParams(max_tokens=1))
    assert len(prompt_blocks(request)) == blocks


def test_the_last_one_that_was_given_the_longest_beginning() -> None:
    router = Router()
    router.gave(prompt_blocks(asks(1, 2, 3, 4)), 1)
    router.gave(prompt_blocks(asks(1, 2)), 2)
    assert router.choose(prompt_blocks(asks(1, 2, 3, 4, 5)), IDLE) == 1
    assert router.choose(prompt_blocks(asks(1, 2, 6)), IDLE) == 2
    router.gave(prompt_blocks(asks(1, 2, 3)), 0)
    assert router.choose(prompt_blocks(asks(1, 2, 3)), IDLE) == 0
    assert router.choose(prompt_blocks(asks(1, 2, 3, 4)), IDLE) == 1
    assert router.choose(prompt_blocks(asks(7, 2, 3, 4)), {0: 9, 1: 8, 2: 7}) == 2, "nobody knows it"


def test_a_small_part_of_the_prompt_is_no_claim() -> None:
    router = Router()
    router.gave(prompt_blocks(asks(1)), 1)
    assert router.choose(prompt_blocks(asks(1, 2)), IDLE) == 1
    assert router.choose(prompt_blocks(asks(1, 2, 3)), IDLE) == 0


@pytest.mark.parametrize(
    ("least", "load", "chosen"),
    [
        (0, SLACK_TOKENS, 1),
        (0, SLACK_TOKENS + 1, 0),
        (4 * SLACK_TOKENS, 6 * SLACK_TOKENS, 1),
        (4 * SLACK_TOKENS, 6 * SLACK_TOKENS + 1, 0),
    ],
)
def test_much_more_load_takes_the_claim_away(least: int, load: int, chosen: int) -> None:
    router = Router()
    router.gave(prompt_blocks(asks(1, 2)), 1)
    assert router.choose(prompt_blocks(asks(1, 2)), {0: least, 1: load}) == chosen


def test_what_a_lost_engine_was_given_is_nothing() -> None:
    """The next longest beginning counts, which another one knows."""
    router = Router()
    router.gave(prompt_blocks(asks(1, 2, 3, 4)), 1)
    router.gave(prompt_blocks(asks(1, 2)), 2)
    assert router.choose(prompt_blocks(asks(1, 2, 3, 4)), {0: 0, 2: 5}) == 2


def test_the_table_is_bounded() -> None:
    """What was given last is remembered, whenever it was given first."""
    router = Router(max_blocks=4)
    for tokens in ((1, 2), (3, 4), (1, 2), (5, 6)):
        router.gave(prompt_blocks(asks(*tokens)), 1)
    assert len(router) == 4
    assert [router.choose(prompt_blocks(asks(*tokens)), IDLE) for tokens in ((1, 2), (3, 4), (5, 6))] == [1, 0, 1]
