"""Outputs that are closed before max_tokens: whole where there was room, the same whatever was drafted or replayed."""

import json
from array import array
from dataclasses import replace
from pathlib import Path
from random import Random

import jsonschema
import pytest

from scheduler.masks import MaskRow
from scheduler.plan import ints
from scheduler.request import OutputGrammar
from server.grammar.closing import DETOUR, FREE_TOKENS, MAX_WAY_BYTES, UNKNOWN_WAY, Closing
from server.grammar.compiler import compile_grammar
from server.grammar.follower import Compiled, Follower, Model
from server.grammar.grammar import Grammar, Kind
from server.grammar.verdicts import verdict_on
from server.prompt.tokenizer import Tokenizer, load_tokenizer
from server.reasoning import ReasoningMarks
from server.structured_bench import SCHEMAS
from tests.server.fakes import EOS, TOKENIZER, LocalChecker, make_tokenizer
from tests.server.grammar_case import PROMPT, Writer
from tests.server.tiny_tokenizers import CHATML_SPECIALS, save_folder, trained_bpe

ALL = [entry["schema"] for entry in json.loads(SCHEMAS.read_text())]
LIST = json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 2})


class _Forms:
    """Grammars and outputs of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.checker = LocalChecker(tokenizer)
        self.model = Model(self.checker.vocabulary)

    def form(self, kind: Kind, text: str) -> OutputGrammar:
        grammar = verdict_on(Grammar(kind=kind, text=text), self.checker.vocabulary, self.checker.trie).grammar
        assert grammar is not None
        return replace(grammar, close_before_max_tokens=True)

    def way(self, kind: Kind, text: str) -> list[int] | None:
        """From the beginning of an output."""
        matcher = compile_grammar(self.form(kind, text).source, self.model.trie)
        return self.model.closing.way(int.from_bytes(matcher.compute_bitmask(), "little"), matcher)

    def write(self, text: str, max_tokens: int, random: Random) -> list[int]:
        """Any tokens that a schema allows."""
        form, outputs = self.form("json_schema", text), ints()
        matcher = compile_grammar(form.source, self.model.trie)
        follower = Follower(Compiled(self.model, form.source, matcher), form, max_tokens)
        while len(outputs) < max_tokens and EOS not in outputs:
            mask = array("B", bytes(self.model.mask_bytes))
            follower.fill(MaskRow(1, outputs, 0, ints()), memoryview(mask), mask.buffer_info()[0])
            bits = int.from_bytes(mask, "little")
            outputs.append(random.choice([token for token in range(bits.bit_length()) if bits >> token & 1]))
        return outputs.tolist()


@pytest.fixture(scope="module")
def forms() -> _Forms:
    return _Forms(TOKENIZER)


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def _write(writer: Writer, max_tokens: int, random: Random) -> bool:
    """Any tokens that are allowed; whether the output ended."""
    for _ in range(max_tokens):
        writer.tokens.append(random.choice(sorted(writer.allowed())))
        if writer.tokens[-1] == EOS:
            return True
    return False


@pytest.mark.parametrize("merges", [False, True])
def test_whatever_is_written_is_whole_in_time(merges: bool, forms: _Forms, tmp_path: Path) -> None:
    tokenizer, random = TOKENIZER, Random(merges)
    if merges:
        tokenizer = load_tokenizer(save_folder(tmp_path, trained_bpe(CHATML_SPECIALS), {}))
        forms = _Forms(tokenizer)
    for schema in ALL:
        way = forms.way("json_schema", json.dumps(schema))
        assert way is not None
        jsonschema.validate(json.loads(_text(tokenizer, way)), schema)
        max_tokens = len(way) + 1 + random.randrange(FREE_TOKENS)
        if max_tokens <= 48 or "$defs" in schema:
            written = forms.write(json.dumps(schema), max_tokens, random)
            assert written[-1] == EOS, (schema, max_tokens)
            jsonschema.validate(json.loads(_text(tokenizer, written)), schema)


def test_masks_follow_from_the_output_alone() -> None:
    """Token by token, behind drafts, and for an engine that is given the output at once."""
    writer, drafted = (Writer("json_schema", LIST, close_at=40) for _ in range(2))
    masks, random = [], Random(3)
    while not masks or masks[-1] != {EOS}:
        masks.append(writer.allowed())
        writer.tokens.append(random.choice(sorted(masks[-1])))
    output = writer.tokens[len(PROMPT) :]
    assert len(output) <= 40
    for position, expected in enumerate(masks):
        if position % 8 == 0:
            replayed = Writer("json_schema", LIST, close_at=40)
            replayed.tokens += output[:position]
            assert replayed.allowed() == expected
        for count in (1, 3, 8):
            end = min(position + count, len(masks) - 1)
            assert drafted.allowed(output[position:end]) == masks[end]
        assert drafted.allowed() == expected
        drafted.tokens.append(output[position])


def test_only_what_is_near_the_last_token_changes() -> None:
    """Any token, then those without structure, then the way."""
    begin = '["a","b'
    way = len('"]') + 1  # and the end
    for spare, free, plain in [
        (FREE_TOKENS, True, True),
        (FREE_TOKENS - 1, False, True),
        (4, False, True),
        (3, False, False),
    ]:
        writer = Writer("json_schema", LIST, close_at=len(begin) + way + spare)
        writer.tokens += writer.ids(begin)
        allowed = writer.allowed()
        assert set(writer.ids('"')) <= allowed
        assert (set(writer.ids("{")) <= allowed, set(writer.ids("x")) <= allowed) == (free, plain), spare


ENDLESS = 'start: TEXT "</x>"\nTEXT: /[^<]*/'
"""A text without a sign of its end."""


@pytest.mark.parametrize(
    ("kind", "text", "window"),
    [("json_schema", LIST, DETOUR + len('["",""]') + 1), ("grammar", ENDLESS, DETOUR + UNKNOWN_WAY)],
)
def test_outside_the_window_nothing_is_searched(
    kind: Kind, text: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def narrow(self: Closing, mask: bytes, matcher: object, left: int) -> bytes:
        asked.append(left)
        return mask

    monkeypatch.setattr(Closing, "narrow", narrow)
    for left in (window, window + 1):
        Writer(kind, text, close_at=left).allowed()
    assert asked == [window]


def test_what_cannot_be_whole_in_time_is_as_ever(forms: _Forms) -> None:
    text = '{"const":"abcdefgh"}'
    short, plain = Writer("json_schema", text, close_at=10), Writer("json_schema", text)
    assert len(forms.way("json_schema", text) or []) == 10
    assert short.write('"abcdefgh') == '"abcdefgh'
    plain.tokens += plain.ids('"abcdefgh')
    assert short.allowed() == plain.allowed() == set(plain.ids('"'))


@pytest.mark.parametrize(("length", "found"), [(MAX_WAY_BYTES, True), (MAX_WAY_BYTES + 1, False)])
def test_ways_are_bounded(length: int, found: bool, forms: _Forms) -> None:
    way = forms.way("regex", f"[a-c]{{{length}}}")
    assert (way is not None) is found
    assert not found or len(way or []) == length


def test_a_text_without_a_sign_of_its_end_is_given_up(forms: _Forms) -> None:
    assert forms.way("grammar", ENDLESS) is None
    writer = Writer("grammar", ENDLESS, close_at=8)
    assert set(writer.ids("ab,<")) <= writer.allowed()


def test_signs_of_several_bytes_are_completed() -> None:
    writer = Writer("json_schema", LIST, close_at=14)
    writer.tokens += writer.ids('["a","b😀')[:-2]
    assert not writer.ends
    assert _write(writer, 14 - (len(writer.tokens) - len(PROMPT)), Random(1))
    assert json.loads(_text(TOKENIZER, writer.tokens[len(PROMPT) :].tolist()))[0] == "a"


def test_reasoning_ends_in_time() -> None:
    tokenizer = make_tokenizer("<think>", "</think>")
    marks = ReasoningMarks(begin="<think>", end="</think>")
    for seed in range(5):
        writer = Writer("json_schema", '{"type":"boolean"}', tokenizer, 24, reasoning=marks, is_reasoning=True)
        assert _write(writer, 24, Random(seed))
        written = tokenizer.decode(writer.tokens[len(PROMPT) :], skip_special_tokens=False)
        assert json.loads(written.partition("</think>")[2].split("<|")[0]) in (True, False)
