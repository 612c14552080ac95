"""Where in a text the tokens at its end stood before. Used by `drafts.py`, engine process.

Hash chains, as in compressors of the LZ77 family (RFC 1951, section 4): a table finds the newest place at which a run
of `least` tokens ends, a list leads from each place to the one before it with the same run. The longest match among the
newest few is found in a few microseconds, whatever the length of the text.
"""

from array import array

from scheduler.plan import ints

MAX_CANDIDATES = 16
"""Places that are looked at for a match."""
NOWHERE = -1


class TextIndex:
    """The runs of `least` tokens of a text from `start` on. The text is the caller's, and may only grow.

    Takes some 170 bytes for each token of it.
    """

    def __init__(self, least: int, start: int = 0) -> None:
        self._least, self._start = least, start
        self._newest: dict[bytes, int] = {}
        self._earlier = ints()
        self._end = start + least

    def extend(self, text: "array[int]", end: int) -> None:
        """Take in the runs that end in text[:end]."""
        least, newest, earlier = self._least, self._newest, self._earlier
        for position in range(self._end, end + 1):
            run = text[position - least : position].tobytes()
            earlier.append(newest.get(run, NOWHERE))
            newest[run] = position
        self._end = max(self._end, end + 1)

    def find(self, text: "array[int]", tail: "array[int]") -> tuple[int, int]:
        """(Where text goes on after the longest run that ends like `tail`, the newest of those; its length), or
        (NOWHERE, 0). Runs longer than `tail` count as its length."""
        least, first = self._least, self._start + self._least
        place = self._newest.get(tail[-least:].tobytes(), NOWHERE) if len(tail) >= least else NOWHERE
        best, longest = NOWHERE, 0
        for _ in range(MAX_CANDIDATES):
            if place == NOWHERE or longest == len(tail):
                break
            length = least
            while length < min(len(tail), place - self._start) and text[place - length - 1] == tail[-length - 1]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._earlier[place - first]
        return best, longest
