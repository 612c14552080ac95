"""Drafts from text that was seen before. Used by `Scheduler` through `speculation.Drafter`, engine process."""

from scheduler.config import SpeculativeConfig
from scheduler.guesses import Guesses, go_on
from scheduler.lookup import NOWHERE, TextIndex
from scheduler.plan import ints
from scheduler.sequence import Sequence
from scheduler.speculation import NO_PROPOSAL, Drafter, Proposal


class NgramDrafter:
    """Prompt lookup (Saxena 2023): the tokens at the end of a text stood before, in the prompt or in the output, and
    what followed them there is the guess."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most, self._least = config.prompt_lookup_max, config.prompt_lookup_min
        self._num_tokens = config.num_speculative_tokens

    def propose(self, seq: Sequence) -> Proposal:
        """A few microseconds."""
        text = seq.tokens
        guesses = seq.guesses
        if guesses is None:
            guesses = seq.guesses = Guesses(TextIndex(self._least, seq.image_end))
        guesses.judge(text)
        guesses.index.extend(text, len(text) - 1)
        place, _ = guesses.index.find(text, text[-self._most :])
        guesses.tokens, guesses.position = ints(), len(text)
        if place == NOWHERE:
            return NO_PROPOSAL
        guesses.tokens = go_on(text, place, self._num_tokens)
        return Proposal(guesses.tokens, guesses.rate)

    def finish(self, seq: Sequence) -> None:
        """Nothing is kept."""


def make_drafter(config: SpeculativeConfig | None) -> Drafter | None:
    """As configured; None guesses nothing."""
    return None if config is None else NgramDrafter(config)
