"""A runtime without a model, for simulation and tests: it proves that plans are right. No server process uses it.

Instead of keys and values each KV slot holds a *state*, a hash of the whole text up to its token. A state is computed
from the state before it, as found in the slots, so that a wrong, stale or overwritten block anywhere in a sequence's
table shows at once. The next token is a function of the state and of all that the plan says about sampling.

Of a model with states, each slot holds the hash of the text up to where it was left, and it must be the one that a run
of rows goes on from.

What a row adds to the state is its token, or for an image's row the image's content, the number of the embedding and
the span's place; and its M-RoPE position where that is not the position in the sequence.
"""

from array import array
from collections import Counter
from itertools import accumulate
from math import isinf

from scheduler.plan import (
    NO_STATE,
    PoolRows,
    RowLogprobs,
    SampleRows,
    StepPlan,
    StepResult,
    doubles,
    floats,
    ints,
    offsets,
)

ROOT = 1
VOCAB = 48
POOLED_MODULUS = 1009
IMAGE_TOKEN = -2
"""What stands in a prompt for an embedding; no text has it."""


def extend(state: int, row: int) -> int:
    """The state of a text with one row more."""
    return hash((state, row))


def embedding(content: bytes, index: int, start: int, end: int) -> int:
    """What the row of an image's embedding adds to the state; its span stands at start .. end - 1."""
    return hash((int.from_bytes(content), index, start, end))


def rotated(row: int, position: int, rope: tuple[int, int, int]) -> int:
    """What a row adds to the state at an M-RoPE position."""
    return row if rope == (position, position, position) else hash((row, *rope))


def logprob(state: int, token: int) -> float:
    """A made-up log-probability; exact in float32."""
    return -(hash((state, token)) % 64) / 4


def pooled(state: int) -> tuple[int, int]:
    """A row's contribution to a pooled sum: which text it ends, and that it is one row."""
    return state % POOLED_MODULUS, 1


def choose(state: int, sampling: tuple[object, ...], banned: set[int]) -> int:
    """The next token of a text: not a banned one, and another one if anything in `sampling` differs."""
    token = hash((state, *sampling)) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def sampling_of(sample: SampleRows, row: int) -> tuple[tuple[object, ...], set[int]]:
    """What `choose` needs, as the plan says it: everything that may influence a token, and the banned tokens."""
    history = sample.history_ids[sample.history_offsets[row] : sample.history_offsets[row + 1]]
    start, end = sample.bias_offsets[row], sample.bias_offsets[row + 1]
    bias = list(zip(sample.bias_ids[start:end], sample.bias_values[start:end], strict=True))
    influences = (
        sample.seed[row],
        sample.counter[row],
        sample.temperature[row],
        sample.top_k[row],
        sample.top_p[row],
        sample.min_p[row],
        sample.presence_penalty[row],
        sample.frequency_penalty[row],
        sample.repetition_penalty[row],
        tuple(history),
        sample.history_output_starts[row],
        tuple(pair for pair in bias if not isinf(pair[1])),
    )
    return influences, {token for token, value in bias if isinf(value)}


