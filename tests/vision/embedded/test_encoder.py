"""The tower is SigLIP's; its training learns, and goes on after an interruption as if there had been none."""

import itertools
from pathlib import Path

import torch
from transformers import SiglipVisionConfig, SiglipVisionModel

from vision.embedded.encoder import EncoderConfig, EncoderRun, Painters
from vision.embedded.heads import Heads
from vision.embedded.measure import present_logits
from vision.embedded.painter import Painter
from vision.embedded.tower import NEIGHBOURS, Attention, Tower, TowerConfig, start
from vision.embedded.vocabulary import HEADS, SCENES

SMALL = TowerConfig(width=64, layers=2, heads=8, local_layers=0)
QUICK = EncoderConfig(samples=64, batch=8, first_pictures=32, warmup_steps=1, measure_every=10_000, measure_count=2)


def make_run(folder: Path, painters: Painters) -> EncoderRun:
    return EncoderRun(folder, painters, QUICK, SMALL, torch.device("cpu"))


def test_tower_equals_transformers() -> None:
    torch.manual_seed(0)
    tower = Tower(SMALL)
    reference = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=8,
            image_size=128,
            patch_size=16,
            vision_use_head=False,
        )
    ).eval()
    names = {name.rpartition("vision_model.")[2]: name for name in reference.state_dict()}
    state = reference.state_dict()
    unused = names.keys() - tower.state_dict().keys()
    assert unused == {"post_layernorm.weight", "post_layernorm.bias"}
    tower.load_state_dict({name: state[names[name]] for name in tower.state_dict()})
    pictures = torch.randint(0, 256, (2, 128, 128, 3), dtype=torch.uint8)
    with torch.no_grad():
        pixels = (pictures.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        expected = reference(pixels, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(tower(pictures), expected, rtol=1e-4, atol=1e-5)


def test_heads_start_by_looking_at_neighbours() -> None:
    torch.manual_seed(0)
    config = TowerConfig(layers=1)
    tower = Tower(config)
    pictures = torch.randint(0, 256, (20, 128, 128, 3), dtype=torch.uint8)
    start(tower, pictures)
    layer = tower.encoder.layers[0]
    attention = layer.self_attn
    assert isinstance(attention, Attention)
    with torch.no_grad():
        x = layer.layer_norm1(tower.embeddings((pictures.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5))
        q, k = (part(x).view(20, 64, 8, 32).transpose(1, 2) for part in (attention.q_proj, attention.k_proj))
        looked_at = (q @ k.transpose(-1, -2)).mean(dim=0).argmax(dim=-1)
    inner = [row * 8 + column for row in range(1, 7) for column in range(1, 7)]
    for head, (down, right) in enumerate(NEIGHBOURS):
        assert looked_at[head, inner].tolist() == [place + 8 * down + right for place in inner]


def test_training_learns_and_goes_on_where_it_was(tmp_path: Path, painters: Painters) -> None:
    whole = make_run(tmp_path / "whole", painters)
    losses = [whole.train_step() for _ in range(4)]
    assert losses[-1]["present"] < losses[0]["present"] - 0.1

    first = make_run(tmp_path / "parts", painters)
    for _ in range(2):
        first.train_step()
    first.save()
    second = make_run(tmp_path / "parts", painters)
    assert second.step == 2
    assert [second.train_step() for _ in range(2)] == losses[2:]
    for name, value in whole.average.tensors.items():
        assert torch.equal(value, second.average.tensors[name]), name


def test_what_a_head_says_where_its_class_is(painter: Painter) -> None:
    torch.manual_seed(0)
    tower, heads = Tower(SMALL), Heads(64)
    with torch.no_grad():
        heads.classes.weight.zero_()
        heads.classes.bias.copy_(torch.arange(float(sum(HEADS.values()))))
    scenes = [painter.scene(1, index, "digits") for index in range(3)]
    found = present_logits(tower, heads, scenes)
    first = dict(zip(HEADS, itertools.accumulate(HEADS.values(), initial=0), strict=False))
    assert found["scene"] == first["scene"] + SCENES.index("digits")
    assert first["glyph"] <= found["glyph"] < first["glyph"] + 10
    assert found["icon"] == 0
