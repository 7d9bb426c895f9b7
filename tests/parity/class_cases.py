"""Cases of VAR and FlexVAR."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale import ConstantGuidance, Guidance, Pipeline, RampGuidance, Sampling, Schedule, Stage, Tokens
from nextscale.loading.presets import FLEXVAR_SAMPLED_SIDES
from nextscale.models import FlexVar, FlexVarConfig, Var, VarConfig
from nextscale.models.var import ClassConditioned
from nextscale.pipeline import Settings
from nextscale.sampling import filter_logits
from nextscale.schedules import SquareSchedules
from nextscale.text.prompts import ClassReader
from nextscale.tokenizers import FlexVarTokenizer, FlexVarTokenizerConfig, VarTokenizer, VarTokenizerConfig
from nextscale.tokenizers.base import Tokenizer
from tests.parity.compare import Expected, Reading, Readings, Tolerance
from tests.parity.settings import AUTOENCODER, QUANTIZER, RESIDUAL_QUANTIZER, TRUNK, translated
from tests.parity.trace import StageTrace, Trace, TracedRng, outputs_of
from tests.parity.weights import fill

MODEL = {**TRUNK, "attn_l2_norm": "cosine", "num_classes": "classes", "mlp_ratio": "mlp_ratio"}
VAR = {**MODEL, "patch_nums": "sides", "shared_aln": "shared_modulation"}
FLEXVAR = {**MODEL, "pos_table": "table"}
FLEXVAR_QUANTIZER = {"codebook_size": "codes", "codebook_embed_dim": "code_channels", "z_channels": "latent_channels"}
VQGAN = {**AUTOENCODER, "num_res_blocks": "blocks_per_level"}
UNGUIDED = ConstantGuidance(strength=1.0)


class Tolerances:
    def __init__(self, stated: dict[str, Any]) -> None:
        rtol = stated["rtol"]
        self.other = Tolerance(stated.get("other_float_atol", stated.get("float_atol")), rtol)
        self.logits = Tolerance(stated.get("logits_atol", self.other.atol), rtol)
        self.guided = Tolerance(stated.get("logits_cfg_atol", self.other.atol), rtol)


def var_tokenizer(config: dict[str, Any]) -> VarTokenizer:
    assert not config.get("using_znorm"), "no published model searches codes by angle"
    return VarTokenizer(VarTokenizerConfig(**translated(config, RESIDUAL_QUANTIZER | VQGAN)))


def flexvar_tokenizer(config: dict[str, Any]) -> FlexVarTokenizer:
    assert config["codebook_l2_norm"], "no published model has codes of other lengths"
    return FlexVarTokenizer(FlexVarTokenizerConfig(**translated(config, FLEXVAR_QUANTIZER | VQGAN)))


def split_stages(tokens: Tensor, schedule: Schedule) -> list[Tensor]:
    return list(tokens.split([stage.cells for stage in schedule], dim=1))


def inputs_of(tokenizer: Tokenizer, codes: list[Tensor], schedule: Schedule) -> tuple[Tensor, list[Tensor]]:
    """Returns the transformer's inputs for given codes, concatenated after the first stage, and the latent after every stage."""
    canvas = tokenizer.canvas(schedule, codes[0].shape[0])
    inputs, latents = [], []
    for stage, numbers in zip(schedule, codes, strict=True):
        if stage.index:
            inputs.append(canvas.input(stage))
        canvas.add(numbers, Tokens(stage))
        latents.append(canvas.latent)
    return torch.cat(inputs, dim=1), latents


