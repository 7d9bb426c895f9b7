"""Training of Infinity's tokenizer: pictures to a few bits per cell and stage, and back. Start at `train_tokenizer`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ...canvas import Canvas
from ...checkpoints import write_weights
from ...errors import SettingError
from ...io import to_pil, write_image
from ...loading.presets import NANO_TOKENIZER
from ...schedules import INFINITY_SIZES, infinity_stages
from ...stage import Schedule, Tokens
from ...tokenizers import InfinityTokenizer, InfinityTokenizerConfig
from ...tokenizers.autoencoder import GroupNorm, ResidualBlock
from ..metrics import Lpips
from ..metrics.pixels import psnr
from .data import Pictures, fingerprint
from .discriminator import PatchDiscriminator, discriminator_loss, generator_loss
from .export import TOKENIZER as WEIGHTS
from .optim import BETAS
from .run import Budget, Ema, Run, learning_rate, memory_errors, set_learning_rate
from .settings import lasting
from .tokenizer_losses import commitment, entropy_penalty, quantise, straight_through

SHEET = "reconstructions.png"
DISCRIMINATOR_RATE = 0.2  # of the tokenizer's learning rate
EVALUATED_TOGETHER = 32  # pictures
GRAPHS = 64  # compiled: six shapes of residual blocks per size of image in the small tokenizer, and two of norms

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class TokenizerTraining:
    """What is trained and how. The knobs that matter: batch, learning_rate, lpips and the length of the run.

    The weights of the loss: L1 distance 1, `lpips`, `commitment`, `entropy`, and `adversarial` (0: no discriminator), which joins at
    the share `adversarial_from` of the run. L1 alone blurs; LPIPS brings texture; the discriminator sharpens and may invent.
    """

    tokenizer: InfinityTokenizerConfig = NANO_TOKENIZER
    batch: int = 64  # pictures of the smaller size; fewer of the larger one, as many pixels
    large_every: int = 4  # every so many steps the larger pictures, if there are two sizes
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    longest_gradient: float = 1.0  # its norm is cut down to this
    lpips: float = 0.5
    lpips_share: float = 1.0  # of a batch that LPIPS looks at
    commitment: float = 0.25
    entropy: float = 0.05
    entropy_scale: float = 4.0  # how soon a bit counts as certain, see `entropy_penalty`
    entropy_diversity: float = 1.0
    adversarial: float = 0.0
    adversarial_from: float = 0.5
    average: float = 0.999  # decay of the averaged weights, which are the ones kept
    compile: bool = False  # the residual blocks: about a minute before the first step, then much faster on a GPU
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "large_every"):
            self._require(name, isinstance(getattr(self, name), int) and getattr(self, name) >= 1, "a whole number, at least 1")
        for name in ("learning_rate", "longest_gradient", "entropy_scale"):
            self._require(name, 0 < getattr(self, name) < float("inf"), "above 0")
        for name in ("weight_decay", "lpips", "commitment", "entropy", "entropy_diversity", "adversarial"):
            self._require(name, 0 <= getattr(self, name) < float("inf"), "0 (off) or above")
        self._require("lpips_share", 0 < self.lpips_share <= 1, "above 0, at most 1")
        for name in ("adversarial_from", "average"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0, below 1")
        try:
            with torch.device("meta"):
                InfinityTokenizer(self.tokenizer)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError, IndexError) as error:
            raise SettingError(f"no tokenizer can be built of {self.tokenizer}: {error}") from error

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise SettingError(f"{name} {getattr(self, name)!r} of the tokenizer's training: expected {expected}")


def square_schedule(side: int, pixels_per_token: int) -> Schedule:
    """The stages of Infinity's square list up to pictures of this side."""
    offers = [height * pixels_per_token for height, _ in INFINITY_SIZES[1.0]]
    if side not in offers:
        raise SettingError(f"pictures of side {side}: at {pixels_per_token} pixels per token choose one of {', '.join(map(str, offers))}")
    return infinity_stages(1.0, offers.index(side) + 1)


def check_sides(config: InfinityTokenizerConfig, sides: Collection[int]) -> None:
    """Whether a tokenizer can be trained on pictures of these sides."""
    if not 1 <= len(sides) <= 2:
        raise SettingError(f"training at sides {sorted(sides)}: expected one or two sizes of pictures")
    with torch.device("meta"):
        stride = InfinityTokenizer(config).pixels_per_token
    for side in sides:
        square_schedule(side, stride)


def laid_out(module: M, memory_format: torch.memory_format) -> M:
    return module.to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


def compile_blocks(tokenizer: InfinityTokenizer) -> None:
    """Norms and activations fused, block by block: blocks of one shape share what is compiled, unlike parts of a whole network."""
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    for module in tokenizer.modules():
        if isinstance(module, ResidualBlock):
            module.compile(dynamic=False)
    for coder in (tokenizer.encoder, tokenizer.decoder):
        assert isinstance(coder.norm_out, GroupNorm)
        coder.norm_out.compile(dynamic=False)


