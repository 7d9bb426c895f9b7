"""Measures ScaleKV's drafters: the layers that lose most attention if they keep as little as the others.

The reference implementation ships roles without the way to find them; this measure is ours. At every stage whose cache would be
compressed, it takes the share of the window's attention, head by head, that keys outside the best ones receive.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from nextscale.cache import AttentionCall, CacheSpec, LayerCache, Workspace
from nextscale.cli.files import require_writable
from nextscale.cli.options import Batch, Force, ImageOptions, ModelOptions, PromptOptions, grouped, option, out_option
from nextscale.cli.parse import parse_prompt
from nextscale.cli.show import show_next
from nextscale.io import write_text
from nextscale.methods.method import Method, MethodRun, RunSetup
from nextscale.pipeline import Pipeline
from nextscale.stage import Schedule

from ..program import app
from .scalekv import LAYERS_PER_DRAFTER, ScaleKV, window_places


class Roles(NamedTuple):
    """The share of attention that every layer loses, and the layers that lose most."""

    lost: tuple[float, ...]
    drafters: tuple[int, ...]


@dataclass(frozen=True)
class AttentionLost(Method):
    """Dense generation that measures how much attention the keys beyond a number of best ones hold."""

    capacity: int
    window: int = 16
    seen: list[tuple[int, float]] = field(default_factory=list, compare=False)  # layer and share, stage by stage

    exclusive = frozenset({"cache"})
    capturable = False  # a captured graph would measure nothing

    def start(self, setup: RunSetup) -> MethodRun:
        return AttentionLostRun(self)


@dataclass
class AttentionLostRun(MethodRun):
    method: AttentionLost
    layers: int = 0

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        self.layers += 1
        return MeasuringCache(spec, workspace, self.method, self.layers - 1)


class MeasuringCache(LayerCache):
    def __init__(self, spec: CacheSpec, workspace: Workspace, method: AttentionLost, layer: int) -> None:
        super().__init__(spec, workspace)
        self.method, self.layer = method, layer

    def attend(self, seen: AttentionCall) -> Tensor:
        out = super().attend(seen)
        if seen.view.end > self.method.capacity and seen.tokens.stage.index != self.spec.final:  # nothing is kept for a stage after that
            self.method.seen.append((self.layer, lost_attention(seen, self.method.capacity, self.method.window)))
        return out


def lost_attention(seen: AttentionCall, capacity: int, window: int) -> float:
    """Returns the share of the window's attention outside the `capacity` keys that receive most of it, mean over rows and heads."""
    places = window_places(seen.tokens, seen.q.shape[:2], min(window, seen.q.shape[1]), seen.q.device)
    asking = seen.q.gather(1, places[..., None, None].expand(-1, -1, *seen.q.shape[2:])).transpose(1, 2)
    keys = seen.view.keys.narrow(1, 0, seen.view.end).permute(0, 2, 3, 1)
    received = ((asking @ keys.to(asking.dtype)).float() * seen.scale).softmax(dim=-1).mean(dim=2)  # [R, H, T]
    return 1 - float(received.topk(capacity, dim=-1).values.sum(dim=-1).mean())


def measure_roles(pipe: Pipeline, prompts: Sequence[Any], schedule: Schedule, method: ScaleKV, seed: int = 0, batch: int = 4) -> Roles:
    """Returns the drafters of a model at the share that `method` keeps, by the attention that its layers would lose."""
    layers = len(pipe.model.blocks)
    held = pipe.model.text_prefix + schedule.tokens - schedule[-1].cells
    watching = AttentionLost(max(method.window, round(method.share * held)), method.window)
    for start in range(0, len(prompts), batch):
        pipe(list(prompts[start : start + batch]), seed=seed + start, size=schedule, method=watching)
    sums = torch.zeros(layers, dtype=torch.float64)
    for layer, share in watching.seen:
        sums[layer] += share
    lost = sums / max(1, len(watching.seen) // layers)
    number = max(1, int(layers / LAYERS_PER_DRAFTER))
    return Roles(tuple(lost.tolist()), tuple(sorted(lost.topk(number).indices.tolist())))


@app.command("calibrate-scalekv")
@grouped
def calibrate_scalekv(
    *,
    prompts: PromptOptions,
    model: ModelOptions,
    image: ImageOptions,
    batch: Batch = 4,
    share: Annotated[float, option("--share", "SHARE", "Mean share of the keys that layers keep.", min=0.001, max=1)] = 0.1,
    out: Annotated[Path | None, out_option("FILE", "The .json file to write.", "none")] = None,
    force: Force = False,
) -> None:
    """Find the layers that keep most keys with ScaleKV, on a few dozen generated images."""
    spec, schedule = model.spec, image.schedule(model.spec)
    given = [parse_prompt(text, spec) for text in prompts.read() for _ in range(image.num_images)]
    require_writable([out] if out else [], force)
    roles = measure_roles(model.load(), given, schedule, ScaleKV(share=share), image.seed, batch)
    for layer, lost in enumerate(roles.lost):
        typer.echo(f"layer {layer:3d}  loses {100 * lost:5.1f} % of its attention{'  drafter' if layer in roles.drafters else ''}")
    if out:
        about = {"model": spec.name, "images": len(given), "seed": image.seed, "share": share}
        write_text(json.dumps(about | {"drafters": roles.drafters, "lost": roles.lost}) + "\n", out)
    show_next(f"nextscale compare -m {model.model} --method 'scalekv:drafters={list(roles.drafters)},share={share:g}'")
