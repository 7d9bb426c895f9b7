"""CoDe (Chen et al., 2025): a large model drafts the first stages, and a small one of the same family refines what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from nextscale.errors import SettingError
from nextscale.loading.load import without_weights
from nextscale.loading.presets import MODELS, ModelSpec, model_spec
from nextscale.methods.method import DENSE, Method, Plans, StagePlan
from nextscale.methods.skip import SkipStages
from nextscale.methods.strategy import Call, Planned, Strategy
from nextscale.models.text_context import masked_length
from nextscale.planning.cost import RequestCost, StageCost, Workload, request_cost
from nextscale.planning.memory import RequestMemory, request_memory, weights_bytes
from nextscale.stage import Schedule
from nextscale.tokenizers.base import Tokenizer
from nextscale.validation import is_int, require_flags

from .rewind import only

if TYPE_CHECKING:
    from nextscale.models.base import NextScaleModel
    from nextscale.pipeline import Pipeline

REFINED = 2  # last stages that are refined: 8 of 10 are drafted
PAIRS = {"var-d30": "var-d16", "flexvar-d24": "flexvar-d16", "star-256": "star-256-d16"}
"""The small model that refines the draft of a large one. VAR's pair is published, the others are ours. Of Infinity's published sizes
no two share a tokenizer."""

HOTTER, HOT_STAGES = 1.1, 7


def released_sampling(stages: int) -> Mapping[str, Any]:
    """The settings of the released script that samples 50,000 images; guidance is VAR's ramp up to this strength."""
    temperature = tuple(HOTTER if stage < HOT_STAGES else 1.0 for stage in range(stages))
    return MappingProxyType({"guidance": 1.5, "top_k": 600, "top_p": 0.96, "temperature": temperature, "filter_first": True})


@dataclass(frozen=True)
class CoDe(Strategy):
    """The pipeline's own model drafts the first stages; a smaller model reads them in one pass and generates the others.

    Both models share the tokenizer and the schedule. The drafter's keys and values, which would be largest at the last stages, are gone
    before the refiner begins. Drafted stages are never rejected. The published pairs are also tuned for their stages;
    any two models of a family work without.

    The knobs that matter:
    draft: how many stages are drafted. None is all but two, as published (8 of 10; 6 to 9 were tried). All stages is the drafter alone.
    refiner: the name of the small model, which is loaded as the large one was; None is the known partner of the pipeline's model.

    To tinker with:
    as_released: guidance and sampling of the released script, wherever the call gives none: strength 1.5, top_k 600, top_p 0.96, and a
        temperature of 1.1 up to stage 6 that divides the logits after they were filtered.
    """

    exclusive = frozenset({"alone"})
    second_model = True

    draft: int | None = None
    refiner: str | None = None
    as_released: bool = False

    def __post_init__(self) -> None:
        require_flags(self, "as_released")
        if self.draft is not None and not is_int(self.draft, 1):
            raise SettingError(f"draft is the number of stages that the large model generates, 1 or more; got {self.draft!r}")
        if self.refiner is not None and not isinstance(self.refiner, str):
            raise SettingError(f"refiner is the name of a model; got {self.refiner!r}")

    def drafted(self, schedule: Schedule) -> int:
        """Returns the number of drafted stages."""
        draft = max(1, len(schedule) - REFINED) if self.draft is None else self.draft
        if draft > len(schedule):
            raise SettingError(f"CoDe: draft {draft} is more than the {len(schedule)} stages of this schedule")
        return draft

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        """Returns the drafter's plans."""
        draft = self.drafted(schedule)
        return (DENSE,) * draft + (StagePlan(skip=True),) * (len(schedule) - draft)

    def planned(self, spec: ModelSpec, model: NextScaleModel, tokenizer: Tokenizer, workload: Workload) -> Planned:
        name, draft = partner_name(spec.name, self.refiner), self.drafted(workload.schedule)
        require_shared_tokenizer(spec, model_spec(name))
        refiner, its_tokenizer = without_weights(model_spec(name), model.dtype, model.quantize)
        require_pair(Partner(spec.name, model, tokenizer), Partner(name, refiner, its_tokenizer))
        refiner.check_schedule(workload.schedule)
        refines = draft < len(workload.schedule)
        cost = pair_cost(model, refiner, workload, draft) if refines else request_cost(model, workload)
        memory = pair_memory(model, refiner, tokenizer, workload, draft)
        return Planned(f"{spec.name} + {name}", cost, memory, [refiner] if refines else [])

    def generate(self, pipe: Any, call: Call, beside: Method) -> Any:
        """Generates with both models."""
        if call["compute_mask"] or call["prefix_codes"] or call["revise"] is not None:
            raise SettingError("CoDe takes no compute_mask, revise and prefix_codes: leave them out")
        schedule, draft = call["size"], self.drafted(call["size"])
        if self.as_released:
            given = {name for name, value in call.items() if value is not None}
            call = {**call, **{name: value for name, value in released_sampling(len(schedule)).items() if name not in given}}
        if draft == len(schedule):
            return pipe(**{**call, "method": Method()})
        refiner = refiner_of(pipe, self.refiner)
        refiner.model.check_schedule(schedule)  # before anything is drafted
        same = only(call["seed"], range(len(call["prompt"])))
        sketch = pipe(**{**call, "method": SkipStages(len(schedule) - draft), "decode": False, "keep_stages": False})
        final = refiner(**{**call, "method": Method(), "seed": same, "prefix_codes": sketch.codes})  # its stages have the drafted ones, too
        text = masked_length(call["prompt"].longest) if pipe.model.block_config.text is not None else 0
        workload = Workload(schedule, len(call["prompt"]), sketch.report.stages[0].cfg_branches == 2, text)
        spent = pair_cost(pipe.model, refiner.model, workload, draft).share(request_cost(pipe.model, workload))
        return replace(final, report=pair_report(sketch.report, final.report, spent, draft))


