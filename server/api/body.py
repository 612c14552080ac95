"""Request bodies: read under limits, parsed and checked without blocking the event loop. API process; used by routes.

A parser holds the interpreter lock, in whatever thread it runs. So a large body is first measured field by field, which
takes some milliseconds and builds nothing; only what could fit is then parsed, in a thread.
"""

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.api.gateway import Gateway, record_of
from server.errors import BadRequest, BodyTooLarge, ClientGone, DeadlineExceeded, UnsupportedMediaType, context_overflow
from server.nesting import is_deeper
from server.prompt.options import MAX_TRUNCATED
from server.schema.common import RequestBody, validate
from server.schema.unknown import check_unknown

LARGE_BODY = 64 * 1024
"""Bytes above which a body is measured before it is parsed, in a thread."""
PROMPT_FIELDS = ("prompt", "messages", "input", "tokens")
MAX_FIELD_BYTES = 1024 * 1024
"""Of any other field in a large body."""
MAX_UNKNOWN_BYTES = 2 * MAX_FIELD_BYTES
"""Of all unknown fields together; more are not even looked at by name."""
MAX_ESCAPE = 6
"""JSON spells a byte of text with at most this many (`\\u0041`)."""
MAX_DATA_URLS = 1024
"""In a body; further ones count as text."""
MAX_DEPTH = 128
"""Lists and objects of a field within each other. What walks through them later calls itself at each."""
_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_URL_KEY = re.compile(rb'"(?:url|image_url)"\s*:\s*$')
_DATA_VALUE = re.compile(rb"\s{0,16}:\s{0,16}\"")
_MAX_KEY = 64
"""Bytes in which the key of a URL is looked for."""
_ALL_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOT_JSON = "The body is not valid JSON"


