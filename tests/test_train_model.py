"""Training of the transformer: forced passes equal generation, targets equal encodings, runs learn and can be taken up again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.guidance import ConstantGuidance
from nextscale.loading import load_module
from nextscale.models import Infinity, InfinityConfig
from nextscale.models.rope import PairRope
from nextscale.models.text_context import Padding
from nextscale.pipeline import Pipeline
from nextscale.presets import Settings
from nextscale.prompts import TextReader
from nextscale.sampling import Sampling
from nextscale.schedules import InfinityBook
from nextscale.stage import Schedule, Stage
from nextscale.text.words import SINGLE_PARTS, Vocabulary, WordEncoder, WordEncoderConfig, WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer, InfinityTokenizerConfig
from nextscale.train.captions import caption_variants, style_templates
from nextscale.train.data import Pictures, Record
from nextscale.train.forcing import ForcedPass, forced_pyramid, stage_windows
from nextscale.train.model import Batch, Captions, Features, ModelTrainer, ModelTraining, Phase, initialise, stage_weights, train_model
from nextscale.train.run import STATE, Budget, Run

BITS = 4
SIDE = 32  # with 8 pixels per token: sides 1, 2, 4
TINY = InfinityConfig(2, 64, 2, 1, bits_per_token=BITS, text_channels=128, longest_text=16)
SETTINGS = ModelTraining(
    model=TINY,
    phases=(Phase(0.5, (Batch(SIDE, 2, 6),)), Phase(0.5, (Batch(SIDE, 3, 4),))),
    variants={SIDE: 2},
    learning_rate=1e-2,
    average=0.5,
)


def tiny_tokenizer() -> InfinityTokenizer:
    torch.manual_seed(0)
    return InfinityTokenizer(InfinityTokenizerConfig(bits=BITS, channels=32, multipliers=(1, 1, 1, 1), blocks_per_level=1)).eval()


def tiny_words() -> WordTextEncoder:
    torch.manual_seed(1)
    vocabulary = Vocabulary(["red", "blue", "a", "square", "circle", *SINGLE_PARTS])
    model = WordEncoder(WordEncoderConfig(len(vocabulary), vector_channels=8, width=128, layers=1, heads=2, longest=16))
    model.vectors.normal_()
    return WordTextEncoder(vocabulary, model)


def pictures(count: int = 8) -> Pictures:
    records = [Record(f"{i}.png", f"a {'red' if i % 2 else 'blue'} square", subject="a square", style="flat") for i in range(count)]
    pixels = torch.full((count, 3, SIDE, SIDE), 255, dtype=torch.uint8)
    for position in range(count):
        pixels[position, 0 if position % 2 else 2, 8:24, 8:24] = 20
    return Pictures(pixels, records)


def randomised(model: Infinity) -> Infinity:
    torch.manual_seed(2)
    initialise(model)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("joined", [600, 5, 0])
def test_forced_pass_computes_what_generation_computes(monkeypatch: pytest.MonkeyPatch, joined: int) -> None:
    """Whatever part of the stages is attended to under one mask: 5 splits them, 0 gives each a call of its own."""
    monkeypatch.setattr("nextscale.train.forcing.JOINED_TOKENS", joined)
    tokenizer, model, words = tiny_tokenizer(), randomised(Infinity(TINY)), tiny_words()
    schedule = Schedule([1, 2, (3, 4), 6], extent=(8, 8))
    prompts = words(["a red square", "blue circle a a"])
    drawn: list[tuple[Tensor, Tensor]] = []
    settings = Settings(InfinityBook(), ConstantGuidance(strength=1.0), Sampling())
    pipe = Pipeline(model, tokenizer, TextReader(lambda: words), settings)
    seen: list[Tensor] = []

    def watch(preview: object) -> None:
        done = preview.done  # type: ignore[attr-defined]
        drawn.append((done.logits, done.codes))
        following = schedule.stages[done.stage.index + 1 : done.stage.index + 2]
        seen.extend(done.canvas.input(stage).clone() for stage in following)

    pipe(prompts, seed=3, size=schedule, on_stage=watch)
    rows, lengths = prompts.compact()

    with torch.no_grad():
        condition = model.conditioned(rows, Padding(lengths, torch.device("cpu")))
        assert isinstance(model.condition(prompts, False, schedule).rope, PairRope)
        forced = ForcedPass(model, schedule, 4).logits(torch.cat(seen, dim=1), condition)
    expected = torch.cat([logits[..., 1] - logits[..., 0] for logits, _ in drawn], dim=1)
    torch.testing.assert_close(forced, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1  # not a comparison of zeros


def test_pyramid_without_flips_is_the_encoding() -> None:
    tokenizer, schedule = tiny_tokenizer(), Schedule([1, 2, 4])
    images = pictures().batch(torch.arange(3))
    features = tokenizer.features(images).detach()
    pyramid = forced_pyramid(tokenizer, features, schedule, 3, 0.0, torch.Generator())
    codes = torch.cat(tokenizer.encode(images, schedule), dim=1)
    assert torch.equal(pyramid.bits.long(), codes)
    assert pyramid.seen.shape == (3, schedule.tokens - 1, BITS)


def test_flips_change_what_is_seen_and_what_must_make_up_for_it() -> None:
    tokenizer, schedule = tiny_tokenizer(), Schedule([1, 2, 4])
    features = torch.randn(16, BITS, 4, 4)
    clean, flipped = (
        forced_pyramid(tokenizer, features, schedule, 3, share, torch.Generator().manual_seed(0)) for share in (0.0, 0.8)
    )
    assert torch.equal(clean.bits[:, :1], flipped.bits[:, :1])  # nothing was wrong before the first stage
    assert not torch.equal(clean.seen, flipped.seen)
    assert not torch.equal(clean.bits[:, 1:], flipped.bits[:, 1:])


def test_windows_let_every_stage_see_itself_and_what_is_before() -> None:
    stages = Schedule([1, 2, 3]).stages
    (window,) = stage_windows(stages, torch.device("cpu"))
    assert window.mask is not None
    number = [stage.index for stage in stages for _ in range(stage.cells)]
    for query, row in enumerate(window.mask.tolist()):
        assert row == [number[key] <= number[query] for key in range(len(number))]


def test_coarse_stages_weigh_less_than_fine_ones_but_more_than_their_tokens() -> None:
    weights = stage_weights(Schedule([1, 2, 4]), 3)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, 4.0]) / 7)


def trainer(settings: ModelTraining = SETTINGS) -> ModelTrainer:
    return ModelTrainer(settings, tiny_words(), tiny_tokenizer(), torch.device("cpu"))


def test_gradients_reach_everything_that_is_trained() -> None:

    it, data = trainer(replace(SETTINGS, no_prompt=0.5)), pictures()
    before = {name: p.clone() for name, p in [*it.model.named_parameters(), *it.words.model.named_parameters()]}
    features = {SIDE: Features(it.tokenizer, data, 2, 0)}
    captions = Captions(it.words, data, 2, 0)
    for step in range(2):
        it.step(0.6, step, features, captions)
    unchanged = [n for n, p in [*it.model.named_parameters(), *it.words.model.named_parameters()] if torch.equal(p, before[n])]
    # The keys' biases of a softmax cancel out, and levels and words that no batch has stay as they are.
    assert [name for name in unchanged if "positions" not in name] == []
    assert all(torch.equal(ours, theirs.float()) for ours, theirs in zip(it.model.parameters(), it.working.parameters(), strict=True))


def test_a_run_learns_stops_resumes_and_leaves_what_load_reads(tmp_path: Path) -> None:
    words, tokenizer, data = tiny_words(), tiny_tokenizer(), pictures()
    arguments = (SETTINGS, words, tokenizer, {SIDE: data}, {SIDE: data}, tmp_path)
    train_model(*arguments, Budget(steps=6), torch.device("cpu"))
    first = json.loads((tmp_path / "metrics.json").read_text())
    train_model(*arguments, Budget(steps=60), torch.device("cpu"))
    second = json.loads((tmp_path / "metrics.json").read_text())
    assert (first["steps"], second["steps"]) == (6, 60)
    assert sum(second["held_out_loss"][str(SIDE)]) < 0.8 * sum(first["held_out_loss"][str(SIDE)])


    with torch.device("meta"):
        model = Infinity(TINY)
    load_module(model, tmp_path / "model.safetensors", torch.device("cpu"), torch.float32)
    state = torch.load(tmp_path / STATE, weights_only=True)
    torch.testing.assert_close(model.word_embed.weight, state["modules"]["average"]["word_embed.weight"], rtol=1e-3, atol=1e-3)
    assert WordTextEncoder.load(tmp_path / "words.safetensors")(["a red square"]).channels == 128
    with pytest.raises(SettingError, match=r"other settings \(flips\)"):
        train_model(replace(SETTINGS, flips=0.1), *arguments[1:], Budget(steps=70), torch.device("cpu"))


def test_interrupted_training_ends_where_uninterrupted_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path) -> dict[str, Tensor]:
        data = {SIDE: pictures()}
        train_model(SETTINGS, tiny_words(), tiny_tokenizer(), data, data, folder, Budget(steps=6), torch.device("cpu"))
        return torch.load(folder / STATE, weights_only=True)["modules"]["model"]

    whole = run(tmp_path / "whole")
    step = ModelTrainer.step

    def interrupted(self: ModelTrainer, progress: float, number: int, *arguments: Any) -> Any:
        if number == 4:
            raise KeyboardInterrupt
        return step(self, progress, number, *arguments)

    monkeypatch.setattr(ModelTrainer, "step", interrupted)
    monkeypatch.setitem(Run.__init__.__kwdefaults__, "save_every", -1.0)  # after every step
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts")
    monkeypatch.setattr(ModelTrainer, "step", step)
    parts = run(tmp_path / "parts")
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=0)


def test_a_new_run_can_begin_with_weights(tmp_path: Path) -> None:
    it = trainer()
    it.save(tmp_path, torch.float32)
    again = ModelTrainer(replace(SETTINGS, seed=5), tiny_words(), tiny_tokenizer(), torch.device("cpu"), tmp_path / "model.safetensors")
    for name, tensor in it.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    assert all(parameter.requires_grad for parameter in again.model.parameters())


def test_captions_vary_in_wording_but_keep_the_subject() -> None:
    records = [
        Record("0", "a flat icon of a fox", style="flat", subject="a fox"),
        Record("1", "a fox emblem, flat", style="flat", subject="a fox emblem"),
        Record("2", "a photo of a shirt", style="photo", subject="a shirt", caption_color="a photo of a red shirt"),
    ]
    assert style_templates(records) == {"flat": ["a flat icon of {}", "{}, flat"], "photo": ["a photo of {}"]}
    variants = caption_variants(records, 40)
    assert [several[0] for several in variants] == [record.caption for record in records]
    assert {"a flat icon of a fox", "a fox, flat", "a flat icon of fox"} <= set(variants[0])
    assert all("fox" in text for text in variants[0])
    assert set(variants[2]) >= {"a photo of a shirt", "a photo of a red shirt"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phases": ()}, "add up to 1"),
        ({"phases": (Phase(0.5, (Batch(SIDE, 2, 6),)),)}, "add up to 1"),
        ({"variants": {}}, "lacks"),
        ({"flips": 1.0}, "flips is a share"),
        ({"learning_rate": 0}, "above 0"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        replace(SETTINGS, **change)  # type: ignore[arg-type]


def test_stage_has_no_last_flag_in_a_shortened_pass() -> None:
    stages: tuple[Stage, ...] = ForcedPass(randomised(Infinity(TINY)), Schedule([1, 2, 4]), 2).stages
    assert [stage.last for stage in stages] == [False, False]
