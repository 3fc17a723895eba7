"""One arm of each kind in configs/studies/formats.yaml, run at a small size, does what its name says."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from qerl_pl.pretraining.fit import Settings, new_policy
from qerl_pl.pretraining.policy import write_policy
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.study import state
from qerl_pl.study.readouts import curves_of, pass_at_k
from qerl_pl.study.study_file import read_study
from tests.program import ROOT
from tests.study.test_chain import SETTINGS

ARMS = ("mxfp4+temperature", "mxfp4+aqn-rounded", "nf4+aqn-uncapped", "nvfp4+aqn+dapo")
STEPS = 10  # one for each stage of the noise


def make_policy(folder: Path) -> None:
    """Write a policy with random weights in bf16, and its copies in the arms' formats."""
    sizes = {"steps": 1, "batch_size": 1, "operations": (2, 3), "rare": 0.0, "learning_rate": 1e-3}
    model, tokenizer = new_policy(Settings(seed=0, size="toy", warmup_steps=1, micro_batch_tokens=400, **sizes))
    torch.nn.Module.to(model, torch.bfloat16)
    folder.parent.mkdir()
    write_policy(folder, model, tokenizer, {"task.yaml": "{}\n"})
    for form in ("nvfp4", "mxfp4", "nf4"):
        quantize_checkpoint(folder, folder.with_name(f"{folder.name}-{form}"), format=form)


def small(content: dict) -> dict:
    """The shipped study with some arms, one seed and small runs in the study's own dtype, bf16."""
    evaluation = content["evaluations"]["validation-256"]
    evaluation["data"]["val_limit"] = 2
    evaluation["model"]["val_sampling"]["max_tokens"] = 4
    model = {key: value for key, value in SETTINGS["model"].items() if key != "dtype"}
    return {
        "variables": {"policy": "small"},
        "output": content["output"],
        "config": [str(ROOT / content["config"][0]), content["config"][1]],
        "settings": {
            "trainer": {"max_steps": STEPS, "val_check_interval": 5},
            "model": model | content["settings"]["model"],
            "data": SETTINGS["data"],
        },
        "arms": {name: content["arms"][name] for name in ARMS},
        "seeds": content["seeds"][:1],
        "evaluations": {"validation-256": evaluation},
        "jobs": 2,
        "analysis": {"folder": content["analysis"]["folder"]},
    }


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_arms_of_each_kind_run_with_all_checks_and_differ_as_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the study's paths are relative
    make_policy(Path("models/small"))
    targets = [3.0 + 0.1 * step for step in range(STEPS)]
    curve = Path("studies/formats_pilot-small/analysis/surprisal/mxfp4+aqn_lr=0.0005.json")
    curve.parent.mkdir(parents=True)
    curve.write_text(json.dumps(targets))
    path = Path("study.yaml")
    content = yaml.safe_load((ROOT / "configs" / "studies" / "formats.yaml").read_text())
    path.write_text(yaml.safe_dump(small(content), sort_keys=False))
    command = [sys.executable, "-m", "qerl_pl", "study", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for more in ([], ["--analyse"]):
        subprocess.run([*command, *more], env=environment, check=True)

    study = read_study(path)
    text = (study.output / "analysis-formats" / "analysis.md").read_text()
    runs = {run.arm: run for run in study.runs()}
    curves = {arm: curves_of(run) for arm, run in runs.items()}
    settings = {arm: yaml.safe_load((run.folder / "config.yaml").read_text())["model"] for arm, run in runs.items()}
    for arm, run in runs.items():
        assert state.is_finished(study, run)
        assert list(pass_at_k(run, "validation-256")) == [2**power for power in range(9)]
        assert len(curves[arm]["canary/tensors_checked"].values) == STEPS
        assert "ledger/kernel/mean_abs" in curves[arm]
        assert settings[arm]["base_format"] == arm.split("+")[0]
    assert "| validation-256: pass@256 |" in text

    def noise(arm: str) -> tuple[float, float]:
        return curves[arm]["aqn/sigma"].values[-1], curves[arm]["aqn/sigma_realized"].values[-1]

    sigma, realized = noise("mxfp4+aqn-rounded")
    assert realized < sigma / 2, "bf16 has lost most of the noise"
    sigma, realized = noise("nf4+aqn-uncapped")
    assert realized == pytest.approx(sigma, rel=0.2)

    objective = settings["nf4+aqn-uncapped"]["objective"]
    assert (objective["preset"], objective["correction"], objective["correction_level"]) == (
        "grpo",
        "truncate",
        "token",
    )
    assert (objective["correction_low"], objective["correction_high"]) == (0, math.inf)
    assert settings["mxfp4+aqn-rounded"]["objective"]["correction_high"] == 2
    dapo = settings["nvfp4+aqn+dapo"]
    assert (dapo["objective"]["aggregation"], dapo["objective"]["clip_high"]) == ("token", 0.28)
    assert dapo["dynamic_sampling"]["metric"] == "accuracy"
    assert curves["mxfp4+temperature"]["matched/target"].values == pytest.approx(targets)
    assert curves["mxfp4+temperature"]["matched/temperature"].values[-1] < 1, "the curve is below the entropy"