class ClassCase:
    """Replays one folder."""

    def __init__(self, case: dict[str, Any], expected: Expected, model: ClassConditioned, tokenizer: Tokenizer) -> None:
        self.case, self.expected = case, expected
        self.tolerance = Tolerances(case["tolerance"])
        self.model, self.tokenizer = model, tokenizer
        settings = Settings(SquareSchedules(((1,),)), UNGUIDED, Sampling())
        self.pipe = Pipeline(model, tokenizer, ClassReader(model.config.classes), settings)

    def image(self, pixels: Tensor) -> Tensor:
        raise NotImplementedError

    def next_map(self, rows: Tensor, stage: Stage) -> Tensor:
        raise NotImplementedError

    def labels(self, name: str) -> Tensor:
        return self.expected.input(name)

    def teacher_forced(self, schedule: Schedule) -> None:
        """Runs given codes through the stage loop: the cached pass equals the masked one."""
        expected, model = self.expected, self.model
        codes = split_stages(expected.input("tf.tokens"), schedule)
        trace, stages = Trace(observed=(0, len(model.blocks) - 1)), StageTrace(schedule)
        out = self.pipe(
            self.labels("tf.labels"),
            seed=0,
            size=schedule,
            guidance=UNGUIDED,
            greedy=True,
            method=trace,
            on_stage=stages,
            revise=lambda stage, _: codes[stage.index],
        )
        layer = {"tf.block0_out": 0, "tf.last_block_out": len(model.blocks) - 1}
        for name, tensor in {
            "tf.var_input": torch.cat(stages.next_inputs, dim=1),
            "tf.block0_in": torch.cat(trace.first_inputs, dim=1),
            **{key: torch.cat([trace.outputs[s.index, at] for s in schedule], dim=1) for key, at in layer.items()},
            "tf.image_from_tokens": out.pixels.clamp(-1, 1),
        }.items():
            if name in expected:
                expected.close(name, tensor, self.tolerance.other)
        expected.close("tf.logits", torch.cat([done.logits for done in stages.done], dim=1), self.tolerance.logits)

    def run(self, name: str, labels: Tensor, schedule: Schedule, guidance: Guidance, **settings: Any) -> None:
        """Compares a generation whose stored tensors start with `name`."""
        run = partial(self.readings, name, labels, schedule, guidance, settings)
        if settings.get("smooth"):
            self.expected.compare_grown(run, self.tolerance.logits.atol)
        else:
            self.expected.compare(run())

    def readings(
        self,
        name: str,
        labels: Tensor,
        schedule: Schedule,
        guidance: Guidance,
        settings: dict[str, Any],
        noise: float = 0.0,
        noise_seed: int = 0,
    ) -> Readings:
        """Returns all tensors that a case may store of this run; `noise` is added to the logits after CFG."""
        settings, tolerance = dict(settings), self.tolerance
        rng = TracedRng(torch.Generator().manual_seed(settings.pop("g_seed", 0)))
        trace, stages = Trace(noise=noise, noise_seed=noise_seed), StageTrace(schedule)
        with outputs_of({"head": self.model.head}) as seen:
            out = self.pipe(labels, seed=rng, size=schedule, guidance=guidance, method=trace, on_stage=stages, **settings)
        found = {f"{name}.image": Reading(self.image(out.pixels), tolerance.other)}
        for i, done in enumerate(stages.done):
            found |= {
                f"{name}.s{i}.tokens": Reading(done.ids, None),
                f"{name}.s{i}.logits_cond_uncond": Reading(seen["head"][i], tolerance.logits),
                f"{name}.s{i}.logits_cfg": Reading(done.logits, tolerance.guided),
                f"{name}.s{i}.logits_masked": Reading(filter_logits(done.logits, settings["top_k"], settings["top_p"]), tolerance.guided),
                f"{name}.s{i}.fhat": Reading(stages.latents[i], tolerance.other),
                f"{name}.s{i}.block0_in": Reading(trace.first_inputs[i], tolerance.other),
                f"{name}.s{i}.soft_onehot": Reading(done.codes, tolerance.other),
            }
            if not done.stage.last:
                found[f"{name}.s{i}.next_map"] = Reading(self.next_map(stages.next_inputs[i], schedule[i + 1]), tolerance.other)
            if settings.get("smooth"):
                found[f"{name}.s{i}.gumbel_noise"] = Reading(-rng.exponentials[2 * i + 1].log(), tolerance.other)
        return found

    def filters(self) -> None:
        for name in [name for name in self.expected.tensors if name.startswith("filter.out.")]:
            top_k, top_p = re.fullmatch(r"filter\.out\.k(\d+)_p([\d.]+)", name).groups()
            self.expected.close(name, filter_logits(self.expected.input("filter.in"), int(top_k), float(top_p)), self.tolerance.other)


class VarCase(ClassCase):
    def image(self, pixels: Tensor) -> Tensor:
        return (pixels.clamp(-1, 1) + 1) / 2

    def next_map(self, rows: Tensor, stage: Stage) -> Tensor:
        return rows.transpose(1, 2).unflatten(2, stage.size)


