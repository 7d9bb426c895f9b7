"""Cases of Infinity."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale import Output, Pipeline, Sampling, Schedule, Stage, StageGuidance, TextFeatures, Tokens
from nextscale.canvas import to_map, to_rows
from nextscale.io import to_pil
from nextscale.models import Infinity, InfinityConfig
from nextscale.models.rope import RopeMode, grid_positions, infinity_rotations
from nextscale.pipeline import Settings
from nextscale.sampling import filter_logits
from nextscale.schedules import INFINITY_SIZES, InfinitySchedules
from nextscale.tokenizers import InfinityTokenizer, InfinityTokenizerConfig
from tests.parity.compare import Expected, Tolerance
from tests.parity.settings import TRUNK, translated, understood
from tests.parity.supplied import FeatureReader, without_decoder
from tests.parity.trace import StageTrace, Trace, TracedRng, outputs_of
from tests.parity.weights import fill

TOLERANCE = Tolerance(2e-4, 1e-4)
TABLE_TOLERANCE = Tolerance(1e-5, 0.0)
ROPE_MODES: dict[int, RopeMode] = {0: "raw", 1: "resampled", 2: "normalized"}
OFFICIAL_SAMPLER = {"top_k": 900, "top_p": 0.97}
MODEL = {**TRUNK, "block_chunks": "chunks", "text_channels": "text_channels", "text_maxlen": "longest_text"}
TOKENIZER = {"codebook_dim": "bits", "base_ch": "channels", "ch_mult": "multipliers", "num_res_blocks": "blocks_per_level"}
SUBLAYERS = {"sa_out": "attention", "ca_out": "text_attention", "ffn_out": "feed_forward"}
Read = dict[str, Callable[[], Tensor]]


def schedule_of(scales: list[list[int]], template: float) -> Schedule:
    return Schedule([(height, width) for _, height, width in scales], extent=INFINITY_SIZES[template][-1])


def tokenizer_of(config: dict[str, Any], patchify: bool) -> InfinityTokenizer:
    return InfinityTokenizer(InfinityTokenizerConfig(**translated(config, TOKENIZER), patchify=patchify))


def weights_file(case: dict[str, Any], part: str) -> str:
    """Returns the weights file next to the case, or the one that it names: "../dense/weights_*.safetensors" or "../dense"."""
    if part == "vae" and "weights_vae" in case:
        return case["weights_vae"]
    where = case.get("weights", ".")
    return (where if where.endswith(".safetensors") else f"{where}/weights_*.safetensors").replace("*", part)


def to_cells(tokenizer: InfinityTokenizer, codes: Tensor, stage: Stage) -> Tensor:
    """Bits of tokens [B, N, bits per token] in the order of the files: [B, 1, h, w, bits]."""
    return tokenizer.spread_cells(to_map(codes.float(), stage)).permute(0, 2, 3, 1)[:, None].long()


def to_tokens(tokenizer: InfinityTokenizer, bits: Tensor) -> Tensor:
    """Inverts `to_cells`."""
    return to_rows(tokenizer.gather_cells(bits[:, 0].permute(0, 3, 1, 2).float())).long()


def split_text(expected: Expected, name: str) -> TextFeatures:
    lengths = expected.input(f"in.{name}_lens").tolist()
    return TextFeatures.of(list(expected.input(f"in.{name}_kv").split(lengths)))


def infinity_model(config: dict[str, Any]) -> Infinity:
    return Infinity(
        InfinityConfig(
            **translated(config, MODEL),
            bits_per_token=config["vae_bits"] * (4 if config["apply_spatial_patchify"] else 1),
            rope=ROPE_MODES[config["rope2d_normalized_by_hw"]],
            level_every_chunk=not config["add_lvl_embeding_only_first_block"],
        )
    )


def build(folder: Path, case: dict[str, Any]) -> Pipeline:
    config = case["config"]
    check_config(config)
    model, tokenizer = infinity_model(config), tokenizer_of(config["vae"], bool(config["apply_spatial_patchify"]))
    fill(model, folder, weights_file(case, "transformer"), case)
    if case.get("vae_weights_left_out"):
        for parameter in tokenizer.parameters():
            torch.nn.init.zeros_(parameter)
        without_decoder(tokenizer)
    else:
        fill(tokenizer, folder, weights_file(case, "vae"), case)
    settings = Settings(InfinitySchedules(), StageGuidance(), Sampling())
    return Pipeline(model, tokenizer, FeatureReader(), settings)


def check_config(config: dict[str, Any]) -> None:
    said_elsewhere = {"pn", "B"}  # by the schedule and the prompts
    switches = {"apply_spatial_patchify", "rope2d_normalized_by_hw", "add_lvl_embeding_only_first_block"}
    read = {*MODEL, *switches, *said_elsewhere, "h_div_w_template", "scale_schedule", "vae"}
    understood(config, read, {"mlp_ratio": 4, "vae_bits": config["vae"]["codebook_dim"]})
    patch = 2 ** (len(config["vae"]["ch_mult"]) - 1)
    understood(config["vae"], TOKENIZER, {"patch_size": patch, "norm_groups": "32 if channels % 32 == 0 else 24"})


def replay_infinity(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    pipe, chosen = build(folder, case), case.get("settings", {})
    understood(chosen, {"gt_leak", "trunk_scale", "g_seed", "cfg_insertion_layer"}, {})
    forced = {i: to_tokens(pipe.tokenizer, expected.input(f"in.gt_bits{i}")) for i in range(chosen.get("gt_leak", 0))}
    generated = generation(
        pipe,
        {"cfg_insertion_layer": [0]} | case | chosen,
        expected,
        Trace(observed=range(len(pipe.model.blocks)), stages=chosen.get("trunk_scale")),
        seed=TracedRng(torch.Generator().manual_seed(chosen.get("g_seed", 0))),
        revise=lambda stage, codes: forced.get(stage.index, codes),
        **(OFFICIAL_SAMPLER if "g_seed" in chosen else {"greedy": True}),
    )
    compare(expected, generated.read, TOLERANCE)
    if "image_uint8_mean" in case and "vae_weights_left_out" not in case:
        means = bgr(generated.out.pixels).float().mean(dim=(1, 2)).flatten()
        assert (means - torch.tensor(case["image_uint8_mean"])).abs().max() < 0.05, "image_uint8_mean"


class Generation(NamedTuple):
    read: Read  # tensors that a case may store, by their names there
    out: Output
    stages: StageTrace


def generation(pipe: Pipeline, case: dict[str, Any], expected: Expected, trace: Trace, **request: Any) -> Generation:
    """Runs the generation of a case. `request` goes to the pipeline too."""
    schedule = schedule_of(case["config"]["scale_schedule"], case["config"]["h_div_w_template"])
    insertion, stages = case["cfg_insertion_layer"], StageTrace(schedule)
    with outputs_of(traced_modules(pipe.model)) as seen:
        out = pipe(
            split_text(expected, "text"),
            negative=split_text(expected, "neg") if "in.neg_kv" in expected else None,
            size=schedule,
            guidance=StageGuidance(0 in insertion, tuple(layer for layer in insertion if layer < 0), tuple(case["cfg_list"])),
            temperature=tuple(case["tau_list"]),
            on_stage=stages,
            **{"method": trace, **request},
        )
    if "stages_run" in case:
        assert [done.stage.index for done in stages.done] == case["stages_run"], "stages_run"
    return Generation(readings(pipe, trace, stages, seen, out, case), out, stages)


def traced_modules(model: Infinity) -> dict[str, torch.nn.Module]:
    return {
        "text_normed": model.text_norm,
        "cond": model.text_pool,
        "ca_kv": model.text_proj,
        "gss": model.shared_modulation,
        **{f"block{i}.{name}": getattr(block, sublayer) for i, block in enumerate(model.blocks) for name, sublayer in SUBLAYERS.items()},
    }


def readings(pipe: Pipeline, trace: Trace, stages: StageTrace, seen: dict[str, list[Tensor]], out: Output, case: dict[str, Any]) -> Read:
    read: Read = {
        "text_normed": lambda: seen["text_normed"][0],
        "cond": lambda: seen["cond"][0],
        "ca_kv": lambda: seen["ca_kv"][0],
        "gss": lambda: seen["gss"][0].unflatten(-1, (6, -1))[:, None],
        "final_codes": lambda: out.latent,
        "image_uint8_bgr": lambda: every(bgr(out.pixels), said_of(case, "image_uint8_bgr")),
        "image_float": lambda: every(out.pixels.clamp(-1, 1), case.get("image_float_subsample") or said_of(case, "image_float")),
        "kv_len_per_layer": lambda: torch.tensor([cache.lengths[-1] for cache in trace.caches]),
    }
    last = len(pipe.model.blocks) - 1
    for i, done in enumerate(stages.done):
        read[f"s{i}.block_in"] = lambda i=i: trace.first_inputs[i]
        read[f"s{i}.hidden"] = lambda i=i: trace.outputs[i, last]
        read[f"s{i}.logits"] = lambda done=done: done.logits
        read[f"s{i}.bits"] = lambda done=done: to_cells(pipe.tokenizer, done.codes, done.stage)
        read[f"s{i}.summed_codes"] = lambda i=i: stages.latents[i]
        read[f"s{i}.probs"] = lambda done=done: filter_logits(done.logits, **OFFICIAL_SAMPLER).softmax(-1).flatten(0, 2)
        for j in range(last + 1):
            read[f"s{i}.block{j}.out"] = lambda i=i, j=j: trace.outputs[i, j]
            for sublayer in SUBLAYERS:
                read[f"s{i}.block{j}.{sublayer}"] = lambda i=i, key=f"block{j}.{sublayer}": seen[key][i]
        if not done.stage.last:
            read[f"s{i}.next_tokens"] = lambda i=i: stages.next_inputs[i]
            read[f"s{i}.next_embed"] = lambda i=i: pipe.model.word_embed(stages.next_inputs[i]).detach()
    return read


def said_of(case: dict[str, Any], name: str) -> str:
    return case.get("legend", {}).get(name, "")


def every(x: Tensor, said: str) -> Tensor:
    """Returns the stored entries that a case describes in its text, such as "[:, ::4, ::4]"; all by default."""
    found = re.search(r"\[:(, :|, ::\d+)*\]", said)
    steps = [int(step or 1) for step in re.findall(r":(?::(\d+))?", found.group())] if found else []
    return x[tuple(slice(None, None, step) for step in steps)]


def compare(expected: Expected, read: Read, tolerance: Tolerance, special: dict[str, Tolerance] | None = None) -> None:
    """Compares stored tensors. A name with ".sub4" that no reader handles means every fourth token.

    `special` maps suffixes of names to tolerances.
    """
    for name, stored in expected.tensors.items():
        whole, _, step = (name, "", "") if name in read else name.partition(".sub")
        if whole not in read:
            continue
        actual = read[whole]()[:, :: int(step)] if step else read[whole]()
        if name == "image_uint8_bgr":
            expected.close(name, actual, Tolerance(1.0))
        elif stored.is_floating_point():
            expected.close(name, actual, next((other for end, other in (special or {}).items() if whole.endswith(end)), tolerance))
        else:
            expected.equal(name, actual)


def bgr(pixels: Tensor) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(image)) for image in to_pil(pixels)]).flip(-1)


def replay_roundtrip(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    scales = case["vae_scale_schedule"]
    patchify = scales[0][1:] == [2, 2]
    cells = 2 if patchify else 1
    tokenizer = tokenizer_of(case["vae"], patchify)
    fill(tokenizer, folder, case["weights"], case)
    schedule = Schedule([(height // cells, width // cells) for _, height, width in scales])
    images = expected.input("in.image")
    with torch.inference_mode():
        expected.close("enc_features", tokenizer.features(images), TOLERANCE)
        codes = tokenizer.encode(images, schedule)
        canvas = tokenizer.canvas(schedule, images.shape[0])
        for stage, bits in zip(schedule, codes, strict=True):
            expected.equal(f"bits{stage.index}", to_cells(tokenizer, bits, stage))
            canvas.add(bits, Tokens(stage))
            if not stage.last:
                size = tokenizer.map_size(schedule[stage.index + 1])
                expected.close(f"var_input{stage.index}", F.interpolate(canvas.latent, size=size, mode="area"), TOLERANCE)
        decoded = tokenizer.decode(canvas.latent)
    for name in ("quantized", "summed_from_bits"):
        if name in expected:
            expected.close(name, canvas.latent, TOLERANCE)
    for name in ("recon", "recon_from_bits"):
        if name in expected:
            expected.close(name, every(decoded.clamp(-1, 1), said_of(case, name)), TOLERANCE)


def replay_rope(case: dict[str, Any], expected: Expected) -> None:
    """Compares tables [cos | sin, tokens, half] and the integer positions of the one-megapixel schedules."""
    for name in expected.tensors:
        ratio, mode, axis = re.fullmatch(r"ratio([\d.]+)\.mode(\d)(?:\.(row|col)_index_1M)?", name).groups()
        sizes = INFINITY_SIZES[float(ratio)]
        if axis:
            whole = [grid_positions(stage, sizes[-1])[axis == "col"] for stage in Schedule(sizes)]
            expected.equal(name, torch.cat(whole).to(torch.uint8))
            continue
        schedule = schedule_of(case["schedules"][ratio], float(ratio))
        table = torch.cat([infinity_rotations(stage, schedule.extent, case["head_dim"], ROPE_MODES[int(mode)]) for stage in schedule])
        expected.close(name, torch.view_as_real(table).permute(2, 0, 1), TABLE_TOLERANCE)
