"""Training of the tokenizer: its quantizer is the one that encodes, its losses say what they should, and a run can be taken up again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.loading.load import load_module
from nextscale.metrics import Lpips
from nextscale.metrics.pixels import psnr
from nextscale.stage import Tokens
from nextscale.tokenizers import InfinityTokenizer, InfinityTokenizerConfig
from training.data import Pictures
from training.records import Record
from training.run import Budget, Run
from training.tokenizer import train_tokenizer
from training.tokenizer_losses import (
    PatchDiscriminator,
    commitment,
    discriminator_loss,
    entropy_penalty,
    generator_loss,
    quantize,
    straight_through,
)
from training.tokenizer_settings import TokenizerTraining, square_schedule
from training.tokenizer_trainer import TokenizerTrainer

CPU = torch.device("cpu")
TINY = InfinityTokenizerConfig(bits=4, channels=32, multipliers=(1, 1), blocks_per_level=1)
SIDE, LARGE = 32, 48  # grids of 16 and 24 cells


def settings(**changes: Any) -> TokenizerTraining:
    """The warm-up takes 100 steps, hence the high rate: the first steps make 1/100 of it, 2/100 and so on."""
    return TokenizerTraining(**{"tokenizer": TINY, "batch": 4, "learning_rate": 0.1, "average": 0.9} | changes)


def pictures(side: int, count: int = 6, seed: int = 0) -> Pictures:
    """Smooth colors, the same at every side."""
    coarse = torch.rand(count, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    pixels = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1)
    return Pictures((255 * pixels).to(torch.uint8), [Record(f"{i}.png", "colors") for i in range(count)])


def tiny_lpips() -> Lpips:
    torch.manual_seed(1)
    network = Lpips(channels=(4, 6, 5, 3, 3))
    for head in network.lin:
        head.weight.abs_()
    return network


def tokenizer(config: InfinityTokenizerConfig = TINY) -> InfinityTokenizer:
    torch.manual_seed(2)
    return InfinityTokenizer(config).requires_grad_(False)


def reconstruct(images_to_bits: InfinityTokenizer, images: Tensor) -> Tensor:
    schedule = square_schedule(images.shape[-1], images_to_bits.pixels_per_token)
    canvas = images_to_bits.canvas(schedule, len(images))
    for stage, bits in zip(schedule, images_to_bits.encode(images, schedule), strict=True):
        canvas.add(bits, Tokens(stage))
    return canvas.decode()


# --- quantization


@pytest.mark.parametrize("patchify", [False, True])
def test_training_quantizes_as_encoding_does(patchify: bool) -> None:
    images_to_bits = tokenizer(InfinityTokenizerConfig(bits=4, channels=32, multipliers=(1, 1), blocks_per_level=1, patchify=patchify))
    images = pictures(SIDE).batch(torch.arange(3))
    schedule = square_schedule(SIDE, images_to_bits.pixels_per_token)
    quantized = quantize(images_to_bits, images_to_bits.features(images), schedule)
    canvas = images_to_bits.canvas(schedule, 3)
    for stage, bits, rest in zip(schedule, images_to_bits.encode(images, schedule), quantized.rests, strict=True):
        assert torch.equal(images_to_bits.nearest(rest, stage), bits)
        canvas.add(bits, Tokens(stage))
    assert torch.equal(quantized.latent, canvas.latent)
    assert quantized.latent.unique().numel() > 16


def test_gradient_passes_straight_through() -> None:
    images_to_bits = tokenizer()
    z = torch.randn(2, 4, 16, 16, requires_grad=True)
    quantized = quantize(images_to_bits, z, square_schedule(SIDE, 2))
    assert not quantized.latent.requires_grad and all(rest.requires_grad for rest in quantized.rests)
    passed, weights = straight_through(z, quantized.latent), torch.randn(2, 4, 16, 16)
    assert torch.allclose(passed, quantized.latent, atol=1e-6)
    (gradient,) = torch.autograd.grad((passed * weights).sum(), z)
    assert torch.equal(gradient, weights)


def test_commitment_pulls_towards_the_latent() -> None:
    z, latent = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([0.0, 3.0], requires_grad=True)
    loss = commitment(z, latent)
    loss.backward()
    assert loss.item() == 0.5 and z.grad is not None
    assert z.grad.tolist() == [1.0, 0.0] and latent.grad is None


def test_entropy_is_lowest_for_certain_and_balanced_bits() -> None:
    signs = torch.tensor([1.0, -1.0]).repeat(8).view(4, 1, 2, 2).expand(4, 16, 2, 2)
    certain = entropy_penalty((100 * signs,), 4.0, 1.0).item()
    assert certain == pytest.approx(-math.log(2), abs=1e-5)
    at_code_size = entropy_penalty((signs / 4,), 4.0, 1.0).item()  # 16 bits: codes of size 1/4
    chance = torch.tensor(4.0).sigmoid()
    own = -(chance * chance.log() + (1 - chance) * (1 - chance).log()).item()
    assert at_code_size == pytest.approx(own - math.log(2), abs=1e-5)
    undecided, stuck = entropy_penalty((0 * signs,), 4.0, 1.0).item(), entropy_penalty((100 * signs.abs(),), 4.0, 1.0).item()
    assert undecided == pytest.approx(0, abs=1e-6) and stuck == pytest.approx(0, abs=1e-4)
    assert entropy_penalty((100 * signs,), 4.0, 0.0).item() == pytest.approx(0, abs=1e-6)
    assert entropy_penalty((100 * signs, 0 * signs), 4.0, 1.0).item() == pytest.approx(certain / 2, abs=1e-5)


def test_entropy_moves_undecided_values_apart() -> None:
    values = torch.tensor([0.05, -0.05]).repeat(8).view(4, 1, 2, 2).clone().requires_grad_()
    entropy_penalty((values,), 4.0, 1.0).backward()
    assert values.grad is not None and torch.equal(values.grad.sign(), -values.detach().sign())


def test_schedule_of_a_side() -> None:
    assert [height for height, _ in square_schedule(256, 8).sizes] == [1, 2, 4, 6, 8, 12, 16, 20, 24, 32]
    assert len(square_schedule(512, 8)) == 13 and square_schedule(256, 8).extent == (64, 64)
    with pytest.raises(SettingError, match=r"side 100: at 8 pixels per token choose one of 8, 16, .* 512"):
        square_schedule(100, 8)


# --- discriminator


def test_discriminator_losses() -> None:
    sure, wrong = torch.full((2, 1, 3, 3), 2.0), torch.full((2, 1, 3, 3), -2.0)
    assert discriminator_loss(sure, wrong) == 0 and discriminator_loss(wrong, sure) == 3
    assert discriminator_loss(0 * sure, 0 * sure) == 1
    assert generator_loss(sure) < generator_loss(wrong)
    assert PatchDiscriminator(8)(torch.zeros(2, 3, 32, 48)).shape == (2, 1, 4, 6)


def test_discriminator_joins_late_and_learns() -> None:
    trainer = TokenizerTrainer(settings(adversarial=0.1, lpips=0.0), CPU, None)
    assert trainer.discriminator is not None
    images = pictures(SIDE).batch(torch.arange(1))
    before = [parameter.clone() for parameter in trainer.discriminator.parameters()]
    early = trainer.step(images, 0.4, 0)
    assert "generator" not in early and all(map(torch.equal, before, trainer.discriminator.parameters()))
    late = trainer.step(images, 0.6, 1)
    assert late["loss"].item() == pytest.approx(
        (late["l1"] + 0.25 * late["commitment"] + 0.05 * late["entropy"] + 0.1 * late["generator"]).item(), rel=1e-5
    )
    assert not any(map(torch.equal, before, trainer.discriminator.parameters()))
    assert all(parameter.grad is None for module in trainer.modules.values() for parameter in module.parameters())


# --- steps


def test_steps_lower_the_loss() -> None:
    trainer = TokenizerTrainer(settings(), CPU, tiny_lpips())
    images = pictures(SIDE).batch(torch.arange(4))
    found = [trainer.step(images, 0.0, number) for number in range(10)]
    assert set(found[0]) == {"l1", "lpips", "commitment", "entropy", "loss", "gradient"}
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]
    assert not any(value.requires_grad for value in found[0].values())


def test_lpips_looks_at_its_share() -> None:
    images = pictures(SIDE).batch(torch.arange(4))
    losses = {share: TokenizerTrainer(settings(lpips_share=share), CPU, tiny_lpips()).losses(images, 0.0) for share in (0.5, 1.0)}
    assert torch.equal(losses[0.5][1], losses[1.0][1])  # drawn by the same weights
    expected = tiny_lpips()(losses[0.5][1][:2], images[:2]).mean()
    assert torch.allclose(losses[0.5][0]["lpips"], expected) and not torch.allclose(losses[1.0][0]["lpips"], expected)


def test_preparing_changes_no_weight() -> None:
    trainer = TokenizerTrainer(settings(), CPU, tiny_lpips())
    before = {name: tensor.clone() for name, tensor in trainer.tokenizer.state_dict().items()}
    trainer.prepare(pictures(SIDE).batch(torch.arange(2)))
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.tokenizer.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.tokenizer.parameters())


# --- whole runs


def train(folder: Path, steps: int, **changes: Any) -> dict[str, float]:
    data, held_out = {side: pictures(side) for side in (SIDE, LARGE)}, {side: pictures(side, 3, seed=1) for side in (SIDE, LARGE)}
    train_tokenizer(settings(large_every=2, batch=2, **changes), data, held_out, folder, Budget(steps=steps), CPU, tiny_lpips())
    return json.loads((folder / "metrics.json").read_text())


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    metrics = train(tmp_path, steps=4)
    assert metrics["steps"] == 4
    assert {f"{name}_{side}" for name in ("psnr", "lpips", "ones_least", "ones_most") for side in (SIDE, LARGE)} <= set(metrics)
    assert 0 <= metrics["ones_least_32"] <= metrics["ones_most_32"] <= 1
    assert metrics["psnr_32_stages_7"] == pytest.approx(metrics["psnr_32"])  # of few pictures, all are measured
    with torch.device("meta"):
        loaded = InfinityTokenizer(TINY)
    load_module(loaded, tmp_path / "tokenizer.safetensors", CPU, torch.float32)
    held_out = pictures(SIDE, 3, seed=1).batch(torch.arange(3))
    assert psnr(reconstruct(loaded, held_out), held_out).mean().item() == pytest.approx(metrics["psnr_32"], abs=0.05)  # float16 file
    assert Image.open(tmp_path / "reconstructions.png").size == (3 * LARGE, 2 * LARGE)
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert {"loss_32", "loss_48", "learning_rate"} <= set(curve[0])
    assert not list(tmp_path.glob(".*"))


def test_a_run_taken_up_again_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "whole", steps=4)
    monkeypatch.setitem(Run.__init__.__kwdefaults__, "save_every", -1.0)  # after every step
    step = TokenizerTrainer.step

    def interrupted(trainer: TokenizerTrainer, images: Tensor, progress: float, number: int) -> dict[str, Tensor]:
        if number == 2:
            raise KeyboardInterrupt
        return step(trainer, images, progress, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TokenizerTrainer, "step", interrupted)
        train(tmp_path / "parts", steps=4)
    assert not (tmp_path / "parts" / "tokenizer.safetensors").exists()
    train(tmp_path / "parts", steps=4)
    whole, parts = (torch.load(tmp_path / folder / "state.pt", weights_only=True)["modules"] for folder in ("whole", "parts"))
    for module in ("tokenizer", "average"):
        assert all(torch.equal(whole[module][name], parts[module][name]) for name in whole[module])


def test_settings_that_cannot_be() -> None:
    for name, value in {
        "batch": 0, "large_every": 1.5, "learning_rate": 0.0, "longest_gradient": -1.0, "lpips": -0.5, "lpips_share": 0.0,
        "entropy": float("nan"), "adversarial": -1.0, "adversarial_from": 1.0, "average": 1.0, "entropy_scale": float("inf"),
    }.items():  # fmt: skip
        with pytest.raises(SettingError, match=f"^{name} {value}"):
            settings(**{name: value})


def test_runs_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="needs its network"):
        TokenizerTrainer(settings(), CPU, None)
    sets = {side: pictures(side) for side in (16, 32, 48)}
    odd = {44: pictures(44)}
    for data, held_out, message in (
        ({}, {}, "one or two sizes"),
        (sets, sets, "one or two sizes"),
        (odd, odd, "side 44: at 2 pixels per token choose one of 2, "),
        ({32: sets[32]}, {48: sets[48]}, "held-out pictures of some of these sides"),
        ({32: sets[32]}, {}, "held-out pictures of some of these sides"),
    ):
        with pytest.raises(SettingError, match=message):
            train_tokenizer(settings(), data, held_out, tmp_path / "run", Budget(steps=1), CPU, tiny_lpips())
    assert not (tmp_path / "run").exists()
    with pytest.raises(SettingError, match="no tokenizer can be built"):
        settings(tokenizer=InfinityTokenizerConfig(bits=4, channels=20))
