"""Training of LoRA adapters on Infinity's models, nano among them: `train_lora`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nextscale.checkpoints.adapters import LowRank, write_peft
from nextscale.device import free_memory
from nextscale.errors import OutOfMemory, SettingError
from nextscale.io import to_pil, write_image
from nextscale.lora import weights_of
from nextscale.models import Infinity
from nextscale.models.context import Conditioning
from nextscale.models.text_context import TextContext
from nextscale.pipeline import Pipeline
from nextscale.schedules import SizeLike
from nextscale.stage import Schedule
from nextscale.text import TextFeatures
from nextscale.tokenizers import InfinityTokenizer

from .forcing import ForcedPass, forced_block, forced_pyramid
from .lora_data import Bucket, Captioned, encoded, split
from .run import Budget, Run, memory_errors

PARTS = {"attention": (".sa.", ".ca."), "mlp": (".ffn.",)}  # of published names
BETAS, LONGEST_GRADIENT = (0.9, 0.97), 5.0
SAMPLES = 4  # validation images
KEPT_FLOATS = 34  # of a block's activations per token and channel, without gradient checkpointing
CHECKPOINT_FROM = 2 * 2**30  # bytes of activations from which blocks are computed twice instead
RECOMPUTED = partial(checkpoint, forced_block, use_reentrant=False)


@dataclass(frozen=True)
class LoraTraining:
    """Settings of a run. The defaults are those of LoRA in this field, with Infinity's noise on earlier stages."""

    rank: int = 16
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attention", "mlp")
    learning_rate: float = 1e-4
    warmup: int = 20  # steps
    batch: int = 4  # pictures of a step
    at_once: int = 4  # of these, computed together
    flips: float = 0.25  # largest share of bits that are flipped on the canvas
    no_prompt: float = 0.1  # share of pictures that are learned without their caption
    sample_every: int = 200  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        whole = {"rank": self.rank, "warmup": self.warmup, "batch": self.batch, "at_once": self.at_once, "sample_every": self.sample_every}
        for name, value in whole.items():
            if value < 1:
                raise SettingError(f"{name} must be at least 1; got {value}.")
        if not self.learning_rate > 0 or not self.alpha > 0:
            raise SettingError(f"learning_rate and alpha must be above 0; got {self.learning_rate} and {self.alpha}.")
        if not self.targets or set(self.targets) - PARTS.keys():
            raise SettingError(f"targets must be some of {', '.join(PARTS)}; got {self.targets}.")


