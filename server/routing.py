"""Which engine a request goes to, where there are several. Pure; used by `server/dispatch.py`, API process.

The rule is that of SGLang's router (its policy `cache_aware`): a request goes to the engine that was last given the
longest beginning of its prompt, for there its keys and values are, if that beginning is a good part of the prompt and
the engine is not much more loaded than the least loaded one; else to the least loaded one. SGLang keeps a tree of texts
for each engine and counts requests. Here beginnings are known by the chained hashes of blocks of tokens, as in the
engine's prefix cache (cache salt, images and their adapter included), so that one entry for a block says who was last
given all up to it; and load is counted in tokens.
"""

from collections import OrderedDict
from collections.abc import Mapping

from scheduler.image_spans import span_content
from scheduler.prefix_cache import block_key, root_key
from server.engine_link import NOWHERE
from server.generation import GenerationRequest

BLOCK_TOKENS = 64
MAX_BLOCKS = 65_536
"""In the table; the oldest are forgotten first."""
MAX_PROMPT_BLOCKS = 2048
"""Of a prompt; what comes behind them does not count."""
CLAIM_SHARE = 0.5
"""Of a prompt's blocks, which an engine must have been given."""
SLACK_TOKENS = 4096
SLACK_FACTOR = 1.5
"""An engine is much more loaded than another by so many tokens and so many times. With a quarter of these tokens, chats
lost their engine whenever the others had just answered."""


def prompt_blocks(request: GenerationRequest, *, adapts_images: bool = False) -> list[bytes]:
    """A key for each whole block of the prompt, which also stands for all before it. `adapts_images` as in
    `RuntimeInfo`."""
    ids = request.prompt_ids
    key, keys = root_key(request.cache_salt, adapted=adapts_images and bool(request.images.images)), []
    for index in range(min(len(ids) // BLOCK_TOKENS, MAX_PROMPT_BLOCKS)):
        start, end = index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS
        key = block_key(key, ids[start:end].tobytes() + span_content(request.images, start, end))
        keys.append(key)
    return keys


class Router:
    """Remembers which engine was last given which beginning."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._last_given: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last_given)

    def choose(self, blocks: list[bytes], loads: Mapping[int, int]) -> int:
        """One of the engines in `loads`, which has the tokens that each has to compute."""
        least = min(loads, key=loads.__getitem__)
        most = max(loads[least] + SLACK_TOKENS, loads[least] * SLACK_FACTOR)
        for index in range(len(blocks) - 1, -1, -1):
            if index + 1 < CLAIM_SHARE * len(blocks):
                break
            engine = self._last_given.get(blocks[index], NOWHERE)
            if engine in loads:
                return engine if loads[engine] <= most else least
        return least

    def gave(self, blocks: list[bytes], engine: int) -> None:
        """A request with these went there."""
        for key in blocks:
            self._last_given[key] = engine
            self._last_given.move_to_end(key)
        while len(self._last_given) > self._max_blocks:
            self._last_given.popitem(last=False)
