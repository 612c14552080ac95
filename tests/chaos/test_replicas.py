"""Two replicas behind one gateway: they answer as one engine does, and no stream notices that one is lost."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from scheduler.config import SchedulerConfig
from scheduler.plan import ints
from scheduler.request import Request, SamplingParams
from server.routing import BLOCK_TOKENS, SLACK_TOKENS
from server.tiny_vlm import write_tiny_vlm
from tests.chaos.kills import chaos_server
from tests.chaos.mix import Heard, image_requests, listen
from tests.chaos.test_poison import answer
from tests.end_to_end.conftest import BUFFERED_SECONDS, Server
from tests.end_to_end.test_conversation import COMPLETIONS
from tests.vlm_engine import Engine

pytestmark = pytest.mark.timeout(300)

ENGINES = ("engine of replica 0", "engine of replica 1")


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    arguments = ("--data-parallel-size", "2", "--fault-hooks", "--max-model-len", "1024")
    with chaos_server(images=True, arguments=arguments) as server:
        server.wait_for(lambda: all_there(server), 60, "readiness of both")
        yield server


def replicas(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.progress()["replicas"]
    return found


def all_there(server: Server) -> bool:
    return all(one["status"] != "no engine" for one in replicas(server))


def test_tokens_are_those_of_one_engine(pair: Server, tmp_path: Path) -> None:
    """50 prompts, greedy; both replicas had some of them. Who asks again comes to the one that knows the prompt."""
    choose = random.Random(4)
    prompts = [[choose.randrange(4, 250) for _ in range(choose.randrange(3, 200))] for _ in range(50)]
    write_tiny_vlm(tmp_path)
    sampling = SamplingParams(max_tokens=16, temperature=0.0)
    requests = [Request(seq_id=i, prompt_ids=ints(ids), sampling=sampling) for i, ids in enumerate(prompts)]
    alone = Engine(tmp_path, SchedulerConfig()).run(requests)

    def ask(ids: list[int]) -> tuple[list[int], int]:
        body = {"prompt": ids, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = pair.post(COMPLETIONS, **body)
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(16) as pool:
        with pair.held(*ENGINES):
            asked = [pool.submit(ask, prompt) for prompt in prompts]
        first = [one.result() for one in asked]
    assert [tokens for tokens, _ in first] == [alone[i].token_ids for i in range(len(prompts))]
    assert all(one["steps"] > 16 for one in replicas(pair))
    with ThreadPoolExecutor(SLACK_TOKENS // 216) as pool:
        again = list(pool.map(ask, prompts))
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
    known = [cached for ids, (_, cached) in zip(prompts, again, strict=True) if len(ids) >= BLOCK_TOKENS]
    assert len(known) > 20
    assert min(known) >= BLOCK_TOKENS - 16


def test_a_lost_replica_stops_nobody(pair: Server) -> None:
    """All streams go on before it is back, with the right text; the server is ready all the time."""
    requests = image_requests(600)
    arrivals: list[list[float]] = [[] for _ in requests]

    def stream(index: int) -> Heard:
        return listen(pair, requests[index], lambda: arrivals[index].append(time.monotonic()), 120)

    with ThreadPoolExecutor(len(requests)) as pool:
        undisturbed = list(pool.map(stream, range(len(requests))))
        for _ in range(20):
            for one in arrivals:
                one.clear()
            streams = [pool.submit(stream, index) for index in range(len(requests))]
            pair.wait_for(lambda: replicas(pair)[0]["running"] > 0, 60, "work of the first engine")
            if victims := pair.stop_at_work(ENGINES[0]):
                break
            assert [stream.result() for stream in streams] == undisturbed
        survivor = pair.children()[ENGINES[1]].pid
        killed_at = time.monotonic()
        victims[ENGINES[0]].kill()
        pair.wait_for(lambda: not all_there(pair), 10, "the loss")
        unready = 0
        while not all_there(pair):
            unready += not pair.is_ready()
            time.sleep(0.02)
            assert time.monotonic() - killed_at < 90
        back_at = time.monotonic()
        heard = [stream.result() for stream in streams]
    assert heard == undisturbed
    assert not any(one.error for one in heard)
    assert unready == 0
    for one in arrivals:
        assert one[-1] < back_at or any(killed_at + BUFFERED_SECONDS < at < back_at for at in one)
    assert pair.children()[ENGINES[1]].pid == survivor
    metrics = pair.metrics()
    assert (metrics["engine_restarts_total"], metrics["recovery_quarantines_total"]) == (1, 0)
    assert metrics["recovery_resumptions_total"] > 0


def test_poison_takes_one_replica_only(pair: Server) -> None:
    """It fails alone, and the other replica serves its own requests and new ones all the time."""
    neighbours = image_requests(100)
    pids = {name: pair.children()[name].pid for name in ENGINES}
    restarts = pair.metrics()["engine_restarts_total"]
    over = threading.Event()

    def keep_asking(undisturbed: Any) -> int:
        asked = 0
        while not over.wait(0.1) or not asked:
            assert answer(pair, *neighbours[0]) == undisturbed
            asked += 1
        return asked

    with ThreadPoolExecutor(len(neighbours) + 2) as pool:
        undisturbed = list(pool.map(lambda request: answer(pair, *request), neighbours))
        poison = {"prompt": "crash", "cache_salt": "fault:crash@commit", "max_tokens": 9, "model": pair.model}
        beside = [pool.submit(answer, pair, path, body) for path, body in neighbours]
        new = pool.submit(keep_asking, undisturbed[0])
        failed = pool.submit(pair.http.post, COMPLETIONS, json=poison).result()
        over.set()
        assert [future.result() for future in beside] == undisturbed
        assert new.result() > 0
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert pair.http.post(COMPLETIONS, json=poison).json()["error"]["code"] == "request_quarantined"
    metrics = pair.metrics()
    assert metrics["engine_restarts_total"] - restarts == 3
    assert metrics["recovery_quarantines_total"] == 1
    pair.wait_for(lambda: all_there(pair), 90, "both replicas")
    assert sum(pair.children()[name].pid == pid for name, pid in pids.items()) == 1
    pair.wait_for(pair.is_idle, 10, "idleness")
