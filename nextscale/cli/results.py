"""What `nextscale generate` says about the images it wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ..eval.results import version
from ..report import Report
from .console import result_console
from .files import Picture

DARKEST = 0.25  # where no stage computed anything
ENGINES = {"graphs": "CUDA graphs"}


@dataclass(frozen=True)
class Call:
    """Pictures that were generated together."""

    pictures: Sequence[Picture]
    report: Report


def darkened(images: Sequence[Image.Image], compute_mask: Sequence[Tensor]) -> list[Image.Image]:
    """The images, darker where less of the network ran; `compute_mask`: shares per stage, [B, h, w].

    A place's share is that of all stages, each with the weight of its cells, so that the late ones count most.
    """
    size = (images[0].height, images[0].width)
    cells = sum(share[0].numel() for share in compute_mask)
    resized = [share[0].numel() / cells * F.interpolate(share.cpu()[:, None], size, mode="nearest-exact")[:, 0] for share in compute_mask]
    light = DARKEST + (1 - DARKEST) * torch.stack(resized).sum(dim=0)  # [B, height, width]
    shaded = [np.rint(np.asarray(image) * place[..., None].numpy()) for image, place in zip(images, light, strict=True)]
    return [Image.fromarray(pixels.astype(np.uint8)) for pixels in shaded]


def report_json(settings: Mapping[str, Any], calls: Sequence[Call]) -> str:
    described = [
        {
            "files": [picture.file for picture in call.pictures],
            "prompts": [picture.prompt for picture in call.pictures],
            **call.report.to_dict(),
        }
        for call in calls
    ]
    content = {"nextscale": version(), "torch": torch.__version__, "settings": settings, "calls": described}
    text = json.dumps(content, indent=2, default=str, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace").decode()  # names of files may hold bytes that are not UTF-8


def show_results(calls: Sequence[Call]) -> None:
    console = result_console()
    console.print(picture_table(calls))
    reports = [call.report for call in calls]
    prompts, decoding = sum(report.condition_seconds for report in reports), sum(report.decode_seconds for report in reports)
    total = sum(report.seconds for report in reports)
    for reason in dict.fromkeys(report.selection_reason for report in reports if report.selection_reason is not None):
        console.print(escape(reason), soft_wrap=True)
    console.print(
        f"{total:.2f} s ({engines(reports)}): prompts {prompts:.2f}, stages {total - prompts - decoding:.2f}, decoding {decoding:.2f};"
        f" peak memory {max(report.peak_memory for report in reports) / 2**30:.2f} GiB"
    )


def engines(reports: Sequence[Report]) -> str:
    """The engines that ran, in order: "eager", "CUDA graphs" or "eager, then CUDA graphs"."""
    return ", then ".join(dict.fromkeys(ENGINES.get(report.engine, report.engine) for report in reports))


def picture_table(calls: Sequence[Call]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("file", overflow="fold")
    for heading in ("seed", "size", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("method", overflow="fold")
    padded = any(call.report.padding for call in calls)
    for heading in ("MACs", *(["padding"] if padded else [])):
        table.add_column(heading, justify="right")
    for call in calls:
        report = call.report
        shares = [f"{100 * share:.1f}%" for share in (report.cost_share, *([report.padding] if padded else []))]
        facts = [f"{report.size[0]}x{report.size[1]}", f"{report.seconds / len(call.pictures):.2f}", escape(report.method), *shares]
        for picture in call.pictures:
            table.add_row(escape(str(picture.file)), str(picture.seed), *facts)
    return table
