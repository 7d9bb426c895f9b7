"""Requests whose images are routed, as CUDA graphs: all that follows is one graph for every route and several numbers of images.

Images that take one route are gathered and go on as a batch of their own, padded to a captured size. What they leave comes to lie in
tensors of the whole batch, whichever routes they took.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..canvas import Canvas
from ..generate import StageOutput, run_part, together
from ..methods.method import MethodRun
from ..models.base import NextScaleModel
from ..parts import Part, grouped
from ..request import Request
from ..stage import Stage
from .buffers import GatheredRng, StaticRng, positions, rewind
from .pool import GraphPool
from .state import State
from .variants import HostRead

MADE = ("ids", "codes", "residual")  # what a stage leaves beside the canvas, where the model has it


def group_sizes(batch: int) -> list[int]:
    """Numbers of images for which a route is captured, the smallest first. From 2 on none is more than half as large again as the last."""
    sizes = {size for power in range(batch.bit_length()) for size in (2**power, 3 * 2**power)}
    return [*sorted(size for size in sizes if size < batch), batch]


@dataclass(frozen=True, eq=False)
class RoutedStage:
    """What a stage leaves of all images [B + 1, ...], at fixed addresses. The last row takes what pads a group."""

    latent: Tensor
    made: Mapping[str, Tensor]
    finite: Tensor  # whether all that was computed is

    @classmethod
    def like(cls, done: StageOutput) -> RoutedStage:
        """Room for what a route has done with all images."""
        values = {name: getattr(done, name) for name in MADE}
        made = {name: with_spare_row(value) for name, value in values.items() if value is not None}
        latent = done.canvas.latent
        return cls(with_spare_row(latent), made, torch.ones((), dtype=torch.bool, device=latent.device))

    def reset(self) -> None:
        """Images that do not run the stage have zeros for codes."""
        self.finite.fill_(True)
        if self.made:
            torch._foreach_zero_(list(self.made.values()))

    def put(self, done: StageOutput, finite: Tensor | None, group: Group) -> None:
        """Takes what a route has done with a group of images, or with all, of which only these count."""
        made = {name: getattr(done, name) for name in self.made}
        for target, value in ((self.latent, done.canvas.latent), *((self.made[name], value) for name, value in made.items())):
            if value is not None:
                target.index_copy_(0, group.targets, value if group.gathered else value[group.images])
        if finite is not None:
            self.finite.logical_and_(finite)


def with_spare_row(values: Tensor) -> Tensor:
    return torch.cat([values, values[:1]]).zero_()  # in its memory format


class Group(NamedTuple):
    """Images [K] of a batch that take one route, the last one repeated, and the rows that what they leave goes to."""

    images: Tensor
    targets: Tensor
    gathered: bool  # they are fewer than all: copied to a batch of their own


@dataclass(frozen=True, eq=False)
class RouteGraph:
    """What follows for a number of images that take one route."""

    graph: torch.cuda.CUDAGraph
    size: int
    done: tuple[StageOutput, ...]  # of every stage, without what it has made

    def of_stage(self, place: int, images: int) -> StageOutput:
        done = self.done[place]
        return replace(done, rows=done.rows * images // self.size)  # the others are padding


@dataclass(frozen=True, eq=False)
class RoutedGraphs:
    """The last stages of a captured request."""

    run: MethodRun
    read: HostRead  # by which images are routed
    places: Tensor  # [2, routes, B], the images that take each route, and the rows that what they leave goes to
    stages: Sequence[RoutedStage]
    graphs: Sequence[Sequence[RouteGraph]]  # by route, the smallest first

    @property
    def latent(self) -> Tensor:
        return self.stages[-1].latent[:-1]

    @property
    def count(self) -> int:
        return 1 + sum(len(sizes) for sizes in self.graphs)

    def replay(self, images: int, canvas: Canvas) -> Iterator[tuple[StageOutput, Tensor | None]]:
        """Routes the first `images` of the batch and yields what every stage has done, on `canvas`, and whether what it computed is finite.

        All of it has been launched when the first is seen: a report gives the time of all to the first.
        """
        groups = grouped(self.run.route(self.read.value()[:images]))
        self._load(groups)
        for stage in self.stages:
            stage.reset()
        taken = [next(graph for graph in self.graphs[route] if graph.size >= len(own)) for route, own in groups.items()]
        for graph in taken:
            graph.graph.replay()
        for place, stage in enumerate(self.stages):
            canvas.latent = stage.latent[:images]
            done = [graph.of_stage(place, len(own)) for graph, own in zip(taken, groups.values(), strict=True)]
            made = {name: value[:images] for name, value in stage.made.items()}
            ran = any(not one.skipped for one in done)
            yield together(list(groups.values()), done, canvas, made), stage.finite if ran else None

    def _load(self, groups: Mapping[int, tuple[int, ...]]) -> None:
        """Puts the images of every route where its graphs read them."""
        _, routes, batch = self.places.shape
        taken = [groups.get(route, (0,)) for route in range(routes)]
        images = [[*own, *[own[-1]] * (batch - len(own))] for own in taken]
        targets = [[*own, *[batch] * (batch - len(own))] for own in taken]
        self.places.copy_(torch.tensor([images, targets], pin_memory=self.places.is_cuda), non_blocking=True)


class RouteCapture:
    """Captures the stage before which images are routed, and all that follow."""

    def __init__(self, model: NextScaleModel, request: Request, first: Stage, rngs: Sequence[StaticRng]) -> None:
        self._model, self._request, self._rngs = model, request, rngs
        self._stages = request.schedule.stages[first.index :]
        self._whole: list[RoutedStage] = []
        self._stops: list[bool] = []  # of every route, whether it runs no stage

    @property
    def latent(self) -> Tensor:
        """The latent of all images, of the size that is decoded."""
        return self._whole[-1].latent[:-1]

    def warm_up(self, state: State) -> None:
        """Runs every route with all images, which makes room for what they leave, and once with every number of images that is captured."""
        begun, groups_have_run = positions(self._rngs), bool(self._whole)
        ends, self._stops = [begun], []
        for route in state.run.routes():
            rewind(self._rngs, begun)
            self._stops.append(self._try(self._part(state, route)))
            ends.append(positions(self._rngs))
        if not groups_have_run:
            self._try_groups(state, begun)
        rewind(self._rngs, [max(all_ends) for all_ends in zip(*ends, strict=True)])

    def _try(self, part: Part) -> bool:
        """Whether the route stops. Stages get room for what it makes; a route that skips one makes less than others."""
        ran = []
        for place, (done, _) in enumerate(self._run(part)):
            if place == len(self._whole):
                self._whole.append(RoutedStage.like(done))
            elif not (done.skipped or self._whole[place].made):
                self._whole[place] = RoutedStage.like(done)
            ran.append(not done.skipped)
        return not any(ran)

    def _try_groups(self, state: State, begun: Sequence[int]) -> None:
        """As they are captured: no kernel is loaded during a capture."""
        places = torch.zeros(2, self._request.batch, dtype=torch.int64, device=state.canvas.latent.device)
        for route, stops in zip(state.run.routes(), self._stops, strict=True):
            for size in self._sizes(stops):
                rewind(self._rngs, begun)
                self._run_group(self._part(state, route.fork()), self._group(places, size))

    def capture(self, state: State, read: HostRead, pool: GraphPool, canvas: Canvas) -> RoutedGraphs:
        """`canvas`: what a replay shows."""
        routes, batch = state.run.routes(), self._request.batch
        places = torch.zeros(2, len(routes), batch, dtype=torch.int64, device=state.canvas.latent.device)
        begun = positions(self._rngs)
        graphs: list[list[RouteGraph]] = []
        for number, (route, stops) in enumerate(zip(routes, self._stops, strict=True)):
            graphs.append([])
            for size in self._sizes(stops):
                rewind(self._rngs, begun)
                group = self._group(places[:, number], size)
                graphs[-1].append(self._capture_route(self._part(state, route.fork()), group, pool, canvas))
        return RoutedGraphs(state.run, read, places, self._whole, graphs)

    def _capture_route(self, part: Part, group: Group, pool: GraphPool, canvas: Canvas) -> RouteGraph:
        graph = torch.cuda.CUDAGraph()
        with pool.capturing(graph):
            done = self._run_group(part, group)
        return RouteGraph(graph, group.images.shape[0], tuple(replace(one, canvas=canvas) for one in done))

    def _run_group(self, part: Part, group: Group) -> list[StageOutput]:
        """Runs a group of images and puts what they leave where it belongs; returns the rest of every stage."""
        done: list[StageOutput] = []
        for whole, (one, finite) in zip(self._whole, self._run(self._gathered(part, group)), strict=True):
            whole.put(one, finite, group)
            done.append(replace(one, canvas=part.canvas, logits=None, ids=None, codes=None, residual=None))
        return done

    def _sizes(self, stops: bool) -> list[int]:
        """What runs no stage costs all images no more than some."""
        return [self._request.batch] if stops else group_sizes(self._request.batch)

    def _group(self, places: Tensor, size: int) -> Group:
        return Group(places[0, :size], places[1, :size], size < self._request.batch)

    def _gathered(self, part: Part, group: Group) -> Part:
        if not group.gathered:
            return part
        return part.only(group.images, *(GatheredRng(rng, group.images, self._request.batch) for rng in self._rngs))

    def _part(self, state: State, route: MethodRun) -> Part:
        fork = state.fork()
        return Part(self._request, fork.canvas, route, fork.ctx)

    def _run(self, part: Part) -> Iterator[tuple[StageOutput, Tensor | None]]:
        for stage in self._stages:
            if stage is not self._stages[0] and part.run.routing_inputs(stage, part.canvas) is not None:
                raise RuntimeError(f"images are routed again before stage {stage.index}: graphs are captured for one routing of a request")
            yield run_part(self._model, part, stage)
