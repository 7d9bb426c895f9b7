"""Training of the bitwise next-scale transformer and its word encoder: `train_model`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from nextscale.errors import SettingError
from nextscale.io import to_pil, write_image
from nextscale.pipeline import Pipeline
from nextscale.text.words import WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer

from .data import Pictures, fingerprint
from .model_settings import ModelTraining, check_pictures, check_training
from .model_trainer import ModelTrainer
from .run import Budget, Run, memory_errors
from .scenes import Scenes
from .settings import lasting
from .sprites import Sprites
from .tokenizer_settings import square_schedule

SAMPLES, SAMPLE_COLUMNS = 24, 6  # images of a sheet
PREVIEWS = 4  # sheets that a run writes on the way


def train_model(
    settings: ModelTraining,
    words: WordTextEncoder,
    tokenizer: InfinityTokenizer,
    train: Mapping[int, Pictures],
    held_out: Mapping[int, Pictures],
    folder: Path,
    budget: Budget,
    device: torch.device,
    start: Path | None = None,
    stretch: float = math.inf,
) -> None:
    """Trains a model. Writes averaged weights, held-out losses and a sheet of samples to `folder`. Resumes an interrupted run.

    train, held_out: the pictures by side, the same ones in the same order at every side. start: weights to begin a new run with; a run
    that is resumed has its own. stretch: seconds after which this session ends; the next one goes on.
    """
    check_training(settings, tokenizer, words)
    check_pictures(settings, train, held_out)
    smallest = settings.sides[0]
    check_captions(settings, words, train[smallest], held_out[smallest])
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    trainer = ModelTrainer(settings, words, tokenizer, device, start)
    run = Run(folder, budget, trainer.modules, trainer.optimizers.all, identity(settings, words, tokenizer, train), stretch=stretch)
    trainer.weights.publish()  # of a resumed state
    scenes = Scenes(Sprites(train, device), settings.mix, settings.compile)
    prompts = [record.caption for record in held_out[smallest].records]
    prompts = prompts[:: max(1, len(prompts) // SAMPLES)][:SAMPLES]
    previews = int(PREVIEWS * run.progress)  # those of a resumed run
    with memory_errors("let the phases take fewer pictures at a time"):
        for progress in run.steps():
            run.log(trainer.step(progress, run.step, scenes))
            if int(PREVIEWS * progress) > previews:
                previews = int(PREVIEWS * progress)
                write_image(samples(trainer.pipeline(), prompts, smallest), folder / sheet_name(smallest))
    trainer.save(folder)
    run.finish({f"held_out_{name}": values for name, values in trainer.evaluate(held_out).items()})
    for side in held_out:
        write_image(samples(trainer.pipeline(), prompts, side), folder / sheet_name(side))


def check_captions(settings: ModelTraining, words: WordTextEncoder, *several: Pictures) -> None:
    """Raises SettingError if a caption has more tokens than the model reads."""
    for pictures in several:
        longest = words.tokenize([record.caption for record in pictures.records])[0].shape[1] + 1
        if longest > settings.model.longest_text:
            raise SettingError(
                f"a caption has {longest} tokens, the model reads {settings.model.longest_text}: set model.longest_text higher"
            )


def identity(
    settings: ModelTraining, words: WordTextEncoder, tokenizer: InfinityTokenizer, train: Mapping[int, Pictures]
) -> dict[str, Any]:
    """Returns the settings and inputs that must be equal to resume a run."""
    return {
        **lasting(settings),
        "pictures": fingerprint(train),
        "vocabulary": hashlib.sha256(words.vocabulary.text().encode()).hexdigest()[:16],
        "tokenizer": weights_fingerprint(tokenizer),
    }


def weights_fingerprint(module: nn.Module) -> str:
    """Returns a hash of all weights."""
    found = hashlib.sha256()
    for tensor in module.state_dict().values():
        found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def sheet_name(side: int) -> str:
    return f"samples-{side}.png"


def samples(pipeline: Pipeline, prompts: list[str], side: int, columns: int = SAMPLE_COLUMNS, seed: int = 0) -> Image.Image:
    """Returns the images of the prompts on one sheet."""
    images = to_pil(pipeline(prompts, seed=seed, size=square_schedule(side, pipeline.tokenizer.pixels_per_token)).pixels)
    sheet = Image.new("RGB", (columns * side, math.ceil(len(images) / columns) * side), "white")
    for position, image in enumerate(images):
        sheet.paste(image, (position % columns * side, position // columns * side))
    return sheet
