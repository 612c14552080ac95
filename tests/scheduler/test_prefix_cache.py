"""A hit is exactly the same beginning under the same salt."""

from array import array
from dataclasses import replace

import pytest

from scheduler.prefix_cache import CachedBlock, PrefixCache, block_key, root_key
from tests.scheduler.driving import ask, make, run, step, with_config

SHARED = list(range(50, 62))  # three full blocks of four tokens


def _content(salt: bytes, *tokens: int) -> CachedBlock:
    token_bytes = array("i", tokens).tobytes()
    return CachedBlock(block_key(root_key(salt), token_bytes), root_key(salt), token_bytes)


def test_texts_that_an_adapter_changes_have_other_keys() -> None:
    keys = {root_key(salt, adapted=adapted) for salt in (b"", b"a", b"adapted", b"root") for adapted in (False, True)}
    assert len(keys) == 8


def test_keys_depend_on_parent_tokens_and_salt() -> None:
    one = _content(b"", 1, 2, 3, 4)
    assert len(one.key) == 32
    keys = {one.key, _content(b"x", 1, 2, 3, 4).key, _content(b"", 1, 2, 3, 5).key, block_key(one.key, one.content)}
    assert len(keys) == 4


@pytest.mark.parametrize("difference", ["parent", "content"])
def test_equal_hash_is_not_believed(difference: str) -> None:
    cache = PrefixCache()
    content = _content(b"", 1, 2, 3, 4)
    cache.insert(0, content)
    assert cache.find(*content) == 0
    assert cache.find(*replace_field(content, difference)) is None


def replace_field(content: CachedBlock, name: str) -> CachedBlock:
    return content._replace(**{name: bytes(len(content[1]))})


def test_second_equal_block_is_not_known_and_forgetting_is_idempotent() -> None:
    cache = PrefixCache()
    content = _content(b"", 1, 2, 3, 4)
    cache.insert(0, content)
    cache.insert(1, content)
    assert (cache.find(*content), cache.holds(1)) == (0, False)
    cache.forget(1)
    cache.forget(0)
    cache.forget(0)
    assert cache.find(*content) is None
    cache.check()


def test_fully_cached_prompt_computes_its_last_token_in_a_block_of_its_own() -> None:
    scheduler = make()
    scheduler.add(ask(0, SHARED, max_tokens=1), 0.0)
    first = step(scheduler)
    scheduler.add(ask(1, SHARED, max_tokens=1), 0.0)
    second = step(scheduler)
    assert (second.query_lens.tolist(), second.kv_lens.tolist()) == ([4], [12])
    assert second.block_tables[:2] == first.block_tables[:2]
    assert second.block_tables[2] != first.block_tables[2]
    events = scheduler.take_events()
    assert [event.cached_tokens for event in events] == [0, 8]
    assert (scheduler.stats().prefix_queries, scheduler.stats().prefix_hits) == (24, 8)


def test_follow_up_turn_hits_generated_tokens() -> None:
    scheduler = make()
    scheduler.add(ask(0, SHARED, max_tokens=6), 0.0)
    _, events = run(scheduler)
    assert [event.token_ids for event in events] == [(7,)] * 6
    scheduler.add(ask(1, [*SHARED, *[7] * 6, 99, 99], max_tokens=1), 0.0)
    step(scheduler)
    # 12 prompt and 5 computed output tokens are 4 full blocks; the last output token was never computed.
    assert scheduler.take_events()[0].cached_tokens == 16


def test_salts_never_share() -> None:
    scheduler = make()
    scheduler.add(ask(0, SHARED, cache_salt=b"a", max_tokens=1), 0.0)
    step(scheduler)
    for seq_id, salt in ((1, b"b"), (2, b""), (3, b"a")):
        scheduler.add(ask(seq_id, SHARED, cache_salt=salt), 0.0)
    step(scheduler)
    cached = {event.seq_id: event.cached_tokens for event in scheduler.take_events()}
    assert cached == {0: 0, 1: 0, 2: 0, 3: 8}


def test_prompt_logprobs_use_no_hits() -> None:
    scheduler = make()
    scheduler.add(ask(0, SHARED, max_tokens=1), 0.0)
    step(scheduler)
    request = ask(1, SHARED)
    scheduler.add(replace(request, sampling=replace(request.sampling, prompt_logprobs=0)), 0.0)
    plan = step(scheduler)
    assert plan.query_lens.tolist() == [12]
    assert plan.score.rows.tolist() == list(range(11))
    assert plan.score.targets.tolist() == SHARED[1:]
    assert scheduler.stats().prefix_queries == 12  # the first request's only


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    scheduler = make(config=with_config(enable_prefix_caching=False))
    scheduler.add(ask(0, SHARED, max_tokens=2), 0.0)
    scheduler.add(ask(1, SHARED, max_tokens=2, leader=0), 0.0)
    plan = step(scheduler)
    assert plan.query_lens.tolist() == [12, 12]
    run(scheduler)
    stats = scheduler.stats()
    assert (stats.free_blocks, stats.cached_blocks, stats.prefix_queries) == (100, 0, 0)


def test_failed_sequence_leaves_nothing_in_the_cache() -> None:
    scheduler = make()
    scheduler.add(ask(0, SHARED), 0.0)
    step(scheduler)  # its three blocks are cached now
    step(scheduler, tokens=-1)
    assert (scheduler.stats().free_blocks, scheduler.stats().cached_blocks) == (100, 0)
    scheduler.add(ask(1, SHARED), 0.0)
    assert step(scheduler).query_lens.tolist() == [12]


def test_eviction_takes_the_end_of_the_oldest_text_first() -> None:
    scheduler = make(num_blocks=6)
    scheduler.add(ask(0, SHARED, max_tokens=1), 0.0)
    step(scheduler)
    scheduler.add(ask(1, 15, max_tokens=1), 0.0)  # four blocks: three free ones and one cached
    step(scheduler)
    scheduler.add(ask(2, [*SHARED, 1], max_tokens=1), 0.0)
    step(scheduler)
    assert [event.cached_tokens for event in scheduler.take_events()] == [0, 0, 8]
