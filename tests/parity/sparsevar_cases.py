"""Cases of SparseVAR on Infinity.

The selected cells and their computation use the public path. The reference implementation fills the other cells incorrectly. The library
does not; the reader does (`StoredFilling`), so that every stage starts like the stored one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from nextscale import Schedule, SparseVAR, Stage, StagePlan, Tokens
from nextscale.canvas import Canvas, on_grid
from nextscale.generate import StageOutput
from nextscale.methods.method import MethodRun, Restored, RunSetup, TokenCounts
from nextscale.methods.sparsevar_cells import GridMap, anchor_cells, best_anchor, feature_change, largest_cells, share_above
from nextscale.models import Infinity
from nextscale.models.context import ForwardContext
from tests.parity import infinity_cases
from tests.parity.accelerated import SAMPLING, stated_tolerance
from tests.parity.compare import Expected, Tolerance
from tests.parity.fastvar_cases import mask_of, packed_bits
from tests.parity.infinity_cases import Read, schedule_of, to_cells, to_tokens
from tests.parity.settings import understood
from tests.parity.supplied import with_area_inputs
from tests.parity.trace import Trace, TraceRun

SETTINGS = {"start_prune_stage", "compress_ratio", "specific_mse_layer", "local_window_size", "beta"}
NO_AUTOENCODER = {"base_ch": 24, "ch_mult": [1], "num_res_blocks": 1}  # the code sum is the result
COMPARED_ANCHORS = 4  # the first of the list, for every cell: a defect
TOLERANCES = {"share": Tolerance(1e-6), "change": Tolerance(1e-4, 1e-4), "similarity": Tolerance(1e-4)}


class Rules(NamedTuple):
    """The settings of a case."""

    first: int  # stage that is reduced
    tau: float
    blocks: range  # whose change counts
    spacing: int  # of anchors
    beta: float

    @classmethod
    def of(cls, case: dict[str, Any]) -> Rules:
        settings, config = case["settings"], case["config"]
        understood(settings, SETTINGS, {"compress_method": "sparsevar"})
        size, group = config["depth"] // config["block_chunks"], settings["specific_mse_layer"]
        blocks = range(group * size, (group + 1) * size)
        assert [blocks[0], blocks[-1]] == case["tapped_blocks"], "tapped_blocks"
        first, tau, spacing = settings["start_prune_stage"], settings["compress_ratio"], settings["local_window_size"]
        return cls(first, tau, blocks, spacing, settings["beta"])

    @property
    def method(self) -> SparseVAR:
        """Returns the method without anchors, which the reference implementation adds only in batches."""
        return SparseVAR(
            tau=self.tau,
            first_stage=self.first,
            blocks=(self.blocks.start, self.blocks.stop),
            alpha=None,
            as_released=True,
        )


def replay_sparsevar(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    understood({"sampling": case["sampling"]}, (), SAMPLING)
    rules, config = Rules.of(case), case["config"]
    vae = {**NO_AUTOENCODER, "codebook_dim": config["vae_bits"]}
    pipe = infinity_cases.build(folder, {**case, "config": {**config, "vae": vae}, "vae_weights_left_out": True})
    if case["next_input"] == "area":
        with_area_inputs(pipe.tokenizer)
    else:
        assert case["next_input"] == "trilinear", f"next_input: {case['next_input']}"
    schedule = schedule_of(config["scale_schedule"], config["h_div_w_template"])
    given = {stage.index: stored_bits(expected, stage) for stage in schedule}
    trace = StoredFilling(rules, expected, config["B"], len(pipe.model.blocks))
    with trace.fills(pipe.model):
        generated = infinity_cases.generation(
            pipe, case, expected, trace, seed=0, greedy=True, revise=lambda stage, _: to_tokens(pipe.tokenizer, given[stage.index])
        )
    read = generated.read | {"cache_len": lambda: torch.tensor([cache.lengths for cache in trace.caches]).T}
    for stage, done in zip(schedule, generated.stages.done, strict=True):
        name, free = f"s{stage.index}", stage.index >= case["gt_leak"]
        bits = trace.logits[stage.index].argmax(dim=-1) if free else to_tokens(pipe.tokenizer, given[stage.index])
        read[f"{name}.bits.packed"] = lambda bits=bits, stage=stage: packed_bits(to_cells(pipe.tokenizer, bits, stage)[:, 0])
        read[f"{name}.logits"] = partial(trace.logits.__getitem__, stage.index)
        read |= trace.readings(stage) | sum_readings(expected, name, done, generated.stages.latents[stage.index])
    read |= {
        end: partial(every_cell, generated.out.latent, int(end[len("final_codes.sub") :])) for end in ends(expected, "final_codes.sub")
    }
    check_words(case, schedule, trace)
    infinity_cases.compare(expected, read, stated_tolerance(case), TOLERANCES)


def stored_bits(expected: Expected, stage: Stage) -> Tensor:
    """Bits [B, 1, h, w, bits] of a stage, which begin the next one as in the stored run."""
    packed = expected.tensors[f"s{stage.index}.bits.packed"]
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1))[:, None].long()


def ends(expected: Expected, start: str) -> list[str]:
    return [name for name in expected.tensors if name.startswith(start)]


def every_cell(grid: Tensor, step: int) -> Tensor:
    return grid[..., ::step, ::step]


def sum_readings(expected: Expected, name: str, done: StageOutput, latent: Tensor) -> Read:
    """Returns the codes of a stage and the sum so far, at the stored intervals."""
    read: Read = {}
    for stored in ends(expected, f"{name}.codes.sub"):
        step = int(stored.rpartition(".sub")[2])
        assert done.tokens is not None
        read[stored] = lambda step=step: on_grid(done.canvas.vectors(done.codes), done.tokens).flatten(2)[..., ::step]
    for stored in ends(expected, f"{name}.summed_codes.sub"):
        read[stored] = partial(every_cell, latent, int(stored.rpartition(".sub")[2]))
    return read


def check_words(case: dict[str, Any], schedule: Schedule, trace: StoredFilling) -> None:
    """Fails unless as many cells are kept, copied and zeroed as the case says in words."""
    for stage in schedule[trace.rules.first :]:
        said, matching = case["stages"][f"s{stage.index}"], trace.matching(stage)
        assert [said["kept"]] * trace.batch == trace.program_kept(stage).sum(dim=1).tolist(), f"kept: stage {stage.index}"
        assert said["recoverable"] == matching.recoverable.sum(dim=1).tolist(), f"recoverable: stage {stage.index}"
        assert said["zeroed"] == matching.zeroed.sum(dim=1).tolist(), f"zeroed: stage {stage.index}"


class Matching(NamedTuple):
    """Sources with which the reference implementation fills the cells that did not run, [B, cells] each."""

    excluded: Tensor
    similarity: Tensor
    anchor: Tensor  # the most similar one's cell
    recoverable: Tensor  # excluded, and takes the hidden states of its anchor

    @property
    def zeroed(self) -> Tensor:
        return self.excluded & ~self.recoverable


class StoredFilling(Trace):
    """Traces SparseVAR, fills cells that did not run like the reference implementation, and follows the stored selections.

    Every stage therefore works on the stored numbers, and a difference remains where it occurs.
    """

    def __init__(self, rules: Rules, expected: Expected, batch: int, depth: int) -> None:
        super().__init__(observed=(rules.blocks[0], rules.blocks[-1], depth - 1), method=rules.method)
        self.rules, self.expected, self.batch, self.depth = rules, expected, batch, depth
        self.method_kept: dict[int, Tensor] = {}  # by stage, [B, cells], as the method would go on
        self.method_change: dict[int, Tensor] = {}  # [B, cells], of the method
        self.logits: dict[int, Tensor] = {}  # [B, cells, bits, 2]
        self.unfilled: dict[int, Tensor] = {}  # [R, cells, C], what ran, and the input of what did not
        self.hidden: dict[int, Tensor] = {}  # [R, cells, C], with copies
        self.tokens = Tokens(Stage(0, 1, 1, 0, False))  # that run

    def start(self, setup: RunSetup) -> MethodRun:
        super().start(setup)
        return FillingRun(self, self.run)

    @contextmanager
    def fills(self, model: Infinity) -> Iterator[None]:
        """Makes the head run on all cells, including copied ones."""
        head = model.logits

        def filled(x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
            return head(self.fill(x), tokens, ctx)

        with mock.patch.object(model, "logits", filled):
            yield

    def fill(self, x: Tensor) -> Tensor:
        """Expands hidden states of the tokens that ran, [R, N, C], to all cells."""
        stage = self.tokens.stage
        if self.tokens.index is None:
            return x
        self.unfilled[stage.index] = self.tokens.scatter(x, self.first_inputs[-1])
        excluded, anchor, recoverable = (self.stored(stage, name) for name in ("excluded", "best_anchor", "recoverable"))
        assert excluded is not None and anchor is not None and recoverable is not None
        source = torch.arange(stage.cells).repeat(self.batch, 1).scatter(1, excluded, torch.where(recoverable.bool(), anchor, excluded))
        copied = Tokens(stage, source).repeat(x.shape[0] // self.batch).gather(self.unfilled[stage.index])
        self.hidden[stage.index] = copied
        return copied

    def stored(self, stage: Stage, name: str) -> Tensor | None:
        found = self.expected.tensors.get(f"s{stage.index}.{name}")
        return None if found is None else found.long()

    # --- selections of the reference implementation

    def change(self, stage: Stage) -> Tensor:
        """Returns the method's change map; for the last stage, it is computed from the observed blocks."""
        if stage.index in self.method_change:
            return self.method_change[stage.index]
        change = feature_change(self.inputs[stage.index, self.rules.blocks[0]], self.outputs[stage.index, self.rules.blocks[-1]])
        change = change.unflatten(0, (-1, self.batch)).mean(dim=0)
        return self.tokens.rows(slice(0, self.batch)).scatter(change[..., None], torch.zeros(self.batch, stage.cells, 1))[..., 0]

    def share(self, stage: Stage) -> Tensor:
        """Returns the largest share of an image's cells above the threshold, which is relative to the largest change of the batch: [1]."""
        change = self.change(stage)
        return share_above(change, self.rules.tau, change.amax().view(1, 1)).amax(dim=0, keepdim=True)

    def program_kept(self, stage: Stage) -> Tensor:
        """Cells that enter the network, [B, cells], put together from the method's parts. Of one image the method must say the same."""
        before = self.stage_before(stage)
        change = GridMap(self.change(before)[..., None], before.size).at(stage.size, "nearest")[..., 0]
        count = (self.share(before) * stage.cells).long().expand(self.batch)
        count = torch.where(count == 0, stage.cells, count)  # a defect: where nothing is to be kept, everything is
        kept = largest_cells(change, count)
        if self.batch == 1:
            # The method never returns to skipped cells. The reference does if the share needs more cells than remain.
            there = GridMap(self.method_kept.get(before.index, torch.ones(1, before.cells))[..., None].float(), before.size)
            own = kept & there.at(stage.size, "nearest")[..., 0].bool()
            assert int(count) == stage.cells or torch.equal(self.method_kept[stage.index], own), f"kept: stage {stage.index}"
            return kept
        kept = kept.index_fill(1, self.anchors(stage), True)
        smallest = kept.sum(dim=1).amin()
        return kept & (kept.cumsum(dim=1) <= smallest)  # a defect: larger sets lose their last cells

    def anchors(self, stage: Stage) -> Tensor:
        """Returns the anchors in the order of the reference implementation, which lists a last row and column on the grid twice."""
        rows, columns = (
            torch.cat([anchor_cells((1, side), self.rules.spacing, torch.device("cpu")), torch.tensor([side - 1])]) for side in stage.size
        )
        return (rows[:, None] * stage.width + columns).flatten()

    def similarities(self, stage: Stage) -> Tensor:
        """Returns the similarities of every cell to the compared anchors, [B, cells, 4]."""
        vectors = self.compared_vectors(stage)
        each = [best_anchor(vectors, anchor, stage.size)[0] for anchor in self.anchors(stage)[:COMPARED_ANCHORS, None]]
        return torch.stack(each, dim=-1)

    def matching(self, stage: Stage) -> Matching:
        similarity, place = self.similarities(stage).max(dim=-1)  # of equals the first, where the method takes the nearest
        excluded = ~self.program_kept(stage)
        return Matching(excluded, similarity, self.anchors(stage)[place], excluded & (similarity > self.rules.beta))

    def compared_vectors(self, stage: Stage) -> Tensor:
        """Returns the compared vectors [B, cells, V]. The reference reshapes tokens and channels of the logits, a defect."""
        before = self.stage_before(stage)
        logits = self.logits[before.index].flatten(2)
        mixed = logits.reshape(self.batch, logits.shape[2], before.cells).transpose(1, 2)
        return GridMap(mixed, before.size).at(stage.size, "nearest")

    def stage_before(self, stage: Stage) -> Stage:
        return self.schedule[stage.index - 1]

    # --- readings

    def readings(self, stage: Stage) -> Read:
        name = f"s{stage.index}"
        if stage.index < self.rules.first - 1:
            return {}
        read: Read = {f"{name}.change": partial(self.change, stage), f"{name}.share": partial(self.share, stage)}
        if stage.index < self.rules.first:
            return read
        matching = self.matching(stage)
        excluded = cells_of(matching.excluded)
        stored = {part: self.expected.tensors[f"{name}.{part}"] for part in ("kept", "best_anchor", "recoverable")}
        self.expected.tensors[f"{name}.kept"] = stored["kept"].sort(dim=1).values  # compared as sets
        recoverable = matching.recoverable.gather(1, excluded)
        return read | {
            f"{name}.kept": lambda: cells_of(~matching.excluded),
            f"{name}.excluded": lambda: excluded,
            f"{name}.anchors": lambda: self.anchors(stage),
            f"{name}.similarity": partial(self.similarities, stage),
            f"{name}.best_similarity": lambda: matching.similarity.gather(1, excluded),
            f"{name}.best_anchor": lambda: torch.where(recoverable, matching.anchor.gather(1, excluded), stored["best_anchor"]),
            f"{name}.recoverable": lambda: recoverable,
            f"{name}.zeroed.packed": lambda: packed_bits(matching.zeroed),
            f"{name}.hidden_before_copy": lambda: self.unfilled[stage.index],
            f"{name}.hidden": lambda: self.hidden[stage.index],
        }


