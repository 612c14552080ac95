"""What is kept of responses: within limits, of each tenant, the oldest first to go."""

from typing import Any

import pytest

from server.errors import BadRequest, NotFound, Overloaded
from server.responses.store import ResponseStore, Stored

ANN, BOB = b"ann", b"bob"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_store(clock: Clock | None = None, **limits: Any) -> ResponseStore:
    return ResponseStore(**{"max_count": 3, "max_bytes": 1000, "seconds": 10.0} | limits, clock=clock or Clock())


def put(store: ResponseStore, name: str, tenant: bytes = ANN, status: str = "completed", size: int = 0) -> Stored:
    return store.add(tenant, {"id": name, "status": status}, [{"text": "x" * size}])


def kept(store: ResponseStore, *names: str, tenant: bytes = ANN) -> str:
    found = ""
    for name in names:
        try:
            found += store.get(tenant, name).document["id"]
        except NotFound:
            continue
    return found


def test_the_oldest_make_room_by_number() -> None:
    store = make_store()
    for name in "abcd":
        put(store, name)
    put(store, "z", tenant=BOB)
    assert kept(store, *"abcdz") == "bcd"
    assert kept(store, *"abcdz", tenant=BOB) == "z"


def test_the_oldest_make_room_by_bytes() -> None:
    store = make_store()
    for name in "ab":
        put(store, name, size=400)
    assert kept(store, *"ab") == "ab"
    put(store, "c", size=400)
    assert kept(store, *"abc") == "bc"


def test_what_is_too_large_is_refused() -> None:
    store = make_store()
    overhead = len('[{"text":""}]')
    put(store, "a", size=1000 - overhead)
    with pytest.raises(BadRequest, match="1001 bytes"):
        put(store, "b", size=1001 - overhead)


def test_what_is_unfinished_stays() -> None:
    clock = Clock()
    store = make_store(clock)
    for name in "abc":
        put(store, name, status="in_progress")
    clock.now = 11.0
    with pytest.raises(Overloaded):
        put(store, "d")
    with pytest.raises(BadRequest):
        store.delete(ANN, "a")
    running = store.get(ANN, "b")
    store.update(ANN, running, {"id": "b", "status": "completed"})
    put(store, "d")
    assert kept(store, *"abcd") == "acd"


def test_a_response_grows_within_the_limit() -> None:
    store = make_store()
    put(store, "a", size=400)
    growing = put(store, "b", status="in_progress")
    store.update(ANN, growing, {"id": "b", "status": "completed", "output": "x" * 700})
    assert kept(store, *"ab") == "b"
    store.update(ANN, growing, {"id": "b", "status": "completed", "output": "x" * 1700})
    assert kept(store, *"ab") == ""
    put(store, "c", size=900)
    assert kept(store, "c") == "c"


def test_time_passes() -> None:
    clock = Clock()
    store = make_store(clock)
    put(store, "a")
    clock.now = 10.0
    assert kept(store, "a") == "a"
    clock.now = 10.1
    assert kept(store, "a") == ""


def test_while_memory_is_scarce_the_older_half_goes_whoever_has_it() -> None:
    clock = Clock()
    store = make_store(clock, max_count=4)
    for name, tenant, status in (
        ("a", ANN, "completed"),
        ("b", BOB, "completed"),
        ("c", ANN, "in_progress"),
        ("d", ANN, "completed"),
        ("e", BOB, "completed"),
        ("f", BOB, "incomplete"),
    ):
        put(store, name, tenant, status, size=200)
        clock.now += 1.0
    store.relieve()
    assert kept(store, *"abcdef") + kept(store, *"abcdef", tenant=BOB) == "cef"
    put(store, "g", size=700)
    assert kept(store, *"cg") == "cg", "the bytes of what went are counted no more"
    for _ in range(3):
        store.relieve()
    assert kept(store, *"abcdefg") + kept(store, *"abcdefg", tenant=BOB) == "c"


def test_what_is_gone_may_be_discarded_and_updated() -> None:
    store = make_store()
    gone = put(store, "a")
    store.delete(ANN, "a")
    store.discard(ANN, "a")
    store.discard(BOB, "a")
    store.update(ANN, gone, {"id": "a", "status": "completed"})
    assert kept(store, "a") == ""
    with pytest.raises(NotFound):
        store.delete(ANN, "a")
