"""Names, packing, strictness, hostile files, conversion and memory of the checkpoint reader, on toy modules made here."""

import argparse
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nextscale import errors
from nextscale.checkpoints import (
    Layout,
    NoInitialValues,
    Rule,
    check,
    convert,
    files,
    load_weights,
    open_checkpoint,
    published_tensors,
)
from nextscale.checkpoints import weights as weights_module
from nextscale.checkpoints.layout import PublishedTensor
from nextscale.errors import CheckpointError
from nextscale.serialization import MAX_BYTES

DIM, HEADS, LEVELS, BLOCKS = 4, 2, 3, 2
Writer = Callable[[dict[str, object], Path], None]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.log_temperature = nn.Parameter(torch.zeros(HEADS))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.ada_table = nn.Parameter(torch.zeros(6, DIM))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.levels = nn.Embedding(LEVELS, DIM)
        self.head = nn.Linear(DIM, 5)
        self.gain = nn.Parameter(torch.zeros(()))


TOY_LAYOUT = Layout(
    rules=(
        Rule(
            r"blocks\.(\d+)\.attention\.qkv\.bias",
            (r"blocks.\1.attn.q_bias", r"blocks.\1.attn.zero_k_bias", lambda match: f"blocks.{match[1]}.attn.v_bias"),
        ),
        Rule(r"blocks\.(\d+)\.attention\.qkv\.weight", (r"blocks.\1.attn.mat_qkv.weight",)),
        Rule(r"blocks\.(\d+)\.attention\.log_temperature", (r"blocks.\1.attn.scale_mul_1H11",), lambda shape: (1, *shape, 1, 1)),
        Rule(r"blocks\.(\d+)\.ada_table", (r"blocks.\1.ada_gss",), lambda shape: (1, 1, *shape)),
        Rule(r"blocks\..*", ("this later rule must never win",)),
        Rule(r"levels\.weight", ("lvl_embed.weight",)),
        Rule(r"gain", ("gain_1",), lambda shape: (1,)),
    ),
    wrappers=(("trainer", "gpt_fsdp"), ("state_dict",)),
    ignored=(r"ema_\w+", r"lvl_1L"),
    zero_if_absent=(r"blocks\.\d+\.attn\.zero_k_bias",),
    aliases=((r"^module\.", ""), (r"\.self_attn\.", ".attn.")),
    cut_rows=(r"lvl_embed\.weight",),
)


def published_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {"lvl_embed.weight": (LEVELS, DIM), "head.weight": (5, DIM), "head.bias": (5,), "gain_1": (1,)}
    for block in range(BLOCKS):
        shapes |= {f"blocks.{block}.attn.{bias}": (DIM,) for bias in ("q_bias", "zero_k_bias", "v_bias")}
        shapes[f"blocks.{block}.attn.mat_qkv.weight"] = (3 * DIM, DIM)
        shapes[f"blocks.{block}.attn.scale_mul_1H11"] = (1, HEADS, 1, 1)
        shapes[f"blocks.{block}.ada_gss"] = (1, 1, 6, DIM)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def our_weights(published: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {"levels.weight": published["lvl_embed.weight"][:LEVELS], "gain": published["gain_1"][0]}
    ours |= {key: published[key] for key in ("head.weight", "head.bias")}
    for block in range(BLOCKS):
        attention, prefix = f"blocks.{block}.attention", f"blocks.{block}.attn"
        ours[f"{attention}.qkv.bias"] = torch.cat([published[f"{prefix}.{part}"] for part in ("q_bias", "zero_k_bias", "v_bias")])
        ours[f"{attention}.qkv.weight"] = published[f"{prefix}.mat_qkv.weight"]
        ours[f"{attention}.log_temperature"] = published[f"{prefix}.scale_mul_1H11"][0, :, 0, 0]
        ours[f"blocks.{block}.ada_table"] = published[f"blocks.{block}.ada_gss"][0, 0]
    return ours


def meta_toy() -> Toy:
    with torch.device("meta"):
        return Toy()


def assert_loaded(module: nn.Module, expected: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    state = module.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor, expected[name].to(dtype)), name


def save_zip(state: dict[str, object], path: Path) -> None:
    torch.save(state, path)


def save_legacy(state: dict[str, object], path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def refusal(path: Path | str, layout: Layout = TOY_LAYOUT) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, layout)
    message = str(caught.value)
    assert str(path) in message
    assert not re.search(r"weights_only|PytorchStreamReader|Errno|Traceback|deserializing", message)
    return message


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return published_weights()


@pytest.fixture
def checkpoint_file(weights: dict[str, Tensor], tmp_path: Path) -> Path:
    path = tmp_path / "toy.pth"
    torch.save(weights, path)
    return path


# --- slots and checks


def test_initial_values_are_left_out_on_the_meta_device_alone() -> None:
    with NoInitialValues():
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 6), nn.Conv2d(1, 2, 3), nn.LayerNorm(4))
        torch.manual_seed(0)
        filled = nn.Linear(3, 4)
    torch.manual_seed(0)
    assert torch.equal(filled.weight, nn.Linear(3, 4).weight)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert empty[0].weight.shape == (4, 3) and isinstance(empty[0].weight, nn.Parameter)


