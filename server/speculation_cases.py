"""What speculation is checked on: prompts of four kinds with parameters of thirteen.

Used by `server/speculation_check.py`, in its process.
"""

import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.plan import ints
from scheduler.request import SamplingParams
from server.copy_prompts import copy_prompts
from server.generation import GenerationRequest
from server.grammar.grammar import Grammar
from server.grammar.lark import output_grammar
from server.prompt.tokenizer import load_tokenizer

TEXT = Path(__file__).with_name("quality_text.txt")
LIST = 'start: "[" item (", " item){5,20} "]"\nitem: "\\"" ("red" | "green" | "blue") "\\"" | /[0-9]{1,2}/\n'
GRAMMAR = output_grammar(Grammar(kind="grammar", text=LIST), {})
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["red", "sky"]}, "maxItems": 4}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REASONING = f'start: /[a-zA-Z .]{{0,24}}/ "</think>" answer\nanswer: %json {json.dumps(SCHEMA)}\n'
REASONED = replace(output_grammar(Grammar(kind="grammar", text=REASONING), {}), json_after="</think>")
"""Drafts may begin in the reasoning and go on in the JSON."""
STOPS = ("e t", "):", "\n\n", "ing ", "0,")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request, and the kind of its parameters."""

    kind: str
    request: GenerationRequest


def make_cases(model: Path, vocab_size: int, eos: tuple[int, ...], count: int, max_tokens: int) -> list[Case]:
    """Each kind of parameters meets each kind of prompt within 52 of them."""
    cases = []
    for index, prompt_ids in enumerate(prompts(model, vocab_size, count)):
        kinds = [*_kinds(index, eos, max_tokens).items()]
        kind, (sampling, stop) = kinds[index // 4 % len(kinds)]
        request = GenerationRequest(prompt_ids=prompt_ids, sampling=sampling, stop=stop, include_stop=index % 8 < 4)
        cases.append(Case(kind=kind, request=request))
    return cases


def prompts(model: Path, vocab_size: int, count: int) -> Iterator["array[int]"]:
    """A quarter each of repetitions, code, chat, and random tokens, in turn."""
    generator = random.Random(0)
    text = load_tokenizer(model).encode(TEXT.read_text(), add_special_tokens=False, allow_special=False)
    edits = [ids for _, ids in copy_prompts(model)]
    chats, code = edits[: len(edits) // 2], edits[len(edits) // 2 :]
    for index in range(count):
        start, length = generator.randrange(len(text) - 40), generator.randrange(8, 40)
        kind = index % 4
        if kind == 0:
            yield text[start : start + length] * 3
        elif kind == 3:
            yield ints([generator.randrange(vocab_size) for _ in range(length)])
        else:
            ids = (code if kind == 1 else chats)[index // 4 % len(chats)]
            yield ids[: len(ids) - generator.randrange(len(ids) // 3)]


def _kinds(index: int, eos: tuple[int, ...], max_tokens: int) -> dict[str, tuple[SamplingParams, tuple[str, ...]]]:
    """(Parameters, stop strings) by name; half are greedy."""
    base = SamplingParams(max_tokens=max_tokens, temperature=0.0, eos_token_ids=eos, logprobs=2)
    drawn = replace(base, temperature=0.8, seed=index)
    bad_words = ((100,), (28, 30), (60, 61, 62))
    return {
        "greedy": (base, ()),
        "top_p": (replace(drawn, top_p=0.9), ()),
        "penalties": (replace(base, repetition_penalty=1.2, presence_penalty=0.5), ()),
        "min_p, penalty": (replace(drawn, min_p=0.1, frequency_penalty=0.3), ()),
        "bad_words, min_tokens": (replace(base, bad_words=bad_words, min_tokens=max_tokens // 2, logprobs=-1), ()),
        "top_k, logit_bias": (replace(drawn, temperature=1.5, top_k=20, logit_bias=((28, 2.0), (30, -5.0))), ()),
        "stop tokens, logit_bias": (replace(base, logit_bias=((30, 4.0),), stop_token_ids=(28, 30)), ()),
        "max_tokens": (replace(drawn, max_tokens=1 + index % max_tokens, logprobs=0, prompt_logprobs=1), ()),
        "grammar": (replace(base, grammar=GRAMMAR), ()),
        "grammar, sampled": (replace(drawn, grammar=GRAMMAR, repetition_penalty=1.1), ()),
        "JSON after reasoning": (replace(drawn, grammar=REASONED, temperature=index % 2), ()),
        "stop strings": (base, STOPS),
        "stop strings, sampled": (replace(drawn, min_tokens=3), STOPS),
    }
