"""Methods that are judged together: named lists, and single ones written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...accel.method import Method
from ...accel.registry import resolve_method
from ...accel.sparsevar import OTHER_BLOCK
from ...errors import SettingError

DENSE = "dense"
GUIDANCE_OFF = "stagevar:alphas=[]"


def standard(stages: int, blocks: int) -> dict[str, str]:
    """Every method at its published settings, and settings near them.

    FastVAR and StageVAR are published for 13 stages: they skip the last two, and thin or project the one before. There each is also tried
    without skipping. Of 10 stages FastVAR thins the last by 0.4, so there it is also tried on the last two; StageVAR runs the last two
    without guidance and the last at low rank.
    """
    skips = stages > 12
    thinned = {stages - 4: 0.4, stages - 3: 0.5, stages - 2: 0.6, stages - 1: 0.75} if skips else {stages - 2: 0.4, stages - 1: 0.5}
    variant = "no stage skipped" if skips else "last two stages"
    return {
        "skip the last stage": "skip:last=1",
        "skip the last two stages": "skip:last=2",
        "skip the last three stages": "skip:last=3",
        **{f"SparseVAR {tau}": f"sparsevar:tau={tau}" for tau in (0.4, 0.5, 0.6, 0.7)},
        **{f"SparseVAR by logits {tau}": f"sparsevar:metric=logits,tau={tau}" for tau in (0.7, 0.9)},
        "FastVAR": "fastvar",
        f"FastVAR, {variant}": f"fastvar:ratios={thinned}",
        "StageVAR": "stagevar",
        **({"StageVAR, no stage skipped": f"stagevar:alphas={ {stages - 1: 0.96} }"} if skips else {}),
        "StageVAR, guidance off only": GUIDANCE_OFF,
        "ToMe": "tome",
        "SparseVAR by logits 0.9 + guidance off": f"sparsevar:metric=logits,tau=0.9 + {GUIDANCE_OFF}",
        "FastVAR + guidance off": f"fastvar + {GUIDANCE_OFF}",
    }


def sparsevar_decisions(stages: int, blocks: int) -> dict[str, str]:
    """What the paper of SparseVAR leaves open or picks by eye, each changed alone at tau 0.6; other metrics at thresholds of their own."""
    first = 10 if stages > 10 else stages - 1  # what from_stage is when it is not given
    published = max(1, round(OTHER_BLOCK * blocks))  # what block is then, except for HART
    chosen: dict[str, dict[str, object]] = {
        "SparseVAR 0.6": {},
        "rows both": {"rows": "both"},
        **{f"alpha {alpha}": {"alpha": alpha} for alpha in (2, 8, "none")},
        **{f"beta {beta}": {"beta": beta} for beta in (0.8, 0.95, -1)},
        **{f"from stage {stage}": {"from_stage": stage} for stage in range(max(2, first - 2), stages + 1) if stage != first},
        **{f"block {block}": {"block": block} for block in range(1, blocks + 1) if block != published},
        **{f"logits {tau}": {"metric": "logits", "tau": tau} for tau in (0.5, 0.7, 0.9, 0.97)},
        **{f"image {tau}": {"metric": "image", "tau": tau} for tau in (0.04, 0.1, 0.3)},
    }
    return {
        name: "sparsevar:" + ",".join(f"{key}={value}" for key, value in ({"tau": 0.6} | settings).items())
        for name, settings in chosen.items()
    }


def peers(stages: int, blocks: int) -> dict[str, str]:
    """The other methods of the papers' tables: at their own settings, and milder or bolder where one number says so."""
    return {
        "ScaleKV": "scalekv",
        "ScaleKV, a quarter kept": "scalekv:share=0.25",
        "SkipVAR": "skipvar",
        "SkipVAR 0.88": "skipvar:models=0.88",
        **{f"PiToMe {ratio}": f"pitome:ratio={ratio}" for ratio in (0.25, 0.5)},
        **{f"SparseViT {ratio}": f"sparsevit:ratio={ratio}" for ratio in (0.25, 0.5)},
        **{f"ZipVL {ratio}": f"zipvl:ratio={ratio}" for ratio in (0.25, 0.5)},
        "ZipVL, tau 0.975": "zipvl:tau=0.975",
        "LiteVAR": "litevar",
        "LiteVAR, bands alone": "litevar:share_rows=false",
        "SparVAR": "sparvar",
        "SparVAR, windows alone": "sparvar:choosing=0",
    }


LISTS: Mapping[str, Callable[[int, int], dict[str, str]]] = {
    "standard": standard,
    "sparsevar-decisions": sparsevar_decisions,
    "peers": peers,
}


def chosen_methods(asked: Sequence[str], stages: int, blocks: int) -> dict[str, Method]:
    """Dense generation, then what is asked for: names of lists, or methods such as "skip:last=2" and "fastvar + skip:last=1"."""
    specs: dict[str, str] = {}
    for one in asked:
        specs |= LISTS[one](stages, blocks) if one in LISTS else {one: one}
    try:
        methods = {name: parse_methods(spec) for name, spec in specs.items() if name != DENSE}
    except SettingError as error:
        raise SettingError(f"{error}. Lists of methods: {', '.join(LISTS)}") from error
    return {DENSE: Method(), **methods}


def parse_methods(*specs: str) -> Method:
    """One method of several specs, each such as "fastvar" or "fastvar + skip:last=1"; none is dense generation."""
    return resolve_method([part.strip() for spec in specs for part in spec.split("+")] or None)
