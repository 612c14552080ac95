"""Text of a wanted number of tokens, for a tokenizer that only the server has. Used by `loadtest/workload.py`.

The words are so common that tokenizers have each of them as one token; `loadtest/probe.py` measures whether that holds.
"""

import random
from dataclasses import dataclass

_COMMON = """
the of and to in is that for was on are with as his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never
us left end along while might next sound below saw something thought both few those always looked show large often
together asked house world going want school important until form food keep children feet land side without boy once
animals life enough took sometimes four head above kind began almost live page got earth need far hand high year
mother light parts country father let night following picture being study second eyes soon times story boys since
white days ever paper hard near sentence better best across during today others however sure means knew whether
"""
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How words become tokens on one server."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0
    """Tokens that the chat template adds to one message."""

    def num_words(self, tokens: int) -> int:
        """Words of a message whose prompt is to have so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))

    def num_added_words(self, tokens: int) -> int:
        """Words that add so many tokens to a prompt."""
        return max(1, round(tokens / self.tokens_per_word))


def text(rng: random.Random, num_words: int) -> str:
    """Random words: two texts share no beginning worth caching. The first is always the same, since some words are more
    than one token where no space stands before them."""
    return " ".join((WORDS[0], *rng.choices(WORDS, k=num_words - 1)))
