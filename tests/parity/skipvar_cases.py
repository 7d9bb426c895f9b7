"""Cases of SkipVAR on Infinity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale import Schedule
from nextscale.methods.method import Plans, StagePlan
from nextscale.models import NextScaleModel
from nextscale_research.methods import SkipVAR, skipvar
from nextscale_research.methods.calibrate_skipvar import constant
from nextscale_research.methods.skipvar import features_of, gradient, preview_of, shrunk
from nextscale_research.methods.skipvar_models import Decisions, decisions_named, published_decisions
from tests.parity import infinity_cases
from tests.parity.accelerated import SettledBits, SettledDraws, drawn_bits, stated_tolerance
from tests.parity.compare import Expected, Tolerance
from tests.parity.infinity_cases import OFFICIAL_SAMPLER, Read, schedule_of, tokenizer_of
from tests.parity.settings import understood
from tests.parity.supplied import shaped
from tests.parity.trace import Trace, calls_to
from tests.parity.weights import fill

FIXED = {"decision_after_stage": 9, "old_after_stage": 8, "preview_stage": 4, "fft_radius_factor": skipvar.HIGH_FREQUENCIES}
SAID = {"decision_set_used", "decision_forced", "forced_note", "features", "decisions", "outcome_of_this_run", "uncond_model_asked"}
FEATURES, PICTURE = Tolerance(2e-4), Tolerance(1e-3)
DECIDED = 1e-2  # score by which the chosen class must lead where the features are our own
TABLE = 1e-9
DECIDED_FROM = 10  # stages up to which nothing is decided: the one after which it would be is the last or missing


def replay_skipvar(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    said = case["skipvar"]
    understood(said, {*SAID, "conditional_only_stages"}, FIXED)
    pipe = infinity_cases.build(folder, case)
    schedule = schedule_of(case["config"]["scale_schedule"], case["config"]["h_div_w_template"])
    trace = SteppedTrace(observed=(case["config"]["depth"] - 1,))
    sampled = "s0.uniform" in expected
    noise = case["noise_max_abs_other_attention_kernel_and_2_threads"]["logits"]
    rng = {"seed": StageDraws(expected, schedule), **OFFICIAL_SAMPLER} if sampled else {"seed": 0, "greedy": True}
    with (
        (SettledDraws if sampled else SettledBits)(pipe.tokenizer, expected, noise) as revise,
        calls_to(skipvar, "shrunk") as codes,
        calls_to(skipvar, "preview_of") as previews,
        calls_to(skipvar, "features_of") as features,
    ):
        generated = infinity_cases.generation(pipe, case, expected, trace, revise=revise, method=[method_of(said), trace], **rng)
    read: Read = generated.read | {
        "cache_len": lambda: torch.tensor([cache.lengths for cache in trace.caches]).T,
        "cache_rows": lambda: torch.tensor(trace.caches[0].rows),
    }
    assert bool(features) == (len(schedule) > DECIDED_FROM), "whether there is a decision"
    for call in features:
        compare_decisions(said.get("decisions") or {}, call.output)
        read["decision.features"] = lambda found=call.output: found[0].double()
    if any(scale != 1 for scale in case["cfg_list"]):
        rows = [done.rows for done in generated.stages.done]
        assert [stage for stage, count in enumerate(rows) if count == 1] == said.get("conditional_only_stages", []), (
            "conditional_only_stages"
        )
    for which, small, preview in zip(("old", "new") if features else (), codes, previews, strict=True):
        read |= preview_readings(f"decision.{which}", small.output, preview.output)
    special = {"features": FEATURES, "image_float": PICTURE, "preview": PICTURE, "sobel": PICTURE}
    infinity_cases.compare(expected, read, stated_tolerance(case), special)
    compare_table(expected)


class SteppedTrace(Trace):
    """Traces every call of SkipVAR beside it. Prefix codes are read stage by stage, as they were generated."""

    exclusive = frozenset({"cache"})

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return (StagePlan(observed=self.observed),) * len(schedule)


class StageDraws:
    """The stored random numbers of every stage, by its number of cells: all calls of a request get the same."""

    def __init__(self, expected: Expected, schedule: Schedule) -> None:
        names = {stage.cells: f"s{stage.index}.uniform" for stage in schedule}
        self.drawn = {cells: drawn_bits(expected.input(name)) for cells, name in names.items() if name in expected}

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return shaped(self.drawn[shape[1]], shape) if shape[1] in self.drawn else torch.ones(tuple(shape))

    uniform = normal = exponential


def method_of(said: dict[str, Any]) -> SkipVAR:
    """Returns the method as released, or with models that always take the decision that the case has forced."""
    method = SkipVAR(said["decision_set_used"], as_released=True)
    if said.get("decision_forced"):
        outcome = said["outcome_of_this_run"]
        object.__setattr__(method, "decisions", Decisions(constant(2, outcome["skip_last"]), constant(2, outcome["conditional_only_last"])))
    return method


def preview_readings(name: str, codes: Tensor, preview: Tensor) -> Read:
    return {f"{name}_codes": lambda: codes, f"{name}_preview": lambda: preview, f"{name}_sobel": lambda: gradient(preview)}


def compare_decisions(said: dict[str, Any], features: Tensor) -> None:
    """Compares the decisions of all sets of models for the features of one image [1, 2] with those in the case's text."""
    assert set(said) <= set(published_decisions()), "decisions"
    for name, stored in said.items():
        models = decisions_named(name)
        (outcome,) = models(features)
        for kind in ("skip", "uncond"):
            classifier = getattr(models, kind)
            assert list(classifier.classes) == stored[kind]["classes"], f"{name}: classes"
            scores = classifier.scores(features)[0]
            assert torch.allclose(scores, torch.tensor(stored[kind]["scores"], dtype=torch.float64), rtol=0, atol=DECIDED), (
                f"{name}: {kind}"
            )
            assert stored[kind]["margin"] < DECIDED or classifier(features) == [stored[kind]["class"]], f"{name}: {kind}"
        if min(stored[kind]["margin"] for kind in ("skip", "uncond")) >= DECIDED:
            assert {"skip_last": outcome.skipped, "conditional_only_last": outcome.unguided} == stored["outcome"], f"{name}: outcome"


