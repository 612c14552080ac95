"""What a tenant was answered is remembered, within bounds, and for nobody else."""

from scheduler.history import GENERATION_TOKENS, MAX_TENANTS, History, Outputs
from scheduler.plan import ints


def _following(history: History, salt: bytes, tail: list[int], count: int = 4) -> list[list[int]]:
    found = []
    for outputs in history.of(salt):
        place, length = outputs.index.find(outputs.text, ints(tail))
        if length:
            found.append(outputs.following(place, count).tolist())
    return found


def test_outputs_are_found_and_end_where_they_ended() -> None:
    outputs = Outputs(2)
    outputs.add(ints([1, 2, 3]))
    outputs.add(ints([4, 5, 1, 2, 6, 7, 8]))
    assert outputs.index.find(outputs.text, ints([1, 2])) == (9, 2)
    assert outputs.index.find(outputs.text, ints([9, 1, 2])) == (9, 2)
    assert outputs.following(9, 2).tolist() == [6, 7]
    assert outputs.following(9, 9).tolist() == [6, 7, 8]
    assert outputs.following(3, 9).tolist() == [3]
    assert outputs.index.find(outputs.text, ints([3, 4]))[1] == 0  # a run does not reach from one output into another


def test_tenants_see_their_own_only() -> None:
    history = History(2)
    history.add(b"a", ints([1, 2, 3]))
    history.add(b"b", ints([1, 2, 4]))
    assert _following(history, b"a", [1, 2]) == [[3]]
    assert _following(history, b"b", [1, 2]) == [[4]]
    assert _following(history, b"c", [1, 2]) == []


def test_old_outputs_are_forgotten() -> None:
    history = History(2)
    history.add(b"", ints([1, 2, 3]))
    for index in range(2):
        assert _following(history, b"", [1, 2]) == [[3]]
        history.add(b"", ints([10 + index] * (GENERATION_TOKENS + 5)))  # only its end is kept
        history.add(b"", ints([7, 8, index]))
    assert _following(history, b"", [1, 2]) == []
    assert _following(history, b"", [7, 8]) == [[1], [0]]
    assert sum(len(outputs.text) for outputs in history.of(b"")) < 2 * GENERATION_TOKENS + 100


def test_tenants_that_were_not_seen_for_long_are_forgotten() -> None:
    history = History(2)
    for tenant in range(MAX_TENANTS):
        history.add(bytes([tenant]), ints([1, 2, tenant]))
    history.add(bytes([0]), ints([5, 6, 7]))
    assert [len(list(history.of(bytes([tenant])))) for tenant in range(MAX_TENANTS)] == [1] * MAX_TENANTS
    history.add(b"one more", ints([1, 2, 3]))
    assert _following(history, bytes([0]), [1, 2]) == [[0]]
    assert _following(history, bytes([1]), [1, 2]) == []