def test_slots_say_where_each_published_tensor_goes() -> None:
    slots = published_tensors(meta_toy(), TOY_LAYOUT)
    assert slots.keys() == published_weights().keys()
    assert slots["blocks.1.attn.q_bias"] == PublishedTensor("blocks.1.attention.qkv.bias", slice(0, DIM), (DIM,))
    assert slots["blocks.1.attn.v_bias"] == PublishedTensor("blocks.1.attention.qkv.bias", slice(2 * DIM, 3 * DIM), (DIM,))
    assert slots["blocks.0.attn.scale_mul_1H11"] == PublishedTensor("blocks.0.attention.log_temperature", slice(0, HEADS), (1, HEADS, 1, 1))
    assert slots["blocks.0.ada_gss"] == PublishedTensor("blocks.0.ada_table", slice(0, 6), (1, 1, 6, DIM))
    assert slots["head.weight"] == PublishedTensor("head.weight", slice(0, 5), (5, DIM))
    assert slots["gain_1"] == PublishedTensor("gain", slice(0, 1), (1,))


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (Rule(r"head\.bias", ("a", "b")), "rows of head.bias"),
        (Rule(r"gain", ("a", "b")), "rows of gain"),
        (Rule(r"head\.bias", ("head.weight",)), "'head.weight' for both head.weight and head.bias"),
        (Rule(r"head\.bias", ("a",), lambda shape: (1, 4)), "shape of head.bias"),
    ],
)
def test_an_impossible_layout_is_refused(rule: Rule, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        published_tensors(meta_toy(), Layout(rules=(rule,)))


def test_check_names_every_kind_of_mismatch(weights: dict[str, Tensor]) -> None:
    slots = published_tensors(meta_toy(), TOY_LAYOUT)
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    assert not check(slots, shapes, TOY_LAYOUT)
    assert not check(slots, shapes, TOY_LAYOUT)
    del shapes["head.bias"]
    shapes |= {"tail.bias": (5,), "head.weight": (DIM, 5), "ema_rate": (3,)}
    mismatch = check(slots, shapes, TOY_LAYOUT)
    assert mismatch.missing == ("head.bias",)
    assert mismatch.unexpected == ("tail.bias",)
    assert mismatch.misshaped == {"head.weight": ((DIM, 5), (5, DIM))}
    assert mismatch


@pytest.mark.parametrize(
    ("key", "shape", "does_fit"),
    [
        ("lvl_embed.weight", (LEVELS + 2, DIM), True),
        ("lvl_embed.weight", (LEVELS - 1, DIM), False),
        ("lvl_embed.weight", (LEVELS + 2, DIM + 1), False),
        ("lvl_embed.weight", (), False),
        ("head.weight", (6, DIM), False),
        ("blocks.0.ada_gss", (6, DIM), False),
    ],
)
def test_only_cut_rows_may_be_longer(weights: dict[str, Tensor], key: str, shape: tuple[int, ...], does_fit: bool) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()} | {key: shape}
    assert bool(check(published_tensors(meta_toy(), TOY_LAYOUT), shapes, TOY_LAYOUT)) is not does_fit


# --- sources


@pytest.mark.parametrize("write", [save_zip, save_legacy, save_file])
@pytest.mark.parametrize("name", ["toy.pth", "toy.safetensors", "toy.bin"])
def test_content_decides_the_format(weights: dict[str, Tensor], tmp_path: Path, write: Writer, name: str) -> None:
    write(weights, tmp_path / name)
    for source in (tmp_path / name, str(tmp_path / name), tmp_path):
        module = meta_toy()
        load_weights(module, source, TOY_LAYOUT)
        assert_loaded(module, our_weights(weights))


