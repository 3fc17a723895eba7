"""Start a configuration's rollout engine once, so that later starts find its compiled kernels and graphs."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.cli.training import main as training
from qerl_pl.common.program import restored_arguments
from qerl_pl.module import QeRLModule


class Started(Exception):
    """Ends a run as soon as its engine has started."""


class StartEngine(Callback):
    """Starts the engine before anything else of a run, and then ends the run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        begin = time.perf_counter()
        pl_module.start_engine()
        self.seconds = time.perf_counter() - begin
        raise Started


def start_engine(arguments: list[str]) -> str:
    """Start the engine of ``fit`` with these arguments and close it again; returns a sentence with the seconds.

    The run has one device, and a temporary folder in place of its own. The base is loaded and, if the configuration
    says so, downloaded and quantised first.
    """
    starting = StartEngine()
    with tempfile.TemporaryDirectory() as folder, restored_arguments():
        own = ["--run_dir", str(Path(folder, "run")), "--trainer.devices", "1", "--trainer.num_nodes", "1"]
        cli = training(["fit", *arguments, *own], run_now=False)
        cli.trainer.callbacks.append(starting)  # pyright: ignore[reportAttributeAccessIssue]
        with suppress(Started):
            cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    parts: dict[str, float] = getattr(cli.model.engine, "start_s", {})
    listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    return f"{starting.seconds:.1f} s{f' ({listed}); later starts find its compiled kernels' if listed else ''}"
