"""Whether every image should have a budget of its own: `python -m benchmarks.per_image ROWS.jsonl... [--plot FILE.svg]`.

The files are rows of `benchmarks.late_rows`: the distance of every image to its dense one at several budgets, and what was known
of it before its late stages. Budgets are compared at equal mean: one for all images; the oracle, which knows every image's own curve and
gives each the budget that serves the mean best, so that no controller can be better; and rules that see what was known before. Rules are
fitted to the other images: each image is in one of eight parts, and a part's budgets come from the other seven. Differences to one budget
for all are paired, with 95 % bootstrap intervals. Between measured budgets a curve is linear, which it is nearly.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nextscale.lab.evals.bootstrap import Interval, resampled
from nextscale.lab.results import read_rows
from nextscale_research.observe.plots import BLUE, GREEN, GREY, ORANGE, STYLE

from .late_rows import KEEPS

TARGETS = (0.25, 0.4)
PLOTTED = (0.2, 0.225, 0.25, 0.3, 0.35, 0.4, 0.5)
PARTS, RESAMPLES = 8, 2000
POWERS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
GRID = np.linspace(KEEPS[0], KEEPS[-1], 111)  # budgets among which is chosen
NUMBERS = ("entropy", "likeness", "roughness", "preview_gradient", "preview_high")
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Images:
    """Curves of some images, and what was known of them before."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.distances = np.array([[row["lpips"][f"keep {keep}"] for keep in KEEPS] for row in rows])  # [N, budgets]
        self.curves = interpolated(self.distances)  # [N, grid]
        self.change = np.array([row["change"] for row in rows])  # [N, cells of the last early stage]
        self.known = {name: np.array([row[name] for row in rows]) for name in NUMBERS}
        self.known |= {"median change": np.median(self.change, axis=1), "mean change": self.change.mean(axis=1)}
        self.known["evenness"] = self.change.mean(axis=1) / np.quantile(self.change, 0.98, axis=1)

    def __len__(self) -> int:
        return len(self.rows)

    def some(self, numbers: Sequence[int]) -> Images:
        return Images([self.rows[number] for number in numbers])

    def at(self, budgets: Numbers) -> Numbers:
        """The distance of every image at a budget of its own."""
        return np.array([np.interp(budget, GRID, curve) for budget, curve in zip(budgets, self.curves, strict=True)])

    @property
    def sensitivity(self) -> Numbers:
        """What an image gains between the smallest and the largest budget."""
        return self.distances[:, 0] - self.distances[:, -1]


def interpolated(distances: Numbers) -> Numbers:
    return np.array([np.interp(GRID, KEEPS, curve) for curve in distances])


def clipped(budgets: Numbers) -> Numbers:
    return np.clip(budgets, KEEPS[0], KEEPS[-1])


# --- rules: what is fitted to some images, and gives others their budgets

Rule = Callable[[Images], Numbers]
Fit = Callable[[Images, float], Rule]
"""From images and the mean budget that they shall have to a rule."""


def allocate(curves: Numbers, price: float) -> Numbers:
    """The budget of every image at which its curve together with the price of its budget is least."""
    return GRID[(curves + price * GRID).argmin(axis=1)]


def solve(budgets: Callable[[float], Numbers], target: float, low: float, high: float) -> float:
    """The number between `low` and `high`, by bisection of its logarithm, at which the mean budget is the target."""
    rising = budgets(high).mean() > budgets(low).mean()
    for _ in range(50):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if (budgets(middle).mean() < target) == rising else (low, middle)
    return (low * high) ** 0.5


def oracle(images: Images, target: float) -> Numbers:
    return allocate(images.curves, solve(lambda price: allocate(images.curves, price), target, 1e-5, 1e2))


def above(change: Numbers, level: Numbers) -> Numbers:
    """The share of the cells of maps [N, cells] that change by more than a level [N]."""
    return clipped((change > level[:, None]).mean(axis=1))


