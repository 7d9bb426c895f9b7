"""All observations of one model: images are generated once under a probe, then again with other prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.eval.calibrate_ranks import RankWatcher
from nextscale.eval.probe import FeatureProbe
from nextscale.metrics import Lpips
from nextscale.pipeline import Output, Pipeline
from nextscale.stage import Schedule

from . import blocks, frequency, prompt, ranks
from .numbers import Observations
from .pictures import image_tile, map_tile, sheet

MOST_EXAMPLES = 4
REPLACED: dict[prompt.Replacement, str] = {"none": "no prompt", "other": "another prompt", "seed": "another seed"}  # on the sheet


@dataclass(frozen=True)
class Sample:
    """The images to generate: one prompt and one seed each."""

    prompts: list[Any]
    seeds: list[int]

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) != len(self.seeds):
            raise SettingError(f"{len(self.prompts)} prompts and {len(self.seeds)} seeds: give one of each per image, at least one")

    @classmethod
    def of(cls, prompts: Sequence[Any], images: int | None, seed: int) -> Sample:
        """Cycles through the prompts for `images` images; None: one per prompt."""
        number = len(prompts) if images is None else images
        return cls([prompts[index % len(prompts)] for index in range(number)], list(range(seed, seed + number)))


@dataclass(frozen=True)
class Examples:
    """Sheets with the first images."""

    stages: Image.Image  # every image after each stage, and below it how much each stage changed it where
    blocks: Image.Image  # the final image, then where each block changed its tokens at the last stage
    prompts: Image.Image  # per replacement: the image as it was, then with the replacement from each switch on


@dataclass
class Tiles:
    """Rows of the sheets, with their names."""

    stages: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    blocks: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    prompts: dict[tuple[int, prompt.Replacement], list[Tensor]] = field(default_factory=dict)  # (image, replacement)


@dataclass
class Found:
    """Results of the requests so far."""

    changes: list[frequency.Changes] = field(default_factory=list)
    relations: list[dict[str, Tensor]] = field(default_factory=list)
    ranks: list[Tensor] = field(default_factory=list)
    moves: list[prompt.Moves] = field(default_factory=list)
    tiles: Tiles = field(default_factory=Tiles)


@torch.inference_mode()
def observe(
    pipeline: Pipeline,
    sample: Sample,
    schedule: Schedule,
    *,
    batch: int = 16,
    switches: int = 4,
    lpips: Lpips | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> tuple[Observations, Examples]:
    """Measures the papers' observations.

    batch: images per request. switches: at how many stages prompts are replaced; each costs as much as generating all images three times.
    lpips: measures distances of images that are large enough for it. on_progress: called with the share that is done.
    Requests under the probe or with codes of earlier stages run eagerly; those that replace everything can be captured.
    """
    others = prompt.other_prompts(sample.prompts)
    switched = prompt.spread_switches(len(schedule), switches)
    again = [(kind, switch) for kind in prompt.replacements(pipeline, schedule, others is not None) for switch in switched]
    layers = ranks.spread_layers(len(pipeline.model.blocks))
    found = Found()
    total, done = math.ceil(len(sample.seeds) / batch) * (1 + len(again)), 0
    for start in range(0, len(sample.seeds), batch):
        part = slice(start, start + batch)
        first = generate_probed(pipeline, sample.prompts[part], sample.seeds[part], schedule, layers, start, found)
        done += 1
        on_progress(done / total)
        moves: prompt.Moves = {}
        for kind, switch in again:
            output = prompt.generate_again(pipeline, first, others[part] if others else None, kind, switch, schedule)
            moves.setdefault(kind, []).append(prompt.moved(first.output, output, switch, lpips))
            add_prompt_tiles(found.tiles, first.output, output, kind, start)
            done += 1
            on_progress(done / total)
        found.moves.append(moves)
    observations = Observations(
        about(first.output, sample, batch, lpips),
        [list(stage.size) for stage in schedule],
        frequency.summary(found.changes),
        blocks.summary(found.relations),
        prompt.summary(found.moves, switched),
        ranks.summary(found.ranks, layers, schedule, pipeline.model.block_config.dim),
    )
    return observations, examples(found.tiles, schedule, switched, len(pipeline.model.blocks))


def examples(tiles: Tiles, schedule: Schedule, switched: Sequence[int], blocks: int) -> Examples:
    names = [f"{stage.height}x{stage.width}" for stage in schedule]
    replaced = [(REPLACED[kind], tiles.prompts[index, kind]) for index, kind in sorted(tiles.prompts)]
    return Examples(
        sheet(tiles.stages, names),
        sheet(tiles.blocks, ["image", *(f"block {block}" for block in range(blocks))]),
        sheet(replaced, ["as it was", *(f"from {names[switch]} on" for switch in switched)]),
    )


def generate_probed(
    pipeline: Pipeline, prompts: list[Any], seeds: list[int], schedule: Schedule, layers: Sequence[int], start: int, found: Found
) -> prompt.Baseline:
    """Images under the probe, `start` others having been generated before."""
    acting = blocks.BlockWatcher(len(seeds))
    ranked = RankWatcher(layers, ranks.ALPHAS, first_of(ranks.MOST_IMAGES, start, len(seeds)), centered=True)
    latents: list[Tensor] = []
    output = pipeline(
        prompts,
        seed=seeds,
        size=schedule,
        method=FeatureProbe((acting.watch, ranked.watch)),
        on_stage=lambda preview: latents.append(preview.latent),
    )
    shown: list[list[Tensor]] = [[] for _ in range(first_of(MOST_EXAMPLES, start, len(seeds)))]
    changes, maps = frequency.stage_changes(decoded(pipeline, latents, shown), output.pixels, schedule.grid)
    found.relations.append(blocks.block_relations(acting, schedule, output.pixels, maps))
    found.changes.append(changes)
    if ranked.rows:
        found.ranks.append(ranks_of(ranked, schedule))
    add_tiles(found.tiles, shown, maps, acting, schedule, output)
    return prompt.Baseline(prompts, seeds, output)


def first_of(most: int, start: int, images: int) -> int:
    """Counts the images of a request that are among the first `most` of all."""
    return max(0, min(most - start, images))


def decoded(pipeline: Pipeline, latents: Sequence[Tensor], shown: list[list[Tensor]]) -> Iterator[Tensor]:
    """The images after each stage, one stage at a time; tiles of the first ones go to `shown`."""
    for latent in latents:
        images = pipeline.tokenizer.decode(latent)
        for index, row in enumerate(shown):
            row.append(image_tile(images[index]))
        yield images


def add_tiles(
    tiles: Tiles, shown: list[list[Tensor]], maps: Sequence[Tensor], watched: blocks.BlockWatcher, schedule: Schedule, first: Output
) -> None:
    for index, row in enumerate(shown):
        size = row[-1].shape[1], row[-1].shape[2]
        tiles.stages += [("after stage", row), ("its change", [map_tile(change[index], schedule.grid, size) for change in maps])]
        acting = [block.change[index] for (stage, _), block in sorted(watched.maps.items()) if stage == len(schedule) - 1]
        tiles.blocks.append(("change", [image_tile(first.pixels[index]), *(map_tile(change, schedule.grid, size) for change in acting)]))


def add_prompt_tiles(tiles: Tiles, first: Output, again: Output, kind: prompt.Replacement, start: int) -> None:
    if kind in REPLACED:
        for index in range(first_of(MOST_EXAMPLES, start, len(first.pixels))):
            row = tiles.prompts.setdefault((start + index, kind), [image_tile(first.pixels[index])])
            row.append(image_tile(again.pixels[index]))


def about(first: Output, sample: Sample, batch: int, lpips: Lpips | None) -> dict[str, Any]:
    report = first.report
    return {
        "model": report.model,
        "device": report.device,
        "dtype": report.dtype,
        "torch": torch.__version__,
        "size": list(report.size),
        "images": len(sample.seeds),
        "prompts": len({str(given) for given in sample.prompts}),
        "seed": sample.seeds[0],
        "batch": batch,
        "lpips": lpips is not None,
    }


def ranks_of(watcher: RankWatcher, schedule: Schedule) -> Tensor:
    """Returns the ranks of all requests, [alphas, blocks, rows, stages]."""
    by_layer = [
        torch.stack([torch.cat(watcher.found[stage.index, layer], dim=1) for stage in schedule], dim=-1) for layer in watcher.layers
    ]
    return torch.stack(by_layer, dim=1)
