"""Results of a call, previews of its stages, and their view in a notebook."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from io import BytesIO

import torch
from PIL import Image
from torch import Tensor

from .canvas import Canvas
from .edit import Paste
from .generate import StageOutput
from .io import encode_image, to_pil
from .report import Report, StageReport
from .tokenizers.base import Tokenizer


@dataclass(frozen=True, eq=False)
class Stages:
    """The latents after each stage, decoded on demand."""

    latents: tuple[Tensor, ...]
    tokenizer: Tokenizer
    paste: Paste | None = None

    def __len__(self) -> int:
        return len(self.latents)

    @torch.inference_mode()
    def images(self, stage: int) -> list[Image.Image]:
        """Returns the images of the batch as if generation had stopped after this stage. FlexVAR's grow with the stage."""
        return to_pil(self.pixels(stage))

    @torch.inference_mode()
    def pixels(self, stage: int) -> Tensor:
        """Returns the same images as pixels [B, 3, H, W] in [-1, 1]."""
        return decoded(self.tokenizer, self.latents[stage], self.paste)

    @torch.inference_mode()
    def strip(self, image: int = 0) -> list[Image.Image]:
        """Returns one image of the batch after every stage."""
        return [to_pil(decoded(self.tokenizer, latent, self.paste, [image]))[0] for latent in self.latents]


@dataclass(frozen=True, eq=False)
class Output:
    """The result of a call. Notebooks display it."""

    pixels: Tensor  # [B, 3, H, W], the decoder's output, nominally in [-1, 1]
    latent: Tensor  # the decoder's input
    codes: tuple[Tensor, ...]  # per stage that ran, as put on the canvas
    report: Report
    compute_mask: tuple[Tensor, ...] | None = None  # per stage, with compute_mask=True: share of the network run per cell, [B, h, w]

    stages: Stages | None = None  # with keep_stages=True

    def __repr__(self) -> str:
        return f"Output({len(self.latent)} {'image' if len(self.latent) == 1 else 'images'}, {self.report.summary})"

    @cached_property
    def images(self) -> list[Image.Image]:
        """PIL images, made on first use."""
        return to_pil(self.pixels)

    def _repr_html_(self) -> str:
        return output_html(self.images, self.stages.strip() if self.stages else [], self.report)


@dataclass(frozen=True, eq=False)
class Preview:
    """State after a stage, for `on_stage`."""

    done: StageOutput  # without logits if a captured graph was replayed; the next request overwrites its tensors
    latent: Tensor  # a copy of the canvas after this stage
    tokenizer: Tokenizer
    paste: Paste | None = None  # of an edit

    @property
    def canvas(self) -> Canvas:
        """The canvas of the request, which later stages change."""
        return self.done.canvas

    @torch.inference_mode()
    def images(self, rows: Sequence[int] | None = None) -> list[Image.Image]:
        """Returns the images, or some of them, as if generation stopped here. FlexVAR's grow with the stage."""
        return to_pil(decoded(self.tokenizer, self.latent, self.paste, rows))


def decoded(tokenizer: Tokenizer, latent: Tensor, paste: Paste | None, rows: Sequence[int] | None = None) -> Tensor:
    """Returns the pixels of a latent, or of some of its images, pasted into those that were edited."""
    pixels = tokenizer.decode(latent if rows is None else latent[list(rows)])
    return pixels if paste is None else paste(pixels, rows)


def mask_of(done: StageOutput, batch: int) -> Tensor:
    if done.compute_mask is not None:
        return done.compute_mask.view(batch, *done.stage.size).float().clone()
    return torch.full((batch, *done.stage.size), 0.0 if done.skipped else 1.0, device=done.canvas.latent.device)


# --- notebooks

MOST_IMAGES = 16
WIDEST, STRIP_WIDTH = 256, 96  # pixels on the page
STAGE_COLUMNS = ("stage", "cells", "tokens", "rows", "MACs", "ms")


def output_html(images: Sequence[Image.Image], strip: Sequence[Image.Image], report: Report) -> str:
    """Returns HTML for a notebook. `strip`: the first image after each stage; empty if stages were not kept."""
    more = f"<p>and {len(images) - MOST_IMAGES} more</p>" if len(images) > MOST_IMAGES else ""
    seeds = report.seeds or (None,) * len(images)
    titled = [image_tag(image, WIDEST, "" if seed is None else f"seed {seed}") for image, seed in zip(images, seeds, strict=True)]
    stages = [image_tag(image, STRIP_WIDTH, f"stage {index}") for index, image in enumerate(strip)]
    strip_row = f"<div>{''.join(stages)}</div>" if stages else ""
    return f"<div><div>{''.join(titled[:MOST_IMAGES])}</div>{more}{strip_row}{report_html(report)}</div>"


def image_tag(image: Image.Image, width: int, title: str) -> str:
    content = BytesIO()
    encode_image(image, content, ".png")
    source = b64encode(content.getvalue()).decode("ascii")
    return f'<img src="data:image/png;base64,{source}" width="{min(width, image.width)}" title="{escape(title)}" style="margin:2px"/>'


def report_html(report: Report) -> str:
    height, width = report.size
    head = (
        f"<b>{escape(report.model)}</b>, {escape(report.method)}: {width}x{height} pixels in {report.seconds:.2f} s, "
        f"{report.cost_share:.0%} of the MACs of dense generation; {escape(report.device)}, {report.dtype}, {report.engine}, "
        f"peak memory {report.peak_memory / 2**30:.2f} GiB"
    )
    columns = "".join(f"<th>{name}</th>" for name in STAGE_COLUMNS)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in stage_cells(stage))}</tr>" for stage in report.stages)
    return f"<p>{head}</p><table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>"


def stage_cells(stage: StageReport) -> tuple[str, ...]:
    grid = f"{stage.width}x{stage.height}"
    if stage.skipped:
        return str(stage.index), grid, "skipped", "0", f"{stage.cost_share:.0%}", f"{1000 * stage.seconds:.1f}"
    return str(stage.index), grid, f"{stage.computed:.0f}", str(stage.rows), f"{stage.cost_share:.0%}", f"{1000 * stage.seconds:.1f}"
