"""Drafts from text that was seen before, and which drafter is configured. Used by `Scheduler`, engine process."""

from scheduler.config import SchedulerConfig
from scheduler.draft_model import DraftLimits, ModelDrafter
from scheduler.guesses import FIRST_RATES, Guesses, go_on, level_of
from scheduler.history import History
from scheduler.lookup import NOWHERE, TextIndex
from scheduler.masks import TokenMasks
from scheduler.plan import ints
from scheduler.sequence import Sequence
from scheduler.speculation import Proposal, Speculation, StepCost

SUFFIX_LEAST, SUFFIX_MOST = 2, 32
"""Tokens that a run must have to be found by `suffix`, and those that are long enough."""


class LookupDrafter:
    """The tokens at the end of a text stood before, and what followed them there is the guess.

    In the prompt or in the output it is prompt lookup (Saxena 2023); with a history, in what the same tenant's recent
    requests were answered as well, it is suffix decoding (Oliaro et al., arXiv 2411.04975).
    """

    def __init__(self, num_tokens: int, least: int, most: int, history: History | None = None) -> None:
        """Guesses `num_tokens` behind runs of `least` tokens or more; those of `most` are long enough."""
        self._num_tokens, self._least, self._most, self._history = num_tokens, least, most, history

    def propose(self, seq: Sequence) -> Proposal:
        """What followed the longest run; of equal ones that in the sequence's own text. Takes a few microseconds."""
        text, guesses, index = seq.tokens, seq.guesses, seq.text_index
        if guesses is None or index is None:
            guesses = seq.guesses = Guesses([*FIRST_RATES])
            index = seq.text_index = TextIndex(self._least, seq.image_end)
        guesses.judge(text)
        index.extend(text, len(text) - 1)
        tail = text[-self._most :]
        place, length = index.find(text, tail)
        tokens = ints() if place == NOWHERE else go_on(text, place, self._num_tokens)
        if self._history is not None:
            for outputs in self._history.of(seq.request.cache_salt):
                place, longer = outputs.index.find(outputs.text, tail)
                if longer > length:
                    tokens, length = outputs.following(place, self._num_tokens), longer
        guesses.tokens, guesses.position, guesses.level = tokens, len(text), level_of(length)
        return Proposal(tokens, guesses.rate)

    def finish(self, seq: Sequence) -> None:
        """What was answered may be answered again."""
        if self._history is not None and seq.num_outputs > 0:
            self._history.add(seq.request.cache_salt, seq.tokens[seq.num_prompt :])


def make_speculation(config: SchedulerConfig, cost: StepCost, masks: TokenMasks | None) -> Speculation:
    """As configured."""
    speculative = config.speculative_config
    if speculative is None:
        return Speculation(None)
    num_tokens = speculative.num_speculative_tokens
    if speculative.method == "ngram":
        found = LookupDrafter(num_tokens, speculative.lookup_min, speculative.lookup_max)
        return Speculation(found, None, cost.fixed_rows)
    if speculative.method == "suffix":
        found = LookupDrafter(num_tokens, SUFFIX_LEAST, SUFFIX_MOST, History(SUFFIX_LEAST))
        return Speculation(found, None, cost.fixed_rows)
    model = DraftLimits(
        num_tokens=num_tokens,
        cost=cost,
        own_cache=speculative.method != "self",
        lag=int(speculative.method == "mtp"),
        block_size=config.block_size,
        max_tokens=config.max_num_batched_tokens,
    )
    drafter = ModelDrafter(model, masks)
    return Speculation(drafter, drafter, cost.fixed_rows)
