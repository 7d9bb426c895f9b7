"""From what a caller gives to a request with everything resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .errors import SettingError
from .generate import check_cache, check_plans
from .guidance import GuidanceLike, ResolvedGuidance, resolve_guidance
from .methods.registry import MethodLike, resolve_method
from .planning.memory import ASSUMED_KEPT
from .prefix import checked_given
from .report import Stopwatch
from .request import Request, Revise, SeedLike, as_sampled, read_negative, read_prompts, resolve_seed
from .sampling import Sampling
from .schedules import AspectLike, SizeLike
from .stage import Schedule

if TYPE_CHECKING:
    from .pipeline import Pipeline


@dataclass(frozen=True, eq=False)
class Call:
    """What a caller gives; `Pipeline.__call__` says what each of it means."""

    prompt: Any
    seed: SeedLike = None
    size: SizeLike = None
    aspect: AspectLike = None
    guidance: GuidanceLike = None
    negative: Any = None
    method: MethodLike = None
    compute_mask: bool = False
    revise: Revise = as_sampled
    given: Sequence[Tensor] = ()
    sampling: dict[str, Any] = field(default_factory=dict)


def resolve(pipe: Pipeline, call: Call) -> Request:
    """What does not fit raises here, with the value, what was expected and a remedy."""
    asked = pipe.method if call.method is None else resolve_method(call.method)
    schedule = pipe.settings.schedules.choose(call.size, call.aspect)
    sampling = resolve_sampling(pipe, schedule, call.sampling)
    guided = ResolvedGuidance(resolve_guidance(call.guidance, pipe.settings.guidance), schedule, len(pipe.model.blocks))
    prompts = read_prompts(pipe.reader, call.prompt, call.seed)
    numbers = resolve_seed(call.seed, len(prompts), pipe.model.device)
    situation = pipe.situation(schedule, len(prompts))
    chosen = asked.settle(situation)
    check_cache(pipe.model, chosen)
    kept = ASSUMED_KEPT if numbers.rewindable else 1.0  # what keeps more may have to start anew
    plans = pipe.planning.forecast(chosen, schedule, guided.needs_both, kept)
    check_plans(plans, len(pipe.model.blocks), guided)  # before memory is reserved for them
    guided = guided.with_decay([plan.guidance_decay for plan in plans])
    return Request(
        prompts,
        read_negative(pipe.reader, call.negative, len(prompts), guided),
        schedule,
        guided,
        sampling,
        chosen,
        plans,
        numbers.rng,
        numbers.method_rng,
        Stopwatch(pipe.model.device),
        numbers.seeds,
        call.compute_mask,
        call.revise,
        given=checked_given(call.given, pipe.model, schedule, len(prompts)),
        selection_reason=asked.reason(situation),
        kept=kept,
    )


def resolve_sampling(pipe: Pipeline, schedule: Schedule, changes: dict[str, Any]) -> Sampling:
    sampling = pipe.settings.sampling.changed(**changes)
    sampling.check(schedule)
    pipe.model.check_sampling(sampling)
    if sampling.smooth and not pipe.tokenizer.mixes_codes:
        raise SettingError(f"smooth mixes entries of a codebook; {pipe.name} does not support it")
    if sampling.suppressed_codes and max(sampling.suppressed_codes) >= pipe.tokenizer.codes:
        raise SettingError(f"suppressed_codes {sampling.suppressed_codes}: {pipe.name} has {pipe.tokenizer.codes} numbered codes")
    return sampling


def with_room_for_all(pipe: Pipeline, request: Request) -> Request:
    """The same request with memory for all cells, where its images have turned out to keep more of them than was assumed."""
    plans = pipe.planning.forecast(request.method, request.schedule, request.guidance.needs_both, 1.0)
    return replace(request, plans=plans, kept=1.0, clock=Stopwatch(pipe.model.device))
