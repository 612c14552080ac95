"""Single requests: is the same question always answered the same, however it is asked, and are ends, log-probabilities
and counts right? Over HTTP, of the server as it will be used.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx

from server.validate.asking import Answer, Body, Refused, chat, complete, complete_all, difference, post, stream
from server.validate.gate import Gate, ModelFacts, facts_of
from server.validate.known import known_answers, recorded_logprobs
from server.validate.result import Check, StageResult, checked, skipped
from server.validate.serving import LocalServer

TEXT = Path(__file__).parent.parent / "quality_text.txt"
LENGTHS = (40, 5, 300, 17, 130, 16, 64, 100)
"""Of the prompts: below, at and above the edges of blocks, and more than a step computes at once."""
SAME = "what depends on the rest of a step: an operation that is not the same in every batch, or wrong blocks"
MOST_CHARACTERS = 4000
NOTHING: Mapping[str, object] = MappingProxyType({})
SEEDED: Mapping[str, object] = MappingProxyType({"temperature": 1.0, "seed": 7})
MOST_SENT = 200_000
"""Tokens of a prompt that is to be refused; a body of a megabyte."""
ROUNDING = 1e-3
"""Of a log-probability that was computed in another way."""


class Asker:
    """The prompts, and what the model says to each when it is asked alone."""

    def __init__(self, gate: Gate, server: LocalServer) -> None:
        self.http, self.effort = server.http, gate.effort
        self.tolerance = gate.tolerance(server)
        self.model: ModelFacts = facts_of(server)
        most = self.model.max_model_len - 1
        text = TEXT.read_text(encoding="utf-8")[: min(most // 2, MOST_CHARACTERS)]
        ids = itertools.cycle(post(self.http, "/tokenize", {"prompt": text})["tokens"])
        lengths = [max(1, min(length, most - self.effort.output_tokens)) for length in LENGTHS[: self.effort.prompts]]
        self.prompts = [list(itertools.islice(ids, length)) for length in lengths]

    def body(self, prompt: Sequence[int], salt: str, more: Mapping[str, object] = NOTHING) -> Body:
        """Greedy, to the last token; a salt of its own finds nothing in the prefix cache."""
        fixed = {"model": self.model.name, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
        return {**fixed, "prompt": list(prompt), "max_tokens": self.effort.output_tokens, **more}

    def alone(self, salt: str, more: Mapping[str, object] = NOTHING) -> list[Answer]:
        """Each prompt by itself."""
        return [complete(self.http, self.body(prompt, salt, more)) for prompt in self.prompts]

    def together(self, salt: str, more: Mapping[str, object] = NOTHING) -> list[Answer]:
        """All at once."""
        return complete_all(self.http, [self.body(prompt, salt, more) for prompt in self.prompts])

    def same(self, name: str, before: Sequence[Answer], after: Sequence[Answer]) -> Check:
        """Whether answers are what they were."""
        found = (difference(one, other, self.tolerance) for one, other in zip(before, after, strict=True))
        problems = [
            f"prompt of {len(prompt)} tokens: {problem}"
            for prompt, problem in zip(self.prompts, found, strict=True)
            if problem
        ]
        return checked(name, "; ".join(problems[:3]), SAME, f"{len(before) - len(problems)} of {len(before)} equal")


def run(gate: Gate) -> StageResult:
    """The stage. Raises Refused, httpx.HTTPError, ServerDidNotStart."""
    asker = Asker(gate, gate.server())
    first = asker.alone("alone")
    steps: tuple[tuple[str, Callable[[], list[Check]]], ...] = (
        ("the same question again", lambda: _again(asker, gate, first)),
        ("all questions at once", lambda: [asker.same("alone and beside others", first, asker.together("beside"))]),
        ("streams", lambda: [asker.same("whole and streamed", first, _streamed(asker))]),
        ("log-probabilities", lambda: [*_logprobs(first), _forced(asker, first)]),
        ("seeds", lambda: [_seeded(asker)]),
        ("ends", lambda: [*_ends(asker, first[0]), _limit(asker)]),
        ("counts", lambda: [_counts(asker, first)]),
        ("known answers", lambda: _known(gate, asker)),
    )
    checks: list[Check] = []
    for index, (what, step) in enumerate(steps):
        gate.told((index + 1) / (len(steps) + 1), what)
        checks += step()
    promise = "the same bits" if not asker.tolerance else f"log-probabilities within {asker.tolerance}"
    facts = (
        f"{len(first)} prompts of {min(map(len, asker.prompts))} to {max(map(len, asker.prompts))} tokens, "
        f"{gate.effort.output_tokens} output tokens each, greedy. Expected: {promise}.",
    )
    return StageResult(checks=tuple(checks), facts=facts)


def _streamed(asker: Asker) -> list[Answer]:
    return [stream(asker.http, asker.body(prompt, "streamed")) for prompt in asker.prompts]


def _again(asker: Asker, gate: Gate, first: Sequence[Answer]) -> list[Check]:
    again = asker.alone("alone")
    same = asker.same("cold and after a prefix hit", first, again)
    if not gate.config.scheduler.enable_prefix_caching:
        return [same, skipped("prefix cache is used", "it is switched off")]
    longest = max(range(len(again)), key=lambda index: len(asker.prompts[index]))
    found, length = again[longest].cached_tokens, len(asker.prompts[longest])
    if length <= gate.block_size:
        return [same, skipped("prefix cache is used", f"no prompt is longer than a block of {gate.block_size}")]
    problem = "" if found else f"nothing of {length} tokens was found there a second time"
    return [
        same,
        checked("prefix cache is used", problem, "the keys of blocks, or what evicts them", f"{found} tokens"),
    ]


def _logprobs(first: Sequence[Answer]) -> list[Check]:
    """Greedy output is the most likely token, at every place, and probabilities are at most 1."""
    places = [pair for answer in first for pair in zip(answer.logprobs, answer.best, strict=True)]
    lower = sum(own < best for own, best in places)
    above = sum(not own <= ROUNDING for own, _ in places)
    return [
        checked(
            "greedy takes the likeliest token", f"{lower} of {len(places)} are not" if lower else "", "the sampler"
        ),
        checked(
            "probabilities are at most 1", f"{above} are above, or no numbers" if above else "", "the final softmax"
        ),
    ]


def _forced(asker: Asker, first: Sequence[Answer]) -> Check:
    """An output given as a prompt is computed in one piece; its log-probabilities are those that were reported."""
    name, worst, compared = "decoded and given as a prompt", 0.0, 0
    for prompt, answer in zip(asker.prompts, first, strict=True):
        if len(answer.logprobs) != len(answer.token_ids):
            continue  # a token that is no text has no entry
        body = asker.body([*prompt, *answer.token_ids], "forced", {"max_tokens": 1, "prompt_logprobs": 1})
        scored = complete(asker.http, body).prompt_logprobs[-len(answer.token_ids) :]
        for token, entry, own in zip(answer.token_ids, scored, answer.logprobs, strict=True):
            worst, compared = max(worst, abs(entry[str(token)]["logprob"] - own)), compared + 1
    if not compared:
        return skipped(name, "every output had tokens that are no text")
    limit = max(asker.tolerance, ROUNDING)
    problem = "" if worst <= limit else f"log-probabilities differ by {worst:.3g}"
    advice = "attention over the cache against attention within a step: block tables, positions, masks"
    return checked(name, problem, advice, f"{worst:.2g}", f"{limit:.2g}")


def _seeded(asker: Asker) -> Check:
    alone = asker.alone("seeded", SEEDED)
    return asker.same("a seed alone and beside others", alone, asker.together("seeds", SEEDED))


def _ends(asker: Asker, answer: Answer) -> list[Check]:
    ids = answer.token_ids
    problem = "" if answer.finish_reason == "length" else f"it ended with {answer.finish_reason}"
    checks = [checked("max_tokens ends an output with length", problem, "the scheduler's ends")]
    last = ids[len(ids) // 2]
    stopped = complete(asker.http, asker.body(asker.prompts[0], "ends", {"stop_token_ids": [last]}))
    expected = ids[: ids.index(last) + 1]
    is_right = (stopped.finish_reason, stopped.token_ids) == ("stop", expected)
    problem = "" if is_right else f"{stopped.finish_reason} after {len(stopped.token_ids)} tokens, not {len(expected)}"
    checks.append(checked("stop_token_ids end an output", problem, "the scheduler's ends"))
    word = answer.text[len(answer.text) // 2 :][:3]
    if len(word) < 3 or "\ufffd" in word:
        return [*checks, skipped("a stop string ends a text before it", "the output has no characters to stop at")]
    cut = complete(asker.http, asker.body(asker.prompts[0], "ends", {"stop": [word]}))
    wanted = answer.text[: answer.text.index(word)]
    problem = "" if (cut.finish_reason, cut.text) == ("stop", wanted) else f"{cut.text!r} and not {wanted!r}"
    return [*checks, checked("a stop string ends a text before it", problem, "server/output.py")]


def _limit(asker: Asker) -> Check:
    """A prompt of one token more than the model takes is refused before anything is computed."""
    name, tokens = "a prompt that is too long is refused with 400", asker.model.max_model_len + 1
    if tokens > MOST_SENT:
        return skipped(name, f"{tokens} tokens are more than is sent for this")
    try:
        complete(asker.http, asker.body((asker.prompts[0] * tokens)[:tokens], "limit"))
    except Refused as error:
        problem = "" if error.status == httpx.codes.BAD_REQUEST else f"status {error.status}: {error}"
        return checked(name, problem, "server/prompt/fit.py", f"{tokens} tokens")
    return checked(name, "it was answered", "server/prompt/fit.py", f"{tokens} tokens")


def _counts(asker: Asker, first: Sequence[Answer]) -> Check:
    problems = [
        f"{len(prompt)} + {len(answer.token_ids)} tokens are counted as {answer.prompt_tokens}, "
        f"{answer.completion_tokens} and {answer.total_tokens} together"
        for prompt, answer in zip(asker.prompts, first, strict=True)
        if (answer.prompt_tokens, answer.completion_tokens, answer.total_tokens)
        != (len(prompt), len(answer.token_ids), len(prompt) + len(answer.token_ids))
    ]
    messages = [{"role": "user", "content": "How many tokens is this?"}]
    asked = {"model": asker.model.name, "messages": messages}
    try:
        counted = post(asker.http, "/tokenize", {**asked, "add_generation_prompt": True})["count"]
        used = chat(asker.http, {**asked, "max_tokens": 1})["usage"]["prompt_tokens"]
    except Refused as error:
        return skipped("usage counts what there is", f"the model does not chat: {error}")
    if counted != used:
        problems.append(f"a chat prompt has {counted} tokens by /tokenize and {used} by its usage")
    return checked("usage counts what there is", "; ".join(problems[:3]), "server/api/render.py")


def _known(gate: Gate, asker: Asker) -> list[Check]:
    if not gate.is_embedded:
        return [skipped("known answers", "they are known of the embedded model only")]
    return [known_answers(asker.http, asker.model.name), recorded_logprobs(asker.http, asker.model.name)]
