"""A sequence's tokens do not depend on what else the engine does: neighbours, chunks, cache hits, preemption, or on how
many engines it takes.

Bit for bit, with the compiled kernels, log-probabilities included. Each test compares with every request run alone.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.ops import load_ops, set_threads
from scheduler.config import SchedulerConfig
from scheduler.plan import ints
from scheduler.request import Request, SamplingParams
from server.embedded import embedded_path
from tests.checkpoints import HYBRID, make_checkpoint
from tests.model_runtime.driver import Outcome, Session

NUM_PROMPTS = 50
LENGTHS = (2, 3, 4, 5, 6, 8, 9, 11, 12, 70)
"""Of prompts for the real model, which is slow enough to be spared."""

BULLY = 10_000
"""seq_id of the sequence that takes other sequences' blocks."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, requests with 50 prompts, and what each gives alone."""

    model: LoadedModel
    requests: list[Request]
    alone: dict[int, Outcome]
    neighbours: list[Request]
    kv_type: torch.dtype

    def session(self, config: SchedulerConfig, num_blocks: int) -> Session:
        """An engine with nothing in its cache."""
        return Session(self.model, config, num_blocks, self.kv_type)


def load(path: Path) -> LoadedModel:
    device = torch.device("cpu")
    return load_model(path, load_ops(device, "auto"), device, lambda fraction: None)


def sampled(index: int, max_tokens: int) -> SamplingParams:
    """Some sampling that differs from prompt to prompt."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=(0.7, 1.0, 1.3)[index % 3],
        top_p=(1.0, 0.9)[index % 2],
        top_k=(0, 0, 50, 5)[index % 4],
        min_p=(0.0, 0.0, 0.05)[index % 3],
        seed=index * 7919 + 1,
        presence_penalty=(0.0, 0.5)[index // 2 % 2],
        frequency_penalty=(0.0, 0.25)[index // 3 % 2],
        repetition_penalty=(1.0, 1.2)[index // 4 % 2],
        logit_bias=((7, 1.5), (9, -3.0)) if index % 5 == 0 else (),
        logprobs=2,
    )


def greedy(index: int, max_tokens: int) -> SamplingParams:
    """The most likely tokens; log-probabilities of some prompts, too."""
    prompt_logprobs = 1 if index % 10 == 0 else -1
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2, prompt_logprobs=prompt_logprobs)


def make_requests(prompts: list[list[int]], max_tokens: int) -> list[Request]:
    """Each prompt twice, with its sequence ids 2 i and 2 i + 1."""
    samplings = [(greedy(index, max_tokens), sampled(index, max_tokens)) for index in range(len(prompts))]
    return [
        Request(seq_id=2 * index + choice, prompt_ids=ints(prompt), sampling=samplings[index][choice])
        for index, prompt in enumerate(prompts)
        for choice in (0, 1)
    ]


def make_case(
    model: LoadedModel,
    lengths: Callable[[random.Random], int],
    max_tokens: int,
    *,
    both: bool,
    kv_type: torch.dtype = torch.float32,
) -> Case:
    """`both`: greedy and sampled for each prompt, else in turn."""
    generator = random.Random(model.config.family)

    def prompt() -> list[int]:
        return [generator.randrange(3, model.config.vocab_size) for _ in range(lengths(generator))]

    requests = make_requests([prompt() for _ in range(NUM_PROMPTS)], max_tokens)
    if not both:
        requests = [request for request in requests if request.seq_id % 4 in (0, 3)]
    neighbours = [
        Request(
            seq_id=5000 + index,
            prompt_ids=ints(prompt()),
            sampling=sampled(index, generator.randrange(1, 2 * max_tokens)),
        )
        for index in range(32)
    ]
    session = Session(
        model, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=4096, enable_prefix_caching=False), 16, kv_type
    )
    alone: dict[int, Outcome] = {}
    for request in requests:
        alone |= session.run([request])
    assert session.most_sequences == 1
    assert [len(outcome.token_ids) for outcome in alone.values()] == [max_tokens] * len(requests)
    return Case(model=model, requests=requests, alone=alone, neighbours=neighbours, kv_type=kv_type)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name == "smollm2":
            return make_case(load(embedded_path()), lambda generator: generator.choice(LENGTHS), 3, both=False)
        family, _, kv_type = name.partition(" ")
        overrides: dict[str, dict[str, object]] = {"llama": {}, "mistral": {"sliding_window": 8}, "qwen3_next": HYBRID}
        folder = tmp_path_factory.mktemp(name)
        make_checkpoint(folder, family, overrides[family])
        return make_case(
            load(folder),
            lambda generator: generator.randrange(1, 100),
            12,
            both=name in ("llama", "mistral"),
            kv_type=torch.int8 if kv_type else torch.float32,
        )

    def get(name: str) -> Case:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The threads' waiting for each other would make these small steps slow on a busy machine."""
    before = torch.get_num_threads()
    set_threads(1)
    yield
    set_threads(before)


