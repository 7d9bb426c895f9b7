"""Cuts the project's own cases out of the full ones: fewer expected tensors, and weights by recipe where they follow it.

    python -m tests.parity.make_compact FULL_GOLDEN_FOLDER

The weights of the tiny VAR and FlexVAR cases are recipe values bit for bit, so a salt replaces their files (a salt with the same
checksum as the original one, which is not stored). Infinity's weights are stored; of its two tokenizers the stride-8 one is kept.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from .recipe import recipe_value

TARGET = Path(__file__).parent / "golden"
BUFFERS = r"lvl_1L|attn_bias_for_masking|quantize\.(ema_vocab_hit_SV|codebook_used)"
IMAGE = r"image_\w+"


@dataclass(frozen=True)
class Cut:
    case: str  # folder, or folder and file name without ending
    drop: str  # pattern of the expected tensors that are left out
    salt: str | None = None
    weights: str | None = None  # a weights file to keep beside the case
    without_vae: bool = False  # nothing kept depends on the autoencoder's weights


INFINITY_DROP = rf"{IMAGE}|s[456]\.(block_in|hidden|block\d.*)|s3\.(block_in|hidden)|s[345]\.summed_codes"
VARIANT_DROP = r"s[456]\.(logits|probs)"
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
)


def follows_recipe(folder: Path, salt: str) -> bool:
    stored = {key: value for path in folder.glob("weights_*.safetensors") for key, value in load_file(path).items()}
    parameters = {key: value for key, value in stored.items() if not re.fullmatch(BUFFERS, key)}
    return all(np.array_equal(recipe_value(key, value.shape, salt), value) for key, value in parameters.items())


def cut(full: Path, how: Cut) -> None:
    source, target = full / how.case, TARGET / how.case
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source.with_suffix(".safetensors"))
    save_file({name: value for name, value in tensors.items() if not re.fullmatch(how.drop, name)}, target.with_suffix(".safetensors"))
    case = json.loads(source.with_suffix(".json").read_text())
    if how.salt:
        assert follows_recipe(source.parent, how.salt), f"{how.case}: the stored weights do not follow the recipe"
        case["salt"] = how.salt
    if how.without_vae:
        case["vae_weights_left_out"] = True
    if how.weights:
        shutil.copyfile(full / how.weights, target.parent / Path(how.weights).name)
        if "weights" in case:
            case["weights"] = Path(how.weights).name
    case["expected_left_out"] = how.drop
    del case["tensors"]  # a list of what the full case stores
    target.with_suffix(".json").write_text(json.dumps(case) + "\n")


def main(full: Path) -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    for how in CUTS:
        cut(full, how)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
