"""The checkpoint with the best validation so far is kept when a run is interrupted, however that happens, and when it
goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.best_checkpoint import BestCheckpoint
from tests.callbacks.test_last_checkpoint import AT_ONCE, Counts, fit, kept


class Scored(Counts):
    """Module whose validation after every third step logs given scores."""

    def __init__(self, scores: Mapping[int, float]) -> None:
        super().__init__()
        self.scores = scores

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.trainer.global_step])


def fit_scored(folder: Path, steps: int, scores: Mapping[int, float], *, ckpt_path: Path | None = None) -> None:
    every_third = {"max_epochs": -1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    options = {"last": AT_ONCE, "module": Scored(scores), "ckpt_path": ckpt_path, "num_sanity_val_steps": 0}
    fit(folder, BestCheckpoint("score"), steps=steps, **options, **every_third)


def best(folder: Path) -> tuple[int, float]:
    """Return the step of the best checkpoint, and its score."""
    states = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["callbacks"]
    [state] = [state for name, state in states.items() if name.startswith("BestCheckpoint")]
    return kept(folder)["best"], round(state["best_model_score"].item(), 6)


@pytest.mark.parametrize(("later", "expected"), [(0.5, (3, 0.9)), (0.95, (6, 0.95))])
@pytest.mark.parametrize("moved", [False, True], ids=["there", "moved"])
def test_a_run_that_goes_on_knows_the_best_score(tmp_path, later, expected, moved):
    scores, folder = {3: 0.9, 6: later}, tmp_path / "run"
    fit_scored(folder, 3, scores)
    assert best(folder) == (3, 0.9)
    if moved:
        folder = folder.rename(tmp_path / "elsewhere")
    fit_scored(folder, 6, scores, ckpt_path=folder / "checkpoints" / "last.ckpt")
    assert best(folder) == expected


def test_a_run_that_starts_anew_does_not_know_what_was_there(tmp_path):
    fit_scored(tmp_path, 6, {3: 0.9, 6: 0.8})
    fit_scored(tmp_path, 3, {3: 0.1})
    assert best(tmp_path) == (3, 0.1)


def test_a_score_of_steps_that_are_done_again_is_not_known(tmp_path):
    fit_scored(tmp_path, 3, {3: 0.5})
    early = (tmp_path / "checkpoints" / "last.ckpt").rename(tmp_path / "early.ckpt")
    fit_scored(tmp_path, 6, {3: 0.5, 6: 0.9}, ckpt_path=early)
    fit_scored(tmp_path, 6, {3: 0.5, 6: 0.7}, ckpt_path=early)
    assert best(tmp_path) == (6, 0.7)
