"""The last message of a conversation as the beginning of the answer: where the prompt ends then.

Used by `server/prompt/build.py`; API process. Pure. A *mark*, a noncharacter that the request does not hold, is put at
the end of the message's text before the template is rendered; the prompt is what the template wrote before it. A space
follows the mark, as in transformers' `apply_chat_template`: where the template trims it away, it would have trimmed the
text's own white space too.
"""

from server.errors import BadRequest

_PARAM = "continue_final_message"


def mark_end(message: dict[str, object], mark: str) -> None:
    """Put the mark at the end of the plain message's text. Raises BadRequest where it does not end with text."""
    content = message["content"]
    part = content[-1] if isinstance(content, list) and content else None
    if isinstance(content, str):
        message["content"] = f"{content}{mark} "
    elif isinstance(part, dict) and "text" in part:
        part["text"] = f"{part['text']}{mark} "
    else:
        raise BadRequest("With continue_final_message the last message must end with text.", param=_PARAM)


def up_to(text: str, mark: str) -> str:
    """What stands before the last mark. Raises BadRequest where the template has dropped it."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise BadRequest("The model's chat template does not show the text of the last message.", param=_PARAM)
    return before if after.startswith(" ") else before.rstrip()
