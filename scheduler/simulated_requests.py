"""Random requests with text and pictures, for simulation and tests. Used by `simulate.py`, `simulated_load.py` and
tests; no process of the server uses it.

A prompt is made of *parts*: a token, or a picture, which becomes runs of embeddings with a token between two of them.
"""

from dataclasses import replace
from random import Random
from typing import NamedTuple

from scheduler.config import SchedulerConfig
from scheduler.encoder_cache import EncoderLimits
from scheduler.fake_runtime import IMAGE_TOKEN
from scheduler.plan import ImagePixels, ints
from scheduler.request import Image, PromptImages, Request, SamplingParams, Span
from scheduler.simulated_oracle import EOS, STOP_TOKEN

ROW_END = 3
"""The token between the runs of a picture."""

BYTES_PER_EMBEDDING = 8


class Picture(NamedTuple):
    """An image and the lengths of its runs."""

    key: bytes
    runs: tuple[int, ...]
    num_pixels: int


Part = int | Picture


def random_config(random: Random) -> tuple[SchedulerConfig, int, int]:
    """(config, blocks in the pool, longest sequence): from pools for a few tokens to pools for everything."""
    max_num_seqs = random.choice((2, 4, 8, 16))
    block_size = random.choice((1, 2, 4, 8, 16))
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.choice((0, 3, 20, 100)),
        prefill_share=random.choice((0.01, 0.25, 0.5, 1.0)),
        max_encode_pixels=random.choice((1, 100, 1000)),
        block_size=block_size,
        max_queued_requests=random.choice((0, 8, 40)),
        max_queued_tokens=random.choice((200, 1000, 100_000)),
        request_timeout=random.choice((50.0, 1e9, 1e9)),
        enable_prefix_caching=random.random() < 0.8,
    )
    return config, -(-random.choice((48, 100, 200, 400, 2000)) // block_size), random.choice((40, 100, 300))


def random_pictures(random: Random) -> tuple[Picture, ...]:
    """Six pictures of three shapes, two of each."""
    shapes = [tuple([random.randint(1, 12)] * random.choice((1, 1, 2, 4))) for _ in range(3)]
    return tuple(Picture(random.randbytes(32), runs, 10 * sum(runs)) for runs in shapes for _ in range(2))


def random_encoder(
    random: Random, config: SchedulerConfig, pictures: tuple[Picture, ...]
) -> tuple[SchedulerConfig, EncoderLimits]:
    """Room for the largest picture alone, for some or for all; sometimes for all but the largest. The step grows so
    that it holds a span where those may not be cut."""
    largest = max(sum(picture.runs) for picture in pictures)
    room = max(1, random.choice((largest - 1, largest, largest, largest + 5, 3 * largest, 100 * largest)))
    whole_spans = random.random() < 0.3
    if whole_spans:
        longest = config.max_num_seqs + max(max(picture.runs) for picture in pictures)
        config = replace(config, max_num_batched_tokens=max(config.max_num_batched_tokens, longest))
    return config, EncoderLimits(
        cache_bytes=room * BYTES_PER_EMBEDDING + random.randrange(BYTES_PER_EMBEDDING),
        bytes_per_embedding=BYTES_PER_EMBEDDING,
        whole_spans=whole_spans,
    )


def random_sampling(random: Random) -> SamplingParams:
    """Parameters of every kind; numbers are exact in float32."""
    penalised = random.random() < 0.3
    return SamplingParams(
        max_tokens=random.choice((1, 5, 40, 150)),
        min_tokens=random.choice((0, 0, 5)),
        temperature=random.choice((0.0, 0.5)),
        top_k=random.choice((0, 5)),
        top_p=random.choice((0.5, 1.0)),
        min_p=random.choice((0.0, 0.25)),
        seed=random.getrandbits(64),
        presence_penalty=0.5 if penalised else 0.0,
        frequency_penalty=random.choice((0.0, 0.25)) if penalised else 0.0,
        repetition_penalty=random.choice((1.0, 1.5)) if penalised else 1.0,
        eos_token_ids=random.choice(((), (EOS,))),
        stop_token_ids=random.choice(((), (STOP_TOKEN,))),
        logit_bias=random.choice(((), ((7, 2.0), (9, -1.5)))),
        bad_words=random.choice(((), ((5,), (6, 7), (8, 9, 10)))),
        logprobs=random.choice((-1, -1, 0, 2)),
        prompt_logprobs=random.choice((-1, -1, -1, 0, 2)),
    )


def lay_out(parts: list[Part], *, rope: bool = False) -> tuple[list[int], PromptImages]:
    """(token ids, images without pixels) of a prompt; with M-RoPE positions that shift all that follows a picture."""
    ids: list[int] = []
    spans: list[Span] = []
    images: list[Image] = []
    positions: list[int] = []
    following = 0
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            positions += (following, following, following)
            following += 1
            continue
        first = 0
        for index, length in enumerate(part.runs):
            ids += [ROW_END] * (index > 0) + [IMAGE_TOKEN] * length
            spans.append(Span(len(ids) - length, length, len(images), first))
            first += length
        for row in range(first + len(part.runs) - 1):
            positions += (following, following + row // 2, following + row % 2)
        following += (first + 1) // 2
        images.append(Image(key=part.key, num_embeddings=first, num_pixels=part.num_pixels, pixels=None))
    if not images or not rope:
        return ids, PromptImages(images=tuple(images), spans=tuple(spans))
    delta = following - len(ids)
    return ids, PromptImages(images=tuple(images), spans=tuple(spans), rope_positions=ints(positions), rope_delta=delta)


def bring_pixels(request: Request, without: set[bytes]) -> Request:
    """The request with the pixels of its images, except for those in `without`."""
    images = tuple(
        image if image.key in without else replace(image, pixels=_pixels(image)) for image in request.images.images
    )
    return replace(request, images=replace(request.images, images=images))


def _pixels(image: Image) -> ImagePixels:
    """Data that the fake runtime takes for the image's content."""
    return ImagePixels(
        data=image.key, tiles=1, height=1, width=image.num_pixels, rows=0, cols=0, image_height=1, image_width=1
    )


class RequestMaker:
    """The users of one server: their prompts often begin like an earlier text, as follow-up turns and shared system
    prompts do, and show the same pictures, or others in the same places."""

    def __init__(self, random: Random, pictures: tuple[Picture, ...]) -> None:
        self._random = random
        self._pictures = pictures
        self._rope = random.random() < 0.3
        self._past: list[list[Part]] = [self._tokens(random.randint(1, 60)) for _ in range(3)]

    def make(self, seq_id: int, now: float, live: list[int]) -> tuple[list[Part], Request]:
        """The parts of a prompt, and the request, without pixels."""
        random = self._random
        parts = self._past[random.randrange(len(self._past))][: random.choice((0, 8, 16, 80))]
        if random.random() < 0.3:
            parts = [part if isinstance(part, int) else self._another(part) for part in parts]
        parts = parts + self._tokens(random.randint(1, random.choice((4, 30))))
        if self._pictures:
            for _ in range(random.choice((0, 0, 1, 1, 3))):
                parts.insert(random.randint(0, len(parts)), random.choice(self._pictures))
        ids, images = lay_out(parts, rope=self._rope)
        return parts, Request(
            seq_id=seq_id,
            prompt_ids=ints(ids),
            sampling=random_sampling(random),
            priority=random.choice((0, 0, 0, 1, -1)),
            deadline=now + 10 * random.random() if random.random() < 0.05 else None,
            cache_salt=random.choice((b"", b"", b"tenant")),
            leader=random.choice(live) if live and random.random() < 0.2 else None,
            images=images,
            pooling=random.choice(("mean", "last")) if random.random() < 0.15 else None,
        )

    def remember(self, parts: list[Part]) -> None:
        """A text that may come again, at least its beginning."""
        self._past[self._random.randrange(len(self._past))] = parts

    def _another(self, picture: Picture) -> Picture:
        return self._random.choice([other for other in self._pictures if other.runs == picture.runs])

    def _tokens(self, count: int) -> list[Part]:
        return [self._random.randrange(2, 12) for _ in range(count)]
