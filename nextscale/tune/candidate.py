"""One setting of all knobs that the search turns."""

from __future__ import annotations

from dataclasses import dataclass, replace

Amounts = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Candidate:
    """Reductions of the late stages. The defaults are dense generation."""

    amounts: Amounts = ()  # stage index to the share of its cells that SparseVAR runs; other stages are whole
    alpha: int = 4  # of SparseVAR's anchors
    change: str = ""  # SparseVAR's settings of where it measures change and places anchors; "": its defaults
    peer: str = ""  # another method with its settings, of `space.ladders`
    unguided: int | None = None  # the first stage without guidance
    skipped: int = 0  # of the last stages
    left_out: tuple[int, ...] = ()  # stages before those

    @property
    def text(self) -> str:
        """The method as the command line takes it."""
        parts = []
        if self.amounts:
            keep = dict(self.amounts)
            while (before := min(keep) - 1) in self.left_out:  # which shows no change: with it, the stage before is observed
                keep = {before: 1.0, **keep}
            parts.append(f"sparsevar:keep={keep},alpha={self.alpha}{f',{self.change}' if self.change else ''}")
        if self.peer:
            parts.append(self.peer)
        if self.unguided is not None:
            parts.append(f"dropguidance:first_stage={self.unguided}")
        skips = [f"last={self.skipped}"] * (self.skipped > 0) + [f"stages={list(self.left_out)}"] * bool(self.left_out)
        if skips:
            parts.append(f"skip:{','.join(skips)}")
        return " + ".join(parts) or "dense"

    @property
    def peer_name(self) -> str:
        return self.peer.partition(":")[0]

    @property
    def knobs(self) -> int:
        """Number of knobs that are turned; each stage that SparseVAR reduces is one."""
        return len(self.amounts) + len(self.left_out) + sum((bool(self.peer), self.unguided is not None, self.skipped > 0))

    def with_amounts(self, amounts: dict[int, float]) -> Candidate:
        """Returns it with other shares. Cells that SparseVAR left out stay out, so shares never grow without a whole stage between."""
        shrinking: dict[int, float] = {}
        for stage in sorted(amounts):
            shrinking[stage] = min(amounts[stage], shrinking.get(stage - 1, 1.0))
        changed = replace(self, amounts=tuple(shrinking.items()))
        return changed if shrinking else replace(changed, alpha=Candidate.alpha, change="")

    def without_stages(self, skipped: int, left_out: tuple[int, ...], stages: int) -> Candidate:
        """Returns it with other stages left out, which then are not reduced either."""
        left = tuple(stage for stage in left_out if stage < stages - skipped)
        amounts = {stage: share for stage, share in self.amounts if stage < stages - skipped and stage not in left}
        return replace(self, skipped=skipped, left_out=left).with_amounts(amounts)
