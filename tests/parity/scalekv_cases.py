"""Cases of ScaleKV on Infinity."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nextscale import Schedule
from nextscale.cache import AttentionCall, CacheSpec, LayerCache, Workspace
from nextscale.methods.method import MethodRun, RunSetup
from nextscale.models import Infinity
from nextscale_research.methods import ScaleKV
from nextscale_research.methods.scalekv import PUBLISHED, ScaleKVCache, key_scores, top_as_released
from tests.parity import infinity_cases
from tests.parity.accelerated import SettledBits, SettledDraws, bit_rng, stated_tolerance
from tests.parity.compare import Expected, Tolerance
from tests.parity.infinity_cases import OFFICIAL_SAMPLER, Read, schedule_of
from tests.parity.settings import understood
from tests.parity.trace import Trace, TraceRun

FIXED = {"pooling": "maxpool"}
SAID = {"budgets", "first_compressed_stage", "budget_entry_after_stage", "window_size", "base_capacity", "kernel_size"}
WINDOW, POOLING = 16, 5
IMAGE = Tolerance(1e-3)
SCORE = Tolerance(1e-4, 1e-5)
NEAR = 1e-4  # of scores, relative to their spread: two runs of the reference implementation differ by less


def replay_scalekv(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    understood(case["scalekv"], SAID, FIXED)
    pipe = infinity_cases.build(folder, case)
    schedule = schedule_of(case["config"]["scale_schedule"], case["config"]["h_div_w_template"])
    budgets = budgets_of(case, len(pipe.model.blocks))
    trace = TracedSelections(method_of(pipe.model, schedule, budgets, case["scalekv"]), budgets, case, expected)
    sampled = "s0.uniform" in expected
    settled = SettledDraws if sampled else SettledBits
    noise = case["noise_max_abs_other_attention_kernel_and_2_threads"]["logits"]
    with settled(pipe.tokenizer, expected, noise) as revise:
        rng = {"seed": bit_rng(expected, schedule), **OFFICIAL_SAMPLER} if sampled else {"seed": 0, "greedy": True}
        read = infinity_cases.generation(pipe, case, expected, trace, revise=revise, **rng).read
    if trace.settled:
        warnings.warn(f"{trace.settled} selections were settled as in the stored run", stacklevel=2)
    compare_raw_selections(expected, case.get("raw_selection_inputs", []), trace.method.pooling)
    infinity_cases.compare(expected, read | trace.read, stated_tolerance(case), {"image_float": IMAGE, "score": SCORE})


def budgets_of(case: dict[str, Any], layers: int) -> dict[int, tuple[int, ...]]:
    """Returns the keys that every layer keeps after each stage, including the last, whose keys are not read.

    Values of stages before the first compressed one are not used; schedules that are too short compress nothing.
    """
    said, found = case["scalekv"], {}
    first, stages = said["first_compressed_stage"], len(case["config"]["scale_schedule"])
    for name, entry in said["budget_entry_after_stage"].items():
        row, stage = said["budgets"][entry], int(name[1:])
        if first is not None and first <= stage < stages:
            found[stage] = tuple(row["Max"] if row[f"Block {layer}"] else row["Min"] for layer in range(layers))
    assert min(found, default=None) == first, "first_compressed_stage"
    return found


def method_of(model: Infinity, schedule: Schedule, budgets: dict[int, tuple[int, ...]], said: dict[str, Any]) -> ScaleKV:
    """Returns the method, with the published settings if they equal those of the case."""
    settings = {"window": said.get("window_size", WINDOW), "pooling": said.get("kernel_size", POOLING), "as_released": True}
    before_last = {stage: kept for stage, kept in budgets.items() if not schedule[stage].last}
    written_out = ScaleKV(budgets=before_last, **settings)
    if settings["window"] != WINDOW or settings["pooling"] != POOLING or len(model.blocks) not in PUBLISHED:
        return written_out
    published = ScaleKV(as_released=True)
    return published if published.forecast(model, schedule) == written_out.forecast(model, schedule) else written_out


class TracedSelections(Trace):
    """Traces what every layer keeps, and goes on with the stored selection where rounding may have swapped tokens."""

    def __init__(self, method: ScaleKV, budgets: dict[int, tuple[int, ...]], case: dict[str, Any], expected: Expected) -> None:
        config = case["config"]
        super().__init__(observed=(config["depth"] - 1,), method=method)
        self.budgets, self.case, self.expected = budgets, case, expected
        self.before, self.after = (torch.zeros(len(config["scale_schedule"]), config["depth"], dtype=torch.int32) for _ in range(2))
        self.selections: dict[tuple[int, int], Tensor] = {}  # by stage and layer, [R, H, K]
        self.settled = 0
        self.read: Read = {"cache_len_before": lambda: self.before, "cache_len_after": lambda: self.after}
        self.layers = 0
        packed = case.get("kept_packed_layers", [])
        for name in [name for name in expected.tensors if name.endswith(".kept_packed")]:
            self.read[name] = partial(self.packed, int(name[1:].partition(".")[0]), packed, expected.tensors[name].shape[-1])

    def start(self, setup: RunSetup) -> MethodRun:
        super().start(setup)
        return SelectingRun(self, self.run)

    def packed(self, stage: int, layers: list[int], size: int) -> Tensor:
        rows = [self.packed_row(stage, layer, number, 8 * size) for number, layer in enumerate(layers)]
        return torch.from_numpy(np.packbits(torch.stack(rows).numpy(), axis=-1))

    def packed_row(self, stage: int, layer: int, number: int, size: int) -> Tensor:
        """Returns the kept keys of a layer; a layer that was not compressed keeps all, and the case may not store it."""
        if (stage, layer) in self.selections:
            return self.mask(self.selections[stage, layer], size)
        stored = self.expected.tensors[f"s{stage}.kept_packed"][number]
        whole = torch.arange(size) < self.before[stage, layer]
        return (whole & bool(stored.any())).expand(*stored.shape[:2], -1)

    @staticmethod
    def mask(selection: Tensor, cached: int) -> Tensor:
        return torch.zeros(*selection.shape[:2], cached, dtype=torch.bool).scatter(2, selection, True)

    def stored(self, stage: int, layer: int, cached: int) -> Tensor | None:
        """Returns the cached tokens that the stored run kept, [R, H, T]."""
        kept = self.expected.tensors.get(f"s{stage}.layer{layer}.kept")
        if kept is not None:
            return self.mask(kept.long(), cached)
        packed, layers = self.expected.tensors.get(f"s{stage}.kept_packed"), self.case.get("kept_packed_layers", [])
        if packed is None or layer not in layers:
            return None
        return torch.from_numpy(np.unpackbits(packed[layers.index(layer)].numpy(), axis=-1))[..., :cached].bool()

    def as_stored(self, selection: Tensor, score: Tensor, stage: int, layer: int) -> Tensor:
        """Returns the stored selection if it differs only by tokens that tie with the last one kept."""
        stored = self.stored(stage, layer, score.shape[2])
        chosen = self.mask(selection, score.shape[2])
        if stored is None or torch.equal(stored, chosen):
            return selection
        finite = score.masked_fill(score.isinf(), torch.nan)
        border = torch.where(chosen & score.isfinite(), score, torch.inf).amin(dim=2, keepdim=True)
        near = (finite - border).abs() <= NEAR * finite[finite.isfinite()].std()
        assert ((stored == chosen) | near).all(), f"s{stage}.layer{layer}.kept: tokens differ without a tie"
        self.settled += int((stored != chosen).any(dim=2).sum())
        return stored.nonzero()[:, 2].view(selection.shape)


class SelectingRun(TraceRun):
    trace: TracedSelections

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        self.trace.layers += 1
        return TracedCache(spec, workspace, self.trace, self.trace.layers - 1)


class TracedCache(ScaleKVCache):
    def __init__(self, spec: CacheSpec, workspace: Workspace, trace: TracedSelections, layer: int) -> None:
        super().__init__(spec, workspace, trace.method)
        self.trace, self.layer = trace, layer

    def attend(self, seen: AttentionCall) -> Tensor:
        trace, stage = self.trace, seen.tokens.stage
        out = super().attend(seen)
        trace.before[stage.index, self.layer] = seen.view.end
        after = self.length
        if stage.last:
            keep = trace.budgets[stage.index][self.layer] if stage.index in trace.budgets else seen.view.end
            if keep < seen.view.end:
                self.selected(seen, keep)
            after = min(keep, seen.view.end)
        trace.after[stage.index, self.layer] = after
        return out

    def selected(self, seen: AttentionCall, keep: int) -> Tensor:
        trace, stage, name = self.trace, seen.tokens.stage.index, f"s{seen.tokens.stage.index}.layer{self.layer}"
        found, score = super().selected(seen, keep).transpose(1, 2), self.scores(seen)[0]
        selection = trace.as_stored(found, score, stage, self.layer)
        trace.selections[stage, self.layer] = selection
        length = math.sqrt(seen.q.shape[-1])  # of the library's keys, whose vectors have a mean square of 1
        keys = seen.view.keys.narrow(1, 0, seen.view.end).transpose(1, 2) / length
        trace.read |= {f"{name}.kept": lambda: selection, f"{name}.score": lambda: score / length, f"{name}.keys": lambda: keys}
        for after in [stored for stored in trace.expected.tensors if stored.startswith(f"{name}.keys_after.sub")]:
            kept = keys.gather(2, selection[..., None].expand(-1, -1, -1, keys.shape[-1]))
            step = int(after.rpartition("sub")[2])
            trace.read[after] = lambda kept=kept, step=step: kept[:, :, ::step]
        return selection.transpose(1, 2)


def compare_raw_selections(expected: Expected, names: list[str], pooling: int) -> None:
    """Selections alone, from stored keys and queries of the window."""
    for name in names:
        queries, keys = (expected.tensors[f"{name}.{part}"].transpose(1, 2) for part in ("window_queries", "keys"))
        expected.used.add(f"{name}.window_queries")
        cells, cached = expected.tensors[f"{name}.window_queries"].shape[2], keys.shape[1]
        score = expected.tensors[f"{name}.score"]
        window = score.isinf().nonzero()[:, 2].view(*score.shape[:2], cells)[:, 0]
        found = key_scores(keys, queries, window, pooling)
        assert torch.equal(found.isinf(), score.isinf()) and torch.allclose(
            found.clamp(min=-1e9), score.clamp(min=-1e9), rtol=1e-5, atol=1e-4
        )
        kept = expected.tensors[f"{name}.kept"].long()
        chosen = top_as_released(score, window, kept.shape[2])
        assert torch.equal(score.gather(2, chosen).sort(dim=2).values, score.gather(2, kept).sort(dim=2).values), f"{name}: selection"
        assert cached > kept.shape[2]
