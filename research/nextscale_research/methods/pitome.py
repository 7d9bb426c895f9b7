"""PiToMe (Tran et al., 2024): tokens of large clusters are merged, and those that have few like them are left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.methods.method import DENSE, Method, Plans, StagePlan
from nextscale.methods.skip import stage_indices
from nextscale.methods.token_ops import real_tokens, require_separate_sublayers, share_of
from nextscale.models.context import ForwardContext
from nextscale.stage import Schedule, Tokens, repeat_tail
from nextscale.validation import is_finite, is_fraction, is_one_of

from .merging import Merge, real_counts
from .stages import late_stages
from .tome import MergedBlocks, SublayerName, sublayer_names

if TYPE_CHECKING:
    from nextscale.models.base import NextScaleModel
    from nextscale.models.blocks import Block

Form = Literal["plain", "bsm"]


@dataclass(frozen=True)
class PiToMe(Method):
    """Merges the tokens with the highest energy, pairwise, before a sublayer, and gives all of them its output.

    The energy of a token is the mean over all tokens, itself included, of ELU(cosine - margin): high where many are alike. Of the highest,
    every second one goes to the most similar of the rest of them. Published for classifiers, where merged tokens stay merged; here, as with
    our ToMe, every block and every row merges its own tokens and each token takes the output of the one it went to. Comparing all tokens
    with all costs as much as attention.

    The knobs that matter:
    ratio: share of the tokens that is merged into others, at most half.
    stages: indices of the stages where tokens are merged; None is from stage 10 on, at least the last three.

    To tinker with:
    margin: of the first block; it falls to zero at the last. form: "plain" merges the tokens of highest energy and protects the others;
        "bsm" pairs all tokens by energy and merges the most similar pairs. sublayers: as ToMe's.
    """

    ratio: float = 0.5
    stages: tuple[int, ...] | None = None
    margin: float = 0.75
    form: Form = "plain"
    sublayers: tuple[SublayerName, ...] = ("attention", "feed_forward")

    def __post_init__(self) -> None:
        if not is_fraction(self.ratio) or self.ratio > 0.5:
            raise SettingError(f"ratio is a share of the tokens from 0 to 0.5, since pairs are merged; got {self.ratio!r}")
        if not is_finite(self.margin) or not is_one_of(self.form, get_args(Form)):
            raise SettingError(f"margin is a number and form one of {', '.join(get_args(Form))}; got {self.margin!r} and {self.form!r}")
        if self.stages is not None:
            object.__setattr__(self, "stages", stage_indices(self.stages))
        object.__setattr__(self, "sublayers", sublayer_names(self.sublayers))

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        if "cross_attention" in self.sublayers and not all(block.has_text for block in model.stack):
            raise SettingError(f"PiToMe: {type(model).__name__} has no cross_attention; sublayers are attention and feed_forward")
        plans = [DENSE] * len(schedule)
        layers = range(len(model.blocks))
        for stage in late_stages(self.stages, schedule):
            if self.sublayers and share_of(schedule[stage].cells, self.ratio) > 0:
                require_separate_sublayers(model, "PiToMe")
                span = EnergyMergedBlocks(layers, self.ratio, self.sublayers, 0, False, self.margin, self.form)
                plans[stage] = StagePlan(spans=(span,))
        return tuple(plans)


@dataclass(frozen=True)
class EnergyMergedBlocks(MergedBlocks):
    """Runs some sublayers of its blocks on tokens that were merged by energy."""

    margin: float = 0.75
    form: Form = "plain"

    def num_tokens(self, tokens: int) -> int:
        return tokens - share_of(tokens, self.ratio)

    def own_macs(self, tokens: int, dim: int) -> int:
        """MACs of one row: one product compares all tokens with all, and one for every sublayer makes the means."""
        destinations = share_of(tokens, self.ratio) if self.form == "plain" else tokens // 2
        return len(self.layers) * (tokens + len(self.sublayers) * destinations) * tokens * dim

    def merging(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Callable[[Block, Tensor], Merge]:
        def merge(block: Block, x: Tensor) -> Merge:
            margin = self.margin * (1 - (block.layer - self.layers.start) / len(self.layers))
            return merged_by_energy(x, tokens, self.ratio, margin, self.form)

        return merge


def energies(cosines: Tensor, margin: float, real: Tensor | None = None) -> Tensor:
    """Mean [R, N] over the real tokens, the token itself included, of ELU(cosine - margin); -inf for padding. cosines [R, N, N]."""
    energy = F.elu(cosines - margin)
    if real is None:
        return energy.mean(dim=-1)
    mean = energy.masked_fill(~real[:, None], 0).sum(dim=-1) / real.sum(dim=-1, keepdim=True)
    return mean.masked_fill(~real, -torch.inf)


def merged_by_energy(x: Tensor, tokens: Tokens, ratio: float, margin: float, form: Form = "plain") -> Merge:
    """Merges the share `ratio` of x [R, N, C] into tokens of similar energy.

    Cosines are rounded to float16, as ToMe's are, so that equal tokens stay equal in every batch.
    """
    number = x.shape[1]
    unit = F.normalize(x.float(), dim=-1)
    cosines = (unit @ unit.mT).half().float()
    real = real_tokens(tokens, number)
    count = real_counts(tokens, x)
    merged = share_of(count, ratio)[:, None]  # [R, 1]
    rank = energies(cosines, margin, real).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    pool = 2 * merged if form == "plain" else count[:, None]  # tokens by rank every second one may be merged
    leaving, into = (rank % 2 == 0) & (rank < pool), (rank % 2 == 1) & (rank < pool)
    similarity, target = cosines.masked_fill(~into[:, None], -torch.inf).max(dim=-1)
    if form == "bsm":
        best = similarity.masked_fill(~leaving, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        leaving = leaving & (best < merged)
    own = torch.arange(number, device=x.device)
    target = torch.where(leaving, target, own)
    left = number - share_of(number, ratio)
    selection, kept = tokens.top((~leaving).float(), left if tokens.count is None else (count - merged[:, 0]).int(), left)
    most = share_of(number, ratio) if form == "plain" else number // 2
    destinations = into.float().argsort(dim=1, descending=True, stable=True)[:, :most]
    members = (destinations[..., None] == target[:, None]) & (real[:, None] if real is not None else True)
    weights = members / members.sum(dim=-1, keepdim=True).clamp(min=1)
    source = torch.searchsorted(selection, repeat_tail(target, tokens.count))
    return Merge(kept, selection, source, destinations, weights.to(x.dtype))
