"""From a checked body and its prompts to a running generation, and on to the answer. Used by the generation routes.

API process.
"""

from array import array
from dataclasses import dataclass, replace

from fastapi import Request
from starlette.responses import Response

from scheduler.request import NO_IMAGES, OutputGrammar, PromptImages, SamplingParams
from server.api.disconnect import while_connected
from server.api.gateway import Gateway, record_of
from server.api.render import Renderer, json_response
from server.api.sse import EventStream
from server.choice import Prompt
from server.errors import BadRequest
from server.generation import Admission, GenerationRequest
from server.grammar.grammar import Grammar
from server.metrics import RequestMeter
from server.middleware import RequestRecord
from server.output import PLAIN, OutputForm
from server.prompt.build import bad_words, logit_bias, output_budget, stop_token_ids
from server.randomness import fresh_seed
from server.schema.common import GenerationBody
from server.schema.unknown import ignored_header
from server.stream import Generation

UINT64_MASK = 2**64 - 1
MAX_PROMPT_LOGPROBS = 2**20
"""Of a request: for all tokens of its prompts with their alternatives, anew for each choice. The answer has some 60
bytes for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prompt as token ids (int32) and images, with the text that is repeated before its outputs."""

    ids: "array[int]"
    echo: str | None = None
    images: PromptImages = NO_IMAGES
    form: OutputForm = PLAIN
    """How its outputs are read."""


async def checked_grammar(gateway: Gateway, grammar: Grammar | None) -> OutputGrammar | None:
    """As `start` takes it. Raises BadRequest for one that cannot be obeyed."""
    return None if grammar is None else await gateway.grammars.check(grammar)


def start(
    gateway: Gateway,
    record: RequestRecord,
    body: GenerationBody,
    prompts: list[Prepared],
    admission: Admission,
    grammar: OutputGrammar | None,
) -> Generation:
    """Hand the prompts to the engine, all or none. Raises BadRequest, Overloaded or Unavailable."""
    record.request_id = body.request_id or record.request_id
    if not gateway.engine.info.generates:
        raise BadRequest(
            "This model writes nothing, since its checkpoint has no output matrix (lm_head). Use /v1/embeddings.",
            param="model",
        )
    if body.ignore_eos and grammar is not None:
        raise BadRequest("ignore_eos is not allowed where the output has a form, which ends.", param="ignore_eos")
    sampling = _sampling(gateway, body, grammar)
    made = [_prompt(gateway, body, sampling, prompt) for prompt in prompts]
    _check_prompt_logprobs([prompt.request for prompt in made])
    streams = gateway.engine.submit([prompt.request for prompt in made], admission)
    record.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    return Generation(made, streams, gateway.tokenizer, RequestMeter(gateway.metrics, record.started))


def _prompt(gateway: Gateway, body: GenerationBody, sampling: SamplingParams, prompt: Prepared) -> Prompt:
    budget = output_budget(len(prompt.ids), gateway.engine.info.max_model_len, body.token_limit)
    max_tokens = max(1, budget)
    request = GenerationRequest(
        prompt_ids=prompt.ids,
        sampling=replace(
            sampling,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            seed=fresh_seed() if body.seed is None else body.seed & UINT64_MASK,
            prompt_logprobs=max(
                -1 if prompt.echo is None else sampling.logprobs,
                -1 if body.prompt_logprobs is None else body.prompt_logprobs,
            ),
        ),
        n=body.n or 1,
        stop=tuple(body.stop or ()),
        include_stop=bool(body.include_stop_str_in_output),
        priority=body.priority or 0,
        cache_salt=body.salt,
        images=prompt.images,
    )
    return Prompt(request=request, echo=prompt.echo, discard_output=budget == 0, form=prompt.form)


def _check_prompt_logprobs(requests: list[GenerationRequest]) -> None:
    """Raises BadRequest."""
    asked = sum(len(request.prompt_ids) * (request.sampling.prompt_logprobs + 1) * request.n for request in requests)
    if asked > MAX_PROMPT_LOGPROBS:
        raise BadRequest(
            f"The request asks for {asked} log-probabilities of prompt tokens; the limit is {MAX_PROMPT_LOGPROBS}. Ask "
            "for fewer alternatives, choices or prompts.",
            param="prompt_logprobs",
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _sampling(gateway: Gateway, body: GenerationBody, grammar: OutputGrammar | None) -> SamplingParams:
    """What all prompts of the request have in common. Raises BadRequest for token ids outside the vocabulary."""
    tokenizer = gateway.tokenizer
    return SamplingParams(
        max_tokens=1,
        min_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        eos_token_ids=() if body.ignore_eos else gateway.engine.info.eos_token_ids,
        stop_token_ids=stop_token_ids(tokenizer, body.stop_token_ids or []),
        logit_bias=logit_bias(tokenizer, body.logit_bias or {}),
        bad_words=bad_words(tokenizer, body.bad_words or []),
        logprobs=body.logprob_count,
        grammar=replace(grammar, close_before_max_tokens=True) if grammar is not None and body.closes else grammar,
    )


async def answer(
    request: Request, generation: Generation, renderer: Renderer, *, stream: bool, ignored: list[str]
) -> Response:
    """The HTTP answer; cancels the generation as soon as the client is gone. Raises ApiError."""
    record = record_of(request)
    if stream:
        return EventStream(generation, renderer, record, ignored_header(ignored))
    try:
        document = await while_connected(request.receive, record, renderer.document(generation))
    finally:
        generation.close()
        renderer.close()
        record.completion_tokens = generation.usage().completion_tokens
    return json_response(document, ignored)
