"""Hashes of images of all models and methods, to see that a change of the code changes no image.

    python -m tests.image_hashes --write    before the change
    python -m tests.image_hashes            after it

Bits depend on the machine and on torch's version, so hashes of one machine say nothing about another.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import nextscale

from . import tiny

FILE = Path(__file__).parent / "data" / "image_hashes.json"
METHODS: tuple[str, ...] = (
    "dense",
    "skip:last=1",
    "sparsevar:tau=0.9,first_stage=2",
    "sparsevar:tau=0.6,first_stage=2,alpha=none,rows=both",
    "sparsevar:tau=0.7,first_stage=2,metric=logits",
    "sparsevar:tau=0.3,first_stage=2,metric=image",
    "fastvar:ratios={2:0.5,3:0.5}",
    "fastvar:ratios={1:0.3,3:1.0}",
    "stagevar:guidance_off=2,alphas={3:0.96}",
    "stagevar:guidance_off=9,alphas={3:0.96},ranks=0.4",
    "stagevar:alphas=[]",
    "stagevar:variant=svd,alphas={3:0.9}",
    "stagevar:variant=least_squares,ranks=0.5,alphas={3:0.9}",
    "stagevar:ranks=measured,alphas={3:0.9}",
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
NANO_METHODS = ("dense", "skip:last=1", "sparsevar:tau=0.7", "sparsevar:metric=logits,tau=0.8", "fastvar", "stagevar", "tome")


def digest(output: Any) -> str:
    found = hashlib.sha256()
    for tensor in (*output.codes, output.latent, output.pixels):
        found.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.contiguous().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def as_methods(text: str) -> list[str]:
    return [part.strip() for part in text.split(" + ")]


def hashes() -> Iterator[tuple[str, str]]:
    """The name of a request and the hash of its images, or what it was refused with."""
    for family in tiny.FAMILIES:
        pipeline = tiny.shared_pipeline(family)
        for method in METHODS:
            for guidance in (None, tiny.NO_GUIDANCE[family]):
                try:
                    found = digest(pipeline(tiny.prompts(family, 3), seed=11, guidance=guidance, method=as_methods(method)))
                except nextscale.NextscaleError as error:
                    found = type(error).__name__
                yield f"{family}, {'guided' if guidance is None else 'unguided'}, {method}", found
    nano = nextscale.load("nano", device="cpu")
    for method in NANO_METHODS:
        found = digest(nano(["a 3D icon of a red apple", "a flat icon of a rocket"], seed=7, method=as_methods(method)))
        yield f"nano, {method}", found
    yield "nano, 4:3", digest(nano("a photo of a shirt", seed=3, aspect="4:3", guidance=2))


def machine() -> dict[str, str]:
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {"cpu": cpu, "flags": torch.backends.cpu.get_cpu_capability(), "python": platform.python_version(), "torch": torch.__version__}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true")
    options.add_argument("--file", type=Path, default=FILE)
    given = options.parse_args()
    torch.set_num_threads(1)
    found = dict(hashes())
    if given.write:
        given.file.write_text(json.dumps({"machine": machine(), "images": found}, indent=1) + "\n")
        print(f"{len(found)} hashes written, {len(set(found.values()))} different")
        return 0
    stored = json.loads(given.file.read_text())
    if stored["machine"] != machine():
        print(f"stored on {stored['machine']}, this is {machine()}: hashes may differ for that reason alone")
    different = [name for name in stored["images"].keys() | found.keys() if stored["images"].get(name) != found.get(name)]
    for name in sorted(different):
        print(f"{name}: {stored['images'].get(name)} became {found.get(name)}")
    print(f"{len(found)} images compared, {len(different)} different")
    return bool(different)


if __name__ == "__main__":
    raise SystemExit(main())
