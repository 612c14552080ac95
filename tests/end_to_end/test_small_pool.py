"""H39 and X06: a KV pool so small that sequences lose their blocks, and still every answer is the same."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from tests.end_to_end.conftest import Server, run_server

pytestmark = pytest.mark.model

STREAMS = 16
TOKENS = 48


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    """24 blocks of 16 tokens: room for 6 of the sequences of this test when they end."""
    arguments = ("--num-kv-blocks", "24", "--max-num-seqs", str(STREAMS), "--max-model-len", "384")
    with run_server(*arguments) as running:
        yield running


def sample(server: Server, index: int) -> list[int]:
    """All tokens of a stream with a seed (greedy for index 0)."""
    chunks = server.stream(
        "/v1/completions",
        prompt=f"{index} friends went to the mountains and",
        temperature=1.0 if index else 0,
        seed=index,
        max_tokens=TOKENS,
        ignore_eos=True,
        return_token_ids=True,
    )
    assert [choice["finish_reason"] for choice in chunks[-1]["choices"]] == ["length"]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", ())]


def test_h39_preemption_changes_no_token(server: Server, tiny: Server) -> None:
    scrapes = [tiny.metrics()]
    done = threading.Event()

    def scrape() -> None:
        while not done.wait(0.1):
            scrapes.append(tiny.metrics())

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        with ThreadPoolExecutor(STREAMS) as pool:
            with tiny.held("engine"):
                asked = [pool.submit(sample, tiny, index) for index in range(STREAMS)]
            contended = [one.result() for one in asked]
    finally:
        done.set()
        scraper.join()
    assert [len(tokens) for tokens in contended] == [TOKENS] * STREAMS
    assert tiny.metrics()["num_preemptions_total"] > 0
    with ThreadPoolExecutor(STREAMS) as pool:
        assert list(pool.map(lambda index: sample(server, index), range(STREAMS))) == contended
    tiny.wait_for(tiny.is_idle, 5, "idleness")
    assert_monotone(scrapes)


def assert_monotone(scrapes: list[dict[str, float]]) -> None:
    """X06: counters never fall."""
    assert len(scrapes) > 2
    for earlier, later in pairwise(scrapes):
        fallen = [name for name, value in earlier.items() if "_total" in name and later[name] < value]
        assert fallen == []


def test_x12_what_outgrows_the_pool_ends_with_length(tiny: Server) -> None:
    answer = tiny.post("/v1/completions", prompt=[7] * 370, max_tokens=65_535, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 384