@pytest.mark.parametrize("header_bytes", [0x0280, 0x4B50], ids=["begins like a pickle", "begins like a zip"])
def test_a_safetensors_length_that_looks_like_another_format(tmp_path: Path, header_bytes: int) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode().ljust(header_bytes)
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", header_bytes) + header + struct.pack("<2f", 1.5, -2.0))
    assert path.read_bytes()[:2] in (b"\x80\x02", b"PK")
    [(key, tensor)] = open_checkpoint(path, Layout()).tensors(["a"])
    assert key == "a" and tensor.tolist() == [1.5, -2.0]


def write_shards(folder: Path, weights: dict[str, Tensor], writers: dict[str, Writer], index_name: str | None) -> None:
    folder.mkdir(exist_ok=True)
    shard_of = {key: sorted(writers)[position % len(writers)] for position, key in enumerate(weights)}
    for shard, write in writers.items():
        write({key: tensor for key, tensor in weights.items() if shard_of[key] == shard}, folder / shard)
    if index_name:
        (folder / index_name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shard_of}))


@pytest.mark.parametrize("index_name", ["pytorch_model.bin.index.json", None])
def test_a_folder_of_shards(weights: dict[str, Tensor], tmp_path: Path, index_name: str | None) -> None:
    writers = {"model-1.safetensors": save_file, "model-2.bin": save_zip, "model-3.pth": save_legacy}
    write_shards(tmp_path, weights, writers, index_name)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("not weights")
    module = meta_toy()
    load_weights(module, tmp_path, TOY_LAYOUT)
    assert_loaded(module, our_weights(weights))


def test_an_index_hides_other_files_and_can_be_named_itself(weights: dict[str, Tensor], tmp_path: Path) -> None:
    write_shards(tmp_path, weights, {"a.bin": save_zip, "b.bin": save_zip}, "one.index.json")
    save_file({"stray": torch.ones(1)}, tmp_path / "stray.safetensors")
    assert open_checkpoint(tmp_path, TOY_LAYOUT).shapes.keys() == weights.keys()
    (tmp_path / "two.index.json").write_text("{}")
    assert "several indexes: one.index.json, two.index.json" in refusal(tmp_path)
    assert open_checkpoint(tmp_path / "one.index.json", TOY_LAYOUT).shapes.keys() == weights.keys()


def test_shards_that_are_links_out_of_the_folder_are_read(weights: dict[str, Tensor], tmp_path: Path) -> None:
    write_shards(tmp_path / "blobs", weights, {"a.bin": save_zip}, "x.index.json")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("a.bin", "x.index.json"):
        (snapshot / name).symlink_to(tmp_path / "blobs" / name)
    assert open_checkpoint(snapshot, TOY_LAYOUT).shapes.keys() == weights.keys()


def test_tensors_come_shard_by_shard_and_only_when_asked(
    weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, weights, {"a.safetensors": save_file, "b.safetensors": save_file}, None)
    checkpoint = open_checkpoint(tmp_path, TOY_LAYOUT)
    read_shard, opened = files._shard_state, []
    monkeypatch.setattr(files, "_shard_state", lambda path, layout: opened.append(path.name) or read_shard(path, layout))
    in_a, also_in_a = list(load_file(tmp_path / "a.safetensors"))[:2]
    in_b = next(iter(load_file(tmp_path / "b.safetensors")))
    reader = checkpoint.tensors([in_a, in_b, also_in_a])
    assert opened == []
    assert [next(reader)[0], next(reader)[0], list(opened)] == [in_a, also_in_a, ["a.safetensors"]]
    key, tensor = next(reader)
    assert key == in_b and torch.equal(tensor, weights[in_b]) and opened == ["a.safetensors", "b.safetensors"]
    with pytest.raises(CheckpointError, match="no tensors named nowhere"):
        list(checkpoint.tensors(["nowhere"]))


def test_wrappers_are_tried_in_order(weights: dict[str, Tensor], tmp_path: Path) -> None:
    decoy = {"decoy": torch.ones(1)}
    files = [
        {"trainer": {"gpt_fsdp": OrderedDict(weights), "step": 3}, "state_dict": decoy, "epoch": 4},
        {"trainer": {"optimizer": decoy}, "state_dict": weights},
        {"state_dict": weights, "args": "--lr 1"},
    ]
    for number, content in enumerate(files):
        torch.save(content, tmp_path / f"{number}.pth")
        assert open_checkpoint(tmp_path / f"{number}.pth", TOY_LAYOUT).shapes.keys() == weights.keys()


