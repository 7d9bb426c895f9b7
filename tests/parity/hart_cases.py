"""Cases of HART."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nextscale import Pipeline, Schedule, TextFeatures, Tokens
from nextscale.canvas import ResidualCanvas, to_map
from nextscale.loading.presets import hart_settings
from nextscale.models import Hart, HartConfig
from nextscale.tokenizers import HartTokenizer, HartTokenizerConfig
from tests.helpers.tiny import encode_hybrid
from tests.parity.class_cases import inputs_of
from tests.parity.compare import Expected, Reading, Readings, Tolerance
from tests.parity.settings import AUTOENCODER, QUANTIZER, RESIDUAL_QUANTIZER, TRUNK, translated, understood
from tests.parity.supplied import FeatureReader, StoredRng, images_with_features, with_both_cfg_branches
from tests.parity.trace import Call, StageTrace, Trace, calls_of
from tests.parity.weights import NETWORKS, NOTHING, fill, fill_with

LOGITS, SMOOTH_LOGITS = Tolerance(2e-3), Tolerance(1e-4)
HIDDEN = Tolerance(5e-4)
LATENT = Tolerance(2e-4)
DIFFUSED = Tolerance(2e-4, outliers=1e-3)  # the first step's estimate is nearly a sign, and a number close to zero may flip
MODEL = {
    **TRUNK,
    "patch_nums": "sides",
    "context_dim": "text_channels",
    "context_token": "text_tokens",
    "mlp_ratio": "mlp_ratio",
    "attn_l2_norm": "cosine",
    "use_context_norm": "text_norm",
    "diff_width": "residual_dim",
    "diff_depth": "residual_depth",
}
MODEL_FIXED = {
    "mlp_type": "llama",
    "attn_type": "llama",
    "disable_aln": True,
    "shared_aln": False,
    "use_cross_attn": False,
    "norm_eps": 1e-6,
}
TOKENIZER = {**RESIDUAL_QUANTIZER, **AUTOENCODER}
TOKENIZER_FIXED = {"quantizer_type": "var_hybrid", "quant_conv_ks": 3, "using_znorm": False, "double_decoder": False}


def replay_hart(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    pipe = build(folder, case)
    compare_generation(
        pipe,
        case["sampling"],
        expected,
        lambda **noise: readings(pipe, case["sampling"], expected, Trace(ends_of(pipe), **noise)),
    )
    if "ae.f" in expected:
        round_trip(expected, pipe.tokenizer, Schedule(case["autoencoder_config"]["v_patch_nums"]), bool(case.get("vae_weights_left_out")))


def compare_generation(pipe: Pipeline, sampling: dict[str, Any], expected: Expected, run: Callable[..., Readings]) -> None:
    check_sampling(pipe, sampling)
    if sampling["more_smooth"]:
        expected.compare_grown(run, SMOOTH_LOGITS.atol)
    else:
        expected.compare(run())


def build(folder: Path, case: dict[str, Any]) -> Pipeline:
    config, autoencoder = case["transformer_config"], case["autoencoder_config"]
    model = Hart(model_config(config, autoencoder))
    fill(model, folder, "weights_transformer.safetensors", case)
    tokenizer = HartTokenizer(tokenizer_config(autoencoder))
    left_out = NETWORKS if case.get("vae_weights_left_out") else NOTHING
    fill_with(tokenizer, load_file(folder / "weights_autoencoder.safetensors"), zero=left_out)
    return Pipeline(model, tokenizer, FeatureReader(), hart_settings(model.config.sides))


def model_config(config: dict[str, Any], autoencoder: dict[str, Any]) -> HartConfig:
    understood(config, {*MODEL, "use_timestep_embed", "num_sampling_steps"}, MODEL_FIXED)
    return HartConfig(
        **translated(config, MODEL),
        **translated(autoencoder, QUANTIZER),
        level_table=not config["use_timestep_embed"],
        residual_steps=int(config["num_sampling_steps"]),
    )


def tokenizer_config(config: dict[str, Any]) -> HartTokenizerConfig:
    understood(config, {*TOKENIZER, "v_patch_nums"}, TOKENIZER_FIXED)
    return HartTokenizerConfig(**translated(config, TOKENIZER))


def check_sampling(pipe: Pipeline, sampling: dict[str, Any]) -> None:
    """Fails unless the constants of the reference implementation agree with the case."""
    read = {
        "batch",
        "cfg",
        "more_smooth",
        "top_p",
        "top_k_per_stage",
        "cfg_at_last_stage",
        "diffusion_steps",
        "prompt_lengths",
        "padding_side",
        "discrete_choice",
    }
    understood(sampling, read, {"diffusion_temperature": 1.0})
    assert sampling["discrete_choice"].startswith("argmax"), f"discrete_choice: {sampling['discrete_choice']}"
    assert list(pipe.settings.sampling.top_k) == sampling["top_k_per_stage"]


def ends_of(pipe: Pipeline) -> tuple[int, int]:
    """Returns the first and the last block."""
    return 0, len(pipe.model.blocks) - 1


def readings(pipe: Pipeline, sampling: dict[str, Any], expected: Expected, trace: Trace) -> Readings:
    """Returns all tensors that a case may store of its generation. `trace` observes the first and the last block."""
    model, schedule, smooth = pipe.model, pipe.settings.schedules.choose(None, None), sampling["more_smooth"]
    guidance = pipe.settings.guidance.with_strength(sampling["cfg"])
    assert abs(1 + sampling["cfg_at_last_stage"] - guidance.scales(schedule)[-1]) < 1e-6
    first, last = ends_of(pipe)
    stages = StageTrace(schedule)
    with calls_of({"condition": model.residual_norm, "network": model.residual_head}) as seen:
        out = pipe(
            text_of(expected, sampling),
            seed=StoredRng(
                smoothing=[expected.input(f"gumbel_exp.{stage.index}") for stage in schedule if smooth],
                normal=[expected.input("diff.noise_init"), *expected.input("diff.noise_steps")],
            ),
            guidance=with_both_cfg_branches(guidance, schedule),
            smooth=smooth,
            top_p=sampling["top_p"],
            method=trace,
            on_stage=stages,
        )
    diffused = stored_rows(expected, "diff.rows")
    found = {
        "f_hat.final": Reading(out.latent, DIFFUSED),
        "image": Reading((out.pixels.clamp(-1, 1) + 1) / 2, DIFFUSED),
        "diff.cond": Reading(rows_of(seen["condition"][0].output, sampling["batch"], diffused), HIDDEN),
        "diff.out": Reading(stages.done[-1].residual.flatten(0, 1), DIFFUSED),
        **diffusion_readings(seen["network"], sampling["batch"], expected.tensors.get("diff.net_out"), diffused),
    }
    assert found["diff.t"].tensor.tolist() == sampling["diffusion_steps"]
    for i, done in enumerate(stages.done):
        rows = stored_rows(expected, f"rows.{i}")
        found |= {
            f"x_in.{i}": Reading(trace.inputs[i, first][:, rows], HIDDEN),
            f"x_out.{i}": Reading(trace.outputs[i, last][:, rows], HIDDEN),
            f"logits.{i}": Reading(done.logits[:, rows], SMOOTH_LOGITS if smooth else LOGITS),
            f"idx.{i}": Reading(done.ids, None),
            f"h.{i}": Reading(to_map(done.canvas.vectors(done.codes), done.stage), LATENT),
        }
        if not done.stage.last:
            found |= {
                f"f_hat.{i}": Reading(stages.latents[i], LATENT),
                f"next_map.{i + 1}": Reading(to_map(stages.next_inputs[i], schedule[i + 1]), LATENT),
            }
    return found


def stored_rows(expected: Expected, name: str) -> Tensor | slice:
    """Returns the stored rows of a large tensor; all by default."""
    return expected.input(name) if name in expected else slice(None)


def rows_of(x: Tensor, batch: int, rows: Tensor | slice) -> Tensor:
    """Selects some of the B * cells rows of every CFG branch of x [branches * B, cells, C]: [branches * rows, C]."""
    return x.unflatten(0, (-1, batch)).flatten(1, 2)[:, rows].flatten(0, 1)


def text_of(expected: Expected, sampling: dict[str, Any]) -> TextFeatures:
    features, mask = expected.input("in.context"), expected.tensors["in.mask"]
    expected.equal("in.mask", mask_of(sampling, mask.shape[1]))
    expected.equal("in.position_ids", mask.long().cumsum(dim=1) - 1)  # from the library's mask
    return TextFeatures(tuple(features), mask=mask)


def mask_of(sampling: dict[str, Any], tokens: int) -> Tensor:
    real = torch.arange(tokens) < torch.tensor(sampling["prompt_lengths"])[:, None]
    return {"left": real.flip(1), "right": real}[sampling["padding_side"]]


def diffusion_readings(calls: list[Call], batch: int, stored_outputs: Tensor | None, rows: Tensor | slice) -> Readings:
    """Returns the tensors of the diffusion head, step by step. `rows` are the stored ones of each CFG branch."""
    outputs = torch.stack([rows_of(call.output, batch, rows) for call in calls])
    if calls[0].output.shape[0] == batch and stored_outputs is not None:
        # Unguided. The reference implementation runs the other half too, from noise that it does not keep: there is nothing to compare.
        outputs = torch.cat([outputs, stored_outputs[:, outputs.shape[1] :]], dim=1)
    return {
        "diff.net_out": Reading(outputs, DIFFUSED),
        "diff.x_t": Reading(torch.stack([rows_of(call.inputs[0][:batch], batch, rows) for call in calls]), DIFFUSED),
        "diff.t": Reading(torch.cat([call.inputs[2] for call in calls]), None),
    }


@torch.inference_mode()
def round_trip(expected: Expected, tokenizer: HartTokenizer, schedule: Schedule, features_given: bool) -> None:
    """Encodes and decodes images. With `features_given` the networks' weights are left out and their output is taken from the case."""
    if features_given:
        images = images_with_features(tokenizer, expected.input("ae.f"), schedule)
    else:
        images = expected.input("ae.img")
        expected.close("ae.enc", tokenizer.encoder(images), LATENT)
        expected.close("ae.f", tokenizer.features(images), LATENT)
    codes, residual = encode_hybrid(tokenizer, images, schedule)
    discrete, hybrid = ResidualCanvas(tokenizer, schedule, images.shape[0]), tokenizer.canvas(schedule, images.shape[0])
    for stage, numbers in zip(schedule, codes, strict=True):
        discrete.add(numbers, Tokens(stage))
        hybrid.add(numbers, Tokens(stage))
        found = {name: Reading(numbers, None) for name in (f"ae.disc_idx.{stage.index}", f"ae.hyb_idx.{stage.index}")}
        expected.compare(found | {f"ae.disc_fhat.{stage.index}": Reading(discrete.latent, LATENT)})
    rest = residual + hybrid.vectors(codes[-1])
    hybrid.add_residual(residual, Tokens(schedule[-1]))
    decoded = tokenizer.decode(discrete.latent)
    expected.compare(
        {
            "ae.f": Reading(hybrid.latent, LATENT),
            "ae.hyb_rest": Reading(rest, LATENT),
            "ae.var_input": Reading(inputs_of(tokenizer, codes, schedule)[0], LATENT),
            "ae.disc_img": Reading(decoded.clamp(-1, 1), LATENT),
            "ae.fwd_disc": Reading(decoded, LATENT),
            "ae.fwd_cont": Reading(tokenizer.decode(expected.tensors["ae.f"]), LATENT),  # ours: the decoder makes rounding ten times larger
        }
    )
    for name in ("ae.fwd_vq_loss", "ae.fwd_usage_pct"):  # statistics of training, which the library does not compute
        if name in expected:
            expected.input(name)
