"""The checked request of a call, built from its arguments."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Union

import torch
from torch import Tensor

from .edit import Edit
from .errors import SettingError
from .guidance import GuidanceLike, ResolvedGuidance, resolve_guidance
from .methods.method import Method, Plans, StagePlan
from .models.base import NextScaleModel
from .prefix import checked_prefix
from .sampling import ImageRng, Rng, Sampling, SharedRng, method_rng
from .stage import Schedule, Stage
from .text.prompts import Labels, PromptReader, Prompts
from .validation import is_int, require

DIFFUSERS = ("guidance_scale", "negative_prompt", "height", "width", "num_images_per_prompt")
STEPS = "the size fixes the number of stages, and method='skip:last=2' runs fewer"
EDIT = "pipe.edit(image, prompt, mask=..., strength=...) changes an image"
INSTEAD = {  # arguments of other libraries, with the way to do it here
    "num_inference_steps": STEPS,
    "steps": STEPS,
    "generator": "seed=... takes an int, one per image, or a torch.Generator",
    "strength": EDIT,
    "image": EDIT,
    "mask_image": EDIT,
    "output_type": "the output has images, pixels, latent and codes",
    "callback_on_step_end": "on_stage=... is called after every stage",
}

SeedLike = Union[int, Sequence[int], torch.Generator, Rng, "Randomness", None]
Revise = Callable[[Stage, Tensor], Tensor]
"""Gets a stage's codes [B, cells, ...] before they are put on the canvas and returns the codes to use, for example for in-painting.

Cells that a method leaves out have zeros. Values returned for them are ignored.
"""


@dataclass(frozen=True, eq=False)
class Request:
    """The resolved arguments of a call."""

    prompts: Prompts
    negative: Prompts | None  # the prompts of the second cfg branch; None if it does not run or the model has its own empty prompt
    schedule: Schedule
    guidance: ResolvedGuidance
    sampling: Sampling
    method: Method
    plans: Plans  # the method's forecast, by which memory is reserved
    rng: Rng
    method_rng: Rng
    seeds: tuple[int, ...] | None = None  # None: the caller's own generator
    compute_mask: bool = False
    revise: Revise | None = None
    captured: bool = False  # True inside a CUDA graph
    prefix_codes: tuple[Tensor, ...] = ()  # codes of the first stages, [B, cells, ...] each, instead of generated ones
    selection_reason: str | None = None  # reason for the method, if it was selected
    edit: Edit | None = None  # the image that the canvas keeps outside a mask

    @property
    def batch(self) -> int:
        return len(self.prompts)

    @property
    def rows(self) -> int:
        """Number of rows at the start: one per image, or two with guidance."""
        return self.batch * (2 if self.guidance.needs_both else 1)

    @property
    def image_inputs(self) -> tuple[Tensor, ...]:
        """Inputs besides the prompts, with one entry per image each."""
        return *self.prefix_codes, *(() if self.edit is None else self.edit.tensors)

    @property
    def text_tokens(self) -> int:
        """Number of tokens of the longest prompt, negative ones included; 0 without text."""
        return max(self.prompts.longest, 0 if self.negative is None else self.negative.longest)


@dataclass(frozen=True)
class Randomness:
    """The random number generators of a request. Passed as a seed, it gives image and method streams of different seeds."""

    rng: Rng
    method_rng: Rng
    seeds: tuple[int, ...] | None


def resolve_seed(seed: SeedLike, images: int, device: torch.device) -> Randomness:
    """Returns one generator per image for ints and None, else the caller's own."""
    if isinstance(seed, Randomness):
        return seed
    if isinstance(seed, torch.Generator):
        seed = SharedRng(seed)
    if not isinstance(seed, int | None) and isinstance(seed, Rng):  # the second check is slow
        return Randomness(seed, seed, None)
    seeds = image_seeds(secrets.randbits(32) if seed is None else seed, images)
    return Randomness(ImageRng(seeds, device), method_rng(seeds, device), seeds)


def image_seeds(seed: Any, images: int) -> tuple[int, ...]:
    """Returns one int per image: the given ones, or consecutive ones."""
    given: Any = seed if isinstance(seed, Sequence) and not isinstance(seed, str | bytes | bytearray) else [seed]
    if not all(map(is_seed, given)):
        raise SettingError(f"seed must be an int from 0 to 2**63 - 1, a list of ints or a torch.Generator; got {seed!r}.")
    if given is not seed:
        given = range(int(seed), int(seed) + images)
        if given and not is_seed(given[-1]):
            raise SettingError(f"seed must be at most 2**63 - {images} for {images} images, which take consecutive seeds; got {seed!r}.")
    if len(given) != images:
        raise SettingError(f"seed must be one int, or one per image ({images}); got {len(given)}.")
    return tuple(int(one) for one in given)


