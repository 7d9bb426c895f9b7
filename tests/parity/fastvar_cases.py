"""Cases of FastVAR on Infinity and on HART."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from nextscale import Method, Schedule, Stage, Tokens
from nextscale.cache import StageMemory
from nextscale.methods import fastvar
from nextscale.methods.fastvar import FastVAR, PrunedBlocks, memory_key
from nextscale.methods.token_ops import distance_from_mean, top_share
from nextscale.models.blocks import Block, Sublayer
from nextscale.models.context import ForwardContext
from tests.parity import hart_cases, infinity_cases
from tests.parity.accelerated import SAMPLING, SettledBits, stated_tolerance
from tests.parity.compare import Expected, Reading, Readings, Tolerance
from tests.parity.infinity_cases import Read, schedule_of
from tests.parity.settings import understood
from tests.parity.trace import Trace

INFINITY_SUBLAYERS, INFINITY_CACHED = ("sa", "ca", "ffn"), ("self_attn", "cross_attn", "ffn")
INFINITY_CACHED_SIDE = 24
HART_RATIOS, HART_CACHED_SIDE = {48: 0.5, 64: 0.75}, 36  # by the side of a stage, as the program finds them
HART_SUBLAYERS = ("attn", "ffn")
LARGE_GAP = 2e-5  # of scores, relative: where no two tokens at the threshold are closer, every selection must be the stored one
IMAGE = Tolerance(3e-3)
RESTORED = Tolerance(1e-6)  # sums of two numbers

StoredChoice = Callable[[Stage, int, int], Tensor | None]
"""Which tokens a sublayer of a block keeps at a stage, [R, N]; None if nothing is stored about it."""


class Place(NamedTuple):
    """The sublayer of a block, at a stage, that chose tokens."""

    stage: int
    layer: int
    sublayer: int


class Choice(NamedTuple):
    x: Tensor  # [R, N, C], the candidates
    score: Tensor  # [R, N], distances from the mean
    selection: Tensor  # [R, K], in raster order

    @property
    def mask(self) -> Tensor:
        return mask_of(self.selection, self.score.shape[1])


def mask_of(selection: Tensor, tokens: int) -> Tensor:
    """Positions [R, K] to [R, N]."""
    return torch.zeros(selection.shape[0], tokens, dtype=torch.bool).scatter(1, selection, True)


class Choices:
    """Tokens that FastVAR keeps, by sublayer.

    If only tokens that rounding may have swapped differ from the stored run, the stored ones are used. Otherwise one near-tie would change
    everything after it.

    `tie`: maximum distance of such tokens from the threshold, in distances from the mean.
    """

    def __init__(self, layers: range, sublayers: int, stored: StoredChoice, tie: float) -> None:
        self.layers, self.sublayers, self.stored, self.tie = layers, sublayers, stored, tie
        self.made: dict[Place, Choice] = {}
        self.settled = 0  # rows of selections
        self._x = torch.empty(0)

    @contextmanager
    def traced(self) -> Iterator[None]:
        with mock.patch.object(fastvar, "distance_from_mean", self._score), mock.patch.object(fastvar, "top_share", self._choose):
            yield
        if self.settled:
            warnings.warn(f"{self.settled} near-ties were settled as in the stored run", stacklevel=3)

    def _score(self, x: Tensor, tokens: Tokens) -> Tensor:
        self._x = x
        return distance_from_mean(x, tokens)

    def _choose(self, tokens: Tokens, score: Tensor, ratio: float) -> tuple[Tensor, Tokens]:
        layer, sublayer = divmod(len(self.at(tokens.stage)), self.sublayers)
        assert layer < len(self.layers), f"blocks beyond {self.layers} choose tokens at stage {tokens.stage.index}"
        place = Place(tokens.stage.index, self.layers[layer], sublayer)
        selection, kept = top_share(tokens, score, ratio)
        stored = self.stored(tokens.stage, place.layer, sublayer)
        if stored is not None:
            selection, settled = settle(score, selection, stored, self.tie)
            kept = tokens.take(selection) if settled else kept
            self.settled += settled
        self.made[place] = Choice(self._x, score, selection)
        return selection, kept

    def at(self, stage: Stage) -> dict[Place, Choice]:
        return {place: choice for place, choice in self.made.items() if place.stage == stage.index}

    def added(self, trace: Trace) -> dict[Place, Tensor]:
        """Returns the updates that every sublayer adds to all tokens of its stage, including restored ones: [R, N, C]."""
        end = {stage: trace.outputs[stage, self.layers[-1]] for stage in {place.stage for place in self.made}}
        following = {first: self.made[second].x for first, second in pairwise(self.made) if first.stage == second.stage}
        return {place: following.get(place, end[place.stage]) - choice.x for place, choice in self.made.items()}


def settle(score: Tensor, selection: Tensor, stored: Tensor, tie: float) -> tuple[Tensor, int]:
    """Takes `stored` [R, N] in place of `selection` [R, K] in rows where all tokens in which they differ score like the threshold.

    Returns the selection and the number of such rows.
    """
    chosen = mask_of(selection, score.shape[1])
    threshold = score.gather(1, selection).amin(dim=1, keepdim=True)
    near = ((chosen == stored) | ((score - threshold).abs() <= tie)).all(dim=1) & (chosen.sum(dim=1) == stored.sum(dim=1))
    near &= (chosen != stored).any(dim=1)
    others = stored.byte().argsort(dim=1, descending=True, stable=True)[:, : selection.shape[1]]
    return torch.where(near[:, None], others, selection), int(near.sum())


def rounding_of_distances(noise: float, width: int) -> float:
    """Returns the maximum change of the difference of two tokens' distances if every entry of every token changes by `noise`."""
    return 4 * noise * math.sqrt(width)  # token and mean of both