def test_settings_kept_beside_the_weights_do_no_harm(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "training.pth"
    torch.save({"state_dict": weights, "args": argparse.Namespace(lr=1e-4, tags=["a"]), "epoch": 3}, path)
    module = meta_toy()
    load_weights(module, path, TOY_LAYOUT)
    assert_loaded(module, our_weights(weights))


def test_aliases_come_first(weights: dict[str, Tensor], tmp_path: Path) -> None:
    renamed = {f"module.{key.replace('.attn.', '.self_attn.')}": tensor for key, tensor in weights.items()}
    renamed["module.ema_count"] = torch.ones(2)
    torch.save(renamed, tmp_path / "toy.pth")
    assert open_checkpoint(tmp_path / "toy.pth", TOY_LAYOUT).shapes.keys() == {*weights, "ema_count"}
    module = meta_toy()
    load_weights(module, tmp_path / "toy.pth", TOY_LAYOUT)
    assert_loaded(module, our_weights(weights))


# --- loading


@pytest.mark.parametrize("source_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_floating_source_is_cast(weights: dict[str, Tensor], tmp_path: Path, source_dtype: torch.dtype, dtype: torch.dtype) -> None:
    stored = {key: tensor.to(source_dtype) for key, tensor in weights.items()}
    torch.save(stored, tmp_path / "toy.pth")
    module = meta_toy()
    load_weights(module, tmp_path / "toy.pth", TOY_LAYOUT, dtype=dtype)
    assert_loaded(module, our_weights(stored), dtype)
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_chosen_parameters_stay_float32(weights: dict[str, Tensor], checkpoint_file: Path) -> None:
    module = meta_toy()
    load_weights(module, checkpoint_file, TOY_LAYOUT, dtype=torch.bfloat16, float32=("head.", "blocks.1.ada"))
    kept = {name for name, parameter in module.named_parameters() if parameter.dtype == torch.float32}
    assert kept == {"head.weight", "head.bias", "blocks.1.ada_table"}
    assert torch.equal(module.head.weight, weights["head.weight"])
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32, torch.bfloat16}


def test_a_module_that_is_not_on_meta_loses_its_old_values(weights: dict[str, Tensor], checkpoint_file: Path) -> None:
    module = Toy()
    load_weights(module, checkpoint_file, TOY_LAYOUT, device=torch.device("cpu"))
    assert_loaded(module, our_weights(weights))
    assert module.head(torch.ones(1, DIM)).shape == (1, 5)


def test_absent_zeros_are_zeros_and_present_ones_are_used(weights: dict[str, Tensor], tmp_path: Path) -> None:
    del weights["blocks.0.attn.zero_k_bias"]
    torch.save(weights, tmp_path / "toy.pth")
    module = meta_toy()
    load_weights(module, tmp_path / "toy.pth", TOY_LAYOUT)
    assert_loaded(module, our_weights(weights | {"blocks.0.attn.zero_k_bias": torch.zeros(DIM)}))
    assert module.blocks[1].attention.qkv.bias[DIM : 2 * DIM].abs().min() > 0


def test_surplus_rows_are_dropped_and_ignored_keys_skipped(weights: dict[str, Tensor], tmp_path: Path) -> None:
    longer = weights | {"lvl_embed.weight": torch.randn(LEVELS + 4, DIM)}
    extras = {"lvl_1L": torch.arange(9), "ema_note": "text under an ignored key", "ema_sparse": torch.eye(2).to_sparse()}
    torch.save(longer | extras, tmp_path / "toy.pth")
    module = meta_toy()
    load_weights(module, tmp_path / "toy.pth", TOY_LAYOUT)
    assert_loaded(module, our_weights(longer))


def test_odd_strides_and_gradients_in_the_file_do_not_matter(weights: dict[str, Tensor], tmp_path: Path) -> None:
    odd = weights | {"head.weight": weights["head.weight"].T.contiguous().T, "head.bias": torch.ones(1).expand(5)}
    odd["lvl_embed.weight"] = nn.Parameter(weights["lvl_embed.weight"])
    torch.save(odd, tmp_path / "toy.pth")
    [(_, parameter)] = open_checkpoint(tmp_path / "toy.pth", TOY_LAYOUT).tensors(["lvl_embed.weight"])
    assert not parameter.requires_grad
    module = meta_toy()
    load_weights(module, tmp_path / "toy.pth", TOY_LAYOUT)
    assert_loaded(module, our_weights(odd))


def test_all_problems_are_told_before_anything_is_copied(weights: dict[str, Tensor], tmp_path: Path) -> None:
    del weights["head.bias"]
    wrong = {f"extra.{number:02}": torch.ones(1) for number in range(11)}
    wrong |= {"head.weight": torch.ones(DIM, 5), "gain_1": torch.ones(1, dtype=torch.int64)}
    torch.save(weights | wrong, tmp_path / "toy.pth")
    module = Toy()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(module, tmp_path / "toy.pth", TOY_LAYOUT)
    message = str(caught.value)
    assert str(tmp_path / "toy.pth") in message and "does not match Toy" in message
    assert "missing (1): head.bias" in message
    assert "unexpected (11): extra.00" in message and "extra.07 and 3 more" in message and "extra.08" not in message
    assert "mis-shaped (1): head.weight (file [4, 5], expected [5, 4])" in message
    assert "gain_1 (torch.int64)" in message
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])