# --- the pair


def refiner_of(drafter: Pipeline, name: str | None) -> Pipeline:
    """Returns the pipeline that refines what `drafter` drafts. Raises SettingError if there is none or they do not fit."""
    name, partners = partner_name(drafter.name, name), drafter.partners
    if name not in partners.known:
        if partners.open is None:
            raise SettingError(f"CoDe: {drafter.name} has no refiner {name!r}: add one, pipe.partners.known[{name!r}] = another pipeline")
        if drafter.name in MODELS:  # before anything is fetched
            require_shared_tokenizer(MODELS[drafter.name], model_spec(name))
        partners.known[name] = partners.open(name)
    refiner: Pipeline = partners.known[name]
    require_pair(*(Partner(pipe.name, pipe.model, pipe.tokenizer) for pipe in (drafter, refiner)))
    if refiner.model.device != drafter.model.device:
        refiner.to(drafter.model.device)
    refiner.tokenizer = drafter.tokenizer  # so that its weights are there once
    refiner.captures.decode_with(refiner.tokenizer)
    return refiner


def smaller_models(name: str) -> tuple[str, ...]:
    """Returns the models of the same family, tokenizer and schedules with fewer blocks, smallest first."""

    def alike(spec: ModelSpec) -> tuple[Any, ...]:
        return type(spec.model), spec.tokenizer_weights, spec.settings.schedules

    drafter = MODELS.get(name)
    if drafter is None:
        return ()
    fitting = [one for one in MODELS.values() if alike(one) == alike(drafter) and one.model.depth < drafter.model.depth]
    return tuple(one.name for one in sorted(fitting, key=lambda one: one.model.depth))


def partner_name(drafter: str, chosen: str | None) -> str:
    """Returns the given refiner or the known one of this drafter. Raises SettingError if there is none, and names one that fits."""
    name = PAIRS.get(drafter) if chosen is None else chosen
    if name is not None:
        return name
    fitting = smaller_models(drafter)
    advice = f"name one, as in code:refiner={fitting[0]}" if fitting else "none has its family, tokenizer and stages; choose another method"
    raise SettingError(f"CoDe: no smaller model is known for {drafter}: {advice}")