def in_order_of(stored: Tensor, selection: Tensor) -> Tensor:
    """Returns `selection` [R, K] in the order of `stored` for rows where both have the same tokens."""
    same = (stored.sort(dim=1).values == selection.sort(dim=1).values).all(dim=1, keepdim=True)
    return torch.where(same, stored, selection)


# --- Infinity


def replay_fastvar_infinity(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    noise = case["noise_max_abs_other_attention_kernel_and_2_threads"]
    understood({"sampling": case["sampling"]}, (), SAMPLING)
    pipe = infinity_cases.build(folder, case)
    schedule = schedule_of(case["config"]["scale_schedule"], case["config"]["h_div_w_template"])
    pruned = case["pruned_layers"] or (0, -1)
    layers = range(pruned[0], pruned[-1] + 1)
    near_ties = case["min_relative_selection_gap"] is not None and case["min_relative_selection_gap"] < LARGE_GAP
    tie = rounding_of_distances(noise["hidden"], case["config"]["embed_dim"]) if near_ties else 0.0
    choices = Choices(layers, len(INFINITY_SUBLAYERS), partial(stored_choice, expected, layers), tie)
    square = all(stage.height == stage.width for stage in schedule)
    # On other aspect ratios the reference implementation mostly runs as if it were dense, and fails on the rest.
    trace = Trace(observed=(len(pipe.model.blocks) - 1,), method=FastVAR(as_released=True) if square else Method())
    with choices.traced(), SettledBits(pipe.tokenizer, expected, noise["logits"]) as revise:
        read = infinity_cases.generation(pipe, case, expected, trace, seed=0, revise=revise, greedy=True).read
    check_counts(case, schedule, choices, trace)
    read |= choice_readings(expected, schedule, choices, trace) | cache_readings(pipe.model.stack, schedule, trace.memory)
    infinity_cases.compare(expected, read, stated_tolerance(case), {"image_float": IMAGE})


def unpacked(expected: Expected, stage: Stage) -> Tensor | None:
    """Returns the kept tokens of a stage, [layers, sublayers, R, cells]."""
    packed = expected.tensors.get(f"s{stage.index}.kept_mask_packed")
    return None if packed is None else torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1, count=stage.cells)).bool()


