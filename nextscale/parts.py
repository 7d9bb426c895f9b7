"""Images of a batch that are routed apart: what a group of them needs, and one batch again of what the groups have done."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .canvas import Canvas
from .methods.method import MethodRun
from .models.context import ForwardContext
from .request import Request, Revise, as_sampled
from .sampling import ImageRng, Rng
from .stage import Stage


@dataclass(frozen=True)
class Part:
    """A request, or some of its images, in the middle of its stages."""

    request: Request
    canvas: Canvas
    run: MethodRun
    ctx: ForwardContext
    images: tuple[int, ...] | None = None  # of the whole batch; None: all

    def routed(self, stage: Stage) -> list[Part]:
        """What goes on apart from this stage on."""
        inputs = self.run.routing_inputs(stage, self.canvas)
        if inputs is None:
            return [self]
        groups, routes = grouped(self.run.route(inputs.cpu())), self.run.routes()
        if len(groups) == 1:
            return [replace(self, run=routes[route]) for route in groups]
        method_rngs = [own_rng(self.request.method_rng, images) for images in groups.values()]
        index = [torch.tensor(images, device=self.canvas.latent.device) for images in groups.values()]
        envs = self.ctx.split(index, method_rngs)
        return [
            replace(
                self._with(ctx, places, own_rng(self.request.rng, images), method_rng),
                run=routes[route],
                images=images if self.images is None else tuple(self.images[image] for image in images),
            )
            for (route, images), places, ctx, method_rng in zip(groups.items(), index, envs, method_rngs, strict=True)
        ]

    def only(self, images: Tensor, rng: Rng, method_rng: Rng) -> Part:
        """The part of some images [K], which lie in memory of their own; `rng` and `method_rng` are theirs."""
        return self._with(self.ctx.only(images, method_rng), images, rng, method_rng)

    def _with(self, ctx: ForwardContext, images: Tensor, rng: Rng, method_rng: Rng) -> Part:
        canvas = copy.copy(self.canvas)
        canvas.latent = self.canvas.latent[images]
        request = replace(
            self.request,
            images=images.shape[0],
            rng=rng,
            method_rng=method_rng,
            revise=revise_only(self.request.revise, images, self.request.batch),
            given=tuple(codes[images] for codes in self.request.given),
        )
        return replace(self, request=request, canvas=canvas, ctx=ctx)


def grouped(routes: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
    """The images of every route that is taken, from the route of every image."""
    return {route: tuple(image for image, own in enumerate(routes) if own == route) for route in sorted(set(routes))}


def own_rng(rng: Rng, images: tuple[int, ...]) -> Rng:
    """The random numbers of some images; a generator that is shared by the batch stays shared."""
    return rng.only(images) if isinstance(rng, ImageRng) else rng


def revise_only(revise: Revise, images: Tensor, batch: int) -> Revise:
    """What the caller makes of codes, who sees those of the whole batch: zeros for the images that go on elsewhere."""
    if revise is as_sampled:
        return revise

    def own(stage: Stage, codes: Tensor) -> Tensor:
        changed = revise(stage, spread(codes, images, batch))
        fits = isinstance(changed, Tensor) and changed.shape[:1] == (batch,)
        return changed[images.to(changed.device)] if fits else changed  # what does not fit is refused where codes are checked

    return own


def spread(values: Tensor, images: Tensor, batch: int) -> Tensor:
    """Values of some images [K, ...] at their places in the batch [B, ...], which is zero elsewhere."""
    return values.new_zeros(batch, *values.shape[1:]).index_copy(0, images.to(values.device), values)


def joined(values: Sequence[tuple[Part, Tensor | None]], batch: int) -> Tensor | None:
    """One tensor of what parts have, zero for the images of those that have nothing; None if nobody has."""
    whole: Tensor | None = None
    for part, value in values:
        if value is not None and part.images is not None:
            whole = value.new_zeros(batch, *value.shape[1:]) if whole is None else whole
            whole[list(part.images)] = value
    return whole