class FakeRuntime:
    """Slots of `num_blocks` blocks of `block_size` tokens, none written. With `whole_spans` no step may end inside a
    span of an image. The draft model is always right: the model itself, or a layer for multi-token prediction, which
    takes the state at a position and the token behind it for the state there."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        whole_spans: bool = False,
        next_token: bool = False,
        num_states: int = 0,
    ) -> None:
        self._states: list[int] = [0] * num_states
        self._block_size = block_size
        self._next_token: list[int] | None = [0] * (num_blocks * block_size) if next_token else None
        """Of each slot the state that the layer has made there."""
        self._whole_spans = whole_spans
        self._encoded: dict[int, tuple[bytes, int]] = {}
        """By slot: content and number of embeddings."""
        self._slots: list[int] = [0] * (num_blocks * block_size)
        self._before: dict[int, int] = {}
        """Of every state ever computed, the state that it extends."""

    @property
    def num_embeddings(self) -> int:
        """Of all images that are kept."""
        return sum(count for _, count in self._encoded.values())

    def execute(self, plan: StepPlan, failing: "tuple[int, ...]" = ()) -> StepResult:
        """Compute a step, in which the jobs for the slots `failing` fail. Raises AssertionError where the plan is
        inconsistent or the cache holds the wrong text."""
        if plan.by_draft_model and self._next_token is not None:
            return self._result(plan, self._predict(plan, self._next_token), ())
        self._encode(plan, failing)
        for block in plan.free_blocks:
            self._slots[block * self._block_size : (block + 1) * self._block_size] = [0] * self._block_size
        for slot in plan.free_states:
            self._states[slot] = 0
        tables = self._split_tables(plan)
        inputs = self._inputs(plan)
        self._check_writes(plan, tables)
        states: list[int] = []
        for table, query_len, kv_len in zip(tables, plan.query_lens, plan.kv_lens, strict=True):
            rows = inputs[len(states) : len(states) + query_len]
            states += self._compute(table, kv_len - query_len, rows)
        assert len(states) == len(plan.token_ids), "query_lens must sum to the number of tokens"
        if self._states:
            self._run(plan, states)
        return self._result(plan, states, failing)

    def _run(self, plan: StepPlan, states: list[int]) -> None:
        """Check the slots that the runs of a step read, and write those that they leave their states in."""
        runs, sequence_ends = plan.states, {*accumulate(plan.query_lens)}
        assert not plan.token_ids or runs.ends[-1] == len(states), "runs do not cover the step"
        assert sequence_ends <= {0, *runs.ends}, "a run of two sequences"
        start, written = 0, set[int]()
        for index, (end, read, write) in enumerate(zip(runs.ends, runs.reads, runs.writes, strict=True)):
            before = self._before[states[start]]
            assert read == NO_STATE or before != ROOT, "a text begins with a state"
            assert read != NO_STATE or before == ROOT, "a text goes on without a state"
            assert read == NO_STATE or self._states[read] == before, "the state of something else than the text before"
            follows = start > 0 and start not in sequence_ends and read == runs.writes[index - 1]
            assert follows or read not in written, f"slot {read} is read after another sequence wrote it"
            assert write not in written, f"slot {write} is written twice"
            self._states[write] = states[end - 1]
            written.add(write)
            start = end

    def _predict(self, plan: StepPlan, made: list[int]) -> list[int]:
        """The states of all rows: each is that of the model at its position, extended by the token behind it."""
        states: list[int] = []
        for table, query_len, kv_len in zip(self._split_tables(plan), plan.query_lens, plan.kv_lens, strict=True):
            slots = [block * self._block_size + offset for block in table for offset in range(self._block_size)]
            first = kv_len - query_len
            for position, slot in enumerate(slots[:first]):
                shares_block = (position + 1) % self._block_size  # else it depends on what follows the block
                assert not shares_block or made[slot] == self._slots[slots[position + 1]], "a row was left out"
            for slot in slots[first:kv_len]:
                made[slot] = extend(self._slots[slot], plan.token_ids[len(states)])
                states.append(made[slot])
            known = [self._slots[slot] for slot in slots[first + 1 : kv_len]]
            assert known == states[len(states) - query_len : -1], "a row has another token than the one that follows"
        for row, slot in zip(plan.sample.rows, plan.normed_slots, strict=True):
            self._slots[slot] = states[row]
        return states

    def _encode(self, plan: StepPlan, failing: tuple[int, ...]) -> None:
        for slot in plan.drop_slots:
            del self._encoded[slot]
        jobs = plan.encode
        for slot, count, pixels in zip(jobs.slots, jobs.num_embeddings, jobs.pixels, strict=True):
            assert slot not in self._encoded, f"slot {slot} is in use"
            self._encoded[slot] = (bytes(pixels.data), count)
        for slot in failing:
            del self._encoded[slot]

    def _inputs(self, plan: StepPlan) -> list[int]:
        """What each row adds to the state; 0 where an image could not be encoded."""
        inputs = plan.token_ids.tolist()
        spans = plan.images
        assert inputs.count(IMAGE_TOKEN) == sum(spans.lengths), "rows of images and spans disagree"
        if not spans.rows and not plan.rope_positions:
            return inputs
        positions = [
            position
            for query_len, kv_len in zip(plan.query_lens, plan.kv_lens, strict=True)
            for position in range(kv_len - query_len, kv_len)
        ]
        columns = (spans.rows, spans.lengths, spans.slots, spans.firsts, spans.starts, spans.ends)
        for row, length, slot, first, start, end in zip(*columns, strict=True):
            position = positions[row]
            assert start <= position < position + length <= end, f"rows from {position} on outside of their span"
            assert not self._whole_spans or position + length == end, f"a span of {end - start} is cut"
            assert plan.token_ids[row : row + length].count(IMAGE_TOKEN) == length, "a token is taken for an image"
            failed = slot not in self._encoded and slot in plan.encode.slots
            content, count = (b"", first + length) if failed else self._encoded[slot]
            assert 0 <= first < first + length <= count, f"embeddings {first}..{first + length - 1} of {count}"
            for index in range(length):
                inputs[row + index] = 0 if failed else embedding(content, first + index, start, end)
        if plan.rope_positions:
            triples = zip(*[iter(plan.rope_positions)] * 3, strict=True)
            inputs = [rotated(*row) for row in zip(inputs, positions, triples, strict=True)]
        return inputs

    def _split_tables(self, plan: StepPlan) -> "list[array[int]]":
        tables: list[array[int]] = []
        start = 0
        for kv_len in plan.kv_lens:
            end = start - (-kv_len // self._block_size)
            tables.append(plan.block_tables[start:end])
            start = end
        assert start == len(plan.block_tables), "block tables must cover kv_lens exactly"
        return tables

    def _check_writes(self, plan: StepPlan, tables: "list[array[int]]") -> None:
        """A block that is written in this step belongs to one sequence only."""
        users = Counter(block for table in tables for block in table)
        for table, query_len, kv_len in zip(tables, plan.query_lens, plan.kv_lens, strict=True):
            assert 1 <= query_len <= kv_len, f"{query_len} tokens for a sequence of {kv_len}"
            for block in table[(kv_len - query_len) // self._block_size :]:
                assert users[block] == 1, f"block {block} is written and used by another sequence"

    def _compute(self, table: "array[int]", num_cached: int, rows: list[int]) -> list[int]:
        """Write the states of `rows`, which follow `num_cached` tokens in the cache; returns them."""
        size = self._block_size
        past: list[int] = []
        for block in table[: -(-num_cached // size)]:
            past += self._slots[block * size : block * size + size]
        del past[num_cached:]
        before = [self._before.get(state, 0) for state in past]
        assert before == [ROOT, *past][:num_cached], "the cache holds something else than the sequence's beginning"
        state = past[-1] if past else ROOT
        states: list[int] = []
        for position, row in enumerate(rows, num_cached):
            following = extend(state, row)
            self._before[following] = state
            self._slots[table[position // size] * size + position % size] = following
            states.append(following)
            state = following
        return states

    def _result(self, plan: StepPlan, states: list[int], failing: tuple[int, ...]) -> StepResult:
        sample, score = plan.sample, plan.score
        chosen = ints([choose(states[row], *sampling_of(sample, index)) for index, row in enumerate(sample.rows)])
        sampled_pairs = list(zip(sample.rows, chosen, strict=True))
        scored_pairs = list(zip(score.rows, score.targets, strict=True))
        return StepResult(
            step_id=plan.step_id,
            token_ids=chosen,
            sampled=_logprobs(states, sampled_pairs, sample.top_logprobs),
            scored=_logprobs(states, scored_pairs, score.top_logprobs),
            failed_slots=ints(failing),
            pooled=_sums(states, plan.pool),
        )


def _sums(states: list[int], pool: PoolRows) -> "array[float]":
    sums = doubles()
    for index, (first, count) in enumerate(zip(pool.rows, pool.counts, strict=True)):
        before = pool.sums[pool.sum_offsets[index] : pool.sum_offsets[index + 1]] or (0.0, 0.0)
        sums.extend(map(sum, zip(before, *map(pooled, states[first : first + count]), strict=True)))
    return sums


def _logprobs(states: list[int], pairs: list[tuple[int, int]], num_tops: "array[int]") -> RowLogprobs:
    """Log-probabilities of (row, token) pairs, with tokens 0, 1, ... as alternatives."""
    top_ids, top_values, ends = ints(), floats(), offsets()
    for (row, _), num_top in zip(pairs, num_tops, strict=True):
        for token in range(num_top):
            top_ids.append(token)
            top_values.append(logprob(states[row], token))
        ends.append(len(top_ids))
    chosen = floats([logprob(states[row], token) for row, token in pairs])
    ranks = ints([token + 1 for _, token in pairs])
    return RowLogprobs(chosen=chosen, ranks=ranks, top_ids=top_ids, top_values=top_values, top_offsets=ends)