def stored_choice(expected: Expected, layers: range, stage: Stage, layer: int, sublayer: int) -> Tensor | None:
    masks = unpacked(expected, stage)
    return None if masks is None else masks[layers.index(layer), sublayer]


def check_counts(case: dict[str, Any], schedule: Schedule, choices: Choices, trace: Trace) -> None:
    """Fails unless as many sublayers keep as many tokens as the case says in words."""
    for stage in schedule:
        made = choices.at(stage)
        said = case["pruned"].get(str((1, *stage.size)))
        assert len(made) == (len(choices.layers) * choices.sublayers if said else 0), f"{len(made)} selections at stage {stage.index}"
        assert all(choice.selection.shape[1] == said["kept"] for choice in made.values()), f"pruned: stage {stage.index}"
        assert not made or trace.groups[stage.index] == [choices.layers], f"pruned_layers: stage {stage.index}"


def choice_readings(expected: Expected, schedule: Schedule, choices: Choices, trace: Trace) -> Read:
    read: Read = {}
    added = choices.added(trace)
    for place, choice in choices.made.items():
        name = f"s{place.stage}.layer{place.layer}.{INFINITY_SUBLAYERS[place.sublayer]}"
        read[f"{name}.score"] = lambda choice=choice: choice.score**2
        read[f"{name}.restored"] = lambda place=place: added[place]
        order = f"{name}.kept_order"
        read[order] = lambda order=order, choice=choice: in_order_of(expected.tensors[order], choice.selection)
    for stage in schedule:
        masks = [choice.mask for choice in choices.at(stage).values()]
        read[f"s{stage.index}.kept_mask_packed"] = lambda masks=masks: packed_bits(torch.stack(masks).unflatten(0, (-1, choices.sublayers)))
    return read


def packed_bits(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.numpy(), axis=-1))


def cache_readings(blocks: Sequence[Block], schedule: Schedule, memory: StageMemory) -> Read:
    return {
        f"cache.layer{block.layer}.{name}": partial(cached, memory, stage, block, sublayer)
        for stage in schedule
        for block in blocks
        for sublayer, name in enumerate(INFINITY_CACHED)
        if stage.size == (INFINITY_CACHED_SIDE, INFINITY_CACHED_SIDE)
    }


def cached(memory: StageMemory, stage: Stage, block: Block, sublayer: int) -> Tensor:
    """Returns the output of a sublayer at the cached stage: [R, cells, C]."""
    return memory.fill(memory_key(block.layer, sublayer), Tokens(stage))


# --- HART


