"""What a tenant's recent requests were answered, to look up how a text might go on. Used by `drafts.py`, engine
process.

Bounded: the newest MAX_TENANTS tenants, of each the newest outputs in two generations of less than twice
GENERATION_TOKENS. At 190 bytes a token that is at most 50 MB in all.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from scheduler.lookup import TextIndex
from scheduler.plan import ints

MAX_TENANTS = 8
GENERATION_TOKENS = 8_192
SEPARATOR = -1
"""Before each output; no token."""


class Outputs:
    """Some outputs one behind the other, each behind a SEPARATOR."""

    def __init__(self, least: int) -> None:
        self.text = ints([SEPARATOR])
        self.index = TextIndex(least)

    def add(self, output: "array[int]") -> None:
        """One more."""
        self.text.extend(output)
        self.text.append(SEPARATOR)
        self.index.extend(self.text, len(self.text))

    def following(self, place: int, count: int) -> "array[int]":
        """At most `count` tokens from text[place] on, of one output."""
        tokens = self.text[place : place + count]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


class History:
    """Recent outputs by tenant. Tenants, told apart by the cache salt, never see each other's."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._tenants: OrderedDict[bytes, list[Outputs]] = OrderedDict()

    def add(self, salt: bytes, output: "array[int]") -> None:
        """Remember an output, or its end where it is longer than a generation."""
        generations = self._tenants.setdefault(salt, [Outputs(self._least)])
        self._tenants.move_to_end(salt)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        if len(generations[0].text) >= GENERATION_TOKENS:
            generations.insert(0, Outputs(self._least))
            del generations[2:]
        generations[0].add(output[-GENERATION_TOKENS:])

    def of(self, salt: bytes) -> Iterator[Outputs]:
        """The tenant's outputs, newest first."""
        return iter(self._tenants.get(salt, ()))
