"""Further observations of a few images: distances to the final image, spectra, attention, logits, changes over stages, projections.

`python -m nextscale_research observe --details`. Each measures a figure of the papers, and keeps its numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from nextscale.eval.probe import FeatureProbe
from nextscale.methods.method import Method
from nextscale.methods.sparsevar_cells import GridMap, neighbor_similarity
from nextscale.output import Preview
from nextscale.pipeline import Output, Pipeline
from nextscale.request import Randomness
from nextscale.sampling import ImageRng, method_rng
from nextscale.stage import Schedule

from .attention import AttentionWatcher, CalledAttention
from .blocks import BlockWatcher
from .detail import LEVELS, local_detail, luminance, rank_correlation
from .distances import Distance, TextScore, boundary, stage_distances, text_scores
from .frequency import EDGES, band_power
from .measure import Sample
from .numbers import Curve, Numbers, plain
from .pictures import image_tile, map_tile, sheet

SHOWN_STAGES = 4  # the last ones, on the sheet of changes
PROJECTION_STEP = 7_000_003  # from one projection's seed to the next


@dataclass(frozen=True)
class Projection:
    """StageVAR with several random projections, everything else equal."""

    seeds: int
    to_dense: dict[str, Curve]  # by measure, one entry per projection: distance to the dense image
    between: dict[str, float]  # by measure, mean distance of two projections of one image
    deviation: float  # of a pixel over the projections, mean over the image, in levels of 255


@dataclass(frozen=True)
class Details:
    """All numbers of one `python -m nextscale_research observe --details`."""

    about: dict[str, Any]
    stages: list[list[int]]
    distances: dict[str, Curve]  # by measure, of the image after each stage to the final one
    boundaries: dict[str, int | None]  # by measure, the first stage that leaves at most a tenth of the first distance
    edges: list[float]  # between the bands, cycles per pixel
    stage_power: list[Numbers]  # [stage][band], power of the image after the stage, of the final image's
    method_power: dict[str, Numbers]  # by method, [band], power of its images, of the dense ones'
    attention: list[Numbers]  # [stage][stage], share of a stage's attention that goes to each stage's tokens; the first image
    attention_near: list[Numbers]  # [stage][stage], share of the attention to a stage that goes to the cells around the same place
    attention_chance: list[Numbers]  # the same of attention that is spread evenly
    text_score: Curve | None  # by stage, cosine of CLIP's features of image and prompt; None without its weights
    similarity: Curve  # of a cell's logits to those around it, mean over the cells
    similarity_detail: Curve  # rank correlation of that with the detail of the final image
    change_stability: list[Curve]  # by block, rank correlation of its change map with the resized map of the stage before
    projection: Projection | None  # None where StageVAR projects nothing


@dataclass(frozen=True)
class Pictures:
    """Sheets of the first image."""

    attention: Image.Image
    similarity: Image.Image
    changes: Image.Image
    projections: Image.Image | None


def to_json(found: Details) -> str:
    return json.dumps(asdict(found), ensure_ascii=False, allow_nan=False) + "\n"


@dataclass
class Watched:
    """One request under all probes."""

    output: Output
    images: list[Tensor]  # per stage, [B, 3, H, W]
    similarity: list[Tensor]  # per stage, [B, cells]
    attention: AttentionWatcher
    blocks: BlockWatcher


@torch.inference_mode()
def observe_details(
    pipeline: Pipeline,
    sample: Sample,
    schedule: Schedule,
    distances: Mapping[str, Distance],
    methods: Mapping[str, Method],
    *,
    projected: Method,
    projections: int = 4,
    text_score: TextScore | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> tuple[Details, Pictures]:
    """All images in one request: give a few.

    text_score: likeness of images and prompts, measured after every stage. methods: those whose spectra are compared with dense
        generation. projected: a StageVAR, generated with `projections` random projections.
    """
    total, done = 1 + len(methods) + projections, 0

    def advance() -> None:
        nonlocal done
        done += 1
        on_progress(done / total)

    watched = watch(pipeline, sample, schedule)
    advance()
    final = watched.output.pixels
    powers = {}
    for name, method in methods.items():
        output = pipeline(sample.prompts, seed=sample.seeds, size=schedule, method=method)
        powers[name] = spectrum(output.pixels)
        advance()
    variants = []
    for number in range(projections if has_low_rank(projected, pipeline, schedule) else 0):
        variants.append(reprojected(pipeline, sample, schedule, projected, number))
        advance()
    curves = {name: Curve.of(values) for name, values in stage_distances(watched.images, final, distances).items()}
    dense_power = spectrum(final)
    similarity, related = similarity_curves(watched, schedule, final)
    attention = watched.attention
    shares, near, chance = (
        [plain(row) for row in matrix] for matrix in (attention.share_matrix(), attention.near_matrix(), attention.chance_matrix())
    )
    found = Details(
        {"model": pipeline.name, "images": len(sample.seeds), "seed": sample.seeds[0], "size": list(watched.output.report.size)}
        | {"device": watched.output.report.device, "dtype": watched.output.report.dtype, "torch": torch.__version__},
        [list(stage.size) for stage in schedule],
        curves,
        {name: boundary(curve) for name, curve in curves.items()},
        list(EDGES),
        [plain(spectrum(image) / dense_power) for image in watched.images],
        {name: plain(power / dense_power) for name, power in powers.items()},
        shares,
        near,
        chance,
        None if text_score is None else Curve.of(text_scores(watched.images, sample.prompts, text_score)),
        similarity,
        related,
        change_stability(watched.blocks, schedule, len(pipeline.model.blocks)),
        projection_numbers(final, variants, distances) if variants else None,
    )
    return found, pictures(watched, variants, schedule, len(pipeline.model.blocks))


def watch(pipeline: Pipeline, sample: Sample, schedule: Schedule) -> Watched:
    calls = CalledAttention()
    attention, blocks = AttentionWatcher(calls, schedule), BlockWatcher(len(sample.seeds))
    latents: list[Tensor] = []
    similarity: list[Tensor] = []

    def stage_done(preview: Preview) -> None:
        latents.append(preview.latent)
        logits = preview.done.logits
        assert logits is not None  # the probe is eager and leaves nothing out
        similarity.append(neighbor_similarity(logits.flatten(2).float(), preview.done.stage.size))

    method = FeatureProbe((attention.watch, blocks.watch))
    with calls:
        output = pipeline(sample.prompts, seed=sample.seeds, size=schedule, method=method, on_stage=stage_done)
    images = [pipeline.tokenizer.decode(latent) for latent in latents]
    return Watched(output, images, similarity, attention, blocks)


def spectrum(pixels: Tensor) -> Tensor:
    """Mean power of images by band, without their mean brightness, [bands]."""
    gray = luminance(pixels)
    return band_power(gray - gray.mean(dim=(1, 2), keepdim=True)).mean(dim=0).cpu()


def similarity_curves(watched: Watched, schedule: Schedule, final: Tensor) -> tuple[Curve, Curve]:
    alone = [stage.cells == 1 for stage in schedule]  # a single cell has no neighbors
    means = torch.stack([similar.mean(dim=1) for similar in watched.similarity], dim=1)
    means[:, alone] = torch.nan
    pairs = zip(watched.similarity, schedule, strict=True)
    related = [rank_correlation(similar, local_detail(final, stage.size)) for similar, stage in pairs]
    return Curve.of(means), Curve.of(torch.stack(related, dim=1))


def change_stability(watched: BlockWatcher, schedule: Schedule, blocks: int) -> list[Curve]:
    """Correlates the places that a block changes at a stage with the stage before, which SparseVAR and group-wise methods rely on."""
    curves = []
    for block in range(blocks):
        maps = [watched.maps[stage.index, block].change for stage in schedule]
        related = [torch.full((len(maps[0]),), torch.nan, dtype=torch.double, device=maps[0].device)]
        for stage in schedule.stages[1:]:
            before = GridMap(maps[stage.index - 1][..., None], schedule[stage.index - 1].size).at(stage.size)[..., 0]
            related.append(rank_correlation(before, maps[stage.index]))
        curves.append(Curve.of(torch.stack(related, dim=1)))
    return curves


# --- random projections


def has_low_rank(method: Method, pipeline: Pipeline, schedule: Schedule) -> bool:
    return any(plan.spans for plan in method.forecast(pipeline.model, schedule))


def reprojected(pipeline: Pipeline, sample: Sample, schedule: Schedule, method: Method, number: int) -> Output:
    """The images with the same noise, and the projection of another seed."""
    device, seeds = pipeline.model.device, sample.seeds
    others = [seed + number * PROJECTION_STEP for seed in seeds]
    randomness = Randomness(ImageRng(seeds, device), method_rng(others, device), tuple(seeds))
    return pipeline(sample.prompts, seed=randomness, size=schedule, method=method)


def projection_numbers(dense: Tensor, variants: Sequence[Output], distances: Mapping[str, Distance]) -> Projection:
    final, images = dense.clamp(-1, 1), [output.pixels.clamp(-1, 1) for output in variants]
    pairs = [(a, b) for number, a in enumerate(images) for b in images[:number]]
    to_dense = {name: Curve.of(torch.stack([measure(image, final) for image in images], dim=1)) for name, measure in distances.items()}
    between = {name: float(torch.stack([measure(a, b).mean() for a, b in pairs]).mean()) for name, measure in distances.items()}
    deviation = float(torch.stack(images).float().std(dim=0).mean() * LEVELS)
    return Projection(len(images), to_dense, between, deviation)


# --- sheets


def pictures(watched: Watched, variants: Sequence[Output], schedule: Schedule, blocks: int) -> Pictures:
    names = [f"{stage.height}x{stage.width}" for stage in schedule]
    final = image_tile(watched.output.pixels[0])
    size = final.shape[1], final.shape[2]
    after = [image_tile(image[0]) for image in watched.images]
    attended = [map_tile(values, stage.size, size) for values, stage in zip(watched.attention.received_maps(), schedule, strict=True)]
    unlike = [
        map_tile((1 - similar[0]).clamp(min=0), stage.size, size) for similar, stage in zip(watched.similarity, schedule, strict=True)
    ]
    late = schedule.stages[-SHOWN_STAGES:]
    changes = [
        (
            f"stage {names[stage.index]}",
            [final, *(map_tile(watched.blocks.maps[stage.index, block].change[0], stage.size, size) for block in range(blocks))],
        )
        for stage in late
    ]
    reprojections = None
    if variants:
        spread = torch.stack([output.pixels[0].float() for output in variants]).std(dim=0).mean(dim=0)
        row = [
            final,
            *(image_tile(output.pixels[0]) for output in variants),
            map_tile(spread.flatten(), (spread.shape[0], spread.shape[1]), size),
        ]
        reprojections = sheet([("first image", row)], ["dense", *(f"projection {number}" for number in range(len(variants))), "spread"])
    return Pictures(
        sheet([("after stage", after), ("attention received", attended)], names),
        sheet([("after stage", after), ("unlike its neighbors", unlike)], names),
        sheet(changes, ["image", *(f"block {block}" for block in range(blocks))]),
        reprojections,
    )
