"""Benchmarks of others: prompt sets as published, and the layouts that their scorers read, as facts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import Result

from benchmarks.suites import chosen_cases
from nextscale.errors import NextscaleError, PromptError, SettingError
from nextscale.eval.results import DENSE
from nextscale.loading.presets import MODELS, build_model, model_spec
from nextscale.methods.registry import resolve_method
from nextscale.offline.manifest import Entry, read_manifest, sha256_of
from nextscale.offline.prompts import SAFE_ID, SamplePrompt, read_sample_prompts
from nextscale_research.__main__ import app
from nextscale_research.quality.lists import LISTS
from nextscale_research.suites import SUITES, export, layouts, suite
from nextscale_research.suites.papers import PAPER, Work, measured_hardware, measured_speed, paper_work
from nextscale_research.suites.prompts import as_lines, rewritten
from nextscale_research.suites.suite import suite_table
from tests.conftest import PROJECT
from tests.helpers.cli import run_cli

SIDE = 8


def lines(*objects: object) -> str:
    return "".join(json.dumps(one) + "\n" for one in objects)


def geneval_set(folder: Path) -> Path:
    file = folder / "evaluation_metadata.jsonl"
    file.write_text(
        lines({"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"}, {"prompt": "two cows"})
    )
    return file


def geneval2_set(folder: Path) -> Path:
    file = folder / "geneval2_data.jsonl"
    file.write_text(lines({"prompt": "four white bicycles", "atom_count": 2}, {"prompt": "a cow", "atom_count": 1}))
    return file


def dpg_set(folder: Path) -> Path:
    (folder / "prompts").mkdir()
    (folder / "prompts" / "COCOval2014000000000042.txt").write_text("a long text\n")
    (folder / "prompts" / "256.txt").write_text("another")
    return folder / "prompts"


def hps_set(folder: Path) -> Path:
    for style in ("anime", "concept-art", "paintings", "photo"):
        (folder / f"{style}.json").write_text(json.dumps([f"{style} one", f"{style} two"]))
    return folder


def reward_set(folder: Path) -> Path:
    file = folder / "benchmark-prompts.json"
    file.write_text(json.dumps([{"id": "005695-0057", "prompt": "a vehicle"}, {"id": "005784-0093", "prompt": "space"}]))
    return file


def mjhq_set(folder: Path) -> Path:
    file = folder / "meta_data.json"
    file.write_text(json.dumps({"0a1b": {"category": "people", "prompt": "a man"}, "ff00": {"category": "food", "prompt": "a pie"}}))
    return file


def coco_set(folder: Path) -> Path:
    file = folder / "captions_val2014.json"
    annotations = [
        {"image_id": 42, "id": 9, "caption": "later"},
        {"image_id": 42, "id": 3, "caption": "first\n"},
        {"image_id": 7, "id": 5, "caption": "other"},
    ]
    file.write_text(json.dumps({"annotations": annotations}))
    return file


def compbench_set(folder: Path) -> Path:
    (folder / "color_val.txt").write_text("a green bench and a blue bowl\na red/black car\n")
    return folder


SETS: dict[str, Callable[[Path], Path | None]] = {
    "geneval": geneval_set,
    "geneval2": geneval2_set,
    "dpg": dpg_set,
    "hpsv2": hps_set,
    "imagereward": reward_set,
    "mjhq": mjhq_set,
    "coco": coco_set,
    "imagenet": lambda folder: None,
    "t2i-compbench": compbench_set,
    "evalscope": geneval2_set,
}


def sampled(folder: Path, prompts: list[SamplePrompt], seeds: int) -> Path:
    """A folder as `nextscale sample` writes it; image k of prompt i has the color (i, k, 0)."""
    out = folder / "infinity-2b"
    out.mkdir()
    entries = []
    for number, prompt in enumerate(prompts):
        for k in reversed(range(seeds)):  # the manifest's order does not matter
            name = f"{prompt.id}_{100 + k}.png"
            Image.new("RGB", (SIDE, SIDE), (number % 256, k, 0)).save(out / name)
            entries.append(Entry(name, prompt.id, prompt.text, 100 + k, (SIDE, SIDE), {}, sha256_of(out / name), {}, prompt.original))
    (out / "manifest.jsonl").write_text("".join(entry.line for entry in entries))
    return out


def replaced(file: Path, content: bytes) -> None:
    """Writes another content, and its hash into the manifest."""
    manifest, known = file.parent / "manifest.jsonl", sha256_of(file)
    file.write_bytes(content)
    text = manifest.read_text()
    assert known in text
    manifest.write_text(text.replace(known, sha256_of(file)))


def exported(name: str, tmp_path: Path, seeds: int | None = None) -> tuple[Path, set[str]]:
    """The exported folder, and its files."""
    (tmp_path / "set").mkdir()
    prompt_set = SETS[name](tmp_path / "set")
    prompts = suite(name).prompts(prompt_set)
    wanted = suite(name).seeds if seeds is None else seeds
    folder, out = sampled(tmp_path, prompts, wanted), tmp_path / "out"
    assert export(suite(name), folder, out, prompt_set, seeds) == wanted * len(prompts)
    return out, {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}


def png(size: tuple[int, int], level: int) -> bytes:
    Image.new("RGB", size, (level, level, level)).save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def color(file: Path) -> tuple[int, ...]:
    with Image.open(file) as image:
        return image.convert("RGB").getpixel((0, 0))  # type: ignore[return-value]


def test_geneval(tmp_path: Path) -> None:
    """Folders whose names are digits, metadata.jsonl with one object, samples/DIGITS.png."""
    out, files = exported("geneval", tmp_path)
    assert files == {f"0000{i}/{name}" for i in range(2) for name in ("metadata.jsonl", *(f"samples/000{k}.png" for k in range(4)))}
    assert json.loads((out / "00000" / "metadata.jsonl").read_text())["include"] == [{"class": "bench", "count": 1}]
    assert color(out / "00001" / "samples" / "0002.png") == (1, 2, 0)


def test_geneval2(tmp_path: Path) -> None:
    """A JSON object from prompts to paths."""
    out, _ = exported("geneval2", tmp_path)
    paths = json.loads((out / "image_paths.json").read_text())
    assert [*paths] == ["four white bicycles", "a cow"]
    assert color(Path(paths["a cow"])) == (1, 0, 0) and Path(paths["a cow"]).is_absolute()


def test_dpg(tmp_path: Path) -> None:
    """One picture per prompt under the name of its text file: top left, top right, bottom left, bottom right; no other files."""
    out, files = exported("dpg", tmp_path)
    assert files == {"COCOval2014000000000042.png", "256.png"}
    with Image.open(out / "256.png") as picture:
        assert picture.size == (2 * SIDE, 2 * SIDE)
        corners = [picture.getpixel(place) for place in ((0, 0), (SIDE, 0), (0, SIDE), (SIDE, SIDE))]
    assert corners == [(0, k, 0) for k in range(4)]


def test_hpsv2(tmp_path: Path) -> None:
    """STYLE/00000.jpg in the order of the style's list."""
    out, files = exported("hpsv2", tmp_path)
    assert files == {f"{style}/0000{i}.jpg" for style in ("anime", "concept-art", "paintings", "photo") for i in range(2)}
    with Image.open(out / "photo" / "00001.jpg") as picture:
        assert picture.format == "JPEG"
        assert np.abs(np.asarray(picture).astype(int).mean(axis=(0, 1)) - (7, 0, 0)).max() < 3


