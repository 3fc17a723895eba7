"""Tests that the teacher's loss equals that of TRL's DistillationTrainer on the same models and tokens."""

from pathlib import Path

import pytest
import torch

from qerl_pl.tools.tiny import make_tiny
from tests.bench.bench_distillation import BETAS, losses, losses_of_trl


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_losses_are_those_of_trl(tmp_path: Path, temperature: float) -> None:
    pytest.importorskip("trl", minversion="1.16", reason="trl is not installed: pip install 'trl>=1.16'")
    for seed, name in enumerate(("student", "teacher")):
        make_tiny(tmp_path / name, seed=seed, sft_steps=0)
    generator = torch.Generator().manual_seed(0)
    heads, tails = (
        [torch.randint(250, (length,), generator=generator).tolist() for length in lengths]
        for lengths in ((3, 9, 1, 12), (7, 1, 12, 4))
    )
    rows = list(zip(heads, tails, strict=True))
    student, teacher = str(tmp_path / "student"), str(tmp_path / "teacher")
    ours, theirs = (measure(student, teacher, rows, temperature=temperature) for measure in (losses, losses_of_trl))
    assert list(ours) == list(theirs) == list(BETAS)
    assert min(ours.values()) > 0.01, "else there is nothing to compare"
    assert ours == pytest.approx(theirs, abs=1e-6)
