"""ZipVL (He et al., 2024): a few queries probe which tokens receive attention, and only those attend and are attended to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.cache import AttentionCall, CacheSpec, CacheView, LayerCache, Workspace, real_entries
from nextscale.errors import SettingError
from nextscale.methods.method import DENSE, Method, MethodRun, Plans, RunSetup, StagePlan
from nextscale.methods.skip import stage_indices
from nextscale.methods.token_ops import pick, put_, real_tokens, share_of, top_share
from nextscale.stage import Schedule, Tokens, repeat_tail
from nextscale.validation import is_fraction

from .merging import real_counts
from .stages import late_stages

if TYPE_CHECKING:
    from nextscale.models.base import NextScaleModel


@dataclass(frozen=True)
class ZipVL(Method):
    """Attention among the tokens that receive most attention from a few probe queries, chosen by every layer in late stages.

    The others add no keys, and attention adds nothing to them but its bias; feed-forward and attention to the text run on all tokens. No
    code is published. Choices that its paper leaves open are ours: probes are equally spaced, heads are averaged, tokens of the stage
    compete with each other and not with earlier stages.

    The knobs that matter:
    ratio: share of the tokens that is left out.
    stages: indices of the stages; None is from stage 10 on, at least the last three.

    To tinker with:
    tau: in place of a fixed share, every row and layer keeps the fewest tokens that receive this share of the attention to the stage.
        Queries of the others are computed and thrown away then.
    probes: share of the queries that probe.
    """

    ratio: float = 0.5
    stages: tuple[int, ...] | None = None
    tau: float | None = None
    probes: float = 0.1

    exclusive = frozenset({"cache"})

    def __post_init__(self) -> None:
        if not is_fraction(self.ratio) or self.ratio == 1:
            raise SettingError(f"ratio is a share of the tokens from 0 to below 1; got {self.ratio!r}")
        if self.tau is not None and not is_fraction(self.tau, above_zero=True):
            raise SettingError(f"tau is a share of the attention, above 0 and at most 1; got {self.tau!r}")
        if not is_fraction(self.probes, above_zero=True):
            raise SettingError(f"probes is a share of the queries, above 0 and at most 1; got {self.probes!r}")
        if self.stages is not None:
            object.__setattr__(self, "stages", stage_indices(self.stages))

    def acts(self, schedule: Schedule) -> list[int]:
        """The stages at which tokens are left out."""
        stages = late_stages(self.stages, schedule)
        return [stage for stage in stages if share_of(schedule[stage].cells, self.ratio) > 0 or self.tau is not None]

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        plans, held, acts = [], model.text_prefix, self.acts(schedule)
        for stage in schedule:
            cells, left = stage.cells, stage.cells
            if stage.index in acts:
                left = cells - share_of(cells, self.ratio) if self.tau is None else max(1, round(kept * cells))
            dense, queries = cells * (model.text_prefix + stage.start + cells), left if self.tau is None else cells
            probing = self.probes * (held + cells) / 2 if stage.index in acts else 0  # products with the keys alone
            share = (queries * (held + left) + probing * cells) / dense
            plans.append(StagePlan(attended=(share,) * len(model.blocks)) if acts and stage.index >= acts[0] else DENSE)
            held += left
        return tuple(plans)

    def start(self, setup: RunSetup) -> MethodRun:
        return ZipVLRun(self, frozenset(self.acts(setup.schedule)))


@dataclass(frozen=True)
class ZipVLRun(MethodRun):
    method: ZipVL
    acts: frozenset[int]

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        return ZipVLCache(spec, workspace, self) if self.acts else LayerCache(spec, workspace)


class ZipVLCache(LayerCache):
    def __init__(self, spec: CacheSpec, workspace: Workspace, run: ZipVLRun) -> None:
        super().__init__(spec, workspace)
        self.method, self.acts = run.method, run.acts

    def attend(self, seen: AttentionCall) -> Tensor:
        if seen.tokens.stage.index not in self.acts:
            return super().attend(seen)
        selection, kept = self._select(seen)
        view = self._keep(seen, selection, kept)
        q = pick(seen.q.flatten(2), selection).unflatten(2, seen.q.shape[2:])
        out = super().attend(seen._replace(q=q, view=view, e4m3_scale=None))
        return repeat_tail(put_(out.new_zeros(*seen.q.shape[:2], out.shape[-1]), selection, out), seen.tokens.count)

    def _select(self, seen: AttentionCall) -> tuple[Tensor, Tokens]:
        tokens, method = seen.tokens, self.method
        sums = received_attention(seen, method.probes)
        if method.tau is None:
            return top_share(tokens, sums, method.ratio)
        if (real := real_tokens(tokens, sums.shape[1])) is not None:
            sums = sums * real
        return tokens.top(sums, fewest(sums, method.tau), sums.shape[1])

    def _keep(self, seen: AttentionCall, selection: Tensor, kept: Tokens) -> CacheView:
        """Moves the keys and values of the tokens that stay to the front of the stage's own."""
        view, final = seen.view, seen.tokens.stage.index == self.spec.final
        places = own_places(view, seen.q.shape[1], seen.q.device).expand(seen.q.shape[0], -1)
        stay = selection.shape[1]
        for store in (view.keys, view.values):
            wide = (-1, -1, *store.shape[2:])
            chosen = store.gather(1, places.gather(1, selection)[..., None, None].expand(wide))
            store.scatter_(1, places[:, :stay, None, None].expand(wide), chosen)
        end = view.end - seen.q.shape[1] + stay
        if kept.count is None and view.lengths is None:
            view = view._replace(end=end)
        else:
            counts = torch.full(seen.q.shape[:1], stay, device=seen.q.device) if kept.count is None else kept.count
            lengths = (counts + view.start).int()
            if self.lengths is None:
                self._finite_tails = True
            view, self.lengths = view._replace(end=end, lengths=lengths), lengths
        if not final:
            self.length = end
            if self._finite_tails:
                self._clear_tail()
        return view