def test_exactly_eight_names_are_not_abbreviated(weights: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(weights | {f"extra.{number}": torch.ones(1) for number in range(8)}, tmp_path / "toy.safetensors")
    with pytest.raises(CheckpointError, match="extra.7") as caught:
        load_weights(meta_toy(), tmp_path / "toy.safetensors", TOY_LAYOUT)
    assert "more" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_number_types_are_refused(weights: dict[str, Tensor], tmp_path: Path, checkpoint_file: Path, dtype: torch.dtype) -> None:
    save_file(weights | {"head.bias": torch.ones(5).to(dtype)}, tmp_path / "toy.safetensors")
    with pytest.raises(CheckpointError, match=rf"head.bias \({dtype}\)"):
        load_weights(meta_toy(), tmp_path / "toy.safetensors", TOY_LAYOUT)
    with pytest.raises(CheckpointError, match=f"dtype must be .*; got {dtype}"):
        load_weights(meta_toy(), checkpoint_file, TOY_LAYOUT, dtype=dtype)


# --- hostile files


def test_missing_and_odd_paths(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.pth", tmp_path / "no" / "folder", tmp_path / ("x" * 5000), os.devnull):
        assert "not an existing file or folder" in refusal(path)
    assert "has no .bin, .ckpt, .pt, .pth, .safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"x", "is not a checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(64), "is not a checkpoint"),
        (struct.pack("<Q", 1 << 60) + b'{"a":1}', "truncated or damaged safetensors"),
        (struct.pack("<Q", 18) + b'{"a":{"dtype":1}} ', "truncated or damaged safetensors"),
        (b"\x80\x02not a pickle", "damaged pickle"),
    ],
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_files_that_are_no_checkpoints(tmp_path: Path, content: bytes, complaint: str, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    message = refusal(path)
    assert complaint in message and re.search("download it again|pass ", message, re.IGNORECASE)


def test_a_zip_that_is_not_from_torch(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("hello.txt", "hello")
    assert "not written by torch.save" in refusal(tmp_path / "a.pth")


@pytest.mark.parametrize("write", [save_zip, save_legacy, save_file])
@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9, 0.999])
def test_truncated_files(weights: dict[str, Tensor], tmp_path: Path, write: Writer, kept: float) -> None:
    path = tmp_path / "toy.pth"
    write(weights, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    assert re.search("truncated|damaged", refusal(path))


SMALL_FILES: list[bytes] = []


def small_files() -> list[bytes]:
    if not SMALL_FILES:
        with tempfile.TemporaryDirectory() as folder:
            for write in (save_zip, save_legacy, save_file):
                write({"a": torch.ones(4, 3)}, Path(folder) / "small")
                SMALL_FILES.append((Path(folder) / "small").read_bytes())
    return SMALL_FILES


@settings(max_examples=150, deadline=None, derandomize=True)
@given(kind=st.integers(0, 2), flips=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=6))
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_random_damage_never_surfaces_as_another_error(kind: int, flips: list[tuple[float, int]]) -> None:
    content = bytearray(small_files()[kind])
    for place, value in flips:
        content[int(place * len(content))] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.pth"
        path.write_bytes(content)
        try:
            shapes = open_checkpoint(path, Layout()).shapes
        except CheckpointError as error:
            assert str(path) in str(error)
        else:
            assert isinstance(shapes, dict)


class Trap:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = str(sentinel)

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (self.sentinel,))


def save_plain_pickle(state: dict[str, object], path: Path) -> None:
    path.write_bytes(pickle.dumps(state, protocol=2))