def relative_threshold(images: Images, target: float) -> Rule:
    """SparseVAR's own: cells above tau times the largest change of their image."""
    tau = solve(lambda value: above(images.change, value * images.change.max(axis=1)), target, 1e-3, 1.0)
    return lambda others: above(others.change, tau * others.change.max(axis=1))


def absolute_threshold(images: Images, target: float) -> Rule:
    """Cells above one change for all images."""
    level = solve(lambda value: above(images.change, np.full(len(images), value)), target, 1e-4, 1e3)
    return lambda others: above(others.change, np.full(len(others), level))


def power_of(name: str) -> Fit:
    """A budget that grows with the rank of one number, to the power that served the fitted images best."""

    def fit(images: Images, target: float) -> Rule:
        values = np.sort(images.known[name])
        sign = np.sign(rank_correlation(images.known[name], images.sensitivity))

        def budgets(others: Images, base: float, power: float) -> Numbers:
            place = np.searchsorted(values, others.known[name]) / len(values) - 0.5
            return clipped(base * np.exp(4 * sign * power * place))

        trials = {}
        for power in POWERS:
            base = solve(lambda value, power=power: budgets(images, value, power), target, 1e-2, 1e1)
            trials[power] = base, float(images.at(budgets(images, base, power)).mean())
        best = min(trials, key=lambda power: trials[power][1])
        return lambda others: budgets(others, trials[best][0], best)

    return fit


def regression(images: Images, target: float, ridge: float = 3.0) -> Rule:
    """The oracle's choice among curves that a linear regression of everything that was known expects."""
    reference = np.stack(list(images.known.values()), axis=1)

    def design(others: Images) -> Numbers:
        own = np.stack(list(others.known.values()), axis=1)
        return np.concatenate([(own - reference.mean(axis=0)) / reference.std(axis=0), np.ones((len(own), 1))], axis=1)

    x = design(images)
    penalty = ridge * np.diag([1.0] * (x.shape[1] - 1) + [0.0])
    weights = np.linalg.solve(x.T @ x + penalty, x.T @ np.log(images.distances))

    def curves(others: Images) -> Numbers:
        return interpolated(np.minimum.accumulate(np.exp(design(others) @ weights), axis=1))  # more cells are never expected to be worse

    price = solve(lambda value: allocate(curves(images), value), target, 1e-5, 1e2)
    return lambda others: allocate(curves(others), price)


RULES: dict[str, Fit] = {
    "threshold: a share of the image's largest change": relative_threshold,
    "threshold: one change for all images": absolute_threshold,
    "entropy of the logits": power_of("entropy"),
    "high frequencies of a small preview": power_of("preview_high"),
    "roughness of the canvas": power_of("roughness"),
    "evenness of the change": power_of("evenness"),
    "regression on everything": regression,
}


def held_out(images: Images, fit: Fit, target: float) -> Numbers:
    """Budgets of all images, each from a rule that was fitted without it."""
    budgets = np.empty(len(images))
    for part in range(PARTS):
        own = list(range(part, len(images), PARTS))
        rule = fit(images.some([number for number in range(len(images)) if number % PARTS != part]), target)
        budgets[own] = rule(images.some(own))
    return budgets


# --- what they gain


def rank_correlation(a: Numbers, b: Numbers) -> float:
    return float(np.corrcoef(*(values.argsort().argsort() for values in (a, b)))[0, 1])


def difference(images: Images, budgets: Numbers) -> Interval:
    """The mean distance with these budgets less that with their mean for all; each resample has a mean of its own."""
    own = images.at(budgets)

    def gain(numbers: Numbers) -> float:
        return float(own[numbers].mean() - np.interp(budgets[numbers].mean(), GRID, images.curves[numbers].mean(axis=0)))

    gains = [gain(numbers) for numbers in resampled(len(images), RESAMPLES).numpy()]
    return Interval(gain(np.arange(len(images))), *np.quantile(gains, [0.025, 0.975]).tolist())


