"""Cases of StageVAR on Infinity."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale import Schedule
from nextscale.methods import stagevar
from nextscale.methods.stagevar import StageVAR
from tests.parity import infinity_cases
from tests.parity.accelerated import SAMPLING, SettledBits, stated_tolerance
from tests.parity.compare import Expected, Tolerance
from tests.parity.infinity_cases import Read, schedule_of
from tests.parity.settings import understood
from tests.parity.supplied import StoredRng
from tests.parity.trace import Call, Trace, calls_of, calls_to

PROBABILITY = Tolerance(1e-9, 1e-3)  # numbers below a thousandth


def replay_stagevar(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    understood({"sampling": case["sampling"]}, (), SAMPLING)
    pipe = infinity_cases.build(folder, {**case, "vae_weights_left_out": True})
    schedule = schedule_of(case["config"]["scale_schedule"], case["config"]["h_div_w_template"])
    last = len(pipe.model.blocks) - 1
    trace = Trace(observed=(last,), method=method_of(case, schedule))
    with (
        SettledBits(pipe.tokenizer, expected, case["noise_max_abs_2_threads"]["logits"]) as revise,
        calls_to(stagevar, "representatives") as chosen,
        calls_of({str(layer): block for layer, block in enumerate(pipe.model.blocks)}) as blocks,
    ):
        read = infinity_cases.generation(pipe, case, expected, trace, seed=stored_rng(expected, schedule), revise=revise, greedy=True).read
    assert read["kv_len_per_layer"]().tolist() == case["kv_len_per_layer"], "kv_len_per_layer"
    ranks = {(stage.index, group): rank for stage in schedule for group, rank in enumerate(case["ranks"].get(f"s{stage.index}", ()))}
    assert [call.output.shape[1] for call in chosen] == list(ranks.values()), "ranks"
    for (stage, group), call in zip(ranks, chosen, strict=True):
        layers, run = trace.groups[stage][group], case["stages_run"].index(stage)
        read |= group_readings(f"s{stage}.g{group}", call, blocks[str(layers[0])][run], blocks[str(layers[-1])][run])
        read[f"s{stage}.g{group}.in"] = lambda stage=stage, layers=layers: trace.inputs[stage, layers[0]]
        read[f"s{stage}.g{group}.restored"] = lambda stage=stage, layers=layers: trace.outputs[stage, layers[-1]]
    infinity_cases.compare(expected, read, stated_tolerance(case), {"probability": PROBABILITY})


def method_of(case: dict[str, Any], schedule: Schedule) -> StageVAR:
    """Returns the released method with the case's groups, alpha and skipped sides."""
    depth, groups = case["config"]["depth"], case["config"]["block_chunks"]
    assert depth % groups == 0, f"block_chunks: {groups} for {depth} blocks"
    guided = [stage.index for stage in schedule if stage.index not in case["guidance_off_stages"]]
    assert guided == list(range(len(guided))), "guidance never comes back"
    assert all(case["cfg_list"][stage] == 0 for stage in case["guidance_off_stages"]), "cfg_list"
    run = case["stages_run"]  # where guidance is off and nothing else is done, no width is skipped
    skipped = {stage.index: 0.0 for stage in schedule if stage.width in case["skipped_widths"] and stage.index not in run}
    low_rank = () if case["alpha"] is None else case["low_rank_widths"]
    low = [stage.index for stage in schedule if stage.width in low_rank and stage.index not in skipped]
    return StageVAR(
        guidance_off=len(guided),
        alphas={**skipped, **{stage: float(case["alpha"]) for stage in low}},
        groups=depth // groups,
        as_released=all(stage.height == stage.width for stage in schedule),  # elsewhere it only drops guidance
    )


def groups_in(expected: Expected, schedule: Schedule) -> Iterator[str]:
    """Names the groups whose random numbers are stored, in the order in which they run."""
    for stage in schedule:
        for group in count():
            if f"s{stage.index}.g{group}.q" not in expected:
                break
            yield f"s{stage.index}.g{group}"


def stored_rng(expected: Expected, schedule: Schedule) -> StoredRng:
    """Returns the random numbers that give the stored projections and representatives, in the documented order."""
    names = list(groups_in(expected, schedule))
    races = [race_won_by(expected.tensors[f"{name}.index"].long(), expected.tensors[f"{name}.probability"]) for name in names]
    projections = [expected.input(f"{name}.q") for name in names]
    return StoredRng(exponential=races, normal=[q * q.shape[-1] ** 0.5 for q in projections])


def race_won_by(index: Tensor, probability: Tensor) -> Tensor:
    """Returns exponential numbers [1, N] with which tokens of these probabilities are sampled in the order `index` [1, r]."""
    ratio = torch.linspace(2, 1, index.shape[1])
    return torch.full_like(probability, torch.inf).scatter(1, index, probability.gather(1, index) / ratio)


def group_readings(name: str, chosen: Call, first: Call, last: Call) -> Read:
    """Returns the stored tensors of a group: the call that chose its representatives, and those of its first and last block."""
    weight = chosen.inputs[0]
    return {
        f"{name}.probability": lambda: weight / weight.sum(dim=1, keepdim=True),
        f"{name}.index": lambda: chosen.output,
        f"{name}.projected": lambda: first.inputs[0],
        f"{name}.out": lambda: last.output,
    }
