"""Fits SkipVAR's decision models for a model from its own images.

The two classes of an image are the largest number of stages that can be left out, and that can run without guidance, while the image is
as similar to the dense one as required. Logistic regressions of two features learn them, as the published ones did.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from nextscale.cli.files import default_out, require_writable
from nextscale.cli.options import Batch, Force, ImageOptions, ModelOptions, PromptOptions, grouped, option, out_option
from nextscale.cli.parse import parse_prompt
from nextscale.cli.show import share_bar, show_next
from nextscale.errors import SettingError
from nextscale.io import write_text
from nextscale.methods.drop_guidance import DropGuidance
from nextscale.methods.method import Method
from nextscale.methods.skip import SkipStages
from nextscale.metrics.pixels import ssim
from nextscale.output import Preview
from nextscale.pipeline import Pipeline
from nextscale.stage import Schedule

from ..program import app
from .skipvar import MOST, SkipVAR, features_of, preview_of
from .skipvar_models import Classifier, Decisions

STRENGTH = 1.0  # of the data against the squared weights, as in the published fits
STEPS = 500


@dataclass(frozen=True)
class Measured:
    """Features [N, 2] of every image, and its structural similarity to the dense one with 1, 2, 3 stages left out or unguided."""

    features: Tensor
    skipped: Tensor  # [N, stages]
    unguided: Tensor


def measure(
    pipe: Pipeline,
    prompts: Sequence[Any],
    schedule: Schedule,
    seed: int = 0,
    batch: int = 8,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Measured:
    """Generates every prompt densely and with every number of stages changed."""
    decide, preview = SkipVAR().stages(schedule)
    if decide is None:
        raise SettingError(f"SkipVAR needs three stages at least; {schedule} has too few.")
    numbers = range(1, min(MOST, len(schedule) - 1 - decide) + 1)
    methods = [*map(SkipStages, numbers), *(DropGuidance(len(schedule) - number) for number in numbers)]
    found: list[tuple[Tensor, ...]] = []
    for start in range(0, len(prompts), batch):
        shown: dict[int, Preview] = {}

        def keep(one: Preview, shown: dict[int, Preview] = shown) -> None:
            shown[one.done.stage.index] = one

        def pixels(method: Method, start: int = start, **more: Any) -> Tensor:
            return pipe(list(prompts[start : start + batch]), seed=seed + start, size=schedule, method=method, **more).pixels

        dense = pixels(Method(), on_stage=keep)
        canvas = shown[len(schedule) - 1].canvas
        with torch.inference_mode():
            features = features_of(*(preview_of(shown[stage].latent, schedule[preview], canvas) for stage in (decide - 1, decide)))
        similar = torch.stack([ssim(pixels(method), dense) for method in methods], dim=1)
        found.append((features.cpu().double(), *similar.cpu().double().split(len(numbers), dim=1)))
        on_progress(min(1.0, (start + batch) / len(prompts)))
    return Measured(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def fit(measured: Measured, similarity: float) -> Decisions:
    """Returns the decision models that keep images at least this similar to the dense ones, as far as two features tell."""
    skip, uncond = (most_within(similar, similarity) for similar in (measured.skipped, measured.unguided))
    kept = skip == 0
    return Decisions(
        logistic_regression(measured.features, skip),
        logistic_regression(measured.features[kept], uncond[kept]) if kept.any() else constant(measured.features.shape[1], 0),
    )


def most_within(similar: Tensor, limit: float) -> Tensor:
    """Returns the largest number of stages [N] whose image is similar enough, from similarities [N, stages] of 1, 2, ... of them."""
    numbers = torch.arange(1, similar.shape[1] + 1)
    return torch.where(similar >= limit, numbers, 0).amax(dim=1)


def constant(features: int, number: int) -> Classifier:
    return Classifier((0.0,) * features, (1.0,) * features, (number,), ((0.0,) * features,), (0.0,))


def logistic_regression(features: Tensor, labels: Tensor) -> Classifier:
    """Fits a multinomial logistic regression of standardized features [N, F]: cross-entropy summed over the images, and half the squared
    weights. A single class is returned as a constant."""
    classes, target = labels.unique(return_inverse=True)
    if len(classes) == 1:
        return constant(features.shape[1], int(classes[0]))
    features = features.double()
    mean, scale = features.mean(dim=0), features.std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    standard = (features - mean) / scale
    weights = torch.zeros(len(classes), features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(classes), dtype=torch.float64, requires_grad=True)
    exact = {"max_iter": STEPS, "tolerance_grad": 1e-10, "tolerance_change": 1e-14, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([weights, bias], **exact)  # type: ignore[arg-type]

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = STRENGTH * F.cross_entropy(standard @ weights.T + bias, target, reduction="sum") + weights.square().sum() / 2
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        centered = bias - bias.mean()
    rows = tuple(tuple(row) for row in weights.tolist())
    return Classifier(tuple(mean.tolist()), tuple(scale.tolist()), tuple(classes.tolist()), rows, tuple(centered.tolist()))


# --- the command


@app.command("calibrate-skipvar")
@grouped
def calibrate_skipvar(
    *,
    prompts: PromptOptions,
    model: ModelOptions,
    image: ImageOptions,
    batch: Batch = 4,
    similarity: Annotated[float, option("--similarity", "SSIM", "Similarity to the dense image to aim at.", min=0.01, max=1)] = 0.84,
    out: Annotated[Path | None, out_option("FILE", "The .json file to write.", "skipvar.json")] = None,
    force: Force = False,
) -> None:
    """Fit SkipVAR's decision models for a model, on a few dozen generated images."""
    spec, schedule = model.spec, image.schedule(model.spec)
    given = [parse_prompt(text, spec) for text in prompts.read() for _ in range(image.num_images)]
    file = out or default_out("skipvar.json")
    require_writable([file], force)
    with share_bar() as progress:
        task = progress.add_task("measuring", total=1.0)
        measured = measure(model.load(), given, schedule, image.seed, batch, lambda share: progress.update(task, completed=share))
    models = fit(measured, similarity)
    content = {"model": spec.name, "images": len(given), "seed": image.seed}
    content |= {"stages": [list(stage) for stage in schedule.sizes], "similarity": similarity}
    content |= {name: getattr(models, name)._asdict() for name in models._fields}
    write_text(json.dumps(content, indent=1) + "\n", file)
    for number, images in sorted(Counter(outcome.skipped for outcome in models(measured.features)).items()):
        typer.echo(f"{images} of {len(given)} images leave out {number} stage(s)")
    typer.echo(f"wrote {file}")
    show_next(f"nextscale compare -m {model.model} --method skipvar:models={file}")
