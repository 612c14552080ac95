"""Speculation changes the time that an output takes, and nothing else: tokens and log-probabilities bit for bit.

Each request runs alone without drafts; then with drafts that are right, wrong, too long or none, alone and among
neighbours, with preemption, and with everything that changes or ends an output. Some models have layers that go through
a text with a state, which goes back behind drafts that do not hold.
"""

from dataclasses import replace
from random import Random

import pytest
import torch

from model_runtime.checkpoint import LoadedModel
from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.plan import ints
from scheduler.request import FinishReason, Request, SamplingParams
from scheduler.sequence import Sequence
from scheduler.speculation import Proposal
from tests.checkpoints import HYBRID, make_checkpoint
from tests.family_cases import make_random_model
from tests.model_runtime.driver import Outcome, Session
from tests.model_runtime.test_invariance import greedy, load, sampled

NUM_REQUESTS = 40
MAX_TOKENS = 16
ALONE = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False)
TOGETHER = SchedulerConfig(max_num_seqs=33, max_num_batched_tokens=256, block_size=4, max_queued_requests=1000)
PRESSED = replace(TOGETHER, max_num_seqs=6, block_size=1)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=6, prompt_lookup_min=1)
SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=6)


class Scripted:
    """Knows the outputs, and drafts them with some errors, whatever it costs."""

    def __init__(self, outcomes: dict[int, Outcome]) -> None:
        self._outcomes, self._random = outcomes, Random(0)

    def propose(self, seq: Sequence) -> Proposal:
        following = self._outcomes[seq.request.seq_id].token_ids[seq.num_outputs :]
        tokens = ints(following[: self._random.choice((0, 2, 5, 8))])
        tokens.extend(self._random.choices(range(3, 50), k=self._random.choice((0, 1, 2))))
        return Proposal(tokens, 1.0)

    def finish(self, seq: Sequence) -> None:
        pass


@pytest.fixture(scope="module", params=["llama", "qwen3_next", "kimi_linear"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "kimi_linear":
        make_random_model(folder, request.param, 0)
    else:
        make_checkpoint(folder, request.param, {} if request.param == "llama" else HYBRID)
    return load(folder)


def scripted(
    model: LoadedModel,
    config: SchedulerConfig,
    num_blocks: int,
    outcomes: dict[int, Outcome],
    kv_type: torch.dtype = torch.float32,
) -> Session:
    """Drafts by one who knows the outcomes. That some are configured makes slots for their states."""
    return Session(model, replace(config, speculative_config=NGRAM), num_blocks, kv_type, Scripted(outcomes))


def _prompt(random: Random, vocab: int) -> list[int]:
    """Half of them repeat themselves."""
    tokens = [random.randrange(3, vocab) for _ in range(random.randrange(2, 30))]
    return tokens * random.choice((1, 3))


def _sampling(index: int) -> SamplingParams:
    """Of every kind that the sampler and the ends of a sequence know."""
    if index % 4 == 0:
        return greedy(index, MAX_TOKENS)
    if index % 4 == 1:
        stops = tuple(range(200))
        return replace(greedy(index, MAX_TOKENS), repetition_penalty=1.2, min_tokens=5, stop_token_ids=stops)
    if index % 4 == 2:
        return replace(sampled(index, MAX_TOKENS), bad_words=((5,), (7, 9), (11, 12, 13)), eos_token_ids=(2, 3, 4))
    return sampled(index, 1 + index % MAX_TOKENS)


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[Request]:
    random = Random(1)
    return [
        Request(
            seq_id=index,
            prompt_ids=ints(_prompt(random, model.config.vocab_size)),
            sampling=_sampling(index),
            priority=index % 3,
        )
        for index in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def alone(model: LoadedModel, requests: list[Request]) -> dict[int, Outcome]:
    session, outcomes = Session(model, ALONE, 16), {}
    for request in requests:
        outcomes |= session.run([request])
    reasons = {outcome.finish_reason for outcome in outcomes.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    return outcomes


@pytest.mark.parametrize("num_blocks", [16, 33 * 30])
def test_right_and_wrong_drafts_alone_and_among_neighbours(
    model: LoadedModel, requests: list[Request], alone: dict[int, Outcome], num_blocks: int
) -> None:
    config = ALONE if num_blocks == 16 else TOGETHER
    session = scripted(model, config, num_blocks, alone)
    assert session.run(requests) == alone
    speculation = session.scheduler.stats().speculation
    accepted = speculation.accepted_tokens
    assert 50 < accepted < speculation.draft_tokens


def test_drafts_under_preemption(model: LoadedModel, requests: list[Request], alone: dict[int, Outcome]) -> None:
    session = scripted(model, PRESSED, 130, alone)
    assert session.run(requests) == alone
    stats = session.scheduler.stats()
    assert stats.preemptions > 5
    assert stats.speculation.accepted_tokens > 50


@pytest.mark.parametrize("config", [ALONE, TOGETHER], ids=["alone", "together"])
def test_ngram(model: LoadedModel, requests: list[Request], alone: dict[int, Outcome], config: SchedulerConfig) -> None:
    num_blocks = 16 if config is ALONE else 33 * 30
    session = Session(model, replace(config, speculative_config=NGRAM), num_blocks)
    assert session.run(requests) == alone
    assert config is TOGETHER or session.scheduler.stats().speculation.draft_tokens > 20


def test_suffix(model: LoadedModel, requests: list[Request], alone: dict[int, Outcome]) -> None:
    """The second time everything has been answered before."""
    session = Session(model, replace(ALONE, speculative_config=SUFFIX), 16)
    assert session.run(requests) == alone
    first = session.scheduler.stats().speculation
    assert session.run(requests) == alone
    assert session.scheduler.stats().speculation.accepted_tokens - first.accepted_tokens > 100


def test_int8_cache(model: LoadedModel, requests: list[Request]) -> None:
    """Keys and values that are rounded when they are written."""
    plain = Session(model, TOGETHER, 33 * 30, torch.int8).run(requests)
    assert scripted(model, TOGETHER, 33 * 30, plain, torch.int8).run(requests) == plain
