"""From an image URL that a client sent to the bytes of the file, within the limits; what they are is not known yet.

Owns the policy of fetching. Called by the API process: `decode_data_url` is plain work for a worker thread, `Fetcher`
lives as long as the server and is used from its event loop. `file:` and all other schemes are refused.

A URL is parsed once, by the library that also connects, so that nobody can make the check and the connection disagree.
The host is looked up once and the connection goes to the address that was checked, with the name in SNI, certificate
check and Host header; a second answer of the name server is never asked for. Each redirect starts over. Neither the
environment's proxies nor cookies are used, a connection is never used twice (the pool knows only addresses, so it
could hand a host the connection made for another), and the answer may not be compressed.
"""

import asyncio
import binascii
import re

import httpx
import pybase64

from vision.address import DEFAULT_PORTS, Resolve, check_host, public_address, resolve_host
from vision.errors import BadImageUrl, ImageTooLarge, SourceFailed, SourceRefused, echo
from vision.limits import ImageLimits

MAX_URL = 8192
"""Characters of a URL that is fetched."""
BASE64_PIECE = 1 << 17
"""Characters that are decoded at once, in a fraction of a millisecond."""

DATA_URL = re.compile(r"data:(?P<mime>[^;,]{0,255})(?P<parameters>(?:;[^;,]{0,255}){0,8}),", re.IGNORECASE)
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
WHITESPACE = b" \t\r\n\f"
OPAQUE_TYPES = ("", "application/octet-stream", "binary/octet-stream")
"""Content types that say nothing; object stores answer with them."""
REDIRECTS = (301, 302, 303, 307, 308)


def is_data_url(url: str) -> bool:
    """Whether `decode_data_url` is to read it, and not a `Fetcher`."""
    return url.lstrip()[:5].lower() == "data:"


def decode_data_url(url: str, limits: ImageLimits) -> bytes:
    """The bytes of `data:[image/TYPE][;parameters];base64,...`.

    White space around the URL and inside the base64 text and missing padding are tolerated, as browsers do; any other
    character outside the base64 alphabet is not. The declared type must be an image's or absent; it isn't believed.
    Raises BadImageUrl, ImageTooLarge.
    """
    start = len(url) - len(url.lstrip())
    head = DATA_URL.match(url, start)
    if head is None:
        raise BadImageUrl(f"Not a data: URL of the form data:image/png;base64,...: {echo(url[start:])}")
    mime, parameters = head["mime"].strip().lower(), head["parameters"].lower().replace(" ", "").split(";")
    if mime and not mime.startswith("image/"):
        raise BadImageUrl(f"The data: URL declares {echo(mime)}, which is not an image type")
    if parameters[-1] != "base64":
        raise BadImageUrl("The data: URL must be base64-encoded: data:image/png;base64,...")
    data = _decode_base64(url, head.end(), limits)
    if not data:
        raise BadImageUrl("The data: URL holds no bytes")
    return data


