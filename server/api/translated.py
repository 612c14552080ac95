"""What the surfaces that are translated into chat requests have in common. Used by `server/responses` and
`server/messages`; API process.

Errors and ignored parameters are named as the client has given them: `names` says for a chat parameter where that was.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from server.api.conversation import unhonoured_by_model
from server.api.gateway import Gateway
from server.errors import ApiError, BadRequest
from server.schema.chat import ChatBody
from server.schema.common import RequestBody, validate
from server.schema.unknown import HARMLESS, check_unknown


def checked_chat(gateway: Gateway, document: Mapping[str, Any], names: Mapping[str, str]) -> tuple[ChatBody, list[str]]:
    """(the chat request, names of parameters that have no effect). Raises BadRequest."""
    chat = validate(ChatBody, dict(document))
    unhonoured = unhonoured_by_model(gateway, chat) | chat.unhonoured | (chat.model_extra or {})
    ignored = check_unknown(unhonoured, strict=gateway.config.strict_params)
    return chat, [names.get(name, name) for name in ignored]


def refuse_chat_parameters(body: RequestBody) -> None:
    """What chat knows and this body does not would change the answer if it were understood. Raises BadRequest."""
    for name, value in (body.model_extra or {}).items():
        if value is not None and name in ChatBody.model_fields and name not in HARMLESS:
            raise BadRequest(f"{name} is a parameter of chat completions, not of this API.", param=name)


@contextmanager
def errors_about(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a chat parameter, or a field of it, name the client's instead."""
    try:
        yield
    except ApiError as error:
        named = error.param or ""
        error.param = names.get(named) or names.get(re.split(r"[.[]", named)[0], error.param)
        raise
