"""Continuous batching: which tokens of which sequences the next step computes, and what its result means.

Owned by `server/engine.py`, called from its loop only, engine process. `plan` and `commit` alternate, unless steps may
be in flight together (`flight.py`); `add` and `abort` may come between. No phases: a sequence has known tokens and
computed tokens, a step closes part of the gap, and a sequence whose last known token is computed samples the next one.
"""

from array import array
from bisect import insort
from dataclasses import replace
from functools import partial
from math import inf

from scheduler import policy
from scheduler.admission import awaits_prefix, refuse_overload, refuse_what_never_fits
from scheduler.config import SchedulerConfig
from scheduler.drafts import make_speculation
from scheduler.encoder_cache import NO_ENCODER, EncoderLimits
from scheduler.flight import Flight
from scheduler.images import ImagePlanner
from scheduler.invariants import check_queues
from scheduler.kv_blocks import make_blocks
from scheduler.masks import TokenMasks
from scheduler.outcome import failure, logprob_at, pooled_event, take_tokens, token_event, whereabouts
from scheduler.plan import StepPlan, StepResult, ints
from scheduler.plan_builder import PlanBuilder
from scheduler.pooling import take_sums
from scheduler.request import FinishReason, Request, TokenEvent
from scheduler.sampling_rows import SampledRows
from scheduler.sequence import Sequence, Status
from scheduler.speculation import ANY_STEP, Drafter, Speculation, StepCost
from scheduler.stats import Counters, SchedulerStats


