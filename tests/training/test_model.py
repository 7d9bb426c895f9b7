"""Training of the transformer: forced passes equal generation, targets equal encodings, runs learn and can be taken up again."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale.errors import NextscaleError, SettingError
from nextscale.guidance import ConstantGuidance
from nextscale.loading.load import load_module
from nextscale.models import Infinity, InfinityConfig
from nextscale.models.rope import InterleavedRope
from nextscale.models.text_context import TextContext
from nextscale.pipeline import Pipeline, Settings
from nextscale.sampling import Sampling
from nextscale.schedules import InfinitySchedules, infinity_stages
from nextscale.stage import Schedule, Stage
from nextscale.text.prompts import TextReader
from nextscale.text.words import SINGLE_PARTS, Vocabulary, WordEncoder, WordEncoderConfig, WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer, InfinityTokenizerConfig
from training.data import Pictures
from training.forcing import BlockParts, ForcedPass, forced_block, forced_pyramid, stage_weights, stage_windows
from training.model import train_model
from training.model_settings import Batch, ModelTraining, Phase
from training.model_trainer import ModelTrainer, initialize
from training.records import Record
from training.run import CURVE, STATE, Budget, Run
from training.scenes import Mix, Scenes
from training.sprites import Sprites

CPU = torch.device("cpu")
BITS = 4
SIDE = 32  # with 8 pixels per token: sides 1, 2, 4
TINY = InfinityConfig(2, 64, 2, 1, bits_per_token=BITS, text_channels=128, longest_text=16)
SETTINGS = ModelTraining(
    model=TINY,
    phases=(Phase(0.5, (Batch(SIDE, 2, 6),)), Phase(0.5, (Batch(SIDE, 3, 4),))),
    mix=Mix(squares=1.0, plain=1.0),
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
    initialize(model)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("joined", [9, 2, 0])
def test_forced_pass_computes_what_generation_computes(monkeypatch: pytest.MonkeyPatch, joined: int) -> None:
    """Whatever part of the stages is attended to under one mask: 2 splits them, 0 gives each a call of its own."""
    monkeypatch.setattr("training.forcing.JOINED_STAGES", joined)
    tokenizer, model, words = tiny_tokenizer(), randomised(Infinity(TINY)), tiny_words()
    schedule = Schedule([1, 2, (3, 4), 6], extent=(8, 8))
    prompts = words(["a red square", "blue circle a a"])
    drawn: list[tuple[Tensor, Tensor]] = []
    settings = Settings(InfinitySchedules(), ConstantGuidance(strength=1.0), Sampling())
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
        condition = model.read(rows, TextContext.of(lengths, CPU))
        assert isinstance(model.condition(prompts, False, schedule).rope, InterleavedRope)
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
    clean, flipped = (forced_pyramid(tokenizer, features, schedule, 3, share, torch.Generator().manual_seed(0)) for share in (0.0, 0.8))
    assert torch.equal(clean.bits[:, :1], flipped.bits[:, :1])  # nothing was wrong before the first stage
    assert not torch.equal(clean.seen, flipped.seen)
    assert not torch.equal(clean.bits[:, 1:], flipped.bits[:, 1:])


def test_windows_let_every_stage_see_itself_and_what_is_before() -> None:
    stages = Schedule([1, 2, 3]).stages
    (window,) = stage_windows(stages, CPU)
    assert window.mask is not None
    number = [stage.index for stage in stages for _ in range(stage.cells)]
    for query, row in enumerate(window.mask.tolist()):
        assert row == [number[key] <= number[query] for key in range(len(number))]


def test_coarse_stages_weigh_less_than_fine_ones_but_more_than_their_tokens() -> None:
    weights = stage_weights(Schedule([1, 2, 4]).stages)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, 4.0]) / 7)


def trainer(settings: ModelTraining = SETTINGS) -> ModelTrainer:
    return ModelTrainer(settings, tiny_words(), tiny_tokenizer(), CPU)


def test_gradients_reach_everything_that_is_trained() -> None:
    it, data = trainer(replace(SETTINGS, no_prompt=0.5)), pictures()
    before = {name: p.clone() for name, p in [*it.model.named_parameters(), *it.words.model.named_parameters()]}
    scenes = Scenes(Sprites({SIDE: data}, CPU), SETTINGS.mix)
    for step in range(2):
        it.step(0.6, step, scenes)
    unchanged = [n for n, p in [*it.model.named_parameters(), *it.words.model.named_parameters()] if torch.equal(p, before[n])]
    # The keys' biases of a softmax cancel out, and levels and words that no batch has stay as they are.
    assert [name for name in unchanged if "positions" not in name] == []
    assert all(torch.equal(ours, theirs.float()) for ours, theirs in zip(it.model.parameters(), it.working.parameters(), strict=True))


def test_a_run_learns_stops_resumes_and_leaves_what_load_reads(tmp_path: Path) -> None:
    words, tokenizer, data = tiny_words(), tiny_tokenizer(), pictures()
    arguments = (SETTINGS, words, tokenizer, {SIDE: data}, {SIDE: data}, tmp_path)
    train_model(*arguments, Budget(steps=6), CPU)
    first = json.loads((tmp_path / "metrics.json").read_text())
    train_model(*arguments, Budget(steps=60), CPU)
    second = json.loads((tmp_path / "metrics.json").read_text())
    assert (first["steps"], second["steps"]) == (6, 60)
    assert sum(second["held_out_loss"][str(SIDE)]) < 0.8 * sum(first["held_out_loss"][str(SIDE)])
    with torch.device("meta"):
        model = Infinity(TINY)
    load_module(model, tmp_path / "model.safetensors", CPU, torch.float32)
    state = torch.load(tmp_path / STATE, weights_only=True)
    torch.testing.assert_close(model.word_embed.weight, state["modules"]["average"]["word_embed.weight"], rtol=1e-3, atol=1e-3)
    assert WordTextEncoder.load(tmp_path / "words.safetensors")(["a red square"]).channels == 128
    with pytest.raises(SettingError, match=r"other settings \(flips\)"):
        train_model(replace(SETTINGS, flips=0.1), *arguments[1:], Budget(steps=70), CPU)


def test_interrupted_training_ends_where_uninterrupted_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path) -> dict[str, Tensor]:
        data = {SIDE: pictures()}
        train_model(SETTINGS, tiny_words(), tiny_tokenizer(), data, data, folder, Budget(steps=6), CPU)
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


def test_a_stretch_ends_early_and_the_next_goes_on(tmp_path: Path) -> None:
    data = {SIDE: pictures()}
    arguments = (SETTINGS, tiny_words(), tiny_tokenizer(), data, data, tmp_path, Budget(steps=5), CPU)
    train_model(*arguments, stretch=1e-9)
    first = json.loads((tmp_path / "metrics.json").read_text())
    train_model(*arguments)
    assert first["steps"] == 1 and json.loads((tmp_path / "metrics.json").read_text())["steps"] == 5
    assert [json.loads(line)["step"] for line in (tmp_path / CURVE).read_text().splitlines()] == [1, 1, 5, 5]


def test_one_compiled_graph_serves_all_lengths_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling for each of 15 aspect ratios would take longer than training. The compiler's own backend is left out here."""
    graphs: list[object] = []

    def count(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_with = partial(torch.compile, backend=count)
    monkeypatch.setattr("training.forcing.torch.compile", compile_with)
    torch._dynamo.reset()
    model, words, parts = randomised(Infinity(TINY)), tiny_words(), BlockParts.compiled()
    for template, stages, batch in ((1.0, 3, 4), (2.0, 4, 5), (0.5, 5, 3), (1.5, 3, 8)):
        schedule = infinity_stages(template, stages)
        rows, lengths = words(["a red square"] * batch).compact()
        condition = model.read(rows, TextContext.of(lengths, CPU, 15))
        seen = torch.randn(batch, schedule.tokens - 1, BITS)
        plain, compiled = (
            ForcedPass(model, schedule, stages, run_block).logits(seen, condition)
            for run_block in (forced_block, partial(forced_block, parts=parts))
        )
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4)
    assert len(graphs) <= 6  # three parts, at most two of each


