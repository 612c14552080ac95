"""What the surfaces that are translated into chat requests have in common. Used by `server/responses` and
`server/messages`; API process.

Errors and ignored parameters are named as the client has given them: `names` says for a chat parameter where that was.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from server.api.conversation import unhonoured_by_model
from server.api.gateway import Gateway
from server.errors import ApiError
from server.schema.chat import ChatBody
from server.schema.common import validate
from server.schema.unknown import check_unknown


def checked_chat(gateway: Gateway, document: Mapping[str, Any], names: Mapping[str, str]) -> tuple[ChatBody, list[str]]:
    """(the chat request, names of parameters that have no effect). Raises BadRequest."""
    chat = validate(ChatBody, dict(document))
    unhonoured = unhonoured_by_model(gateway, chat) | chat.unhonoured | (chat.model_extra or {})
    ignored = check_unknown(unhonoured, strict=gateway.config.strict_params)
    return chat, [names.get(name, name) for name in ignored]


@contextmanager
def errors_about(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a chat parameter, or a field of it, name the client's instead."""
    try:
        yield
    except ApiError as error:
        named = error.param or ""
        error.param = names.get(named) or names.get(named.partition(".")[0], error.param)
        raise
