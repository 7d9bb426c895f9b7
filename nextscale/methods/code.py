"""CoDe (Chen et al., 2025): a large model drafts the first stages, and a small one of the same family refines what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import SettingError
from ..models.text_context import masked_length
from ..planning.cost import RequestCost, Workload, request_cost
from ..planning.memory import RequestMemory, request_memory, weights_bytes
from ..stage import Schedule
from ..tokenizers.base import Tokenizer
from ..validation import is_int, require_flags
from .method import DENSE, Method, Plans, StagePlan
from .skip import SkipStages
from .strategy import Call, Strategy

if TYPE_CHECKING:
    from ..models.base import NextScaleModel

REFINED = 2  # last stages that are refined: 8 of 10 are drafted
PAIRS = {"var-d30": "var-d16", "flexvar-d24": "flexvar-d16", "star-256": "star-256-d16"}
"""The small model that refines what a large one has drafted. VAR's pair is published, the others are ours. Of Infinity's published sizes
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
    before the refiner begins. There is no acceptance test: what is drafted stays. The published pairs are also tuned for their stages;
    any two models of a family work without.

    The knobs that matter:
    draft: how many stages are drafted. None is all but two, as published (8 of 10; 6 to 9 were tried). All stages is the drafter alone.
    refiner: the name of the small model, which is loaded as the large one was; None is the known partner of the pipeline's model.

    To tinker with:
    as_released: guidance and sampling of the released script, wherever the call gives none: strength 1.5, top_k 600, top_p 0.96, and a
        temperature of 1.1 up to stage 6 that divides the logits after they were filtered.
    """

    exclusive = frozenset({"alone"})

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
        """How many stages are drafted."""
        draft = max(1, len(schedule) - REFINED) if self.draft is None else self.draft
        if draft > len(schedule):
            raise SettingError(f"CoDe: draft {draft} is more than the {len(schedule)} stages of this schedule")
        return draft

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        """Returns what the drafter does."""
        draft = self.drafted(schedule)
        return (DENSE,) * draft + (StagePlan(skip=True),) * (len(schedule) - draft)

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
        refiner = pipe.partners.partner(pipe, self.refiner)
        refiner.model.check_schedule(schedule)  # before anything is drafted
        same = call["seed"].only(range(len(call["prompt"])))
        sketch = pipe(**{**call, "method": SkipStages(len(schedule) - draft), "decode": False, "keep_stages": False})
        final = refiner(**{**call, "method": Method(), "seed": same, "prefix_codes": sketch.codes})  # its stages have the drafted ones, too
        text = masked_length(call["prompt"].longest) if pipe.model.block_config.text is not None else 0
        workload = Workload(schedule, len(call["prompt"]), sketch.report.stages[0].cfg_branches == 2, text)
        spent = pair_cost(pipe.model, refiner.model, workload, draft).share(request_cost(pipe.model, workload))
        return replace(final, report=pair_report(sketch.report, final.report, spent, draft))


# --- the pair


@dataclass
class Partners:
    """Pipelines of smaller models, by name; one that is asked for is opened once."""

    open: Callable[[str], Any] | None = None  # as the pipeline's own model was
    fitting: Sequence[str] = ()  # names of models that could be opened
    known: dict[str, Any] = field(default_factory=dict)

    def partner(self, drafter: Any, name: str | None) -> Any:
        """The pipeline that refines what `drafter` drafts; SettingError if there is none or they do not fit."""
        name = partner_name(drafter.name, name, self.fitting)
        if name not in self.known:
            if self.open is None:
                raise SettingError(
                    f"CoDe: {drafter.name} has no refiner {name!r}: add one, pipe.partners.known[{name!r}] = another pipeline"
                )
            self.known[name] = self.open(name)
        refiner = self.known[name]
        require_pair(*(Partner(pipe.name, pipe.model, pipe.tokenizer) for pipe in (drafter, refiner)))
        if refiner.model.device != drafter.model.device:
            refiner.to(drafter.model.device)
        refiner.tokenizer = drafter.tokenizer  # so that its weights are there once
        refiner.captures.decode_with(refiner.tokenizer)
        return refiner


def partner_name(drafter: str, chosen: str | None, fitting: Sequence[str]) -> str:
    """The refiner that is chosen, or known for this drafter; SettingError if there is none, with one that fits where there is any."""
    name = PAIRS.get(drafter) if chosen is None else chosen
    if name is not None:
        return name
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
    """MACs of both: the refiner also reads what was drafted."""
    plans = SkipStages(len(workload.schedule) - draft).forecast(drafter, workload.schedule, workload.guided)
    return request_cost(drafter, workload, plans).beside(request_cost(refiner, replace(workload, given=draft)))


def pair_memory(drafter: NextScaleModel, refiner: NextScaleModel, tokenizer: Tokenizer, workload: Workload, draft: int) -> RequestMemory:
    """One model runs after the other, and both sets of weights stay."""
    plans = SkipStages(len(workload.schedule) - draft).forecast(drafter, workload.schedule, workload.guided)
    first, second = request_memory(drafter, tokenizer, workload, plans), request_memory(refiner, tokenizer, workload)
    largest = {name: max(getattr(first, name), getattr(second, name)) for name in ("cache", "text", "stored", "generating", "decoding")}
    return RequestMemory(weights=first.weights + weights_bytes(refiner), **largest)


def pair_report(sketch: Any, final: Any, cost_share: float, draft: int) -> Any:
    """What both have done. The refiner reads drafted stages together with the first one that it generates, whose time that is."""
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
