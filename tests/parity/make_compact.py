"""Cuts the project's own cases out of the full ones: fewer expected tensors, and weights by recipe where they follow it.

    python -m tests.parity.make_compact FULL_GOLDEN_FOLDER

The weights of the tiny VAR and FlexVAR cases are recipe values bit for bit, so a salt replaces their files (a salt with the same
checksum as the original one, which is not stored). Infinity's weights are stored; of its two tokenizers the stride-8 one is kept.
The transformers of HART and STAR are scaled normal numbers of a seed, also bit for bit. Of their tokenizers the quantizer is kept: the
networks around it are VAR's, which the cases of VAR cover. The transformers under acceleration methods follow a seed too, Infinity's
but for its head, and so do the random numbers that HART's diffusion and StageVAR have drawn.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from tests.parity.recipe import drawn_tensors, drawn_value, projections, recipe_value

TARGET = Path(__file__).parent / "golden"
BUFFERS = r"lvl_1L|attn_bias_for_masking|quantize\.(ema_vocab_hit_SV|codebook_used)"
IMAGE = r"image_\w+"


@dataclass(frozen=True)
class Cut:
    case: str  # folder, or folder and file name without ending
    drop: str  # pattern of the expected tensors that are left out; of cases with several runs, of "run/tensor"
    salt: str | None = None
    weights: str | None = None  # a weights file to keep beside the case
    without_vae: bool = False  # nothing kept depends on the autoencoder's weights, or only on its quantizer's
    seed: int | None = None  # of a transformer made of normal numbers
    transformer: str | None = None  # its file, where it is not beside the case
    written_out: tuple[str, ...] = ()  # its parameters that were changed after they had been drawn, in order
    drawn: dict[str, dict[str, Any]] = field(default_factory=dict)  # recipes of expected tensors that are left out
    files: tuple[str, ...] = ()  # weights that the case finds where they are, copied to the same place


INFINITY_DROP = rf"{IMAGE}|s[456]\.(block_in|hidden|block\d.*)|s3\.(block_in|hidden)|s[345]\.summed_codes"
VARIANT_DROP = r"s[456]\.(logits|probs)"
HART_NETWORKS = r"image|ae\.(img|enc|disc_img|fwd_\w+)"  # input of an encoder or output of a decoder
SAMPLER_DROP = "|".join(
    (
        r"\w+/(image|rope\.\w+)",
        r"\w+/s([3-8]|1\d)\.(hidden|logits)",
        r"main/s([0-7]|1[0-2])\.(f_hat|h|next_map)",
        r"main/s(9\.k[07]|1[0-2]\.k\d+|13\.k\d)\.(logits|known_emb)",
        r"new/s(9|1\d)\.k[1-9]\.logits|new/s1\d\.k0\.logits",
    )
)
RANKS = dict(enumerate((11, 30, 48, 60, 67, 58, 64, 80)))  # of the stage that StageVAR runs at low rank, by group
CUTS = (
    Cut("var/plain/case", r"", salt="kieiacye"),
    Cut("var/shared/case", r"tf\..*", salt="kieiacze"),
    Cut("var/vae_published/case", r""),
    Cut("flexvar/main/case", r"", salt="lpsfakyg"),
    Cut("flexvar/vae_published/case", r""),
    Cut("infinity/dense/case", INFINITY_DROP, weights="infinity/dense/weights_transformer.safetensors", without_vae=True),
    *(
        Cut(f"infinity/variants/{name}", VARIANT_DROP, without_vae=True)
        for name in (
            "cfg_in_hidden",
            "lvl_every_chunk",
            "negative_prompt",
            "no_cfg",
            "rope_mode0",
            "rope_mode1",
            "sampled",
            "trunk",
        )
    ),
    Cut("infinity/rope/case", r"ratio1.*"),
    Cut("infinity/vae_roundtrip_f8/case", r"recon|summed_from_bits", weights="infinity/patchify_8b_layout/weights_vae.safetensors"),
    Cut("hart/a_base/case", rf"{HART_NETWORKS}|logits\.[23]", without_vae=True, seed=3011),
    Cut("hart/b_smooth/case", rf"{HART_NETWORKS}|logits\.[3-8]|x_(in|out)\.[2-7]", without_vae=True, seed=3012),
    Cut("hart/c_variant/case", rf"{HART_NETWORKS}|logits\.[23]", without_vae=True, seed=8013),
    Cut("star/base/case", r"\w+/image|main/s5\.logits|(b2|b2_perrow|nonorm)/s([3-5]\.logits|[0-4]\.f_hat)", without_vae=True, seed=101),
    Cut("star/sampler/case", SAMPLER_DROP, without_vae=True, seed=204),
    Cut("star/vae_encode/case", r"image_in|recon", without_vae=True),
    Cut(
        "fastvar_infinity/shallow_025M_same_weights/case",
        rf"{IMAGE}|s[0-7]\.(hidden.*|logits)|s\d\.block_in.*|s[89]\.hidden.*|s8\.summed_codes|cache\.layer\d\.(cross_attn|ffn).*",
        without_vae=True,
        seed=360,
        written_out=("head.weight", "head.bias"),
        transformer="fastvar_infinity/shallow_1M/weights_transformer.safetensors",
    ),
    Cut(
        "fastvar_hart/a/case",
        r"image|diff\.noise_\w+|logits\.[0-5]|x_(in|out)\.[0-3]|f_hat\.\w+|next_map\.[56]",
        without_vae=True,
        seed=1031,
        drawn={"diffusion_noise": {"seed": 1931, "rows": 4096, "channels": 4, "steps": 8}},
    ),
    Cut(
        "stagevar_infinity/as_released_1M/case",
        r"s\d+\.(hidden.*|g\d\.q)|s\d\.(logits|next_tokens)|s10\.(g[1-7]\.in\..*|g[124-6]\.out|g[1-6]\.restored.*|next_tokens)",
        seed=311,
        written_out=("head.weight", "head.bias"),
        drawn={"projections": {"seed": 11, "tensors": {f"s10.g{group}.q": {"shape": [1600, rank]} for group, rank in RANKS.items()}}},
    ),
    Cut(
        "sparsevar_infinity/trilinear_060M_tau03/case",
        r"s([0-4]|8|9|10)\.logits|s[0-4]\.(block_in|hidden)",
        weights="sparsevar_infinity/trilinear_060M_tau03/weights_transformer.safetensors",
        without_vae=True,
    ),
    Cut(
        "scalekv_infinity/rule_depth12/case",
        rf"{IMAGE}|s\d+\.(logits|summed_codes|next_tokens)|s\d\.hidden.*|s\d+\.layer([2-46-9]|1[01])\.kept|s(9|1[0-2])\.layer0\.kept",
        without_vae=True,
        files=("scalekv_infinity/rule_depth12/weights_transformer.safetensors",),
    ),
    Cut(
        "skipvar_infinity/features_and_decisions/case",
        r"c[1-35-8]\..*|c[04]\.(old|new)_(preview|sobel)",
        files=("skipvar_infinity/skip2_1M/weights_vae.safetensors",),
    ),
    Cut(
        "code_var/n6/case",
        r"image|(draft|refine)\.s\d\.(fhat|next_map)|refine\.s[79]\.logits.*",
        without_vae=True,
        files=("code_var/n6/weights_drafter.safetensors", "code_var/n6/weights_refiner.safetensors"),
    ),
    Cut(
        "code_var/n8_seeded/case",
        r"image|hub|(draft|refine)\.s\d\.(fhat|next_map|logits.*)|refine\.prefix\.logits.*",
        without_vae=True,
    ),
)
QUANTIZERS = (
    "hart/a_base/weights_autoencoder",
    "hart/b_smooth/weights_autoencoder",
    "hart/c_variant/weights_autoencoder",
    "star/vae/vae",
    "star/vae_encode/vae_encoder",
    "fastvar_hart/a/weights_autoencoder",
)
# Means and standard deviations of normal weights: the logarithms of temperatures, norms, and the others, as they are or per input
TEMPERATURES, NORMS = ((math.log(4), 0.5), (math.log(9), 0.35)), ((1.0, 0.25), (1.0, 0.2))
DEVIATIONS = (0.15, 0.25, 0.3, 0.5, 0.2, 0.7, 1.0)
DEVIATIONS_PER_INPUT = (0.25, 0.3, 0.5, 0.6, 0.7, 0.8, 1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0, 6.0, 0.4)
LAST_BITS = 2.5e-7  # of a float32, relative: two steps


def follows_recipe(folder: Path, salt: str) -> bool:
    stored = {key: value for path in folder.glob("weights_*.safetensors") for key, value in load_file(path).items()}
    parameters = {key: value for key, value in stored.items() if not re.fullmatch(BUFFERS, key)}
    return all(np.array_equal(recipe_value(key, value.shape, salt), value) for key, value in parameters.items())


def spreads(shape: Sequence[int]) -> Iterator[tuple[float, float]]:
    yield from (*TEMPERATURES, *NORMS)
    yield from ((0.0, deviation) for deviation in DEVIATIONS)
    yield from ((0.0, deviation / math.sqrt(math.prod(shape[1:]))) for deviation in DEVIATIONS_PER_INPUT)


def how_drawn(tensor: Tensor, normal: Tensor) -> dict[str, Any] | None:
    """Returns the rule that derives a parameter from normal random numbers bit for bit, or None."""
    rounded = {"half": True} if tensor.dtype == torch.float16 else {}
    for mean, deviation in spreads(tensor.shape):
        entry = {"shape": list(tensor.shape), "mean": mean, "deviation": deviation, **rounded}
        value = drawn_value(normal, mean, deviation, **rounded)
        if torch.equal(value, tensor.float()):
            return entry | (undecided(tensor, deviation * normal, mean) if rounded else {})
        if torch.equal(value[-1], tensor[-1].float()):  # queries and keys larger than values
            ratio = (tensor / value).chunk(3)
            entry["factors"] = [round(float(part.median()), 3) for part in ratio]
            if torch.equal(drawn_value(normal, mean, deviation, entry["factors"], **rounded), tensor.float()):
                return entry
    return None


def undecided(rounded: Tensor, normal: Tensor, mean: float = 0.0) -> dict[str, Any]:
    """Entries whose rounding to float16 depends on the last bits of normal numbers, which not every processor computes alike."""
    exact, apart = normal + mean, LAST_BITS * (normal.abs() + abs(mean))
    places = ((exact - apart).half() != (exact + apart).half()).view(-1).nonzero()[:, 0].tolist()
    return {"replaced": {str(place): float(rounded.view(-1)[place]) for place in places}} if places else {}


def how_drawn_but_for_some(tensor: Tensor, normal: Tensor) -> dict[str, Any] | None:
    """Returns the rule for temperatures, one of which, beyond the largest, was set by hand."""
    rounded = {"half": True} if tensor.dtype == torch.float16 else {}
    for mean, deviation in spreads(tensor.shape) if tensor.numel() <= 4 else ():
        other = drawn_value(normal, mean, deviation, **rounded) != tensor
        if not other.all():
            replaced = {str(place): float(tensor.view(-1)[place]) for place in other.view(-1).nonzero()[:, 0].tolist()}
            return {"shape": list(tensor.shape), "mean": mean, "deviation": deviation, **rounded, "replaced": replaced}
    return None


def drawn_recipe(weights: dict[str, Tensor], seed: int, written_out: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the weights for `recipe.drawn_weights`, after finding the order in which they were drawn. Drops constant zeros."""
    left = {key: tensor for key, tensor in weights.items() if tensor.is_floating_point() and tensor.any()}
    changed = list(written_out)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    while left:
        state = generator.get_state()
        normal = {shape: torch.randn(shape, generator=generator.set_state(state)) for shape in {tensor.shape for tensor in left.values()}}
        ends = {shape: possible_ends(numbers) for shape, numbers in normal.items()}
        likely = {key: tensor for key, tensor in left.items() if float(tensor.view(-1)[-1]) in ends[tensor.shape]}
        found = first_found(how_drawn, likely, normal)
        if found is None and changed:
            key = changed.pop(0)
            found = key, {"shape": list(left[key].shape), "values": left[key].flatten().tolist()}
        found = found or first_found(how_drawn_but_for_some, left, normal)
        assert found, f"after {list(tensors)[-1:]} none of {list(left)} was drawn with seed {seed}"
        key, tensors[key] = found
        torch.randn(left.pop(key).shape, generator=generator.set_state(state))
    return {"seed": seed, "tensors": tensors}