def replay_skipvar_decisions(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    understood(case["skipvar"], (), FIXED)
    config = case["config"]
    tokenizer = tokenizer_of(config["vae"], bool(config["apply_spatial_patchify"]))
    fill(tokenizer, folder, case["weights_vae"], case)
    schedule = schedule_of(config["scale_schedule"], config["h_div_w_template"])
    small = schedule[FIXED["preview_stage"]]
    canvas = tokenizer.canvas(schedule, 1)
    for stored in case["canvases"]:
        name = f"c{stored['canvas']}"
        if f"{name}.old" not in expected:
            continue
        with torch.inference_mode():
            previews = []
            for which in ("old", "new"):
                latent = expected.input(f"{name}.{which}")
                previews.append(preview_of(latent, small, canvas))
                readings = preview_readings(f"{name}.{which}", shrunk(latent, tokenizer.map_size(small)), previews[-1])
                for stored_name, read in readings.items():
                    if stored_name in expected:
                        expected.close(stored_name, read(), PICTURE)
            features = features_of(*previews)
        expected.close(f"{name}.features", features[0].double(), FEATURES)
        compare_decisions(stored["decisions"], features)
    compare_table(expected)


def compare_table(expected: Expected) -> None:
    """Compares the classes that every set gives to made-up features, and by how much they lead, where a case has stored them."""
    if "table.features" not in expected:
        return
    features = expected.tensors["table.features"]
    expected.used.add("table.features")
    for name, models in published_decisions().items():
        if f"table.{name}.skip" not in expected:
            continue
        margins = []
        for kind in ("skip", "uncond"):
            classifier = getattr(models, kind)
            best, second = classifier.scores(features).topk(2, dim=1).values.unbind(dim=1)
            margins.append(best - second)
            expected.equal(f"table.{name}.{kind}", torch.tensor(classifier(features)))
        expected.close(f"table.{name}.margin", torch.stack(margins, dim=1), Tolerance(TABLE, 1e-6))