class Scheduler:
    """Schedules sequences on `num_blocks` KV blocks for a model of at most `max_model_len` tokens, and their images
    within the limits of `encoder`. `masks` knows the grammars of those that have one. `has_states` of a model that goes
    through a text with a state. `drafter` is one for tests, in place of the configured one."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        encoder: EncoderLimits = NO_ENCODER,
        masks: TokenMasks | None = None,
        step_cost: StepCost = ANY_STEP,
        steps_in_flight: int = 1,
        drafter: Drafter | None = None,
        has_states: bool = False,
    ) -> None:
        self._config, self._max_model_len = config, max_model_len
        self._max_total = min(max_model_len, num_blocks * config.block_size)
        self._kv = make_blocks(config, num_blocks, has_states=has_states)
        self._images = ImagePlanner(encoder)
        self._live: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._sampled = SampledRows(masks)
        self._speculation = Speculation(drafter) if drafter else make_speculation(config, step_cost, masks)
        self._new_step = partial(PlanBuilder, config.block_size, self._sampled, self._images.slot, self._kv.states)
        self._flight = Flight(steps_in_flight)
        assert steps_in_flight == 1 or not self._speculation.has_steps, "drafts follow from the step before"
        self._next_arrival = self._live_prompt_tokens = 0
        self._earliest_deadline = inf
        self._events: list[TokenEvent] = []
        self._counters = Counters()

    def add(self, request: Request, now: float) -> None:
        """Accept a request. Raises NeverFits, QueueFull or PixelsMissing, and then keeps nothing of it."""
        assert request.seq_id not in self._live, f"sequence {request.seq_id} is live already"
        refuse_what_never_fits(request, self._max_model_len, self._kv.pool.num_blocks, self._config)
        refuse_overload(len(request.prompt_ids), len(self._live), self._live_prompt_tokens, self._config)
        self._images.refuse(request)
        deadline = now + self._config.request_timeout if request.deadline is None else request.deadline
        seq = Sequence(request=request, arrival=self._next_arrival, deadline=deadline, longest=self._max_total)
        if request.images.images:
            self._images.add(seq)
        self._next_arrival += 1
        self._live[request.seq_id] = seq
        self._live_prompt_tokens += seq.num_prompt
        self._earliest_deadline = min(self._earliest_deadline, deadline)
        insort(self._waiting, seq, key=policy.queue_rank)

    def abort(self, seq_id: int) -> bool:
        """End a sequence with ABORT; False if it is not live. Between plan and commit its result will be dropped."""
        if (seq := self._live.get(seq_id)) is not None:
            self._end(seq, FinishReason.ABORT)
        return seq is not None

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute, or nothing before a step in flight is committed."""
        if not self._flight.may_begin:
            return None
        self._expire(now)
        config = self._config
        decodes, prompts = policy.split_prompts(self._flight.idle(self._running))
        if (draft_step := self._speculation.draft_step(self._flight.last_step + 1, decodes, self._kv)) is not None:
            self._flight.last_step += 1
            return draft_step
        decodes, complete = self._give_room(self._flight.share(decodes))
        part = config.prefill_share if decodes else 1.0
        limit = config.max_num_batched_tokens - len(decodes)
        share = min(limit, max(1, int(part * config.max_num_batched_tokens)))
        prompts = [seq for seq in prompts if seq.status is Status.RUNNING]
        if complete:
            prompts += self._admit(prompts, share)
        ready = self._images.ready(prompts, share, int(part * config.max_encode_pixels), self._flight.may_wait)
        chunks = policy.split_share(ready, share, limit, whole_spans=self._images.limits.whole_spans)
        builder = self._new_step()
        drafts = self._speculation.drafts(decodes, sum(num_tokens for _, num_tokens in chunks), limit, self._kv)
        for seq, following in zip(decodes, drafts, strict=True):
            builder.add(seq, 1, following)
        for seq, num_tokens in chunks:
            builder.add(seq, num_tokens)
        return self._flight.begin(builder, self._images) if builder.num_tokens else None

    def plan_relief(self) -> StepPlan:
        """A step without tokens, for when memory is scarce: the runtime forgets all images and blocks that are only
        kept for those who may want them again. To be committed like any other."""
        self._images.forget_unused()
        plan = self._flight.begin(self._new_step(), self._images)
        blocks, states = self._kv.forget_cached()
        return replace(plan, free_blocks=ints(blocks), free_states=ints(states))

    def commit(self, result: StepResult, now: float) -> None:
        """Take the result of the step that was planned first, then end what is past its deadline."""
        if self._speculation.take_drafts(result):
            return
        planned, has_encoded = self._flight.end(result.step_id)
        assert len(result.token_ids) == sum(planned.num_samples), "not a token for each row"
        take_sums(planned.pooled, result.pooled)
        self._end_without_images(self._images.finish_jobs(result.failed_slots, encoded=has_encoded))
        row = score_row = 0
        for seq, num_tokens, drafts, samples, scored in planned.by_sequence():
            if seq.status is Status.RUNNING:
                if scored:
                    seq.prompt_scores += [logprob_at(result.scored, score_row + index) for index in range(scored)]
                self._advance(seq, num_tokens, drafts, result, row if samples else None)
            row += samples
            score_row += scored
        self._expire(now)

    def take_events(self) -> list[TokenEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def has_work(self) -> bool:
        """Whether a sequence is running or waiting; then `plan` gives a plan, unless it ends them all."""
        return bool(self._live)

    def stats(self) -> SchedulerStats:
        """Gauges and counters as of now."""
        speculation, pool = self._speculation.stats(), self._kv.pool
        return self._counters.stats(len(self._running), len(self._waiting), pool, self._images, speculation)

    def check_invariants(self) -> None:
        """Assert that nothing is lost, shared by mistake or in two places. O(blocks + sequences)."""
        self._kv.check(self._running)
        self._images.check(self._running, self._waiting)
        check_queues(self._running, self._waiting, self._live, self._live_prompt_tokens, self._config.max_num_seqs)

    def _give_room(self, decodes: list[Sequence]) -> tuple[list[Sequence], bool]:
        """Blocks for a token more of each, best rank first; (those that have them, whether that was easy).

        The last in rank is preempted, so it never is one that has been given a block here.
        """
        preemptions = self._counters.preemptions
        for seq in decodes:
            while seq.status is Status.RUNNING and not self._kv.grow(seq, len(seq.tokens)):
                if (last := self._flight.last_to_preempt(self._running, seq)) is None:
                    break
                self._preempt(last)
        given = [seq for seq in decodes if seq.status is Status.RUNNING and self._kv.grow(seq, len(seq.tokens))]
        return given, len(given) == len(decodes) and self._counters.preemptions == preemptions

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks; it waits at the head of its priority and computes its tokens again."""
        assert len(self._running) > 1, "the only running sequence always has the blocks that it needs"
        self._running.remove(seq)
        self._kv.release(seq)
        self._images.release(seq)
        seq.wait_again()
        insort(self._waiting, seq, key=policy.queue_rank)
        self._counters.preemptions += 1

    def _admit(self, prompts: list[Sequence], share: int) -> list[Sequence]:
        """Start waiting sequences while they can be given tokens: in order, but past those that wait for another's
        prefix, and past a bounded number of those that need more blocks than there are."""
        admitted: list[Sequence] = []
        blocked: list[Sequence] = []
        backlog = sum(seq.remaining for seq in prompts)
        for seq in self._waiting[:]:
            active = len(prompts) + len(admitted)
            if len(self._running) == self._config.max_num_seqs or (backlog >= share and active >= policy.MAX_PROMPTS):
                break
            if awaits_prefix(seq, prompts + admitted + self._flight.seqs, self._live, self._kv):
                continue
            if self._start(seq):
                admitted.append(seq)
                backlog += seq.remaining
                for other in blocked:
                    other.overtaken += 1
            else:
                blocked.append(seq)
                if seq.overtaken >= policy.MAX_OVERTAKES or len(blocked) == policy.MAX_BLOCKED:
                    break
        return admitted

    def _start(self, seq: Sequence) -> bool:
        """Move a waiting sequence to the running ones if its known tokens fit and each of those can grow by a block;
        the only one runs at once."""
        growing = sum(self._kv.blocks_for(other.max_total) > len(other.blocks) for other in self._running)
        if not self._kv.reserve(seq, spare=growing):
            return False
        if seq.prefix_hit is None:
            seq.prefix_hit = seq.num_computed
            if self._config.enable_prefix_caching and not seq.needs_every_row:
                self._counters.look_up(seq.num_prompt, seq.num_computed)
        self._images.start(seq)
        self._waiting.remove(seq)
        seq.status, seq.overtaken = Status.RUNNING, 0
        insort(self._running, seq, key=policy.rank)
        return True

    def _advance(
        self, seq: Sequence, num_tokens: int, drafts: "array[int]", result: StepResult, row: int | None
    ) -> None:
        """Account for what a step did for one sequence, whose sampled rows, if any, are the result's from `row` on."""
        seq.num_computed += num_tokens
        if seq.image_end:
            self._images.advance(seq)
        if row is None:
            self._kv.register(seq)
            if not seq.remaining:
                self._end_pooled(seq)
            return
        count, failed = take_tokens(seq, result.token_ids, row, drafts)
        if count:
            self._add_tokens(seq, count, token_event(seq, result.sampled, row, count, len(drafts)))
        if failed and seq.status is Status.RUNNING:
            self._kv.distrust(seq)
            self._end(seq, *failure(seq))

    def _add_tokens(self, seq: Sequence, count: int, event: TokenEvent) -> None:
        """The sequence has `count` new tokens, of which all but the last were drafts."""
        seq.num_computed = len(seq.tokens) - 1
        self._kv.register(seq)
        self._counters.generation_tokens += count
        if seq.num_outputs == count:
            self._counters.prompt_tokens += seq.num_prompt
        if event.num_drafts:
            self._kv.trim(seq)
            self._speculation.count(event)
        self._events.append(event)
        if event.finish_reason is not None:
            self._remove(seq)

    def _end_pooled(self, seq: Sequence) -> None:
        """The prompt is computed, and nothing follows."""
        event = pooled_event(seq)
        self._counters.prompt_tokens += seq.num_prompt
        if event.finish_reason is FinishReason.ERROR:
            self._kv.distrust(seq)
        self._events.append(event)
        self._remove(seq)

    def _end_without_images(self, failed: list[bytes]) -> None:
        """End the sequences that need images which could not be encoded; what this step computed for them is void."""
        for seq in [seq for seq in self._running if failed and self._images.needs(seq, failed)]:
            self._end(seq, FinishReason.ERROR, "an image could not be encoded")
        for key in failed:
            self._images.discard(key)

    def _end(self, seq: Sequence, reason: FinishReason, message: str = "") -> None:
        """End a sequence outside of its own token events."""
        self._events.append(TokenEvent(seq_id=seq.request.seq_id, finish_reason=reason, message=message))
        self._remove(seq)

    def _remove(self, seq: Sequence) -> None:
        """Forget a sequence and free all that it holds."""
        (self._running if seq.status is Status.RUNNING else self._waiting).remove(seq)
        self._kv.release(seq)
        self._images.remove(seq)
        self._speculation.finish(seq)
        seq.status = Status.FINISHED
        self._live_prompt_tokens -= seq.num_prompt
        del self._live[seq.request.seq_id]

    def _expire(self, now: float) -> None:
        """End what is past its deadline. O(1) while nothing can be."""
        if now < self._earliest_deadline:
            return
        for seq in list(self._live.values()):
            if now >= seq.deadline:
                self._end(seq, FinishReason.TIMEOUT, f"the request's deadline passed {whereabouts(seq)}")
        self._earliest_deadline = min((seq.deadline for seq in self._live.values()), default=inf)
