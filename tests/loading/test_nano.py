"""The model that comes with the package. The tests of `embedded` need its trained files; the others write random ones of that layout."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import nextscale
from nextscale.assets import EMBEDDED
from nextscale.checkpoints import published_tensors
from nextscale.cli.compare import PROMPTS
from nextscale.errors import CheckpointError, SizeError, WeightsMismatch
from nextscale.loading import presets
from nextscale.loading.load import fill_random
from nextscale.loading.presets import NANO, Embedded, build_model, build_tokenizer
from nextscale.models import Infinity
from nextscale.text import RandomEncoder
from nextscale.text.words import SINGLE_PARTS, Vocabulary, WordEncoder, WordEncoderConfig, WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer
from tests.helpers.cli import run_cli
from training import export
from training.colors import WORDS
from training.export import MOST_BYTES, write_bundle
from training.rules import looks, whole
from training.wording import COLOR

FILES = ("model.safetensors", "tokenizer.safetensors", "words.safetensors")
SMALLEST = 128  # pixels


def random_parts() -> tuple[Infinity, InfinityTokenizer, WordTextEncoder]:
    with torch.device("meta"):
        model, tokenizer = build_model(NANO.model), build_tokenizer(NANO.tokenizer)
    for module in (model, tokenizer):
        fill_random(module, torch.Generator().manual_seed(0), torch.float32, ())
    vocabulary = Vocabulary(["a", "red", "apple", *SINGLE_PARTS])
    torch.manual_seed(0)
    words = WordTextEncoder(vocabulary, WordEncoder(WordEncoderConfig(len(vocabulary))))
    assert isinstance(model, Infinity)
    assert isinstance(tokenizer, InfinityTokenizer)
    return model, tokenizer, words


@pytest.fixture(scope="module")
def parts() -> tuple[Infinity, InfinityTokenizer, WordTextEncoder]:
    return random_parts()


@pytest.fixture(scope="module")
def bundle(parts: tuple[Infinity, InfinityTokenizer, WordTextEncoder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "nano"
    assert write_bundle(*parts, folder) == sum((folder / file).stat().st_size for file in FILES)
    return folder


@pytest.fixture
def random_nano(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package carries the random files."""
    monkeypatch.setattr(presets, "EMBEDDED", bundle.parent)
    yield bundle


@pytest.fixture(scope="module")
def embedded() -> Path:
    folder = EMBEDDED / "nano"
    missing = [file for file in (*FILES, "MODEL_CARD.md") if not (folder / file).is_file()]
    assert not missing, f"{folder} lacks {', '.join(missing)}: train the model and write it with training.export.write_bundle"
    return folder


# --- writing the files


def test_files_hold_the_published_names_in_half_precision(parts: tuple[Infinity, InfinityTokenizer, WordTextEncoder], bundle: Path) -> None:
    assert sorted(file.name for file in bundle.iterdir()) == sorted(FILES)
    for module, file in zip(parts[:2], FILES, strict=False):
        stored = load_file(bundle / file)
        assert {key: tensor.shape for key, tensor in stored.items()} == {
            key: torch.Size(slot.shape) for key, slot in published_tensors(module, module.layout).items()
        }
        assert {tensor.dtype for tensor in stored.values()} == {torch.float16}