def report(images: Images) -> str:
    fixed = images.distances.mean(axis=0)
    means = ", ".join(f"{mean:.4f} at {keep}" for keep, mean in zip(KEEPS, fixed, strict=True))
    lines = [f"{len(images)} images; one budget for all: {means}", ""]
    lines += [
        "| known before the late stages | rank correlation with the distance at 0.25 | with the gain from 0.15 to 0.7 |",
        "|---|---:|---:|",
    ]
    for name, values in images.known.items():
        correlations = (rank_correlation(values, other) for other in (images.distances[:, KEEPS.index(0.25)], images.sensitivity))
        lines.append(f"| {name} | " + " | ".join(f"{value:+.2f}" for value in correlations) + " |")
    lines += ["", "| budgets | mean | smallest to largest | LPIPS | against one budget for all |", "|---|---:|---:|---:|---:|"]
    for target in TARGETS:
        found = {"oracle": oracle(images, target)} | {name: held_out(images, fit, target) for name, fit in RULES.items()}
        for name, budgets in found.items():
            gain = difference(images, budgets)
            spread = f"{budgets.min():.2f} to {budgets.max():.2f}"
            interval = f"{gain.value:+.4f} ({gain.low:+.4f} to {gain.high:+.4f})"
            lines.append(f"| {name} | {budgets.mean():.3f} | {spread} | {images.at(budgets).mean():.4f} | {interval} |")
    return "\n".join(lines)


def ran(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines for thresholds that really ran, against one budget for all at as many tokens, of the images that ran both."""
    for name in sorted({name for row in rows for name in row["lpips"] if name.startswith("tau")}):
        own = [row for row in rows if name in row["lpips"]]
        budgets = [f"keep {keep}" for keep in KEEPS if all(f"keep {keep}" in row["lpips"] for row in own)]
        tokens, distance = (np.array([row[what][name] for row in own]) for what in ("tokens", "lpips"))
        curve = np.array([[row["lpips"][budget] for budget in budgets] for row in own])
        costs = [own[0]["tokens"][budget] for budget in budgets]

        def gain(numbers: Numbers, own: Numbers = distance, cost: Numbers = tokens, at: Any = (costs, curve)) -> float:
            return float(own[numbers].mean() - np.interp(cost[numbers].mean(), at[0], at[1][numbers].mean(axis=0)))

        gains = [gain(numbers) for numbers in resampled(len(own), RESAMPLES).numpy()]
        low, high = np.quantile(gains, [0.025, 0.975]).tolist()
        spread = f"{tokens.min():.2f} to {tokens.max():.2f}"
        mean = gain(np.arange(len(own)))
        yield f"| {name} | {len(own)} | {tokens.mean():.3f} | {spread} | {distance.mean():.4f} | {mean:+.4f} ({low:+.4f} to {high:+.4f}) |"


def plot(images: Images, path: Path) -> None:
    """Mean distance against mean budget: one for all, the oracle, and two rules."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 3.4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(GRID, images.curves.mean(axis=0), color=GREY, label="one budget for all")
        drawn = {"threshold: a share of the image's largest change": ORANGE, "regression on everything": BLUE}
        for name, colour in drawn.items():
            points = [held_out(images, RULES[name], target) for target in PLOTTED]
            axes.plot([b.mean() for b in points], [images.at(b).mean() for b in points], "o-", color=colour, markersize=3, label=name)
        points = [oracle(images, target) for target in PLOTTED]
        axes.plot([b.mean() for b in points], [images.at(b).mean() for b in points], "o-", color=GREEN, markersize=3, label="oracle")
        axes.set_xlabel("mean budget, share of the cells besides anchors")
        axes.set_ylabel("LPIPS to the dense image")
        axes.set_xlim(PLOTTED[0] - 0.02, PLOTTED[-1] + 0.02)
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    every = [row for path in given.rows for row in read_rows(path)]
    images = Images([row for row in every if all(f"keep {keep}" in row["lpips"] for keep in KEEPS)])
    print(report(images))
    print("\n| really run | images | tokens | smallest to largest | LPIPS | against one budget for all |\n|---|---:|---:|---:|---:|---:|")
    print("\n".join(ran([row for row in every if "keep 0.7" in row["lpips"]])))
    if given.plot is not None:
        plot(images, given.plot)


if __name__ == "__main__":
    main()