def possible_ends(normal: Tensor) -> set[float]:
    """Returns possible last entries of a parameter, also in float16, for a quick check before comparing all entries."""
    values = [drawn_value(normal.view(-1)[-1:], mean, deviation) for mean, deviation in spreads(normal.shape)]
    return {float(value) for exact in values for value in (exact, exact.half())}


def first_found(
    how: Callable[[Tensor, Tensor], dict[str, Any] | None], weights: dict[str, Tensor], normal: dict[torch.Size, Tensor]
) -> tuple[str, dict[str, Any]] | None:
    return next(((key, entry) for key, tensor in weights.items() if (entry := how(tensor, normal[tensor.shape]))), None)


def cut(full: Path, how: Cut) -> None:
    source, target = full / how.case, TARGET / how.case
    target.parent.mkdir(parents=True, exist_ok=True)
    case = json.loads(source.with_suffix(".json").read_text())
    if "runs" in case:
        for name, run in case["runs"].items():
            cut_tensors(source.parent / run["file"], target.parent / run["file"], how.drop, f"{name}/")
            del run["tensors"]
    else:
        cut_tensors(source.with_suffix(".safetensors"), target.with_suffix(".safetensors"), how.drop)
    if how.salt:
        assert follows_recipe(source.parent, how.salt), f"{how.case}: the stored weights do not follow the recipe"
        case["salt"] = how.salt
    if how.seed is not None:
        (path,) = [full / how.transformer] if how.transformer else source.parent.glob("*transformer.safetensors")
        weights = {key: torch.from_numpy(value) for key, value in load_file(path).items()}
        case["drawn_weights"] = drawn_recipe(weights, how.seed, how.written_out)
        if isinstance(case.get("weights"), str):
            del case["weights"]
    if how.drawn:
        case["drawn_tensors"] = checked_recipes(how.drawn, load_file(source.with_suffix(".safetensors")))
    if how.without_vae:
        case["vae_weights_left_out"] = True
    if how.weights:
        shutil.copyfile(full / how.weights, target.parent / Path(how.weights).name)
        if "weights" in case:
            case["weights"] = Path(how.weights).name
    for file in how.files:
        (TARGET / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(full / file, TARGET / file)
    case["expected_left_out"] = how.drop
    for listed in ("tensors", "summaries"):  # of the tensors of the full case
        case.pop(listed, None)
    target.with_suffix(".json").write_text(json.dumps(case) + "\n")


def checked_recipes(recipes: dict[str, dict[str, Any]], stored: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Recipes that give the stored tensors bit for bit, those in float16 on any processor."""
    for name, value in drawn_tensors(recipes).items():
        assert np.array_equal(stored[name], value.numpy()), f"{name} does not follow the recipe"
    checked = {kind: dict(settings) for kind, settings in recipes.items()}
    if "projections" in checked:
        exact = projections(**checked["projections"], half=False)
        tensors = checked["projections"]["tensors"].items()
        checked["projections"]["tensors"] = {name: how | undecided(torch.from_numpy(stored[name]), exact[name]) for name, how in tensors}
    return checked


def cut_tensors(source: Path, target: Path, drop: str, prefix: str = "") -> None:
    save_file({name: value for name, value in load_file(source).items() if not re.fullmatch(drop, prefix + name)}, target)


def cut_quantizer(full: Path, file: str) -> None:
    source, target = (folder / f"{file}.safetensors" for folder in (full, TARGET))
    target.parent.mkdir(parents=True, exist_ok=True)
    cut_tensors(source, target, r"(?!(vae\.)?quantize\.(embedding|quant_resi)).*")
    if source.with_suffix(".json").exists():
        shutil.copyfile(source.with_suffix(".json"), target.with_suffix(".json"))


def main(full: Path) -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    for how in CUTS:
        cut(full, how)
    for file in QUANTIZERS:
        cut_quantizer(full, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
