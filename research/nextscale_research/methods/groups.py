"""Joins outputs, reports and previews of groups of a batch that were generated separately."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

Group = tuple[Sequence[int], Any]
"""Images of a batch, and the output of the call that went on with them."""

MADE = ("ids", "codes", "residual", "compute_mask")  # results of a stage in addition to the canvas


def overlaid(whole: Tensor, groups: Sequence[tuple[Sequence[int], Tensor | None]]) -> Tensor:
    """Returns `whole` [B, ...] with the rows of these images replaced by theirs."""
    whole = whole.clone()
    for images, values in groups:
        if values is not None:
            whole[list(images)] = values
    return whole


def joined(groups: Sequence[tuple[Sequence[int], Tensor | None]], batch: int) -> Tensor | None:
    """Returns one tensor [B, ...], zero for images that have none; None if no group has one."""
    value = next((values for _, values in groups if values is not None), None)
    return None if value is None else overlaid(value.new_zeros(batch, *value.shape[1:]), groups)


def revise_only(revise: Callable[..., Any], images: Sequence[int], batch: int) -> Callable[..., Any]:
    """Returns `revise` for some images. It sees codes of the whole batch, zeros for the other images."""

    def own(stage: Any, codes: Tensor) -> Any:
        changed = revise(stage, joined([(images, codes)], batch))
        fits = isinstance(changed, Tensor) and changed.shape[:1] == (batch,)
        return changed[list(images)] if fits else changed  # other shapes are refused where codes are checked

    return own


def codes_by_stage(output: Any) -> list[Tensor | None]:
    """Returns the codes of every stage, None for skipped stages."""
    codes = iter(output.codes)
    return [None if stage.skipped else next(codes) for stage in output.report.stages]


def unread_codes(model: Any, cells: int, batch: int) -> Tensor:
    """Returns codes for a skipped stage, which nothing reads."""
    return torch.zeros(batch, cells, *model.logit_shape[:-1], dtype=torch.int64, device=model.device)


def join_outputs(first: Any, stages: int, groups: Sequence[Group], stopped: tuple[Sequence[int], Tensor | None]) -> Any:
    """Returns one output. All images ran the first `stages` stages in `first`, and groups of them went on from there.

    stopped: the other images, and their pixels if they are decoded.
    """
    batch, images = len(first.latent), [images for images, _ in groups]

    def own(of_output: Callable[[Any], Sequence[Tensor]]) -> tuple[Tensor, ...]:
        shown = [of_output(output) for _, output in groups]
        whole = of_output(first)
        later = (
            overlaid(whole[stage], list(zip(images, [one[stage] for one in shown], strict=True))) for stage in range(stages, len(whole))
        )
        return (*whole[:stages], *later)

    codes, every = codes_by_stage(first), [codes_by_stage(output) for _, output in groups]
    codes[stages:] = [joined(list(zip(images, of_stage, strict=True)), batch) for of_stage in list(zip(*every, strict=True))[stages:]]
    pixels = joined([stopped, *((images, output.pixels) for images, output in groups)], batch)
    pixels = first.pixels if pixels is None else pixels
    report = join_reports(first.report, stages, [output.report for _, output in groups], batch)
    return replace(
        first,
        pixels=pixels,
        latent=overlaid(first.latent, [(images, output.latent) for images, output in groups]),
        codes=tuple(one for one in codes if one is not None),
        report=replace(report, size=(pixels.shape[2], pixels.shape[3])),
        compute_mask=None if first.compute_mask is None else own(lambda output: output.compute_mask),
        stages=None if first.stages is None else replace(first.stages, latents=own(lambda output: output.stages.latents)),
    )


def join_reports(first: Any, stages: int, others: Sequence[Any], batch: int) -> Any:
    """Returns the report of `first` and of the calls that went on after its first `stages` stages, which they have read."""
    every = (first, *others)
    joint = [join_stages(mine, [other.stages[mine.index] for other in others], mine.index < stages, batch) for mine in first.stages]
    return replace(
        first,
        stages=tuple(joint),
        cost_share=sum(stage.cost_share * stage.dense_macs for stage in joint) / sum(stage.dense_macs for stage in joint),
        engine=first.engine if all(one.engine == first.engine for one in others) else "eager",
        **{name: sum(getattr(one, name) for one in every) for name in ("condition_seconds", "decode_seconds")},
        **{name: max(getattr(one, name) for one in every) for name in ("peak_memory", "planned_memory")},
    )


def join_stages(first: Any, others: Sequence[Any], read: bool, batch: int) -> Any:
    """Returns the report of one stage. read: the other calls only read its codes."""
    every = (first, *others)
    spent = sum(stage.cost_share * stage.dense_macs for stage in every)
    changes: dict[str, Any] = {"seconds": sum(stage.seconds for stage in every), "cost_share": spent / first.dense_macs}
    ran = [stage for stage in others if not stage.skipped]
    if ran and not read:
        rows = sum(stage.rows for stage in ran)
        changes |= {"rows": rows, "skipped": False, "cfg_branches": rows // batch}
        changes |= {name: sum(stage.rows * getattr(stage, name) for stage in ran) / rows for name in ("tokens", "computed", "padding")}
        for name in ("sampling_seconds", "residual_seconds"):
            changes[name] = sum_known([getattr(stage, name) for stage in ran])
    return replace(first, **changes)


def sum_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


class JoinedStages:
    """Shows each stage once with all images: stages of a group are held until the last group has run them."""

    def __init__(self, on_stage: Callable[[Any], None], later: Sequence[Any]) -> None:
        """later: previews of the first call, of the stages that groups run apart."""
        self._on_stage = on_stage
        self._shown = {preview.done.stage.index: (preview, list[tuple[Sequence[int], Any]]()) for preview in later}

    def hold(self, images: Sequence[int], last: bool) -> Callable[[Any], None]:
        """Returns the `on_stage` of a group's call. last: it is the last group."""

        def take(preview: Any) -> None:
            if preview.done.stage.index in self._shown:
                first, groups = self._shown[preview.done.stage.index]
                if len(images) == len(first.latent):
                    self._on_stage(preview)
                    return
                made = {name: getattr(preview.done, name) for name in MADE}
                copies = {name: None if value is None else value.clone() for name, value in made.items()}
                groups.append((images, replace(preview, done=replace(preview.done.without_logits(), **copies))))
                if last:
                    self._on_stage(joined_preview(first, groups))

        return take

    def show(self) -> None:
        """Shows all stages, which no group has run."""
        for preview, _ in self._shown.values():
            self._on_stage(preview)


def joined_preview(first: Any, groups: Sequence[tuple[Sequence[int], Any]]) -> Any:
    batch, canvas = first.latent.shape[0], copy.copy(first.canvas)
    canvas.latent = latent = overlaid(first.latent, [(images, preview.latent) for images, preview in groups])
    ran = [preview.done for _, preview in groups if not preview.done.skipped]
    made = {name: joined([(images, getattr(preview.done, name)) for images, preview in groups], batch) for name in MADE}
    done = replace(ran[0] if ran else first.done, canvas=canvas, rows=sum(one.rows for one in ran), known_counts=None, **made)
    return replace(first, done=done, latent=latent)
