"""Adapters change weights exactly, and leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import nextscale
from nextscale.checkpoints.adapters import LowRank, read_adapter, write_peft
from nextscale.errors import CheckpointError, SettingError
from nextscale.lora import weights_of
from nextscale.models.quantization import Fp8Linear, QuantizedLinear, quantize_blocks
from nextscale.pipeline import Pipeline
from tests.helpers.cli import run_cli
from tests.helpers.tape import Tape, play_graphs_on_the_cpu
from tests.helpers.tiny import FAMILIES, assert_same_bits, fresh_pipeline, one_prompt, prompts

RANK, ALPHA = 3, 6.0
IN_BLOCKS = ("attn.", "sa.", "ca.", "attention.", "cross_attn.", "ffn.")


def targets(pipe: Pipeline) -> list[str]:
    """Returns the published names of the products of attention and feed-forward."""
    return [key.removesuffix(".weight") for key in weights_of(pipe.model) if any(part in key for part in IN_BLOCKS) and "block" in key]


def updates(pipe: Pipeline, names: list[str] | None = None, seed: int = 0, size: float = 0.3) -> dict[str, LowRank]:
    random = torch.Generator().manual_seed(seed)
    places, found = weights_of(pipe.model), {}
    for name in names or targets(pipe):
        rows, columns = places[f"{name}.weight"].shape
        down, up = torch.randn(RANK, columns, generator=random), torch.randn(rows, RANK, generator=random)
        found[name] = LowRank(down * size / columns**0.5, up * size, ALPHA / RANK)
    return found


def write(folder: Path, found: dict[str, LowRank]) -> Path:
    write_peft(folder, found, alpha=ALPHA, model="tiny")
    return folder


def bits(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipe.model.state_dict().items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)), name


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_family(family: str, tmp_path: Path) -> None:
    pipe, prompt = fresh_pipeline(family), one_prompt(family, 0)
    base, before = bits(pipe), pipe(prompt, seed=3)
    found = updates(pipe)
    assert len(found) >= 6
    name = pipe.load_lora(write(tmp_path / "ink", found))
    assert name == "ink"
    places, weights = weights_of(pipe.model), pipe.model.state_dict()
    for module, low_rank in found.items():  # the plain formula, for every target
        place = places[f"{module}.weight"]
        expected = base[place.parameter][place.rows] + low_rank.scale * (low_rank.up @ low_rank.down)
        torch.testing.assert_close(weights[place.parameter][place.rows], expected, rtol=0, atol=2e-6)
    changed = pipe(prompt, seed=3)
    assert not torch.equal(before.latent, changed.latent)
    assert [(one.name, one.scale) for one in changed.report.loras] == [("ink", 1.0)]
    assert changed.report.to_dict()["loras"] == ({"name": "ink", "scale": 1.0, "sha256": changed.report.loras[0].sha256},)
    pipe.set_loras({"ink": 0.0})
    assert_equal(bits(pipe), base)
    assert_same_bits(pipe(prompt, seed=3), before)
    pipe.set_loras({"ink": 1.0})
    assert_same_bits(pipe(prompt, seed=3), changed)
    pipe.unload_lora("ink")
    assert_equal(bits(pipe), base)
    pipe.load_lora(tmp_path / "ink")
    assert_same_bits(pipe(prompt, seed=3), changed)


def test_an_adapter_of_zeros_is_the_base(tmp_path: Path) -> None:
    pipe = fresh_pipeline("infinity")
    found = {name: LowRank(one.down, torch.zeros_like(one.up)) for name, one in updates(pipe).items()}
    base = bits(pipe)
    pipe.load_lora(write(tmp_path / "zero", found))
    assert_equal(bits(pipe), base)


def test_a_batch_equals_its_images_alone(tmp_path: Path) -> None:
    pipe = fresh_pipeline("infinity")
    pipe.load_lora(write(tmp_path / "ink", updates(pipe)))
    together = pipe(prompts("infinity", 2), seed=5)
    for position in range(2):
        alone = pipe(one_prompt("infinity", position), seed=5 + position)
        torch.testing.assert_close(alone.latent[0], together.latent[position], rtol=0, atol=1e-4)


def test_stacked_adapters_add_up_in_any_order(tmp_path: Path) -> None:
    pipe = fresh_pipeline("var")
    base, ink, toy = bits(pipe), updates(pipe, seed=1), updates(pipe, seed=2)
    pipe.load_lora(write(tmp_path / "toy", toy), scale=0.4)
    pipe.load_lora(write(tmp_path / "ink", ink), scale=0.8)
    both = bits(pipe)
    places = weights_of(pipe.model)
    for module in ink:
        place = places[f"{module}.weight"]
        change = sum(share * one[module].scale * (one[module].up @ one[module].down) for share, one in ((0.8, ink), (0.4, toy)))
        torch.testing.assert_close(both[place.parameter][place.rows], base[place.parameter][place.rows] + change, rtol=0, atol=2e-6)
    pipe.set_loras({"ink": 0.8})
    pipe.set_loras({"ink": 0.8, "toy": 0.4})
    assert_equal(bits(pipe), both)
    pipe.unload_lora("ink")
    assert [one.name for one in pipe.loras.applied] == ["toy"]
    pipe.unload_lora("toy")
    assert_equal(bits(pipe), base)


def test_halves_of_one_file_are_the_whole(tmp_path: Path) -> None:
    pipe = fresh_pipeline("var")
    write(tmp_path / "a", updates(pipe))
    pipe.load_lora(tmp_path / "a")
    whole = bits(pipe)
    pipe.load_lora(tmp_path / "a", name="b", scale=0.5)
    pipe.set_loras({"a": 0.5, "b": 0.5})
    for name, tensor in bits(pipe).items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6)


def test_calls_choose_adapters(tmp_path: Path) -> None:
    pipe = fresh_pipeline("var")
    plain = pipe(1, seed=0)
    pipe.load_lora(write(tmp_path / "ink", updates(pipe)))
    inked = pipe(1, seed=0)
    assert_same_bits(pipe(1, seed=0, lora={}), plain)
    assert_same_bits(pipe(1, seed=0), inked)
    half = pipe(1, seed=0, lora={"ink": 0.5})
    assert [one.scale for one in half.report.loras] == [0.5]
    pipe.set_loras({})
    assert_same_bits(pipe(1, seed=0, lora={"ink": 1}), inked)
    assert_same_bits(pipe(1, seed=0), plain)
    with pytest.raises(SettingError, match="lora"):
        pipe(1, seed=0, lora={"pen": 1.0})
    with pytest.raises(SettingError, match="lora"):
        pipe(1, seed=0, lora="ink")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="ink"):
        pipe(1, seed=0, lora={"ink": float("nan")})


def test_weights_do_not_change_inside_a_call(tmp_path: Path) -> None:
    pipe = fresh_pipeline("var")
    pipe.load_lora(write(tmp_path / "ink", updates(pipe)))
    same, other = [], []

    def watch(_: object) -> None:
        same.append(pipe(2, seed=1))
        with pytest.raises(SettingError, match="lora") as found:
            pipe(2, seed=1, lora={})
        other.append(found)
        with pytest.raises(SettingError, match="lora"):
            pipe.unload_lora("ink")

    inked = pipe(1, seed=0, on_stage=watch)
    assert same and len(other) == len(same)
    assert_same_bits(pipe(1, seed=0), inked)


def test_a_swap_captures_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    own = fresh_pipeline("infinity")
    pipe = Pipeline(own.model, own.tokenizer, own.reader, own.settings, engine="graphs")
    prompt = one_prompt("infinity", 0)
    pipe.load_lora(write(tmp_path / "a", updates(pipe, seed=1)))
    pipe.load_lora(write(tmp_path / "b", updates(pipe, seed=2)), scale=0)
    first = pipe(prompt, seed=3, warmup=True)
    assert first.report.engine == "graphs"
    graphs, replays = pipe.captures.graphs, []
    monkeypatch.setattr(Tape, "replay", counted(Tape.replay, replays))
    second = pipe(prompt, seed=3, lora={"b": 1.0})
    assert second.report.engine == "graphs" and pipe.captures.graphs == graphs and replays
    assert not torch.equal(first.latent, second.latent)
    assert_same_bits(pipe(prompt, seed=3, lora={"a": 1.0}), first)
    eager = fresh_pipeline("infinity")
    eager.load_lora(tmp_path / "b")
    torch.testing.assert_close(second.latent, eager(prompt, seed=3).latent, rtol=0, atol=1e-4)


def counted(run: object, calls: list[int]) -> object:
    def replay(*arguments: object, **options: object) -> object:
        calls.append(1)
        return run(*arguments, **options)  # type: ignore[operator]

    return replay


@pytest.mark.parametrize("method", ["fastvar", "stagevar:as_released=true", "sparsevar:keep=0.5", "skip:last=1"])
def test_methods_run_with_adapters(method: str, tmp_path: Path) -> None:
    pipe = nextscale.load("nano", device="cpu")
    found = updates(pipe, size=0.05)
    plain = pipe("a red apple", seed=1, size=128)
    pipe.load_lora(write(tmp_path / "ink", found))
    assert not torch.equal(pipe("a red apple", seed=1, size=128, method=method).latent, plain.latent)


# --- quantized weights


def test_int8_weights_are_quantized_from_the_sum(tmp_path: Path) -> None:
    whole, pipe = nextscale.load("nano", device="cpu"), nextscale.load("nano", device="cpu", quantize="int8")
    write(tmp_path / "ink", updates(whole, size=0.05))
    base = bits(pipe)
    pipe.load_lora(tmp_path / "ink", scale=0.7)
    whole.load_lora(tmp_path / "ink", scale=0.7)
    checked = 0
    for name, module in pipe.model.named_modules():
        if isinstance(module, QuantizedLinear) and name in pipe.loras._pristine:
            expected = type(module).of(whole.model.get_submodule(name).get_parameter("weight"), None)
            assert_equal(dict(module.named_buffers()), dict(expected.named_buffers()))
            checked += 1
    assert checked >= 40
    pipe.unload_lora("ink")
    assert_equal(bits(pipe), base)


def test_fp8_weights_keep_the_scale_of_their_inputs(tmp_path: Path) -> None:
    whole, pipe = fresh_pipeline("infinity", torch.bfloat16), fresh_pipeline("infinity", torch.bfloat16)
    save_file({name: tensor.contiguous() for name, tensor in published(pipe).items()}, tmp_path / "weights.safetensors")
    quantize_blocks(pipe.model, "fp8")
    pipe.loras.weights = tmp_path / "weights.safetensors"
    scales = {name: module.input_scale for name, module in pipe.model.named_modules() if isinstance(module, Fp8Linear)}
    base = bits(pipe)
    write(tmp_path / "ink", updates(whole))
    pipe.load_lora(tmp_path / "ink")
    whole.load_lora(tmp_path / "ink")
    assert scales
    for name, scale in scales.items():
        layer = pipe.model.get_submodule(name)
        assert isinstance(layer, Fp8Linear) and layer.input_scale == scale
        if name in pipe.loras._pristine:
            expected = Fp8Linear.of(whole.model.get_submodule(name).get_parameter("weight"), None, scale)
            assert_equal(dict(layer.named_buffers()), dict(expected.named_buffers()))
    pipe.set_loras({})
    assert_equal(bits(pipe), base)


def published(pipe: Pipeline) -> dict[str, Tensor]:
    from nextscale.checkpoints import published_tensors

    weights = pipe.model.state_dict()
    places = published_tensors(pipe.model, pipe.model.layout)
    return {
        key: weights[p.parameter].view(weights[p.parameter].shape or (1,))[p.rows].reshape(p.shape).clone() for key, p in places.items()
    }


def test_quantized_weights_without_their_file_are_refused(tmp_path: Path) -> None:
    pipe = fresh_pipeline("infinity", torch.bfloat16)
    write(tmp_path / "ink", updates(pipe))
    quantize_blocks(pipe.model, "int8")
    base = bits(pipe)
    with pytest.raises(SettingError, match="file"):
        pipe.load_lora(tmp_path / "ink")
    assert pipe.loras.names == []
    assert_equal(bits(pipe), base)


# --- what moves and is saved


def test_saved_pipelines_hold_the_base(tmp_path: Path) -> None:
    pipe = nextscale.load("nano", device="cpu")
    write(tmp_path / "ink", updates(pipe, size=0.05))
    pipe.load_lora(tmp_path / "ink")
    fused = bits(pipe)
    pipe.save_pretrained(tmp_path / "saved")
    assert_equal(bits(pipe), fused)
    again = Pipeline.from_pretrained(tmp_path / "saved", device="cpu")
    assert_equal(bits(again), bits(nextscale.load("nano", device="cpu", dtype=again.model.dtype)))


def test_adapters_move_with_the_weights(tmp_path: Path) -> None:
    pipe = fresh_pipeline("var")
    write(tmp_path / "ink", updates(pipe))
    half = fresh_pipeline("var").to(torch.bfloat16)
    half.load_lora(tmp_path / "ink")
    pipe.load_lora(tmp_path / "ink")
    pipe.to(torch.bfloat16)
    assert_equal(bits(pipe), bits(half))


# --- formats


def flat(found: dict[str, LowRank], down: str, up: str, prefix: str = "") -> dict[str, Tensor]:
    return {
        f"{prefix}{name}.{part}": tensor.contiguous() for name, one in found.items() for part, tensor in ((down, one.down), (up, one.up))
    }


@pytest.fixture
def case(tmp_path: Path) -> Iterator[tuple[Pipeline, dict[str, LowRank], dict[str, Tensor]]]:
    pipe = fresh_pipeline("infinity")
    found = updates(pipe)
    pipe.load_lora(write(tmp_path / "reference", found))
    fused = bits(pipe)
    pipe.unload_lora("reference")
    yield pipe, found, fused


def test_single_files(case: tuple[Pipeline, dict[str, LowRank], dict[str, Tensor]], tmp_path: Path) -> None:
    pipe, found, fused = case
    alpha = torch.tensor(ALPHA)
    settings = {"lora_adapter_metadata": json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})}
    scaled = {name: LowRank(one.down, one.up * one.scale) for name, one in found.items()}
    kohya = {
        key.replace(".", "_", key.count(".") - 2): tensor
        for key, tensor in flat(found, "lora_down.weight", "lora_up.weight", "lora_unet_").items()
    }
    kohya |= {f"lora_unet_{name.replace('.', '_')}.alpha": alpha.clone() for name in found}
    files = {
        "diffusers": (flat(found, "lora_A.weight", "lora_B.weight", "transformer."), settings),
        "kohya": (kohya, None),
        "bare": (flat(scaled, "lora_A.weight", "lora_B.weight"), None),
        "named": (flat(scaled, "lora_A.style.weight", "lora_B.style.weight"), None),
        "flat": (flat(scaled, "lora_A", "lora_B"), None),
        "transposed": (
            flat({name: LowRank(one.down.T, one.up.T) for name, one in scaled.items()}, "lora_A", "lora_B", "module."),
            None,
        ),
    }
    for name, (tensors, metadata) in files.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / f"{name}.safetensors", metadata)
        pipe.load_lora(tmp_path / f"{name}.safetensors")
        for key, tensor in bits(pipe).items():
            torch.testing.assert_close(tensor, fused[key], rtol=0, atol=1e-6, msg=f"{name}: {key}")
        pipe.unload_lora(name)


def test_settings_of_peft(tmp_path: Path) -> None:
    pipe = fresh_pipeline("var")
    found = updates(pipe)
    first, second = list(found)[:2]
    folder = write(tmp_path / "ink", found)
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"use_rslora": True, "alpha_pattern": {first: 9.0, r"blocks\.\d+\.never": 1.0}, "rank_pattern": {second: RANK}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    read = read_adapter(folder).modules
    assert read["base_model.model." + first].scale == pytest.approx(9 / RANK**0.5)
    assert read["base_model.model." + second].scale == pytest.approx(ALPHA / RANK**0.5)


@pytest.mark.parametrize(
    "setting",
    [
        {"bias": "all"},
        {"modules_to_save": ["head"]},
        {"use_qalora": True},
        {"init_lora_weights": "pissa"},
        {"peft_type": "IA3"},
        {"r": 7},
        {"lora_alpha": "six"},
        {"alpha_pattern": {"(a+)+b": 1}},
        {"alpha_pattern": {"(": 1}},
        {"alpha_pattern": [1]},
        {"layer_replication": [[0, 2]]},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_are_not_plain_lora_are_refused(setting: dict[str, object], tmp_path: Path) -> None:
    pipe = fresh_pipeline("var")
    folder = write(tmp_path / "ink", updates(pipe))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | setting))
    with pytest.raises(CheckpointError):
        pipe.load_lora(folder)
    assert pipe.loras.names == []


# --- PEFT itself


class Published(nn.Module):
    """Linear layers under the published names of a model."""

    def __init__(self, pipe: Pipeline, names: list[str]) -> None:
        super().__init__()
        places, weights = weights_of(pipe.model), pipe.model.state_dict()
        for name in names:
            place, owner = places[f"{name}.weight"], self
            *parents, leaf = name.split(".")
            for parent in parents:
                if parent not in owner._modules:
                    owner.add_module(parent, nn.Module())
                owner = owner.get_submodule(parent)  # type: ignore[assignment]
            linear = nn.Linear(place.shape[1], place.shape[0], bias=False)
            linear.weight.data = weights[place.parameter][place.rows].clone()
            owner.add_module(leaf, linear)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"attn.proj": 2}, "rank_pattern": {"attn.proj": 2}}]
)
def test_agrees_with_peft(options: dict[str, object], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pipe = fresh_pipeline("var")
    names = targets(pipe)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(Published(pipe, names), peft.LoraConfig(r=4, lora_alpha=10, target_modules=names, **options))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
        elif "magnitude" in name:
            parameter.data *= 1.1
    wrapped.save_pretrained(tmp_path / "ink")
    pipe.load_lora(tmp_path / "ink")
    merged = wrapped.merge_and_unload()
    places, weights = weights_of(pipe.model), pipe.model.state_dict()
    for name in names:
        place = places[f"{name}.weight"]
        theirs = merged.get_submodule(name).weight
        torch.testing.assert_close(weights[place.parameter][place.rows], theirs.detach(), rtol=0, atol=1e-6, msg=name)


def test_peft_reads_what_is_written(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pipe = fresh_pipeline("var")
    found = updates(pipe)
    write(tmp_path / "ink", found)
    model = peft.PeftModel.from_pretrained(Published(pipe, list(found)), str(tmp_path / "ink")).merge_and_unload()
    pipe.load_lora(tmp_path / "ink")
    places, weights = weights_of(pipe.model), pipe.model.state_dict()
    for name in found:
        place = places[f"{name}.weight"]
        torch.testing.assert_close(model.get_submodule(name).weight.detach(), weights[place.parameter][place.rows], rtol=0, atol=1e-6)


# --- the command line


def test_commands_take_adapters(tmp_path: Path) -> None:
    pipe = nextscale.load("nano", device="cpu")
    ink = write(tmp_path / "ink", updates(pipe, targets(pipe)[:4], size=0.05))
    common = ("generate", "a red apple", "--size", "128x128", "--device", "cpu", "--out", tmp_path / "images")
    found = run_cli(*common, "--lora", f"{ink}:0.5", "--report", tmp_path / "report.json")
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "report.json").read_text())
    (applied,) = report["calls"][0]["loras"]
    assert (applied["name"], applied["scale"]) == ("ink", 0.5)
    missing = run_cli(*common, "--lora", tmp_path / "none")
    assert missing.exit_code == 2 and "none" in missing.output


def test_a_run_of_sample_is_bound_to_its_adapters(tmp_path: Path) -> None:
    pipe = nextscale.load("nano", device="cpu")
    names = targets(pipe)[:2]
    ink = write(tmp_path / "ink", updates(pipe, names, size=0.05))
    (tmp_path / "prompts.txt").write_text("a red apple\n")
    run = ("sample", "--prompts", tmp_path / "prompts.txt", "--size", "128x128", "--device", "cpu", "--out", tmp_path / "images")
    assert run_cli(*run, "--lora", ink).exit_code == 0
    for other in ((), ("--lora", f"{ink}:0.5")):
        refused = run_cli(*run, *other)
        assert refused.exit_code != 0 and "lora" in refused.output
    write(ink, updates(pipe, names, seed=1, size=0.05))
    refused = run_cli(*run, "--lora", ink)
    assert refused.exit_code != 0 and "lora" in refused.output


def test_torch_files_are_converted(tmp_path: Path) -> None:
    pipe = nextscale.load("nano", device="cpu")
    found = updates(pipe, targets(pipe)[:2], size=0.05)
    torch.save(flat(found, "lora_A", "lora_B"), tmp_path / "research.pt")
    done = run_cli("convert", "-m", "nano", "--part", "lora", tmp_path / "research.pt", tmp_path / "research.safetensors")
    assert done.exit_code == 0, done.output
    assert pipe.load_lora(tmp_path / "research.safetensors") == "research"
    torch.save({"a": found}, tmp_path / "objects.pt")
    refused = run_cli("convert", "-m", "nano", "--part", "lora", tmp_path / "objects.pt", tmp_path / "objects.safetensors")
    assert refused.exit_code == 2 and not (tmp_path / "objects.safetensors").exists()


# --- hostile files


def test_wrong_modules_are_named_and_nothing_is_applied(tmp_path: Path) -> None:
    pipe = fresh_pipeline("var")
    found, base = updates(pipe), bits(pipe)
    name = next(iter(found))
    cases = {
        "unknown": found | {"blocks.99.attn.proj": found[name]},
        "shape": found | {name: LowRank(torch.zeros(RANK, 5), torch.zeros(7, RANK))},
        "embedding": {"lora_embedding_A.0": found[name]},
    }
    for case_name, modules in cases.items():
        folder = write(tmp_path / case_name, modules)
        with pytest.raises(CheckpointError):
            pipe.load_lora(folder)
    tensors = flat(found, "lora_A.weight", "lora_B.weight")
    half = {key: tensor for key, tensor in tensors.items() if key != f"{name}.lora_B.weight"}
    infinite = tensors | {f"{name}.lora_B.weight": torch.full_like(found[name].up, float("inf"))}
    for case_name, content in {"half": half, "infinite": infinite, "foreign": tensors | {"x": torch.zeros(2)}, "empty": {}}.items():
        save_file(content, tmp_path / f"{case_name}.safetensors")
        with pytest.raises(CheckpointError, match=r"safetensors"):
            pipe.load_lora(tmp_path / f"{case_name}.safetensors")
    torch.save(tensors, tmp_path / "pickle.safetensors")
    with pytest.raises(CheckpointError, match="convert"):
        pipe.load_lora(tmp_path / "pickle.safetensors")
    for path in (tmp_path, tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(CheckpointError):
            pipe.load_lora(path)
    for bad in ("", "../x", "a/b", "x" * 65):
        with pytest.raises(SettingError, match="name"):
            pipe.load_lora(tmp_path / "unknown", name=bad or " ")
    assert pipe.loras.names == []
    assert_equal(bits(pipe), base)


def test_damaged_files_are_refused_without_a_trace(tmp_path: Path) -> None:
    pipe = fresh_pipeline("var")
    base, folder = bits(pipe), write(tmp_path / "ink", updates(pipe, targets(pipe)[:2]))
    file = folder / "adapter_model.safetensors"
    whole, random = file.read_bytes(), torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(1000):
        position = int(torch.randint(0, 600, (), generator=random))
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(torch.randint(0, 8, (), generator=random))
        cut = int(torch.randint(0, len(whole), (), generator=random)) if position % 2 else len(whole)
        file.write_bytes(bytes(damaged[:cut]))
        try:
            name = pipe.load_lora(folder)
        except CheckpointError:
            refused += 1
            assert pipe.loras.names == []
        else:  # a bit of a number, or of a name that nothing reads
            pipe.unload_lora(name)
    assert refused > 700
    assert_equal(bits(pipe), base)


def test_an_adapter_of_the_hub_is_called_by_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = fresh_pipeline("var")
    fetched = write(tmp_path / ("0" * 40), updates(pipe))
    monkeypatch.setattr("nextscale.lora.snapshot", lambda repository, patterns: fetched)
    assert pipe.load_lora("somebody/ink") == "ink"