def test_what_is_loaded_is_what_was_written(parts: tuple[Infinity, InfinityTokenizer, WordTextEncoder], random_nano: Path) -> None:
    pipeline = nextscale.load("nano", device="cpu")
    for ours, theirs in ((pipeline.model, parts[0]), (pipeline.tokenizer, parts[1])):
        written = theirs.state_dict()
        for name, tensor in ours.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, written[name].half().float()), name
    assert pipeline.model.float32  # what is kept in float32 whatever the dtype is in half precision in the file as well
    features, written_features = pipeline.reader.read("a red apple"), parts[2](["a red apple"])
    assert torch.allclose(features.rows[0], written_features.rows[0], atol=5e-3)
    assert nextscale.load("nano", device="cpu", dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_too_many_bytes_leave_the_older_files(
    parts: tuple[Infinity, InfinityTokenizer, WordTextEncoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILES[0]).write_text("older")
    monkeypatch.setattr(export, "MOST_BYTES", 30_000_000)
    with pytest.raises(CheckpointError, match=r"model.safetensors 28\.\d MB, .*more than the 30 MB"):
        write_bundle(*parts, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [FILES[0]]
    assert (tmp_path / FILES[0]).read_text() == "older"


def test_values_that_half_precision_cannot_hold_are_refused(tmp_path: Path) -> None:
    model, tokenizer, words = random_parts()
    with torch.no_grad():
        model.text_norm.weight[3] = 1e5
    with pytest.raises(CheckpointError, match=r"the model has values that are not finite as torch.float16: text_norm.weight"):
        write_bundle(model, tokenizer, words, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- loading them


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(file: str, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nano").mkdir()
    for other in set(FILES) - {file}:
        (tmp_path / "nano" / other).symlink_to(bundle / other)
    monkeypatch.setattr(presets, "EMBEDDED", tmp_path)
    with pytest.raises(CheckpointError, match=f"nano/{file} is absent. Install nextscale"):
        nextscale.load("nano", device="cpu").reader.read("a red apple")


def test_own_files_take_the_place_of_the_embedded_ones(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "EMBEDDED", tmp_path)  # nothing is there
    files = {"weights": bundle / FILES[0], "tokenizer": bundle / FILES[1]}
    pipeline = nextscale.load("nano", **files, text_encoder=bundle / FILES[2], device="cpu")
    assert isinstance(pipeline.reader.encoder, WordTextEncoder)
    encoder = RandomEncoder(192)
    assert nextscale.load("nano", **files, text_encoder=encoder, device="cpu").reader.encoder is encoder


def test_a_prompt_that_is_refused_leaves_nothing_behind(random_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "generate",
        "a red apple",
        "a red \u82f9\u679c",
        "--batch",
        "1",
        "--size",
        str(SMALLEST),
        "--device",
        "cpu",
        "--out",
        "drawn",
    ]
    result = run_cli(*arguments)
    assert result.exit_code == 2
    assert "prompt must use the letters a-z" in result.stderr
    assert not list(tmp_path.rglob("*.png"))


def test_words_that_are_not_there_are_asked_for(bundle: Path) -> None:
    files = {"weights": bundle / FILES[0], "tokenizer": bundle / FILES[1]}
    with pytest.raises(CheckpointError, match=r"nothing/there is not an existing file or folder"):
        nextscale.load("nano", **files, text_encoder="nothing/there", device="cpu").reader.read("a red apple")


def test_swapped_files_are_recognized(random_nano: Path) -> None:
    with pytest.raises(WeightsMismatch, match="It looks like the tokenizer of nano"):
        nextscale.load("nano", weights=random_nano / FILES[1], device="cpu")


def test_sizes() -> None:
    book = NANO.settings.schedules
    assert book.choose(None, None) == book.choose(256, None) == book.choose("0.06M", None)
    stages = {side: len(book.choose(side, None)) for side in (128, 256, 384, 512)}
    assert stages == {128: 7, 256: 10, 384: 12, 512: 13}
    assert {book.choose(side, None).extent for side in stages} == {(64, 64)}
    wide = book.choose(None, "16:9")
    assert (len(wide), wide.grid, wide.extent) == (10, (24, 42), (48, 84))
    assert book.choose("0.25M", None) == book.choose(512, None)
    for unknown in ("1M", 1024, (256, 320)):
        with pytest.raises(SizeError):
            book.choose(unknown, None)
    tokenizer = build_tokenizer(NANO.tokenizer)
    assert tokenizer.pixels_per_token == book.pixels_per_token


def test_prompts_are_drawn_without_a_model_s_name(random_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red apple\n")
    calls = (("a red apple",), ("-m", "nano", "a red apple"), ("--prompts", "prompts.txt"))
    for number, call in enumerate(calls):
        arguments = ["generate", *call, "--size", str(SMALLEST), "--seed", "1", "--device", "cpu", "--out", f"{number}.png"]
        result = run_cli(*arguments)
        assert result.exit_code == 0, result.stderr
    with Image.open("0.png") as image:
        assert image.size == (SMALLEST, SMALLEST)
    assert len({Path(f"{number}.png").read_bytes() for number in range(len(calls))}) == 1


# --- the trained files


def test_the_embedded_files_are_small_and_finite_and_in_half_precision(embedded: Path) -> None:
    assert sum((embedded / file).stat().st_size for file in FILES) <= MOST_BYTES
    for file in FILES:
        for name, tensor in load_file(embedded / file).items():
            assert tensor.dtype == torch.float16 or (file == FILES[2] and tensor.dtype == torch.uint8), f"{file}: {name}"  # texts are bytes
            assert tensor.isfinite().all(), f"{file}: {name}"


def test_the_card_counts_the_parameters(embedded: Path) -> None:
    card = (embedded / "MODEL_CARD.md").read_text()
    for file in FILES:
        numbers = sum(tensor.numel() for tensor in load_file(embedded / file).values() if tensor.is_floating_point())
        assert f"| `{file}` | {numbers / 1e6:.1f} M |" in card


def test_licenses_travel_with_the_embedded_files(embedded: Path) -> None:
    licenses = (embedded / "LICENSES.md").read_text()
    for source in ("fluentui-emoji", "noto-emoji", "twemoji", "clothing-dataset", "all-MiniLM-L6-v2"):
        assert source in licenses
    for named in re.findall(r"`(licenses/[^`]+)`", licenses):
        assert (embedded / named).is_file(), named


def test_the_words_of_the_demo_are_known(embedded: Path) -> None:
    vocabulary = WordTextEncoder.load(embedded / FILES[2]).vocabulary
    for prompt in PROMPTS:
        assert len(vocabulary.split(prompt)) == len(prompt.replace("-", " ").split()), prompt


def test_prompts_of_the_readme_and_the_demo_show_their_color_and_are_whole(embedded: Path) -> None:
    """Photographs have no plain background, by which the rule for wholeness knows the subject."""
    asked = list(dict.fromkeys([*PROMPTS, *readme_prompts()]))
    pixels = nextscale.load("nano", device="cpu")(asked, seed=[0] * len(asked), size=256).pixels
    drawn = {prompt: WORDS[word] for prompt, word in zip(asked, looks(pixels).words().tolist(), strict=True)}
    colored = {prompt: word for prompt in asked for word in COLOR.findall(prompt)}
    assert {prompt: drawn[prompt] for prompt in colored} == colored
    assert len(colored) >= 6
    assert [prompt for prompt, kept in zip(asked, whole(pixels), strict=True) if not kept and "photo" not in prompt] == []


def readme_prompts() -> list[str]:
    """Everything that the README asks nano for."""
    page = (Path(__file__).parents[2] / "README.md").read_text()
    commands = [line for line in page.splitlines() if line.startswith("nextscale generate") and " -m " not in line]
    calls = re.findall(r"pipe\((.*?)(?:, seed|\))", page)
    return [prompt for text in [*commands, *calls] for prompt in re.findall(r'"(an? [^"]+)"', text)]


def test_the_embedded_model_needs_no_network_and_no_further_package(embedded: Path, tmp_path: Path) -> None:
    program = (
        "import socket, sys\n"
        "for extra in ('transformers', 'tokenizers', 'matplotlib', 'huggingface_hub'):\n"
        "    sys.modules[extra] = None\n"
        "def refuse(*_):\n    raise AssertionError('the network is touched')\n"
        "socket.getaddrinfo = socket.socket.connect = refuse\n"
        "import nextscale\n"
        f"images = nextscale.load('nano', device='cpu')('a red apple', seed=0, size={SMALLEST}).images\n"
        f"assert images[0].size == ({SMALLEST}, {SMALLEST})\n"
        "assert 'torch._dynamo' not in sys.modules, 'the compiler is imported, which takes longer than the image'\n"
    )
    environment = {"NEXTSCALE_HOME": str(tmp_path), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], env=environment)


def test_the_embedded_model_draws_what_it_is_told(embedded: Path) -> None:
    """Colors in the middle, white at the corners: a few seeds, since a single image may miss."""
    pipeline = nextscale.load("nano", device="cpu", dtype=torch.float32)
    middle = slice(3 * SMALLEST // 8, 5 * SMALLEST // 8)
    colors = {}
    for color in ("red", "green"):
        pixels = pipeline(f"a flat icon of a {color} apple", seed=[0, 1, 2, 3], size=SMALLEST).pixels
        colors[color] = pixels[:, :, middle, middle].mean(dim=(2, 3)).median(dim=0).values  # [3]
        assert pixels[:, :, :4, :4].mean(dim=(1, 2, 3)).median() > 0.8
    assert colors["red"][0] > colors["red"][1] + 0.3
    assert colors["green"][1] > colors["green"][0] + 0.1


def test_presets_name_the_files_that_are_written() -> None:
    assert NANO.text_encoder is not None
    assert [NANO.weights, NANO.tokenizer_weights, NANO.text_encoder.origin] == [Embedded(f"nano/{file}") for file in FILES]
