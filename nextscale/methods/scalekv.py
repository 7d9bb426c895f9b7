"""ScaleKV (Li et al., 2025): after each late stage every layer keeps a part of its keys and values, chosen head by head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import AttentionCall, CacheSpec, CompressedLayerCache, CompressedSpec, LayerCache, Workspace
from ..errors import SettingError
from ..stage import Schedule, Tokens
from ..validation import is_fraction, is_int, require_flags
from .method import DENSE, Method, MethodRun, Plans, RunSetup, StagePlan
from .scalekv_budgets import PUBLISHED, PUBLISHED_SIDES, Budgets, checked_budgets, normalised, published_budgets, ruled_budgets

if TYPE_CHECKING:
    from ..models.base import NextScaleModel

SHARE = 0.1
LAYERS_PER_DRAFTER = 40 / 3  # as many as in the 8B model


@dataclass(frozen=True)
class ScaleKV(Method):
    """Compresses the cache when a stage has run: a few layers, the drafters, keep nearly everything, the others little.

    What a layer keeps is chosen for every row and head: the tokens of a window, 16 cells spread over the stage's grid, and those whose
    keys have the largest products with the window's queries. Those queries are without bias, norm, temperature and positions, and
    scores are max-pooled along the cache, both as in the reference implementation. Nothing else is computed differently, so that memory
    and the keys that attention reads are what is saved.

    The knobs that matter:
    share: mean share of the keys before the last stage that the layers keep, where no budgets are published. 1 keeps all.
    drafters: layers that keep as much as fits the mean. None is the published choice for Infinity of 32 and 40 layers at its 13 square
        stages, with the published budgets; everywhere else it is ours, the first layers, one in about 13. `nextscale calibrate scalekv`
        measures a model's own.

    To tinker with:
    budgets: {stage index: keys that every layer keeps when the stage has run}, written out: a number, or one per layer.
    window: tokens of a stage that are kept whatever they score and whose queries score the others. pooling: width of the max-pooling.
    as_released: does what the reference implementation does, on Infinity alone: equal scores, of which pooling makes many, are chosen
        among as torch.topk does. Ours takes the first ones, so that an image is the same in any batch and on any device. It takes every
        stage to have as many cells as the square one of its number, so that its window lies elsewhere where images are not square.
    """

    share: float = SHARE
    drafters: tuple[int, ...] | None = None
    budgets: Mapping[int, int | Sequence[int]] | Budgets | None = None
    window: int = 16
    pooling: int = 5
    as_released: bool = False

    own_cache = True

    def __post_init__(self) -> None:
        require_flags(self, "as_released")
        if not is_fraction(self.share, above_zero=True):
            raise SettingError(f"share is above 0 and at most 1 (nothing is dropped); got {self.share!r}")
        if not is_int(self.window, 1) or not is_int(self.pooling, 1) or self.pooling % 2 == 0:
            raise SettingError(f"window is a number of tokens, pooling an odd number of them; got {self.window!r} and {self.pooling!r}")
        if self.budgets is not None and (self.drafters is not None or self.share != SHARE):
            raise SettingError("budgets say what every layer keeps: leave out share and drafters, or budgets")
        if self.drafters is not None:
            if not isinstance(self.drafters, Sequence) or not all(is_int(layer) for layer in self.drafters):
                raise SettingError(f"drafters is a tuple of layer numbers; got {self.drafters!r}")
            object.__setattr__(self, "drafters", tuple(sorted({int(layer) for layer in self.drafters})))
        if self.budgets is not None:
            object.__setattr__(self, "budgets", normalised(self.budgets))

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        budgets = self._budgets(model, schedule)
        plans = [StagePlan(kept_keys=budgets[stage.index]) if stage.index in budgets else DENSE for stage in schedule]
        return tuple(plans)

    def start(self, setup: RunSetup) -> MethodRun:
        return ScaleKVRun(self)

    def _budgets(self, model: NextScaleModel, schedule: Schedule) -> dict[int, tuple[int, ...]]:
        layers, square = len(model.blocks), schedule.sizes == tuple((side, side) for side in PUBLISHED_SIDES)
        if self.as_released and (model.family != "infinity" or len(schedule) > len(PUBLISHED_SIDES)):
            raise SettingError(
                f"ScaleKV as_released: the reference implementation knows Infinity's stages, {len(PUBLISHED_SIDES)} at most; got"
                f" {model.family} and {schedule}"
            )
        if self.budgets is not None:
            return checked_budgets(self.budgets, layers, schedule, self.window)  # type: ignore[arg-type]
        published = layers in PUBLISHED and (self.share, self.drafters) == (SHARE, None)
        if self.as_released and not published:
            raise SettingError(
                f"ScaleKV as_released: budgets are published for {sorted(PUBLISHED)} layers: write them out; this has {layers}"
            )
        if published and (self.as_released or (square and model.family == "infinity")):
            return published_budgets(schedule, layers)
        drafters = tuple(range(max(1, int(layers / LAYERS_PER_DRAFTER)))) if self.drafters is None else self.drafters
        if drafters and drafters[-1] >= layers:
            raise SettingError(f"ScaleKV: there is no layer {drafters[-1]}; this model has layers 0 to {layers - 1}")
        held = model.text_prefix + schedule.tokens - schedule[-1].cells
        return ruled_budgets(schedule, layers, drafters, max(self.window, round(self.share * held)), self.window, model.text_prefix)


# --- running


@dataclass(frozen=True)
class ScaleKVRun(MethodRun):
    method: ScaleKV

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        return ScaleKVCache(spec, workspace, self.method) if isinstance(spec, CompressedSpec) else LayerCache(spec, workspace)


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
        """The entries of the cache to keep, [R, K, H], ascending."""
        choose = top_as_released if self.method.as_released else top_keys
        return choose(*self.scores(seen), keep).transpose(1, 2)

    def scores(self, seen: AttentionCall) -> tuple[Tensor, Tensor]:
        """Scores of all entries, [R, H, T], and the places of the window among them, [R, W]."""
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
    """Positions [R, W] among the tokens of a stage: the centres of a division of its grid into equal rectangles.

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
    """Positions [W] in the cache where the reference implementation looks: it takes the last entries for the square grid of this stage.

    Where those or the window are no square, or the grid is too small for it, the last W.
    """
    cells = min(PUBLISHED_SIDES[stage] ** 2, cached)
    side, across = math.isqrt(cells), math.isqrt(window)
    if side**2 != cells or across**2 != window or side < across:
        return torch.arange(max(0, cached - window), cached, device=device)
    centre = torch.arange(across, device=device) * (side // across) + (side // across - 1) // 2
    return cached - cells + (centre[:, None] * side + centre).flatten()


def key_scores(keys: Tensor, queries: Tensor, window: Tensor, pooling: int, lengths: Tensor | None = None) -> Tensor:
    """Scores [R, H, T] of keys [R, T, H, D]: products with all queries [R, W, H, D] of the window, pooled; -inf in the window itself.

    lengths: [R] entries of each row once they differ; what lies beyond scores lower than every key.
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
    """Positions [R, H, keep] of the window and of the highest scores besides, ascending; of equal ones the first.

    Score and position make one whole number, so that no two are equal and every algorithm finds the same.
    """
    always = scores.scatter(2, window[:, None].expand(-1, scores.shape[1], -1), torch.inf)
    bits = always.float().view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32 - torch.arange(scores.shape[2], device=scores.device)
    return order.topk(keep, dim=2, sorted=False).indices.sort(dim=2).values


def top_as_released(scores: Tensor, window: Tensor, keep: int) -> Tensor:
    """Likewise; among equal scores torch chooses."""
    always = window[:, None].expand(-1, scores.shape[1], -1)
    others = scores.topk(keep - window.shape[1], dim=2).indices
    return torch.cat([others, always], dim=2).sort(dim=2).values
