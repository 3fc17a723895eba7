"""Runs of the whole program on a policy with random weights."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import train
from qerl_pl.__main__ import main as command
from qerl_pl.results.curves import read_curves
from qerl_pl.tools.tiny import make_tiny
from tests.program import Program

ROOT = Path(__file__).parent.parent.parent
TOY = ROOT / "tests" / "integration" / "toy.yaml"
NOT_EXACT = ("time/", "throughput/", "memory/", "epoch")  # seconds and bytes; and Lightning's own epoch scalar
SHORT = ("--trainer.max_steps", "4", "--trainer.limit_val_batches", "0")  # 4 steps, the fewest with the toy's noise
VLLM = ("--model.engine", "qerl_pl.rollout.vllm.VLLMEngine")
IN_BACKGROUND = ("--trainer.callbacks+=tests.integration.toy.InBackground",)
CHECKS = tuple(
    f"callbacks.{name}" for name in ("canary.SyncCanary", "ledger.MismatchLedger", "rollout_evidence.RolloutEvidence")
)


def callbacks() -> list[dict[str, Any]]:
    """Read the callbacks of a toy run."""
    base, toy = (yaml.safe_load(path.read_text())["trainer"] for path in (ROOT / "configs" / "base.yaml", TOY))
    return [*base["callbacks"], *toy["callbacks+"]]


def without(*class_paths: str) -> tuple[str, str]:
    """Return arguments of a toy run that remove these callbacks. Arguments that add callbacks have to come later."""
    return "--trainer.callbacks", json.dumps([each for each in callbacks() if each["class_path"] not in class_paths])


UNCHECKED = without(*CHECKS)
"""Arguments of a run without the callbacks that compare engine and trainer, which take half of the time of a toy run
and change nothing else (``test_a_healthy_run_passes_and_is_what_it_is_without_its_checks``)."""


_setup_parser = train.QeRLCLI.setup_parser
_parsers: dict[tuple[str, ...], dict[str, Any]] = {}


def setup_parser_once(self: train.QeRLCLI, *args: Any, **named: Any) -> None:
    """Build the parsers of a command line only once per process, because this takes a tenth of a second, a seventh of
    the time that setting up a toy run takes. A parser keeps nothing of the arguments that it has parsed."""
    called = (sys.argv[0], *self.subcommands())
    if called not in _parsers:
        others = {*vars(self)}
        _setup_parser(self, *args, **named)
        _parsers[called] = {name: value for name, value in vars(self).items() if name not in others}
    vars(self).update(_parsers[called])


train.QeRLCLI.setup_parser = setup_parser_once


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make two folders of the same random checkpoint, "dense" and "nvfp4"."""
    folder = tmp_path_factory.mktemp("bases")
    make_tiny(folder / "dense", seed=0, sft_steps=0)
    files = ["--model", str(folder / "dense"), "--output", str(folder / "nvfp4")]
    assert command(["quantize", *files, "--format", "nvfp4"]) == 0
    return {name: folder / name for name in ("dense", "nvfp4")}


@pytest.fixture
def run(bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., train.QeRLCLI]:
    """Return a function that runs the program in this process: ``run("fit", run_dir, *more)``."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["train.py"])

    def start(subcommand: str, run_dir: Path, *more: str) -> train.QeRLCLI:
        return train.main(arguments(subcommand, bases["nvfp4"], run_dir, *more))

    return start


def arguments(subcommand: str, base: Path, run_dir: Path, *more: str) -> list[str]:
    """Make the command line of a run."""
    return [subcommand, "-c", str(TOY), "--model.base", str(base), "--run_dir", str(run_dir), *more]


def launch(*args: Any, **kwargs: Any) -> Program:
    """Start the program in its own process; positional arguments are those of ``arguments``."""
    return Program(arguments(*args), **kwargs)


def load_last(run_dir: Path) -> dict[str, Any]:
    """Read the last checkpoint."""
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")


OF_THE_LAST_VALIDATION = ("/current_score", "/epoch_loop.val_loop.batch_progress/current/")
"""Parts of a checkpoint's state that may differ in a resumed run: Lightning restores neither the score of the last
validation nor its number of batches. The next validation replaces both before anything reads them."""


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """List where two nested structures of tensors and builtins differ in any bit: the keys and indices on the way to
    each difference, joined by "/"."""
    if isinstance(left, torch.Tensor):
        return [] if isinstance(right, torch.Tensor) and torch.equal(left, right) else [path]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if isinstance(left, dict) and isinstance(right, dict):
        found = [f"{path}/{key} on one side only" for key in left.keys() ^ right.keys()]
        for key in left.keys() & right.keys():
            found += differences(left[key], right[key], f"{path}/{key}")
        return found
    return [] if left == right else [path]


def scalars(run_dir: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Read the steps and values of a run's curves, by name. Curves of times and memory, which differ between
    repetitions of a run, are left out."""
    curves = read_curves(run_dir)
    return {tag: (curve.steps, curve.values) for tag, curve in curves.items() if not tag.startswith(NOT_EXACT)}


def without_places(state: Any, run_dir: Path) -> Any:
    """Remove what differs between the checkpoints of equal runs: the run's folder in texts is replaced by "RUN", and
    the state of ``Timer``, which has seconds, and the settings, which name the callbacks that interrupt a run, are left
    out."""
    if isinstance(state, str):
        return state.replace(str(run_dir), "RUN")
    if isinstance(state, dict):
        return {
            without_places(key, run_dir): without_places(value, run_dir)
            for key, value in state.items()
            if key not in ("Timer", "SaveAcceptedConfig")
        }
    if isinstance(state, list | tuple):
        return [without_places(value, run_dir) for value in state]
    return state


def different_parts(straight: Path, resumed: Path) -> list[str]:
    """List the parts of the last checkpoints, curves and completions in which two runs differ in any bit, apart from
    times, memory and the folders of the runs."""
    one, other = (without_places(load_last(run_dir), run_dir) for run_dir in (straight, resumed))
    found = differences(one, other, "checkpoint")
    found = [path for path in found if not any(part in path for part in OF_THE_LAST_VALIDATION)]
    found += differences(scalars(straight), scalars(resumed), "curves")
    for path in sorted((straight / "completions").iterdir()):
        if path.read_bytes() != (resumed / "completions" / path.name).read_bytes():
            found.append(path.name)
    return found


def assert_same_run(straight: Path, resumed: Path) -> None:
    """Check that two runs end with the same checkpoint, curves and completions, bit for bit."""
    assert different_parts(straight, resumed) == []


@pytest.fixture(scope="session")
def short(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of four steps without validation (``SHORT``). All tests share it, so a test that changes
    anything in it has to copy it first."""
    run_dir = tmp_path_factory.mktemp("short") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("sys.argv", ["train.py"])
        train.main(arguments("fit", bases["nvfp4"], run_dir, *SHORT))
    return run_dir


@pytest.fixture(scope="session")
def finished(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of the small configuration ``TOY``. All tests share it, so a test that changes anything
    in it has to copy it first."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    process = launch("fit", bases["nvfp4"], run_dir)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return run_dir
