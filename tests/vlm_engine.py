"""Gateway and engine without processes: what the API process makes of messages with pictures, through scheduler and
executor to tokens, log-probabilities and the logits of every row."""

import asyncio
import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.caches import Caches
from model_runtime.config import ActivationDtype, RuntimeConfig, RuntimeInfo
from model_runtime.executor import load_executor
from model_runtime.runner import LanguageModel
from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, Request, SamplingParams, TokenLogprob
from server.engine import make_scheduler
from server.images import ImagePipeline
from server.prompt.build import PromptBuilder
from server.prompt.image_source import load_tokenizer_for, read_images
from server.prompt.images import ChatPrompt
from tests.model_runtime.op_cases import fill_with_nan
from vision.limits import ImageLimits

MAX_STEPS = 5_000
MAX_MODEL_LEN = 1024


def data_url(picture: Image.Image) -> str:
    """The picture as a PNG file in a URL."""
    file = BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class Gateway:
    """Steps 1 and 2 of a request's path for one checkpoint, or a model of text and the folder of --mmproj."""

    def __init__(self, model: Path, image_folder: Path | None = None) -> None:
        self._preprocessor = read_images(image_folder or model)
        tokenizer = load_tokenizer_for(model, self._preprocessor, image_folder)
        self._builder = PromptBuilder(tokenizer, self._preprocessor)

    def prompt(self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Image.Image]) -> ChatPrompt:
        """Messages of transformers' form, whose image parts stand for the pictures in order."""
        urls = [data_url(picture) for picture in pictures]
        return asyncio.run(self._prompt(_with_urls(messages, urls), urls))

    async def _prompt(self, messages: list[dict[str, Any]], urls: list[str]) -> ChatPrompt:
        if self._preprocessor is None:
            return await self._builder.chat(messages, max_model_len=MAX_MODEL_LEN)
        pipeline = ImagePipeline(self._preprocessor, ImageLimits())
        try:
            images = await pipeline.prepare(urls, b"")
        finally:
            await pipeline.aclose()
        return await self._builder.chat(messages, images, max_model_len=MAX_MODEL_LEN)


def _with_urls(messages: Sequence[Mapping[str, Any]], urls: Iterable[str]) -> list[dict[str, Any]]:
    following = iter(urls)
    return [
        {
            **message,
            "content": [
                {"type": "image_url", "image_url": {"url": next(following)}} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def request(seq_id: int, prompt: ChatPrompt, max_tokens: int, *, scored: bool = False) -> Request:
    """Greedy and to the end; `scored` asks for log-probabilities of the prompt, which rules out prefix-cache hits."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=20, prompt_logprobs=20 if scored else -1)
    return Request(seq_id=seq_id, prompt_ids=prompt.ids, images=prompt.images, sampling=sampling)


@dataclass(kw_only=True)
class Outcome:
    """What a client could see of a sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    message: str = ""


class _Recorder:
    """The decoder; keeps the hidden states of every row."""

    def __init__(self, decoder: LanguageModel) -> None:
        self._decoder = decoder
        self.hidden_TC: list[Tensor] = []

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        """As the decoder."""
        hidden_TC = self._decoder.forward(batch, kv)
        self.hidden_TC.append(hidden_TC.clone())
        return hidden_TC

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """As the decoder."""
        return self._decoder.logits(hidden_RC)


class Engine:
    """Scheduler and executor over one checkpoint, as `server/engine.py` puts them together. The KV pool starts full of
    NaN, so that what is read unwritten is seen."""

    def __init__(
        self,
        model: Path,
        config: SchedulerConfig,
        *,
        device: str = "cpu",
        kernels: Literal["auto", "reference"] = "auto",
        encoder_cache_bytes: int = 2**20,
        num_kv_blocks: int = 256,
        threads: int = 1,
        activation_dtype: ActivationDtype = "auto",
        mmproj: Path | None = None,
        offload_weights: int = 0,
    ) -> None:
        runtime = RuntimeConfig(
            mmproj="" if mmproj is None else str(mmproj),
            activation_dtype=activation_dtype,
            device=device,
            max_model_len=min(MAX_MODEL_LEN, num_kv_blocks * config.block_size),
            memory_budget=2**32,
            num_kv_blocks=num_kv_blocks,
            kernels=kernels,
            threads=threads,
            encoder_cache_bytes=encoder_cache_bytes,
            offload_weights=offload_weights,
        )
        self._executor = load_executor(model, runtime, config, lambda stage, fraction: None)
        runner = self._executor._runner
        fill_with_nan(runner._kv)
        self._recorder = runner._model = _Recorder(runner._model)
        self.scheduler = make_scheduler(config, self._executor.info)
        self.largest_batch = 0
        self.num_jobs = 0
        self.num_cut_spans = 0
        """Parts of spans that a step held without the rest."""

    def run(self, requests: Iterable[Request]) -> dict[int, Outcome]:
        """Add all, step until done, and check that nothing was left behind."""
        outcomes: dict[int, Outcome] = {}
        for one in requests:
            self.scheduler.add(one, 0.0)
            outcomes[one.seq_id] = Outcome()
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work():
                break
            self._step(outcomes)
        self.scheduler.check_invariants()
        assert all(outcome.finish_reason is not None for outcome in outcomes.values())
        return outcomes

    def _step(self, outcomes: dict[int, Outcome]) -> None:
        plan = self.scheduler.plan(0.0)
        assert plan is not None, "sequences wait and none can run"
        self.largest_batch = max(self.largest_batch, len(plan.query_lens))
        self.num_jobs += len(plan.encode.slots)
        spans = zip(plan.images.lengths, plan.images.starts, plan.images.ends, strict=True)
        self.num_cut_spans += sum(length < end - start for length, start, end in spans)
        self.scheduler.commit(self._executor.execute(plan), 0.0)
        for event in self.scheduler.take_events():
            outcome = outcomes[event.seq_id]
            outcome.token_ids += event.token_ids
            outcome.logprobs += event.logprobs
            outcome.prompt_logprobs += event.prompt_logprobs
            outcome.cached_tokens += event.cached_tokens
            outcome.finish_reason = event.finish_reason
            outcome.message = event.message

    @property
    def info(self) -> RuntimeInfo:
        """Facts of the loaded model."""
        return self._executor.info

    def logits_of(self, one: Request) -> tuple[Outcome, Tensor]:
        """A request alone: its outcome, and the logits of every row that was computed, float32 [L, V]."""
        self._recorder.hidden_TC.clear()
        outcome = self.run([one])[one.seq_id]
        with torch.inference_mode():
            return outcome, self._recorder.logits(torch.cat(self._recorder.hidden_TC))
