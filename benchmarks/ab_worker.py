"""Worker of `benchmarks.ab`: runs its cases with the `nextscale` package of the current folder, one command per line of stdin.

It uses only names that exist in old and new versions of the package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import nextscale

try:
    from nextscale.loading.load import random_pipeline
except ImportError:  # versions before the loading modules were merged
    from nextscale.loading.random_weights import random_pipeline

PROMPT = "a lighthouse on a rocky island in a storm, with waves that break over the pier"
METHODS = {"dense": "dense", "sparsevar": "sparsevar:keep=0.25", "fastvar": "fastvar", "stagevar": "stagevar"}
WARM = 3


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def infinity(quantize: Any = None) -> Any:
    return random_pipeline("infinity-2b", device="cuda", dtype=torch.bfloat16, quantize=quantize)


def call(pipe: Any, batch: int, **settings: Any) -> Callable[[], Any]:
    """Returns a function that generates a batch; on a GPU its CUDA graphs are captured first."""
    prompts = [PROMPT] * batch
    run = lambda: pipe(prompts, seed=1, **settings)  # noqa: E731
    if pipe.engine == "graphs":
        pipe.warmup(prompts, **settings)
    return run


def prepare(case: str) -> tuple[Callable[[], Any], Callable[[Any, float], float]]:
    """Returns the function of one round, and a function that converts its result and duration in seconds to ms."""
    whole = lambda result, seconds: 1000 * seconds  # noqa: E731
    if case in METHODS:
        return call(infinity(), 1, size=1024, method=METHODS[case]), whole
    if case == "stagevar-fp8":
        return call(infinity("fp8"), 8, size=1024, method="stagevar"), whole
    if case == "nano-auto":
        return call(nextscale.load("nano"), 32, size=512, method="auto:lpips=0.1"), whole
    if case == "decoder":
        pipe = infinity()
        latent = pipe(PROMPT, seed=1, size=1024, method="skip:last=5", decode=False).latent
        return lambda: pipe.tokenizer.decode(latent), whole
    if case == "host":
        around = lambda result, seconds: 1000 * (seconds - result.report.seconds)  # noqa: E731
        return call(nextscale.load("nano"), 1, size=256), around
    return call(nextscale.load("nano", device="cpu"), 1, size=256), whole


def timed(run: Callable[[], Any], counted: Callable[[Any, float], float]) -> dict[str, float]:
    wait()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    with torch.inference_mode():
        result = run()
    wait()
    seconds = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"ms": counted(result, seconds), "peak": peak}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects output of libraries to stderr
    state: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, float] = {}
        match question["do"]:
            case "prepare":
                state = prepare(question["case"])
                for _ in range(WARM):
                    timed(*state)
            case "run":
                answer = timed(*state)
            case "drop":
                state = None
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
