"""`auto`: selects the method of every request from measured profiles of this model."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..device import hardware_name
from ..errors import SettingError
from ..validation import is_number, require
from .method import Method, Plans, SelectionContext

if TYPE_CHECKING:
    from ..models.base import NextScaleModel
    from ..stage import Schedule

DEFAULT_LPIPS = 0.1
SAME_BUDGET = 0.1  # cells of the last stage may differ by this share: another aspect ratio of the same pixel budget


@dataclass(frozen=True)
class Auto(Method):
    """Selects the point of a profile that meets one target; the default is `lpips=0.1`. Raises SettingError without a fitting profile.

    speedup: at least this over dense generation, as near to dense images as possible.
    lpips: at most this mean distance to the dense image, as fast as possible.
    ms: at most this number of milliseconds per image, as near to dense images as possible; only on the machine of the profile.
    """

    exclusive = frozenset({"alone"})

    speedup: float | None = None
    lpips: float | None = None
    ms: float | None = None

    def __post_init__(self) -> None:
        targets = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        require(len(targets) < 2, "auto", "given one target: speedup, lpips or ms", targets)
        for name, value in targets.items():
            require(is_number(value) and 0 < value < math.inf, name, "a number above 0", value)

    def resolve(self, context: SelectionContext) -> tuple[Method, str | None]:
        """Selects the point for this context. If the size is not known yet, checks that some profile meets the target."""
        if context.schedule is not None:
            profile = fitting_profile(context)
            point = self._point(profile, context)
            return point.as_method(), f"{self.label}: {point.label} in the profile of {profile.described}"
        error = no_profile(context)
        for profile in on_device(context):
            try:
                self._point(profile, context)
                return self, None
            except SettingError as unmet:
                error = unmet
        raise error

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        raise SettingError(f"{self.label} is not a method until `resolve` has selected one for a request.")

    def point_of(self, profile: Any) -> Any:
        """Returns the point of a profile that meets the target, for any machine."""
        if self.speedup is not None:
            return profile.nearest(self.speedup)
        return profile.fastest(self.lpips or DEFAULT_LPIPS) if self.ms is None else profile.within(self.ms)

    def _point(self, profile: Any, context: SelectionContext) -> Any:
        if self.ms is not None and profile.hardware != (here := hardware_name(context.device)):
            raise SettingError(f"ms needs a profile of {here}; got {profile.described}: {advice(context)}, or use speedup or lpips.")
        return self.point_of(profile)


def fitting_profile(context: SelectionContext) -> Any:
    """Returns the profile for a request. Prefers the same grids to another aspect ratio, the same hardware to other hardware of the same
    kind of device, then the nearest batch; of equals it takes the last.
    """

    def distance(profile: Any) -> tuple[bool, bool, float]:
        batch = abs(math.log(profile.batch) - math.log(context.batch))  # a file may have any number, larger than floats too
        return profile.grids != context.sizes, profile.hardware != hardware_name(context.device), batch

    fitting = [profile for profile in on_device(context) if same_budget(profile, context)]
    if not fitting:
        raise no_profile(context)
    return min(reversed(fitting), key=distance)


def on_device(context: SelectionContext) -> list[Any]:
    return [profile for profile in context.profiles if profile.device == context.device.type]


def same_budget(profile: Any, context: SelectionContext) -> bool:
    """Returns True if the profile has as many stages, and about as many cells in the last one."""
    if len(profile.grids) != len(context.sizes):
        return False
    cells, own = math.prod(context.sizes[-1]), math.prod(profile.grids[-1])
    return abs(cells - own) <= SAME_BUDGET * own


def no_profile(context: SelectionContext) -> SettingError:
    size = f" at {context.size}" if context.size else ""
    known = "; ".join(profile.described for profile in context.profiles) or "none"
    return SettingError(f"auto needs a profile of {context.name}{size} on {context.device.type}; got {known}: {advice(context)}.")


def advice(context: SelectionContext) -> str:
    size = f" --size {context.size}" if context.size else ""
    weights = f" --weights {shlex.quote(str(context.weights))}" if context.weights else ""
    return f"measure one: `nextscale tune -m {context.name}{weights}{size} --batch {context.batch} --device {context.device.type}`"