def _decode_base64(url: str, start: int, limits: ImageLimits) -> bytes:
    """Piece by piece: each of these calls keeps all other threads from running, the event loop's too. What is left of a
    piece goes with the next one; the end, which may be padded, is only decoded when it is known to be the end."""
    data, rest = bytearray(), b""
    try:
        for at in range(start, len(url), BASE64_PIECE):
            text = rest + _without_white_space(url[at : at + BASE64_PIECE].encode("ascii", "replace"))
            whole = max(len(text) - 5, 0) // 4 * 4
            if b"=" in text[:whole]:
                raise BadImageUrl("The data: URL is not valid base64: it goes on after its padding")
            data += pybase64.b64decode(text[:whole], validate=True)
            rest = text[whole:]
            if len(data) > limits.max_image_bytes:
                raise _too_many_bytes(limits)
        padding = b"=" * (-len(rest) % 4) if not rest.endswith(b"=") else b""
        data += pybase64.b64decode(rest + padding, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImageUrl(f"The data: URL is not valid base64: {error}") from error
    if len(data) > limits.max_image_bytes:
        raise _too_many_bytes(limits)
    return bytes(data)


def _without_white_space(text: bytes) -> bytes:
    """Most have none, and to find that out takes a tenth of the time."""
    return text.translate(None, WHITESPACE) if any(character in text for character in WHITESPACE) else text


def _too_many_bytes(limits: ImageLimits) -> ImageTooLarge:
    return ImageTooLarge(f"The image file has more than {limits.max_image_bytes} bytes, which is the limit")


class Fetcher:
    """Fetches images over http and https from the allowed domains. `resolve` looks names up; `transport` carries one
    request to the address in its URL (tests inject both). Close it with `aclose()`."""

    def __init__(
        self,
        limits: ImageLimits,
        *,
        resolve: Resolve = resolve_host,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._limits, self._resolve = limits, resolve
        pool = httpx.Limits(max_connections=limits.max_media_fetches, max_keepalive_connections=0)
        self._transport = transport or httpx.AsyncHTTPTransport(trust_env=False, limits=pool)

    async def aclose(self) -> None:
        """Closes what is open."""
        await self._transport.aclose()

    async def fetch(self, url: str) -> bytes:
        """The body that the URL leads to: at most `max_image_bytes`, within `media_fetch_seconds`.

        Raises BadImageUrl, SourceRefused, SourceFailed, ImageTooLarge.
        """
        limits = self._limits
        try:
            async with asyncio.timeout(limits.media_fetch_seconds):
                target = _parse(url, None)
                for _ in range(limits.max_media_redirects + 1):
                    outcome = await self._request(target)
                    if isinstance(outcome, bytes):
                        return outcome
                    target = outcome
        except TimeoutError as error:
            message = (
                f"The image could not be fetched within {limits.media_fetch_seconds:g} seconds, which is the limit"
            )
            raise SourceFailed(message) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise SourceFailed(f"The image could not be fetched: {type(error).__name__}") from error
        raise SourceRefused(f"The image URL redirects more than {limits.max_media_redirects} times, which is the limit")

    async def _request(self, url: httpx.URL) -> bytes | httpx.URL:
        """One hop: the body, or where it is said to be."""
        host = url.raw_host.decode("ascii").strip("[]")
        port = check_host(url.scheme, host, url.port, self._limits.allowed_media_domains)
        address = await public_address(host, port, self._resolve)
        request = httpx.Request(
            "GET",
            url.copy_with(host=address),
            headers={
                "host": url.netloc.decode("ascii"),
                "accept": "image/*",
                "accept-encoding": "identity",
                "user-agent": "firstlight",
                "connection": "close",
            },
            extensions={"sni_hostname": host},
        )
        response = await self._transport.handle_async_request(request)
        try:
            if response.status_code in REDIRECTS:
                return _parse(response.headers.get("location", ""), url)
            return await self._body(response)
        finally:
            await response.aclose()

    async def _body(self, response: httpx.Response) -> bytes:
        _check_head(response)
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._limits.max_image_bytes:
            raise _too_many_bytes(self._limits)
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._limits.max_image_bytes:
                raise _too_many_bytes(self._limits)
        if not body:
            raise SourceFailed("The image URL answered with an empty body")
        return bytes(body)


def _check_head(response: httpx.Response) -> None:
    """Raises SourceFailed unless the answer is a 200 with an uncompressed body that may be an image."""
    if response.status_code != 200:
        raise SourceFailed(f"The image URL answered with status {response.status_code}")
    media_type = response.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type not in OPAQUE_TYPES and not media_type.startswith("image/"):
        raise SourceFailed(f"The image URL answered with {echo(media_type)}, which is not an image type")
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise SourceFailed("The image URL answered with a compressed body, which was not asked for")


def _parse(text: str, base: httpx.URL | None) -> httpx.URL:
    """The URL, absolute, without fragment. Raises BadImageUrl, SourceRefused."""
    text = text.strip(" \t\r\n")
    if len(text) > MAX_URL:
        raise BadImageUrl(f"The image URL has more than {MAX_URL} characters, which is the limit")
    if not text or "\\" in text or any(character <= " " or character == "\x7f" for character in text):
        raise BadImageUrl(f"Not an image URL: {echo(text)}")
    scheme = SCHEME.match(text)
    if base is None and scheme is None:
        raise BadImageUrl(f"An image URL begins with data: or https:, not {echo(text)}")
    if scheme is not None and scheme[1].lower() not in DEFAULT_PORTS:
        raise SourceRefused(f"Images are not read from {echo(scheme[0])} URLs")
    try:
        url = httpx.URL(text) if base is None else base.join(text)
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise BadImageUrl(f"Not an image URL: {echo(text)}") from error
    if url.scheme not in DEFAULT_PORTS or not url.host:
        raise BadImageUrl(f"The image URL has no host: {echo(text)}")
    if url.userinfo:
        raise SourceRefused("An image URL may not hold a user name or password")
    if base is not None and base.scheme == "https" and url.scheme == "http":
        raise SourceRefused("The image URL redirects from https to http")
    return url.copy_with(fragment=None)
