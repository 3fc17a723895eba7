"""The callback LastCheckpoint: which checkpoints of a run it keeps, and that training does not wait while a checkpoint
is written."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from callbacks.best_checkpoint import BestCheckpoint
from callbacks.last_checkpoint import LastCheckpoint
from qerl_pl.checkpoint import SafeCheckpointIO
from tests.two_ranks import on_two_ranks

IN_BACKGROUND = {"background_bytes": 0}
AT_ONCE = {"background_bytes": 2**30}


class Counts(LightningModule):
    """Module with one parameter, whose value is the number of steps done."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.count = torch.nn.Parameter(torch.zeros(3))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(100))  # pyright: ignore[reportArgumentType]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(1))  # pyright: ignore[reportArgumentType]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Validate nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.count], lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, int]:
        index = self.trainer.global_step
        self.count.grad = -torch.ones(3)
        self.optimizers().step()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        return {"rollout_index": index}


class Disk(Callback):
    """Imitates a slow disk: a checkpoint that is due at any time reaches the disk only at the end of one of the steps
    ``at``, or at the end of the run.

    If training waits for the disk at any other time, an assertion fails after 20 seconds. Each write takes at least
    ``seconds``.
    """

    def __init__(self, at: tuple[int, ...] = (), is_full: bool = False, seconds: float = 0.0) -> None:
        self.at = at
        self.is_full = is_full
        self.seconds = seconds

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.writes = threading.Event()  # not before: a callback is sent to the processes of a run as it is

    def state_dict(self) -> dict[str, Any]:
        return {"disk": _Block(self)}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step in self.at:
            self.writes.set()
            trainer.strategy.checkpoint_io.wait()  # pyright: ignore[reportAttributeAccessIssue]
            self.writes.clear()
        if trainer.global_step == trainer.max_steps:
            self.writes.set()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.should_stop:
            self.writes.set()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.writes.set()