def test_imagereward(tmp_path: Path) -> None:
    """MODEL/ID_NUMBER.png, numbers from 0, and as many files as prompts times images."""
    out, files = exported("imagereward", tmp_path)
    assert files == {f"infinity-2b/{name}_{k}.png" for name in ("005695-0057", "005784-0093") for k in range(10)}
    assert color(out / "infinity-2b" / "005784-0093_9.png") == (1, 9, 0)


def test_mjhq(tmp_path: Path) -> None:
    assert exported("mjhq", tmp_path)[1] == {"people/0a1b.png", "food/ff00.png"}


def test_coco_takes_the_first_caption_of_every_image(tmp_path: Path) -> None:
    assert exported("coco", tmp_path)[1] == {"000000000007.png", "000000000042.png"}
    assert [prompt.text for prompt in suite("coco").prompts(tmp_path / "set" / "captions_val2014.json")] == ["other", "first"]


def test_imagenet(tmp_path: Path) -> None:
    """arr_0 of a npz, [N, H, W, 3] in 8 bits."""
    out, files = exported("imagenet", tmp_path, seeds=1)
    assert files == {"samples.npz"}
    with np.load(out / "samples.npz") as arrays:
        assert arrays.files == ["arr_0"]
        images = arrays["arr_0"]
    assert images.shape == (1000, SIDE, SIDE, 3) and images.dtype == np.uint8
    assert images[3, 0, 0].tolist() == [3, 0, 0] and images[999, 7, 7].tolist() == [999 % 256, 0, 0]


