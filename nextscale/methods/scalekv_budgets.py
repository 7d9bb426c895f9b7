"""How many keys the layers keep with ScaleKV: the published budgets, and the rule that they follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..errors import SettingError
from ..stage import Schedule
from ..validation import is_int

Budgets = tuple[tuple[int, tuple[int, ...]], ...]
"""Stage index and the keys that every layer keeps when that stage has run, ordered by stage."""

PUBLISHED_SIDES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)

PUBLISHED: Mapping[int, Mapping[int, tuple[tuple[int, ...], int, int]]] = {
    32: {
        7: ((0, 23), 920, 632),
        8: ((0, 23), 1490, 594),
        9: ((0, 23), 2510, 526),
        10: ((0, 23), 4100, 420),
        11: ((0,), 6385, 465),
    },
    40: {
        7: ((0, 1, 2), 909, 629),
        8: ((0, 1, 2), 1464, 584),
        9: ((0, 1, 2), 2463, 503),
        10: ((0, 1, 2), 4054, 374),
        11: ((0, 1, 2), 6200, 200),
    },
}
"""Drafters, their keys and those of the others, by the number of layers (Infinity 2B and 8B) and by stage: a mean of 650 keys, about 10 %
of what is cached before the last stage."""

CAPACITY = 650
"""Keys up to which nothing is dropped in the first place."""


def published_budgets(schedule: Schedule, layers: int) -> dict[int, tuple[int, ...]]:
    """Those of the reference implementation: from the first stage on that leaves more than the mean. SettingError if it has none there."""
    table = PUBLISHED[layers]
    first = next((stage.index for stage in schedule if stage.start + stage.cells > CAPACITY), len(schedule))
    if first < min(table):
        raise SettingError(
            f"ScaleKV as_released: budgets are published from stage {min(table)} on, and stage {first} of this schedule leaves more than"
            f" {CAPACITY} keys: leave out as_released, or write budgets out"
        )
    chosen = {stage: entry for stage, entry in table.items() if first <= stage < len(schedule) - 1}
    return {stage: tuple(most if layer in few else least for layer in range(layers)) for stage, (few, most, least) in chosen.items()}


def normalised(budgets: Mapping[int, int | Sequence[int]] | Iterable[Sequence[object]]) -> Budgets:
    """Returns checked pairs, ordered by stage; a number that stands for all layers is a tuple of one."""
    expected = "budgets are {stage index: keys kept, a number or one per layer}"
    try:
        pairs = list(budgets.items() if isinstance(budgets, Mapping) else budgets)
        entries = [(stage, (kept,) if is_int(kept) else tuple(kept)) for stage, kept in pairs]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise SettingError(f"{expected}; got {budgets!r}") from None
    if not all(is_int(stage) and kept and all(is_int(one, 1) for one in kept) for stage, kept in entries):
        raise SettingError(f"{expected}, all of them whole numbers; got {budgets!r}")
    return tuple(sorted((int(stage), tuple(map(int, kept))) for stage, kept in entries))  # type: ignore[call-overload]


def checked_budgets(budgets: Budgets, layers: int, schedule: Schedule, window: int) -> dict[int, tuple[int, ...]]:
    found = {}
    for stage, kept in budgets:
        if stage >= len(schedule) or len(kept) not in (1, layers) or min(kept) < window:
            raise SettingError(
                f"ScaleKV: budgets of stage {stage} are {list(kept)}; expected a stage from 0 to {len(schedule) - 1}, one number or one per"
                f" layer ({layers}), each at least the window, {window}"
            )
        found[stage] = kept if len(kept) == layers else kept * layers
    return found


def ruled_budgets(
    schedule: Schedule, layers: int, drafters: Sequence[int], capacity: int, window: int, prefix: int = 0
) -> dict[int, tuple[int, ...]]:
    """Budgets by the rule that the published ones follow: a mean of `capacity` keys, of which drafters take what they can use.

    The first stage that leaves more is the first to be compressed. A drafter's budget is the largest, up to what it would hold if
    nothing but its own budget had cut it before, for which the others' is a whole number. Where few layers share the mean, drafters
    take less, so that the others keep their window.
    """
    others, found = layers - len(drafters), dict[int, tuple[int, ...]]()
    for stage in schedule.stages[:-1]:
        held = prefix + stage.start + stage.cells
        if held <= capacity:
            continue
        limit = min(held, (found[stage.index - 1][drafters[0]] if drafters else capacity) + stage.cells) if found else held
        if drafters and others:
            limit = min(limit, (layers * capacity - others * window) // len(drafters))
            whole = (most for most in range(limit, max(limit - others, 0), -1) if (layers * capacity - len(drafters) * most) % others == 0)
            most = next(whole, limit)
            least = (layers * capacity - len(drafters) * most) // others
        else:
            most = least = capacity
        found[stage.index] = tuple(most if layer in drafters else least for layer in range(layers))
    return found
