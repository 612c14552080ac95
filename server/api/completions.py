"""POST /v1/completions: raw prompts continued, in OpenAI's completion shapes. API process."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.body import read_body
from server.api.gateway import Gateway, admission_of, gateway_of, record_of
from server.api.logprobs import CompletionLogprobs, TokenNaming, prompt_logprobs
from server.api.openapi import describe
from server.api.render import (
    ChoiceResult,
    ChunkTemplate,
    Head,
    OpenAIStream,
    collect,
    json_of,
    to_json,
    usage_document,
)
from server.api.submit import Prepared, answer, checked_grammar, start
from server.choice import Delta
from server.prompt.options import keep_last
from server.prompt.tokenizer import Tokenizer
from server.schema.completions import CompletionBody
from server.stream import Generation

PATH = "/v1/completions"
router = APIRouter()


@router.post(PATH, openapi_extra=describe(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue one or several prompts, as one JSON document or as a stream of chunks."""
    gateway = gateway_of(request)
    body, ignored = await read_body(request, gateway, CompletionBody)
    body.check_together(gateway.config.max_sequences_per_request)
    gateway.check_model(body.model)
    grammar = await checked_grammar(gateway, body.grammar)
    prompts = await _prepared(gateway, body)
    generation = start(gateway, record_of(request), body, prompts, admission_of(request), grammar)
    renderer = CompletionRenderer(body, record_of(request).request_id, gateway.tokenizer)
    return await answer(request, generation, renderer, stream=bool(body.stream), ignored=ignored)


async def _prepared(gateway: Gateway, body: CompletionBody) -> list[Prepared]:
    limit = gateway.engine.info.max_model_len
    kept = keep_last(body.truncate_prompt_tokens, limit, max(1, body.token_limit))
    all_ids = await gateway.prompts.completions(
        body.prompt, max_model_len=limit, add_special_tokens=body.add_special_tokens is not False, keep_last=kept
    )
    if not body.echo:
        return [Prepared(ids=ids) for ids in all_ids]
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [text for text in given if isinstance(text, str)]
    if not texts or kept is not None:
        texts = [gateway.tokenizer.decode(ids, skip_special_tokens=False) for ids in all_ids]
    return [Prepared(ids=ids, echo=text) for ids, text in zip(all_ids, texts, strict=True)]


class CompletionRenderer(OpenAIStream):
    """Chunks and documents of one completions request."""

    def __init__(self, body: CompletionBody, request_id: str, tokenizer: Tokenizer) -> None:
        self._head = Head(id=f"cmpl-{request_id}", created=int(time.time()), model=body.model)
        self._body = body
        self._naming = TokenNaming(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._template = ChunkTemplate("text_completion", self._head, body)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Server-sent events, without the final [DONE]."""
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.text or delta.tokens or delta.finish_reason is not None:
                    yield self._events(delta, generation)
        if self._body.include_usage:
            yield self._template.usage(generation.usage())

    def _events(self, delta: Delta, generation: Generation) -> bytes:
        """Text, then the finish reason: each in a chunk of its own."""
        ids = b""
        if self._body.return_token_ids:
            ids = b',"token_ids":' + to_json(delta.token_ids)
            if delta.index not in self._logprobs:
                ids += b',"prompt_token_ids":' + to_json(generation.prompt_ids(delta.index))
        logprobs = self._logprobs.setdefault(delta.index, CompletionLogprobs(self._naming))
        events, usage = b"", self._template.usage_field(generation)
        if delta.text or delta.tokens:
            part = b"null" if self._body.logprobs is None else to_json(logprobs.part(delta.tokens))
            fields = b',"text":%b,"logprobs":%b,"finish_reason":null%b'
            events += self._template.choice(delta.index, fields % (to_json(delta.text), part, ids), usage)
            ids = b""
        if delta.finish_reason is not None:
            fields = b',"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b%b'
            reasons = (to_json(delta.finish_reason), to_json(delta.stop_reason), ids)
            events += self._template.choice(delta.index, fields % reasons, usage)
        return events

    async def document(self, generation: Generation) -> dict[str, object]:
        """The plain JSON answer."""
        in_thread = self._body.logprobs is not None or self._body.prompt_logprobs is not None
        choices = [partial(self._choice, generation, *entry) for entry in enumerate(await collect(generation))]
        return self._head.fields("text_completion") | {
            "choices": [await json_of(choice, in_thread=in_thread) for choice in choices],
            "usage": usage_document(generation.usage()),
        }

    def _choice(self, generation: Generation, index: int, result: ChoiceResult) -> dict[str, object]:
        wanted = self._body.logprobs is not None
        choice: dict[str, object] = {
            "index": index,
            "text": result.text,
            "logprobs": CompletionLogprobs(self._naming).part(result.tokens) if wanted else None,
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = result.token_ids
            choice["prompt_token_ids"] = generation.prompt_ids(index)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(generation, index, self._body.prompt_logprobs, self._naming)
        return choice
