"""Runs requests through the real scheduler and runner to completion, as the engine does, without processes."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import nan

import torch

from model_runtime.caches import LayerCache, allocate_caches
from model_runtime.checkpoint import LoadedModel
from model_runtime.draft import FirstLayers, next_token_model
from model_runtime.ops import load_ops
from model_runtime.runner import DraftModel, Runner
from model_runtime.weights.table import Parameters
from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, Request, TokenLogprob
from scheduler.scheduler import Scheduler
from scheduler.speculation import Drafter
from tests.model_runtime.op_cases import fill_with_nan

MAX_STEPS = 20_000


@dataclass(kw_only=True)
class Outcome:
    """Everything that a client could see of one sequence, and nothing of how it was computed."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    pooled: bytes = b""


def _cache(model: LoadedModel, config: SchedulerConfig, num_blocks: int, kv_type: torch.dtype) -> list[LayerCache]:
    cpu = torch.device("cpu")
    kv = allocate_caches(model.config, num_blocks, config.block_size, kv_type, cpu, config.num_states)
    fill_with_nan(kv)
    return kv


class Session:
    """A scheduler and a runner over one KV pool, which starts full of NaN: what is read unwritten is seen."""

    def __init__(
        self,
        model: LoadedModel,
        config: SchedulerConfig,
        num_blocks: int,
        kv_type: torch.dtype = torch.float32,
        drafter: Drafter | None = None,
        draft: LoadedModel | None = None,
        next_token: Parameters | None = None,
    ) -> None:
        """`draft` is the draft model of the speculation method draft, `next_token` that of mtp; that of the method self
        is made here."""
        kv = _cache(model, config, num_blocks, kv_type)
        speculative, draft_model = config.speculative_config, None
        if draft is not None:
            draft_model = DraftModel(model=draft.decoder, kv=_cache(draft, config, num_blocks, kv_type))
        elif next_token is not None:
            draft_model = next_token_model(model.decoder, next_token, kv)
            fill_with_nan(draft_model.kv)
            assert draft_model.normed_SC is not None
            draft_model.normed_SC.fill_(nan)
        elif speculative is not None and speculative.method == "self":
            draft_model = DraftModel(model=FirstLayers(model.decoder, speculative.num_draft_layers), kv=kv)
        ops = load_ops(torch.device("cpu"), "auto")
        decoder = model.decoder
        self.runner = Runner(decoder, kv, config.block_size, ops, draft=draft_model, final_norm=decoder.final_norm)
        self.scheduler = Scheduler(
            config,
            num_blocks=num_blocks,
            max_model_len=model.config.max_position,
            drafter=drafter,
            has_states=model.config.delta is not None,
        )
        self.largest_chunk = 0
        """Most tokens that a sequence was given in a step."""
        self.most_sequences = 0

    def run(self, requests: Iterable[Request]) -> dict[int, Outcome]:
        """Add all, step until done, and check that nothing was left behind."""
        outcomes: dict[int, Outcome] = {}
        for request in requests:
            self.scheduler.add(request, 0.0)
            outcomes[request.seq_id] = Outcome()
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work():
                break
            self._step(outcomes)
        self.scheduler.check_invariants()
        stats = self.scheduler.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
        assert all(outcome.finish_reason is not None for outcome in outcomes.values())
        return outcomes

    def _step(self, outcomes: dict[int, Outcome]) -> None:
        plan = self.scheduler.plan(0.0)
        assert plan is not None, "sequences wait and none can run"
        self.largest_chunk = max(self.largest_chunk, *plan.query_lens)
        self.most_sequences = max(self.most_sequences, len(plan.query_lens))
        self.scheduler.commit(self.runner.run(plan), 0.0)
        for event in self.scheduler.take_events():
            outcome = outcomes[event.seq_id]
            outcome.token_ids += event.token_ids
            outcome.logprobs += event.logprobs
            outcome.prompt_logprobs += event.prompt_logprobs
            outcome.finish_reason = event.finish_reason
            outcome.pooled = event.pooled