def test_imagenet_spreads_every_class_over_all_parts(tmp_path: Path) -> None:
    """OpenAI's evaluator takes the Inception Score of 5,000 images after another: each part needs all classes."""
    prompts = [SamplePrompt(str(number), str(number)) for number in range(3)]
    folder = sampled(tmp_path, prompts, 2)
    images = {prompt.id: [folder / f"{prompt.id}_{100 + k}.png" for k in range(2)] for prompt in prompts}
    layouts.imagenet(layouts.Samples(prompts, images), tmp_path / "out")
    with np.load(tmp_path / "out" / "samples.npz") as arrays:
        assert arrays["arr_0"][:, 0, 0, :2].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]


def test_imagenet_leaves_nothing_where_sizes_differ(tmp_path: Path) -> None:
    prompts = [SamplePrompt("0", "0"), SamplePrompt("1", "1")]
    folder = sampled(tmp_path, prompts, 1)
    Image.new("RGB", (SIDE, 2 * SIDE)).save(folder / "1_100.png")
    images = {prompt.id: [folder / f"{prompt.id}_100.png"] for prompt in prompts}
    with pytest.raises(NextscaleError, match="images of one size"):
        layouts.imagenet(layouts.Samples(prompts, images), tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(("seeds", "size"), [(5, (SIDE, SIDE)), (4, (SIDE, 2 * SIDE))])
def test_dpg_refuses_what_its_scorer_would_cut_wrongly(seeds: int, size: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    prompt_set = dpg_set(tmp_path / "set")
    folder = sampled(tmp_path, suite("dpg").prompts(prompt_set), seeds)
    for number, file in enumerate(sorted(folder.glob("256_*.png"))):
        replaced(file, png(size, number))
    with pytest.raises(NextscaleError, match="square images of one size"):
        export(suite("dpg"), folder, tmp_path / "out", prompt_set, seeds)


def test_compbench(tmp_path: Path) -> None:
    """SET/samples/PROMPT_NUMBER.png; the prompt ends at the first _, and numbers are never repeated."""
    _, files = exported("t2i-compbench", tmp_path)
    names = sorted((Path(file).name for file in files), key=lambda name: int(name.split("_")[-1].split(".")[0]))
    assert {Path(file).parent.as_posix() for file in files} == {"color_val/samples"}
    assert names[0] == "a green bench and a blue bowl_000000.png"
    assert [name.split("_")[0] for name in names] == ["a green bench and a blue bowl"] * 10 + ["a red black car"] * 10
    assert [int(name.split("_")[1][:6]) for name in names] == list(range(20))


@pytest.mark.parametrize("text", ["long " * 60, "a\0b"])
def test_compbench_refuses_prompts_that_cannot_name_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "color_val.txt").write_text(text)
    prompts = suite("t2i-compbench").prompts(tmp_path)
    with pytest.raises(NextscaleError, match="prompt"):
        export(suite("t2i-compbench"), sampled(tmp_path, prompts, 1), tmp_path / "out", tmp_path, 1)


def test_evalscope(tmp_path: Path) -> None:
    """A line with id, prompt and image_path for every image."""
    out, files = exported("evalscope", tmp_path)
    assert files == {"samples.jsonl"}
    found = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(line["id"], line["prompt"]) for line in found] == [("00000", "four white bicycles"), ("00001", "a cow")]
    assert color(Path(found[1]["image_path"])) == (1, 0, 0)


