"""Whole runs on bases that were quantised and published by others."""

import shutil
from pathlib import Path

import pytest

from qerl_pl.results.curves import read_curves
from tests.integration.conftest import VLLM, load_last
from tests.quant.published import modelopt

SHORT = ("--trainer.max_steps", "3", "--trainer.val_check_interval", "3", "--model.warmup_steps", "0")
STAGES = ("--trainer.callbacks.num_stages", "3")


@pytest.fixture
def published(bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a small random checkpoint as ModelOpt exports quantised models, with NVFP4 and FP8 linear layers and
    scales for an FP8 KV cache."""
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "published"
    shutil.copytree(bases["dense"], path)
    modelopt(path, fp8=lambda name: "o_proj" in name)
    return path


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.vllm
def test_a_mixed_modelopt_base_trains_on_what_vllm_samples_within_the_canarys_bounds(run, published, tmp_path):
    cli = run("fit", tmp_path / "run", "--model.base", str(published), *SHORT, *STAGES, *VLLM)
    folder = Path(cli.model.settings.folder)
    assert folder.parent == tmp_path / "cache"
    assert max(read_curves(tmp_path / "run")["canary/score_gap"].values) < 1e-4
    assert load_last(tmp_path / "run")["global_step"] == 3
