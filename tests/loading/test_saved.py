"""What users of other pipelines expect: from_pretrained, save_pretrained, to, a progress bar, offloading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import nextscale
from nextscale.errors import CheckpointError, SettingError, UnknownModel
from nextscale.loading.load import random_pipeline
from nextscale.loading.presets import MODELS, NANO
from nextscale.loading.saved import ENCODERS, INDEX, EncoderEntry, Index
from nextscale.methods.stagevar_ranks import RankRow, RankTable, identity
from nextscale.output import Preview
from nextscale.pipeline import Pipeline
from nextscale.schedules import InfinitySchedules, SquareSchedules
from nextscale.serialization import to_plain
from nextscale.text import RandomEncoder, WordTextEncoder
from nextscale.text.prompts import TextReader
from tests.helpers import tiny

FAMILIES = {
    "var": tiny.var_spec(shared_modulation=True),
    "flexvar": tiny.flexvar_spec(),
    "infinity": replace(tiny.infinity_spec(), settings=replace(tiny.infinity_spec().settings, schedules=InfinitySchedules("0.06M"))),
    "hart": tiny.hart_spec(),
    "star": tiny.star_spec(refined=True),
}
TEXT = {"infinity": "T5Encoder", "hart": "QwenEncoder", "star": "ClipEncoder"}


def reading_from(family: str) -> Pipeline:
    """A random pipeline whose text encoder is a hub name that is never opened."""
    from nextscale.loading.load import prompt_reader

    spec = FAMILIES[family]
    pipe = random_pipeline(spec)
    pipe.reader = prompt_reader(spec, None, torch.device("cpu"), download=False)
    return pipe


def features(pipe: Pipeline, family: str) -> Any:
    """Two prompts, read by an encoder that stands beside the pipeline."""
    from nextscale.loading.load import random_encoder

    if family not in TEXT:
        return [1, 2]
    encoder = random_encoder(pipe.model.config, torch.device("cpu"))
    assert encoder is not None
    return encoder(["a fox", "a red teapot"])


def generated(pipe: Pipeline, family: str) -> torch.Tensor:
    negative = {"negative": features(pipe, family)} if family == "star" else {}
    return pipe(features(pipe, family), seed=3, **negative).pixels


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_pipeline_comes_back_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pipe = reading_from(family).to(dtype)
    assert pipe.save_pretrained(tmp_path / "saved") == tmp_path / "saved"
    again = nextscale.Pipeline.from_pretrained(tmp_path / "saved", device="cpu", download=False)
    assert (again.name, again.settings, again.model.config, again.model.dtype) == (pipe.name, pipe.settings, pipe.model.config, dtype)
    for module, other in ((pipe.model, again.model), (pipe.tokenizer, again.tokenizer)):
        ours, theirs = module.state_dict(), other.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(generated(pipe, family), generated(again, family))


@pytest.mark.parametrize("family", TEXT)
def test_a_published_text_encoder_is_saved_as_a_reference(family: str, tmp_path: Path) -> None:
    reading_from(family).save_pretrained(tmp_path)
    entry = json.loads((tmp_path / INDEX).read_text())["text_encoder"]
    assert entry == {"type": "EncoderEntry", "kind": TEXT[family], "source": "nobody/encoder", "reads_empty": family == "star"}
    reader = nextscale.Pipeline.from_pretrained(tmp_path, device="cpu", download=False).reader
    assert isinstance(reader, TextReader) and reader.open_encoder.source == "nobody/encoder"  # type: ignore[attr-defined]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors", INDEX, "tokenizer.safetensors"]


def test_a_folder_as_text_encoder_is_saved_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nextscale.loading.load import prompt_reader

    monkeypatch.chdir(tmp_path)
    (tmp_path / "t5").mkdir()
    pipe = reading_from("infinity")
    pipe.reader = prompt_reader(FAMILIES["infinity"], "t5", torch.device("cpu"))
    pipe.save_pretrained("saved")
    assert json.loads(Path("saved", INDEX).read_text())["text_encoder"]["source"] == str(tmp_path / "t5")


def test_nano_with_its_words(tmp_path: Path) -> None:
    pipe = nextscale.load("nano", device="cpu")
    pipe.save_pretrained(tmp_path / "nano")
    again = nextscale.Pipeline.from_pretrained(str(tmp_path / "nano"), device="cpu", download=False)
    assert isinstance(again.reader, TextReader) and isinstance(again.reader.encoder, WordTextEncoder)
    sizes = {"size": "0.02M"}
    assert torch.equal(pipe("a red apple", seed=7, **sizes).pixels, again("a red apple", seed=7, **sizes).pixels)
    again.save_pretrained(tmp_path / "twice")
    for file in (tmp_path / "nano").iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()


def test_profiles_travel_along(tmp_path: Path) -> None:
    pipe = reading_from("var")
    pipe.save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "profile-h200.json").write_text('{"points": []}')
    (tmp_path / "a" / "nano-256.profile.json").write_text("{}")
    again = nextscale.Pipeline.from_pretrained(tmp_path / "a", device="cpu")
    again.save_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "profile-h200.json").read_text() == '{"points": []}'
    assert (tmp_path / "b" / "nano-256.profile.json").read_text() == "{}"
    again.save_pretrained(tmp_path / "a")
    assert (tmp_path / "a" / "profile-h200.json").read_text() == '{"points": []}'


def test_ranks_for_stagevar_are_saved(tmp_path: Path) -> None:
    pipe = reading_from("infinity")
    for table in (RankTable(*identity(pipe.model), (RankRow(0.96, 4, (0.2, 0.3)),)), None):
        pipe.model.rank_table = table
        pipe.save_pretrained(tmp_path)
        assert nextscale.Pipeline.from_pretrained(tmp_path, device="cpu").model.rank_table == table


def test_from_pretrained_takes_names_as_load_does() -> None:
    pipe = nextscale.Pipeline.from_pretrained("nano", device="cpu", dtype=torch.bfloat16)
    assert pipe.name == "nano" and pipe.model.dtype == torch.bfloat16
    with pytest.raises(UnknownModel, match="did you mean nano"):
        nextscale.Pipeline.from_pretrained("nan", device="cpu")
    with pytest.raises(CheckpointError, match=r"/nowhere is not a folder"):
        nextscale.Pipeline.from_pretrained("/nowhere")


def test_weights_are_stored_in_their_own_precision(tmp_path: Path) -> None:
    reading_from("infinity").to(torch.bfloat16).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        dtypes = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - not a mapping
    assert dtypes == {"BF16", "F32"}


# --- what cannot be saved or read


def test_what_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="RandomEncoder"):
        random_pipeline(FAMILIES["infinity"]).save_pretrained(tmp_path / "encoder")
    with pytest.raises(SettingError, match="cannot be saved"):
        pipe = reading_from("infinity")
        pipe.settings = tiny.infinity_spec().settings
        pipe.save_pretrained(tmp_path / "book")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SettingError, match="must be a folder"):
        reading_from("var").save_pretrained(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_save_is_not_taken_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = reading_from("var")
    pipe.save_pretrained(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr("nextscale.loading.saved.write_weights", full)
    with pytest.raises(CheckpointError, match="full"):
        pipe.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"has no {INDEX}.*interrupted"):
        nextscale.Pipeline.from_pretrained(tmp_path)


def changed(index: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *way, last = path.split(".")
    place = index
    for key in way:
        place = place[key]
    place[last] = value
    return index


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 3, "format must be 1 or 2; got 3"),
        ("dtype", "float64", "index.dtype"),
        ("model", None, "index.model"),
        ("model.type", "os.system", "index.model must be"),
        ("dtype", ["float32"], "index.dtype"),
        ("model.depth", 10**9, "depth must be from 1 to 128"),
        ("model.depth", "x", "model.depth must be int; got 'x'"),
        ("model.dim", 10**9, "dim must be from 1"),
        ("model.heads", 0, "heads must be from 1"),
        ("model.heads", True, "model.heads must be int"),
        ("model.heads", 3, "dim must be a multiple of model.heads"),
        ("model.mlp_ratio", float("nan"), "NaN"),
        ("model.mlp_ratio", 0.0, "mlp_ratio"),
        ("model.cosine", 1, "model.cosine must be bool; got 1"),
        ("model.sides", [1, 1.5], r"model.sides\[1\] must be int"),
        ("tokenizer.multipliers", [], "multipliers"),
        ("tokenizer.blocks_per_level", 1024, "blocks_per_level must be from 1 to 128"),
        ("tokenizer.channels", 5, "VarTokenizerConfig.* cannot be built .*divisible"),
        ("settings.schedules", 5, "settings.schedules must be SquareSchedules or InfinitySchedules"),
        ("settings.schedules", {"type": "InfinitySchedules", "pixels_per_token": 7}, "settings.schedules: .*'1M'"),
        ("settings.schedules", {"type": "Refinement"}, "settings.schedules must be"),
        ("settings.schedules.sides", [[]], "sides"),
        ("settings.guidance.strength", float("inf"), "Infinity"),
        ("settings.guidance.strength", "x", "guidance.strength must be float"),
        ("settings.sampling.sampled_sides", ["x"], "sampled_sides must be"),
        ("settings", json.loads("[" * 600 + "]" * 600), "nested"),
        ("text_encoder", {"kind": "words"}, "text_encoder lacks"),
        ("text_encoder", {"kind": "words", "source": "x", "reads_empty": False}, "text_encoder must be null for models of classes"),
        ("model.color", 3, "model has unknown fields color"),
        ("model", {"depth": 3}, "index.model must be"),
        ("tokenizer", {"type": "VarConfig", "depth": 1, "dim": 1, "heads": 1, "sides": [1]}, "index.tokenizer must be"),
        ("text_encoder", {"kind": "evil", "source": "x", "reads_empty": False}, "text_encoder.kind"),
        ("settings.sampling.top_k", -3, "top_k"),
    ],
)
def test_an_index_that_was_tampered_with(path: str, value: Any, message: str, tmp_path: Path) -> None:
    reading_from("var").save_pretrained(tmp_path)
    index = changed(json.loads((tmp_path / INDEX).read_text()), path, value)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises((CheckpointError, SettingError), match=message):
        nextscale.Pipeline.from_pretrained(tmp_path, device="cpu")([1], seed=0)


def test_an_index_whose_sizes_do_not_go_together(tmp_path: Path) -> None:
    reading_from("infinity").save_pretrained(tmp_path)
    text = (tmp_path / INDEX).read_text()
    for path, value in (("model.chunks", 100), ("model.text_channels", 5), ("model.rope", "odd"), ("text_encoder", None)):
        (tmp_path / INDEX).write_text(json.dumps(changed(json.loads(text), path, value)))
        with pytest.raises(CheckpointError, match=path.rpartition(".")[2]):
            nextscale.Pipeline.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("name", MODELS)
def test_the_settings_of_every_model_can_be_written_and_read(name: str) -> None:
    spec = MODELS[name]
    entry = spec.text_encoder and EncoderEntry("words", "x", spec.text_encoder.reads_empty)
    index = Index(name, "float32", spec.model, spec.tokenizer, spec.settings, entry)
    assert Index.from_plain(json.loads(json.dumps(to_plain(index))), name) == index


FORMAT_1 = """{
  "format": 1, "name": "tiny-flexvar", "dtype": "float32",
  "model": %(model)s, "tokenizer": %(tokenizer)s,
  "settings": {
    "type": "Settings",
    "schedules": {"type": "SquareBook", "sides": [[1, 2, 3]]},
    "guidance": {"type": "RampGuidance", "logits": true, "layers": [], "strength": 2.5, "longest_span": 9, "full_above": 2,
                 "last_repeats": false},
    "sampling": {"type": "Sampling", "top_k": 30, "top_p": 0.95, "temperature": 1.0, "greedy": false, "smooth": false,
                 "sampled_sides": {"type": "set", "values": [1, 2, 3]}, "widest_sampled": 2, "forbidden": [7, 8], "last_repeats": false,
                 "refine": null, "filter_first": false}
  },
  "text_encoder": null
}"""


def test_a_folder_of_format_1_is_read(tmp_path: Path) -> None:
    """Format 1 had other names of classes and fields, and tagged sets."""
    pipe = reading_from("flexvar")
    pipe.save_pretrained(tmp_path)
    parts = {name: json.dumps(to_plain(getattr(pipe, name).config)) for name in ("model", "tokenizer")}
    (tmp_path / INDEX).write_text(FORMAT_1 % parts)
    again = nextscale.Pipeline.from_pretrained(tmp_path, device="cpu")
    assert again.settings.schedules == SquareSchedules(((1, 2, 3),))
    assert (again.settings.sampling.suppressed_codes, again.settings.sampling.sampled_sides) == ((7, 8), frozenset({1, 2, 3}))
    assert torch.equal(again([1], seed=3).pixels, again([1], seed=3).pixels)
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / INDEX).read_text())["format"] == 2
    assert nextscale.Pipeline.from_pretrained(tmp_path / "again", device="cpu").settings == again.settings


def test_infinitys_schedules_of_format_1(tmp_path: Path) -> None:
    pipe = reading_from("infinity")
    pipe.save_pretrained(tmp_path)
    (tmp_path / INDEX).write_text(
        (tmp_path / INDEX).read_text().replace('"format": 2', '"format": 1').replace("InfinitySchedules", "InfinityBook")
    )
    assert nextscale.Pipeline.from_pretrained(tmp_path, device="cpu", download=False).settings == pipe.settings


def test_every_encoder_of_the_models_is_known() -> None:
    kinds = {getattr(spec.text_encoder.encoder, "__name__", "") for spec in MODELS.values() if spec.text_encoder and spec is not NANO}
    assert kinds == ENCODERS.keys() - {"words"}


# --- to


def test_to_another_precision_and_back() -> None:
    pipe = reading_from("hart")
    before = {name: tensor.clone() for name, tensor in pipe.model.state_dict().items()}
    assert pipe.to(torch.bfloat16) is pipe
    for name, tensor in pipe.model.state_dict().items():
        assert tensor.dtype == (torch.float32 if name.startswith(pipe.model.float32) else torch.bfloat16)
    pipe.to("cpu", torch.float32)
    kept = {name for name, tensor in pipe.model.state_dict().items() if torch.equal(tensor, before[name])}
    assert any(name.startswith(pipe.model.float32) for name in kept) and pipe.model.dtype == torch.float32
    assert pipe(features(pipe, "hart"), seed=1).report.dtype == "float32"


def test_to_is_like_loading_in_that_precision(tmp_path: Path) -> None:
    pipe = reading_from("infinity")
    pipe.save_pretrained(tmp_path)
    loaded = nextscale.Pipeline.from_pretrained(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(generated(pipe.to(torch.bfloat16), "infinity"), generated(loaded, "infinity"))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ((), "a device, a dtype, or one of each"),
        (("cpu", "cpu"), "a device, a dtype"),
        ((torch.float32, torch.float16), "a device, a dtype"),
        ((torch.int8,), "dtype must be one of .*; got torch.int8"),
        (("tpu",), "cpu, cuda, cuda:N or mps"),
        (("cuda:99",), "GPU"),
    ],
)
def test_places_that_there_are_not(where: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        reading_from("var").to(*where)


class Moving(RandomEncoder):
    """Notes where it was sent."""

    sent: list[str]

    def to(self, device: torch.device | str) -> Moving:
        self.sent = [*getattr(self, "sent", []), str(device)]
        return self


def test_the_text_encoder_moves_along() -> None:
    pipe = reading_from("infinity")
    assert isinstance(pipe.reader, TextReader)
    pipe.to("cpu")
    assert not pipe.reader.is_open, "one that is not open yet is opened in its new place"
    encoder = Moving(tiny.TEXT_CHANNELS)
    pipe.reader = TextReader(lambda: encoder)
    pipe.to("cpu")
    assert encoder.sent == ["cpu"]


# --- offloading


def test_offloading_is_for_large_text_encoders() -> None:
    pipe = reading_from("infinity")
    pipe.enable_model_cpu_offload()
    assert pipe.reader.open_encoder.offload is True  # type: ignore[attr-defined]
    for other in (reading_from("var"), nextscale.load("nano", device="cpu")):
        with pytest.raises(SettingError, match="moves a large text encoder"):
            other.enable_model_cpu_offload()


def test_an_open_encoder_is_offloaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.text.test_text import save_tokenizer, tiny_config, transformers

    config = transformers.T5Config(**tiny_config().to_dict() | {"d_model": tiny.TEXT_CHANNELS})
    transformers.T5EncoderModel(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    from nextscale.loading.load import prompt_reader

    pipe = random_pipeline(FAMILIES["infinity"])
    pipe.reader = prompt_reader(FAMILIES["infinity"], tmp_path, torch.device("cpu"))
    before = pipe(["a cat"], seed=1).pixels
    assert pipe.reader.encoder.offload is False  # type: ignore[attr-defined]
    pipe.enable_model_cpu_offload()
    assert pipe.reader.encoder.offload is True  # type: ignore[attr-defined]
    assert torch.equal(pipe(["a cat"], seed=1).pixels, before)
    pipe.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / INDEX).read_text())["text_encoder"]["source"] == str(tmp_path)


# --- progress


def test_progress_shows_stages_and_changes_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    pipe = reading_from("var")
    dense, seen = generated(pipe, "var"), list[int]()
    assert capsys.readouterr().err == ""
    pipe.progress = True

    def note(preview: Preview) -> None:
        seen.append(preview.done.stage.index)

    assert torch.equal(pipe([1, 2], seed=3, on_stage=note).pixels, dense) and seen == [0, 1, 2, 3]
    assert "stage 4/4" in capsys.readouterr().err


# --- on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_and_back(tmp_path: Path) -> None:
    """Weights that lie channels last are saved as published; graphs that were captured before a move are captured anew."""
    pipe = nextscale.load("nano", device="cuda")
    asked = {"seed": 7, "size": "0.02M"}
    first = pipe("a red apple", warmup=True, **asked)
    assert first.report.engine == "graphs"
    pipe.save_pretrained(tmp_path)
    again = nextscale.Pipeline.from_pretrained(tmp_path, device="cuda")
    assert torch.equal(again("a red apple", warmup=True, **asked).pixels, first.pixels)
    assert pipe.to("cpu", torch.float32)("a red apple", **asked).report.engine == "eager"
    back = pipe.to("cuda", torch.bfloat16)("a red apple", warmup=True, **asked)
    assert back.report.engine == "graphs" and torch.equal(back.pixels, first.pixels)
    pipe.progress = True
    watched = pipe("a red apple", keep_stages=True, **asked)
    assert torch.equal(watched.pixels, first.pixels) and watched.stages is not None
    assert watched.stages.strip()[-1].tobytes() == first.images[0].tobytes()
