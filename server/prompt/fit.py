"""A conversation that is too long, without its oldest turns. Used by `server/api/conversation.py`; API process.

A turn begins with a user's message, so that calls and their results stay together. What the conversation begins with
(instructions) and its last turn always stay.
"""

from collections.abc import Sequence

from server.errors import BadRequest
from server.images import PreparedImage
from server.prompt.build import PromptBuilder
from server.prompt.images import ChatPrompt
from server.prompt.messages import Message, image_urls
from server.prompt.options import ChatOptions

_INSTRUCTIONS = ("system", "developer")


async def chat_that_fits(
    prompts: PromptBuilder,
    messages: Sequence[Message],
    images: Sequence[PreparedImage] = (),
    *,
    max_model_len: int,
    options: ChatOptions,
) -> ChatPrompt:
    """The prompt of as many of the last turns as fit; images belong to the messages that stay. Raises BadRequest when
    not even the last turn fits."""

    async def build(begin: int) -> ChatPrompt:
        some = [*messages[:kept], *messages[begin:]]
        shown = images[len(image_urls(messages[:begin])) :]  # instructions have none
        return await prompts.chat(some, shown, max_model_len=max_model_len, options=options)

    kept = next((index for index, message in enumerate(messages) if message.get("role") not in _INSTRUCTIONS), 0)
    begins = [kept, *(index for index in range(kept + 1, len(messages)) if messages[index].get("role") == "user")]
    best: ChatPrompt | None = None
    low, high, tried = 0, len(begins), 0  # first the whole; what begins before begins[low] is too long
    while low < high:
        try:
            best, high = await build(begins[tried]), tried
        except BadRequest as error:
            if error.code != "context_length_exceeded" or begins[tried] == begins[-1]:
                raise
            low = tried + 1
        tried = (low + high) // 2
    assert best is not None, "the last turn fits, or its error was raised"
    return best