@dataclass(frozen=True)
class FillingRun(TraceRun):
    """Runs SparseVAR, and goes on with the stored choices."""

    trace: StoredFilling

    def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        """Returns the stored number of tokens, so that rows are padded."""
        self.trace.counted = super().count(stage, canvas)
        return None

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        own = self.trace.counted
        plan = super().plan(stage, planned, None if own is None else TokenCounts(int(own.min()), int(own.max()), int(own.sum())))
        kept = self.trace.stored(stage, "kept")
        return plan if kept is None else replace(plan, num_tokens=kept.shape[1])

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        trace, stage, own = self.trace, tokens.stage, super().select_tokens(x, tokens)
        kept = trace.stored(stage, "kept")
        trace.tokens = tokens
        if kept is None:
            return tokens
        every = torch.arange(stage.cells).expand(trace.batch, -1)
        trace.method_kept[stage.index] = mask_of(every if own.index is None else own.index[: trace.batch], stage.cells)
        trace.tokens = Tokens(stage, kept.sort(dim=1).values).repeat(x.shape[0] // trace.batch)
        return trace.tokens

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        out, trace, stage = logits, self.trace, tokens.stage
        trace.logits[stage.index] = out
        change = getattr(self.run, "change", None)
        if isinstance(change, GridMap) and change.size == stage.size:
            trace.method_change[stage.index] = change.values[..., 0]
        if tokens.index is None:
            return Restored(out, tokens)
        packed = trace.expected.tensors[f"s{stage.index}.zeroed.packed"]
        coded = 1 - torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1, count=stage.cells)).float()
        _, coded_tokens = Tokens(stage).top(coded, coded.sum(dim=1).long(), stage.cells)
        return Restored(coded_tokens.gather(out.flatten(2)).unflatten(2, out.shape[2:]), coded_tokens)


def cells_of(mask: Tensor) -> Tensor:
    """Returns the cell numbers [B, n] of a mask [B, cells] with the same count in every row."""
    return mask.nonzero()[:, 1].view(mask.shape[0], int(mask[0].sum()))
