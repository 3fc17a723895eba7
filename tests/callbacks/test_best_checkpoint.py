"""The best validation's policy outlives what interrupts a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from callbacks.best_checkpoint import BestCheckpoint
from callbacks.last_checkpoint import LastCheckpoint
from qerl_pl.checkpoint import SafeCheckpointIO
from tests.callbacks.test_last_checkpoint import Counts


class Scored(Counts):
    """Validates after every third step, with given scores."""

    def __init__(self, scores: Mapping[int, float]) -> None:
        super().__init__()
        self.scores = scores

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.trainer.global_step])


def fit(folder: Path, max_steps: int, scores: Mapping[int, float], *, ckpt_path: str | None) -> None:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[SafeCheckpointIO()],
        callbacks=[LastCheckpoint(), BestCheckpoint("score")],
    )
    trainer.fit(Scored(scores), ckpt_path=ckpt_path, weights_only=True)


def best(folder: Path) -> tuple[int, float]:
    """The step that it is of, which is what its parameter has counted to, and its score."""
    kept = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert (kept["state_dict"]["count"] == kept["global_step"]).all()
    [state] = [state for name, state in kept["callbacks"].items() if name.startswith("BestCheckpoint")]
    return kept["global_step"], round(state["best_model_score"].item(), 6)


@pytest.mark.parametrize(("later", "found"), [(0.5, (3, 0.9)), (0.95, (6, 0.95))])
@pytest.mark.parametrize("moved", [False, True], ids=["there", "moved"])
def test_a_run_that_goes_on_knows_the_best_score(tmp_path, later, found, moved):
    scores, folder = {3: 0.9, 6: later}, tmp_path / "run"
    fit(folder, 3, scores, ckpt_path=None)
    assert best(folder) == (3, 0.9)
    if moved:
        folder = folder.rename(tmp_path / "elsewhere")
    fit(folder, 6, scores, ckpt_path=str(folder / "checkpoints" / "last.ckpt"))
    assert best(folder) == found


def test_a_run_that_starts_anew_does_not_know_what_was_there(tmp_path):
    fit(tmp_path, 6, {3: 0.9, 6: 0.8}, ckpt_path=None)
    fit(tmp_path, 3, {3: 0.1}, ckpt_path=None)
    assert best(tmp_path) == (3, 0.1)


def test_a_score_of_steps_that_are_done_again_is_not_known(tmp_path):
    fit(tmp_path, 3, {3: 0.5}, ckpt_path=None)
    early = (tmp_path / "checkpoints" / "last.ckpt").rename(tmp_path / "early.ckpt")
    fit(tmp_path, 6, {3: 0.5, 6: 0.9}, ckpt_path=str(early))
    fit(tmp_path, 6, {3: 0.5, 6: 0.7}, ckpt_path=str(early))
    assert best(tmp_path) == (6, 0.7)
