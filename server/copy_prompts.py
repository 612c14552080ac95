"""Requests whose answers repeat most of what is there, for the tools that measure and check speculation, in their
process.
"""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path

from server.options import OptionError
from server.prompt.template import ChatTemplate
from server.prompt.tokenizer import load_tokenizer

PROMPTS = Path(__file__).with_name("copy_prompts.json")
MAX_PROMPT_CHARS = 100_000
GIVEN = 3
"""One in so many lines of the right answer is given, from the first on."""


def copy_prompts(model: Path) -> Iterator[tuple[str, "array[int]"]]:
    """(Name, token ids) of each request with the beginning of its answer, those about texts before those about code.
    All answers begin by the same rule: with the first third of the lines of the right one."""
    tokenizer = load_tokenizer(model)
    if tokenizer.chat_template is None:
        raise OptionError("the model has no chat template, which these prompts need")
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_variables)
    for prompt in json.loads(PROMPTS.read_text()):
        messages: list[dict[str, object]] = [{"role": "user", "content": prompt["request"]}]
        text = template.render(messages, add_generation_prompt=True, variables={}, max_chars=MAX_PROMPT_CHARS)
        lines = prompt["answer"].splitlines(keepends=True)
        text += "".join(lines[: -(-len(lines) // GIVEN)])
        yield prompt["name"], tokenizer.encode(text, add_special_tokens=False, allow_special=True)
