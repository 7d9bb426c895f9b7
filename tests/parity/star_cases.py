"""Cases of STAR."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from nextscale import Pipeline, RampGuidance, Sampling, Schedule, Stage, TextFeatures, Tokens
from nextscale.canvas import to_map
from nextscale.generate import Revise
from nextscale.models import Star, StarConfig, refiner
from nextscale.models.rope import star_rotations
from nextscale.pipeline import Settings
from nextscale.sampling import Refinement, Rng, filter_logits, gumbel_softmax, sample_codes
from nextscale.schedules import SquareSchedules
from nextscale.tokenizers import VarTokenizer
from tests.parity.class_cases import inputs_of, var_tokenizer
from tests.parity.compare import Expected, Reading, Readings, Tolerance
from tests.parity.settings import TRUNK, translated, understood
from tests.parity.supplied import FeatureReader, StoredRng, images_with_features, with_both_cfg_branches
from tests.parity.trace import Call, StageTrace, Trace, calls_of
from tests.parity.weights import ENCODER, NETWORKS, NOTHING, fill, fill_with

FILE = r"[\w./-]+\.safetensors"
HIDDEN, LATENT = Tolerance(5e-4), Tolerance(1e-4)
LOGITS, CONFIDENCE = HIDDEN, LATENT
TABLE = Tolerance(1e-5)
# Of smoothed runs, as long as rounding has not grown more than in the reference implementation's own repetition
SMOOTH_SCALED, SMOOTH_LATENT, SMOOTH_IMAGE = Tolerance(0.3), Tolerance(0.05), Tolerance(5e-3)
ROUNDING = 5e-5  # in the logits of a stage, found with other orders of the same sums
SCALED = Tolerance(2 * LOGITS.atol)  # logits times at most 2
OWN_MIXTURE = Tolerance(5e-3)  # made of logits that differ by rounding, divided by a temperature down to 0.0135
TIGHT = {SMOOTH_SCALED: SCALED, SMOOTH_LATENT: LATENT, SMOOTH_IMAGE: LATENT}  # where rounding cannot grow
MODEL = {
    **TRUNK,
    "patch_nums": "sides",
    "vocab_size": "codes",
    "Cvae": "latent_channels",
    "in_dim_cross": "text_channels",
    "rope_theta": "theta",
    "rope_norm": "span",
}
MODEL_FIXED = {"mlp_ratio": 4.0, "norm_eps": 1e-6, "shared_aln": False, "absolute_lvl_emb": True, "rotary_pos_emb": True}
STATED_OF_VAE = ("vocab_size", "Cvae", "share_quant_resi")
FIRST_REFINED = 9
SETTLED_IN_15 = 13  # the stage that version "1024" settles in 15 rounds, those before it in 8


def replay_star(folder: Path, case: dict[str, Any], expected: Expected) -> int:
    """Replays all runs of a case; `expected` has the first one. Returns the number of tensors compared in the others."""
    tokenizer = shared_tokenizer(folder, case)
    stored = {
        name: expected if run["file"] == "case.safetensors" else Expected.read(folder / run["file"]) for name, run in case["runs"].items()
    }
    weights = re.findall(r"[\w.-]+\.safetensors", " ".join(case["weights"].values()))
    known = {*weights, *(run["file"] for run in case["runs"].values())}
    strange = {path.name for path in folder.glob("*.safetensors")} - known
    assert not strange, f"files that no run of the case names: {sorted(strange)}"
    for name, run in case["runs"].items():
        try:
            StarRun(folder, case, run, tokenizer, stored[name]).replay()
            stored[name].finish()
        except AssertionError as error:
            error.add_note(f"in run {name!r}")
            raise
    return sum(len(other.compared) for other in stored.values() if other is not expected)


def transformer_file(case: dict[str, Any]) -> str:
    return re.match(FILE, case["weights"]["transformer"]).group()


def tokenizer_beside(weights: Path, **stated: Any) -> VarTokenizer:
    """Creates the tokenizer that the json next to a shared weights file describes, after checking it against the case."""
    config = json.loads(weights.with_suffix(".json").read_text())["config"]
    assert stated.items() <= config.items(), f"the case describes another tokenizer: {stated}"
    return var_tokenizer({**config, "z_channels": config["Cvae"]})


def shared_tokenizer(folder: Path, case: dict[str, Any]) -> VarTokenizer:
    """Returns the tokenizer of the generating cases, whose weights have no encoder."""
    weights, config = folder / re.match(FILE, case["weights"]["vae"]).group(), case["config"]
    stated = {name: config[name] for name in STATED_OF_VAE}
    tokenizer = tokenizer_beside(weights, ch=config["vae_ch"], **stated)
    fill_with(tokenizer, load_file(weights), zero=NETWORKS if case.get("vae_weights_left_out") else ENCODER)
    return tokenizer


def model_config(case: dict[str, Any], run: dict[str, Any]) -> StarConfig:
    config = case["config"]
    read = {*MODEL, *STATED_OF_VAE, "vae_ch", "enable_logit_norm", "enable_adaptive_norm", "sample_from_idx"}
    understood(config, read, {})
    understood({name: case[name] for name in MODEL_FIXED}, (), MODEL_FIXED)
    return StarConfig(
        **translated(config, MODEL),
        cosine=case["attn_l2_norm"],
        norm_before_head=run["enable_logit_norm"],
        refiner_blocks=3 if config["enable_adaptive_norm"] else 0,
        as_released=run["cross_attention"].startswith("official"),
    )


@dataclass
class Round:
    """One round of the refiner, or of the main model in its place."""

    logits: Tensor
    ids: Tensor
    confidence: Tensor
    known: Tensor | None  # the codes that the refiner was given, embedded


def confidence(kept: Tensor, ids: Tensor) -> Tensor:
    return kept.softmax(dim=-1).gather(-1, ids[..., None]).squeeze(-1)


@contextmanager
def rounds_of(model: Star) -> Iterator[dict[int, list[Round]]]:
    """Traces the samples of every round, by stage."""
    rounds: dict[int, list[Round]] = defaultdict(list)
    with calls_of({} if model.refiner is None else {"refiner": model.refiner}) as seen:

        def traced(logits: Tensor, tokens: Tokens, sampling: Sampling, rng: Rng) -> tuple[Tensor, Tensor]:
            ids, kept = sample_codes(logits, tokens, sampling, rng)
            known = seen["refiner"].pop().inputs[1] if seen["refiner"] else None
            rounds[tokens.stage.index].append(Round(logits, ids, confidence(kept, ids), known))
            return ids, kept

        with mock.patch.object(refiner, "sample_codes", traced):
            yield rounds


class StarRun:
    """Replays one run of a case."""

    def __init__(self, folder: Path, case: dict[str, Any], run: dict[str, Any], tokenizer: VarTokenizer, expected: Expected) -> None:
        self.check(run)
        self.run, self.expected = run, expected
        self.model = Star(model_config(case, run))
        fill(self.model, folder, transformer_file(case), case)
        self.schedule = Schedule(case["config"]["patch_nums"])
        refine = self.refinement(case["config"].get("sample_from_idx", FIRST_REFINED))
        self.sampling = Sampling(top_k=run["top_k"], top_p=run["top_p"], smooth=run["more_smooth"], refine=refine)
        settings = Settings(SquareSchedules((self.model.config.sides,)), RampGuidance(strength=run["cfg"]), self.sampling)
        self.pipe = Pipeline(self.model, tokenizer, FeatureReader(), settings)
        self.prompts, self.negative = self.text_features()

    @staticmethod
    def check(run: dict[str, Any]) -> None:
        findings = {"min_top1_top2_logit_gap", "sampler_calls", "tensors", "rerun_max_abs_diff", "other_numerics_max_abs_diff"}
        read = {"file", "B", "cfg", "top_k", "top_p", "w_mask", "sample_version", "more_smooth", "enable_logit_norm", "cross_attention"}
        understood(run, read | findings | {"selection", "suggested_tolerance"}, {})
        assert run["cross_attention"].startswith(("official: every row", "own text for every row")), run["cross_attention"]
        likeliest = "official multinomial with top_k=1", "multinomial replaced from outside by argmax"
        assert run["selection"].startswith("gumbel softmax" if run["more_smooth"] else likeliest), run["selection"]
        assert run["sample_version"] != "old", "no published model is sampled like this"

    def refinement(self, first_stage: int) -> Refinement | None:
        if not self.run["w_mask"] or self.model.refiner is None:
            return None
        if self.run["sample_version"] != "1024":
            return Refinement(first_stage, rounds=(8,), drafted=(0,))
        before = max(SETTLED_IN_15 - first_stage, 0)
        return Refinement(first_stage, rounds=(*(8,) * before, 15), drafted=(*(5,) * before, 0))

    def text_features(self) -> tuple[TextFeatures, TextFeatures]:
        hidden, mask, pooled = (self.expected.input(f"text.{name}") for name in ("hidden", "mask", "pooled"))
        rows = [features[real.bool()] for features, real in zip(hidden, mask, strict=True)]
        batch = self.run["B"]
        assert len(rows) == 2 * batch
        return TextFeatures(tuple(rows[:batch]), pooled=pooled[:batch]), TextFeatures(tuple(rows[batch:]), pooled=pooled[batch:])

    def replay(self) -> None:
        self.compare_rope()
        if self.run["more_smooth"]:
            self.replay_smooth()
        else:
            self.expected.compare(self.readings())

    def replay_smooth(self) -> None:
        """Repeats the run with every stage starting from the stored tensors, because rounding grows from stage to stage."""
        self.expected.compare_grown(self.readings, ROUNDING)
        own: dict[int, Tensor] = {}

        def as_stored(stage: Stage, codes: Tensor) -> Tensor:
            own[stage.index] = codes
            progress = self.sampling.progress(stage, len(self.schedule))
            scaled, noise = (self.expected.tensors[f"s{stage.index}.{name}"] for name in ("logits_scaled", "gumbel_noise"))
            return gumbel_softmax(scaled.double() / (1 + progress), (-noise.double()).exp(), progress).float()

        found = self.readings(revise=as_stored)
        self.expected.compare({name: Reading(tensor, TIGHT.get(tolerance, tolerance)) for name, (tensor, tolerance) in found.items()})
        canvas = self.pipe.tokenizer.canvas(self.schedule, self.run["B"])
        for stage in self.schedule:
            self.expected.compare({f"s{stage.index}.h": Reading(to_map(canvas.vectors(own[stage.index]), stage), OWN_MIXTURE)})

    def readings(self, noise: float = 0.0, noise_seed: int = 0, revise: Revise | None = None) -> Readings:
        """Returns all tensors that a case may store of a run; `noise` is added to the logits after CFG."""
        model, schedule = self.model, self.schedule
        latent, image = (SMOOTH_LATENT, SMOOTH_IMAGE) if self.sampling.smooth else (LATENT, LATENT)
        trace, stages = Trace(observed=range(len(model.blocks)), noise=noise, noise_seed=noise_seed), StageTrace(schedule)
        attentions = {
            f"{name}{i}": getattr(block, name) for i, block in enumerate(model.blocks) for name in ("attention", "text_attention")
        }
        with calls_of(attentions) as seen, rounds_of(model) as rounds:
            out = self.pipe(
                self.prompts,
                negative=self.negative,
                seed=self.rng(),
                guidance=with_both_cfg_branches(self.pipe.settings.guidance, schedule),
                method=trace,
                on_stage=stages,
                revise=revise,
            )
        last_layer = len(model.blocks) - 1
        found = {"image": Reading((out.pixels.clamp(-1, 1) + 1) / 2, image), **self.probes(trace, seen)}
        for i, done in enumerate(stages.done):
            kept = filter_logits(done.logits, self.sampling.top_k_at(done.stage), self.sampling.top_p)
            found |= {
                f"s{i}.x_in": Reading(trace.inputs[i, 0], HIDDEN),
                f"s{i}.hidden": Reading(trace.outputs[i, last_layer], HIDDEN),
                f"s{i}.logits": Reading(done.logits, LOGITS),
                f"s{i}.logits_scaled": Reading(done.logits * (1 + self.sampling.progress(done.stage, len(schedule))), SMOOTH_SCALED),
                f"s{i}.idx": Reading(done.ids, None),
                f"s{i}.conf": Reading(confidence(kept, done.ids), CONFIDENCE),
                f"s{i}.h": Reading(to_map(done.canvas.vectors(done.codes), done.stage), latent),
                f"s{i}.f_hat": Reading(stages.latents[i], latent),
            }
            if not done.stage.last:
                found[f"s{i}.next_map"] = Reading(to_map(stages.next_inputs[i], schedule[i + 1]), latent)
            for k, turn in enumerate(rounds[i]):
                found |= {
                    f"s{i}.k{k}.logits": Reading(turn.logits, LOGITS),
                    f"s{i}.k{k}.idx": Reading(turn.ids, None),
                    f"s{i}.k{k}.conf": Reading(turn.confidence, CONFIDENCE),
                }
                if turn.known is not None:
                    found[f"s{i}.k{k}.known_emb"] = Reading(turn.known, LATENT)
        return found

    def probes(self, trace: Trace, seen: dict[str, list[Call]]) -> Readings:
        """Returns the intermediate results of blocks that the case stores."""
        found = {}
        for name in self.expected.tensors:
            if match := re.fullmatch(r"probe\.s(\d+)\.block(\d+)\.(\w+)", name):
                stage, layer = int(match[1]), int(match[2])
                if match[3] == "out":
                    found[name] = Reading(trace.outputs[stage, layer], HIDDEN)
                elif match[3] == "self_attn_out":
                    found[name] = Reading(seen[f"attention{layer}"][stage].output, HIDDEN)
                elif match[3] == "cross_attn_out_full":
                    found[name] = Reading(self.own_text_for_every_row(seen[f"text_attention{layer}"][stage], layer), HIDDEN)
        return found

    def rng(self) -> StoredRng:
        smoothing = [(-self.expected.input(f"s{stage.index}.gumbel_noise")).exp() for stage in self.schedule if self.sampling.smooth]
        picks = [name for name in self.expected.tensors if name.endswith(".rand_conf")]
        picks.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])  # by stage and round
        return StoredRng(smoothing=smoothing, uniform=[self.expected.input(name) for name in picks])

    @torch.inference_mode()
    def own_text_for_every_row(self, call: Call, layer: int) -> Tensor:
        """Returns cross-attention of all rows, of which the reference implementation keeps only the first."""
        model = copy(self.model)
        model.config = replace(model.config, as_released=False)
        x, tokens, ctx = call.inputs
        text = model.condition(self.prompts, True, self.schedule, self.negative).text
        return model.blocks[layer].text_attention(x, tokens, replace(ctx, cond=replace(ctx.cond, text=text)))

    def compare_rope(self) -> None:
        config = self.model.config
        table = torch.cat([star_rotations(stage, config.block.head_dim, config.span, config.theta) for stage in self.schedule])
        self.expected.compare({"rope.cos": Reading(table.real, TABLE), "rope.sin": Reading(table.imag, TABLE)})


@torch.inference_mode()
def replay_star_encoder(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    """Encodes and decodes an image with the decoder weights of the generating cases."""
    encoder = load_file(folder / re.match(FILE, case["weights"]).group())
    decoder_path = folder / re.search(rf"decoder weights in ({FILE})", case["what"]).group(1)
    decoder = load_file(decoder_path)
    assert all(torch.equal(encoder[key], decoder[key]) for key in encoder.keys() & decoder.keys()), "the files disagree"
    tokenizer = tokenizer_beside(decoder_path, **{name: case[name] for name in ("vocab_size", "Cvae", "ch")})
    features_given = bool(case.get("vae_weights_left_out"))
    fill_with(tokenizer, {**encoder, **decoder}, zero=NETWORKS if features_given else NOTHING)
    schedule = Schedule(case["patch_nums"])
    if features_given:
        images = images_with_features(tokenizer, expected.input("f"), schedule)
    else:
        images = expected.input("image_in")
        expected.close("f", tokenizer.features(images), LATENT)
    codes = tokenizer.encode(images, schedule)
    inputs, latents = inputs_of(tokenizer, codes, schedule)
    found = {"var_input": Reading(inputs, LATENT), "recon": Reading(tokenizer.decode(latents[-1]).clamp(-1, 1), LATENT)}
    for i, (numbers, latent) in enumerate(zip(codes, latents, strict=True)):
        found |= {f"s{i}.idx": Reading(numbers, None), f"s{i}.f_hat": Reading(latent, LATENT)}
    expected.compare(found)
