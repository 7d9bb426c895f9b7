"""Prompt files: text, JSONL, and tar shards of captioned images."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from nextscale.errors import PromptError
from nextscale.offline.prompts import read_prompts
from nextscale_research.quality.prompts import EvalPrompt, read_eval_prompts


def shard(path: Path, captions: list[dict[str, str]], images: list[str]) -> Path:
    with tarfile.open(path, "w") as archive:
        contents = {"captions.jsonl": "\n".join(json.dumps(entry) for entry in captions).encode()}
        for number, name in enumerate(images):
            encoded = io.BytesIO()
            Image.new("RGB", (20, 20), (80 * number, 90, 0)).save(encoded, "WEBP")
            contents[name] = encoded.getvalue()
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_prompt_files(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("# three\na bee\n\n  a cat\na dog\n")
    assert read_prompts(text) == [prompt.text for prompt in read_eval_prompts(text)] == ["a bee", "a cat", "a dog"]
    assert read_prompts(text, limit=2) == ["a bee", "a cat"]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a bee", "id": "first"}\n')  # as `nextscale sample` takes them
    assert read_prompts(lines) == ["a bee"]
    lines.write_text('{"caption": "a bee", "style": "noto"}\n')
    assert read_eval_prompts(lines) == [EvalPrompt("a bee", "noto")]
    entries = [{"file": f"{name}.webp", "caption": f"a {name}", "label": name} for name in ("bee", "cat")]
    bee, cat = read_eval_prompts(shard(tmp_path / "val.tar", entries, ["bee.webp", "cat.webp"]))
    assert read_prompts(tmp_path / "val.tar") == ["a bee", "a cat"]
    assert (cat.text, cat.label, cat.image(8).shape) == ("a cat", "cat", (1, 3, 8, 8))
    assert cat.image(8)[0, 0].mean() > bee.image(8)[0, 0].mean() + 0.3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n# nothing\n", "no prompt"),
        ("broken.jsonl", "{", "line 1 is not valid JSON"),
        ("deep.jsonl", "[" * 100_000, "line 1 is not valid JSON"),
        ("nameless.jsonl", '{"label": "bee"}', "line 1 must have a text"),
        ("no.tar", "this is no tar", "cannot be read"),
        ("odd.jsonl", '{"caption": "a bee", "label": ["bee"]}', "line 1: label must be a string"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match=message):
        read_eval_prompts(tmp_path / name)


def test_bad_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot be read"):
        read_eval_prompts(tmp_path / "absent.tar")
    with pytest.raises(PromptError, match="lacks 1 images .* such as 'cat.webp'"):
        read_eval_prompts(shard(tmp_path / "a.tar", [{"file": "cat.webp", "caption": "a cat"}], []))
    png = io.BytesIO()
    Image.effect_noise((400, 400), 50).save(png, "PNG")
    head, _, rest = png.getvalue().rpartition(b"IDAT")
    for encoded in (b"RIFF", head + b"\xffDAT" + rest):  # Pillow raises OSError and SyntaxError
        with pytest.raises(PromptError, match="damaged"):
            EvalPrompt("a bee", encoded=encoded).image(8)
