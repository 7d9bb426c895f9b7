"""Prompt sets as their authors publish them, read by path, and their rewritten forms; every prompt has an id that names its images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nextscale.errors import PromptError
from nextscale.offline.prompts import SamplePrompt, evenly_spread, read_sample_prompts

HPS_STYLES = ("anime", "concept-art", "paintings", "photo")
IMAGENET_CLASSES = 1000
COCO_IMAGES = 30_000


def from_lines(path: Path) -> list[SamplePrompt]:
    """A .jsonl file whose objects have a prompt (GenEval's evaluation_metadata.jsonl, GenEval 2's geneval2_data.jsonl)."""
    lines = lines_of(path)
    return _numbered((_field(_json(line, path), "prompt", path) for line in lines), len(lines))


def from_text_folder(path: Path) -> list[SamplePrompt]:
    """A folder of .txt files with one prompt each (DPG-Bench's prompts); the file's name is the id."""
    return [SamplePrompt(file.stem, _text(file).strip()) for file in _files(path, "*.txt")]


def from_hps(path: Path) -> list[SamplePrompt]:
    """The folder of HPSv2's benchmark: a .json list of prompts for each of four styles."""
    found = []
    for style in HPS_STYLES:
        prompts = _json(_text(path / f"{style}.json"), path)
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise PromptError(f"{path / style}.json must be a list of prompts: give the folder of HPSv2's benchmark prompts")
        found += [SamplePrompt(f"{style}-{number:05d}", prompt) for number, prompt in enumerate(prompts)]
    return found


def from_records(path: Path) -> list[SamplePrompt]:
    """A .json list of objects with id and prompt (ImageReward's benchmark-prompts.json)."""
    records = _json(_text(path), path)
    if not isinstance(records, list):
        raise PromptError(f"{path} must be a list of objects with id and prompt")
    return [SamplePrompt(_field(record, "id", path), _field(record, "prompt", path)) for record in records]


def from_mjhq(path: Path) -> list[SamplePrompt]:
    """MJHQ-30K's meta_data.json: id to an object with category and prompt. The category is put before the id."""
    records = _json(_text(path), path)
    if not isinstance(records, dict):
        raise PromptError(f"{path} must be an object: ids with category and prompt, as in MJHQ-30K's meta_data.json")
    return [SamplePrompt(f"{_field(record, 'category', path)}.{name}", _field(record, "prompt", path)) for name, record in records.items()]


def from_coco(path: Path) -> list[SamplePrompt]:
    """COCO's captions_val*.json: the first caption of every image, at most 30,000 of them, evenly spread; the image's number is the id."""
    content = _json(_text(path), path)
    annotations = content.get("annotations") if isinstance(content, dict) else None
    if not isinstance(annotations, list):
        raise PromptError(f"{path} has no annotations: give COCO's captions_val2014.json or captions_val2017.json")
    first: dict[int, str] = {}
    try:
        for one in sorted(annotations, key=lambda one: (one["image_id"], one["id"])):
            first.setdefault(int(one["image_id"]), one["caption"].strip())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PromptError(
            f"{path} has an annotation without image_id, id or caption ({error!r}): give COCO's captions_val*.json, not instances_val*.json"
        ) from error
    return evenly_spread([SamplePrompt(f"{number:012d}", caption) for number, caption in first.items()], COCO_IMAGES)


def from_compbench(path: Path) -> list[SamplePrompt]:
    """T2I-CompBench's .txt files, one prompt per line; a folder of them or one. The file's name is put before the number."""
    files = _files(path, "*.txt") if path.is_dir() else [path]
    found = []
    for file in files:
        lines = [line.strip() for line in _text(file).splitlines() if line.strip()]
        found += [SamplePrompt(f"{file.stem}-{number:05d}", line) for number, line in enumerate(lines)]
    return found


def imagenet_classes(path: Path | None = None) -> list[SamplePrompt]:
    """The numbers of ImageNet's classes, for which no file is needed."""
    return [SamplePrompt(f"class-{number:04d}", str(number)) for number in range(IMAGENET_CLASSES)]


def rewritten(prompts: Sequence[SamplePrompt], rewrite: Path | Callable[[str], str]) -> list[SamplePrompt]:
    """Returns the prompts in other words, each with its original text.

    rewrite: a function of the text; or a .jsonl file with id and prompt; or a .json object from original to rewritten texts, such as the
        prompt_rewrite_cache.json that Infinity's evaluation keeps.
    """
    if not isinstance(rewrite, Path):
        return [replace(prompt, text=rewrite(prompt.text), original=prompt.text) for prompt in prompts]
    if rewrite.suffix == ".jsonl":
        by_id = {prompt.id: prompt for prompt in read_sample_prompts(rewrite)}
        found = {prompt.id: by_id[prompt.id].text for prompt in prompts if prompt.id in by_id}
        if wrong := [prompt for prompt in prompts if prompt.id in by_id and by_id[prompt.id].original not in (None, prompt.text)]:
            raise PromptError(
                f"{rewrite}: {wrong[0].id} rewrites {by_id[wrong[0].id].original!r:.80}, and the prompt is {wrong[0].text!r:.80}"
            )
    else:
        texts = _json(_text(rewrite), rewrite)
        if not isinstance(texts, dict) or not all(isinstance(text, str) and text.strip() for text in texts.values()):
            raise PromptError(f"{rewrite} must be a .jsonl file with id and prompt, or a .json object from original to rewritten texts")
        found = {prompt.id: texts[prompt.text] for prompt in prompts if prompt.text in texts}
    if lacking := [prompt for prompt in prompts if prompt.id not in found]:
        raise PromptError(f"{rewrite} must have every prompt; it lacks {len(lacking)}, such as {lacking[0].id!r} ({lacking[0].text!r:.80})")
    return [replace(prompt, text=found[prompt.id], original=prompt.text) for prompt in prompts]


def lines_of(path: Path) -> list[str]:
    """Returns the lines of a .jsonl file that are not empty. JSON may hold characters at which `splitlines` splits."""
    return [line for line in _text(path).split("\n") if line.strip()]


def as_lines(prompts: Iterable[SamplePrompt]) -> str:
    """Returns the .jsonl file that `nextscale sample --prompts` takes."""
    lines = ({"id": prompt.id, "prompt": prompt.text} | ({"original": prompt.original} if prompt.original else {}) for prompt in prompts)
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _numbered(texts: Iterable[str], count: int) -> list[SamplePrompt]:
    width = max(5, len(str(count - 1)))
    return [SamplePrompt(f"{number:0{width}d}", text) for number, text in enumerate(texts)]


def _files(path: Path, pattern: str) -> list[Path]:
    found = sorted(path.glob(pattern))
    if not found:
        raise PromptError(f"{path} holds no {pattern}: give the folder of the benchmark's prompts")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the prompt set {path} cannot be read ({error}): give its path with --prompt-set") from error


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"the prompt set {path} is not JSON ({error}): download it again") from error


def _field(record: Any, name: str, path: Path) -> str:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise PromptError(f"{path}: {str(record)[:80]!r} has no {name}; is it the prompt set of another benchmark?")
    return value