def test_a_new_run_can_begin_with_weights(tmp_path: Path) -> None:
    it = trainer()
    it.save(tmp_path, torch.float32)
    again = ModelTrainer(replace(SETTINGS, seed=5), tiny_words(), tiny_tokenizer(), CPU, tmp_path / "model.safetensors")
    for name, tensor in it.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    assert all(parameter.requires_grad for parameter in again.model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phases": ()}, "add up to 1"),
        ({"phases": (Phase(0.5, (Batch(SIDE, 2, 6),)),)}, "add up to 1"),
        ({"phases": (Phase(1.5, (Batch(SIDE, 2, 6),)), Phase(-0.5, (Batch(SIDE, 2, 6),)))}, "each above 0"),
        ({"phases": (Phase(1.0, ()),)}, "batches of 1 picture or more"),
        ({"phases": (Phase(1.0, (Batch(SIDE, 1, 6),)),)}, "up to stage 2 or later"),
        ({"phases": ((1.0, ((SIDE, 2, 0),)),)}, "batches of 1 picture or more"),
        ({"phases": (3,)}, r"expected \[share, \[\[side, stages, pictures\]"),
        ({"phases": ((1.0, ((SIDE, 2.5, 4),)),)}, "whole numbers"),
        ({"flips": 1.0}, "flips is a share"),
        ({"learning_rate": 0}, "above 0"),
        ({"learning_rate": float("nan")}, "above 0"),
        ({"weight_decay": -1.0}, "weight_decay is 0 or above"),
        ({"model": replace(TINY, depth=0)}, r"model\.depth is 0"),
        ({"model": replace(TINY, heads=3)}, "has 3 heads"),
        ({"model": replace(TINY, text_channels=64)}, "expected 128 channels or more"),
        ({"model": replace(TINY, dim=64, text_channels=384)}, "with 3 heads; .* divides the dim"),
        ({"model": replace(TINY, chunks=3)}, "3 chunks"),
        ({"model": replace(TINY, level_every_chunk=True)}, "level_every_chunk"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        replace(SETTINGS, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": replace(TINY, text_channels=256)}, "word encoder has 128 channels, the model reads 256"),
        ({"model": replace(TINY, bits_per_token=8)}, "tokenizer has 4 bits per token, the model 8"),
        ({"model": replace(TINY, levels=2)}, "32 has 3 stages, model.levels is 2"),
        ({"model": replace(TINY, longest_text=3)}, "a caption has 4 tokens, the model reads 3"),
        ({"phases": (Phase(1.0, (Batch(SIDE, 4, 6),)),)}, "stage 4 of pictures of side 32, which have 3"),
        ({"phases": (Phase(1.0, (Batch(40, 2, 6),)),)}, "side 40: at 8 pixels per token choose one of"),
        ({"phases": (Phase(1.0, (Batch(64, 2, 6),)),)}, r"training pictures of sides \[32\]: the phases take \[64\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_anything_is_cut_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("training.model.Sprites", lambda *_: pytest.fail("cut out"))
    data = {SIDE: pictures()}
    with pytest.raises(SettingError, match=message):
        train_model(replace(SETTINGS, **change), tiny_words(), tiny_tokenizer(), data, data, tmp_path / "run", Budget(steps=1), CPU)
    assert not (tmp_path / "run").exists()


def test_pictures_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    data, none, long = {SIDE: pictures()}, {SIDE: pictures(0)}, pictures(2)
    long.records = (Record("0", "a " * 20), Record("1", "a"))
    for train, held_out, message in (
        (data, {}, r"held-out pictures of sides \[\]"),
        (data, none, r"held-out pictures: \{32: 0\} by side"),
        (none, data, r"training pictures: \{32: 0\} by side"),
        ({SIDE: long}, data, "prompt must have at most 16 tokens; got 21"),
    ):
        with pytest.raises(NextscaleError, match=message):
            train_model(SETTINGS, tiny_words(), tiny_tokenizer(), train, held_out, tmp_path / "run", Budget(steps=1), CPU)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_taken_up_with_other_parts(tmp_path: Path) -> None:
    words, tokenizer, data = tiny_words(), tiny_tokenizer(), {SIDE: pictures()}
    train_model(SETTINGS, words, tokenizer, data, data, tmp_path, Budget(steps=1), CPU)
    others = WordTextEncoder(Vocabulary(["green", *words.vocabulary.entries[1:]]), tiny_words().model)
    changed = tiny_tokenizer()
    changed.encoder.conv_in.weight.data += 1
    few = {SIDE: pictures(6)}
    parts = {"vocabulary": (others, tokenizer, data), "tokenizer": (words, changed, data), "pictures": (words, tokenizer, few)}
    for name, given in parts.items():
        with pytest.raises(SettingError, match=rf"other settings \({name}\)"):
            train_model(SETTINGS, *given, data, tmp_path, Budget(steps=2), CPU)
    train_model(SETTINGS, words, tokenizer, data, data, tmp_path, Budget(steps=2), CPU)


def test_the_curve_tells_every_stage(tmp_path: Path) -> None:
    data = {SIDE: pictures()}
    train_model(SETTINGS, tiny_words(), tiny_tokenizer(), data, data, tmp_path, Budget(steps=4), CPU)
    line, results = (json.loads(text) for text in (tmp_path / CURVE).read_text().splitlines())
    of_batches = [f"{name}_32px_{stages}" for stages in (2, 3) for name in ("loss", "stages", "accuracy")]
    assert list(line) == ["step", "seconds", "learning_rate", "gradient", "pictures", *of_batches]
    for stages in (2, 3):
        losses = torch.tensor(line[f"stages_{SIDE}px_{stages}"])
        assert len(losses) == stages
        expected = (losses * stage_weights(Schedule([1, 2, 4]).stages[:stages])).sum().item()
        assert line[f"loss_{SIDE}px_{stages}"] == pytest.approx(expected, abs=2e-4)
        assert all(0 <= share <= 1 for share in line[f"accuracy_{SIDE}px_{stages}"])
    assert {name: len(of_side["32"]) for name, of_side in results["held_out"].items()} == {"held_out_loss": 3, "held_out_accuracy": 3}


def test_stage_has_no_last_flag_in_a_shortened_pass() -> None:
    stages: tuple[Stage, ...] = ForcedPass(randomised(Infinity(TINY)), Schedule([1, 2, 4]), 2).stages
    assert [stage.last for stage in stages] == [False, False]
