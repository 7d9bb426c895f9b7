"""LiteVAR (Xie et al., 2024): attention in diagonal bands, and one attention map for both rows of a guided pair."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.cache import AttentionCall, CacheSpec, LayerCache, Workspace
from nextscale.cache.attention import sdpa_backends
from nextscale.errors import SettingError
from nextscale.methods.method import DENSE, Method, MethodRun, Plans, RunSetup, StagePlan
from nextscale.stage import Schedule, Stage
from nextscale.validation import is_fraction, is_int, require_flags

from .key_lists import KeyMap, key_map, require_whole

if TYPE_CHECKING:
    from nextscale.models.base import NextScaleModel

FIRST = 3  # the first stage that attends in bands, and the first whose keys are read so
SHARED_PAIR = 0.75  # of the products of a guided pair: products of queries and keys are made once, products with values twice


@dataclass(frozen=True)
class LiteVAR(Method):
    """Restricts attention: from stage 3 on a query reads, of every large stage, the keys near its own place in raster order.

    The attention of the conditional row is used for the unconditional one too, which has its own values. Published are one width per
    block, head and pair of stages, measured on VAR, in files that are not released; here one share of the keys serves them all. Its
    quantization, which the release simulates, is not included. Bands are a mask without a fast kernel, so that this measures quality;
    `SparVAR` has the kernel.

    The knobs that matter:
    width: half the width of a band, as a share of the stage's keys. 1 reads all of them.
    share_rows: both rows of a guided pair have one attention map.

    To tinker with:
    first: the first stage that attends in bands; keys of earlier ones are always read whole.
    as_released: keys outside a band keep a logit of 0, as in the release, in place of being left out.
    """

    width: float = 0.25
    share_rows: bool = True
    first: int = FIRST
    as_released: bool = False

    exclusive = frozenset({"cache"})

    def __post_init__(self) -> None:
        if not is_fraction(self.width, above_zero=True):
            raise SettingError(f"width is a share of a stage's keys, above 0 and at most 1; got {self.width!r}")
        if not is_int(self.first):
            raise SettingError(f"first is the index of a stage, 0 or more; got {self.first!r}")
        require_flags(self, "share_rows", "as_released")

    def bands(self, stage: Stage) -> bool:
        return self.width < 1 and stage.index >= self.first

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        rows = SHARED_PAIR if self.share_rows and guided else 1.0
        plans = []
        for stage in schedule:
            there = key_map(schedule, stage, model.text_prefix)
            share = rows * (band_share(there, self.first, self.width) if self.bands(stage) else 1.0)
            plans.append(DENSE if share == 1 else StagePlan(attended=(share,) * len(model.blocks)))
        return tuple(plans)

    def start(self, setup: RunSetup) -> MethodRun:
        run = LiteVARRun(self)
        setup.constants.append(run.masks)
        return run


@dataclass(frozen=True)
class LiteVARRun(MethodRun):
    method: LiteVAR
    masks: dict[KeyMap, Tensor] = field(default_factory=dict, compare=False)  # that were read

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        idle = self.method.width == 1 and not self.method.share_rows
        return LayerCache(spec, workspace) if idle else LiteVARCache(spec, workspace, self.method, self.masks)


class LiteVARCache(LayerCache):
    def __init__(self, spec: CacheSpec, workspace: Workspace, method: LiteVAR, masks: dict[KeyMap, Tensor]) -> None:
        super().__init__(spec, workspace)
        self.method, self.masks = method, masks

    def attend(self, seen: AttentionCall) -> Tensor:
        method, stage = self.method, seen.tokens.stage
        paired = method.share_rows and seen.q.shape[0] == 2 * seen.batch
        banded = method.bands(stage)
        if not paired and not banded:
            return super().attend(seen)
        there = KeyMap.of(self.spec, stage)
        if banded:
            require_whole(seen, there, "LiteVAR")
        keys, values, mask = seen.view.filled
        mask = self._band(there, seen.q.device) if banded else mask
        q, k, v = (x.transpose(1, 2) for x in (seen.q, keys, values))  # [R, H, N or T, D]
        if paired:
            half = seen.batch
            q, k, v = q[:half], k[:half], torch.cat([v[:half], v[half:]], dim=-1)
            mask = mask if mask is None or mask.shape[0] == 1 else mask[:half]
        if banded and method.as_released and mask is not None:
            out = zeroed_attention(q, k, v, mask, seen.scale)
        else:
            with sdpa_backends(q.device):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=seen.scale)
        if paired:
            out = torch.cat(out.chunk(2, dim=-1))
        return out.transpose(1, 2).flatten(2)

    def _band(self, there: KeyMap, device: torch.device) -> Tensor:
        if there not in self.masks:
            self.masks[there] = band_mask(there, self.method.first, self.method.width, device)
        return self.masks[there]


def zeroed_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention in which the logits of masked keys are 0: they still take a part of the weight."""
    return (q @ k.mT * scale * mask).float().softmax(dim=-1).to(v.dtype) @ v


# --- bands


def band_width(width: float, keys: int) -> int:
    return max(1, math.ceil(width * keys))


def band(queries: int, keys: int, width: int) -> Tensor:
    """Marks the keys of a stage within `width` of each query's own place, both in raster order: [queries, keys]."""
    center = torch.arange(queries, dtype=torch.float64) * keys / queries
    return (center[:, None] - torch.arange(keys)).abs() < width


@lru_cache(maxsize=32)  # two requests of 13 stages; megabytes each
def band_mask(there: KeyMap, first: int, width: float, device: torch.device) -> Tensor:
    """[1, 1, N, T] for the queries of the last stage in `there`."""
    cells = [height * wide for height, wide in there.sizes]
    parts = [torch.ones(cells[-1], there.prefix, dtype=torch.bool)]
    for number, keys in enumerate(cells):
        whole = number < first
        parts.append(torch.ones(cells[-1], keys, dtype=torch.bool) if whole else band(cells[-1], keys, band_width(width, keys)))
    return torch.cat(parts, dim=1)[None, None].to(device)


@lru_cache(maxsize=256)  # asked for by every forecast, and a search makes thousands
def band_share(there: KeyMap, first: int, width: float) -> float:
    """The share of all pairs of a query and a key that bands leave."""
    mask = band_mask(there, first, width, torch.device("cpu"))
    return mask.count_nonzero().item() / mask.numel()
