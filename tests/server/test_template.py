"""Templates render as in transformers, within bounds, and say what is wrong."""

from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from model_runtime.weights.errors import CheckpointError
from server.embedded import embedded_path
from server.errors import BadRequest
from server.prompt.template import ChatTemplate, RenderTooLong
from server.prompt.tokenizer import load_tokenizer
from tests.server.tiny_tokenizers import CHATML, INST

LLAMA_3 = """{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date + "\n\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- message.tool_calls[0].function.arguments | tojson }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {% endif %}
  {% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
  {% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}
{% endfor %}"""
THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- if loop.index0 > ns.last %}{{ reasoning }}|{% endif %}
    {%- endif %}
    {% generation %}{{ message.role }}: {{ content }}{% endgeneration %}{% break %}
{%- endfor %}
{{ dict(tools=tools, documents=documents) }}"""
PARTS = """{% for message in messages %}
{{ message['role'] | capitalize }}{% if message['content'][0]['type'] == 'image' %}:
{% else %}: {% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}
{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK: list[dict[str, object]] = [
    {"role": "user", "content": "  What is <b>2 & 2</b>? \n"},
    {"role": "assistant", "content": '<think>\nhm\n</think>\n\nIt\'s "four" – 四 '},
    {"role": "user", "content": "Thanks"},
]
CALL: dict[str, object] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": "<é>", "a": [1, None]}}}
    ],
}


def render(template: ChatTemplate, messages: list[dict[str, object]], *, generation: bool = True) -> str:
    return template.render(messages, {}, add_generation_prompt=generation, max_chars=100_000)


@pytest.mark.parametrize(
    "source", [CHATML, INST, LLAMA_3, MISTRAL, THINKING], ids=["chatml", "inst", "llama3", "mistral", "thinking"]
)
@pytest.mark.parametrize("generation", [True, False])
def test_text_equals_transformers(source: str, generation: bool) -> None:
    conversations = [TALK, TALK[:1], TALK[:2]]
    if "roles must alternate" not in source:
        conversations += [[{"role": "system", "content": " Be brief. "}, *TALK], [*TALK[:1], CALL, *TALK[1:]]]
    template = ChatTemplate(source, SPECIALS)
    assert not template.takes_parts
    for messages in conversations:
        theirs, _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=generation, **SPECIALS
        )
        assert render(template, messages, generation=generation) == theirs[0]


def test_the_date_and_json_are_as_in_transformers() -> None:
    text = render(ChatTemplate(LLAMA_3, SPECIALS), [TALK[0], CALL])
    assert f"Today Date: {datetime.now():%d %b %Y}\n\n" in text
    assert '{"b": "<é>", "a": [1, null]}' in text


def test_a_template_that_takes_parts() -> None:
    template = ChatTemplate(PARTS, {})
    assert template.takes_parts
    messages: list[dict[str, object]] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    theirs, _ = render_jinja_template([messages], chat_template=PARTS, add_generation_prompt=True)
    assert render(template, messages) == theirs[0]


def test_what_a_template_refuses() -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        render(ChatTemplate(MISTRAL, SPECIALS), [TALK[1]])
    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ nothing.here }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'].__class__.mro() }}",
    ],
)
def test_a_template_that_fails(source: str) -> None:
    with pytest.raises(BadRequest, match="chat template fails on these messages") as caught:
        render(ChatTemplate(source, {}), TALK)
    assert len(caught.value.message) < 400


def test_templates_cannot_change_their_input_or_reach_python() -> None:
    for source in ("{{ messages.append(1) }}", "{{ messages[0].update(x=1) }}", "{{ ''.__class__.__mro__ }}"):
        with pytest.raises(BadRequest):
            render(ChatTemplate(source, {}), TALK)


def test_output_is_bounded() -> None:
    template = ChatTemplate("{% for i in range(1000) %}{{ 'x' * 100 }}{% endfor %}", {})
    with pytest.raises(RenderTooLong):
        template.render(TALK, {}, add_generation_prompt=True, max_chars=99_999)
    assert len(template.render(TALK, {}, add_generation_prompt=True, max_chars=100_000)) == 100_000


def test_a_syntax_error_names_the_line() -> None:
    with pytest.raises(CheckpointError, match="error in line 2"):
        ChatTemplate("fine\n{% if %}", {})


def test_the_developer_role_is_looked_for() -> None:
    assert ChatTemplate("{{ 'developer' }}", {}).knows_developer
    assert not ChatTemplate(CHATML, {}).knows_developer


@pytest.mark.model
def test_the_embedded_template() -> None:
    tokenizer = load_tokenizer(Path(embedded_path()))
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_variables)
    for messages in (TALK, [{"role": "system", "content": "Be brief."}, *TALK]):
        theirs, _ = render_jinja_template([messages], chat_template=tokenizer.chat_template, add_generation_prompt=True)
        assert render(template, messages) == theirs[0]
