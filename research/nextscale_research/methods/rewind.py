"""Random numbers of a request that can be drawn again, for methods that call a pipeline several times."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nextscale.request import Randomness
from nextscale.sampling import ImageRng, Rng, SharedRng


def only(numbers: Randomness, images: Sequence[int]) -> Randomness:
    """Returns the same numbers for some images, from where the streams are now. Sources of other types are shared."""
    rng = copied(numbers.rng, images)
    method_rng = rng if numbers.method_rng is numbers.rng else copied(numbers.method_rng, images)
    return Randomness(rng, method_rng, numbers.seeds and tuple(numbers.seeds[image] for image in images))


def continue_from(numbers: Randomness, other: Randomness) -> None:
    """Moves a generator that is shared by a batch to where a copy of it is now."""
    if isinstance(numbers.rng, SharedRng) and isinstance(other.rng, SharedRng):
        numbers.rng.generator.set_state(other.rng.generator.get_state())


def copied(rng: Rng, images: Sequence[int]) -> Rng:
    if isinstance(rng, SharedRng):
        return SharedRng(copy_generator(rng.generator))
    if not isinstance(rng, ImageRng):
        return rng
    own = ImageRng((), torch.device("cpu"))
    own.generators = [copy_generator(rng.generators[image]) for image in images]
    return own


def copy_generator(generator: torch.Generator) -> torch.Generator:
    return torch.Generator(generator.device).set_state(generator.get_state())