def replay_fastvar_hart(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    pipe = hart_cases.build(folder, case)
    make_sets(expected)
    noise = case["checks"]["weights_perturbed_2e7_max_abs_diff"]["x_out"]
    tie = rounding_of_distances(noise, case["transformer_config"]["embed_dim"])

    def run(**noise: Any) -> Readings:
        choices = Choices(range(len(pipe.model.blocks)), len(HART_SUBLAYERS), partial(stored_hart_choice, expected), tie)
        schedule = pipe.settings.schedules.choose(None, None)
        ratios = {stage.index: HART_RATIOS[stage.width] for stage in schedule if stage.width in HART_RATIOS}
        cached = next(stage.index for stage in schedule if stage.width == HART_CACHED_SIDE)
        trace = Trace(hart_cases.ends_of(pipe), **noise, method=FastVAR(ratios, cached))
        with choices.traced():
            found = hart_cases.readings(pipe, case["sampling"], expected, trace)
        found |= hart_choice_readings(schedule, choices)
        return found | hart_cache_readings(expected, schedule, pipe.model.stack, trace.memory)

    hart_cases.compare_generation(pipe, case["sampling"], expected, run)
    for unit in sorted({name.split(".")[1] for name in expected.tensors if name.startswith("unit.")}):
        compare_unit(expected, f"unit.{unit}")


def hart_choice_name(side: int, layer: int, sublayer: int) -> str:
    return f"keep.s{side}.block{layer}.{HART_SUBLAYERS[sublayer]}"


def make_sets(expected: Expected) -> None:
    """Converts indices [R, K] to masks [R, cells], because the order of kept tokens does not matter."""
    for name, stored in expected.tensors.items():
        if match := re.fullmatch(r"keep\.s(\d+)\..*", name):
            expected.tensors[name] = mask_of(stored.long(), int(match[1]) ** 2)


def stored_hart_choice(expected: Expected, stage: Stage, layer: int, sublayer: int) -> Tensor | None:
    return expected.tensors.get(hart_choice_name(stage.width, layer, sublayer))


def hart_choice_readings(schedule: Schedule, choices: Choices) -> Readings:
    return {
        hart_choice_name(schedule[place.stage].width, place.layer, place.sublayer): Reading(choice.mask, None)
        for place, choice in choices.made.items()
    }


def hart_cache_readings(expected: Expected, schedule: Schedule, blocks: Sequence[Block], memory: StageMemory) -> Readings:
    """Returns the cached maps at the stored number of equally spaced tokens."""
    found: Readings = {}
    for name, stored in expected.tensors.items():
        if match := re.fullmatch(r"cache(\d+)\.block(\d+)\.(\w+)", name):
            (stage,) = (stage for stage in schedule if stage.width == int(match[1]))
            tokens = cached(memory, stage, blocks[int(match[2])], HART_SUBLAYERS.index(match[3]))
            found[name] = Reading(tokens[:, :: tokens.shape[1] // stored.shape[1]], hart_cases.HIDDEN)
    return found


class StoredSublayer:
    """A block with one sublayer, which gives stored answers for the tokens that are expected to be chosen."""

    layer = 0

    def __init__(self, keep: Tensor, answers: Tensor) -> None:
        self.keep, self.answers = keep, answers
        self.asked = self.index = torch.empty(0)

    def sublayers(self, ctx: object) -> tuple[Sublayer]:
        return (Sublayer(nn.Identity(), None, None, None, self.answer, None),)

    def answer(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        assert tokens.index is not None
        self.asked, self.index = x, tokens.index
        order = self.keep.argsort(dim=1)  # raster order, in which the library keeps tokens
        return self.answers.gather(1, order[..., None].expand_as(self.answers))


def compare_unit(expected: Expected, name: str) -> None:
    """Compares one selection and restoration, at a ratio that keeps the stored number of tokens."""
    x, cache, answers, keep = (expected.input(f"{name}.{end}") for end in ("x", "cache", "branch_out", "keep"))
    tokens = Tokens(square(x.shape[1]))
    sublayer, memory = StoredSublayer(keep, answers), StageMemory()
    block: Any = sublayer
    memory.store(memory_key(0, 0), cache, Tokens(square(cache.shape[1])))
    span = PrunedBlocks(range(1), (x.shape[1] - keep.shape[1] + 0.5) / x.shape[1])
    nothing: Any = None
    result = span([block], x, tokens, ForwardContext(x.shape[0], nothing, (), memory, "cond", nothing))
    expected.equal(f"{name}.keep", in_order_of(keep, sublayer.index))
    order = keep.argsort(dim=1).argsort(dim=1)  # from raster order to the stored one
    expected.close(f"{name}.merged", sublayer.asked.gather(1, order[..., None].expand_as(sublayer.asked)), RESTORED)
    expected.close(f"{name}.unmerged", result - x, RESTORED)


def square(cells: int) -> Stage:
    return Stage(0, math.isqrt(cells), math.isqrt(cells), 0, True)
