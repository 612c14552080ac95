"""Random requests that use all parameters together, and what their answers have in common, streamed or not.

Values are valid one by one; some combinations are refused. Every request is deterministic: greedy, or with a seed.
"""

from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TEXTS = (
    "What is the capital of France?",
    "Say é, 访问 and 👩‍👩‍👧‍👦.",
    "one two one two one two one two",
    "x",
    "<|im_end|> is a token",
)
texts = st.sampled_from(TEXTS)


def some(required: dict[str, st.SearchStrategy[Any]], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Body]:
    """The required fields and any of the optional ones."""
    return st.fixed_dictionaries(required, optional=optional)


SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.7, 2]),
    "top_p": st.sampled_from([0.01, 0.9, 1]),
    "top_k": st.sampled_from([-1, 0, 1, 40]),
    "min_p": st.sampled_from([0, 0.05, 1]),
    "presence_penalty": st.sampled_from([-2, 0.5, 2]),
    "frequency_penalty": st.sampled_from([-2, 0.5, 2]),
    "repetition_penalty": st.sampled_from([0.5, 1.1, 5]),
    "stop": st.sampled_from(["e", [" the", "\n"], ["is", "a", "zz", " "]]),
    "stop_token_ids": st.sampled_from([[2], [28], [253, 260, 282]]),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 4),
    "logit_bias": st.sampled_from([{"28": -100}, {"504": 100}, {"2": 5, "30": 1.5}]),
    "bad_words": st.sampled_from([["the"], ["Paris", "capital of"], ["é"]]),
    "priority": st.integers(-2, 2),
    "cache_salt": st.sampled_from(["ann", "bob"]),
}
FORMATS = st.sampled_from(
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY, "strict": True}},
    ]
)
STRUCTURES = st.sampled_from(
    [
        {"json": CITY},
        {"regex": "[a-f]{2,9}x"},
        {"choice": ["yes", "no", "perhaps é"]},
        {"grammar": 'start: "a" "b"+ "c"'},
        {"json_object": True},
    ]
)
TOOL_CHOICES = st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "get_weather"}}])
GENERATION: dict[str, st.SearchStrategy[Any]] = SAMPLING | {
    "n": st.integers(1, 3),
    "prompt_logprobs": st.integers(0, 3),
    "truncate_prompt_tokens": st.sampled_from([-1, 5, 40]),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "add_special_tokens": st.booleans(),
    "user": st.just("ann"),
    "response_format": FORMATS,
}
LIMIT = st.integers(1, 8)


@st.composite
def chats(draw: st.DrawFn) -> Body:
    """Chat requests."""
    talk = [{"role": "user", "content": draw(texts)}]
    if draw(st.booleans()):
        talk = [{"role": "system", "content": draw(texts)}, *talk, {"role": "assistant", "content": draw(texts)}]
    fields = some(
        {"seed": st.integers(0, 9), "max_tokens": LIMIT},
        **GENERATION,
        logprobs=st.booleans(),
        max_completion_tokens=LIMIT,
        continue_final_message=st.booleans(),
        add_generation_prompt=st.booleans(),
        chat_template_kwargs=st.just({"enable_thinking": False}),
        include_reasoning=st.booleans(),
        reasoning_effort=st.sampled_from(["none", "low", "high"]),
    )
    body: Body = {"messages": talk} | draw(fields)
    if body.get("logprobs") and draw(st.booleans()):
        body["top_logprobs"] = draw(st.integers(0, 4))
    if draw(st.booleans()):
        body["tools"] = [{"type": "function", "function": function} for function in (FUNCTION, NOW)]
        body |= draw(some({}, tool_choice=TOOL_CHOICES, parallel_tool_calls=st.booleans()))
    return _with_one_form(draw, body)


@st.composite
def completions(draw: st.DrawFn) -> Body:
    """Completion requests."""
    prompt = texts | st.lists(texts, min_size=1, max_size=2) | st.just([504, 4575, 282]) | st.just([[504], [4575, 2]])
    fields = some(
        {"prompt": prompt, "seed": st.integers(0, 9), "max_tokens": st.integers(0, 8)},
        **GENERATION,
        logprobs=st.integers(0, 4),
        echo=st.booleans(),
    )
    return _with_one_form(draw, draw(fields))


def _with_one_form(draw: st.DrawFn, body: Body) -> Body:
    """An output can have one form: often none, else one of those that there are."""
    if "response_format" not in body and draw(st.integers(0, 3)) == 0:
        body["structured_outputs"] = draw(STRUCTURES)
    return body


@st.composite
def responses(draw: st.DrawFn) -> Body:
    """Requests to the Responses API."""
    tool: Body = {"type": "function", **FUNCTION}
    items = st.just(
        [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "input_text", "text": "x"}]}]
    )
    fields = some(
        {"input": texts | items, "seed": st.integers(0, 9), "max_output_tokens": LIMIT},
        **SAMPLING,
        instructions=texts,
        store=st.booleans(),
        metadata=st.just({"a": "b"}),
        tools=st.just([tool]),
        parallel_tool_calls=st.booleans(),
        text=st.sampled_from(
            [{"format": {"type": "json_object"}}, {"format": {"type": "json_schema", "name": "p", "schema": CITY}}]
        ),
        reasoning=st.sampled_from([{"effort": "low"}, {}]),
        truncation=st.sampled_from(["auto", "disabled"]),
        include=st.just(["message.output_text.logprobs"]),
        top_logprobs=st.integers(0, 4),
    )
    body: Body = draw(fields)
    if "tools" in body:
        body |= draw(
            some({}, tool_choice=st.sampled_from(["auto", "required", {"type": "function", "name": "get_weather"}]))
        )
    return body


@st.composite
def messages(draw: st.DrawFn) -> Body:
    """Requests to the Messages API, which knows no seed: greedy."""
    content = texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), min_size=1, max_size=2)
    talk = [{"role": "user", "content": draw(content)}]
    if draw(st.booleans()):
        talk.append({"role": "assistant", "content": draw(texts)})
    fields = some(
        {"max_tokens": LIMIT, "temperature": st.just(0)},
        system=content,
        top_p=SAMPLING["top_p"],
        top_k=st.sampled_from([0, 1, 40]),
        stop_sequences=st.sampled_from([["e"], [" the", "\n"]]),
        thinking=st.sampled_from([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}]),
        output_config=st.sampled_from([{"effort": "low"}, {"format": {"type": "json_schema", "schema": CITY}}]),
        tools=st.just([{"name": "get_weather", "input_schema": CITY}]),
        metadata=st.just({"user_id": "ann"}),
    )
    body: Body = {"messages": talk} | draw(fields)
    if "tools" in body:
        kinds = [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "get_weather"}]
        body |= draw(some({}, tool_choice=st.sampled_from(kinds)))
    return body


PATHS = {
    "/v1/chat/completions": chats(),
    "/v1/completions": completions(),
    "/v1/responses": responses(),
    "/v1/messages": messages(),
}
requests = st.one_of([st.tuples(st.just(path), bodies) for path, bodies in PATHS.items()])
