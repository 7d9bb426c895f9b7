"""Parts of every training run: budget, state to resume from, averaged weights and loss curve."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nextscale.errors import CheckpointError, NextscaleError, OutOfMemory, SettingError
from nextscale.io import replacing, write_text

from .curves import plot_curve

STATE, CURVE, PLOT, METRICS = "state.pt", "curve.jsonl", "curve.svg", "metrics.json"
Value = Tensor | float
M = TypeVar("M", bound=nn.Module)


class CurveError(NextscaleError):
    """The curve of a run is missing or damaged."""


class Diverged(NextscaleError):
    """The loss or the gradient of a run is not finite."""


@dataclass(frozen=True)
class Budget:
    """Length of a run in steps, or in seconds of training. Both count over all resumed parts of the run."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.seconds) if value is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise SettingError(f"a budget is a number of steps or of seconds, one of them and above 0; got {self}")

    def progress(self, steps: int, seconds: float) -> float:
        """Returns the used share of the budget."""
        return steps / self.steps if self.steps is not None else seconds / (self.seconds or 1)


class Run:
    """Counts steps, and saves and resumes the state of `modules` and `optimizers`.

    State and curve live in `folder`; a run with other settings than the folder's is refused. Steps after the last state are made again,
    so their lines leave the curve. stretch: seconds of training after which this session ends, also before the budget does.
    """

    def __init__(
        self,
        folder: Path,
        budget: Budget,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        settings: Mapping[str, Any],
        *,
        stretch: float = math.inf,
        save_every: float = 120.0,
        log_every: int = 20,
    ) -> None:
        self.folder, self.budget, self.stretch = folder, budget, stretch
        self.modules, self.optimizers = modules, optimizers
        self.settings = json.loads(json.dumps(settings, default=str))
        self.save_every, self.log_every = save_every, log_every
        self.step, self.seconds = 0, 0.0
        self._waiting: list[dict[str, Value]] = []
        if folder.exists() and not folder.is_dir():
            raise SettingError(f"{folder} is a file: expected a folder, or the name of a new one")
        if (folder / STATE).exists():
            self._resume()
        write_text("".join(json.dumps(line) + "\n" for line in self._kept_lines()), folder / CURVE)

    @property
    def progress(self) -> float:
        return self.budget.progress(self.step, self.seconds)

    def steps(self) -> Iterator[float]:
        """Yields the used share of the budget before each step. Saves every `save_every` seconds and at the end."""
        begun = saved = time.monotonic()
        before = self.seconds
        while self.progress < 1 and self.seconds - before < self.stretch:
            yield self.progress
            self.step += 1
            now = time.monotonic()
            self.seconds = before + now - begun
            if now - saved > self.save_every:
                self.save()
                saved = time.monotonic()
        self.save()

    def log(self, values: Mapping[str, Value]) -> None:
        """Logs values of the current step. Every `log_every` steps their means are read from the device and written to the curve."""
        self._waiting.append({name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()})
        if (self.step + 1) % self.log_every == 0:
            self._flush(self.step + 1)

    def _flush(self, step: int) -> None:
        """Writes pending values to the curve. step: number of completed steps."""
        if not self._waiting:
            return
        line = {name: mean([values[name] for values in self._waiting if name in values]) for name in dict.fromkeys(chain(*self._waiting))}
        self._waiting.clear()
        if broken := [name for name, value in line.items() if not all(map(math.isfinite, value if isinstance(value, list) else [value]))]:
            raise Diverged(
                f"step {step}: {', '.join(broken)} not finite. {self.folder} keeps the last state before; start again with a lower "
                "learning_rate, in another folder"
            )
        self.note({"step": step, "seconds": round(self.seconds, 1), **line})

    def note(self, line: Mapping[str, Any]) -> None:
        """Appends a line to the curve and prints it."""
        with (self.folder / CURVE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in line.items())
        print("  ".join(shown), flush=True)

    def finish(self, results: Mapping[str, Any]) -> None:
        """Writes held-out results to the curve and to metrics.json."""
        self.note({"step": self.step, "held_out": results})
        metrics = {"steps": self.step, "seconds": round(self.seconds, 1), **results}
        write_text(json.dumps(metrics, indent=2) + "\n", self.folder / METRICS)
        plot_curve(read_lines(self.folder / CURVE), self.folder / PLOT)

    def save(self) -> None:
        self._flush(self.step)
        state = {
            "settings": json.dumps(self.settings, sort_keys=True),
            "step": self.step,
            "seconds": self.seconds,
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
        }
        with replacing(self.folder / STATE) as temporary:
            torch.save(state, temporary)

    def _resume(self) -> None:
        path = self.folder / STATE
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
            theirs = json.loads(state["settings"])
        except Exception as error:  # a damaged zip file, pickle or tensor: torch raises many kinds
            raise CheckpointError(f"{path} cannot be read ({error}). Remove it to start again") from error
        if theirs != self.settings:
            differing = sorted(name for name in {*theirs, *self.settings} if theirs.get(name) != self.settings.get(name))
            raise SettingError(
                f"{self.folder} holds a run with other settings ({', '.join(differing)}): "
                "go on with the same ones, or choose another folder"
            )
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.step, self.seconds = state["step"], state["seconds"]

    def _kept_lines(self) -> list[dict[str, Any]]:
        """Returns the lines of the curve up to the saved state. Results of a finished run are left out, because they are computed again."""
        path = self.folder / CURVE
        lines = read_lines(path) if self.step and path.exists() else []
        over = self.progress >= 1
        return [line for line in lines if line.get("step", 0) < self.step + (0 if over and "held_out" in line else 1)]


@contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"memory ran out: {advice}. What the run has learned so far is kept in its folder") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a curve, without an unfinished last line."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    except (OSError, ValueError) as error:
        raise CurveError(f"{path} cannot be read: {error}. Expected the curve that a training run left") from error
    if bad := [line for line in lines if not isinstance(line, dict)]:
        raise CurveError(f"{path} is no curve of a training run: expected an object in every line, found {str(bad[0])[:80]!r}")
    return lines


def mean(values: Sequence[Value]) -> float | list[float]:
    found = torch.stack([torch.as_tensor(value) for value in values]).double().mean(0).tolist()
    return [round(value, 4) for value in found] if isinstance(found, list) else round(found, 6)


class Average(AveragedModel, Generic[M]):
    """Exponential moving average (EMA) of the weights of a module."""

    module: M

    def __init__(self, module: M, decay: float) -> None:
        super().__init__(module)
        self.requires_grad_(False).eval()
        self.n_averaged.fill_(1)  # otherwise the first update copies the weights
        self._decay, self._source = decay, [module]  # a list, so that the source is not a part of the average

    def update(self, step: int) -> None:
        """Adds the current weights. The decay is lower in the first steps, so the initial weights lose their influence quickly."""
        self.multi_avg_fn = get_ema_multi_avg_fn(min(self._decay, (1 + step) / (10 + step)))
        self.update_parameters(self._source[0])


def learning_rate(progress: float, step: int, peak: float, warmup_steps: int = 100, floor: float = 0.02) -> float:
    """Returns a linear warm-up to `peak`, times a cosine down to `floor`. The warm-up counts steps, because the first ones may compile."""
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * cosine * min(1.0, (step + 1) / warmup_steps)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of all groups, multiplied by their `factor` if they have one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
