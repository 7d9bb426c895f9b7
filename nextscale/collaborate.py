"""Two pipelines as one: a large model drafts the first stages of an image, and a small one goes on from its codes (CoDe)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .errors import SettingError
from .methods.code import PAIRS, CoDe, released_sampling
from .methods.method import Method
from .methods.skip import SkipStages
from .models.base import NextScaleModel
from .models.text_context import masked_length
from .planning.cost import RequestCost, Workload, request_cost
from .planning.memory import RequestMemory, request_memory, weights_bytes
from .report import Report
from .request import Revise, SeedLike, as_sampled
from .text.features import TextFeatures
from .tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from .output import Output
    from .pipeline import Pipeline


@dataclass
class Refiners:
    """Pipelines of smaller models, by name; one that is asked for is opened once."""

    open: Callable[[str], Pipeline] | None = None  # as the pipeline's own model was
    fitting: Sequence[str] = ()  # names of models that could be opened
    known: dict[str, Pipeline] = field(default_factory=dict)

    def partner(self, drafter: Pipeline, name: str | None) -> Pipeline:
        """The pipeline that refines what `drafter` drafts; SettingError if there is none or they do not fit."""
        name = partner_name(drafter.name, name, self.fitting)
        if name not in self.known:
            if self.open is None:
                raise SettingError(
                    f"CoDe: {drafter.name} has no refiner {name!r}: add one, pipe.refiners.known[{name!r}] = another pipeline"
                )
            self.known[name] = self.open(name)
        refiner = self.known[name]
        require_pair(*(Half(pipe.name, pipe.model, pipe.tokenizer) for pipe in (drafter, refiner)))
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


class Half(NamedTuple):
    """One model of a pair."""

    name: str
    model: NextScaleModel
    tokenizer: Tokenizer


def require_pair(drafter: Half, refiner: Half) -> None:
    """SettingError unless the refiner can go on from the drafter's codes. Which files both tokenizers come from, `load` has compared."""
    first, second = drafter.model, refiner.model
    if first.family != second.family or first.logit_shape != second.logit_shape:
        raise SettingError(
            f"CoDe: {drafter.name} and {refiner.name} do not have the same codes: choose two models of one family and tokenizer"
        )
    config = getattr(drafter.tokenizer, "config", None)
    if config != getattr(refiner.tokenizer, "config", None):
        raise SettingError(f"CoDe: {drafter.name} and {refiner.name} have different tokenizers: choose two models that share one")


def require_plain(compute_mask: bool, revise: Revise, given: Sequence[Tensor]) -> None:
    """SettingError where a call of CoDe asks for what one model alone can do."""
    if compute_mask or given or revise is not as_sampled:
        raise SettingError("CoDe takes no compute_mask, revise and given: leave them out")


def collaborate(drafter: Pipeline, method: CoDe, prompt: Any, seed: SeedLike, call: dict[str, Any]) -> Output:
    """Generates with both models; `call` is what else the pipeline's call was given."""
    schedule = drafter.settings.schedules.choose(call.pop("size"), call.pop("aspect"))
    call["size"], draft = schedule, method.drafted(schedule)
    if method.as_released:
        given = {name for name, value in call.items() if value is not None}
        call |= {name: value for name, value in released_sampling(len(schedule)).items() if name not in given}
    if draft == len(schedule):
        return drafter(prompt, seed=seed, method=Method(), **call)
    refiner = drafter.refiners.partner(drafter, method.refiner)
    refiner.model.check_schedule(schedule)  # before anything is drafted
    prompts = drafter.reader.read(prompt)
    prompt = prompts if isinstance(prompts, TextFeatures) else prompt  # encoded once
    first, second = twice(secrets.randbits(32) if seed is None else seed)
    kept, call["keep_stages"] = call["keep_stages"], False  # the refiner's have the drafted ones, too
    sketch = drafter(prompt, seed=first, method=SkipStages(len(schedule) - draft), decode=False, **call)
    call["keep_stages"] = kept
    final = refiner(prompt, seed=second, method=Method(), given=sketch.codes, **call)
    reads = drafter.model.block_config.text is not None
    workload = Workload(schedule, len(prompts), sketch.report.stages[0].cfg_branches == 2, masked_length(prompts.longest) if reads else 0)
    spent, dense = pair_cost(drafter.model, refiner.model, workload, draft), request_cost(drafter.model, workload)
    return replace(final, report=pair_report(method, sketch.report, final.report, spent.share(dense), draft))


def twice(seed: Any) -> tuple[Any, Any]:
    """A seed for each model, both with the same random numbers: a generator is copied as it is."""
    if not isinstance(seed, torch.Generator):
        return seed, seed
    return seed, torch.Generator(seed.device).set_state(seed.get_state())


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


def pair_report(method: CoDe, sketch: Report, final: Report, cost_share: float, draft: int) -> Report:
    """What both have done. The refiner reads drafted stages together with the first one that it generates, whose time that is."""
    reading = sum(stage.seconds for stage in final.stages[:draft])
    first = replace(final.stages[draft], seconds=final.stages[draft].seconds + reading)
    return replace(
        final,
        model=f"{sketch.model} + {final.model}",
        method=method.label,
        stages=(*sketch.stages[:draft], first, *final.stages[draft + 1 :]),
        cost_share=cost_share,
        condition_seconds=sketch.condition_seconds + final.condition_seconds,
        peak_memory=max(sketch.peak_memory, final.peak_memory),
        planned_memory=max(sketch.planned_memory, final.planned_memory),
    )