class _Block:
    """Part of a checkpoint that delays its writing, as a slow disk does: pickling this object waits until the callback
    ``disk`` sets its event ``writes``, and raises OSError if ``disk.is_full``. It is pickled as an empty dictionary, so
    nothing of it is in the file."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def __deepcopy__(self, memo: dict[int, Any]) -> _Block:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Block)

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        assert self.disk.writes.wait(20), "training waits for the disk"
        time.sleep(self.disk.seconds)
        if self.disk.is_full:
            raise OSError("no space left on device")
        return OrderedDict, ()


class Counter(Callback):
    """Counts validations in a list that its state contains by reference. A checkpoint that is written later than its
    step would have a wrong count if the state had not been copied in time."""

    def __init__(self) -> None:
        self.counted = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self.counted, "as": torch.tensor(self.counted)}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counted[0] += 1


class Stops(Callback):
    """Ends a run at step ``at``, as ``how`` says: by an error when this step begins ("begins") or before the weights
    change ("amid"), or by a stop from the validation after this step ("validation")."""

    def __init__(self, how: str, at: int) -> None:
        self.how = how
        self.at = at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (self.how, self.at) == ("begins", trainer.global_step + 1):
            raise RuntimeError("as asked")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if (self.how, self.at) == ("amid", trainer.global_step + 1):
            raise RuntimeError("as asked")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (self.how, self.at) == ("validation", trainer.global_step):
            trainer.should_stop = True


def fit(
    folder: Path,
    *others: Callback,
    steps: int = 6,
    last: dict[str, int] | None = None,
    module: LightningModule | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> None:
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [LastCheckpoint(**(last or IN_BACKGROUND)), *others]
    trainer = Trainer(
        default_root_dir=folder,
        max_steps=steps,
        callbacks=callbacks,
        plugins=SafeCheckpointIO(),
        **(settings | options),
    )
    trainer.fit(module or Counts(), ckpt_path=ckpt_path, weights_only=True)


def kept(folder: Path) -> dict[str, int]:
    """Check that every checkpoint in a folder has the weights of its own step. Returns the step of each checkpoint by
    the name of its file."""
    steps = {}
    for path in (folder / "checkpoints").iterdir():
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["state_dict"]["count"].tolist() == [checkpoint["global_step"]] * 3
        steps[path.stem] = checkpoint["global_step"]
    return steps


@pytest.mark.parametrize(
    ("at", "previous"), [((), 1), ((3,), 3), ((2, 4), 4), ((3, 4), 4), ((2, 3, 4, 5), 5), ((2, 3, 4, 5, 6), 5)]
)
def test_no_step_waits_for_the_disk_and_the_last_one_is_kept(tmp_path, at, previous):
    fit(tmp_path, Disk(at))
    assert kept(tmp_path) == {"last": 6, "previous": previous}


@pytest.mark.parametrize(("every", "steps", "previous"), [(1, 6, 5), (3, 6, 3), (4, 6, 4), (4, 9, 8)])
def test_where_nothing_is_written_in_the_background_every_checkpoint_that_is_due_is_there(
    tmp_path, every, steps, previous
):
    fit(tmp_path, steps=steps, last=AT_ONCE | {"every_n_rollouts": every})
    assert kept(tmp_path) == {"last": steps, "previous": previous}


def test_what_was_left_out_is_not_made_up_for_at_a_step_that_is_not_due(tmp_path):
    fit(tmp_path, Disk((5,)), steps=7, last=IN_BACKGROUND | {"every_n_rollouts": 2})  # of 2, 4 and 6 the disk has 2
    assert kept(tmp_path) == {"last": 7, "previous": 6}


@pytest.mark.parametrize(
    ("how", "at", "expected"),
    [
        ("amid", 5, {"last": 3, "previous": 1}),  # of step 3: the disk was not done with it
        ("amid", 4, {"last": 3, "previous": 1}),
        ("begins", 5, {"last": 3, "previous": 1}),
        ("amid", 3, {"last": 1}),
        ("begins", 3, {"last": 1}),  # step 2 left none, and step 1 has long been over
        ("begins", 2, {"pending": 1}),  # step 1 was not yet on record
    ],
)
def test_a_run_that_fails_keeps_what_was_being_written_if_its_step_is_on_record(tmp_path, how, at, expected):
    with pytest.raises(RuntimeError, match="as asked"):
        fit(tmp_path, Disk((3,)), Stops(how, at))
    assert kept(tmp_path) == expected


@pytest.mark.parametrize("last", [IN_BACKGROUND, AT_ONCE | {"every_n_rollouts": 5}])
def test_a_run_that_validation_stops_keeps_its_last_step(tmp_path, last):
    validation = {"val_check_interval": 2, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    disk = [] if last["background_bytes"] else [Disk()]
    fit(tmp_path, Stops("validation", 4), *disk, last=last, **validation)
    assert kept(tmp_path)["last"] == 4


@pytest.mark.parametrize("last", [IN_BACKGROUND, AT_ONCE])
@pytest.mark.parametrize(("at", "counted"), [(2, 0), (3, 1), (4, 1), (5, 2)])
def test_what_a_validation_changes_in_a_callback_is_kept(tmp_path, last, at, counted):
    validation = {"val_check_interval": 2, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    with pytest.raises(RuntimeError, match="as asked"):
        fit(tmp_path, Counter(), Stops("amid", at), last=last, **validation)
    path = tmp_path / "checkpoints" / "last.ckpt"
    steps, states = torch.load(path, weights_only=True)["global_step"], torch.load(path, weights_only=True)["callbacks"]
    assert states["Counter"]["counted"] == [steps // 2], "as many validations as until the end of the step"
    if last == AT_ONCE:
        assert (steps, states["Counter"]["counted"]) == (at - 1, [counted])


@pytest.mark.parametrize("at", [3, 5])
def test_what_another_callback_keeps_after_a_validation_is_known_to_a_resumed_run(tmp_path, at):
    others = ModelCheckpoint(monitor="step", mode="max", filename="{step}"), BestCheckpoint("step")
    validation = {"val_check_interval": 2, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    with pytest.raises(RuntimeError, match="as asked"):
        fit(tmp_path, *others, Stops("amid", at), last=AT_ONCE, **validation)
    assert kept(tmp_path) == {"last": at - 1, "previous": at - 2, f"step={at - 1}": at - 1, "best": at - 1}
    others = ModelCheckpoint(monitor="step", mode="max", filename="{step}"), BestCheckpoint("step")
    fit(tmp_path, *others, last=AT_ONCE, ckpt_path=tmp_path / "checkpoints" / "last.ckpt", **validation)
    assert kept(tmp_path) == {"last": 6, "previous": 5, "step=6": 6, "best": 6}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_has_both_checkpoints(tmp_path, monkeypatch, number):
    def link(path, link):
        raise OSError(number, os.strerror(number), str(path), None, str(link))

    monkeypatch.setattr(os, "link", link)
    fit(tmp_path, last=AT_ONCE)
    assert kept(tmp_path) == {"last": 6, "previous": 5}


@pytest.mark.parametrize("at", [(), (2,), (3,)])  # told at the end of the run, or to a callback that waits
def test_what_could_not_be_written_is_told_and_nothing_else_gets_its_name(tmp_path, at):
    left_over = tmp_path / "checkpoints" / "pending.ckpt"
    left_over.parent.mkdir()
    left_over.write_bytes(b"of a run that was killed")
    with pytest.raises(OSError, match=r"could not write the checkpoint .*: no space left on device"):
        fit(tmp_path, Disk(at, is_full=True))
    assert kept(tmp_path) == {}


def fit_on_rank(rank: int, folder: Path) -> tuple[int, dict[str, int]]:
    """Train as one of two ranks, with the environment variables that torchrun sets; returns the number of ranks, and
    the checkpoints that exist when this rank has ended."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    fit(folder, Disk((3,), seconds=0.5), strategy="ddp", devices=2)
    return dist.get_world_size(), kept(folder)


@pytest.mark.slow
def test_two_ranks_leave_out_the_same_checkpoints(tmp_path):
    # A checkpoint is left out if the one before is still being written. If ranks disagreed about this, they would wait
    # for each other for ever, or save weights of different steps. No rank ends before the last checkpoint is written.
    expected = (2, {"last": 6, "previous": 3})
    assert on_two_ranks(partial(fit_on_rank, folder=tmp_path), tmp_path) == [expected, expected]
