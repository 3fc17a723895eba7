"""The notebook runs from its first cell to its last."""

import sys
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QERL_STEPS", "10")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    texts = ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]
    [answers] = [text for text in texts if "[policy]" in text]
    assert answers.count("[base]") == 2
    assert any("warm start: " in text for text in texts)  # the progress of minutes of work is shown
    [curves] = [cell for cell in notebook.cells if "read_curves" in cell.source]
    assert any("image/png" in output.get("data", {}) for output in curves.outputs)
    assert (tmp_path / "runs" / "notebook" / "page.html").stat().st_size > 10_000
