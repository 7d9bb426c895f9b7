"""Compares editions of a model of nano's kind on held-out prompts with the same seeds: `judge` of `python -m training`."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

import nextscale
from nextscale.errors import SettingError
from nextscale.io import to_pil
from nextscale.metrics import Lpips
from nextscale.metrics.intervals import Interval, mean_interval
from nextscale.metrics.pixels import psnr
from nextscale.pipeline import Pipeline
from nextscale.schedules import INFINITY_SIZES
from nextscale.stage import Schedule
from nextscale_research.metrics.efficientnet import EfficientNetLite0
from nextscale_research.metrics.frechet import Directions, Moments, frechet_distance
from nextscale_research.metrics.judges import set_interval
from nextscale_research.quality.agreement import Agreement, real_features
from nextscale_research.quality.judge import DIRECTIONS, FEWEST_DIRECTIONS, FRECHET_RESAMPLES, IMAGES_PER_DIRECTION
from nextscale_research.quality.prompts import EvalPrompt

from .colors import WHITE, WORDS
from .data import Pictures, decoded
from .export import MODEL, TOKENIZER
from .export import WORDS as WORD_FILE
from .records import Record
from .rules import looks, whole
from .sprites import PHOTO, Sprites
from .tokenizer_settings import schedule_of
from .wording import COLOR, PLACE, is_held, named, style_templates

ICONS_PER_QUESTION = 8  # a fifth of all icons have one color and a subject that may have another
ICON_SIDE = 128
SHEET, SHEET_COLUMNS, SHEET_CELL = 48, 8, 160  # images, and pixels of a cell
MIXED = (0.5, 0.75, 1.333, 2.0)  # aspect ratios of the second sheet
SEEDS = 4  # of every prompt whose images are compared with each other
TOGETHER = 64  # images at 256 px, fewer of larger ones


@dataclass(frozen=True)
class Edition:
    """A model to judge: a name, a folder with its files, empty for the model of the package, and settings of calls."""

    name: str
    folder: Path | None
    options: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Edition:
        """Reads "first", "second=runs/model" or "warm=runs/model:temperature=0.8,guidance=5"."""
        name, _, rest = text.partition("=")
        folder, _, options = rest.partition(":")
        try:
            pairs = [option.split("=") for option in options.split(",") if option]
            return cls(name, Path(folder) if folder else None, {key: float(value) for key, value in pairs})
        except ValueError as error:
            raise SettingError(f"edition {text!r}: expected NAME=FOLDER, or NAME=FOLDER:setting=number,...") from error

    def load(self, device: torch.device) -> Pipeline:
        files: dict[str, Any] = {}
        if self.folder is not None:
            places = {"weights": MODEL, "tokenizer": TOKENIZER, "text_encoder": WORD_FILE}
            files = {part: self.folder / file for part, file in places.items() if (self.folder / file).is_file()}
            if "weights" not in files:
                raise SettingError(f"{self.folder} has no {MODEL}: expected an output folder of `python -m training model`")
        return nextscale.load("nano", device=device, engine="eager", **files)


@dataclass(frozen=True)
class Question:
    """A prompt for a single subject in a color. Rules judge its image."""

    text: str
    word: int  # place of the color in WORDS


def questions(sprites: Sprites, templates: Mapping[str, Sequence[str]], count: int, seed: int) -> list[Question]:
    """Held-out pairs of subject and color, each asked for in a style of training."""
    chance = random.Random(seed)
    found = []
    for index in sprites.facts.paintable.nonzero().squeeze(1).tolist():
        record = sprites.records[index]
        words = [word for word in range(len(WORDS)) if word != WHITE and is_held(record.label, WORDS[word])]  # white is not seen on white
        if words and not COLOR.search(record.subject) and record.style in templates:
            word = chance.choice(words)
            wordings = [text for text in templates[record.style] if "background" not in text]
            found.append(Question(chance.choice(wordings).replace(PLACE, named(record, WORDS[word], random.Random(1))), word))
    chance.shuffle(found)
    return found[:count]


@dataclass
class Scores:
    """One number per image or per prompt, by the name of the measure, and features of whole sets of images by side."""

    each: dict[str, Tensor] = field(default_factory=dict)
    features: dict[int, Tensor] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Exam:
    """Prompts and references, the same for every edition."""

    questions: Sequence[Question]
    prompts: Sequence[EvalPrompt]  # of the held-out pictures
    pictures: Mapping[int, Pictures]  # the same, by side
    network: EfficientNetLite0
    probes: Agreement
    references: Tensor  # features of the held-out pictures
    lpips: Lpips
    counts: Counts

    def take(self, edition: Edition, device: torch.device) -> Scores:
        """Generates the images of all parts and scores them."""
        pipe, scores, begun = edition.load(device), Scores(), time.monotonic()
        stride = pipe.tokenizer.pixels_per_token
        smallest = min(self.pictures)
        self._colors(pipe, edition, schedule_of(1.0, smallest, stride), scores)
        self._ratios(pipe, edition, smallest, scores)
        self._seeds(pipe, edition, schedule_of(1.0, smallest, stride), scores)
        for side, pictures in self.pictures.items():
            schedule = schedule_of(1.0, side, stride)
            images = generate(pipe, [prompt.text for prompt in self.prompts], schedule, edition)
            features = torch.cat([self.network.features(part) for part in images])
            scores.features[side] = features.cpu()
            for name, (flags, _) in self.probes.hits(features, self.prompts).items():
                if len(flags):  # of a few prompts the probes may know none
                    scores.each[f"{name}, {side} px"] = flags.float()
            self._tokenizer(pipe, pictures, schedule, scores)
        scores.seconds = time.monotonic() - begun
        return scores

    def _colors(self, pipe: Pipeline, edition: Edition, schedule: Schedule, scores: Scores) -> None:
        words = torch.tensor([question.word for question in self.questions])
        seen = [looks(part).words().cpu() for part in generate(pipe, [question.text for question in self.questions], schedule, edition)]
        scores.each["color"] = (torch.cat(seen) == words).float()

    def _ratios(self, pipe: Pipeline, edition: Edition, side: int, scores: Scores) -> None:
        """Color and wholeness on every aspect ratio; the square is one of them, and alone under its own name."""
        colors, wholes = [], []
        for number, template in enumerate(sorted(INFINITY_SIZES)):
            places = [(number * self.counts.per_ratio + place) % len(self.questions) for place in range(self.counts.per_ratio)]
            asked = [self.questions[place] for place in places]
            schedule = schedule_of(template, side, pipe.tokenizer.pixels_per_token)
            words = torch.tensor([question.word for question in asked])
            images = list(generate(pipe, [question.text for question in asked], schedule, edition))
            kept = torch.cat([whole(part).cpu() for part in images]).float()
            scores.each[f"whole, {template:g}"] = kept
            if template != 1.0:
                wholes.append(kept)
                colors.append((torch.cat([looks(part).words().cpu() for part in images]) == words).float())
        scores.each["whole, not square"] = torch.cat(wholes)
        scores.each["color, not square"] = torch.cat(colors)

    def _seeds(self, pipe: Pipeline, edition: Edition, schedule: Schedule, scores: Scores) -> None:
        """Mean LPIPS between the images of one prompt."""
        texts = [prompt.text for prompt in self.prompts[:: max(1, len(self.prompts) // self.counts.diverse)][: self.counts.diverse]]
        images = torch.cat(list(generate(pipe, [text for text in texts for _ in range(SEEDS)], schedule, edition))).unflatten(
            0, (-1, SEEDS)
        )
        pairs = [self.lpips(images[:, one], images[:, other]) for one, other in combinations(range(SEEDS), 2)]
        scores.each["LPIPS between seeds"] = torch.stack(pairs).mean(0).cpu()

    def _tokenizer(self, pipe: Pipeline, pictures: Pictures, schedule: Schedule, scores: Scores) -> None:
        decibels, distances = [], []
        for part in torch.arange(len(pictures)).split(together(schedule)):
            images = pictures.batch(part.to(pictures.pixels.device)).to(pipe.model.device)
            canvas = pipe.tokenizer.canvas(schedule, len(images))
            for stage, codes in zip(schedule, pipe.tokenizer.encode(images, schedule), strict=True):
                canvas.add(codes, nextscale.stage.Tokens(stage))
            decoded = canvas.decode().clamp(-1, 1)
            decibels.append(psnr(decoded, images).cpu())
            distances.append(self.lpips(decoded, images).cpu())
        scores.each[f"tokenizer PSNR, {pictures.side} px"] = torch.cat(decibels)
        scores.each[f"tokenizer LPIPS, {pictures.side} px"] = torch.cat(distances)


def together(schedule: Schedule) -> int:
    return max(1, TOGETHER * 1024 // (schedule.grid[0] * schedule.grid[1]))


def generate(pipe: Pipeline, texts: Sequence[str], schedule: Schedule, edition: Edition) -> Iterator[Tensor]:
    """Yields images [B, 3, H, W] in [-1, 1], clamped, in batches; image i has the seed i."""
    options: dict[str, Any] = dict(edition.options)
    for first in range(0, len(texts), together(schedule)):
        part = list(texts[first : first + together(schedule)])
        yield pipe(part, seed=first, size=schedule, **options).pixels.float().clamp(-1, 1)


# --- results


def summary(exam: Exam, scores: Mapping[str, Scores]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns intervals by measure and edition. "change" compares the second edition with the first, image by image."""
    names = list(scores)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for measure, values in scores[names[0]].each.items():
        of_all = {name: scores[name].each[measure] for name in names}
        rows[measure] = {name: interval(mean_interval(numbers), len(numbers)) for name, numbers in of_all.items()}
        if len(names) > 1:
            rows[measure]["change"] = interval(mean_interval(of_all[names[1]] - of_all[names[0]]), len(values))
    count = min(DIRECTIONS, len(exam.prompts) // IMAGES_PER_DIRECTION)
    if count >= FEWEST_DIRECTIONS:
        for side in exam.pictures:
            rows[f"Fréchet distance, {side} px"] = frechet_row(
                exam.references, {name: scores[name].features[side] for name in names}, count
            )
    return rows


def frechet_row(references: Tensor, features: Mapping[str, Tensor], count: int) -> dict[str, dict[str, float]]:
    directions = Directions.of(references.cpu(), count)
    real = Moments.of(directions(references.cpu()))
    ours = {name: directions(of_edition) for name, of_edition in features.items()}
    images = len(references)

    def of(name: str) -> Callable[[Tensor], Tensor]:
        return lambda part: frechet_distance(ours[name][part], real)

    row = {name: interval(set_interval(of(name), images, FRECHET_RESAMPLES), images) for name in ours}
    if len(ours) > 1:
        first, second = list(ours)[:2]
        row["change"] = interval(set_interval(lambda part: of(second)(part) - of(first)(part), images, FRECHET_RESAMPLES), images)
    return row


def interval(found: Interval, count: int) -> dict[str, float]:
    return found.rounded(4) | {"count": count}


def table(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The results as Markdown, with 95 % intervals."""
    columns = list(next(iter(rows.values())))
    lines = [f"| | images | {' | '.join(columns)} |", f"|---|---:|{'---:|' * len(columns)}"]
    for measure, found in rows.items():
        shares = not measure.startswith(("LPIPS", "Fréchet", "tokenizer"))
        cells = [written(found[column], shares) for column in columns]
        lines.append(f"| {measure} | {found[columns[0]]['count']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(found: Mapping[str, float], share: bool) -> str:
    form = ".1%" if share else ".3f" if abs(found["value"]) < 1 else ".1f"
    value, low, high = (format(found[name], form) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})" if math.isfinite(found["value"]) else "none"


# --- references


def eval_prompts(records: Sequence[Record], files: Sequence[bytes]) -> list[EvalPrompt]:
    pairs = zip(records, files, strict=True)
    return [EvalPrompt(record.caption, record.style or None, record.label or None, content) for record, content in pairs]


@dataclass(frozen=True)
class Counts:
    """Numbers of prompts of every kind."""

    questions: int = 200
    per_ratio: int = 16
    diverse: int = 48

    @classmethod
    def limited(cls, limit: int | None) -> Counts:
        """Returns at most `limit` of every kind, for a trial."""
        return cls() if limit is None else cls(*(min(limit, count) for count in vars(cls()).values()))


def make_exam(
    shown: tuple[Sequence[Record], Sequence[bytes]],
    held_out: tuple[Sequence[Record], Sequence[bytes]],
    pictures: Mapping[int, Pictures],
    metrics: Path | None,
    device: torch.device,
    counts: Counts,
) -> Exam:
    """Trains the probes on the pictures `shown` in training, and finds subjects among them to ask for in colors that were kept back.

    pictures: the held-out ones by side.
    """
    network = EfficientNetLite0.load(metrics, device)
    known, asked = eval_prompts(*shown), eval_prompts(*held_out)
    features = torch.cat((real_features(network, known), real_features(network, known, augmented=True)))
    references = real_features(network, asked)
    probes = Agreement.train(features, [*known, *known], references, asked)
    places = icons_of(shown[0], ICONS_PER_QUESTION * counts.questions)
    icons = decoded([shown[0][place] for place in places], [shown[1][place] for place in places], [ICON_SIDE])
    found = questions(Sprites(icons, device), style_templates(shown[0]), counts.questions, seed=0)
    if not found:
        raise SettingError("the shards have no subject of a single color that could be asked for in another one: give more of them")
    return Exam(found, asked, pictures, network, probes, references, Lpips.load(device), counts)


def icons_of(records: Sequence[Record], count: int, seed: int = 0) -> list[int]:
    """Places of some icons with held-out colors, in random order."""
    fitting = [
        place
        for place, record in enumerate(records)
        if record.style != PHOTO and record.subject and any(is_held(record.label, word) for word in WORDS)
    ]
    random.Random(seed).shuffle(fitting)
    return fitting[:count]


# --- sheets


def sheets(exam: Exam, edition: Edition, device: torch.device) -> dict[str, Image.Image]:
    """Uncurated images of the first seed: squares of the largest side, and mixed aspect ratios with the questions' subjects."""
    pipe, side = edition.load(device), max(exam.pictures)
    stride = pipe.tokenizer.pixels_per_token
    texts = [prompt.text for prompt in exam.prompts[:: max(1, len(exam.prompts) // SHEET)]][:SHEET]
    squares = [image for part in generate(pipe, texts, schedule_of(1.0, side, stride), edition) for image in to_pil(part)]
    mixed = []
    for number, template in enumerate(MIXED):
        asked = [question.text for question in exam.questions[number :: len(MIXED)]][: SHEET // len(MIXED)]
        for part in generate(pipe, asked, schedule_of(template, min(exam.pictures), stride), edition):
            mixed += to_pil(part)
    return {"squares": tiled(squares), "mixed": tiled(mixed)}


def tiled(images: Sequence[Image.Image], cell: int = SHEET_CELL, columns: int = SHEET_COLUMNS) -> Image.Image:
    """One sheet of images, each reduced to fit into a square cell."""
    sheet = Image.new("RGB", (columns * cell, math.ceil(len(images) / columns) * cell), "gray")
    for place, image in enumerate(images):
        reduced = ImageOps.contain(image, (cell - 4, cell - 4))
        sheet.paste(reduced, (place % columns * cell + (cell - reduced.width) // 2, place // columns * cell + (cell - reduced.height) // 2))
    return sheet
