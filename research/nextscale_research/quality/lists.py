"""Lists of methods that are compared together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nextscale.errors import SettingError
from nextscale.eval.results import DENSE
from nextscale.methods.method import Method
from nextscale.methods.registry import resolve_method, standard_methods

from ..methods.sparsevar_variants import LEFT_OUT

GUIDANCE_OFF = "stagevar:alphas=[]"
TAUS = (0.4, 0.5, 0.6, 0.7)
METRIC_TAUS = {"mse": (0.2, 0.3, *TAUS), "logits": (0.2, 0.3, *TAUS), "image": (0.04, 0.05, 0.06, 0.07, 0.1, 0.2, 0.3)}
VARIANTS = ("vanilla", "svd_approximation", "svd", "svd_fixed", "least_squares", "representative")


def sparsevar_decisions(stages: int, blocks: int) -> dict[str, str]:
    """SparseVAR, choices that the paper leaves open or makes by eye, one changed at a time at a budget of 40 % in the last three stages.

    The budget keeps equally many tokens whatever the setting, so that the rows differ in the choice alone.
    """
    keep = {stage: 0.4 for stage in range(max(1, stages - 3), stages)}
    groups = {f"blocks {first} to {first + blocks // 4 - 1}": (first, first + blocks // 4) for first in range(0, blocks, blocks // 4)}
    chosen: dict[str, dict[str, object]] = {
        "SparseVAR, 40 % kept": {},
        **{f"alpha {alpha}": {"alpha": alpha} for alpha in (2, 3, 6, 8, "none")},
        **{f"beta {beta}": {"beta": beta} for beta in (0.8, 0.95, 1, -1)},
        **{f"block {block}": {"blocks": block} for block in range(blocks)},
        **{name: {"blocks": list(group)} for name, group in groups.items()},
        "all blocks": {"blocks": [0, blocks]},
        "logits": {"metric": "logits"},
        "image": {"metric": "image"},
    }
    specs = {name: {"keep": keep} | settings for name, settings in chosen.items()}
    return {name: "sparsevar:" + ",".join(f"{key}={value}" for key, value in settings.items()) for name, settings in specs.items()}


def fastvar_scales(stages: int, blocks: int) -> dict[str, str]:
    """FastVAR, table 4: two neighboring stages are thinned, ever later ones."""
    pairs = [(first, first + 1) for first in range(max(2, stages - 6), stages - 1, 2)]
    return {f"{a} and {b}, {ratio:.0%}": f"fastvar:ratios={ {a: ratio, b: ratio} }" for a, b in pairs for ratio in (0.5, 0.75)}


def fastvar_ratios(stages: int, blocks: int) -> dict[str, str]:
    """FastVAR, figure 6: how much of the last stage is not run."""
    return {f"ratio {ratio}": f"fastvar:ratios={ {stages - 1: ratio} }" for ratio in (0.25, 0.5, 0.6, 0.75, 0.9, 1.0)}


def fastvar_cache(stages: int, blocks: int) -> dict[str, str]:
    """FastVAR, table A.4: the last two stages are thinned, and restored from ever earlier ones."""
    thinned = {stages - 2: 0.4, stages - 1: 0.5}
    return {f"cache {stage}": f"fastvar:ratios={thinned},cache_stage={stage}" for stage in range(max(1, stages - 6), stages - 2)}


def stagevar_ranks(stages: int, blocks: int) -> dict[str, str]:
    """StageVAR, figure 7: rank ratios of the last stage."""
    return {f"rank {ratio}": f"stagevar:alphas={ {stages - 1: 0.96} },ranks={ratio}" for ratio in (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)}


def sparsevar_anchors(stages: int, blocks: int) -> dict[str, str]:
    """SparseVAR, table 4: one anchor in every alpha x alpha cells."""
    return {f"anchors {alpha}": f"sparsevar:tau=0.6,alpha={alpha}" for alpha in (2, 3, 4, 5, None)}


def sparsevar_stages(stages: int, blocks: int) -> dict[str, str]:
    """SparseVAR, table 5: the stage P, counted from 0, from which tokens leave."""
    return {f"from stage {first}": f"sparsevar:tau=0.6,first_stage={first}" for first in range(max(1, stages - 8), stages)}


def sparsevar_taus(stages: int, blocks: int) -> dict[str, str]:
    """SparseVAR, tables 1 to 3: thresholds."""
    return {f"tau {tau}": f"sparsevar:tau={tau}" for tau in TAUS}


def sparsevar_metrics(stages: int, blocks: int) -> dict[str, str]:
    """SparseVAR, figure 6: each metric over its thresholds."""
    return {f"{metric} {tau}": f"sparsevar:metric={metric},tau={tau}" for metric, taus in METRIC_TAUS.items() for tau in taus}


def sparsevar_blocks(stages: int, blocks: int) -> dict[str, str]:
    """SparseVAR, figure 8: the block across which change is measured, at a threshold."""
    return {f"tau 0.6, block {block}": f"sparsevar:tau=0.6,blocks={block}" for block in range(blocks)}


def sparsevar_left_out(stages: int, blocks: int) -> dict[str, str]:
    """The change at cells that did not run, at thresholds: as at the stage before, or 0 (equation 1)."""
    return {f"left out {left_out}, tau {tau}": f"sparsevar_variants:left_out={left_out},tau={tau}" for tau in TAUS for left_out in LEFT_OUT}


def fastvar_layers(stages: int, blocks: int) -> dict[str, str]:
    """FastVAR's paper prunes all blocks, its program 3 to 27 of 32."""
    first, last = round(3 * blocks / 32), round(28 * blocks / 32)
    ranges = {"all blocks": (0, blocks), "blocks as released": (first, last), "inner half": (blocks // 4, blocks - blocks // 4)}
    return {name: f"fastvar:layers=[{first},{last}]" for name, (first, last) in ranges.items()}


def stagevar_variants(stages: int, blocks: int) -> dict[str, str]:
    """StageVAR, table 2: ways to run the last three stages at low rank, guidance as it was."""
    alphas = dict.fromkeys(range(max(1, stages - 3), stages), 0.99)
    return {
        f"{number} {variant}": f"stagevar_variants:variant={variant},alphas={alphas},guidance_off=99"
        for number, variant in enumerate(VARIANTS, 1)
    }


def stagevar_alphas(stages: int, blocks: int) -> dict[str, str]:
    """StageVAR, figure 7 by energy: the last stage, with ranks measured during generation."""
    settings = {alpha: f"stagevar_variants:alphas={ {stages - 1: alpha} },ranks=measured" for alpha in (0, 0.8, 0.9, 0.96, 0.99)}
    return {f"alpha {alpha}": setting for alpha, setting in settings.items()}


def stagevar_guidance(stages: int, blocks: int) -> dict[str, str]:
    """StageVAR, figures 2 and 14: guidance is dropped from ever later stages on."""
    return {f"unguided from {stage}": f"stagevar:guidance_off={stage},alphas=[]" for stage in range(1, stages)}


def peers_shares(stages: int, blocks: int) -> dict[str, str]:
    """SparseVAR, figure 10: merging 10 to 50 %, selecting 10 to 80 %, and SparseVAR beside."""
    merging = {f"{name} {ratio:.0%}": f"{name.lower()}:ratio={ratio}" for name in ("ToMe", "PiToMe") for ratio in (0.1, 0.2, 0.3, 0.4, 0.5)}
    ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    selecting = {f"{name} {ratio:.0%}": f"{name.lower()}:ratio={ratio}" for name in ("SparseViT", "ZipVL") for ratio in ratios}
    return merging | selecting | sparsevar_taus(stages, blocks)


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
    "standard": lambda stages, blocks: standard_methods(stages),
    "sparsevar-decisions": sparsevar_decisions,
    "sparsevar-taus": sparsevar_taus,
    "sparsevar-metrics": sparsevar_metrics,
    "sparsevar-anchors": sparsevar_anchors,
    "sparsevar-stages": sparsevar_stages,
    "sparsevar-blocks": sparsevar_blocks,
    "sparsevar-left-out": sparsevar_left_out,
    "fastvar-scales": fastvar_scales,
    "fastvar-ratios": fastvar_ratios,
    "fastvar-cache": fastvar_cache,
    "fastvar-layers": fastvar_layers,
    "stagevar-variants": stagevar_variants,
    "stagevar-ranks": stagevar_ranks,
    "stagevar-alphas": stagevar_alphas,
    "stagevar-guidance": stagevar_guidance,
    "peers": peers,
    "peers-shares": peers_shares,
}


def chosen_methods(asked: Sequence[str], stages: int, blocks: int) -> dict[str, Method]:
    """Returns dense generation, then the given methods: names of lists, or methods such as "skip:last=2" and "fastvar + skip:last=1"."""
    specs: dict[str, str] = {}
    for one in asked:
        specs |= LISTS[one](stages, blocks) if one in LISTS else {one: one}
    try:
        methods = {name: resolve_method(spec) for name, spec in specs.items() if name != DENSE}
    except SettingError as error:
        raise SettingError(f"{error}. Lists of methods: {', '.join(LISTS)}") from error
    return {DENSE: Method(), **methods}