class AdapterLinear(nn.Module):
    """A frozen linear layer plus a low-rank update in float32. It is not an nn.Linear, so that nothing reads its weight past the update."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        down = torch.empty(rank, base.in_features)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
        self.down = nn.Parameter(down.to(base.weight.device))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        change = F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))
        return self.base(x) + self.scale * change


class Adapters(nn.Module):
    """Trained layers of a model by their published names."""

    def __init__(self, model: Infinity, settings: LoraTraining) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(settings.seed)
        chosen = tuple(part for target in settings.targets for part in PARTS[target])
        places = {key.removesuffix(".weight"): place.parameter.removesuffix(".weight") for key, place in weights_of(model).items()}
        self.places = {name: layer for name, layer in places.items() if "block" in name and any(part in name for part in chosen)}
        self.model = [model]  # a list, so that it is not a part of the state
        scale = settings.alpha / settings.rank
        self.each = [AdapterLinear(as_linear(model, layer), settings.rank, scale, generator) for layer in self.places.values()]
        self.layers = nn.ModuleList(self.each)
        self.alpha = settings.alpha

    def put(self, adapted: bool) -> None:
        """Places the trained layers, or the base's, into the model."""
        for layer, module in zip(self.places.values(), self.each, strict=True):
            owner, _, leaf = layer.rpartition(".")
            setattr(self.model[0].get_submodule(owner), leaf, module if adapted else module.base)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.put(True)
        try:
            yield
        finally:
            self.put(False)

    def trained(self) -> list[nn.Parameter]:
        return [parameter for module in self.each for parameter in (module.down, module.up)]

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Returns the trained factors without the base weights."""
        return {name: value for name, value in super().state_dict(*arguments, **options).items() if ".base." not in name}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        missing, unexpected = super().load_state_dict(state, strict=False, assign=assign)
        if unexpected or any(".base." not in name for name in missing):
            raise SettingError("the state is of another adapter: choose another folder.")
        return missing, unexpected

    def save(self, folder: Path, model: str) -> None:
        found = {name: LowRank(module.down, module.up) for name, module in zip(self.places, self.each, strict=True)}
        write_peft(folder, found, alpha=self.alpha, model=model)


def as_linear(model: Infinity, layer: str) -> nn.Linear:
    module = model.get_submodule(layer)
    if not isinstance(module, nn.Linear):
        raise SettingError(f"{layer} is quantized: load the model without quantize to train an adapter.")
    return module


def train_lora(
    pipe: Pipeline, pictures: Sequence[Captioned], folder: Path, budget: Budget, settings: LoraTraining, size: SizeLike = None
) -> dict[str, Any]:
    """Trains an adapter and writes it as a PEFT folder, with held-out losses before and after. Resumes an interrupted run.

    Returns:
        The content of metrics.json.
    """
    model, tokenizer = pipe.model, pipe.tokenizer
    if not isinstance(model, Infinity) or not isinstance(tokenizer, InfinityTokenizer):
        raise SettingError(f"adapters are trained on Infinity's models and nano; {pipe.name} is of the family {model.family}.")
    if pipe.loras:
        raise SettingError(f"the pipeline must have no adapters; it has {', '.join(pipe.loras.names)}. Unload them first.")
    train_pictures, held_pictures = split(pictures)
    prompts = [picture.caption for picture in held_pictures][:SAMPLES]
    sheet = partial(samples, pipe, prompts, size, settings.seed)
    model.requires_grad_(False)
    tokenizer.requires_grad_(False)
    train, held_out = encoded(pipe, train_pictures, size), encoded(pipe, held_pictures, size)
    adapters = Adapters(model, settings)
    trainer = LoraTrainer(pipe, adapters, settings)
    trainer.require_memory(train)
    optimizer = torch.optim.AdamW(adapters.trained(), lr=settings.learning_rate, betas=BETAS, weight_decay=0.0)
    known = [(picture.name, picture.caption) for picture in pictures]
    identity = {
        **asdict(settings),
        "model": pipe.name,
        "size": str(size),
        "pictures": hashlib.sha256(repr(known).encode()).hexdigest()[:16],
    }
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, budget, {"adapters": adapters}, {"adamw": optimizer}, identity, log_every=10)
    if run.step == 0:
        trainer.require_gradients(train)
        write_image(sheet(), folder / "samples-before.png")
    before = trainer.evaluate(held_out, adapted=False)
    with memory_errors("lower at_once, --size or rank"):
        for _ in run.steps():
            run.log(trainer.step(run.step, train, optimizer))
            if (run.step + 1) % settings.sample_every == 0:
                adapters.save(folder, pipe.name)
                write_image(sheet(folder), folder / "samples.png")
    adapters.save(folder, pipe.name)
    after = trainer.evaluate(held_out, adapted=True)
    write_image(sheet(folder), folder / "samples.png")
    results = {"held_out_before": before, "held_out_after": after, "pictures": len(train_pictures), "held_out": len(held_pictures)}
    run.finish(results)
    return results


class LoraTrainer:
    """One step, held-out losses, and the checks before a run."""

    def __init__(self, pipe: Pipeline, adapters: Adapters, settings: LoraTraining) -> None:
        assert isinstance(pipe.model, Infinity) and isinstance(pipe.tokenizer, InfinityTokenizer)
        self.model, self.tokenizer, self.adapters, self.settings = pipe.model, pipe.tokenizer, adapters, settings
        self.device = pipe.model.device
        self._passes: dict[Schedule, ForcedPass] = {}
        self._generator = torch.Generator(self.device)

    def forced_pass(self, schedule: Schedule) -> ForcedPass:
        if schedule not in self._passes:
            run_block = RECOMPUTED if self.recomputes(schedule) else forced_block
            self._passes[schedule] = ForcedPass(self.model, schedule, len(schedule), run_block)
        return self._passes[schedule]

    def recomputes(self, schedule: Schedule) -> bool:
        """Returns True if blocks are computed twice, so that less is kept for the backward pass."""
        return self.activations(schedule) > CHECKPOINT_FROM

    def activations(self, schedule: Schedule) -> int:
        """Returns the bytes that the blocks keep for the backward pass without gradient checkpointing."""
        config = self.model.config
        return KEPT_FLOATS * schedule.tokens * config.dim * config.depth * self.settings.at_once * self.model.dtype.itemsize

    def step(self, step: int, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> dict[str, Tensor | float]:
        """Makes one step. Random numbers depend only on `step`, so a resumed run equals an uninterrupted one."""
        settings = self.settings
        host = torch.Generator().manual_seed(settings.seed + 1_000_003 * step)
        self._generator.manual_seed(settings.seed + step)
        sizes = torch.tensor([float(len(bucket)) for bucket in buckets])
        bucket = buckets[int(torch.multinomial(sizes, 1, generator=host))]
        chosen = torch.randint(len(bucket), (settings.batch,), generator=host)
        dropped = torch.rand(settings.batch, generator=host) < settings.no_prompt
        optimizer.zero_grad(set_to_none=True)
        losses, right = [], []
        with self.adapters.in_place():
            for part in torch.arange(settings.batch).split(settings.at_once):
                by_stage, accuracy = self.losses(bucket, chosen[part], dropped[part], settings.flips)
                (self.weighted(bucket.schedule, by_stage) * len(part) / settings.batch).backward()
                losses.append(by_stage.detach() * len(part) / settings.batch)
                right.append(accuracy * len(part) / settings.batch)
        norm = nn.utils.clip_grad_norm_(self.adapters.trained(), LONGEST_GRADIENT)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / settings.warmup)
        optimizer.step()
        by_stage, accuracy = torch.stack(losses).sum(0), torch.stack(right).sum(0)
        name = f"_{len(bucket.schedule)}"  # buckets may have different numbers of stages
        return {
            "loss": self.weighted(bucket.schedule, by_stage),
            "gradient": norm,
            f"stages{name}": by_stage,
            f"bit_accuracy{name}": accuracy,
        }

    def weighted(self, schedule: Schedule, by_stage: Tensor) -> Tensor:
        return (by_stage * self.forced_pass(schedule).weights).sum()

    def losses(self, bucket: Bucket, chosen: Tensor, dropped: Tensor, flips: float) -> tuple[Tensor, Tensor]:
        """Returns the mean loss per bit and the share of right bits of every stage."""
        forced = self.forced_pass(bucket.schedule)
        features = bucket.features[chosen.to(bucket.features.device)].float().to(self.device)
        pyramid = forced_pyramid(self.tokenizer, features, bucket.schedule, len(bucket.schedule), flips, self._generator)
        return forced.bit_losses(pyramid, self.condition(bucket.text.take(chosen.tolist()), dropped))

    def condition(self, text: TextFeatures, dropped: Tensor) -> Conditioning:
        rows, lengths = text.to(self.device).unpadded().compact()
        parts = zip(rows.split(list(lengths)), dropped.tolist(), strict=True)
        rows = torch.cat([self.model.no_text[: len(part)].to(part) if drop else part for part, drop in parts])
        return self.model.read(rows, TextContext.of(lengths, self.device))

    @torch.no_grad()
    def evaluate(self, buckets: Sequence[Bucket], adapted: bool) -> dict[str, Any]:
        """Returns held-out loss and bit accuracy of every stage, without flips, means over the pictures; stages by their number."""
        losses: dict[int, list[Tensor]] = {}
        self._generator.manual_seed(self.settings.seed)
        self.adapters.put(adapted)
        try:
            for bucket in buckets:
                for part in torch.arange(len(bucket)).split(self.settings.at_once):
                    found = torch.stack(self.losses(bucket, part, torch.zeros(len(part), dtype=torch.bool), 0.0))
                    losses.setdefault(len(bucket.schedule), []).extend([found.cpu()] * len(part))
        finally:
            self.adapters.put(False)
        means = {stages: torch.stack(found).mean(0) for stages, found in losses.items()}
        return {
            str(stages): {
                "loss": round(float((mean[0] * mean.new_tensor(self.weights_for(stages))).sum()), 5),
                "stages": [round(value, 5) for value in mean[0].tolist()],
                "bit_accuracy": [round(value, 5) for value in mean[1].tolist()],
            }
            for stages, mean in means.items()
        }

    def weights_for(self, stages: int) -> list[float]:
        return next(one.weights.tolist() for one in self._passes.values() if len(one.stages) == stages)

    def require_gradients(self, buckets: Sequence[Bucket]) -> None:
        """Raises SettingError unless every trained layer takes part in the loss. One whose weight is read past it would learn nothing."""
        with self.adapters.in_place():
            ups = [module.up for module in self.adapters.each]
            with torch.no_grad():
                for up in ups:
                    up.fill_(1e-4)  # zeros would hide the gradient of the other factor
            by_stage, _ = self.losses(buckets[0], torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.bool), 0.0)
            trained = self.adapters.trained()
            found = torch.autograd.grad(by_stage.sum(), trained, allow_unused=True) if by_stage.requires_grad else [None] * len(trained)
            with torch.no_grad():
                for up in ups:
                    up.zero_()
        pairs = zip(self.adapters.places, found[::2], found[1::2], strict=True)
        if silent := [name for name, *both in pairs if any(one is None or not bool(one.any()) for one in both)]:
            raise SettingError(f"{len(silent)} layers get no gradient, such as {silent[0]}: choose other targets.")

    def require_memory(self, buckets: Sequence[Bucket]) -> None:
        """Prints the predicted memory, and raises OutOfMemory if the device has less."""
        weights = sum(tensor.nbytes for tensor in (*self.model.state_dict().values(), *self.tokenizer.state_dict().values()))
        trained = 16 * sum(parameter.numel() for parameter in self.adapters.trained())  # weight, gradient, two moments
        largest = max((bucket.schedule for bucket in buckets), key=lambda schedule: schedule.tokens)
        kept = self.activations(largest)
        if kept > CHECKPOINT_FROM:
            kept = kept // KEPT_FLOATS + kept // self.model.config.depth  # inputs of all blocks, and everything of one
        print(
            f"memory: weights {weights / 2**30:.2f} GiB, adapter and optimizer {trained / 2**30:.2f} GiB, "
            f"activations about {kept / 2**30:.2f} GiB at {self.settings.at_once} pictures at once",
            flush=True,
        )
        free = free_memory(self.device)
        if free is not None and trained + kept > free:
            raise OutOfMemory(f"{free / 2**30:.2f} GiB are free: set at_once lower, or train at a smaller --size.")


def samples(pipe: Pipeline, prompts: list[str], size: SizeLike, seed: int, adapter: Path | None = None) -> Image.Image:
    """Returns images of the prompts side by side, with the adapter as it was written."""
    if adapter is not None:
        pipe.load_lora(adapter, "trained")
    try:
        images = to_pil(pipe(prompts, seed=seed, size=size).pixels)
    finally:
        if adapter is not None:
            pipe.unload_lora("trained")
    sheet = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)), "white")
    left = 0
    for image in images:
        sheet.paste(image, (left, 0))
        left += image.width
    return sheet
