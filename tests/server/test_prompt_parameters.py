"""Parameters that say how messages become a prompt, and what is said about its tokens."""

from typing import Any

import pytest

from tests.server.exchange import call, chat, complete, run
from tests.server.fakes import (
    MODEL,
    TOKENIZER,
    FakeEngine,
    ids_of,
    logprob_of,
    make_app,
    make_tokenizer,
    says,
)

MOOD = (
    "{% for message in messages %}[{{ message['content'] | trim }}]{% endfor %}{{ mood }}"
    "{% for item in items or [] %}{{ item.name }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def _prompt(engine: FakeEngine) -> str:
    """Of the newest request, special tokens included."""
    return TOKENIZER.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)


def _talk(*contents: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


@pytest.mark.parametrize("content", ["The sky is ", [{"type": "text", "text": "The sky is "}]])
def test_the_answer_goes_on_with_the_last_message(content: object) -> None:
    engine = FakeEngine(script=says("blue"))
    answer = chat(make_app(engine), messages=_talk("hi", content), continue_final_message=True)
    assert _prompt(engine) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe sky is "
    assert answer.json["choices"][0]["message"]["content"] == "blue"


def test_white_space_that_a_template_trims_is_trimmed_at_the_end_too() -> None:
    engine = FakeEngine()
    app = make_app(engine, make_tokenizer(template=MOOD))
    assert chat(app, messages=_talk("hi", "The sky is  "), continue_final_message=True).status == 200
    assert _prompt(engine) == "[hi][The sky is"


def test_special_tokens_in_a_continued_message_stay_text() -> None:
    engine = FakeEngine()
    assert chat(make_app(engine), messages=_talk("hi", "a<|im_end|>"), continue_final_message=True).status == 200
    assert list(engine.requests[0].prompt_ids).count(TOKENIZER.id_of("<|im_end|>")) == 1
    assert _prompt(engine).endswith("assistant\na<|im_end|>")


def test_what_cannot_be_continued_is_refused() -> None:
    blind = make_app(FakeEngine(), make_tokenizer(template="{{ messages|length }}"))
    answer = chat(blind, messages=_talk("hi"), continue_final_message=True)
    assert (answer.status, answer.error["param"]) == (400, "continue_final_message")
    answer = chat(make_app(FakeEngine()), continue_final_message=True, add_generation_prompt=True)
    assert (answer.status, answer.error["param"]) == (400, "add_generation_prompt")


def test_the_prompt_may_end_without_what_begins_an_answer() -> None:
    engine = FakeEngine()
    assert chat(make_app(engine), add_generation_prompt=False).status == 200
    assert _prompt(engine) == "<|im_start|>user\nhi<|im_end|>\n"


def test_variables_reach_the_template_and_stay_text() -> None:
    engine = FakeEngine()
    app = make_app(engine, make_tokenizer(template=MOOD))
    given = {"mood": "<|im_end|>", "items": [{"name": "<|im_start|>"}]}
    assert chat(app, chat_template_kwargs=given).status == 200
    assert _prompt(engine) == "[hi]<|im_end|><|im_start|>>"
    assert not any(TOKENIZER.is_special(token_id) for token_id in engine.requests[0].prompt_ids)
    body = {"messages": _talk("hi"), "chat_template_kwargs": {"mood": "m"}, "add_generation_prompt": False}
    tokens = run(call(app, "POST", "/tokenize", body)).json["tokens"]
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == "[hi]m"


def test_variables_have_limits() -> None:
    app = make_app(FakeEngine(max_model_len=4096))
    assert chat(app, chat_template_kwargs={f"a{number}": 1 for number in range(64)}).status == 200
    assert chat(app, chat_template_kwargs={"a": "x" * (16 * 1024 - len('{"a": ""}'))}).status == 200
    assert chat(app, chat_template_kwargs={"a": "x" * (16 * 1024 + 1 - len('{"a": ""}'))}).status == 400


def test_only_the_last_tokens_of_a_prompt_are_kept() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    assert (
        complete(app, prompt="abcdef", truncate_prompt_tokens=2, echo=True).json["choices"][0]["text"].startswith("ef")
    )
    assert _prompt(engine) == "ef"
    complete(app, prompt=ids_of("abcdef"), truncate_prompt_tokens=6)
    assert _prompt(engine) == "abcdef"
    chat(app, truncate_prompt_tokens=4)
    assert _prompt(engine) == "ant\n"


@pytest.mark.parametrize(("fields", "kept"), [({}, 511), ({"max_tokens": 100}, 412), ({"max_tokens": 1000}, 511)])
def test_as_many_tokens_are_kept_as_fit(fields: dict[str, int], kept: int) -> None:
    engine = FakeEngine()
    app = make_app(engine)
    assert chat(app, messages=_talk("x" * 3000), truncate_prompt_tokens=-1, **fields).status == 200
    assert len(engine.requests[0].prompt_ids) == kept
    assert chat(app, messages=_talk("x" * 3000)).error["code"] == "context_length_exceeded"


def test_a_prompt_to_be_truncated_has_a_limit() -> None:
    app = make_app(FakeEngine())
    assert complete(app, prompt=[5] * (512 * 8), truncate_prompt_tokens=-1).status == 200
    answer = complete(app, prompt=[5] * (512 * 8 + 1), truncate_prompt_tokens=-1)
    assert answer.error["code"] == "context_length_exceeded"
    assert complete(app, prompt=[255] * 16_000, truncate_prompt_tokens=1).error["code"] == "context_length_exceeded"
    assert complete(app, prompt=[5] * 512, truncate_prompt_tokens=512).error["code"] == "context_length_exceeded"


def _entry(text: str, rank: int | None) -> dict[str, object]:
    return {"logprob": pytest.approx(logprob_of(ids_of(text)[0])), "rank": rank, "decoded_token": text}


@pytest.mark.parametrize("surface", [chat, complete])
def test_log_probabilities_of_the_prompt(surface: Any) -> None:
    engine = FakeEngine()
    answer = surface(make_app(engine), prompt_logprobs=2, n=2, max_tokens=1).json
    found = answer["prompt_logprobs"] if surface is chat else answer["choices"][1]["prompt_logprobs"]
    ids = engine.requests[0].prompt_ids
    assert len(found) == len(ids)
    assert found[0] is None
    for token_id, entry in zip(ids[1:], found[1:], strict=True):
        assert list(entry) == [str(token_id), str(token_id + 1)]
        assert entry[str(token_id)] == {
            "logprob": pytest.approx(logprob_of(token_id)),
            "rank": 1,
            "decoded_token": TOKENIZER.token_text(token_id),
        }
        assert entry[str(token_id + 1)]["rank"] == 2
    assert surface(make_app(engine), prompt_logprobs=0, stream=True).error["param"] == "prompt_logprobs"


def test_log_probabilities_of_the_prompt_beside_echo() -> None:
    answer = complete(make_app(FakeEngine()), prompt="ab", echo=True, logprobs=1, prompt_logprobs=3, max_tokens=0).json
    (choice,) = answer["choices"]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": logprob_of(ids_of("b")[0])}
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3]


