"""What every training run shares: budget, state, curve, averages, optimizers, settings as texts, and the drawn curve."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nextscale.errors import CheckpointError, MissingExtra, OutOfMemory, SettingError
from training.curves import plot_curve, read_curve
from training.optim import MasterWeights, Optimizers
from training.run import (
    CURVE,
    METRICS,
    PLOT,
    STATE,
    Average,
    Budget,
    CurveError,
    Diverged,
    Run,
    learning_rate,
    memory_errors,
    read_lines,
    set_learning_rate,
)
from training.settings import changed, lasting

# --- budget and rate


def test_budget_counts_steps_or_seconds() -> None:
    assert Budget(steps=8).progress(2, 1e9) == 0.25
    assert Budget(seconds=50).progress(10**9, 25) == 0.5


@pytest.mark.parametrize(
    "arguments", [{}, {"steps": 1, "seconds": 1.0}, {"steps": 0}, {"seconds": -1.0}, {"seconds": math.nan}, {"seconds": math.inf}]
)
def test_budgets_that_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="a budget is"):
        Budget(**arguments)


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step / 1000, step, peak=2.0) for step in range(1001)]
    assert rates[0] == pytest.approx(0.02) and rates[-1] == pytest.approx(0.04)
    top = max(range(1001), key=lambda step: rates[step])
    assert top == 99 and rates[top] == pytest.approx(2.0, rel=0.03)
    assert rates[:100] == sorted(rates[:100]) and rates[99:] == sorted(rates[99:], reverse=True)
    assert learning_rate(1.7, 5000, 2.0) == pytest.approx(0.04)  # a last step may end after the budget


def test_groups_have_a_factor() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.AdamW([{"params": first.parameters()}, {"params": second.parameters(), "factor": 0.5}])
    set_learning_rate(optimizer, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]


# --- runs


def run(folder: Path, steps: int, settings: dict[str, Any] | None = None, **options: Any) -> Run:
    torch.manual_seed(0)
    module = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    return Run(folder, Budget(steps=steps), {"net": module}, {"adamw": optimizer}, settings or {"rate": 0.1}, **options)


def make(a_run: Run) -> Iterator[int]:
    """Steps that depend on their number alone, each announced before it is made."""
    for progress in a_run.steps():
        assert progress == a_run.step / a_run.budget.steps  # type: ignore[operator]
        yield a_run.step
        loss = (a_run.modules["net"](torch.full((1, 2), float(a_run.step))) - 1).square().mean()
        loss.backward()
        a_run.optimizers["adamw"].step()
        a_run.optimizers["adamw"].zero_grad()
        a_run.log({"loss": loss, "rate": 0.5, "stages": torch.tensor([1.0, float(a_run.step)])})


def curve(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / CURVE).read_text().splitlines()]


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 7, log_every=2)
    assert list(make(whole)) == list(range(7))
    stopped = run(tmp_path / "parts", 7, log_every=2)
    for step in make(stopped):
        if step == 3:  # the state knows three steps, the curve goes on to the fourth
            stopped.save()
        if step == 5:
            break
    assert [line["step"] for line in curve(tmp_path / "parts")] == [2, 3, 4]
    with (tmp_path / "parts" / CURVE).open("a") as file:
        file.write('{"step": 6, "lo')
    parts = run(tmp_path / "parts", 7, log_every=2)
    assert parts.step == 3 and 0 < parts.seconds < 5
    assert [line["step"] for line in curve(tmp_path / "parts")] == [2, 3]
    assert list(make(parts)) == [3, 4, 5, 6]
    assert [line["step"] for line in curve(tmp_path / "parts")] == [2, 3, 4, 6, 7]
    assert all(map(torch.equal, whole.modules["net"].parameters(), parts.modules["net"].parameters()))
    assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == [CURVE, STATE]


def test_the_curve_has_means_of_what_was_logged(tmp_path: Path) -> None:
    list(make(run(tmp_path, 5, log_every=2)))
    lines = curve(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert [line["stages"] for line in lines] == [[1.0, 0.5], [1.0, 2.5], [1.0, 4.0]]
    assert all(line["rate"] == 0.5 and isinstance(line["loss"], float) and line["seconds"] >= 0 for line in lines)


def test_a_curve_without_its_state_begins_anew(tmp_path: Path) -> None:
    (tmp_path / CURVE).write_text('{"step": 20, "loss": 1}\n')
    run(tmp_path, 2)
    assert curve(tmp_path) == []


def test_results_are_noted_once_for_every_length_of_a_run(tmp_path: Path) -> None:
    for steps in (2, 2, 4):
        again = run(tmp_path, steps)
        list(make(again))
        again.finish({"psnr": 30.0 + steps})
    assert [(line["step"], line["held_out"]["psnr"]) for line in curve(tmp_path) if "held_out" in line] == [(2, 32.0), (4, 34.0)]
    assert [line["step"] for line in curve(tmp_path) if "seconds" in line] == [2, 4]
    assert json.loads((tmp_path / METRICS).read_text()).items() >= {"steps": 4, "psnr": 34.0}.items()


def test_folders_that_are_refused(tmp_path: Path) -> None:
    list(make(run(tmp_path, 2)))
    with pytest.raises(SettingError, match=r"other settings \(extra, rate\)"):
        run(tmp_path, 4, {"rate": 0.2, "extra": 1})
    for content in (b"", b"no zip file", (tmp_path / STATE).read_bytes()[:500]):
        (tmp_path / STATE).write_bytes(content)
        with pytest.raises(CheckpointError, match="Remove it"):
            run(tmp_path, 4)
    torch.save([1, 2], tmp_path / STATE)
    with pytest.raises(CheckpointError, match="Remove it"):
        run(tmp_path, 4)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="is a file: expected a folder"):
        run(tmp_path / "file", 2)


@pytest.mark.parametrize("value", [math.nan, torch.tensor(math.inf), torch.tensor([1.0, math.nan])])
def test_a_diverged_run_ends_and_keeps_its_state(tmp_path: Path, value: Any) -> None:
    it = run(tmp_path, 10, log_every=2)
    with pytest.raises(Diverged, match="step 6: loss not finite"):
        for _ in it.steps():
            if it.step == 2:
                it.save()
            it.log({"loss": value if it.step > 3 else 1.0})
    assert run(tmp_path, 10).step == 2 and curve(tmp_path)[-1]["step"] <= 4


def test_out_of_memory_is_explained() -> None:
    with pytest.raises(OutOfMemory, match="set a smaller batch"), memory_errors("set a smaller batch"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="another"), memory_errors("set a smaller batch"):
        raise RuntimeError("another")


# --- averages, precision, optimizers


def test_averages_are_short_at_first() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(0.0)
    average = Average(module, decay=0.5)
    assert not average.module.weight.requires_grad and not average.module.training
    module.weight.data.fill_(1.0)
    average.update(0)
    assert average.module.weight.item() == pytest.approx(0.9)  # 1 / 10 of what was
    average.update(1000)
    assert average.module.weight.item() == pytest.approx(0.95)
    assert module.weight.item() == 1.0 and [name for name, _ in average.named_parameters()] == ["module.weight"]


def test_master_weights_collect_what_half_precision_loses() -> None:
    module = nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.Linear(2, 2)})
    weights = MasterWeights(module, torch.bfloat16, ("head.",))
    kinds = {name: parameter.dtype for name, parameter in weights.working.named_parameters()}
    assert kinds["head.weight"] == torch.float32 and kinds["body.weight"] == torch.bfloat16
    assert {parameter.dtype for parameter in weights.module.parameters()} == {torch.float32}
    weights.working["body"](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()  # type: ignore[index]
    weights.take_gradients()
    body = weights.module["body"]  # type: ignore[index]
    assert body.weight.grad.dtype == torch.float32 and body.weight.grad.tolist() == [[1.0, 1.0]] * 2
    assert weights.module["head"].weight.grad is None and weights.working["body"].weight.grad is None  # type: ignore[index]
    body.weight.data.fill_(1.0)
    for _ in range(8):  # each too small for bfloat16 to see
        body.weight.data.add_(1e-3)
    weights.publish()
    assert weights.working["body"].weight.float().mean().item() == pytest.approx(1.008, abs=4e-3)  # type: ignore[index]


def test_both_optimizers_step_at_the_same_rate_and_cut_the_gradient() -> None:
    torch.manual_seed(0)
    matrix, vector, idle = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(4, 4))
    optimizers = Optimizers([matrix, idle], [vector], weight_decay=0.0)
    assert set(optimizers.all) == {"muon", "adamw"}
    (10 * (matrix * torch.randn(4, 4)).sum() + (vector * torch.tensor([3.0, 4.0, 0.0])).sum()).backward()
    expected = torch.cat([matrix.grad.flatten(), vector.grad]).norm()  # type: ignore[union-attr, list-item]
    assert optimizers.step(0.1, longest_gradient=1.0) == pytest.approx(expected.item())
    torch.testing.assert_close(vector.detach(), torch.tensor([-0.1, -0.1, 0.0]))  # Adam's first step is the rate
    assert 0.01 < matrix.detach().square().mean().sqrt() < 0.1  # Muon's is about as long: 0.2 of the rate per element at 4 x 4, turned
    assert torch.equal(idle.detach(), torch.ones(4, 4)) and matrix.grad is None and vector.grad is None


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(MissingExtra, match=r"from 2\.9 on; this is"):
        Optimizers([], [nn.Parameter(torch.zeros(1))], 0.0)


# --- settings as texts


@dataclass(frozen=True)
class Part:
    depth: int = 2
    width: int = 4

    def __post_init__(self) -> None:
        if self.width % self.depth:
            raise SettingError("width is no multiple of depth")


@dataclass(frozen=True)
class Whole:
    part: Part = Part()
    rate: float = 0.1
    phases: tuple[Any, ...] = ()
    sides: dict[str, int] = field(default_factory=dict)
    name: str = "x"
    compile: bool = False


def test_settings_change_all_at_once() -> None:
    texts = ["part.depth=3", "rate=1", "part.width=9", 'phases=[[0.5, [[1, 2]]], "a"]', 'sides={"256": 4}', "compile=true", "name=a=b"]
    result = changed(Whole(), texts)
    assert result == Whole(Part(3, 9), 1.0, ((0.5, ((1, 2),)), "a"), {"256": 4}, "a=b", True)
    assert isinstance(result.rate, float)
    assert changed(Whole(), []) == Whole()
    assert lasting(result)["part"] == {"depth": 3, "width": 9} and "compile" not in lasting(result)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate", "expected name=value"),
        ("speed=1", "there is no 'speed' here; known: compile, name, part, phases, rate, sides"),
        ("part.speed=1", "known: depth, width"),
        ("rate.low=1", "known: nothing"),
        ("part=3", r"part has settings of its own, such as part.depth=\.\.\."),
        ("rate=fast", "expected a number; without it 0.1"),
        ("rate=true", "expected a number"),
        ("part.depth=1.5", "expected a whole number"),
        ("phases=3", "expected a list"),
        ("sides=[1]", "expected an object"),
        ("compile=1", "expected true or false"),
        ("part.depth=3", "no multiple"),
    ],
)
def test_changes_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        changed(Whole(), [text])


# --- curves


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    tokenizer = [{"step": 20 * i, "seconds": 6 * i, "loss_256": 1 / i, "l1_256": 0.5 / i, "entropy_256": -0.5} for i in range(1, 5)]
    stages = [0.1, 0.2, 0.3, 0.4]
    model: list[dict[str, Any]] = [
        {"step": 20 * i, "seconds": 60 * i, "learning_rate": 0.1, "loss_256px_5": 1 / i, "stages_256px_5": [*stages, i]}
        for i in range(1, 5)
    ]
    model.append({"step": 80, "held_out": {"held_out_loss": {"256": [0.1]}}})
    for name, lines in (("tokenizer", tokenizer), ("model", model)):
        (tmp_path / name).mkdir()
        (tmp_path / name / CURVE).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 100, "los')
    return [tmp_path / "tokenizer", tmp_path / "model"]


def test_curves_hold_the_sum_and_a_few_stages(runs: list[Path]) -> None:
    assert set(read_curve(read_lines(runs[0] / CURVE))) == {"loss_256", "l1_256"}
    curve = read_curve(read_lines(runs[1] / CURVE))
    assert set(curve) == {"loss_256px_5", "stage_1_256px_5", "stage_3_256px_5", "stage_5_256px_5"}
    assert curve["stage_5_256px_5"] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_curves_are_plotted_where_matplotlib_is_installed(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    lines, target = read_lines(runs[1] / CURVE), runs[1] / PLOT
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot_curve(lines, target)
    assert not target.exists()
    monkeypatch.undo()
    plot_curve(lines, target)
    assert "<svg" in target.read_text()[:500] and sorted(file.name for file in runs[1].iterdir()) == [CURVE, PLOT]


def test_curves_that_cannot_be_read(runs: list[Path]) -> None:
    for text in ("no json\n", "[1]\n"):
        (runs[0] / CURVE).write_text(text)
        with pytest.raises(CurveError, match=r"curve.jsonl"):
            read_lines(runs[0] / CURVE)