@pytest.mark.parametrize("write", [save_zip, save_legacy, save_plain_pickle])
@pytest.mark.parametrize("key", ["head.bias", "ema_ignored"])
def test_code_in_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Writer, key: str) -> None:
    sentinel, path = tmp_path / "executed", tmp_path / "trap.pth"
    write({"head.weight": torch.ones(2) if write is not save_plain_pickle else 1, key: Trap(sentinel)}, path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    message = refusal(path)
    assert not sentinel.exists()
    assert "only tensors" in message and "never unpickles code" in message and "save only the weights" in message
    # The trap does work on a reader that trusts it.
    if write is save_plain_pickle:
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert sentinel.exists()


def test_a_pickled_module_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    assert "must contain only tensors" in refusal(tmp_path / "module.pth")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (torch.ones(3), "at the top level; got a Tensor"),
        ([torch.ones(3)], "at the top level; got a list"),
        (None, "at the top level; got a NoneType"),
        ({"trainer": {"gpt_fsdp": [1]}}, "at trainer.gpt_fsdp; got a list"),
        ({"state_dict": torch.ones(2)}, "at state_dict; got a Tensor"),
        ({"trainer": "gone"}, "'trainer' (str)"),
        ({"other": {"head.bias": torch.ones(5)}}, "at the top level or trainer.gpt_fsdp or state_dict; got 'other' (dict)"),
        ({"head.bias": 3.5, "ema_rate": 0.9}, "'head.bias' (float)."),
        ({"head.bias": torch.eye(2).to_sparse()}, "'head.bias' (Tensor)"),
        ({"head.bias": torch.ones(5, device="meta")}, "'head.bias' (Tensor)"),
        ({0: torch.ones(2)}, "0 (Tensor)"),
    ],
)
def test_content_that_is_not_a_map_of_tensors(tmp_path: Path, content: object, complaint: str) -> None:
    torch.save(content, tmp_path / "odd.pth")
    message = refusal(tmp_path / "odd.pth")
    assert complaint in message and "Save only the state dict" in message and "ema_rate" not in message


@pytest.mark.parametrize("name", ["../a.bin", "sub/../../a.bin", "/a.bin", "..\\a.bin", "C:\\a.bin", "c:a.bin"])
def test_an_index_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": torch.ones(1)}, tmp_path / "a.bin")
    (folder / "x.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "outside its folder" in refusal(folder)


def test_an_index_cannot_name_an_absolute_path_that_exists(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": torch.ones(1)}, tmp_path / "a.bin")
    (folder / "x.index.json").write_text(json.dumps({"weight_map": {"a": str(tmp_path / "a.bin")}}))
    assert "outside its folder" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "it is not valid JSON"),
        ("", "it is not valid JSON"),
        ("[" * 100_000, "it is not valid JSON"),
        ("[]", "must be a JSON object; got a list"),
        (" " * MAX_BYTES + "{}", "must have at most 1048576 bytes"),
        ("{}", 'must have a "weight_map"'),
        ('{"weight_map": {}}', 'must have a "weight_map"'),
        ('{"weight_map": {"a": 3}}', 'must have a "weight_map"'),
        ('{"weight_map": {"a": "gone.bin"}}', "the shard 'gone.bin', which does not exist"),
        ('{"weight_map": {"a": ""}}', "the shard '', which does not exist"),
        ('{"weight_map": {"a": "a\\u0000b"}}', "which does not exist"),
    ],
)
def test_broken_indexes(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "x.index.json").write_text(text)
    assert complaint in refusal(tmp_path)


def test_an_index_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.index.json")
    with pytest.raises(CheckpointError, match="it must be a regular file"):
        files.indexed_shards(tmp_path / "x.index.json")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("a.bin", "b.pth"):
        torch.save({"twin": torch.ones(1)}, tmp_path / name)
    message = refusal(tmp_path)
    assert "'twin' twice: 'twin' in a.bin and 'twin' in b.pth" in message


def test_two_spellings_of_one_name(tmp_path: Path) -> None:
    torch.save({"module.twin": torch.ones(1), "twin": torch.ones(1)}, tmp_path / "a.pth")
    assert "'twin' twice: 'module.twin' in a.pth and 'twin' in a.pth" in refusal(tmp_path / "a.pth")


