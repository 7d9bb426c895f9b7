"""SparseVAR with another reading of equation 1 at cells that did not run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from nextscale.methods.method import MethodRun, RunSetup
from nextscale.methods.sparsevar import SparseRun, SparseVAR
from nextscale.methods.sparsevar_cells import GridMap
from nextscale.stage import Tokens
from nextscale.validation import require_choice

LeftOut = Literal["carried", "zero"]
LEFT_OUT: tuple[LeftOut, ...] = get_args(LeftOut)


@dataclass(frozen=True)
class SparseVARVariants(SparseVAR):
    """SparseVAR whose cells that did not run have no change.

    left_out: "carried" is SparseVAR: such a cell keeps its change of the stage before. "zero" is equation 1 to the letter: the block's
        output at such a cell is its input. The enlarged map is smaller around them, so that fewer cells stay.
    """

    left_out: LeftOut = "carried"

    def __post_init__(self) -> None:
        require_choice("left_out", self.left_out, LEFT_OUT)
        super().__post_init__()

    def start(self, setup: RunSetup) -> MethodRun:
        run = super().start(setup)
        return run if self.left_out == "carried" else ZeroRun(self, setup)


class ZeroRun(SparseRun):
    def update_change(self, change: Tensor, tokens: Tokens) -> None:
        ours = tokens.rows(slice(0, self.setup.batch))
        self.change = GridMap(ours.scatter(change, change.new_zeros(len(change), tokens.stage.cells, 1)), tokens.stage.size)