def drawing(tokenizer: InfinityTokenizer, codes: Sequence[Tensor], schedule: Schedule) -> Iterator[Canvas]:
    """The canvas after each stage; it is one and the same."""
    canvas = tokenizer.canvas(schedule, codes[0].shape[0])
    for stage, bits in zip(schedule, codes, strict=True):
        canvas.add(bits, Tokens(stage))
        yield canvas


class TokenizerTrainer:
    """The tokenizer with everything that changes while it is trained."""

    def __init__(self, settings: TokenizerTraining, device: torch.device, lpips: Lpips | None) -> None:
        if settings.lpips and lpips is None:
            raise SettingError(f"lpips {settings.lpips}: training with LPIPS needs its network (Lpips.load); without it set lpips to 0")
        torch.manual_seed(settings.seed)
        self.settings, self.device, self.lpips = settings, device, lpips
        self.tokenizer = laid_out(InfinityTokenizer(settings.tokenizer).to(device), torch.channels_last)
        self.average = Ema(self.tokenizer, settings.average)
        if settings.compile:
            compile_blocks(self.tokenizer)
        self.modules: dict[str, nn.Module] = {"tokenizer": self.tokenizer, "average": self.average.module}
        self.optimizers: dict[str, torch.optim.Optimizer] = {"tokenizer": self._optimizer(self.tokenizer, 1.0)}
        self.discriminator: PatchDiscriminator | None = None
        if settings.adversarial:
            self.discriminator = laid_out(PatchDiscriminator().to(device), torch.channels_last)
            self.modules["discriminator"] = self.discriminator
            self.optimizers["discriminator"] = self._optimizer(self.discriminator, DISCRIMINATOR_RATE)

    def _optimizer(self, module: nn.Module, factor: float) -> torch.optim.Optimizer:
        group = {"params": list(module.parameters()), "factor": factor}
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        return torch.optim.AdamW([group], lr=rate, betas=BETAS, weight_decay=decay, fused=self.device.type == "cuda")

    def _half(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def losses(self, images: Tensor, progress: float) -> tuple[dict[str, Tensor], Tensor]:
        """Parts of the loss and their weighted sum ("loss"), and what was drawn."""
        settings = self.settings
        images = images.contiguous(memory_format=torch.channels_last)
        with self._half():
            z = self.tokenizer.encoder(images)
        z = z.float()
        quantised = quantise(self.tokenizer, z, square_schedule(images.shape[-1], self.tokenizer.pixels_per_token))
        with self._half():
            drawn = self.tokenizer.decoder(straight_through(z, quantised.latent))
        drawn = drawn.float()
        parts = {
            "l1": F.l1_loss(drawn, images),
            "commitment": commitment(z, quantised.latent),
            "entropy": entropy_penalty(quantised.rests, settings.entropy_scale, settings.entropy_diversity),
        }
        total = parts["l1"] + settings.commitment * parts["commitment"] + settings.entropy * parts["entropy"]
        if settings.lpips and self.lpips is not None:
            seen = max(1, round(settings.lpips_share * images.shape[0]))
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            parts["lpips"] = self.lpips(drawn[:seen], images[:seen], dtype).mean()
            total = total + settings.lpips * parts["lpips"]
        if self.discriminator is not None and progress >= settings.adversarial_from:
            self.discriminator.requires_grad_(False)
            with self._half():
                scores = self.discriminator(drawn)
            parts["generator"] = generator_loss(scores)
            total = total + settings.adversarial * parts["generator"]
        return parts | {"loss": total}, drawn

    def step(self, images: Tensor, progress: float, number: int) -> dict[str, Tensor]:
        """One step on pictures [B, 3, side, side]; `number` counts the steps before. Nothing is read back from the device."""
        rate = learning_rate(progress, number, self.settings.learning_rate)
        for optimizer in self.optimizers.values():
            set_learning_rate(optimizer, rate)
        parts, drawn = self.losses(images, progress)
        parts["loss"].backward()
        parts["gradient"] = self._update("tokenizer")
        self.average.update(number)
        if "generator" in parts:
            parts["discriminator"] = self._discriminator_step(images, drawn.detach())
        return {name: value.detach() for name, value in parts.items()}

    def _discriminator_step(self, images: Tensor, drawn: Tensor) -> Tensor:
        assert self.discriminator is not None
        self.discriminator.requires_grad_(True)
        with self._half():
            loss = discriminator_loss(self.discriminator(images), self.discriminator(drawn))
        loss.backward()
        self._update("discriminator")
        return loss

    def _update(self, name: str) -> Tensor:
        """Applies the gradient and returns its norm before it was cut."""
        norm = nn.utils.clip_grad_norm_(self.modules[name].parameters(), self.settings.longest_gradient)
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()
        return norm

    def prepare(self, images: Tensor) -> None:
        """Compiles and tunes for pictures of this shape; changes no weight."""
        parts, _ = self.losses(images, 0.0)
        parts["loss"].backward()
        self.optimizers["tokenizer"].zero_grad()

    @torch.inference_mode()
    def evaluate(self, pictures: Mapping[int, Pictures]) -> dict[str, float]:
        """Of the averaged weights, per side: PSNR, LPIPS, how often the least and the most used bit is one, PSNR by stages decoded.

        The last is measured on the first few pictures only.
        """
        found: dict[str, float] = {}
        tokenizer = self.average.module
        assert isinstance(tokenizer, InfinityTokenizer)
        for side, held_out in pictures.items():
            schedule = square_schedule(side, tokenizer.pixels_per_token)
            decibels: list[Tensor] = []
            distances: list[Tensor] = []
            ones: list[Tensor] = []
            for chosen in torch.arange(len(held_out), device=self.device).split(EVALUATED_TOGETHER):
                images = held_out.batch(chosen)
                codes = tokenizer.encode(images, schedule)
                for stages, canvas in enumerate(drawing(tokenizer, codes, schedule), start=1):
                    if stages == len(schedule) or not decibels:  # all stages, or the first few pictures
                        drawn = canvas.decode()
                    if not decibels:
                        found[f"psnr_{side}_stages_{stages}"] = float(psnr(drawn, images).mean())
                decibels.append(psnr(drawn, images))
                ones.append(torch.cat(codes, dim=1).float().mean(1))
                if self.lpips is not None:
                    distances.append(self.lpips(drawn.clamp(-1, 1), images))
            share = torch.cat(ones).mean(0)  # [bits per token]
            found |= {f"psnr_{side}": float(torch.cat(decibels).mean())}
            found |= {f"ones_least_{side}": float(share.min()), f"ones_most_{side}": float(share.max())}
            if distances:
                found[f"lpips_{side}"] = float(torch.cat(distances).mean())
        return {name: round(value, 4) for name, value in found.items()}

    @torch.inference_mode()
    def samples(self, pictures: Pictures, count: int = 8) -> Image.Image:
        """Pictures from the whole set above what the averaged weights make of their bits."""
        tokenizer = self.average.module
        assert isinstance(tokenizer, InfinityTokenizer)
        images = pictures.batch(torch.linspace(0, len(pictures) - 1, min(count, len(pictures)), device=self.device).long())
        schedule = square_schedule(pictures.side, tokenizer.pixels_per_token)
        *_, canvas = drawing(tokenizer, tokenizer.encode(images, schedule), schedule)
        rows = [torch.cat(list(row), dim=2) for row in (images, canvas.decode())]  # [3, side, count * side]
        return to_pil(torch.cat(rows, dim=1)[None])[0]


def train_tokenizer(
    settings: TokenizerTraining,
    train: Mapping[int, Pictures],
    held_out: Mapping[int, Pictures],
    folder: Path,
    budget: Budget,
    device: torch.device,
    lpips: Lpips | None,
) -> None:
    """Trains, or goes on where the folder's run stopped; leaves tokenizer.safetensors, metrics.json and reconstructions.png there.

    train, held_out: pictures by their side, on the device; one size or two, of which the larger takes its turn every
    `settings.large_every` steps.
    """
    sides = sorted(train)
    check_sides(settings.tokenizer, sides)
    if not held_out or not set(held_out) <= set(sides):
        raise SettingError(f"training at sides {sides}, held out {sorted(held_out)}: expected held-out pictures of some of these sides")
    batches = {side: max(1, settings.batch * sides[0] ** 2 // side**2) for side in sides}
    trainer = TokenizerTrainer(settings, device, lpips)
    generator = torch.Generator(device)

    def draw(side: int, number: int) -> Tensor:
        """The same pictures whenever this step is made, so that a run taken up again goes on as if it had not stopped."""
        generator.manual_seed((settings.seed << 32) + number)
        chosen = torch.randint(len(train[side]), (batches[side],), generator=generator, device=device)
        return train[side].batch(chosen, generator)

    torch.backends.cudnn.benchmark = True  # there are few shapes, and many steps of each
    run = Run(folder, budget, trainer.modules, trainer.optimizers, {**lasting(settings), "pictures": fingerprint(train)})
    with memory_errors("set a smaller batch"):
        if settings.compile and run.progress < 1:
            for side in sides:
                trainer.prepare(draw(side, 0))
        for progress in run.steps():
            side = sides[-1] if run.step % settings.large_every == settings.large_every - 1 else sides[0]
            parts = trainer.step(draw(side, run.step), progress, run.step)
            rate = trainer.optimizers["tokenizer"].param_groups[0]["lr"]
            run.log({"learning_rate": rate, **{f"{name}_{side}": value for name, value in parts.items()}})
    average = laid_out(trainer.average.module, torch.contiguous_format)
    assert isinstance(average, InfinityTokenizer)
    write_weights(average, folder / WEIGHTS, average.layout)
    run.finish(trainer.evaluate(held_out))
    write_image(trainer.samples(held_out[max(held_out)]), folder / SHEET)
