"""How an output looks in a notebook: its images, the strip of its stages, and the report as a table."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import BytesIO

from PIL import Image

from .io import encode_image
from .report import Report, StageReport

MOST_IMAGES = 16
WIDEST, STRIP_WIDTH = 256, 96  # pixels on the page
STAGE_COLUMNS = ("stage", "cells", "tokens", "rows", "MACs", "ms")


def output_html(images: Sequence[Image.Image], strip: Sequence[Image.Image], report: Report) -> str:
    """`strip`: the first image after each stage; empty where stages were not kept."""
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
