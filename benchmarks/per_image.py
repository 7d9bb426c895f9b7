"""Whether images of a batch should have budgets of their own: `python -m benchmarks.per_image TRAIN.jsonl TEST.jsonl [--plot FILE.svg]`.

Both files are rows of `benchmarks.late_rows --set budgets`: the distance of every image to its dense one at several budgets, and what was
known of it before. Three questions at equal mean cost, the share of the late stages' cells that run:

- oracle: who knows every image's own curve gives each image the budget that serves the mean best. No controller can be better.
- rules: a rule that was fitted on TRAIN sees what is known of an image of TEST before its late stages, and gives it a budget.
- one budget for all, the baseline; every difference is paired and has a 95 % bootstrap interval over the images of TEST.

Between the measured budgets a curve is linear in the logarithm of the cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nextscale.lab.evals.bootstrap import resampled

from .late_rows import KEEPS, read_rows

TARGETS = (0.25, 0.4)
FOLDS = 8
GRID = np.geomspace(KEEPS[0], KEEPS[-1], 81)  # budgets among which a rule chooses
FEATURES = ("entropy", "likeness", "roughness", "preview_gradient", "preview_high")
Rule = Callable[[np.ndarray, float], np.ndarray]
"""Budgets of images with these features [N, F], or change maps, for a strength that the mean budget grows with."""


class Images:
    """Curves and features of some images."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.distances = np.array([[row["lpips"][f"keep {keep}"] for keep in KEEPS] for row in rows])  # [N, budgets]
        self.change = np.array([row["change"] for row in rows])  # [N, cells of the last early stage]
        self.features = np.array([[row[name] for name in FEATURES] for row in rows])
        self.styles = [row["style"] for row in rows]

    def __len__(self) -> int:
        return len(self.distances)

    def at(self, budgets: np.ndarray) -> np.ndarray:
        """The distance of every image at a budget of its own."""
        places = np.log(np.clip(budgets, KEEPS[0], KEEPS[-1]))
        return np.array([np.interp(place, np.log(KEEPS), curve) for place, curve in zip(places, self.distances, strict=True)])

    @property
    def curves(self) -> np.ndarray:
        """Distances on the fine grid of budgets, [N, grid]."""
        return np.array([np.interp(np.log(GRID), np.log(KEEPS), curve) for curve in self.distances])

    @property
    def sensitivity(self) -> np.ndarray:
        """What an image gains between the smallest and the largest budget."""
        return self.distances[:, 0] - self.distances[:, -1]


# --- rules


def allocate(curves: np.ndarray, price: float) -> np.ndarray:
    """The budget of every image at which its curve and the price of its cost are least."""
    return GRID[(curves + price * GRID).argmin(axis=1)]


def solve(budgets: Callable[[float], np.ndarray], target: float, low: float, high: float) -> float:
    """The strength between `low` and `high`, by bisection on a logarithmic scale, at which the mean budget is the target."""
    rising = budgets(high).mean() > budgets(low).mean()
    for _ in range(60):
        middle = (low * high) ** 0.5
        if (budgets(middle).mean() < target) == rising:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5


def columns(images: Images) -> dict[str, np.ndarray]:
    """Everything that is known of images before their late stages, one number each."""
    change = images.change
    named = dict(zip(FEATURES, images.features.T, strict=True))
    return {
        **named,
        "log mean change": np.log(change.mean(axis=1)),
        "log largest change": np.log(change.max(axis=1)),
        "log median change": np.log(np.median(change, axis=1)),
        "spread of change": np.log(change.max(axis=1) / change.mean(axis=1)),
    }


def ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort().argsort().astype(float)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def design(images: Images, fitted: Images) -> np.ndarray:
    """Standardised features with a constant, [N, F + 1]."""
    own, reference = (np.stack(list(columns(one).values()), axis=1) for one in (images, fitted))
    return np.concatenate([(own - reference.mean(axis=0)) / reference.std(axis=0), np.ones((len(own), 1))], axis=1)


def predicted_curves(images: Images, train: Images, ridge: float = 3.0) -> np.ndarray:
    """Curves [N, grid] from a ridge regression of the logarithm of the distance at every budget."""
    x = design(train, train)
    penalty = ridge * np.diag([1.0] * (x.shape[1] - 1) + [0.0])
    weights = np.linalg.solve(x.T @ x + penalty, x.T @ np.log(train.distances))
    predicted = np.exp(design(images, train) @ weights)
    predicted = np.minimum.accumulate(predicted, axis=1)  # more cells are never worse
    return np.array([np.interp(np.log(GRID), np.log(KEEPS), curve) for curve in predicted])


