"""What may be wrong with an image that came from outside. No HTTP here: `server/errors.py` gives each kind a status.

Raised by `source.py`, `address.py` and `image.py` in the API process. Messages are for the client: they name the limit
that was met and never echo what was sent at length.
"""

MAX_ECHO = 80
"""Characters of something a client sent that a message may repeat."""


class ImageError(Exception):
    """An image that cannot be used. `kind` is machine-readable and stable."""

    kind = "image_error"


class BadImageUrl(ImageError):
    """The URL itself is wrong: malformed, bad base64, a mime type that is no image."""

    kind = "bad_image_url"


class SourceRefused(ImageError):
    """The place may not be read from: scheme, host, port, address or redirect is outside the policy."""

    kind = "image_source_refused"


class SourceFailed(ImageError):
    """The place may be read from, but gave no image: unreachable, too slow, an HTTP error, not an image type."""

    kind = "image_source_failed"


class ImageTooLarge(ImageError):
    """More bytes, pixels or side than the limit, which the message names."""

    kind = "image_too_large"


class UnsupportedImage(ImageError):
    """The bytes are of no format in the allow-list (SVG, HTML, PDF, EPS, unknown)."""

    kind = "unsupported_image_format"


class CorruptImage(ImageError):
    """The format is known, but the file is truncated or broken."""

    kind = "corrupt_image"


def echo(text: str) -> str:
    """What a client sent, shortened and made printable."""
    return ascii(text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "...")
