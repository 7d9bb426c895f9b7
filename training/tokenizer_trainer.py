"""Training state of the tokenizer: weights, averages, optimizers, losses, and one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from nextscale.canvas import Canvas
from nextscale.errors import SettingError
from nextscale.io import to_pil
from nextscale.metrics import Lpips
from nextscale.metrics.pixels import psnr
from nextscale.stage import Schedule, Tokens
from nextscale.tokenizers import InfinityTokenizer
from nextscale.tokenizers.autoencoder import ResidualBlock
from nextscale.tokenizers.layers import GroupNorm

from .data import Pictures
from .optim import BETAS
from .run import Average, learning_rate, set_learning_rate
from .tokenizer_losses import (
    PatchDiscriminator,
    commitment,
    discriminator_loss,
    entropy_penalty,
    generator_loss,
    quantize,
    straight_through,
)
from .tokenizer_settings import TokenizerTraining, square_schedule

DISCRIMINATOR_RATE = 0.2  # share of the tokenizer's learning rate
EVALUATED_TOGETHER = 32  # pictures
GRAPHS = 64  # compiled: six shapes of residual blocks per size of image in the small tokenizer, and two of norms

M = TypeVar("M", bound=nn.Module)


def to_channels_last(module: M, memory_format: torch.memory_format) -> M:
    return module.to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


def compile_blocks(tokenizer: InfinityTokenizer) -> None:
    """Compiles a network block by block. Blocks of one shape share a graph."""
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    for module in tokenizer.modules():
        if isinstance(module, ResidualBlock):
            module.compile(dynamic=False)
    for coder in (tokenizer.encoder, tokenizer.decoder):
        assert isinstance(coder.norm_out, GroupNorm)
        coder.norm_out.compile(dynamic=False)


def stage_by_stage(tokenizer: InfinityTokenizer, codes: Sequence[Tensor], schedule: Schedule) -> Iterator[Canvas]:
    """Adds codes to a canvas stage by stage. Yields the same canvas after each stage."""
    canvas = tokenizer.canvas(schedule, codes[0].shape[0])
    for stage, bits in zip(schedule, codes, strict=True):
        canvas.add(bits, Tokens(stage))
        yield canvas


class TokenizerTrainer:
    """The tokenizer with its training state."""

    def __init__(self, settings: TokenizerTraining, device: torch.device, lpips: Lpips | None) -> None:
        if settings.lpips and lpips is None:
            raise SettingError(f"lpips {settings.lpips}: training with LPIPS needs its network (Lpips.load); without it set lpips to 0")
        torch.manual_seed(settings.seed)
        self.settings, self.device, self.lpips = settings, device, lpips
        self.tokenizer = to_channels_last(InfinityTokenizer(settings.tokenizer).to(device), torch.channels_last)
        self.average = Average(self.tokenizer, settings.average)
        if settings.compile:
            compile_blocks(self.tokenizer)
        self.modules: dict[str, nn.Module] = {"tokenizer": self.tokenizer, "average": self.average.module}
        self.optimizers: dict[str, torch.optim.Optimizer] = {"tokenizer": self._optimizer(self.tokenizer, 1.0)}
        self.discriminator: PatchDiscriminator | None = None
        if settings.adversarial:
            self.discriminator = to_channels_last(PatchDiscriminator().to(device), torch.channels_last)
            self.modules["discriminator"] = self.discriminator
            self.optimizers["discriminator"] = self._optimizer(self.discriminator, DISCRIMINATOR_RATE)

    def _optimizer(self, module: nn.Module, factor: float) -> torch.optim.Optimizer:
        group = {"params": list(module.parameters()), "factor": factor}
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        return torch.optim.AdamW([group], lr=rate, betas=BETAS, weight_decay=decay, fused=self.device.type == "cuda")

    def _half(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def losses(self, images: Tensor, progress: float) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the parts of the loss, their weighted sum under "loss", and the reconstructions."""
        settings = self.settings
        images = images.contiguous(memory_format=torch.channels_last)
        with self._half():
            z = self.tokenizer.encoder(images)
        z = z.float()
        quantized = quantize(self.tokenizer, z, square_schedule(images.shape[-1], self.tokenizer.pixels_per_token))
        with self._half():
            decoded = self.tokenizer.decoder(straight_through(z, quantized.latent))
        decoded = decoded.float()
        parts = {
            "l1": F.l1_loss(decoded, images),
            "commitment": commitment(z, quantized.latent),
            "entropy": entropy_penalty(quantized.rests, settings.entropy_scale, settings.entropy_diversity),
        }
        total = parts["l1"] + settings.commitment * parts["commitment"] + settings.entropy * parts["entropy"]
        if settings.lpips and self.lpips is not None:
            seen = max(1, round(settings.lpips_share * images.shape[0]))
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            parts["lpips"] = self.lpips(decoded[:seen], images[:seen], dtype).mean()
            total = total + settings.lpips * parts["lpips"]
        if self.discriminator is not None and progress >= settings.adversarial_from:
            self.discriminator.requires_grad_(False)
            with self._half():
                scores = self.discriminator(decoded)
            parts["generator"] = generator_loss(scores)
            total = total + settings.adversarial * parts["generator"]
        return parts | {"loss": total}, decoded

    def step(self, images: Tensor, progress: float, number: int) -> dict[str, Tensor]:
        """Makes one step on pictures [B, 3, side, side] without waiting for the device. number: of steps so far."""
        rate = learning_rate(progress, number, self.settings.learning_rate)
        for optimizer in self.optimizers.values():
            set_learning_rate(optimizer, rate)
        parts, decoded = self.losses(images, progress)
        parts["loss"].backward()
        parts["gradient"] = self._update("tokenizer")
        self.average.update(number)
        if "generator" in parts:
            parts["discriminator"] = self._discriminator_step(images, decoded.detach())
        return {name: value.detach() for name, value in parts.items()}

    def _discriminator_step(self, images: Tensor, decoded: Tensor) -> Tensor:
        assert self.discriminator is not None
        self.discriminator.requires_grad_(True)
        with self._half():
            loss = discriminator_loss(self.discriminator(images), self.discriminator(decoded))
        loss.backward()
        self._update("discriminator")
        return loss

    def _update(self, name: str) -> Tensor:
        """Applies the gradient and returns its norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.modules[name].parameters(), self.settings.longest_gradient)
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()
        return norm

    def prepare(self, images: Tensor) -> None:
        """Compiles for pictures of this shape without changing weights."""
        parts, _ = self.losses(images, 0.0)
        parts["loss"].backward()
        self.optimizers["tokenizer"].zero_grad()

    @torch.inference_mode()
    def evaluate(self, pictures: Mapping[int, Pictures]) -> dict[str, float]:
        """Held-out results of the averaged weights, per side: PSNR, LPIPS, how often the least and the most used bit is one, PSNR by
        stages decoded.

        The last is measured on the first few pictures only.
        """
        found: dict[str, float] = {}
        for side, held_out in pictures.items():
            found |= self._evaluate_side(side, held_out)
        return {name: round(value, 4) for name, value in found.items()}

    def _evaluate_side(self, side: int, held_out: Pictures) -> dict[str, float]:
        found: dict[str, float] = {}
        tokenizer = self.average.module
        schedule = square_schedule(side, tokenizer.pixels_per_token)
        decibels: list[Tensor] = []
        distances: list[Tensor] = []
        ones: list[Tensor] = []
        for chosen in torch.arange(len(held_out), device=self.device).split(EVALUATED_TOGETHER):
            images = held_out.batch(chosen)
            codes = tokenizer.encode(images, schedule)
            for stages, canvas in enumerate(stage_by_stage(tokenizer, codes, schedule), start=1):
                if stages == len(schedule) or not decibels:  # all stages, or the first few pictures
                    decoded = canvas.decode()
                if not decibels:
                    found[f"psnr_{side}_stages_{stages}"] = float(psnr(decoded, images).mean())
            decibels.append(psnr(decoded, images))
            ones.append(torch.cat(codes, dim=1).float().mean(1))
            if self.lpips is not None:
                distances.append(self.lpips(decoded.clamp(-1, 1), images))
        share = torch.cat(ones).mean(0)  # [bits per token]
        found |= {f"psnr_{side}": float(torch.cat(decibels).mean())}
        found |= {f"ones_least_{side}": float(share.min()), f"ones_most_{side}": float(share.max())}
        if distances:
            found[f"lpips_{side}"] = float(torch.cat(distances).mean())
        return found

    @torch.inference_mode()
    def samples(self, pictures: Pictures, count: int = 8) -> Image.Image:
        """Returns a sheet of pictures and, below them, their reconstructions by the averaged weights."""
        tokenizer = self.average.module
        images = pictures.batch(torch.linspace(0, len(pictures) - 1, min(count, len(pictures)), device=self.device).long())
        schedule = square_schedule(pictures.side, tokenizer.pixels_per_token)
        *_, canvas = stage_by_stage(tokenizer, tokenizer.encode(images, schedule), schedule)
        rows = [torch.cat(list(row), dim=2) for row in (images, canvas.decode())]  # [3, side, count * side]
        return to_pil(torch.cat(rows, dim=1)[None])[0]
