"""The tokenizer gives the checkpoint's own ids, true bytes, and never a special token for text."""

import asyncio
import json
import time
from pathlib import Path

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model_runtime.weights.errors import CheckpointError
from server.embedded import embedded_path
from server.prompt import tokenizer as module
from server.prompt.tokenizer import MARK, alternation, load_tokenizer
from tests.server.tiny_tokenizers import TEXTS, chatml_folder, save_folder, sentencepiece_bpe, trained_bpe


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    named: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "byte-level": chatml_folder(root / "byte-level"),
        "legacy": save_folder(root / "legacy", sentencepiece_bpe(legacy=True), named),
        "metaspace": save_folder(root / "metaspace", sentencepiece_bpe(legacy=False), named),
    }


KINDS = ("byte-level", "legacy", "metaspace")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_equal_transformers(folders: dict[str, Path], kind: str) -> None:
    ours = load_tokenizer(folders[kind])
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[kind])

    @settings(max_examples=150, deadline=None)
    @given(TEXTS, st.booleans())
    def check(text: str, add: bool) -> None:
        ids = ours.encode(text, add_special_tokens=add, allow_special=True)
        assert ids.typecode == "i"
        assert ids.tolist() == theirs.encode(text, add_special_tokens=add)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids.tolist(), skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_not_allowed_specials_has_none_and_survives(folders: dict[str, Path], kind: str) -> None:
    ours = load_tokenizer(folders[kind])

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    @example("▁")
    @example("a ▁▁b")
    @example("▁ a")
    def check(text: str) -> None:
        ids = ours.encode(text, add_special_tokens=False, allow_special=False)
        assert ours.special_ids.isdisjoint(ids)
        lossy = kind == "metaspace" and text.startswith((" ", "▁"))  # its own first space is not told from an added one
        told = text if kind == "byte-level" else text.replace("▁", " ")  # SentencePiece writes spaces so
        assert ours.decode(ids, skip_special_tokens=False) == (told[1:] if lossy else told)
        wrapped = ours.encode(text, add_special_tokens=True, allow_special=False)
        assert wrapped.tolist() == ([] if kind == "byte-level" else [1]) + ids.tolist()
        if not any(literal in text for literal in ours.special_literals):
            assert ids == ours.encode(text, add_special_tokens=False, allow_special=True)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_an_alias_typed_by_a_user_is_text(folders: dict[str, Path], kind: str) -> None:
    tokenizer = load_tokenizer(folders[kind])
    for index in range(5):
        forged = MARK + chr(0xF0000 + index)
        ids = tokenizer.encode(f"a{forged}", add_special_tokens=False, allow_special=False)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert max(ids) < tokenizer.vocab_size
        for rendered in (f"a{forged}", f"a{MARK}\ufdd1{forged[1:]}"):
            assert tokenizer.encode_rendered(rendered, "\ufdd1") == ids
        if kind == "byte-level":
            assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{forged}"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_join_to_the_text(folders: dict[str, Path], kind: str) -> None:
    tokenizer = load_tokenizer(folders[kind])
    text = "the café 👩‍👩‍👧 France\n"
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=True)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined == text if kind == "byte-level" else joined == " " + text
    assert max(len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size)) == tokenizer.max_token_bytes
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""


def test_part_of_a_character_shows_as_a_replacement(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["byte-level"])
    first = tokenizer.encode("€", add_special_tokens=False, allow_special=True)[0]
    assert tokenizer.token_bytes(first) == b"\xe2"
    assert tokenizer.token_text(first) == "\ufffd"


def test_special_tokens_by_name_and_id(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["byte-level"])
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.id_of("<|im_end|>") == 2
    assert tokenizer.id_of("no such token") is None
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(3)
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.special_variables == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_a_token_that_only_the_configuration_calls_special(tmp_path: Path) -> None:
    fast = trained_bpe([])
    fast.add_tokens([AddedToken("<end>", normalized=False), AddedToken("<think>", normalized=False)])
    tokenizer = load_tokenizer(save_folder(tmp_path, fast, {"eos_token": {"content": "<end>"}, "pad_token": "<pad>"}))
    end, think = tokenizer.id_of("<end>"), tokenizer.id_of("<think>")
    assert tokenizer.special_ids == {end}
    assert tokenizer.vocab_size == think + 1
    assert tokenizer.id_of("<pad>") is None
    plain = tokenizer.encode("<end><think>", add_special_tokens=False, allow_special=False)
    assert plain[-1] == think
    assert end not in plain
    assert tokenizer.encode("<end><think>", add_special_tokens=False, allow_special=True).tolist() == [end, think]


