"""ScaleKV (Li et al., 2025): after each late stage every layer keeps a part of its keys and values, chosen head by head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.cache import AttentionCall, CacheSpec, CacheView, CompressedSpec, LayerCache, Workspace, copy_wide, row_count
from nextscale.errors import SettingError
from nextscale.methods.method import DENSE, Method, MethodRun, Plans, RunSetup, StagePlan
from nextscale.stage import Rows, Schedule, Tokens
from nextscale.validation import is_int, is_positive_fraction, require, require_flags, require_stages, sorted_pairs

if TYPE_CHECKING:
    from nextscale.models.base import NextScaleModel

Budgets = tuple[tuple[int, tuple[int, ...]], ...]

PUBLISHED_SIDES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)

PUBLISHED: Mapping[int, Mapping[int, tuple[tuple[int, ...], int, int]]] = {
    32: {
        7: ((0, 23), 920, 632),
        8: ((0, 23), 1490, 594),
        9: ((0, 23), 2510, 526),
        10: ((0, 23), 4100, 420),
        11: ((0,), 6385, 465),
    },
    40: {
        7: ((0, 1, 2), 909, 629),
        8: ((0, 1, 2), 1464, 584),
        9: ((0, 1, 2), 2463, 503),
        10: ((0, 1, 2), 4054, 374),
        11: ((0, 1, 2), 6200, 200),
    },
}
"""Drafters, their keys and the keys of the others, by the number of layers (Infinity 2B and 8B) and by stage.