def replay_var(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    config = case["config"]
    schedule = Schedule(config["patch_nums"])
    model = Var(VarConfig(**translated(config, VAR), **translated(config["vae"], QUANTIZER)))
    tokenizer = var_tokenizer(config["vae"])
    fill(model, folder, "weights_transformer.safetensors", case)
    fill(tokenizer, folder, "weights_vae.safetensors", case)
    replay = VarCase(case, expected, model, tokenizer)
    if "tf.logits" in expected:
        replay.teacher_forced(schedule)
    for name, run in {"greedy": "ar", "stoch": "stoch", "smooth": "smooth"}.items():
        if f"{run}.s0.tokens" in expected:
            settings = {key: case["sampling"][name][key] for key in ("top_k", "top_p", "g_seed") if key in case["sampling"][name]}
            guidance = RampGuidance(strength=case["sampling"][name]["cfg"])
            replay.run(run, replay.labels("labels"), schedule, guidance, smooth=name == "smooth", **settings)
    if "enc.image_in" in expected:
        encode_var(expected, tokenizer, schedule, replay.tolerance.other)
    replay.filters()


def encode_var(expected: Expected, tokenizer: VarTokenizer, schedule: Schedule, tolerance: Tolerance) -> None:
    images = expected.input("enc.image_in")
    with torch.inference_mode():
        expected.close("enc.feature", tokenizer.features(images), tolerance)
        codes = tokenizer.encode(images, schedule)
        expected.equal("enc.tokens", torch.cat(codes, dim=1))
        inputs, latents = inputs_of(tokenizer, codes, schedule)
        if "enc.var_input" in expected:
            expected.close("enc.var_input", inputs, tolerance)
        for i, latent in enumerate(latents):
            if f"enc.s{i}.fhat" in expected:
                expected.close(f"enc.s{i}.fhat", latent, tolerance)
        if "enc.fhat" in expected:
            expected.close("enc.fhat", latents[-1], tolerance)
        expected.close("enc.rec_image", tokenizer.decode(latents[-1]).clamp(-1, 1), tolerance)


class FlexVarCase(ClassCase):
    def image(self, pixels: Tensor) -> Tensor:
        return pixels

    def next_map(self, rows: Tensor, stage: Stage) -> Tensor:
        return rows


def replay_flexvar(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    config = case["config"]
    assert not config["shared_aln"], "no published FlexVAR shares its modulation"
    vae = translated(config["vae"], {"codebook_size": "codes", "codebook_embed_dim": "latent_channels"})
    model = FlexVar(FlexVarConfig(**translated(config, FLEXVAR), **vae))
    tokenizer = flexvar_tokenizer(config["vae"])
    fill(model, folder, "weights_transformer.safetensors", case)
    fill(tokenizer, folder, "weights_vae.safetensors", case)
    replay = FlexVarCase(case, expected, model, tokenizer)
    if "tf.logits" in expected:
        replay.teacher_forced(Schedule(case["sampling"]["ar"]["pns"]))
    for name, run in case["sampling"].items():
        if f"{name}.s0.tokens" not in expected:
            continue
        schedule = Schedule(run["pns"])
        guidance = (
            ConstantGuidance(strength=run["cfg"])
            if run["used_llamagen_cfg"]
            else RampGuidance(strength=run["cfg"], longest_span=9, full_above=run["max_pn"])
        )
        settings = {key: run[key] for key in ("top_k", "top_p", "g_seed") if key in run}
        rules = {
            "sampled_sides": FLEXVAR_SAMPLED_SIDES,
            "widest_sampled": run["max_pn"],
            "suppressed_codes": tuple(run.get("invalid_ids", ())),
        }
        if "top_k_used_per_stage" in run:
            sampling = Sampling(top_k=run["top_k"], **rules)
            assert [sampling.top_k_at(stage) for stage in schedule] == run["top_k_used_per_stage"]
        labels = replay.labels(f"{name}.labels")
        assert labels.tolist() == run["labels"]
        replay.run(name, labels, schedule, guidance, **settings, **rules)
    for name in [name for name in expected.tensors if name.startswith("pos.hw")]:
        side = int(name.removeprefix("pos.hw"))
        expected.close(name, model.positions(Stage(0, side, side, 0, True))[None].detach(), replay.tolerance.other)
    if "enc.image_in" in expected:
        encode_flexvar(expected, tokenizer, Schedule(config["enc_patch_nums"]), replay.tolerance.other)


def encode_flexvar(expected: Expected, tokenizer: FlexVarTokenizer, schedule: Schedule, tolerance: Tolerance) -> None:
    images = expected.input("enc.image_in")
    with torch.inference_mode():
        expected.close("enc.encoder_out", tokenizer.encoder(images), tolerance)
        features = tokenizer.features(images)
        expected.close("enc.feature", features, tolerance)
        codes = tokenizer.encode(images, schedule)
        expected.equal("enc.tokens", torch.cat(codes, dim=1))
        inputs, latents = inputs_of(tokenizer, codes, schedule)
        if "enc.var_input" in expected:
            expected.close("enc.var_input", inputs, tolerance)
        expected.close("enc.rec_image", tokenizer.decode(latents[-1]), tolerance)
        if "enc.multi_scale_rec_last" in expected:
            third = F.interpolate(tokenizer.decode(latents[2]), size=(16 * schedule[2].height,) * 2, mode="bicubic")
            expected.close("enc.multi_scale_rec_last", third, tolerance)


def replay_published_tokenizer(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    config, tolerance = case["config"], Tolerances(case["tolerance"]).other
    is_var = "v_patch_nums" in config
    with torch.device("meta"):
        tokenizer = var_tokenizer(config) if is_var else flexvar_tokenizer(config)
    fill(tokenizer, folder, "weights_vae.safetensors", case)
    with torch.inference_mode():
        if is_var:
            schedule = Schedule(config["v_patch_nums"])
            codes = split_stages(expected.input("dec.tokens"), schedule)
            inputs, latents = inputs_of(tokenizer, codes, schedule)
            expected.close("dec.var_input", inputs, tolerance)
            expected.close("dec.fhat", latents[-1], tolerance)
            expected.close("dec.image", tokenizer.decode(latents[-1]).clamp(-1, 1), tolerance)
            encode_var(expected, tokenizer, schedule, tolerance)
        else:
            schedule = Schedule(config["enc_patch_nums"])
            canvas = tokenizer.canvas(schedule, 1)
            canvas.add(expected.input("dec.tokens"), Tokens(schedule[-1]))
            expected.close("dec.image", tokenizer.decode(canvas.latent), tolerance)
            encode_flexvar(expected, tokenizer, schedule, tolerance)
