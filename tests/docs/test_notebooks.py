"""An output shows itself in a notebook, and the notebooks of examples/ run."""

from __future__ import annotations

import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from nextscale.output import MOST_IMAGES, STAGE_COLUMNS
from tests.helpers import tiny

PROJECT = Path(__file__).parents[2]
NOTEBOOKS = sorted((PROJECT / "examples").glob("*.ipynb"))
EXPECTED = {
    "compare_methods": ("MACs 100%", "sparsevar", "stagevar", "SkipStages(last=1)", "image/png"),
    "first_images": ("seed 8", "stage 6", "(16, 16, 256)", "<table>"),
    "write_a_method": ("Thrifty", "[2, 2, 2, 1, 1, 1, 0]", "skipped"),
}


def pictures(html: str) -> list[Image.Image]:
    return [Image.open(BytesIO(b64decode(found))) for found in re.findall(r'src="data:image/png;base64,([^"]+)"', html)]


def test_an_output_shows_its_images_and_a_table() -> None:
    output = tiny.shared_pipeline("var")([1, 2], seed=3)
    html = output._repr_html_()
    assert [picture.tobytes() for picture in pictures(html)] == [image.tobytes() for image in output.images]
    assert 'title="seed 3"' in html and 'title="seed 4"' in html and output.stages is None
    assert html.count("<tr>") == 1 + len(output.report.stages) and all(f"<th>{name}</th>" in html for name in STAGE_COLUMNS)
    assert output.report.model in html and "100% of the MACs" in html


@pytest.mark.parametrize("family", ["var", "flexvar", "infinity", "hart"])
def test_kept_stages_end_with_the_image_and_are_shown_as_a_strip(family: str) -> None:
    pipe = tiny.shared_pipeline(family)
    seen: list[Any] = []
    output = pipe(tiny.prompts(family, 2), seed=3, keep_stages=True, on_stage=lambda preview: seen.append(preview.images()))
    assert output.stages is not None and len(output.stages) == len(output.report.stages)
    for stage, images in enumerate(seen):
        assert [one.tobytes() for one in output.stages.images(stage)] == [one.tobytes() for one in images]
    assert output.stages.strip(1)[-1].tobytes() == output.images[1].tobytes()
    assert len(pictures(output._repr_html_())) == 2 + len(output.stages)


def test_skipped_stages_and_odd_names_are_written_plainly() -> None:
    pipe = tiny.shared_pipeline("var")
    name, pipe.name = pipe.name, "<script>"
    try:
        html = pipe([1], seed=torch.Generator().manual_seed(0), method="skip:last=1")._repr_html_()
    finally:
        pipe.name = name
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert "<td>skipped</td>" in html and 'title=""' in html


def test_large_batches_are_cut() -> None:
    html = tiny.shared_pipeline("var")([1] * (MOST_IMAGES + 2), seed=0)._repr_html_()
    assert len(pictures(html)) == MOST_IMAGES and "and 2 more" in html


def test_all_notebooks_are_known_and_stored_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    assert {file.stem for file in NOTEBOOKS} == set(EXPECTED)
    for file in NOTEBOOKS:
        notebook = nbformat.read(file, as_version=4)
        nbformat.validate(notebook)
        assert notebook.cells[0].source.startswith("# ")
        assert all(cell.outputs == [] and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one kernel, which forgets all names before each."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    joined = nbformat.v4.new_notebook()
    parts = {file.stem: [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"] for file in NOTEBOOKS}
    for cells in parts.values():
        joined.cells += [nbformat.v4.new_code_cell("%reset -f"), *cells]
    nbclient.NotebookClient(joined, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    for name, cells in parts.items():
        shown = str([cell.outputs for cell in cells])
        assert [text for text in EXPECTED[name] if text not in shown] == []
