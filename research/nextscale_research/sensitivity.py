"""Effects of each knob by itself in the trials of a search, and their prediction of several together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from nextscale.errors import NextscaleError
from nextscale.methods.drop_guidance import DropGuidance
from nextscale.methods.method import Method
from nextscale.methods.registry import METHODS, resolve_method
from nextscale.methods.skip import SkipStages
from nextscale.methods.sparsevar import SparseVAR
from nextscale.tune.candidate import Candidate
from nextscale.tune.log import Foresight, TrialLog
from nextscale.tune.space import LADDERS
from nextscale.tune.trials import Trial

Line = list[tuple[float, float]]


@dataclass(frozen=True)
class Sensitivities:
    """LPIPS to dense images of every knob alone. Lines are pairs of where the knob stands and the distance."""

    grids: Sequence[Sequence[int]]
    images: int  # that every knob generated
    unguided: dict[str, Line] = field(default_factory=lambda: defaultdict(list))  # rows that go on, to the first stage without guidance
    shares: dict[int, Line] = field(default_factory=lambda: defaultdict(list))  # stage to the share of its cells that is kept
    left_out: Line = field(default_factory=list)  # one stage
    skipped: Line = field(default_factory=list)  # all stages from this one on
    own: Line = field(default_factory=list)  # all of these, to their share of the MACs
    peers: dict[str, Line] = field(default_factory=lambda: defaultdict(list))  # other methods, likewise
    foresight: Foresight = field(default_factory=dict)
    predicted: Line = field(default_factory=list)  # several knobs: expected, and measured

    @classmethod
    def of(cls, log: TrialLog) -> Sensitivities:
        usable = [trial for trial in log.trials.values() if trial.error is None]
        if not usable or "grids" not in log.conditions:
            raise NextscaleError(f"{log.file} holds no trial that ran: let `nextscale tune` go on first")
        found = cls(log.conditions["grids"], min(trial.images for trial in usable), foresight=log.foresight or {})
        for trial in usable:
            if trial.images == found.images:
                found._place(resolve_method(trial.text), trial)
            if trial.predicted > 0:
                found.predicted.append((trial.predicted, trial.lpips))
        for line in (*found.unguided.values(), *found.shares.values(), *found.peers.values(), found.left_out, found.skipped):
            line[:] = sorted(dict(line).items())
        stages = [*found.shares, *(stage for line in (*found.unguided.values(), found.left_out, found.skipped) for stage, _ in line)]
        if not all(0 <= stage < len(found.grids) for stage in stages):
            raise NextscaleError(
                f"{log.file} has trials of stages up to {max(stages):g}, and grids of {len(found.grids)}: run the search again"
            )
        return found

    def _place(self, method: Method, trial: Trial) -> None:
        """Puts a knob that is turned alone where it belongs."""
        match method:
            case DropGuidance(first_stage=int(first), fade=fade, kept_rows=rows):
                self._own(self.unguided[f"{rows}, fading" if fade else rows], first, trial)
            case SparseVAR(keep=((stage, share),), alpha=Candidate.alpha):
                self._own(self.shares[stage], share, trial)
            case SkipStages(last=last, stages=()):
                self._own(self.skipped, len(self.grids) - last, trial)
                self.left_out.extend([(len(self.grids) - 1, trial.lpips)] if last == 1 else [])
            case SkipStages(last=0, stages=(stage,)):
                self._own(self.left_out, stage, trial)
            case _ if type(method) in {METHODS[name] for name in LADDERS}:
                self.peers[type(method).__name__].append((trial.cost_share, trial.lpips))

    def _own(self, line: Line, where: float, trial: Trial) -> None:
        line.append((where, trial.lpips))
        self.own.append((trial.cost_share, trial.lpips))