def test_an_unreadable_file(checkpoint_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")  # file modes do not stop a superuser

    monkeypatch.setattr(Path, "open", refuse)
    assert "cannot be read (Permission denied). Check its permissions" in refusal(checkpoint_file)


# --- conversion


def test_convert_writes_what_was_published(weights: dict[str, Tensor], tmp_path: Path) -> None:
    source, target = tmp_path / "toy.pth", tmp_path / "out" / "toy.safetensors"
    target.parent.mkdir()
    del weights["blocks.0.attn.zero_k_bias"]
    torch.save({"trainer": {"gpt_fsdp": weights | {"ema_count": torch.ones(2)}}}, source)
    assert convert(source, target, meta_toy(), TOY_LAYOUT) == len(weights)
    written = load_file(target)
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[key], tensor) and written[key].dtype == tensor.dtype for key, tensor in weights.items())
    assert [file.name for file in target.parent.iterdir()] == ["toy.safetensors"]
    (tmp_path / "usual").touch()
    assert target.stat().st_mode == (tmp_path / "usual").stat().st_mode
    with safe_open(target, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    module = meta_toy()
    load_weights(module, target, TOY_LAYOUT)
    assert_loaded(module, our_weights(weights | {"blocks.0.attn.zero_k_bias": torch.zeros(DIM)}))


def test_convert_joins_shards_casts_and_replaces(weights: dict[str, Tensor], tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", weights, {"a.safetensors": save_file, "b.bin": save_legacy}, "x.index.json")
    target = tmp_path / "toy.safetensors"
    target.write_text("older file")
    assert convert(str(tmp_path / "shards"), str(target), meta_toy(), TOY_LAYOUT, torch.bfloat16) == len(weights)
    written = load_file(target)
    assert all(torch.equal(written[key], tensor.bfloat16()) for key, tensor in weights.items())
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_convert_copes_with_shared_and_strided_tensors(weights: dict[str, Tensor], tmp_path: Path) -> None:
    flat = torch.randn(3 * DIM)
    weights |= {"blocks.0.attn.q_bias": flat[:DIM], "blocks.0.attn.v_bias": flat[2 : DIM + 2]}
    weights |= {"blocks.1.ada_gss": weights["blocks.0.ada_gss"], "head.weight": weights["head.weight"].T.contiguous().T}
    torch.save(weights, tmp_path / "toy.pth")
    convert(tmp_path / "toy.pth", tmp_path / "toy.safetensors", meta_toy(), TOY_LAYOUT)
    written = load_file(tmp_path / "toy.safetensors")
    assert all(torch.equal(written[key], tensor) for key, tensor in weights.items())


def test_convert_is_strict(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(weights | {"extra": torch.ones(1)}, tmp_path / "toy.pth")
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): extra"):
        convert(tmp_path / "toy.pth", tmp_path / "toy.safetensors", meta_toy(), TOY_LAYOUT)
    assert not (tmp_path / "toy.safetensors").exists()


def test_convert_refuses_bad_targets(weights: dict[str, Tensor], checkpoint_file: Path, tmp_path: Path) -> None:
    before = checkpoint_file.read_bytes()
    link = tmp_path / "link.safetensors"
    link.symlink_to(checkpoint_file)
    for target in (checkpoint_file, tmp_path / "." / checkpoint_file.name, link):
        with pytest.raises(CheckpointError, match="must not be the source"):
            convert(checkpoint_file, target, meta_toy(), TOY_LAYOUT)
    write_shards(tmp_path / "shards", weights, {"a.bin": save_zip, "b.bin": save_zip}, None)
    with pytest.raises(CheckpointError, match="must not be the source"):
        convert(tmp_path / "shards", tmp_path / "shards" / "b.bin", meta_toy(), TOY_LAYOUT)
    with pytest.raises(CheckpointError, match="existing folder"):
        convert(checkpoint_file, tmp_path / "nowhere" / "toy.safetensors", meta_toy(), TOY_LAYOUT)
    with pytest.raises(CheckpointError, match="existing folder"):
        convert(checkpoint_file, tmp_path, meta_toy(), TOY_LAYOUT)
    with pytest.raises(CheckpointError, match="dtype must be"):
        convert(checkpoint_file, tmp_path / "toy.safetensors", meta_toy(), TOY_LAYOUT, torch.int8)
    assert checkpoint_file.read_bytes() == before


@pytest.mark.parametrize("failing", ["save_file", "fsync", "replace", "interrupt"])
def test_a_failed_conversion_leaves_no_trace(checkpoint_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    target = tmp_path / "out" / "toy.safetensors"
    target.parent.mkdir()
    target.write_text("older file")

    def fail(*_: object, **__: object) -> None:
        assert len(list(target.parent.iterdir())) == 2  # the temporary file is beside the target
        raise KeyboardInterrupt if failing == "interrupt" else OSError(28, "No space left on device")

    if failing in ("save_file", "interrupt"):
        monkeypatch.setattr(weights_module, "save_file", fail)
    else:
        monkeypatch.setattr(weights_module.os, failing, fail)
    with pytest.raises(KeyboardInterrupt if failing == "interrupt" else CheckpointError) as caught:
        convert(checkpoint_file, target, meta_toy(), TOY_LAYOUT)
    if failing != "interrupt":
        assert str(target) in str(caught.value) and "No space left" in str(caught.value)
    assert target.read_text() == "older file"
    assert [file.name for file in target.parent.iterdir()] == ["toy.safetensors"]


def test_the_new_file_is_on_disk_before_it_takes_the_name(checkpoint_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(weights_module.os, "fsync", lambda number: events.append("fsync") or fsync(number))
    monkeypatch.setattr(weights_module.os, "replace", lambda old, new: events.append("replace") or replace(old, new))
    convert(checkpoint_file, tmp_path / "toy.safetensors", meta_toy(), TOY_LAYOUT)
    assert events == ["fsync", "replace"]


# --- memory

TENSORS, ROWS, COLUMNS = 10, 2560, 2048
TENSOR_BYTES = 4 * ROWS * COLUMNS  # 20 MiB; 200 MiB for all
SLACK_BYTES = 40 << 20

MEMORY_PROBE = """
import os, sys, threading, time
import torch
from torch import nn
from nextscale.checkpoints import Layout, convert, load_weights

folder, tensors, rows, columns = sys.argv[1], *map(int, sys.argv[2:5])

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

peak, running = 0, True

def sample():
    global peak
    while running:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.0005)

def meta_module():
    with torch.device("meta"):
        return nn.ParameterDict({f"p{number}": nn.Parameter(torch.empty(rows, columns)) for number in range(tensors)})

def naive_load(source):
    module = meta_module()
    module.load_state_dict(torch.load(source, weights_only=True), assign=True)
    return module.to(torch.bfloat16)

def load(source):
    module = meta_module()
    load_weights(module, source, Layout(), dtype=torch.bfloat16)
    return module

def converted(source):
    convert(source, source + ".safetensors", meta_module(), Layout())

def growth(mode, source):
    global running
    run = {"load": load, "convert": converted, "naive": naive_load}[mode]
    torch.ones(1024, 1024).to(torch.bfloat16).sum()  # what the first operators allocate
    before = anonymous_bytes()
    sampler = threading.Thread(target=sample)
    sampler.start()
    result = run(source)
    running = False
    sampler.join()
    if mode == "load":
        assert all(parameter.dtype == torch.bfloat16 and parameter[0, 0] == float(name[1:]) for name, parameter in result.items())
    return max(peak, anonymous_bytes()) - before

for pair in sys.argv[5:]:  # each in a process of its own, in which torch is imported already
    mode, name = pair.split("=")
    child = os.fork()
    if not child:
        print(growth(mode, os.path.join(folder, name)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, pair
"""


@pytest.fixture(scope="module")
def large_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    state = {f"p{number}": torch.full((ROWS, COLUMNS), float(number)) for number in range(TENSORS)}
    torch.save(state, folder / "large.pth")
    save_file(state, folder / "large.safetensors")
    return folder


def measured_growth(folder: Path, *runs: str) -> list[int]:
    """Bytes by which each run, "mode=file", lets a process grow."""
    environment = os.environ | {"PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY_PROBE, str(folder), *map(str, (TENSORS, ROWS, COLUMNS)), *runs]
    probe = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert probe.returncode == 0, probe.stderr
    return [int(line) for line in probe.stdout.splitlines()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_memory_stays_at_the_model_plus_one_tensor(large_checkpoints: Path) -> None:
    model_bytes = TENSORS * TENSOR_BYTES // 2  # bfloat16
    bound = model_bytes + TENSOR_BYTES + SLACK_BYTES
    assert bound < TENSORS * TENSOR_BYTES  # the file alone, read into memory, would break it
    runs = ("load=large.pth", "load=large.safetensors", "naive=large.pth", "convert=large.pth")
    from_torch, from_safetensors, naive, conversion = measured_growth(large_checkpoints, *runs)
    assert model_bytes * 0.9 < from_torch < bound
    assert model_bytes * 0.9 < from_safetensors < bound
    assert naive > bound
    assert conversion < TENSOR_BYTES + SLACK_BYTES
