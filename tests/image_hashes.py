"""Hashes of images of all models and methods, to see that a change of the code changes no image.

    python -m tests.image_hashes --against main    compares with another revision, on this machine
    python -m tests.image_hashes                   compares with the stored hashes
    python -m tests.image_hashes --write           stores new ones

Bits depend on the machine and on torch's version, so stored hashes of one machine say nothing about another.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nextscale
from nextscale import Pipeline
from nextscale.loading.load import random_pipeline
from tests.helpers import tiny

PREFIX = "prefix_codes"  # the argument of a call that takes codes of the first stages
FILE = Path(__file__).parent / "data" / "image_hashes.json"
METHODS: tuple[str, ...] = (
    "dense",
    "skip:last=1",
    "sparsevar:tau=0.9,first_stage=2",
    "sparsevar:tau=0.6,first_stage=2,alpha=none",
    "sparsevar:tau=0.6,first_stage=2,as_released=true",
    "sparsevar:tau=0.7,first_stage=2,metric=logits",
    "sparsevar:tau=0.3,first_stage=2,metric=image",
    "fastvar:ratios={2:0.5,3:0.5}",
    "fastvar:ratios={1:0.3,3:1.0}",
    "stagevar:guidance_off=2,alphas={3:0.96}",
    "stagevar:guidance_off=9,alphas={3:0.96},ranks=0.4",
    "stagevar:alphas=[]",
    "stagevar_variants:variant=svd,alphas={3:0.9}",
    "stagevar_variants:variant=least_squares,ranks=0.5,alphas={3:0.9}",
    "stagevar_variants:ranks=measured,alphas={3:0.9}",
    "tome:stages=[2,3]",
    "tome:stages=[2,3],random=true",
    "sparsevar:tau=0.9,first_stage=2 + stagevar:guidance_off=2,alphas=[]",
    "fastvar:ratios={2:0.5,3:0.5} + stagevar:guidance_off=2,alphas=[]",
    "sparsevar:tau=0.9,first_stage=3 + tome:stages=[3]",
    "pitome:stages=[2,3]",
    "pitome:stages=[2,3],form=bsm,ratio=0.3",
    "sparsevit:stages=[2,3]",
    "sparsevit:stages=[2,3],window=2",
    "zipvl:stages=[2,3]",
    "zipvl:stages=[2,3],tau=0.8",
    "litevar:first=1",
    "litevar:first=1,share_rows=false,width=0.5",
    "litevar:first=1,as_released=true",
    "sparvar:last=2",
    "sparvar:last=2,choosing=0",
    "scalekv:share=0.3,window=2,pooling=3",
    "skipvar",
    "sparsevar:tau=0.9,first_stage=2 + zipvl:stages=[3]",
    "sparsevar:tau=0.9,first_stage=2 + pitome:stages=[3]",
    "sparsevar:tau=0.9,first_stage=2 + scalekv:share=0.3,window=2,pooling=3",
    "sparsevar:tau=0.9,first_stage=2 + sparsevit:stages=[3],window=2",
    "sparsevar:tau=0.9,first_stage=2 + zipvl:stages=[3],tau=0.8",
    "skip:last=1,stages=[2]",
    "dropguidance:first_stage=2",
)
OTHER_METHODS = (
    "fastvar:ratios={1:0.1,2:0.7,3:0.9}",
    "fastvar:ratios={2:0.33,3:0.66}",
    "fastvar:ratios={3:0.999}",
    "sparsevar:tau=0,first_stage=2",
    "sparsevar:keep=0.4",
    "skipvar + tome:stages=[2,3]",
)
"""Roundings of ratios, and what the list above leaves out."""
NANO_METHODS = ("dense", "skip:last=1", "sparsevar:tau=0.7", "sparsevar:metric=logits,tau=0.8", "fastvar", "stagevar", "tome")


def digest(output: Any) -> str:
    found = hashlib.sha256()
    for tensor in (*output.codes, output.latent, output.pixels):
        found.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.contiguous().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def as_methods(text: str) -> list[str]:
    return [part.strip() for part in text.split(" + ")]


def attempt(call: Callable[[], Any]) -> str:
    """Returns the hash of the images, or the error with which they were refused."""
    try:
        return digest(call())
    except nextscale.NextscaleError as error:
        return type(error).__name__


def hashes() -> Iterator[tuple[str, str]]:
    """Yields the name of each request with the hash of its images."""
    for family in tiny.FAMILIES:
        pipeline = tiny.shared_pipeline(family)
        for method in METHODS + OTHER_METHODS:
            for guidance in (None, tiny.NO_GUIDANCE[family]):
                call = partial(pipeline, tiny.prompts(family, 3), seed=11, guidance=guidance, method=as_methods(method))
                yield f"{family}, {'guided' if guidance is None else 'unguided'}, {method}", attempt(call)
        yield from prefix_hashes(family)
        yield from pair_hashes(family)
        yield from int8_hashes(family)
    nano = nextscale.load("nano", device="cpu")
    for method in NANO_METHODS:
        found = digest(nano(["a 3D icon of a red apple", "a flat icon of a rocket"], seed=7, method=as_methods(method)))
        yield f"nano, {method}", found
    yield "nano, 4:3", digest(nano("a photo of a shirt", seed=3, aspect="4:3", guidance=2))


def prefix_hashes(family: str) -> Iterator[tuple[str, str]]:
    """Requests whose first stages are given."""
    pipeline, prompts = tiny.shared_pipeline(family), tiny.prompts(family, 2)
    codes = pipeline(prompts, seed=5).codes
    for method in ("dense", "sparsevar:tau=0.9,first_stage=2", "fastvar:ratios={2:0.5,3:0.5}", "stagevar:alphas={3:0.96}"):
        given: dict[str, Any] = {PREFIX: codes[:2]}
        call = partial(pipeline, prompts, seed=11, method=as_methods(method), **given)
        yield f"{family}, two stages given, {method}", attempt(call)


def pair_hashes(family: str) -> Iterator[tuple[str, str]]:
    """CoDe, with other random weights of the same layout as the small model."""
    pipeline, spec = tiny.fresh_pipeline(family), tiny.SPECS[family]
    small = random_pipeline(replace(spec, name="small"), seed=1)
    pipeline.partners.known["small"] = Pipeline(small.model, pipeline.tokenizer, small.reader, small.settings, "small")
    for method in ("code:refiner=small,draft=2", "code:refiner=small"):
        yield f"{family}, {method}", attempt(partial(pipeline, tiny.prompts(family, 2), seed=11, method=as_methods(method)))


def int8_hashes(family: str) -> Iterator[tuple[str, str]]:
    int8: tuple[dict[str, Any], ...] = ({"quantize": "int8"}, {"kv_dtype": "int8"})
    for settings in int8:
        pipeline = random_pipeline(tiny.SPECS[family], **settings)
        for method in ("dense", "sparsevar:tau=0.9,first_stage=2", "fastvar:ratios={2:0.5,3:0.5}"):
            call = partial(pipeline, tiny.prompts(family, 2), seed=11, method=as_methods(method))
            yield f"{family}, {settings}, {method}", attempt(call)


def hashes_of(revision: str) -> dict[str, str]:
    """Runs this module as another revision has it, in a worktree of its own."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        tree, file = Path(folder, "tree"), Path(folder, "hashes.json")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=root, check=True)
        try:
            command = [sys.executable, "-m", "tests.image_hashes", "--write", "--file", str(file)]
            subprocess.run(command, cwd=tree, check=True, env=os.environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.DEVNULL)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, check=True)
        images: dict[str, str] = json.loads(file.read_text())["images"]
        return images


