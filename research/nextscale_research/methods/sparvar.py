"""SparVAR (2026): late stages attend to a part of the keys, to windows around their own place or to keys chosen at an earlier stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.cache import AttentionCall, CacheSpec, LayerCache, Workspace
from nextscale.errors import SettingError
from nextscale.methods.method import DENSE, Method, MethodRun, Plans, RunSetup, StagePlan
from nextscale.stage import Rows, Schedule, Stage
from nextscale.validation import is_fraction, is_int

from .key_lists import KeyLists, KeyMap, attend_listed, centers, key_map, require_whole

if TYPE_CHECKING:
    from nextscale.models.base import NextScaleModel

WINDOWS = (7, 5, 3, 1, 1)  # sides on the maps of the last stage and of those before it; others but the sinks are not read
OWN_WINDOWS = (9, 7)  # likewise, on a stage's own map where keys are chosen
SINK_CELLS = 64  # stages of at most this size are always read: 0 to 4 of Infinity's 13
BLOCK = 128  # queries and keys that are read together: one that is visible makes all of them visible
GROUP = 192  # neighboring queries for which keys are chosen together
MULTIPLE = 64  # of chosen keys
CHOOSING_LAYERS = 11 / 32


@dataclass(frozen=True)
class SparVAR(Method):
    """Runs all tokens, and lets the attention of the last stages read a part of the keys.

    Later layers read windows: the small stages whole, and of the largest ones the keys around the query's own place. The first third of
    the layers chooses: at the first of these stages, which is computed densely, every 192 queries choose the keys with the largest
    attention; the later stages read the same keys and rows around their own, and add the attention that the choice had left out,
    interpolated.

    The knobs that matter:
    last: how many of the last stages are sparse. Published is 3. 0 is dense generation.
    keys: share of the keys that is chosen.

    To tinker with:
    choosing: how many of the first layers choose keys; None is the published share, 11 of 32. 0 reads windows everywhere.
    windows: sides of the windows on the maps of the last stage, of the one before it and so on. sinks: stages of at most this number of
        cells are always read whole. Published are windows and sinks of Infinity's 13 square stages; other schedules are ours.
    """

    last: int = 3
    keys: float = 0.2
    choosing: int | None = None
    windows: tuple[int, ...] = WINDOWS
    sinks: int = SINK_CELLS

    exclusive = frozenset({"cache"})

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("sinks", self.sinks), ("choosing", 0 if self.choosing is None else self.choosing)):
            if not is_int(value):
                raise SettingError(f"{name} is a whole number, 0 or more; got {value!r}")
        if not is_fraction(self.keys, above_zero=True):
            raise SettingError(f"keys is a share above 0 and at most 1; got {self.keys!r}")
        if not isinstance(self.windows, tuple | list) or not all(is_int(side, 1) for side in self.windows) or not self.windows:
            raise SettingError(f"windows is a tuple of sides, 1 or more, of the last stage and those before it; got {self.windows!r}")
        object.__setattr__(self, "windows", tuple(self.windows))

    def first(self, schedule: Schedule) -> int:
        """The first sparse stage, at which keys are chosen."""
        if self.last >= len(schedule):
            raise SettingError(
                f"SparVAR: the first of {len(schedule)} stages must be dense: last is at most {len(schedule) - 1}; got {self.last}"
            )
        return len(schedule) - self.last

    def choosing_layers(self, layers: int) -> int:
        return min(layers, round(CHOOSING_LAYERS * layers) if self.choosing is None else self.choosing)

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        layers, plans = len(model.blocks), [DENSE] * len(schedule)
        choosing = self.choosing_layers(layers)
        first = self.first(schedule)
        for stage in schedule.stages[first:]:
            there = key_map(schedule, stage, model.text_prefix)
            windowed = self.window_lists(there, schedule, torch.device("cpu")).mean(stage.cells) / there.keys
            chosen = self.listed_keys(schedule, stage, model.text_prefix) / there.keys
            chosen += 1.5 if stage.index == first else 0  # dense attention, and its weights once more to choose by
            plans[stage.index] = StagePlan(attended=(chosen,) * choosing + (windowed,) * (layers - choosing))
        return tuple(plans)

    def start(self, setup: RunSetup) -> MethodRun:
        run = SparVARRun(self, len(setup.model.blocks))
        setup.constants.append(run.windows)
        return run

    def window_lists(self, there: KeyMap, schedule: Schedule, device: torch.device) -> KeyLists:
        """Keys that the queries of the last stage in `there` read."""
        sides = dict(zip(reversed(schedule.sizes), self.windows, strict=False))
        windows = tuple(-1 if height * width <= self.sinks else sides.get((height, width), 0) for height, width in there.sizes)
        return visible_lists(there, windows, device)

    def own_run(self, schedule: Schedule, stage: Stage) -> int:
        """Keys of its own stage that a group of queries reads where keys are chosen: whole rows, as many as the widest group needs."""
        ends = ((start, min(start + GROUP, stage.cells) - 1) for start in range(0, stage.cells, GROUP))
        rows = max(end // stage.width - start // stage.width for start, end in ends) + 1
        needed = (rows + 2 * (self.own_window(schedule, stage) // 2)) * stage.width
        return min(stage.cells, -(-needed // MULTIPLE) * MULTIPLE)

    def own_window(self, schedule: Schedule, stage: Stage) -> int:
        """Rows of its own stage around a query that it reads where keys are chosen."""
        return OWN_WINDOWS[min(len(schedule) - 1 - stage.index, len(OWN_WINDOWS) - 1)]

    def chosen_keys(self, keys: int) -> int:
        return min(keys, MULTIPLE * max(1, round(self.keys * keys / MULTIPLE)))

    def listed_keys(self, schedule: Schedule, stage: Stage, prefix: int) -> int:
        """Keys that a query reads where they are chosen."""
        first = self.first(schedule)
        listed = self.chosen_keys(key_map(schedule, schedule[first], prefix).keys)
        return listed + sum(self.own_run(schedule, later) for later in schedule.stages[first + 1 : stage.index + 1])


@dataclass
class SparVARRun(MethodRun):
    method: SparVAR
    layers: int
    made: int = 0  # caches so far
    windows: dict[KeyMap, KeyLists] = field(default_factory=dict)  # that were read

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        chooses, self.made = self.made < self.method.choosing_layers(self.layers), self.made + 1
        return SparVARCache(spec, workspace, self.method, chooses, self.windows) if self.method.last else LayerCache(spec, workspace)


class SparVARCache(LayerCache):
    def __init__(self, spec: CacheSpec, workspace: Workspace, method: SparVAR, chooses: bool, windows: dict[KeyMap, KeyLists]) -> None:
        super().__init__(spec, workspace)
        self.method, self.chooses, self.windows = method, chooses, windows
        self.first = method.first(spec.schedule)
        self.chosen: KeyLists | None = None
        self.left_out: tuple[Tensor, tuple[int, int]] | None = (
            None  # [R, cells, C], attention that the choice left out, and the size of that stage
        )

    def attend(self, seen: AttentionCall) -> Tensor:
        stage = seen.tokens.stage
        if stage.index < self.first:
            return super().attend(seen)
        there = KeyMap.of(self.spec, stage)
        require_whole(seen, there, "SparVAR")
        if not self.chooses:
            if there not in self.windows:
                self.windows[there] = self.method.window_lists(there, self.spec.schedule, seen.q.device)
            return attend_listed(seen.q, seen.view, self.windows[there], seen.scale)
        if self.chosen is None or self.left_out is None:
            return self._choose(seen)
        assert isinstance(seen.view.start, int)
        around = self.method.own_window(self.spec.schedule, stage) // 2, self.method.own_run(self.spec.schedule, stage)
        self.chosen = carried(self.chosen, stage, seen.view.start, *around)
        return attend_listed(seen.q, seen.view, self.chosen, seen.scale) + resized(*self.left_out, stage.size)

    def _choose(self, seen: AttentionCall) -> Tensor:
        """Dense attention, which says what later stages read."""
        out = super().attend(seen._replace(e4m3_scale=None))
        if seen.tokens.stage.index != self.spec.final:
            keys = seen.view.keys.narrow(1, 0, seen.view.end)
            self.chosen = chosen_lists(seen.q, keys, seen.scale, self.method.chosen_keys(seen.view.end))
            self.left_out = out - attend_listed(seen.q, seen.view, self.chosen, seen.scale), seen.tokens.stage.size
        return out

    def keep_rows(self, rows: Rows) -> None:
        super().keep_rows(rows)
        self.chosen = None if self.chosen is None else self.chosen.rows(rows)
        self.left_out = None if self.left_out is None else (self.left_out[0][rows], self.left_out[1])


# --- windows


@lru_cache(maxsize=32)  # two requests of 13 stages; megabytes each
def visible_lists(there: KeyMap, windows: tuple[int, ...], device: torch.device) -> KeyLists:
    """Returns the keys that the queries of the last stage in `there` read, in blocks of 128: whole blocks in which any query sees a key.

    windows: the side of the window on each stage's map; 0 for none, -1 for the whole map.
    """
    height, width = there.sizes[-1]
    blocks = []
    for start in range(0, height * width, BLOCK):
        query = torch.arange(start, min(start + BLOCK, height * width))
        seen = torch.cat([torch.ones(there.prefix, dtype=torch.bool), *visible_cells(query, there.sizes, windows)])
        opened = F.pad(seen, (0, -len(seen) % BLOCK)).view(-1, BLOCK).any(dim=1).repeat_interleave(BLOCK)[: len(seen)]
        blocks.append(opened.nonzero()[:, 0])
    counts = torch.tensor([len(block) for block in blocks], dtype=torch.int32)
    numbers = torch.stack([F.pad(block, (0, int(counts.max()) - len(block))) for block in blocks]).int()
    return KeyLists(numbers[None, None].contiguous().to(device), counts[None, None].to(device), BLOCK)


def visible_cells(query: Tensor, sizes: tuple[tuple[int, int], ...], windows: tuple[int, ...]) -> list[Tensor]:
    """Marks the cells of each stage that any of these queries [N], cells of the last one, sees: [cells] each."""
    (height, width), found = sizes[-1], []
    for (key_height, key_width), window in zip(sizes, windows, strict=True):
        if window <= 0:
            found.append(torch.full((key_height * key_width,), window < 0))
            continue
        down = near(centers(query // width, height, key_height), key_height, window)
        across = near(centers(query % width, width, key_width), key_width, window)
        found.append((down[:, :, None] & across[:, None]).any(dim=0).flatten())
    return found


def near(center: Tensor, side: int, window: int) -> Tensor:
    """Marks the cells along a side in the window around each center [N]: [N, side]."""
    return (torch.arange(side) - center[:, None]).abs() <= window // 2


# --- chosen keys


def chosen_lists(q: Tensor, keys: Tensor, scale: float, number: int) -> KeyLists:
    """The keys [R, T, H, D] with the largest attention of every group of queries [R, N, H, D], summed over the group."""
    found, all_keys = [], keys.permute(0, 2, 3, 1)  # [R, H, D, T]
    for part in q.transpose(1, 2).split(GROUP, dim=2):  # one after another: the weights of all of them at once would be gigabytes
        sums = (part @ all_keys.to(part.dtype) * scale).float().softmax(dim=-1).sum(dim=2)  # [R, H, T]
        found.append(sums.topk(number, dim=-1, sorted=False).indices.sort(dim=-1).values)
    numbers = torch.stack(found, dim=2).int()
    return KeyLists(numbers, numbers.new_full(numbers.shape[:3], number), GROUP)


def carried(lists: KeyLists, stage: Stage, start: int, rows: int, own: int) -> KeyLists:
    """The lists of an earlier stage for the queries of a later one, each with `own` keys from `rows` rows above it on.

    start: the number of the later stage's first key.
    """
    groups, device = -(-stage.cells // GROUP), lists.numbers.device
    group = torch.arange(groups, device=device)
    source = source_groups(group, groups, lists.numbers.shape[2])
    first = ((group * GROUP // stage.width - rows) * stage.width).clamp(0, stage.cells - own)
    around = (start + first[:, None] + torch.arange(own, device=device)).int()
    before = lists.numbers[:, :, source]
    numbers = torch.cat([before, around.expand(*before.shape[:3], -1)], dim=3)
    return KeyLists(numbers, numbers.new_full(numbers.shape[:3], numbers.shape[3]), GROUP)


def source_groups(group: Tensor, groups: int, earlier: int) -> Tensor:
    """Returns the `earlier` group at the place of each of these."""
    return ((group.double() + 0.5) / groups * earlier - 0.5).round().long().clamp(0, earlier - 1)


def resized(x: Tensor, size: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """x [R, h * w, C] on another grid, [R, h' * w', C]."""
    return F.interpolate(x.transpose(1, 2).unflatten(2, size), size=target, mode="bilinear").flatten(2).transpose(1, 2)