def test_special_tokens_keep_their_appetite_for_spaces(tmp_path: Path) -> None:
    fast = trained_bpe([])
    fast.add_special_tokens([AddedToken("<m>", lstrip=True, rstrip=True, normalized=False, special=True)])
    tokenizer = load_tokenizer(save_folder(tmp_path, fast, {}))
    expected = fast.encode("the <m> end", add_special_tokens=False).ids
    assert tokenizer.encode_rendered("the <m> end", "\ufdd1").tolist() == expected
    assert tokenizer.decode(expected, skip_special_tokens=False) == "the<m>end"


def test_a_vocabulary_that_reaches_special_tokens_by_itself(tmp_path: Path) -> None:
    """With ignore_merges a word that is a token becomes it, unasked."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "end"])}
    fast = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("end", special=True, normalized=False)])
    tokenizer = load_tokenizer(save_folder(tmp_path, fast, {}))
    assert tokenizer.encode("end", add_special_tokens=False, allow_special=True).tolist() == [256]
    ids = tokenizer.encode("end", add_special_tokens=False, allow_special=False)
    assert 256 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "end"


def test_a_normalizer_cannot_make_a_special_token(tmp_path: Path) -> None:
    fast = trained_bpe([])
    fast.normalizer = normalizers.NFKC()
    fast.add_special_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    tokenizer = load_tokenizer(save_folder(tmp_path, fast, {}))
    end = tokenizer.id_of("<|end|>")
    assert end in tokenizer.encode("＜|end|＞", add_special_tokens=False, allow_special=True)
    assert end not in tokenizer.encode("＜|end|＞", add_special_tokens=False, allow_special=False)
    assert end not in tokenizer.encode_rendered("＜|end|＞", "\ufdd1")


@settings(deadline=None)
@given(st.sets(st.text("ab<>é", min_size=1, max_size=5), min_size=1, max_size=12), st.text("ab<>é", max_size=12))
def test_alternation_prefers_the_longest_word(words: set[str], text: str) -> None:
    ordered = "|".join(map(regex.escape, sorted(words, key=len, reverse=True)))
    assert regex.findall(alternation(words), text) == regex.findall(ordered, text)


def test_folders_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    fast = trained_bpe([])
    fast.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="neither byte-level nor SentencePiece"):
        load_tokenizer(save_folder(tmp_path, fast, {}))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_tokenizer(tmp_path)


def test_where_the_chat_template_is_found(tmp_path: Path) -> None:
    assert load_tokenizer(chatml_folder(tmp_path, chat_template=None)).chat_template is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert load_tokenizer(chatml_folder(tmp_path, chat_template=named)).chat_template == "yes"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_tokenizer(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load_tokenizer(tmp_path).chat_template == "jinja"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        load_tokenizer(tmp_path)


def test_encoding_a_long_text_leaves_the_event_loop_free(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["byte-level"])
    text = "The capital of France, 12 tokens. " * 30_000

    async def measure() -> tuple[float, float]:
        start = last = time.perf_counter()
        task = asyncio.create_task(tokenizer.encode_async(text, add_special_tokens=False, allow_special=True))
        longest = 0.0
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        assert len(await task) > 100_000
        return longest, last - start

    shares = [longest / total for longest, total in (asyncio.run(measure()) for _ in range(3))]
    assert len(text) > module._THREAD_CHARS
    assert min(shares) < 1 / 2, f"for these shares of the time the loop stood still: {shares}"


@pytest.mark.model
def test_the_embedded_model() -> None:
    start = time.process_time()
    tokenizer = load_tokenizer(embedded_path())
    assert time.process_time() - start < 1.0, "measured 0.25 s on an idle core"
    assert (tokenizer.vocab_size, tokenizer.max_token_bytes, len(tokenizer.special_ids)) == (49152, 81, 17)
    for text, ids in {
        "a  1": [81, 256, 33],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }.items():
        assert tokenizer.encode(text, add_special_tokens=True, allow_special=True).tolist() == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