def shares_above(change: np.ndarray, size: tuple[int, int], level: np.ndarray) -> np.ndarray:
    """The share of the enlarged map's cells above each image's level [N]."""
    side = round(change.shape[1] ** 0.5)
    grid = torch.from_numpy(change).view(-1, 1, side, side)
    large = F.interpolate(grid, size=size, mode="bilinear").flatten(1).numpy()
    return (large >= level[:, None]).mean(axis=1)


def rules(train: Images, size: tuple[int, int]) -> dict[str, tuple[Callable[[Images, float], np.ndarray], float, float]]:
    """By name: budgets of images for a strength, and the strengths between which the search for a mean budget goes on."""

    def clipped(shares: np.ndarray) -> np.ndarray:
        return np.clip(shares, KEEPS[0], KEEPS[-1])

    def powered(name: str, sign: float) -> Callable[[Images, float], np.ndarray]:
        reference = columns(train)[name]
        middle, spread = reference.mean(), reference.std()
        return lambda images, base: clipped(base * np.exp(sign * (columns(images)[name] - middle) / spread))

    found: dict[str, tuple[Callable[[Images, float], np.ndarray], float, float]] = {
        "threshold, share of the image's largest change": (
            lambda images, tau: clipped(shares_above(images.change, size, tau * images.change.max(axis=1))), 1e-3, 1.0,
        ),
        "threshold, the same change for all images": (
            lambda images, level: clipped(shares_above(images.change, size, np.full(len(images), level))), 1e-6, 1e3,
        ),
        "regression of the curves": (lambda images, price: allocate(predicted_curves(images, train), price), 1e-5, 1e2),
    }
    sensitivity = train.sensitivity
    for name, values in columns(train).items():
        sign = float(np.sign(rank_correlation(values, sensitivity)))
        for power in (0.15, 0.3, 0.5):
            found[f"{name}, {power}"] = (powered(name, sign * power), 1e-3, 1e2)
    return found


# --- what they gain


def paired(images: Images, budgets: np.ndarray) -> np.ndarray:
    """What every image gains over the budget of the mean for all (negative: nearer to dense)."""
    return images.at(budgets) - images.at(np.full(len(images), budgets.mean()))


def interval(images: Images, budgets: np.ndarray) -> tuple[float, float, float]:
    """The mean gain and its bootstrap interval, with the mean budget of each resample."""
    index = resampled(len(images), 2000).numpy()
    own = images.at(budgets)
    means = budgets[index].mean(axis=1)
    equal = np.empty(len(index))
    for number, (chosen, mean) in enumerate(zip(index, means, strict=True)):
        place = np.searchsorted(GRID, mean).clip(1, len(GRID) - 1)
        weight = (np.log(mean) - np.log(GRID[place - 1])) / (np.log(GRID[place]) - np.log(GRID[place - 1]))
        curve = images.curves_cached[chosen]
        equal[number] = ((1 - weight) * curve[:, place - 1] + weight * curve[:, place]).mean()
    gains = own[index].mean(axis=1) - equal
    low, high = np.quantile(gains, [0.025, 0.975])
    return float(paired(images, budgets).mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--side", type=int, default=24, help="of the first late stage's grid")
    given = parser.parse_args()
    train, test = (Images(read_rows(path)) for path in (given.train, given.test))
    for images in (train, test):
        images.curves_cached = images.curves
    print(f"{len(train)} images to fit, {len(test)} to test")
    for keep, mean in zip(KEEPS, test.distances.mean(axis=0), strict=True):
        print(f"  {keep}: LPIPS {mean:.4f}, coefficient of variation {test.distances[:, KEEPS.index(keep)].std() / mean:.2f}")
    print("rank correlation with what an image gains from budget (test):")
    for name, values in columns(test).items():
        print(f"  {name}: {rank_correlation(values, test.sensitivity):+.2f}")
    for target in TARGETS:
        fixed = test.at(np.full(len(test), target)).mean()
        print(f"\nmean budget {target}: LPIPS {fixed:.4f} with one budget for all")
        price = solve(lambda value: allocate(test.curves_cached, value), target, 1e-5, 1e2)
        lines = [("oracle", allocate(test.curves_cached, price))]
        for name, (rule, low, high) in rules(train, (given.side, given.side)).items():
            strength = solve(lambda value, rule=rule: rule(train, value), target, low, high)
            lines.append((name, rule(test, strength)))
        for name, budgets in lines:
            gain, low, high = interval(test, budgets)
            print(f"  {name}: mean {budgets.mean():.3f} ({budgets.min():.2f} to {budgets.max():.2f}): {gain:+.4f} ({low:+.4f} to {high:+.4f})")


if __name__ == "__main__":
    main()
