"""How long would people wait? The real scheduler on a fake runtime and a simulated clock. Used by `simulate.py`."""

from dataclasses import dataclass, field
from random import Random

from scheduler.config import SchedulerConfig
from scheduler.encoder_cache import EncoderLimits
from scheduler.fake_runtime import FakeRuntime
from scheduler.plan import StepPlan, ints
from scheduler.request import FinishReason, QueueFull, Request, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.simulated_requests import Part, Picture, bring_pixels, lay_out
from scheduler.stats import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step as a linear function of its work; measure them on the machine in question."""

    step_seconds: float = field(default=0.012, metadata={"help": "of every step: launch, and reading the weights"})
    token_seconds: float = field(default=0.003, metadata={"help": "of each token computed"})
    pair_seconds: float = field(default=1.4e-6, metadata={"help": "of each pair of a query and a key that it reads"})
    pixel_seconds: float = field(default=5e-6, metadata={"help": "of each pixel of an image that is encoded"})

    def seconds(self, plan: StepPlan) -> float:
        """Duration of a step."""
        pairs = sum(query * kv for query, kv in zip(plan.query_lens, plan.kv_lens, strict=True))
        pixels = sum(image.num_pixels for image in plan.encode.pixels)
        linear = self.step_seconds + self.token_seconds * len(plan.token_ids) + self.pixel_seconds * pixels
        return linear + self.pair_seconds * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests with Poisson arrivals and exponential lengths."""

    rate: float = field(default=1.0, metadata={"help": "requests per second"})
    requests: int = field(default=1000, metadata={"help": "how many requests"})
    prompt_tokens: int = field(default=128, metadata={"help": "mean prompt length"})
    shared_tokens: int = field(default=0, metadata={"help": "tokens at the beginning of a prompt that all share"})
    output_tokens: int = field(default=64, metadata={"help": "mean output length"})
    images: int = field(default=0, metadata={"help": "images at the beginning of each prompt, after the shared tokens"})
    different_images: int = field(default=1000, metadata={"help": "how many images there are to choose from"})
    image_tokens: int = field(default=256, metadata={"help": "embeddings of an image"})
    image_pixels: int = field(default=50176, metadata={"help": "pixels of an image, as the tower is given it"})
    cached_images: int = field(default=64, metadata={"help": "images whose embeddings fit into the encoder cache"})
    num_blocks: int = field(default=4096, metadata={"help": "KV blocks in the pool"})
    max_model_len: int = field(default=8192, metadata={"help": "longest sequence in tokens"})
    seed: int = field(default=0, metadata={"help": "of arrivals and lengths"})


@dataclass(slots=True)
class Timing:
    """One request on the simulated clock, seconds."""

    arrival: float
    first_token: float = 0.0
    end: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What happened."""

    timings: list[Timing]
    """Of the requests that finished."""
    refused: int
    timed_out: int
    seconds: float
    """From the first arrival to the last token."""
    stats: SchedulerStats


def _arrivals(load: Load) -> list[tuple[float, Request]]:
    random = Random(load.seed)
    now, shared = 0.0, [random.randrange(2, 1000) for _ in range(load.shared_tokens)]
    arrivals: list[tuple[float, Request]] = []
    for seq_id in range(load.requests):
        now += random.expovariate(load.rate)
        own = max(1, round(random.expovariate(1 / load.prompt_tokens)))
        max_tokens = max(1, round(random.expovariate(1 / load.output_tokens)))
        pictures = [_picture(load, random.randrange(load.different_images)) for _ in range(load.images)]
        most = load.max_model_len - 1 - load.images * (load.image_tokens - 1)
        text = [random.randrange(2, 1000) for _ in range(own)]
        parts: list[Part] = [*shared, *pictures, *text]
        ids, images = lay_out(parts[:most])
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(seq_id=seq_id, prompt_ids=ints(ids), sampling=sampling, images=images)
        arrivals.append((now, bring_pixels(request, set())))
    return arrivals


def _picture(load: Load, number: int) -> Picture:
    return Picture(number.to_bytes(32), (load.image_tokens,), load.image_pixels)


def run_load(config: SchedulerConfig, cost: CostModel, load: Load) -> LoadResult:
    """Serve the load to its end."""
    encoder = EncoderLimits(cache_bytes=load.cached_images * load.image_tokens, bytes_per_embedding=1)
    scheduler = Scheduler(config, num_blocks=load.num_blocks, max_model_len=load.max_model_len, encoder=encoder)
    runtime = FakeRuntime(load.num_blocks, config.block_size)
    pending = _arrivals(load)[::-1]
    timings: dict[int, Timing] = {}
    now, refused, timed_out = 0.0, 0, 0
    while pending or scheduler.has_work():
        if not scheduler.has_work():
            now = max(now, pending[-1][0])
        while pending and pending[-1][0] <= now:
            arrival, request = pending.pop()
            try:
                scheduler.add(request, now)
                timings[request.seq_id] = Timing(arrival)
            except QueueFull:
                refused += 1
        plan = scheduler.plan(now)
        if plan is not None:
            now += cost.seconds(plan)
            scheduler.commit(runtime.execute(plan), now)
        for event in scheduler.take_events():
            timing = timings[event.seq_id]
            timing.first_token = timing.first_token or now
            timing.end = now
            timing.tokens += len(event.token_ids)
            if event.finish_reason is FinishReason.TIMEOUT:
                del timings[event.seq_id]
                timed_out += 1
    finished = list(timings.values())
    return LoadResult(timings=finished, refused=refused, timed_out=timed_out, seconds=now, stats=scheduler.stats())


def _percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)] if ordered else 0.0


def report(result: LoadResult) -> str:
    """A table for people."""
    timings = result.timings
    rows = {
        "time to first token, s": [timing.first_token - timing.arrival for timing in timings],
        "time per later token, s": [(t.end - t.first_token) / (t.tokens - 1) for t in timings if t.tokens > 1],
        "whole request, s": [timing.end - timing.arrival for timing in timings],
    }
    lines = [f"{'':26}{'p50':>9}{'p90':>9}{'p99':>9}"]
    for name, values in rows.items():
        lines.append(f"{name:26}" + "".join(f"{_percentile(values, percent):9.3f}" for percent in (50, 90, 99)))
    stats = result.stats
    hit_rate = stats.prefix_hits / max(1, stats.prefix_queries)
    lines += [
        f"finished {len(timings)}, refused {result.refused}, timed out {result.timed_out}, in {result.seconds:.1f} s",
        f"{stats.generation_tokens / result.seconds:.1f} tokens/s, {len(timings) / result.seconds:.2f} requests/s",
        f"{stats.preemptions} preemptions, {hit_rate:.0%} of looked-up prompt tokens found in the prefix cache",
    ]
    if stats.images_encoded:
        lines.append(f"{stats.images_encoded} images encoded, {stats.encoder_hits} found encoded")
    return "\n".join(lines)
