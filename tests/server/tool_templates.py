"""Chat templates with the habits of well-known models towards tools and reasoning, in a few lines each."""

HERMES = """{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' or not tools %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

DEEPSEEK = """{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in message['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call['function']['name'] + '\n```json\n' }}
{{- call['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] }}{% endif %}
{%- if message['role'] == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

DEEPSEEK_V31 = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ message['content'] }}{% endif %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' %}{{ '<｜Assistant｜></think>' + (message['content'] or '') }}
{%- if message['tool_calls'] is defined %}{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in message['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] }}
{{- '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{% endif %}
{%- if message['role'] == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"""

LLAMA = """{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>Environment: ipython\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>' + message.content + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>' }}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{ message.content + '<|eot_id|>' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"""

MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls is defined %}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{%- endfor %}[TOOL_CALLS]{{ message.tool_calls | tojson }}{{ eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- '[TOOL_RESULTS]' + message.tool_call_id + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
{%- else %}{{ raise_exception('Only user, assistant and tool') }}{% endif %}
{%- endfor %}"""

KIMI = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}<|im_{{ message.role }}|>
{%- if message.tool_calls %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- elif message.role == 'tool' %}## Return of {{ message.tool_call_id }}
{{ message.content }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>{% endfor %}<|im_assistant|>assistant<|im_middle|>"""

PLAIN = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PARTS = """{% for message in messages %}{{ message.role }}: {% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% endfor %}"""
