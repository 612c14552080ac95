"""A picture and several questions as one sequence: the picture once, the questions as branches unaware of each other.

Used by the alignment. Every branch has the tokens, positions and view of a request of its own.
Shapes: T tokens, P patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vision.embedded.questions import Question

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
"""What the embedded model's template puts first."""
BEFORE, AFTER, END = f"{SYSTEM}<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
BETWEEN = "\n"
"""What the server puts between a picture and text, where a template knows text only."""
IMAGE_TOKEN = 16
"""<empty_output>, a control token that nothing else uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Tokens of a picture's questions."""

    ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]: each branch goes on where the picture ends."""
    branch: Tensor
    """[T]: 0 the picture, then the number of the question from 1."""
    wanted: Tensor
    """[T]: the id to be said next where it is part of an answer, else -100."""


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids, without anything added."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def answer_ids(tokenizer: Tokenizer, question: Question) -> list[int]:
    """Of the answer and its end. The text is the same whether letters are tokens of their own or not."""
    if not question.spelled:
        return encode(tokenizer, question.answer + END)
    before, spelled, after = question.answer.rpartition(question.spelled)  # what is read stands last
    return [token for part in (before, *spelled, after + END) for token in encode(tokenizer, part)]


def prefix(tokenizer: Tokenizer, patches: int) -> list[int]:
    """All up to the question."""
    return encode(tokenizer, BEFORE) + [IMAGE_TOKEN] * patches


def turns(tokenizer: Tokenizer, asked: Sequence[Question], patches: int) -> Turns:
    """With answers."""
    ids = prefix(tokenizer, patches)
    shared = len(ids)
    positions, branch, wanted = list(range(shared)), [0] * shared, [-100] * shared
    for number, question in enumerate(asked, 1):
        before = encode(tokenizer, BETWEEN + question.text + AFTER)
        answer = answer_ids(tokenizer, question)
        both = before + answer
        ids += both
        positions += range(shared, shared + len(both))
        branch += [number] * len(both)
        wanted += [-100] * (len(before) - 1) + answer + [-100]
    return Turns(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        branch=torch.tensor(branch),
        wanted=torch.tensor(wanted),
    )


def question_first(tokenizer: Tokenizer, question: Question, patches: int) -> Turns:
    """A request whose text comes before its picture: one question, since what the picture's tokens hear is another."""
    before = encode(tokenizer, BEFORE + question.text + BETWEEN) + [IMAGE_TOKEN] * patches + encode(tokenizer, AFTER)
    answer = answer_ids(tokenizer, question)
    length = len(before) + len(answer)
    return Turns(
        ids=torch.tensor(before + answer),
        positions=torch.arange(length),
        branch=torch.ones(length, dtype=torch.long),
        wanted=torch.tensor([-100] * (len(before) - 1) + answer + [-100]),
    )


def batch(several: Sequence[Turns]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, positions and wanted [B, T], and the mask [B, T, T] of what each token sees; padded at the end."""
    length = max(len(one.ids) for one in several)

    def padded(values: Sequence[Tensor], fill: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(one, (0, length - len(one)), value=fill) for one in values])

    branch = padded([one.branch for one in several], -1)
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    same = (branch[:, :, None] == branch[:, None, :]) | (branch[:, None, :] == 0)
    return (
        padded([one.ids for one in several], 2),
        padded([one.positions for one in several], 0),
        padded([one.wanted for one in several], -100),
        same & earlier,
    )