def test_tokens_are_named_by_their_ids() -> None:
    app = make_app(FakeEngine(script=says("é")))
    first, second = (f"token_id:{token_id}" for token_id in ids_of("é"))
    content = chat(app, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json["choices"][0]["logprobs"]
    assert [entry["token"] for entry in content["content"]] == [first, second]
    assert [entry["bytes"] for entry in content["content"]] == [[0xC3], [0xA9]]
    assert content["content"][0]["top_logprobs"][0]["token"] == first
    found = complete(app, logprobs=1, return_tokens_as_token_ids=True).json["choices"][0]["logprobs"]
    assert (found["tokens"], [*found["top_logprobs"][0]]) == ([first, second], [first])


def test_tokens_are_counted_as_a_request_would_have_them() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    body = {"model": MODEL, "messages": _talk("hi", "The sky"), "continue_final_message": True, "max_tokens": 3}
    answer = run(call(app, "POST", "/v1/chat/completions/input_tokens", body))
    assert answer.json == {"object": "response.input_tokens", "input_tokens": 27}
    assert engine.streams == [] and engine.reserved == 0
    assert chat(app, **body).json["usage"]["prompt_tokens"] == 27
    wrong = run(call(app, "POST", "/v1/chat/completions/input_tokens", {**body, "model": "x"}))
    assert (wrong.status, wrong.error["param"]) == (404, "model")
