"""From what a caller gives to a request with everything resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .errors import SettingError
from .generate import check_cache, check_plans
from .guidance import GuidanceLike, ResolvedGuidance, resolve_guidance
from .methods.method import Method
from .planning.memory import ASSUMED_KEPT
from .prefix import checked_prefix
from .report import Stopwatch
from .request import Request, Revise, SeedLike, read_negative, resolve_seed
from .sampling import Sampling
from .stage import Schedule
from .text.prompts import Prompts

if TYPE_CHECKING:
    from .pipeline import Pipeline


@dataclass(frozen=True, eq=False)
class Call:
    """What a caller gives; `Pipeline.__call__` says what each of it means."""

    prompts: Prompts
    schedule: Schedule
    method: Method
    seed: SeedLike = None
    guidance: GuidanceLike = None
    negative: Any = None
    compute_mask: bool = False
    revise: Revise | None = None
    prefix_codes: Sequence[Tensor] = ()
    selection_reason: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


def resolve(pipe: Pipeline, call: Call) -> Request:
    """What does not fit raises here, with the value, what was expected and a remedy."""
    prompts, schedule, method = call.prompts, call.schedule, call.method
    sampling = resolve_sampling(pipe, schedule, call.sampling)
    guided = ResolvedGuidance(resolve_guidance(call.guidance, pipe.settings.guidance), schedule, len(pipe.model.blocks))
    numbers = resolve_seed(call.seed, len(prompts), pipe.model.device)
    check_cache(pipe.model, method)
    kept = ASSUMED_KEPT if numbers.rewindable else 1.0  # what keeps more may have to start anew
    plans = pipe.planning.forecast(method, schedule, guided.needs_both, kept)
    check_plans(plans, len(pipe.model.blocks), guided)  # before memory is reserved for them
    guided = guided.with_decay([plan.guidance_decay for plan in plans])
    return Request(
        prompts,
        read_negative(pipe.reader, call.negative, len(prompts), guided),
        schedule,
        guided,
        sampling,
        method,
        plans,
        numbers.rng,
        numbers.method_rng,
        Stopwatch(pipe.model.device),
        numbers.seeds,
        call.compute_mask,
        call.revise,
        prefix_codes=checked_prefix(call.prefix_codes, pipe.model, schedule, len(prompts)),
        selection_reason=call.selection_reason,
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