MODELS = ("llama", "mistral", "llama int8", "qwen3_next", pytest.param("smollm2", marks=pytest.mark.model))


def assert_as_alone(case: Case, requests: list[Request], outcomes: dict[int, Outcome]) -> None:
    for request in requests:
        assert outcomes[request.seq_id] == case.alone[request.seq_id], f"sequence {request.seq_id}"


def thinned(case: Case, name: str) -> list[Request]:
    """Every sixth request of the large model, for tests that take a step for each few tokens of it."""
    return case.requests[::6] if name == "smollm2" else case.requests


def shuffled(requests: list[Request], seed: int) -> list[Request]:
    requests = requests[:]
    random.Random(seed).shuffle(requests)
    return requests


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("chunk", "sequences", "threads"), [(7, 7, 1), (64, 33, 2), (4096, 33, 2)])
def test_among_neighbours_in_chunks(
    cases: Callable[[str], Case], name: str, chunk: int, sequences: int, threads: int
) -> None:
    """In random order, up to 32 others beside each, prompts in chunks of up to 7, 64 or whole, 1 thread or 2."""
    case = cases(name)
    set_threads(threads)
    config = SchedulerConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=chunk,
        prefill_share=1.0,
        enable_prefix_caching=False,
        max_queued_requests=1000,
    )
    session = case.session(config, 33 * 8)
    requests = thinned(case, name) if chunk == 7 else case.requests
    outcomes = session.run(shuffled(requests + case.neighbours[: sequences + 1], chunk))
    assert_as_alone(case, requests, outcomes)
    longest = max(len(request.prompt_ids) for request in case.requests)
    assert session.largest_chunk == longest if chunk > longest else chunk // 2 < session.largest_chunk <= chunk
    assert session.most_sequences > sequences // 2
    assert session.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("name", MODELS)
def test_cold_and_warm_prefix_cache(cases: Callable[[str], Case], name: str) -> None:
    """Twice over one cache; the second time all full blocks of the prompts are there."""
    case = cases(name)
    config = SchedulerConfig(max_num_seqs=33, block_size=4, max_queued_requests=1000, max_state_checkpoints=100)
    session = case.session(config, sum(len(request.prompt_ids) // 4 + 8 for request in case.requests))
    assert_as_alone(case, case.requests, session.run(shuffled(case.requests, 1)))
    cold_hits = session.scheduler.stats().prefix_hits
    assert_as_alone(case, case.requests, session.run(shuffled(case.requests, 2)))
    cacheable = [request for request in case.requests if request.sampling.prompt_logprobs < 0]
    expected = sum((len(request.prompt_ids) - 1) // 4 * 4 for request in cacheable)
    assert session.scheduler.stats().prefix_hits - cold_hits == expected > 0


@pytest.mark.parametrize("name", MODELS)
def test_after_preemption(cases: Callable[[str], Case], name: str) -> None:
    """Each in a pool that just holds it, beside a sequence of higher priority that takes its blocks half-way."""
    case = cases(name)
    config = SchedulerConfig(max_num_seqs=2, block_size=1, max_queued_requests=1000)
    for request in thinned(case, name):
        tokens = request.sampling.max_tokens
        bully = Request(
            seq_id=BULLY, prompt_ids=ints([5]), sampling=SamplingParams(max_tokens=tokens + 1), cache_salt=b"bully"
        )
        session = case.session(config, len(request.prompt_ids) + tokens + 1)
        outcome = session.run([bully, replace(request, priority=1)])[request.seq_id]
        assert session.scheduler.stats().preemptions >= 1
        assert outcome == case.alone[request.seq_id]


@pytest.mark.parametrize("name", MODELS)
def test_another_engine_goes_on(cases: Callable[[str], Case], name: str) -> None:
    """With the tokens that a lost one has told, from none to all but one: what follows is what would have followed."""
    case = cases(name)
    requests = thinned(case, name)
    generator = random.Random(11)
    told = {request.seq_id: generator.randrange(len(case.alone[request.seq_id].token_ids)) for request in requests}
    replays = [
        replace(request, output_ids=ints(case.alone[request.seq_id].token_ids[: told[request.seq_id]]))
        for request in requests
    ]
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_queued_requests=1000)
    session = case.session(config, 33 * 8)
    outcomes = session.run(replays)
    for request in requests:
        whole, rest, count = case.alone[request.seq_id], outcomes[request.seq_id], told[request.seq_id]
        assert (rest.token_ids, rest.logprobs) == (whole.token_ids[count:], whole.logprobs[count:])
        assert rest.finish_reason == whole.finish_reason
        assert rest.prompt_logprobs == ([] if count else whole.prompt_logprobs)
    assert set(told.values()) == set(range(max(told.values()) + 1)), "every place of a cut"