class Partner(NamedTuple):
    """One model of a pair."""

    name: str
    model: NextScaleModel
    tokenizer: Tokenizer


def require_pair(drafter: Partner, refiner: Partner) -> None:
    """SettingError unless the refiner can go on from the drafter's codes. Which files both tokenizers come from, `load` has compared."""
    first, second = drafter.model, refiner.model
    if first.family != second.family or first.logit_shape != second.logit_shape:
        raise SettingError(
            f"CoDe: {drafter.name} and {refiner.name} do not have the same codes: choose two models of one family and tokenizer"
        )
    config = getattr(drafter.tokenizer, "config", None)
    if config != getattr(refiner.tokenizer, "config", None):
        raise SettingError(f"CoDe: {drafter.name} and {refiner.name} have different tokenizers: choose two models that share one")


def pair_cost(drafter: NextScaleModel, refiner: NextScaleModel, workload: Workload, draft: int) -> RequestCost:
    """Returns the MACs of both models; the refiner also reads the drafted stages."""
    plans = SkipStages(len(workload.schedule) - draft).forecast(drafter, workload.schedule, workload.guided)
    return both_costs(request_cost(drafter, workload, plans), request_cost(refiner, replace(workload, given=draft)))


def both_costs(first: RequestCost, second: RequestCost) -> RequestCost:
    """Returns the cost of two models at the same stages. Values per row are means over all rows."""
    return RequestCost(tuple(map(both_stages, first.stages, second.stages)))


def both_stages(first: StageCost, second: StageCost) -> StageCost:
    rows = first.rows + second.rows
    names = ("tokens", "computed", "keys", "held")
    mean = {name: (first.rows * getattr(first, name) + second.rows * getattr(second, name)) / max(rows, 1) for name in names}
    whole = {name: round(value) for name, value in mean.items() if name != "computed"}
    sums = {name: getattr(first, name) + getattr(second, name) for name in ("linear", "attention", "head")}
    return StageCost(first.stage, rows, computed=mean["computed"], **whole, **sums)


def pair_memory(drafter: NextScaleModel, refiner: NextScaleModel, tokenizer: Tokenizer, workload: Workload, draft: int) -> RequestMemory:
    """One model runs after the other, and both sets of weights stay."""
    plans = SkipStages(len(workload.schedule) - draft).forecast(drafter, workload.schedule, workload.guided)
    first, second = request_memory(drafter, tokenizer, workload, plans), request_memory(refiner, tokenizer, workload)
    largest = {name: max(getattr(first, name), getattr(second, name)) for name in ("cache", "text", "stored", "generating", "decoding")}
    return RequestMemory(weights=first.weights + weights_bytes(refiner), **largest)


def pair_report(sketch: Any, final: Any, cost_share: float, draft: int) -> Any:
    """Returns the joint report. The refiner reads drafted stages together with the first one that it generates, whose time that is."""
    reading = sum(stage.seconds for stage in final.stages[:draft])
    first = replace(final.stages[draft], seconds=final.stages[draft].seconds + reading)
    return replace(
        final,
        model=f"{sketch.model} + {final.model}",
        stages=(*sketch.stages[:draft], first, *final.stages[draft + 1 :]),
        cost_share=cost_share,
        condition_seconds=sketch.condition_seconds + final.condition_seconds,
        peak_memory=max(sketch.peak_memory, final.peak_memory),
        planned_memory=max(sketch.planned_memory, final.planned_memory),
    )


def require_shared_tokenizer(spec: ModelSpec, other: ModelSpec) -> None:
    if other.tokenizer_weights != spec.tokenizer_weights:
        raise SettingError(f"{spec.name} and {other.name} must share a tokenizer. Choose two models of one family.")
