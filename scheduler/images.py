"""What of which image is encoded when, and how far prompts can be computed. Owned by `Scheduler`, engine process.

A prompt's images are needed in order. A running sequence pins those that a step could reach, beginning with the next
one; for an image without which it cannot go on it takes the pins of those behind it in rank, last first. So the best in
rank always goes on, and nobody waits in a circle. Pixels are kept as long as a live sequence refers to them: an image
that was evicted is encoded again.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from scheduler import policy
from scheduler.encoder_cache import EncoderCache, EncoderLimits
from scheduler.image_spans import image_bounds
from scheduler.plan import ImageJobs, ImagePixels, ints
from scheduler.request import Image, NeverFits, PixelsMissing, Request
from scheduler.sequence import Sequence


class _Job(NamedTuple):
    key: bytes
    slot: int
    num_embeddings: int
    pixels: ImagePixels


@dataclass(slots=True)
class _Source:
    pixels: ImagePixels
    num_embeddings: int
    num_users: int
    """Images of live sequences with this key."""


class ImagePlanner:
    """Pixels and encoder cache; without sequences that have images every call costs next to nothing."""

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self._cache = EncoderCache(limits)
        self._sources: dict[bytes, _Source] = {}
        self._jobs: list[_Job] = []
        self._pixels_left = 0
        self.num_hits = 0
        self.num_encoded = 0

    @property
    def num_bytes(self) -> int:
        """Embeddings that the runtime keeps."""
        return self._cache.num_bytes

    def refuse(self, request: Request) -> None:
        """Raise NeverFits for an image that the memory to encode or to keep it was not planned for, PixelsMissing where
        pixels are needed."""
        images = request.images.images
        assert not images or self.limits.bytes_per_embedding, "images for a model that has none"
        for image in images:
            if image.num_pixels > self.limits.max_image_pixels:
                raise NeverFits(image.num_pixels, self.limits.max_image_pixels, "pixels of one preprocessed image")
            num_bytes = self._cache.bytes_for(image.num_embeddings)
            if num_bytes > self.limits.cache_bytes:
                raise NeverFits(num_bytes, self.limits.cache_bytes, "bytes of encoder cache for one image")
        brought = {image.key for image in images if image.pixels is not None}
        missing = sum(image.key not in brought and image.key not in self._sources for image in images)
        if missing:
            raise PixelsMissing(f"the pixels of {missing} of {len(images)} images are not here")

    def add(self, seq: Sequence) -> None:
        """Take in the images of an accepted sequence that `refuse` has let pass."""
        images = seq.request.images.images
        seq.image_starts, seq.image_ends = image_bounds(seq.request.images, seq.num_prompt)
        seq.image_end = seq.image_ends[-1]
        seq.is_adapted = self.limits.adapted
        for image in images:
            if image.pixels is not None and image.key not in self._sources:
                assert image.num_pixels == image.pixels.num_pixels, "pixels of another size than the image"
                self._sources[image.key] = _Source(image.pixels, image.num_embeddings, 0)
        for image in images:
            source = self._sources[image.key]
            assert source.num_embeddings == image.num_embeddings, "images with equal keys and unequal embeddings"
            assert source.pixels.num_pixels == image.num_pixels, "images with equal keys and unequal pixels"
            source.num_users += 1

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence; its pixels go with their last user, its embeddings stay until their memory is needed."""
        self.release(seq)
        for image in seq.request.images.images:
            source = self._sources[image.key]
            source.num_users -= 1
            if source.num_users == 0:
                del self._sources[image.key]

    def start(self, seq: Sequence) -> None:
        """A sequence begins to run behind its prefix hit, whose images it does not need."""
        seq.next_image = seq.num_pinned = bisect_right(seq.image_ends, seq.num_computed)

    def advance(self, seq: Sequence) -> None:
        """Unpin the images whose rows are computed."""
        while seq.next_image < seq.num_pinned and seq.image_ends[seq.next_image] <= seq.num_computed:
            self._cache.unpin(seq.request.images.images[seq.next_image].key)
            seq.next_image += 1

    def release(self, seq: Sequence) -> None:
        """Unpin all."""
        for image in seq.request.images.images[seq.next_image : seq.num_pinned]:
            self._cache.unpin(image.key)
        seq.num_pinned = seq.next_image

    def ready(self, prompts: list[Sequence], share: int, max_pixels: int, may_wait: bool) -> list[tuple[Sequence, int]]:
        """(sequence, tokens > 0 that can be computed now) of the running sequences with a prompt to compute.

        Makes jobs, best rank first, for images that a step of `share` tokens could reach, of at most `max_pixels`
        together; a single one may be larger. With `may_wait`, that may be none, since others that compute have pins.
        """
        if not any(seq.num_computed < seq.image_end for seq in prompts):
            return [(seq, seq.remaining) for seq in prompts]
        self._pixels_left = max_pixels
        ranked = sorted(prompts, key=policy.rank)
        chunks: list[tuple[Sequence, int]] = []
        for index, seq in enumerate(ranked):
            self._prepare(seq, share, ranked[:index:-1])
            waits = seq.num_pinned < len(seq.image_starts)
            end = seq.image_starts[seq.num_pinned] if waits else len(seq.tokens)
            if end > seq.num_computed:
                chunks.append((seq, end - seq.num_computed))
        assert chunks or may_wait, "no prompt can be computed"
        return chunks

    def slot(self, key: bytes) -> int:
        """Where the embeddings of a pinned image are."""
        return self._cache.slot(key)

    def take_jobs(self) -> tuple[ImageJobs, "array[int]"]:
        """(images to encode, int32 slots to forget before that) of the step that is planned."""
        jobs, drops = self._jobs, self._cache.take_drops()
        encode = ImageJobs(
            slots=ints([job.slot for job in jobs]),
            num_embeddings=ints([job.num_embeddings for job in jobs]),
            pixels=tuple(job.pixels for job in jobs),
        )
        return encode, drops

    def finish_jobs(self, failed_slots: "array[int]", *, encoded: bool) -> list[bytes]:
        """A step was executed, that of the jobs if `encoded`; the keys of images that could not be encoded. Those that
        need them must end, then `discard` forgets each."""
        jobs: list[_Job] = []
        if encoded:
            jobs, self._jobs = self._jobs, []
        failed = [job.key for job in jobs if job.slot in failed_slots]
        assert len(failed) == len(failed_slots), f"slots {failed_slots.tolist()} failed that were not to be encoded"
        return failed

    def needs(self, seq: Sequence, keys: list[bytes]) -> bool:
        """Whether a sequence has pinned one of these images."""
        return any(image.key in keys for image in seq.request.images.images[seq.next_image : seq.num_pinned])

    def discard(self, key: bytes) -> None:
        """The runtime keeps nothing of this image, which nobody has pinned."""
        self._cache.forget(key)

    def forget_unused(self) -> None:
        """Keep no embeddings that no running sequence needs."""
        self._cache.forget_unused()

    def check(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Assert that pins and pixels are exactly those that live sequences need."""
        pins: Counter[bytes] = Counter()
        users: Counter[bytes] = Counter()
        for seq in running:
            assert seq.next_image == bisect_right(seq.image_ends, seq.num_computed), "another image is next"
            pins.update(image.key for image in seq.request.images.images[seq.next_image : seq.num_pinned])
        for seq in waiting:
            assert seq.num_pinned == seq.next_image, "a waiting sequence pins images"
        for seq in (*running, *waiting):
            users.update(image.key for image in seq.request.images.images)
        self._cache.check(dict(pins))
        assert {key: source.num_users for key, source in self._sources.items()} == users, "pixels are miscounted"

    def _prepare(self, seq: Sequence, share: int, rivals: list[Sequence]) -> None:
        """Pin the images that the sequence's next `share` tokens reach, as far as they are encoded or can be now."""
        images = seq.request.images.images
        while seq.num_pinned < len(images):
            missing = seq.image_starts[seq.num_pinned] - seq.num_computed
            if missing >= share or not self._pin(images[seq.num_pinned], seq, rivals if missing <= 0 else []):
                break
            seq.num_pinned += 1

    def _pin(self, image: Image, seq: Sequence, rivals: list[Sequence]) -> bool:
        """Pin an image, by a new job if need be; where room is lacking, `rivals` lose their pins, first one first."""
        encoded = self._cache.pin(image.key)
        if not encoded and not self._encode(image, rivals):
            return False
        if seq.num_pinned >= seq.num_looked_up:
            seq.num_looked_up = seq.num_pinned + 1
            self.num_hits += encoded
        return True

    def _encode(self, image: Image, rivals: list[Sequence]) -> bool:
        if self._jobs and image.num_pixels > self._pixels_left:
            return False
        slot = self._cache.insert(image.key, image.num_embeddings)
        for rival in rivals:
            if slot is not None:
                break
            self.release(rival)
            slot = self._cache.insert(image.key, image.num_embeddings)
        if slot is None:
            return False
        pixels = self._sources[image.key].pixels
        self._jobs.append(_Job(image.key, slot, image.num_embeddings, pixels))
        self._pixels_left -= image.num_pixels
        self.num_encoded += 1
        return True