def own_places(view: CacheView, new: int, device: torch.device) -> Tensor:
    """Finds the newest `new` entries of every row in the cache, [R or 1, new]."""
    start = view.start if isinstance(view.start, int) else view.start[:, None].long()
    return (start + torch.arange(new, device=device)).view(-1, new)


def received_attention(seen: AttentionCall, probes: float) -> Tensor:
    """Attention that the tokens of a stage receive from the probe queries, mean over heads and sum over queries: [R, N]."""
    q, view = seen.q, seen.view
    rows, queries = q.shape[:2]
    count = real_counts(seen.tokens, q)
    probe = torch.arange(max(1, round(probes * queries)), device=q.device)
    number = (probes * count.double()).round().long().clamp(min=1)[:, None]  # of each row's own tokens
    places = (probe * count[:, None] // number).clamp(max=queries - 1)  # [R, P]
    asking = pick(q.flatten(2), places).unflatten(2, q.shape[2:]).transpose(1, 2)
    scores = (asking @ view.keys.narrow(1, 0, view.end).permute(0, 2, 3, 1).to(q.dtype)).float() * seen.scale  # [R, H, P, T]
    if view.lengths is not None:
        scores = scores.masked_fill(~real_entries(view.lengths, view.end), -torch.inf)
    weights = scores.softmax(dim=-1) * (probe < number)[:, None, :, None]
    sums = weights.sum(dim=2).mean(dim=1)
    return sums.gather(1, own_places(view, queries, q.device).expand(rows, -1))


def fewest(sums: Tensor, tau: float) -> Tensor:
    """Counts the largest entries of every row [R, N] that make up the share `tau` of its sum: [R], at least 1."""
    largest = sums.double().sort(dim=1, descending=True).values.cumsum(dim=1)
    return ((largest < tau * largest[:, -1:] * (1 - 1e-12)).sum(dim=1) + 1).clamp(max=sums.shape[1])