@pytest.mark.parametrize("name", SUITES)
def test_prompts_go_to_sample_and_come_back(name: str, tmp_path: Path) -> None:
    prompts = suite(name).prompts(SETS[name](tmp_path))
    assert all(SAFE_ID.fullmatch(prompt.id) for prompt in prompts)
    file = tmp_path / "for-sample.jsonl"
    file.write_text(as_lines(prompts))
    assert read_sample_prompts(file) == prompts


def test_what_is_lacking_is_said(tmp_path: Path) -> None:
    prompt_set = geneval_set(tmp_path)
    prompts = suite("geneval").prompts(prompt_set)
    folder = sampled(tmp_path, prompts, 3)
    with pytest.raises(NextscaleError, match="lacks images of 2 of the 2 prompts"):
        export(suite("geneval"), folder, tmp_path / "out", prompt_set)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other").touch()
    with pytest.raises(NextscaleError, match="not empty"):
        export(suite("geneval"), folder, tmp_path / "out", prompt_set, seeds=3)
    with pytest.raises(NextscaleError, match="other"):
        export(suite("geneval"), folder, tmp_path / "out" / "other", prompt_set, seeds=3)
    with pytest.raises(SettingError, match="pass --prompt-set with the path of evaluation_metadata.jsonl"):
        suite("geneval").prompts(None)
    instances = tmp_path / "instances_val2014.json"
    instances.write_text(json.dumps({"annotations": [{"image_id": 1, "id": 2, "bbox": [0, 0, 1, 1]}]}))
    with pytest.raises(PromptError, match="not instances_val"):
        suite("coco").prompts(instances)
    with pytest.raises(PromptError, match="another benchmark"):
        suite("imagereward").prompts(hps_set(tmp_path) / "photo.json")


def test_images_of_other_prompts_are_not_scored(tmp_path: Path) -> None:
    """Many prompt sets have the ids 00000, 00001, ..."""
    prompt_set = geneval_set(tmp_path)
    prompts = suite("geneval").prompts(prompt_set)
    folder = sampled(tmp_path, [SamplePrompt(prompt.id, f"not {prompt.text}") for prompt in prompts], 4)
    with pytest.raises(NextscaleError, match="shows 'not a photo of a bench', and 00000 of GenEval is 'a photo of a bench'"):
        export(suite("geneval"), folder, tmp_path / "out", prompt_set)
    assert not (tmp_path / "out").exists()


WORDS = {"a photo of a bench": "a wooden bench in a park, photo", "two cows": "two brown cows on a meadow"}