The mean is 650 keys, about 10 % of those cached before the last stage.
"""

CAPACITY = 650
"""Keys up to which nothing is dropped in the first place."""

SHARE = 0.1
LAYERS_PER_DRAFTER = 40 / 3  # as many as in the 8B model


@dataclass(frozen=True)
class ScaleKV(Method):
    """Compresses the cache when a stage has run: a few layers, the drafters, keep nearly everything, the others little.

    Every row and head of a layer keeps the tokens of a window, 16 cells spread over the stage's grid, and those whose keys have the largest
    products with the window's queries. Those queries are without bias, norm, temperature and positions, and scores are max-pooled along the
    cache, both as in the reference implementation. All else is computed as before: it saves memory and the keys that attention reads.

    share: mean share of the keys before the last stage that the layers keep, where no budgets are published. 1 keeps all.
    drafters: layers that keep as much as fits the mean. None is the published choice for Infinity of 32 and 40 layers at its 13 square
        stages, with the published budgets, and elsewhere the first layers, one in about 13. `python -m
        nextscale_research calibrate-scalekv` measures a model's own.
    budgets: {stage index: keys that every layer keeps when the stage has run}, a number or one per layer, in place of share and drafters.
    window: tokens of a stage that are kept whatever they score, and whose queries score the others.
    pooling: width of the max-pooling, an odd number.
    as_released: the reference implementation, on Infinity only. Among equal scores, which are common after pooling, it chooses
        as torch.topk does (ours takes the first, so that an image is the same in any batch and on any device), and it takes every stage to
        have as many cells as the square one of its number.
    """

    share: float = SHARE
    drafters: tuple[int, ...] | None = None
    budgets: Mapping[int, int | Sequence[int]] | Budgets | None = None
    window: int = 16
    pooling: int = 5
    as_released: bool = False

    exclusive = frozenset({"cache"})

    def __post_init__(self) -> None:
        require_flags(self, "as_released")
        require(is_positive_fraction(self.share), "share", "above 0 and at most 1", self.share)
        require(is_int(self.window, 1), "window", "a number of tokens from 1", self.window)
        require(is_int(self.pooling, 1) and self.pooling % 2, "pooling", "an odd number of tokens", self.pooling)
        if self.drafters is not None:
            drafters = self.drafters
            require(isinstance(drafters, Sequence) and all(map(is_int, drafters)), "drafters", "a tuple of layer numbers", drafters)
            object.__setattr__(self, "drafters", tuple(sorted({int(layer) for layer in drafters})))
        if self.budgets is not None:
            if self.drafters is not None or self.share != SHARE:
                raise SettingError("budgets say what every layer keeps: leave out share and drafters, or budgets.")
            expected = "number of keys from 1, or one per layer"
            object.__setattr__(self, "budgets", sorted_pairs("budgets", self.budgets, expected, keys_of_layers, keys_of_layers))

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        budgets = self._budgets(model, schedule)
        return tuple(StagePlan(kept_keys=budgets[stage.index]) if stage.index in budgets else DENSE for stage in schedule)

    def start(self, setup: RunSetup) -> MethodRun:
        return ScaleKVRun(self)

    def _budgets(self, model: NextScaleModel, schedule: Schedule) -> dict[int, tuple[int, ...]]:
        """Returns the keys that every layer keeps when a stage has run, by stage index."""
        layers, square = len(model.blocks), schedule.sizes == tuple((side, side) for side in PUBLISHED_SIDES)
        known = model.family == "infinity" and len(schedule) <= len(PUBLISHED_SIDES)
        require(known or not self.as_released, "as_released", "left out except for Infinity at its published stages", schedule)
        if self.budgets is not None:
            budgets: dict[int, tuple[int, ...]] = dict(self.budgets)  # type: ignore[arg-type]
            require_stages("budgets", budgets, len(schedule))
            for stage, kept in budgets.items():
                good = len(kept) in (1, layers) and min(kept) >= self.window
                require(good, "budgets", f"at least the window, {self.window}, one number or one per layer ({layers})", {stage: kept})
            return {stage: kept if len(kept) == layers else kept * layers for stage, kept in budgets.items()}
        published = layers in PUBLISHED and (self.share, self.drafters) == (SHARE, None)
        require(published or not self.as_released, "as_released", f"left out, or budgets given, without {sorted(PUBLISHED)} layers", layers)
        if published and (self.as_released or (square and model.family == "infinity")):
            return published_budgets(schedule, layers)
        drafters = tuple(range(max(1, int(layers / LAYERS_PER_DRAFTER)))) if self.drafters is None else self.drafters
        require(not drafters or drafters[-1] < layers, "drafters", f"layers 0 to {layers - 1} of this model", drafters)
        held = model.text_prefix + schedule.tokens - schedule[-1].cells
        return ruled_budgets(schedule, layers, drafters, max(self.window, round(self.share * held)), self.window, model.text_prefix)


def keys_of_layers(kept: Any) -> tuple[int, ...]:
    """Returns a tuple of one number for all layers, or of one per layer; empty if it is neither."""
    numbers = (kept,) if is_int(kept) else tuple(kept)
    return tuple(map(int, numbers)) if all(is_int(one, 1) for one in numbers) else ()


def published_budgets(schedule: Schedule, layers: int) -> dict[int, tuple[int, ...]]:
    """Returns the budgets of the reference implementation, from the first stage on that leaves more than the mean."""
    table = PUBLISHED[layers]
    first = next((stage.index for stage in schedule if stage.start + stage.cells > CAPACITY), len(schedule))
    if first < min(table):
        raise SettingError(
            f"as_released: budgets are published from stage {min(table)} on; got stage {first} with over {CAPACITY} keys. Give budgets."
        )
    chosen = {stage: entry for stage, entry in table.items() if first <= stage < len(schedule) - 1}
    return {stage: tuple(most if layer in few else least for layer in range(layers)) for stage, (few, most, least) in chosen.items()}


def ruled_budgets(
    schedule: Schedule, layers: int, drafters: Sequence[int], capacity: int, window: int, prefix: int = 0
) -> dict[int, tuple[int, ...]]:
    """Returns budgets by the rule of the published ones: a mean of `capacity` keys, from which drafters take as many as they can use.

    The first stage that leaves more is the first to be compressed. A drafter's budget is the largest, up to the number it would hold if
    nothing but its own budget had cut it before, for which the others' is a whole number. Where few layers share the mean, drafters
    take less, so that the others keep their window.
    """
    others, found = layers - len(drafters), dict[int, tuple[int, ...]]()
    for stage in schedule.stages[:-1]:
        held = prefix + stage.start + stage.cells
        if held <= capacity:
            continue
        limit = min(held, (found[stage.index - 1][drafters[0]] if drafters else capacity) + stage.cells) if found else held
        if drafters and others:
            limit = min(limit, (layers * capacity - others * window) // len(drafters))
            whole = (most for most in range(limit, max(limit - others, 0), -1) if (layers * capacity - len(drafters) * most) % others == 0)
            most = next(whole, limit)
            least = (layers * capacity - len(drafters) * most) // others
        else:
            most = least = capacity
        found[stage.index] = tuple(most if layer in drafters else least for layer in range(layers))
    return found


# --- running


@dataclass(frozen=True)
class ScaleKVRun(MethodRun):
    method: ScaleKV

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        return ScaleKVCache(spec, workspace, self.method) if isinstance(spec, CompressedSpec) else LayerCache(spec, workspace)


class CompressedLayerCache(LayerCache):
    """Holds the kept entries, in memory of just that size; an override of `attend` calls `keep`.

    A stage reads what its layer has kept, and its own keys, from the workspace, so that the largest stage takes memory once and not in
    every layer.
    """

    def reserve(self, rows: int, new: int, tokens: Tokens, *, finite_tails: bool = True) -> CacheView:
        keys, values = self.workspace.pair(rows, self.length + new)
        for target, source in zip((keys, values), self._pair or (), strict=False):
            copy_wide(target.narrow(1, 0, self.length), source)
        self._pair = None
        view = self._ragged(CacheView(keys, values, self.length, self.length + new), new, tokens, True, finite_tails)
        self.length += new
        return view

    def kept_after(self, stage: int) -> int | None:
        """Returns the number of tokens of a row to keep after this stage; None for all."""
        kept = next(known.kept for known in self.spec.stages if known.stage == stage)
        return kept[0] if kept is not None and kept[0] < self.length else None

    def keep(self, view: CacheView, selection: Tensor | None) -> None:
        """Holds the entries at `selection` [R, K, H], ascending, of the workspace; None: all."""
        for_heads = None if selection is None else selection[..., None].expand(-1, -1, -1, view.keys.shape[-1])
        filled = [store.narrow(1, 0, view.end) for store in (view.keys, view.values)]
        self._pair = tuple(store.clone() if for_heads is None else store.gather(1, for_heads) for store in filled)
        if selection is not None:
            self.length = selection.shape[1]
            self.lengths = None if self.lengths is None else self.lengths.clamp(max=self.length)

    def keep_rows(self, rows: Rows) -> None:
        self._rows = row_count(rows, self._rows)
        self._pair = None if self._pair is None else tuple(store[rows].clone() for store in self._pair)
        self.lengths = None if self.lengths is None else self.lengths[rows]

    def _clear_tail(self) -> None:
        """Tails are in the workspace, where they are cleared."""


class ScaleKVCache(CompressedLayerCache):
    def __init__(self, spec: CacheSpec, workspace: Workspace, method: ScaleKV) -> None:
        super().__init__(spec, workspace)
        self.method = method

    def attend(self, seen: AttentionCall) -> Tensor:
        out = super().attend(seen)
        stage = seen.tokens.stage.index
        if stage != self.spec.final:
            keep = self.kept_after(stage)
            self.keep(seen.view, None if keep is None else self.selected(seen, keep))
        return out

    def selected(self, seen: AttentionCall, keep: int) -> Tensor:
        """Returns the entries of the cache to keep, [R, K, H], ascending."""
        choose = top_as_released if self.method.as_released else top_keys
        return choose(*self.scores(seen), keep).transpose(1, 2)

    def scores(self, seen: AttentionCall) -> tuple[Tensor, Tensor]:
        """Returns scores of all entries, [R, H, T], and the places of the window among them, [R, W]."""
        view, heads = seen.view, seen.q.shape[2]
        if self.method.as_released and seen.tokens.index is None and view.lengths is None:
            window = released_window(seen.tokens.stage.index, view.end, self.method.window, seen.q.device).expand(seen.q.shape[0], -1)
            places = (window - (view.end - seen.q.shape[1])).clamp(0, seen.q.shape[1] - 1)
        else:
            places = window_places(seen.tokens, seen.q.shape[:2], self.method.window, seen.q.device)  # [R, W]
            window = places + (view.start if isinstance(view.start, int) else view.start[:, None])
        x, weight = seen.projected()
        chosen = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        queries = F.linear(chosen, weight[: x.shape[-1]]).unflatten(-1, (heads, -1))
        keys = view.keys.narrow(1, 0, view.end)
        return key_scores(keys, queries, window, self.method.pooling, view.lengths), window


def window_places(tokens: Tokens, shape: Sequence[int], window: int, device: torch.device) -> Tensor:
    """Returns positions [R, W] among the tokens of a stage: the centers of a division of its grid into equal rectangles.

    Where the grid is too small for that, or a part of it runs, W of the tokens at equal distances.
    """
    rows, across = shape[0], math.isqrt(window)
    stage = tokens.stage
    if tokens.index is None and across**2 == window and min(stage.size) >= across:
        down, along = (torch.arange(across, device=device) * (side // across) + (side // across - 1) // 2 for side in stage.size)
        return (tokens.prefix + down[:, None] * stage.width + along).flatten().expand(rows, -1)
    count = torch.full((rows,), shape[1] - tokens.prefix, device=device) if tokens.count is None else tokens.count.long()
    return tokens.prefix + torch.arange(window, device=device) * count[:, None] // window


def released_window(stage: int, cached: int, window: int, device: torch.device) -> Tensor:
    """Returns positions [W] in the cache where the reference implementation looks: the last entries, as the square grid of this stage.

    If those or the window are not square, or the grid is too small for it, the last W.
    """
    cells = min(PUBLISHED_SIDES[stage] ** 2, cached)
    side, across = math.isqrt(cells), math.isqrt(window)
    if side**2 != cells or across**2 != window or side < across:
        return torch.arange(max(0, cached - window), cached, device=device)
    center = torch.arange(across, device=device) * (side // across) + (side // across - 1) // 2
    return cached - cells + (center[:, None] * side + center).flatten()


def key_scores(keys: Tensor, queries: Tensor, window: Tensor, pooling: int, lengths: Tensor | None = None) -> Tensor:
    """Returns scores [R, H, T] of keys [R, T, H, D]: products with all queries [R, W, H, D] of the window, pooled; -inf in the window.

    lengths: [R] entries of each row once they differ; entries beyond score lower than every key.
    """
    product = queries.float().transpose(1, 2) @ keys.float().permute(0, 2, 3, 1) / math.sqrt(keys.shape[-1])  # [R, H, W, T]
    scores = product.sum(dim=2)
    at_window = window[:, None].expand(-1, scores.shape[1], -1)
    beyond = None if lengths is None else (torch.arange(keys.shape[1], device=keys.device) >= lengths[:, None])[:, None]
    lowest = torch.finfo(scores.dtype).min
    scores = scores.scatter(2, at_window, -torch.inf)
    if beyond is not None:
        scores = scores.masked_fill(beyond, lowest)
    scores = F.max_pool1d(scores, pooling, stride=1, padding=pooling // 2)
    if beyond is not None:
        scores = scores.masked_fill(beyond, lowest)
    return scores.scatter(2, at_window, -torch.inf)


def top_keys(scores: Tensor, window: Tensor, keep: int) -> Tensor:
    """Returns positions [R, H, keep] of the window and of the highest scores besides, ascending; of equal ones the first.

    Score and position make one whole number, so that no two are equal and every algorithm finds the same.
    """
    always = scores.scatter(2, window[:, None].expand(-1, scores.shape[1], -1), torch.inf)
    bits = always.float().view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32 - torch.arange(scores.shape[2], device=scores.device)
    return order.topk(keep, dim=2, sorted=False).indices.sort(dim=2).values


def top_as_released(scores: Tensor, window: Tensor, keep: int) -> Tensor:
    """Returns the same; among equal scores torch chooses."""
    always = window[:, None].expand(-1, scores.shape[1], -1)
    others = scores.topk(keep - window.shape[1], dim=2).indices
    return torch.cat([others, always], dim=2).sort(dim=2).values
