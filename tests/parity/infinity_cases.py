"""Cases of Infinity."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale import Pipeline, Sampling, Schedule, Stage, StageGuidance, TextFeatures, Tokens
from nextscale.canvas import to_map, to_rows
from nextscale.images import to_pil
from nextscale.models import Infinity, InfinityConfig
from nextscale.models.rope import RopeMode, grid_positions, infinity_rotations
from nextscale.presets import Settings
from nextscale.sampling import filter_logits
from nextscale.schedules import INFINITY_SIZES, InfinityBook
from nextscale.tokenizers import InfinityTokenizer, InfinityTokenizerConfig

from .compare import Expected, Tolerance
from .recorder import Recorder, RecordingDraws, Watch, outputs_of
from .supplied import FeatureReader
from .weights import fill

TOLERANCE = Tolerance(2e-4, 1e-4)
TABLE_TOLERANCE = Tolerance(1e-5, 0.0)
ROPE_MODES: dict[int, RopeMode] = {0: "raw", 1: "resampled", 2: "normalized"}
OFFICIAL_SAMPLER = {"top_k": 900, "top_p": 0.97}


def schedule_of(scales: list[list[int]], template: float) -> Schedule:
    return Schedule([(height, width) for _, height, width in scales], extent=INFINITY_SIZES[template][-1])


def tokenizer_of(config: dict[str, Any], patchify: bool) -> InfinityTokenizer:
    return InfinityTokenizer(
        InfinityTokenizerConfig(
            bits=config["codebook_dim"],
            channels=config["base_ch"],
            multipliers=tuple(config["ch_mult"]),
            blocks_per_level=config["num_res_blocks"],
            patchify=patchify,
        )
    )


def weights_file(case: dict[str, Any], part: str) -> str:
    """Beside the case, or where it says, e.g. "../dense/weights_*.safetensors"."""
    return case.get("weights", "weights_*.safetensors").replace("*", part)


def to_cells(tokenizer: InfinityTokenizer, codes: Tensor, stage: Stage) -> Tensor:
    """Bits of tokens [B, N, bits per token] in the order of the files: [B, 1, h, w, bits]."""
    return tokenizer.spread_cells(to_map(codes.float(), stage)).permute(0, 2, 3, 1)[:, None].long()


def to_tokens(tokenizer: InfinityTokenizer, bits: Tensor) -> Tensor:
    """The inverse of `to_cells`."""
    return to_rows(tokenizer.gather_cells(bits[:, 0].permute(0, 3, 1, 2).float())).long()


def split_text(expected: Expected, name: str) -> TextFeatures:
    lengths = expected.input(f"in.{name}_lens").tolist()
    return TextFeatures.of(list(expected.input(f"in.{name}_kv").split(lengths)))


def build(folder: Path, case: dict[str, Any]) -> Pipeline:
    config = case["config"]
    patchify = bool(config["apply_spatial_patchify"])
    tokenizer = tokenizer_of(config["vae"], patchify)
    assert config["mlp_ratio"] == 4, "all published models have ratio 4"
    assert config["vae_bits"] == config["vae"]["codebook_dim"]
    model = Infinity(
        InfinityConfig(
            depth=config["depth"],
            width=config["embed_dim"],
            heads=config["num_heads"],
            chunks=config["block_chunks"],
            bits_per_token=tokenizer.config.bits_per_token,
            text_channels=config["text_channels"],
            longest_text=config["text_maxlen"],
            rope=ROPE_MODES[config["rope2d_normalized_by_hw"]],
            level_every_chunk=not config["add_lvl_embeding_only_first_block"],
        )
    )
    fill(model, folder, weights_file(case, "transformer"), case)
    if case.get("vae_weights_left_out"):
        for parameter in tokenizer.parameters():
            torch.nn.init.zeros_(parameter)
    else:
        fill(tokenizer, folder, weights_file(case, "vae"), case)
    settings = Settings(InfinityBook(), StageGuidance(), Sampling())
    return Pipeline(model, tokenizer, FeatureReader(), settings)


def replay_infinity(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    pipe, config, chosen = build(folder, case), case["config"], case.get("settings", {})
    model, tokenizer = pipe.model, pipe.tokenizer
    known = {"gt_leak", "trunk_scale", "g_seed", "cfg_insertion_layer"}
    assert set(chosen) <= known, f"settings not understood: {sorted(set(chosen) - known)}"
    schedule = schedule_of(config["scale_schedule"], config["h_div_w_template"])
    forced = {i: to_tokens(tokenizer, expected.input(f"in.gt_bits{i}")) for i in range(chosen.get("gt_leak", 0))}
    insertion = chosen.get("cfg_insertion_layer", case.get("cfg_insertion_layer", [0]))
    recorder = Recorder(taps=range(len(model.blocks)), stages=chosen.get("trunk_scale"))
    watch = Watch(schedule)
    draws = RecordingDraws(torch.Generator().manual_seed(chosen.get("g_seed", 0)))
    with outputs_of(recorded_modules(model)) as seen:
        out = pipe(
            split_text(expected, "text"),
            negative=split_text(expected, "neg") if "in.neg_kv" in expected else None,
            seed=draws,
            size=schedule,
            guidance=StageGuidance(0 in insertion, tuple(layer for layer in insertion if layer < 0), tuple(case["cfg_list"])),
            temperature=tuple(case["tau_list"]),
            method=recorder,
            on_stage=watch,
            revise=lambda stage, codes: forced.get(stage.index, codes),
            **(OFFICIAL_SAMPLER if "g_seed" in chosen else {"greedy": True}),
        )
    for name, read in readings(pipe, schedule, recorder, watch, seen, out.pixels, case).items():
        if name in expected and name.endswith("bits"):
            expected.equal(name, read())
        elif name == "image_uint8_bgr" and name in expected:
            expected.close(name, read(), Tolerance(1.0, 0.0))
        elif name in expected:
            expected.close(name, read(), TOLERANCE)
    if "image_uint8_mean" in case and "vae_weights_left_out" not in case:
        means = bgr(out.pixels).float().mean(dim=(1, 2)).flatten()
        assert (means - torch.tensor(case["image_uint8_mean"])).abs().max() < 0.05, "image_uint8_mean"


def recorded_modules(model: Infinity) -> dict[str, torch.nn.Module]:
    parts = {"sa_out": "attention", "ca_out": "text_attention", "ffn_out": "feed_forward"}
    return {
        "text_normed": model.text_norm,
        "cond": model.text_pool,
        "ca_kv": model.text_proj,
        "gss": model.shared_modulation,
        **{f"block{i}.{name}": getattr(block, part) for i, block in enumerate(model.blocks) for name, part in parts.items()},
    }


def readings(
    pipe: Pipeline,
    schedule: Schedule,
    recorder: Recorder,
    watch: Watch,
    seen: dict[str, list[Tensor]],
    pixels: Tensor,
    case: dict[str, Any],
) -> dict[str, Callable[[], Tensor]]:
    """Everything a case may have stored, by its name there."""
    read: dict[str, Callable[[], Tensor]] = {
        "text_normed": lambda: seen["text_normed"][0],
        "cond": lambda: seen["cond"][0],
        "ca_kv": lambda: seen["ca_kv"][0],
        "gss": lambda: seen["gss"][0].unflatten(-1, (6, -1))[:, None],
        "final_codes": lambda: watch.latents[-1],
        "image_uint8_bgr": lambda: bgr(pixels),
    }
    if "image_float_subsample" in case:
        step = int(re.fullmatch(r"\[:, :, ::(\d+), ::\1\]", case["image_float_subsample"]).group(1))
        read["image_float"] = lambda: pixels.clamp(-1, 1)[:, :, ::step, ::step]
    last = len(pipe.model.blocks) - 1
    for i, done in enumerate(watch.done):
        read[f"s{i}.block_in"] = lambda i=i: recorder.first_inputs[i]
        read[f"s{i}.hidden"] = lambda i=i: recorder.outputs[i, last]
        read[f"s{i}.logits"] = lambda done=done: done.logits
        read[f"s{i}.bits"] = lambda done=done: to_cells(pipe.tokenizer, done.codes, done.stage)
        read[f"s{i}.summed_codes"] = lambda i=i: watch.latents[i]
        read[f"s{i}.probs"] = lambda done=done: filter_logits(done.logits, **OFFICIAL_SAMPLER).softmax(-1).flatten(0, 2)
        for j in range(last + 1):
            read[f"s{i}.block{j}.out"] = lambda i=i, j=j: recorder.outputs[i, j]
            for part in ("sa_out", "ca_out", "ffn_out"):
                read[f"s{i}.block{j}.{part}"] = lambda i=i, key=f"block{j}.{part}": seen[key][i]
        if not done.stage.last:
            read[f"s{i}.next_tokens"] = lambda i=i: watch.next_inputs[i]
            read[f"s{i}.next_embed"] = lambda i=i: pipe.model.word_embed(watch.next_inputs[i]).detach()
    return read


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
            step = int(re.search(r"\[:, :, ::(\d+), ::\1\]", case["legend"][name]).group(1))
            expected.close(name, decoded.clamp(-1, 1)[:, :, ::step, ::step], TOLERANCE)


def replay_rope(case: dict[str, Any], expected: Expected) -> None:
    """Tables [cos | sin, tokens, half] and the integer positions of the one-megapixel schedules."""
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