def is_seed(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**63


def as_prompts(reader: PromptReader, value: Any) -> Prompts:
    """Reads prompts, unless they have been read."""
    return value if isinstance(value, Labels) else reader.read(value)


def read_prompts(reader: PromptReader, prompt: Any, seed: SeedLike) -> Prompts:
    """Returns one prompt per image; a single one is repeated for several seeds."""
    prompts = as_prompts(reader, prompt)
    return prompts.repeat(len(seed)) if len(prompts) == 1 and isinstance(seed, Sequence) and seed else prompts


def read_negative(reader: PromptReader, negative: Any, images: int, guidance: ResolvedGuidance) -> Prompts | None:
    """Returns the prompts of the second cfg branch; None if it does not run or the model has its own empty prompt."""
    if negative is None:
        empty = reader.empty() if guidance.needs_both else None
        return None if empty is None else empty.repeat(images)
    if not guidance.needs_both:
        raise SettingError("negative needs guidance: without it the second cfg branch does not run. Raise guidance, or leave negative out.")
    prompts = as_prompts(reader, negative)
    if len(prompts) == 1:
        return prompts.repeat(images)
    if len(prompts) != images:
        raise SettingError(f"negative must be one prompt, or one per image ({images}); got {len(prompts)}.")
    return prompts


def build_request(
    pipe: Any,
    prompts: Prompts,
    schedule: Schedule,
    method: Method,
    seed: SeedLike = None,
    guidance: GuidanceLike = None,
    negative: Any = None,
    compute_mask: bool = False,
    revise: Revise | None = None,
    prefix_codes: Sequence[Tensor] = (),
    selection_reason: str | None = None,
    edit: Edit | None = None,
    **sampling: Any,
) -> Request:
    """Returns the checked request of a pipeline's call. Raises SettingError with the value, the expected one and a remedy."""
    model = pipe.model
    chosen = resolve_sampling(pipe, schedule, sampling)
    guided = ResolvedGuidance(resolve_guidance(guidance, pipe.settings.guidance), schedule, len(model.blocks))
    numbers = resolve_seed(seed, len(prompts), model.device)
    check_cache(model, method)
    plans = pipe.planning.forecast(method, schedule, guided.needs_both)
    check_plans(plans, len(model.blocks), guided)  # before memory is reserved for them
    guided = guided.with_decay([plan.guidance_decay for plan in plans])
    return Request(
        prompts,
        read_negative(pipe.reader, negative, len(prompts), guided),
        schedule,
        guided,
        chosen,
        method,
        plans,
        numbers.rng,
        numbers.method_rng,
        numbers.seeds,
        compute_mask,
        revise,
        prefix_codes=checked_prefix(prefix_codes, model, schedule, len(prompts)),
        selection_reason=selection_reason,
        edit=edit,
    )


def from_diffusers(given: dict[str, Any], prompt: Any, size: Any, guidance: Any, negative: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the four arguments, taken from `given` if it has them under diffusers' names; these are removed from it."""
    found = {name: value for name in DIFFUSERS if (value := given.pop(name, None)) is not None}
    pairs = {"height": ("size", size), "width": ("size", size), "guidance_scale": ("guidance", guidance)}
    for name, (own, value) in (pairs | {"negative_prompt": ("negative", negative)}).items():
        if name in found and value is not None:
            raise SettingError(f"{name} and {own} mean the same. Pass one of them.")
    if ("height" in found) != ("width" in found):
        raise SettingError("height and width must be given together; or pass size=(height, width).")
    if (images := found.get("num_images_per_prompt")) is not None:
        require(is_int(images, 1) and isinstance(prompt, str | int | list | tuple), "num_images_per_prompt", "an int, with texts", images)
        prompt = [one for one in (prompt if isinstance(prompt, list | tuple) else [prompt]) for _ in range(images)]
    size = (found["height"], found["width"]) if "height" in found else size
    return prompt, size, found.get("guidance_scale", guidance), found.get("negative_prompt", negative)


def require_arguments(pipe: Any, given: dict[str, Any]) -> None:
    """Raises SettingError for an argument that neither the call nor the sampling has."""
    known = [one.name for one in fields(Sampling)]
    for name in sorted(given.keys() - known):
        names = [*known, *(one for one in type(pipe).__call__.__annotations__ if one not in ("sampling", "return"))]
        close = difflib.get_close_matches(name, (*names, *DIFFUSERS), n=1)
        advice = INSTEAD.get(name) or (f"did you mean {close[0]}?" if close else f"a call takes {', '.join(sorted(names))}")
        raise SettingError(f"unknown setting {name}: {advice}")


def resolve_sampling(pipe: Any, schedule: Schedule, changes: dict[str, Any]) -> Sampling:
    require_arguments(pipe, changes)
    sampling = pipe.settings.sampling.changed(**changes)
    sampling.check(schedule)
    pipe.model.check_sampling(sampling)
    if sampling.smooth and not pipe.tokenizer.mixes_codes:
        raise SettingError(f"smooth mixes entries of a codebook; {pipe.name} does not support it. Leave it out.")
    if sampling.suppressed_codes and max(sampling.suppressed_codes) >= pipe.tokenizer.codes:
        raise SettingError(f"suppressed_codes must be below {pipe.tokenizer.codes} for {pipe.name}; got {sampling.suppressed_codes}.")
    return sampling


def check_plans(plans: Sequence[StagePlan], depth: int, guidance: ResolvedGuidance) -> None:
    """Raises SettingError for plans that would fail at their stage."""
    for plan in plans:
        try:
            plan.check(depth, guidance.layers)
        except ValueError as error:
            raise SettingError(f"the method does not fit this request: {error}.") from error


def check_cache(model: NextScaleModel, method: Method) -> None:
    """Raises SettingError if the method has its own cache and the model an 8-bit cache."""
    if model.kv_dtype is not None and "cache" in method.exclusive:
        raise SettingError(
            f"{method.label} has a KV cache of its own, and this model was loaded with kv_dtype={model.kv_dtype!r}. Load it without"
            " kv_dtype, or choose another method."
        )
