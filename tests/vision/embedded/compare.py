"""`python -m tests.vision.embedded.compare EYES MERGED`: do the embedded model with eyes in a folder of their own, as
firstlight computes it in float32, and the checkpoint that both are merged into, as transformers does, give the same
greedy answers about drawn pictures, and how far are their logits apart? The training's export writes both folders.
transformers computes in float64 too: how far it is from itself in float32 says what rounding alone makes.
"""

import argparse
import copy
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from scheduler.config import SchedulerConfig
from server.embedded import embedded_path
from server.prompt.images import ChatPrompt
from tests.vlm_engine import Engine, Gateway, request
from vision.embedded.examine import drawn_items

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128, prefill_share=1.0)


def asked(gateway: Gateway, text: str, picture: Image.Image | None) -> ChatPrompt:
    """A question, behind a picture if there is one."""
    parts = [{"type": "image"}] * (picture is not None) + [{"type": "text", "text": text}]
    return gateway.prompt([{"role": "user", "content": parts}], [] if picture is None else [picture])


@dataclass(frozen=True)
class Compared:
    token_ids: list[int]
    expected_ids: list[int]
    distance: float
    """Largest difference of the logits from which the answer's tokens come, to those of transformers in float64."""
    rounding: float
    """The same of transformers in float32."""


class Pair:
    """Both, loaded."""

    def __init__(self, eyes: Path, merged: Path) -> None:
        self.gateway = Gateway(embedded_path(), eyes)
        self.engine = Engine(embedded_path(), CONFIG, activation_dtype="float32", mmproj=eyes)
        self.model = LlavaForConditionalGeneration.from_pretrained(merged, dtype=torch.float32).eval()
        self.exact = copy.deepcopy(self.model).double()
        self.processor = LlavaImageProcessorPil.from_pretrained(merged)

    def compare(self, text: str, picture: Image.Image, steps: int) -> Compared:
        """Of the tokens of firstlight's answer, what transformers says where they are."""
        prompt = asked(self.gateway, text, picture)
        outcome, logits_LV = self.engine.logits_of(request(0, prompt, steps))
        pixels = self.processor([picture], return_tensors="pt")["pixel_values"]
        ids = torch.tensor([[*prompt.ids, *outcome.token_ids[:-1]]])
        start = len(prompt.ids) - 1
        with torch.inference_mode():
            rounded_LV = self.model(input_ids=ids, pixel_values=pixels).logits[0, start:]
            expected_LV = self.exact(input_ids=ids, pixel_values=pixels.double()).logits[0, start:]
        distance = float((logits_LV[-len(expected_LV) :] - expected_LV).abs().max())
        rounding = float((rounded_LV - expected_LV).abs().max())
        return Compared(outcome.token_ids, rounded_LV.argmax(dim=-1).tolist(), distance, rounding)


def main() -> None:
    """Some questions of each kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.vision.embedded.compare", description=__doc__)
    parser.add_argument("eyes", type=Path)
    parser.add_argument("merged", type=Path)
    parser.add_argument("--items", type=int, default=2, help="questions a task, at most 16")
    options = parser.parse_args()
    pair, others, farthest, rounding = Pair(options.eyes, options.merged), 0, 0.0, 0.0
    for task, items in drawn_items().items():
        for item in items[: options.items]:
            picture = Image.open(io.BytesIO(item.picture)).convert("RGB")
            found = pair.compare(item.question.text, picture, 24)
            others += found.token_ids != found.expected_ids
            farthest, rounding = max(farthest, found.distance), max(rounding, found.rounding)
            print(f"{task:24} {found.distance:.2e} {'same' if found.token_ids == found.expected_ids else 'OTHER'}")
    print(f"{others} other answers; logits differ by at most {farthest:.2e} from those of transformers in float64")
    print(f"(those of transformers in float32 by {rounding:.2e})")


if __name__ == "__main__":
    main()