@pytest.mark.parametrize("source", ["function", "ids", "texts"])
def test_a_rewritten_set_is_exported_with_its_original_prompts(source: str, tmp_path: Path) -> None:
    """Images show other words; metadata.jsonl, from which the scorer reads the objects, is the published line."""
    prompt_set = geneval_set(tmp_path)
    by_id, by_text = tmp_path / "rewritten.jsonl", tmp_path / "prompt_rewrite_cache.json"
    by_id.write_text(lines(*({"id": f"0000{i}", "prompt": text} for i, text in enumerate(WORDS.values()))))
    by_text.write_text(json.dumps(WORDS))
    rewrite: Path | Callable[[str], str] = {"function": WORDS.__getitem__, "ids": by_id, "texts": by_text}[source]
    prompts = rewritten(suite("geneval").prompts(prompt_set), rewrite)
    assert [(prompt.text, prompt.original) for prompt in prompts] == [(text, original) for original, text in WORDS.items()]
    file = tmp_path / "prompts.jsonl"
    file.write_text(as_lines(prompts))
    assert read_sample_prompts(file) == prompts
    folder = sampled(tmp_path, prompts, 4)
    export(suite("geneval"), folder, tmp_path / "out", prompt_set)  # the manifest has the originals
    expected = prompt_set.read_text().splitlines()
    assert [(tmp_path / "out" / f"0000{i}" / "metadata.jsonl").read_text().strip() for i in range(2)] == expected
    names = {file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*.png")}
    assert names == {f"0000{i}/samples/000{k}.png" for i in range(2) for k in range(4)}
    if isinstance(rewrite, Path):
        manifest = folder / "manifest.jsonl"
        manifest.write_text("".join(replace(entry, original=None).line for entry in read_manifest(manifest)))
        with pytest.raises(NextscaleError, match="--rewritten FILE"):
            export(suite("geneval"), folder, tmp_path / "other", prompt_set)
        export(suite("geneval"), folder, tmp_path / "other", prompt_set, texts=rewrite)


def test_rewritten_prompts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    prompts = suite("geneval").prompts(geneval_set(tmp_path))
    file = tmp_path / "rewritten.jsonl"
    for content, message in (
        ({"id": "00000", "prompt": "one"}, "lacks 1, such as '00001'"),
        ({"id": "00000", "prompt": "one", "original": "another"}, "00000 rewrites 'another'"),
    ):
        file.write_text(lines(content))
        with pytest.raises(PromptError, match=message):
            rewritten(prompts, file)
    (tmp_path / "texts.json").write_text(json.dumps({"two cows": 3}))
    with pytest.raises(PromptError, match="must be a .jsonl file"):
        rewritten(prompts, tmp_path / "texts.json")


@pytest.mark.parametrize("name", ["hpsv2", "dpg"])
def test_images_that_are_gone_or_damaged_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    prompt_set = SETS[name](tmp_path / "set")
    prompts = suite(name).prompts(prompt_set)
    folder = sampled(tmp_path, prompts, suite(name).seeds)
    file = folder / f"{prompts[1].id}_100.png"
    replaced(file, file.read_bytes()[:40])
    with pytest.raises(NextscaleError, match=f"{file.name} cannot be read as an image"):
        export(suite(name), folder, tmp_path / "damaged", prompt_set)
    file.unlink()
    with pytest.raises(NextscaleError, match="lacks images of 1 of the"):
        export(suite(name), folder, tmp_path / "gone", prompt_set)


def test_images_that_are_not_those_of_the_manifest_are_not_exported(tmp_path: Path) -> None:
    prompt_set = reward_set(tmp_path)
    folder = sampled(tmp_path, suite("imagereward").prompts(prompt_set), 10)
    (folder / "005784-0093_104.png").write_bytes(b"another content")
    with pytest.raises(NextscaleError, match="005784-0093"):
        export(suite("imagereward"), folder, tmp_path / "out", prompt_set)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../../escaped", "..", ".hidden", "a/b", "/etc/x", "a\nb", "x" * 121])
def test_ids_that_cannot_name_files_are_refused(name: str, tmp_path: Path) -> None:
    records, images = tmp_path / "benchmark-prompts.json", tmp_path / "meta_data.json"
    records.write_text(json.dumps([{"id": name, "prompt": "a"}]))
    images.write_text(json.dumps({"x": {"category": name, "prompt": "a"}}))
    for kind, file in (("imagereward", records), ("mjhq", images)):
        with pytest.raises(PromptError):
            suite(kind).prompts(file)


def test_ids_that_occur_twice_are_refused(tmp_path: Path) -> None:
    records, images = tmp_path / "benchmark-prompts.json", tmp_path / "meta_data.json"
    records.write_text(json.dumps([{"id": "a", "prompt": "one"}, {"id": "a", "prompt": "two"}]))
    images.write_text(json.dumps({"b.c": {"category": "a", "prompt": "one"}, "c": {"category": "a.b", "prompt": "two"}}))
    for kind, file in (("imagereward", records), ("mjhq", images)):
        with pytest.raises(PromptError):
            suite(kind).prompts(file)


def test_a_text_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    file.write_text(json.dumps([{"id": "a", "prompt": "apple \ud800"}]))
    result = run("--suite", "imagereward", "--prompt-set", file, "--write-prompts", tmp_path / "prompts.jsonl")
    assert result.exit_code == 2 and not (tmp_path / "prompts.jsonl").exists()


def test_images_of_a_folder_above_stay_inside_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_set = reward_set(tmp_path)
    folder = sampled(tmp_path, suite("imagereward").prompts(prompt_set), 1)
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    export(suite("imagereward"), Path(".."), tmp_path / "out", prompt_set, seeds=1)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["infinity-2b"]


def test_the_page_has_the_table() -> None:
    assert suite_table() in (PROJECT / "research" / "README.md").read_text()


# --- the papers' tables


def test_every_run_of_the_papers_fits_its_model() -> None:
    runs = [run for item in PAPER for run in item.runs]
    asked = {(run.model, run.side): set[str]() for run in runs}
    for run in runs:
        asked[run.model, run.side] |= {*run.methods} - {DENSE}
    for (name, side), methods in asked.items():
        spec = model_spec(name)
        with torch.device("meta"):
            model = build_model(spec.model)
        for method in methods:
            plans = resolve_method(method).forecast(model, spec.settings.schedules.choose((side, side), None))
            assert len(plans) > 1, method
    assert {name for name, _ in asked} <= {*MODELS}


def test_numbers_of_images() -> None:
    assert {name: one.images for name, one in SUITES.items() if one.published} == {
        "geneval": 2212,
        "geneval2": 800,
        "dpg": 4260,
        "hpsv2": 3200,
        "imagereward": 1000,
        "mjhq": 30_000,
        "coco": 30_000,
        "imagenet": 50_000,
        "t2i-compbench": 24_000,
    }
    dense = [work for work in paper_work() if (work.suite, work.model, work.method) == ("geneval", "infinity-2b", DENSE)]
    assert len(dense) == 1 and dense[0].images == 2212  # three papers, one folder
    assert {table.split()[0] for table in dense[0].tables} == {"SparseVAR", "FastVAR", "StageVAR"}


TABLES = {
    "SparseVAR": ("1 2 3 4 5 6", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19"),
    "FastVAR": ("1 2 3 4 5 A.1 A.2 A.3 A.4", "1 2 3 4 5 6 7 8 A.1 A.2 A.3 A.4 A.5 A.6 A.7"),
    "StageVAR": ("1 2 3 4 6 7 8 9 11", "1 2 3 4 5 6 7 8 9 10 11 12 13 14"),
}


@pytest.mark.parametrize("paper", TABLES)
def test_every_table_and_figure_is_listed_once_with_a_way_or_a_reason(paper: str) -> None:
    """The numbers are those of the captions; StageVAR's text has no tables 5 and 10."""
    found: dict[str, list[str]] = {"Table": [], "Fig": []}
    for item in (item for item in PAPER if item.name.startswith(paper)):
        assert item.runs or item.commands or item.note, item
        for part in re.findall(r"(Table|Fig)s?\.? ([^TF]+)", item.name):
            for numbers in part[1].strip(", ").split(","):
                first, *last = (one.strip() for one in numbers.split(" to ") if one.strip())
                prefix = "A." if first.startswith("A.") else ""
                ends = [int(one.removeprefix("A.")) for one in (first, *last)]
                found[part[0]] += [f"{prefix}{number}" for number in range(ends[0], ends[-1] + 1)]
    for kind, numbers in zip(("Table", "Fig"), TABLES[paper], strict=True):
        assert sorted(found[kind]) == sorted(numbers.split()), kind


def test_commands_of_the_papers_name_lists_and_cases_that_exist() -> None:
    for command in (command for item in PAPER for command in item.commands):
        words = command.split()
        if words[:4] == ["python", "-m", "nextscale_research", "quality"]:
            assert words[words.index("--method") + 1] in LISTS, command
        if words[:3] == ["python", "-m", "benchmarks.suites"]:
            assert chosen_cases(words[3:]), command


def test_hours_follow_from_measured_speeds() -> None:
    def row(method: str, rate: float, hardware: str = "GPU") -> dict[str, object]:
        return {"model": "m", "size": [64, 64], "hardware": hardware, "method": method, "settings": method, "images_per_second": rate}

    rows = [row(DENSE, 2.0), row(DENSE, 4.0), row("FastVAR", 10.0), row(DENSE, 99.0, "other")]
    rows.append(row("FastVAR", 50.0) | {"quantize": "fp8"})  # images of other weights
    work = Work("geneval", "m", 64, "fastvar", 100, ())
    speed = measured_speed(rows, work, "GPU")
    assert speed is not None and (speed.images_per_second, speed.exact) == (10.0, True)
    assert measured_speed(rows, Work("geneval", "m", 64, "stagevar_variants:variant=svd", 100, ()), "GPU") is None  # slower than dense
    unmeasured = measured_speed(rows, Work("geneval", "m", 64, "sparsevar:tau=0.4", 100, ()), "GPU")
    assert unmeasured is not None and (unmeasured.images_per_second, unmeasured.exact) == (4.0, False)
    assert measured_speed(rows, Work("geneval", "m", 128, DENSE, 100, ()), "GPU") is None
    assert (
        measured_hardware(rows, "other") == "other" and measured_hardware(rows, "this") == "GPU" and measured_hardware([], "this") is None
    )


# --- the command


def run(*arguments: object) -> Result:
    return run_cli(*arguments, program=app, catch=True)


def test_the_papers_tables_count_images_and_hours() -> None:
    result = run("paper-tables")
    assert result.exit_code == 0, result.output
    total = sum(work.images for work in paper_work())
    assert re.search(rf"{total} images in {len(paper_work())} folders; [\d.]+ hours on one NVIDIA H200", result.output)
    assert all(item.name in result.output for item in PAPER)
    assert "--guidance 4 --temperature 1" in result.output and "evaluate_images.py" in result.output
    result = run("paper-tables", "stagevar table 3")
    assert result.exit_code == 0 and "as_released=true" in result.output and "FastVAR Table" not in result.output
    result = run("paper-tables", "table 99")
    assert result.exit_code == 2 and "PART" in result.output


def test_a_suite_alone_lists_its_folders() -> None:
    result = run("suite", "dpg")
    assert result.exit_code == 0 and "dpg" in result.output and "geneval" not in result.output


def test_from_a_prompt_set_to_a_scorers_folder(tmp_path: Path) -> None:
    prompt_set, file = geneval_set(tmp_path), tmp_path / "prompts.jsonl"
    result = run("suite", "geneval", "--prompt-set", prompt_set, "--write-prompts", file)
    assert result.exit_code == 0 and "-n 4" in result.output and "--guidance 4 --temperature 1" in result.output
    folder = sampled(tmp_path, read_sample_prompts(file), 4)
    result = run("suite", "geneval", folder, "--prompt-set", prompt_set, "--export", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "evaluate_images.py" in result.output and str(tmp_path / "out") in result.output
    (texts := tmp_path / "texts.json").write_text(json.dumps(WORDS))
    arguments = ("--prompt-set", prompt_set, "--rewritten", texts)
    assert run("suite", "geneval", *arguments, "--write-prompts", file, "--force").exit_code == 0
    assert [json.loads(line)["original"] for line in file.read_text().splitlines()] == [*WORDS]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["suite", "none"], "must be one of"),
        (["suite", "geneval", "--export", "x"], "FOLDER is missing"),
        (["paper-tables", "--results", "absent.jsonl"], "absent.jsonl must have one JSON object per line"),
    ],
)
def test_wrong_suites_are_refused(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and said in result.output