def machine() -> dict[str, str]:
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {"cpu": cpu, "flags": torch.backends.cpu.get_cpu_capability(), "python": platform.python_version(), "torch": torch.__version__}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true")
    options.add_argument("--file", type=Path, default=FILE)
    options.add_argument("--against", metavar="REVISION", help="any name of a commit that git knows")
    given = options.parse_args()
    torch.set_num_threads(1)
    found = dict(hashes())
    if given.write:
        given.file.write_text(json.dumps({"machine": machine(), "images": found}, indent=1) + "\n")
        print(f"{len(found)} hashes written, {len(set(found.values()))} different")
        return 0
    return compare(found, stored_hashes(given.file) if given.against is None else hashes_of(given.against))


def stored_hashes(file: Path) -> dict[str, str]:
    stored = json.loads(file.read_text())
    if stored["machine"] != machine():
        print(f"stored on {stored['machine']}, this is {machine()}: hashes may differ for that reason alone")
    images: dict[str, str] = stored["images"]
    return images


def compare(found: dict[str, str], expected: dict[str, str]) -> int:
    """Shows what differs, and requests that only one side knows. Returns 1 if a common request differs."""
    for title, names in (("only here", found.keys() - expected.keys()), ("only there", expected.keys() - found.keys())):
        if names:
            print(f"{len(names)} requests {title}: {'; '.join(sorted(names)[:20])}")
    common = sorted(found.keys() & expected.keys())
    different = [name for name in common if found[name] != expected[name]]
    for name in different:
        print(f"{name}: {expected[name]} became {found[name]}")
    print(f"{len(common)} images compared, {len(different)} different")
    return bool(different)


if __name__ == "__main__":
    raise SystemExit(main())
