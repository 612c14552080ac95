"""Limits on images that come from outside. Declared once here; the command line's options are made from these fields.

Read in the supervisor (to parse) and in the API process (`source.py`, `image.py`). Standard library only.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """How large one image may be, and where it may be fetched from."""

    max_image_bytes: int = field(
        default=20 * 1024 * 1024,
        metadata={"help": "largest image file, as sent or fetched; larger ones get 413", "unit": "bytes"},
    )
    max_image_pixels: int = field(
        default=4096 * 3072,
        metadata={"help": "width times height of one image; larger ones get 413 before anything is decoded"},
    )
    max_image_side: int = field(default=16_384, metadata={"help": "width or height of one image, in pixels"})
    media_fetch_seconds: float = field(
        default=5.0, metadata={"help": "seconds to fetch one image, name look-up and redirects included"}
    )
    max_media_redirects: int = field(default=3, metadata={"help": "redirects to follow for one image; each is checked"})
    allowed_media_domains: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "hosts that images may be fetched from: `host`, `host:port`, or `.domain` for a domain and all "
            "below it; none by default, so only data: URLs work"
        },
    )

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the rule."""
        for name in ("max_image_bytes", "max_image_pixels", "max_image_side", "media_fetch_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if self.max_media_redirects < 0:
            raise ValueError("max_media_redirects must not be negative")
        for domain in self.allowed_media_domains:
            if not domain.strip(".") or any(character in domain for character in "/@*?#\\ "):
                raise ValueError(f"allowed_media_domains: {domain!r} is not a host, host:port or .domain")
