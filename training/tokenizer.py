"""Training of Infinity's tokenizer, which turns pictures into a few bits per cell and stage and back: `train_tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nextscale.checkpoints import write_weights
from nextscale.errors import SettingError
from nextscale.io import write_image
from nextscale.metrics import Lpips

from .data import Pictures, fingerprint
from .export import TOKENIZER as WEIGHTS
from .run import Budget, Run, memory_errors
from .settings import lasting
from .tokenizer_settings import TokenizerTraining, check_sides
from .tokenizer_trainer import TokenizerTrainer, to_channels_last

SHEET = "reconstructions.png"


def train_tokenizer(
    settings: TokenizerTraining,
    train: Mapping[int, Pictures],
    held_out: Mapping[int, Pictures],
    folder: Path,
    budget: Budget,
    device: torch.device,
    lpips: Lpips | None,
) -> None:
    """Trains a tokenizer, or resumes a run. Writes tokenizer.safetensors, metrics.json and reconstructions.png to the folder.

    train, held_out: pictures by their side, on the device; one size or two, of which the larger takes one of `settings.large_every`
    steps.
    """
    sides = sorted(train)
    check_sides(settings.tokenizer, sides)
    if not held_out or not set(held_out) <= set(sides):
        raise SettingError(f"training at sides {sides}, held out {sorted(held_out)}: expected held-out pictures of some of these sides")
    batches = {side: max(1, settings.batch * sides[0] ** 2 // side**2) for side in sides}
    trainer = TokenizerTrainer(settings, device, lpips)
    generator = torch.Generator(device)

    def pictures_at(side: int, number: int) -> Tensor:
        """Returns the pictures of a step. They depend only on the step, so a resumed run equals an uninterrupted one."""
        generator.manual_seed((settings.seed << 32) + number)
        chosen = torch.randint(len(train[side]), (batches[side],), generator=generator, device=device)
        return train[side].batch(chosen, generator)

    torch.backends.cudnn.benchmark = True  # there are few shapes, and many steps of each
    run = Run(folder, budget, trainer.modules, trainer.optimizers, {**lasting(settings), "pictures": fingerprint(train)})
    with memory_errors("set a smaller batch"):
        if settings.compile and run.progress < 1:
            for side in sides:
                trainer.prepare(pictures_at(side, 0))
        for progress in run.steps():
            side = sides[-1] if run.step % settings.large_every == settings.large_every - 1 else sides[0]
            parts = trainer.step(pictures_at(side, run.step), progress, run.step)
            rate = trainer.optimizers["tokenizer"].param_groups[0]["lr"]
            run.log({"learning_rate": rate, **{f"{name}_{side}": value for name, value in parts.items()}})
    average = to_channels_last(trainer.average.module, torch.contiguous_format)
    write_weights(average, folder / WEIGHTS, average.layout)
    run.finish(trainer.evaluate(held_out))
    write_image(trainer.samples(held_out[max(held_out)]), folder / SHEET)