Body = TypeVar("Body", bound=RequestBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a prompt could need at most."""

    max_model_len: int
    max_token_bytes: int
    max_prompts: int


async def read_body(request: Request, gateway: Gateway, schema: type[Body]) -> tuple[Body, list[str]]:
    """(checked body, names of ignored parameters). Raises ApiError: 400, 408, 413, 415, 429, 499."""
    if not _JSON_TYPE.fullmatch(request.headers.get("content-type", "")):
        raise UnsupportedMediaType("The content type must be application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("The body must not be compressed.")
    raw = await _read(request, gateway.config.max_body_bytes, gateway.config.body_timeout)
    limits = Limits(
        max_model_len=gateway.engine.info.max_model_len,
        max_token_bytes=gateway.tokenizer.max_token_bytes,
        max_prompts=gateway.config.max_sequences_per_request,
    )
    strict = gateway.config.strict_params
    if len(raw) > LARGE_BODY:
        async with gateway.parsing:
            return await asyncio.to_thread(_checked, raw, schema, strict, limits)
    return _checked(raw, schema, strict, None)


def _checked(raw: bytes, schema: type[Body], strict: bool, limits: Limits | None) -> tuple[Body, list[str]]:
    if limits is not None:
        check_size(raw, schema, limits)
    body = validate(schema, parse(raw))
    return body, check_unknown({**(body.model_extra or {}), **body.unhonoured}, strict=strict)


async def _read(request: Request, limit: int, timeout: float) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = BodyTooLarge(f"The body exceeds the limit of {limit} bytes.")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()  # a list of pieces would leave the heap in pieces too
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise too_large
                body += chunk
    except ClientDisconnect:
        record_of(request).client_gone = True
        raise ClientGone("The client closed the connection.") from None
    except TimeoutError:
        raise DeadlineExceeded(f"The body did not arrive within {timeout:g} s.") from None
    return bytes(body)


def check_size(raw: bytes, schema: type[RequestBody], limits: Limits) -> None:
    """Refuse what cannot fit, from the lengths of the fields. Raises BadRequest."""
    known = {name: value for name, value in _fields(_known_fields(schema), raw).items() if len(value)}
    surplus = MAX_TRUNCATED if "truncate_prompt_tokens" in known else 1
    for name, value in known.items():
        _check_field_size(name, value)
        if name in PROMPT_FIELDS:
            longest = limits.max_model_len * surplus
            most = limits.max_prompts if name == schema.prompts_field else 1
            _check_prompt_size(name, bytes(value), replace(limits, max_model_len=longest, max_prompts=most))
    rest = len(raw) - sum(map(len, known.values()))
    if LARGE_BODY < rest <= MAX_UNKNOWN_BYTES:
        for name, value in _fields(_ALL_FIELDS, raw).items():
            _check_field_size(name, value)
            rest -= 0 if name in known else len(value)
    if rest > LARGE_BODY:
        raise BadRequest("The body repeats fields, or is mostly unknown fields or empty space.")


def _fields(decoder: "msgspec.json.Decoder[Any]", raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        fields = decoder.decode(raw)
    except msgspec.ValidationError:
        raise BadRequest("The body must be a JSON object.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{_NOT_JSON}: {error}") from None
    return fields if isinstance(fields, dict) else msgspec.structs.asdict(fields)


@cache
def _known_fields(schema: type[RequestBody]) -> "msgspec.json.Decoder[Any]":
    """Finds the fields of a schema and keeps nothing of others, however many there are."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in schema.model_fields]
    return msgspec.json.Decoder(msgspec.defstruct("KnownFields", fields))


def _check_field_size(name: str, value: msgspec.Raw) -> None:
    if name not in PROMPT_FIELDS and len(value) > MAX_FIELD_BYTES:
        raise BadRequest(f"{name[:64]} exceeds the limit of {MAX_FIELD_BYTES} bytes.", param=name[:64])


def _check_prompt_size(name: str, value: bytes, limits: Limits) -> None:
    is_list = limits.max_prompts > 1 and value.startswith(b"[")
    prompts = limits.max_prompts if is_list else 1
    if b'"' in value:
        text_bytes = (len(value) - _data_url_bytes(value)) // (MAX_ESCAPE if b"\\" in value else 1)
        least_tokens = text_bytes // limits.max_token_bytes
        if is_list and (strings := (value.count(b'"') - value.count(b'\\"')) // 2) > prompts:
            raise BadRequest(f"At least {strings} prompts were given; {prompts} is the limit.", param=name)
    else:
        least_tokens = value.count(b",") + 1
        prompts = prompts if b"[" in value[1:] else 1
    if least_tokens > prompts * limits.max_model_len:
        raise context_overflow(least_tokens, limits.max_model_len, param=name)


def _data_url_bytes(value: bytes) -> int:
    """Bytes of the data: URLs, and of images in Anthropic's `data` fields, which are no text. What is in a text is not
    taken for one: its quotes are escaped."""
    total = end = 0
    for _ in range(MAX_DATA_URLS):
        start = value.find(b'"data:', end)
        if start < 0:
            break
        end = value.find(b'"', start + 1)
        if _URL_KEY.search(value, max(0, start - _MAX_KEY), start):
            total += end - start
    end = 0
    for _ in range(MAX_DATA_URLS):
        start = value.find(b'"data"', end)
        if start < 0:
            break
        end = start + len(b'"data"')
        if found := _DATA_VALUE.match(value, end):
            end = value.find(b'"', found.end())
            total += end - start
    return total


def parse(raw: bytes) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no NaN, no repeated keys, no lone surrogates, not nested deeply. Raises
    BadRequest."""
    constants: list[str] = []

    def note(constant: str) -> float:
        constants.append(constant)
        return float(constant)

    try:
        document = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=note)
    except UnicodeDecodeError:
        raise BadRequest(f"{_NOT_JSON}: it is not UTF-8.") from None
    except RecursionError:
        raise BadRequest(f"{_NOT_JSON}: it is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"{_NOT_JSON}: {error}") from None
    except ValueError:
        raise BadRequest("The body holds a number of too many digits.") from None
    if not isinstance(document, dict):
        raise BadRequest("The body must be a JSON object.")
    for name, value in document.items():
        if is_deeper(value, MAX_DEPTH):
            param = _printable(name)
            raise BadRequest(f"{param} must not be nested more than {MAX_DEPTH} levels deep.", param=param)
    if constants:
        _refuse_fields(document, "holds NaN or Infinity, which JSON does not have", allow_nan=False)
    if b"\\" in raw and _SURROGATE.search(raw):
        _refuse_fields(document, "holds text that is not valid Unicode", allow_nan=True)
    return document


def _printable(name: str) -> str:
    return name.encode("ascii", "replace").decode()[:64]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = _printable(Counter(name for name, _ in pairs).most_common(1)[0][0])
        raise BadRequest(f"{repeated} is given more than once in an object.", param=repeated)
    return found


def _refuse_fields(document: dict[str, Any], fault: str, *, allow_nan: bool) -> None:
    """Raises BadRequest for the first field that cannot be spelled in strict JSON of UTF-8."""
    for name, value in document.items():
        try:
            name.encode()
            json.dumps(value, ensure_ascii=False, allow_nan=allow_nan).encode()
        except ValueError:
            raise BadRequest(f"{_printable(name)} {fault}.", param=_printable(name)) from None
