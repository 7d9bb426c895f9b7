"""`auto`: the method is looked up for every request, in a profile of what was measured on this model."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..device import hardware_name
from ..errors import SettingError
from ..validation import is_number
from .method import Method, Plans

if TYPE_CHECKING:
    from ..models.base import NextScaleModel
    from ..stage import Schedule
    from .selection import MeasuredPoint, MeasuredProfile, SelectionContext

DEFAULT_LPIPS = 0.1
SAME_BUDGET = 0.1  # cells of the last stage may differ by this share: another aspect ratio of the same pixel budget


@dataclass(frozen=True)
class Auto(Method):
    """Takes the point of a profile that meets one target; none is `lpips=0.1`. Without a fitting profile it refuses.

    speedup: at least this over dense generation, as near to dense images as that allows.
    lpips: a mean distance to the dense image of at most this, as fast as that allows.
    ms: at most this number of milliseconds per image, as near to dense images as that allows; only on the machine of the profile.
    """

    exclusive = frozenset({"alone"})

    speedup: float | None = None
    lpips: float | None = None
    ms: float | None = None

    def __post_init__(self) -> None:
        targets = self._targets
        if len(targets) > 1:
            named = " and ".join(f"{name}={value}" for name, value in targets.items())
            raise SettingError(f"auto takes one target, and here are {named}: choose the one that counts")
        for name, value in targets.items():
            if not is_number(value) or not 0 < value < math.inf:
                raise SettingError(f"auto:{name}={value!r}: give a number above 0")

    @property
    def _targets(self) -> dict[str, float]:
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def resolve(self, context: SelectionContext) -> tuple[Method, str | None]:
        """Takes the point for this context; while the size is not known it stays open, and some profile has to meet the target."""
        if context.schedule is None:
            self._require_possible(context)
            return self, None
        profile = fitting_profile(context)
        point = self._point(profile, context)
        return point.as_method(), f"{self.label}: {point.label} in the profile of {profile.described}"

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        raise SettingError(f"{self.label} stands for no method before it is resolved: call `resolve` with what is known of the request")

    def point_of(self, profile: MeasuredProfile) -> MeasuredPoint:
        """The point of a profile that meets the target, wherever that was measured."""
        if self.speedup is not None:
            return profile.nearest(self.speedup)
        if self.ms is not None:
            return profile.within(self.ms)
        return profile.fastest(DEFAULT_LPIPS if self.lpips is None else self.lpips)

    def _point(self, profile: MeasuredProfile, situation: SelectionContext) -> MeasuredPoint:
        if self.ms is not None and profile.hardware != hardware_name(situation.device):
            raise SettingError(
                f"auto:ms={self.ms:g}: the profile of {profile.described} says nothing of times on {hardware_name(situation.device)};"
                f" {advice(situation)}, or ask for a speedup or an LPIPS"
            )
        return self.point_of(profile)

    def _require_possible(self, situation: SelectionContext) -> None:
        error = SettingError(no_profile(situation))
        for profile in on_device(situation):
            try:
                self._point(profile, situation)
            except SettingError as unmet:
                error = unmet
            else:
                return
        raise error


def fitting_profile(situation: SelectionContext) -> MeasuredProfile:
    """The profile for a request: of the same grids before one of another aspect ratio, of the same hardware before any other on the same
    kind of device, then of the nearest batch; of equals the last."""
    fitting = [profile for profile in on_device(situation) if same_budget(profile, situation)]
    if not fitting:
        raise SettingError(no_profile(situation))
    return min(reversed(fitting), key=lambda profile: _distance(profile, situation))


def on_device(situation: SelectionContext) -> list[MeasuredProfile]:
    return [profile for profile in situation.profiles if profile.device == situation.device.type]


def same_budget(profile: MeasuredProfile, situation: SelectionContext) -> bool:
    """Whether it has as many stages, and about as many cells in the last one."""
    if len(profile.grids) != len(situation.sizes):
        return False
    cells, own = math.prod(situation.sizes[-1]), math.prod(profile.grids[-1])
    return abs(cells - own) <= SAME_BUDGET * own


def _distance(profile: MeasuredProfile, situation: SelectionContext) -> tuple[bool, bool, float]:
    batch = abs(math.log(profile.batch) - math.log(situation.batch))  # a file may have any number, larger than floats too
    return profile.grids != situation.sizes, profile.hardware != hardware_name(situation.device), batch


# --- in words


def no_profile(situation: SelectionContext) -> str:
    request = " ".join([situation.name, *([f"at {situation.size}"] if situation.size else []), "on", situation.device.type])
    known = "; ".join(profile.described for profile in situation.profiles)
    return f"auto takes methods from a profile, and none fits {request}{f' (there are: {known})' if known else ''}: {advice(situation)}"


def advice(situation: SelectionContext) -> str:
    size = f" --size {situation.size}" if situation.size else ""
    weights = f" --weights {shlex.quote(str(situation.weights))}" if situation.weights else ""
    return f"measure it with `nextscale tune -m {situation.name}{weights}{size} --batch {situation.batch} --device {situation.device.type}`"
