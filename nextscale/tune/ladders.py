"""The other methods that the search tries: a method joins it by one entry here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PROBED = 3  # settings of a method that are tried alone

LADDERS: Mapping[str, tuple[str, ...]] = {
    "fastvar": ("ratios={LAST: 0.4}", "ratios={LAST: 0.6}", "ratios={BEFORE: 0.4, LAST: 0.6}", "ratios={BEFORE: 0.6, LAST: 0.75}"),
    "stagevar": (
        "alphas={LAST: 0.96},ranks=0.2,guidance_off=999",
        "alphas={LAST: 0.96},ranks=0.05,guidance_off=999",
        "alphas={LAST: 0.96},ranks=0.02,guidance_off=999",
        "alphas={LAST: 0.96},guidance_off=999",  # the model's own ranks, where it has a table
        "alphas={BEFORE: 0.96, LAST: 0.96},ranks=0.02,guidance_off=999",
    ),
    "tome": ("ratio=0.3,stages=[LAST]", "ratio=0.5,stages=[LAST]", "ratio=0.5", "ratio=0.75"),
    "skipvar": ("models=0.88", "models=0.86", "models=0.84"),
}
"""Settings of each method, mild before bold. LAST is the index of the last stage, BEFORE that of the one before it.

Where a method takes part of the work out of several stages, what it does at the last one alone comes first: that costs least. ScaleKV
saves memory and no time, and CoDe needs a second model: neither is here.
"""


def ladders(stages: int) -> dict[str, tuple[str, ...]]:
    """The methods by name, each as the command line takes them."""
    places = {"LAST": str(stages - 1), "BEFORE": str(stages - 2)}

    def placed(settings: str) -> str:
        for word, stage in places.items():
            settings = settings.replace(word, stage)
        return settings

    return {name: tuple(f"{name}:{placed(settings)}" for settings in steps) for name, steps in LADDERS.items()}


def probed(steps: Sequence[str]) -> list[str]:
    """Those that are tried alone: the mildest, the boldest, and what lies in the middle."""
    numbers = {round(step * (len(steps) - 1) / (PROBED - 1)) for step in range(PROBED)}
    return [steps[number] for number in sorted(numbers)]
