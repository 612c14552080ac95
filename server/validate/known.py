"""What is known of the embedded model: some answers, and log-probabilities that transformers computed in float64.

`embedded_logprobs.json` was written by `python -m tests.server.record_logprobs`: it knows nothing of firstlight's
arithmetic, so a wrong rotation or scale shows here whatever the configuration says.
"""

from pathlib import Path

import httpx
import msgspec

from server.validate.asking import chat, complete
from server.validate.result import Check, checked

RECORDED = Path(__file__).with_name("embedded_logprobs.json")
MEAN_LIMIT = 0.02
"""Of the differences of log-probabilities; rows of 16 bits beside the file's integers give 0.003."""
ANSWERS = (
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the opposite of hot?", "cold"),
    ("How many days are in a week?", "7"),
    ("What is 2 + 2?", "4"),
    ("What colour is the sky on a clear day?", "blue"),
)
MISTAKES = 1
"""Answers that another precision may change."""


class Recorded(msgspec.Struct):
    """The file: token ids of a text, and the log-probability of each behind the first."""

    token_ids: list[int]
    logprobs: list[float]


def known_answers(http: httpx.Client, model: str) -> Check:
    """Whether it still knows what everybody knows. Raises Refused, httpx.HTTPError."""
    wrong = []
    for question, word in ANSWERS:
        body = {"model": model, "temperature": 0, "max_tokens": 40}
        answer = chat(http, {**body, "messages": [{"role": "user", "content": question}]})
        text = answer["choices"][0]["message"]["content"]
        if word not in text:
            wrong.append(f"{question} {text!r}")
    problem = "; ".join(wrong) if len(wrong) > MISTAKES else ""
    right = f"{len(ANSWERS) - len(wrong)} of {len(ANSWERS)}"
    advice = "firstlight align names the first layer and operation that differs"
    return checked("known answers", problem, advice, right, f"at least {len(ANSWERS) - MISTAKES}")


def recorded_logprobs(http: httpx.Client, model: str) -> Check:
    """The log-probabilities of a text against those of transformers. Raises Refused, httpx.HTTPError."""
    recorded = msgspec.json.decode(RECORDED.read_bytes(), type=Recorded)
    body = {"model": model, "prompt": recorded.token_ids, "max_tokens": 1, "temperature": 0, "cache_salt": "recorded"}
    found = complete(http, {**body, "prompt_logprobs": 1}).prompt_logprobs
    gaps = []
    for entry, expected, token in zip(found, recorded.logprobs, recorded.token_ids[1:], strict=True):
        gaps.append(abs(entry[str(token)]["logprob"] - expected))
    mean = sum(gaps) / len(gaps)
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    problem = (
        ""
        if mean <= MEAN_LIMIT
        else f"they differ by {mean:.2g} on average, most at token {worst + 1}, by {gaps[worst]:.2g}"
    )
    where = f"mean {mean:.2g} over {len(gaps)} tokens"
    advice = (
        "weights, configuration (rope theta, norm epsilon) or arithmetic: firstlight align names the first that differs"
    )
    return checked("log-probabilities of transformers", problem, advice, where, f"mean {MEAN_LIMIT}")
