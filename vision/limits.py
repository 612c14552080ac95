"""Limits on images that come from outside. Declared once here; the command line's options are made from these fields.

Read in the supervisor (to parse) and in the API process (`server/images.py`, `source.py`, `image.py`). Standard library
only.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """How many images, how large, from where, and how much memory they may take."""

    limit_mm_per_prompt: int = field(
        default=64,
        metadata={"help": 'images of one request, as {"image": 4} or image=4; more get 400', "unit": "images"},
    )
    max_image_bytes: int = field(
        default=20 * 1024 * 1024,
        metadata={"help": "largest image file, as sent or fetched; larger ones get 413", "unit": "bytes"},
    )
    max_image_pixels: int = field(
        default=4096 * 3072,
        metadata={
            "help": "width times height of one image, which WebP files count twice; larger ones get 413 before any of "
            "it is decoded"
        },
    )
    max_image_side: int = field(default=16_384, metadata={"help": "width or height of one image, in pixels"})
    max_decoding_pixels: int = field(
        default=4096 * 3072,
        metadata={
            "help": "pixels of all images that are decoded at the same time, each about 8 bytes of memory; one image "
            "always goes"
        },
    )
    image_cache_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={"help": "processed images that are kept for requests with the same ones", "unit": "bytes"},
    )
    max_queued_image_bytes: int = field(
        default=256 * 1024 * 1024,
        metadata={
            "help": "processed images of all running and waiting requests together; more get 429. And as much again of "
            "requests whose images are being processed",
            "unit": "bytes",
        },
    )
    max_media_fetches: int = field(
        default=16, metadata={"help": "images that are fetched, or fetched and not yet processed, at the same time"}
    )
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
        positive = (
            "max_image_bytes",
            "max_image_pixels",
            "max_image_side",
            "max_decoding_pixels",
            "max_queued_image_bytes",
            "max_media_fetches",
            "media_fetch_seconds",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        for name in ("limit_mm_per_prompt", "image_cache_bytes", "max_media_redirects"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        for domain in self.allowed_media_domains:
            if not domain.strip(".") or any(character in domain for character in "/@*?#\\ "):
                raise ValueError(f"allowed_media_domains: {domain!r} is not a host, host:port or .domain")
