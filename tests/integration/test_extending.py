"""The example files on the documentation page docs/extending.md, about own data, rewards and callbacks, work as the
page says."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import train
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.results.curves import read_curves
from tests.integration.conftest import ROOT, load_last

PAGE = ROOT / "docs" / "extending.md"


def files() -> dict[str, str]:
    """Read the example files from the code blocks of the page; returns their texts by file name. A block of Python or
    YAML has the file's name in its first line."""
    page = PAGE.read_text()
    [problems] = re.findall(r"`sums\.jsonl`.*?^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    named = re.findall(r"^```(?:python|yaml)\n(# (\S+)\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    return {"sums.jsonl": problems, **{name: block for block, name in named}}


@pytest.fixture
def folder(tmp_path: Path, bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files to a folder, and copy the quickstart's base to it."""
    for name, text in files().items():
        (tmp_path / name).write_text(text)
        sys.modules.pop(Path(name).stem, None)  # of another test
    subprocess.run([sys.executable, "make_sums.py"], cwd=tmp_path, check=True)
    shutil.copytree(bases["nvfp4"], tmp_path / "models" / "tiny-0-nvfp4")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_own_data_reward_loss_and_callback_train_as_the_page_says(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["train.py"])
    [line] = re.findall(r"^qerl (fit .* --smoke)$", PAGE.read_text(), re.MULTILINE)
    train.main([*shlex.split(line), "--model.engine", "qerl_pl.rollout.hf.TransformersEngine"])
    run_dir = folder / "runs" / "quickstart_sums_mine_loss_mine_callback-smoke"
    assert load_last(run_dir)["global_step"] == 3
    rows = [json.loads(line) for path in run_dir.glob("completions/train-*.jsonl") for line in path.open()]
    problems = [json.loads(line) for line in (folder / "sums.jsonl").open()]
    assert len(problems) == 512
    assert {row["answer"] for row in rows} <= {problem["answer"] for problem in problems}
    assert sum(row["level"] == 1 for row in problems) > 100 < sum(row["level"] == 2 for row in problems)
    assert any(row["rewards"]["closeness"] > 0 for row in rows)
    objective = yaml.safe_load((run_dir / "config.yaml").read_text())["model"]["objective"]
    assert (objective["surrogate"], objective["baseline"]) == ("my_loss.pulled_back", "my_loss.above_median")
    curves = read_curves(run_dir)
    assert min(curves["rollout/longest"].values) >= 2
    assert "train/closeness" in curves


def test_the_reward_on_the_page_scores_by_the_row():
    names: dict[str, Any] = {}
    exec(files()["sum_reward.py"], names)
    prompt = Prompt((1,), "42", row={"level": 2})
    texts = {"40+2=42": 2.0, "so 43": 1.0, "no number": 0.02}
    completions = [Completion((1,), (0.0,), True, text) for text in texts]
    assert names["closeness"]([prompt] * 3, completions) == list(texts.values())
