"""What the scripts for other engines are asked for, what they answer, and the forms of a model that they are given."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import make_model, make_tokenizer
from tests.docs.scripts import load_script
from tests.model_runtime.test_gguf import write_model


def test_rates_are_tokens_of_all_sequences_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer_rates = load_script("peer_rates")
    monkeypatch.setattr(sys, "argv", ["peer_x.py", "m.gguf", "128", "64", "1,16", "2"])
    load = peer_rates.asked_for()
    assert (load.model, load.prompt, load.decode, load.counts) == ("m.gguf", 128, 64, (1, 16))
    assert (load.dtype, load.threads) == ("", 2)
    load.answer({"engine": "x"}, 16, 4.0, 63, 9.0)
    row = {"engine": "x", "sequences": 16, "prefill_tok_s": 512.0, "decode_tok_s": 112.0}
    assert json.loads(capsys.readouterr().out) == row
    monkeypatch.setattr(sys, "argv", ["peer_x.py", "folder", "8", "4", "1", "float32", "2"])
    assert (peer_rates.asked_for().dtype, peer_rates.asked_for().threads) == ("float32", 2)


def test_checkpoint_has_the_numbers_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tokenizer(writer: GGUFWriter) -> None:
        vocabulary = make_tokenizer().get_vocab()
        tokens = [*sorted(vocabulary, key=vocabulary.__getitem__)[:-1], "ab"]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(["a b"])

    model = make_model("llama", {})
    write_model(tmp_path / "m.gguf", "llama", model, tokenizer)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "m.gguf"), str(tmp_path / "made"), "bfloat16"])
    load_script("make_checkpoint").main()
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="auto").state_dict()
    assert made.keys() == model.state_dict().keys()
    assert all(torch.equal(made[name], tensor.bfloat16()) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "made").tokenize("ab") == ["ab"]


def test_draft_model_is_the_files_first_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, draft = make_model("llama", {}), tmp_path / "draft.gguf"
    write_model(tmp_path / "m.gguf", "llama", model)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "m.gguf"), str(draft), "2"])
    load_script("first_layers").main()
    whole, first = GGUFReader(tmp_path / "m.gguf"), GGUFReader(draft)
    assert first.fields["llama.block_count"].contents() == 2
    assert first.fields.keys() == whole.fields.keys()
    kept = {tensor.name: tensor.data for tensor in whole.tensors if not tensor.name.startswith("blk.2.")}
    assert len(kept) < len(whole.tensors) and [tensor.name for tensor in first.tensors] == [*kept]
    assert all(np.array_equal(tensor.data, kept[tensor.name]) for tensor in first.tensors)


def test_requantize_makes_both_files_or_says_which_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp, made = ModuleType("llama_cpp"), []

    def quantize(source: bytes, target: bytes, params: SimpleNamespace) -> int:
        made.append((source, target, params.ftype, params.allow_requantize))
        return int(target == b"full/q4_0.gguf")

    vars(llama_cpp).update(
        LLAMA_FTYPE_MOSTLY_Q8_0=7,
        LLAMA_FTYPE_MOSTLY_Q4_0=2,
        llama_model_quantize_default_params=SimpleNamespace,
        llama_model_quantize=quantize,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_cpp)
    requantize = load_script("requantize")
    monkeypatch.setattr(sys, "argv", ["", "in.gguf", "there"])
    requantize.main()
    assert made == [(b"in.gguf", b"there/q8_0.gguf", 7, True), (b"in.gguf", b"there/q4_0.gguf", 2, True)]
    monkeypatch.setattr(sys, "argv", ["", "in.gguf", "full"])
    with pytest.raises(SystemExit, match="could not make q4_0"):
        requantize.main()
