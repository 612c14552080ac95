"""The official `openai` SDK with its defaults against a real server: what an application's code does."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.end_to_end.conftest import Server

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."

SPECIAL_IDS = range(17)
"""Of SmolLM2's vocabulary: these have no text, and so no log-probabilities."""
EVERYTHING: Any = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "developer", "content": "You are a poet."},
        {"role": "user", "content": [{"type": "text", "text": "A line"}, {"type": "text", "text": "about rain"}]},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Another.", "name": "ann"},
    ],
    "max_completion_tokens": 6,
    "temperature": 0.9,
    "top_p": 0.95,
    "n": 2,
    "stop": ["\n\n\n", "never said"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"0": -100},
    "logprobs": True,
    "top_logprobs": 3,
    "user": "ann",
    "metadata": {"trace": "1"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "ann",
    "prompt_cache_key": "poem",
    "response_format": {"type": "text"},
    "extra_body": {
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [1],
        "bad_words": ["umbrella"],
        "include_stop_str_in_output": True,
        "return_token_ids": True,
        "priority": 1,
        "cache_salt": "ann",
    },
}


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none") as made:
        yield made


def _text(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_chat(client: OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(model=server.model, messages=FRANCE, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == server.model
    assert answer._request_id
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", PARIS, "stop")
    assert choice.logprobs is None
    assert choice.message.tool_calls is None
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == 8
    again = client.chat.completions.create(model=server.model, messages=FRANCE, temperature=0)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 16 * 16


def test_chat_with_every_parameter(client: OpenAI, server: Server) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(model=server.model, seed=seed, **EVERYTHING)
        for choice in answer.choices:
            assert choice.model_extra is not None
            ids = choice.model_extra["token_ids"]
            assert choice.logprobs is not None
            content = choice.logprobs.content or []
            assert len(ids) == 6
            assert len(content) == sum(token_id not in SPECIAL_IDS for token_id in ids)
            assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == choice.message.content
            for entry in content:
                values = [top.logprob for top in entry.top_logprobs]
                assert len(values) == 3
                assert values == sorted(values, reverse=True)
                assert all(math.isfinite(value) and value <= 0 for value in [*values, entry.logprob])
        assert answer.model_extra is not None
        assert answer.usage is not None
        assert len(answer.model_extra["prompt_token_ids"]) == answer.usage.prompt_tokens
        assert answer.usage.completion_tokens == 12
        return [choice.message.content for choice in answer.choices]

    first, other = ask(7), ask(8)
    assert ask(7) == first
    assert first[0] != first[1]
    assert other != first


def test_chat_stream(client: OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(
        model=server.model,
        messages=FRANCE,
        temperature=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [choice.delta.role for choice in mine].count("assistant") == 1
        assert mine[0].delta.role == "assistant"
        assert _text(chunks, index) == PARIS
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
        entries = [entry for choice in mine if choice.logprobs for entry in choice.logprobs.content or []]
        assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == PARIS


def test_stream_without_usage_has_a_choice_in_every_chunk(client: OpenAI, server: Server) -> None:
    chunks = list(client.chat.completions.create(model=server.model, messages=FRANCE, max_tokens=2, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_stream_helper(client: OpenAI, server: Server) -> None:
    with client.chat.completions.stream(model=server.model, messages=FRANCE, temperature=0, logprobs=True) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} == set(kinds)
    assert final.choices[0].message.content == PARIS
    assert final.choices[0].finish_reason == "stop"


def test_completions(client: OpenAI, server: Server) -> None:
    answer = client.completions.create(
        model=server.model, prompt="The capital of France is", max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text.startswith("The capital of France is Paris")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == choice.text
    places = zip(logprobs.text_offset or [], logprobs.tokens or [], strict=True)
    assert all(choice.text[offset:].startswith(token) for offset, token in places)
    assert (logprobs.token_logprobs or [])[0] is None
    assert all(value is not None and value <= 0 for value in (logprobs.token_logprobs or [])[1:])
    assert all(2 <= len(top) <= 3 for top in (logprobs.top_logprobs or [])[1:])


def test_completions_of_lists_and_ids(client: OpenAI, server: Server) -> None:
    extra = {"return_token_ids": True}
    prompts = ["The capital of France is", "2 + 2 ="]
    texts = client.completions.create(
        model=server.model, prompt=prompts, max_tokens=3, temperature=0, n=2, extra_body=extra
    )
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert texts.choices[0].text == texts.choices[1].text != texts.choices[2].text == texts.choices[3].text
    ids = [choice.model_extra["prompt_token_ids"] for choice in texts.choices if choice.model_extra is not None][::2]
    by_ids = client.completions.create(model=server.model, prompt=ids, max_tokens=3, temperature=0)
    assert [choice.text for choice in by_ids.choices] == [texts.choices[0].text, texts.choices[2].text]
    one = client.completions.create(model=server.model, prompt=ids[0], max_tokens=3, temperature=0, stop="xyz")
    assert one.choices[0].text == texts.choices[0].text
    nothing = client.completions.create(model=server.model, prompt=prompts[0], max_tokens=0, echo=True)
    assert nothing.choices[0].text == prompts[0]
    stream = client.completions.create(
        model=server.model, prompt=ids, max_tokens=3, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    streamed = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in by_ids.choices]
    assert chunks[-1].usage is not None
    assert by_ids.usage is not None
    assert chunks[-1].usage.total_tokens == by_ids.usage.total_tokens


def test_models(client: OpenAI, server: Server) -> None:
    (listed,) = client.models.list()
    assert (listed.id, listed.object) == (server.model, "model")
    assert client.models.retrieve(server.model) == listed


def test_raw_and_streaming_responses(client: OpenAI, server: Server) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=server.model, messages=FRANCE, max_tokens=2, temperature=0, extra_body={"frobnicate": 1}
    )
    assert raw.headers["x-ignored-params"] == "frobnicate"
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    assert raw.parse().choices[0].message.content == "The capital"
    with client.chat.completions.with_streaming_response.create(
        model=server.model,
        messages=FRANCE,
        max_tokens=2,
        stream=True,
        extra_headers={"X-Request-Id": "my-own-id"},
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-request-id"] == "my-own-id"
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_async_client(server: Server) -> None:
    async def stream(client: AsyncOpenAI) -> str:
        chunks = await client.chat.completions.create(model=server.model, messages=FRANCE, temperature=0, stream=True)
        return _text([chunk async for chunk in chunks])

    async def plain(client: AsyncOpenAI) -> str | None:
        answer = await client.chat.completions.create(model=server.model, messages=FRANCE, temperature=0)
        return answer.choices[0].message.content

    async def helper(client: AsyncOpenAI) -> str | None:
        async with client.chat.completions.stream(model=server.model, messages=FRANCE, temperature=0) as events:
            return (await events.get_final_completion()).choices[0].message.content

    async def refused(client: AsyncOpenAI) -> str | None:
        with pytest.raises(openai.NotFoundError) as error:
            await client.completions.create(model="gpt-9", prompt="x")
        return error.value.code

    async def everything() -> list[Any]:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            assert [model.id async for model in client.models.list()] == [server.model]
            raw = await client.models.with_raw_response.retrieve(server.model)
            assert raw.headers["x-request-id"]
            return await asyncio.gather(stream(client), plain(client), helper(client), refused(client), stream(client))

    assert asyncio.run(everything()) == [PARIS, PARIS, PARIS, "model_not_found", PARIS]
