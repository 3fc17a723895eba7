"""Compare a run that is killed and resumed with one that is not: python -m tests.bench.bench_resume

Both are runs of train.py in which rollouts and training are deterministic. One run gets SIGKILL three times, in
different steps: during a rollout, during an update, and while a checkpoint is written. After each kill the run is
started again, and continues from its last checkpoint. At the end, adapter, optimizer state, curves and completions of
both runs are compared; a line of results is printed only if all bits are equal.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback

from tests.bench import bench_grpo, harness
from tests.bench.harness import CUDA, DTYPE
from tests.integration.conftest import different_parts
from tests.random_checkpoints import written_apart


class Kill(NamedTuple):
    """Point at which a run kills itself. ``step`` steps are finished by then, and ``after_s`` seconds have passed since
    the next step began with its rollout, update or checkpoint, as ``where`` says."""

    where: str
    step: int
    after_s: float


# the update begins with its gradient, the checkpoint with writing
KILLS = {kill.where: kill for kill in (Kill("rollout", 1, 1.0), Kill("update", 2, 0.0), Kill("checkpoint", 3, 0.2))}
SETTINGS: dict[str, Any] = {
    "base": "nvfp4",
    "teacher": None,
    "aqn": True,
    "prompts": 2,
    "group": 8,
    "steps": 5,
    "updates": 1,
    "plain": False,
    "sleep_level": 0,
    "decoding_kernel": "auto",
    **dict.fromkeys(("mean", "cap", "memory", "micro_batch_tokens", "tolerance")),
}


class KillsItself(Callback):
    """Sends SIGKILL to its own process at a point of training."""

    def __init__(self, where: str, step: int, after_s: float) -> None:
        self._at = Kill(where, step, after_s)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._at[:2] == ("rollout", trainer.global_step):
            pl_module.start_engine()
        self._begin("rollout", trainer)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self._begin("update", trainer)

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self._begin("checkpoint", trainer)

    def _begin(self, where: str, trainer: Any) -> None:
        if self._at[:2] == (where, trainer.global_step):
            threading.Timer(self._at.after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def start(args: argparse.Namespace, base: str, folder: Path, kill: Kill | None = None) -> None:
    """Start a run, or continue it from its last checkpoint, and wait for its end. With ``kill``, the run kills itself
    at this point.

    Raises:
        SystemExit: with ``kill``, the run ended in another way; without ``kill``, it failed.
    """
    settings: dict[str, Any] = bench_grpo.settings(args, base, folder) | {"ckpt_path": "last"}
    settings["model"]["engine"]["init_args"]["decoding_kernel"] = "auto"
    settings["trainer"]["deterministic"] = True
    if kill is not None:
        callback = {"class_path": "tests.bench.bench_resume.KillsItself", "init_args": kill._asdict()}
        settings["trainer"]["callbacks"].append(callback)
    command, begin = harness.fit_command(folder, settings), time.perf_counter()
    status = subprocess.run(command, stdout=sys.stderr, env=harness.child_environment(), check=False).returncode
    print(f"{folder.name}: ended after {time.perf_counter() - begin:.0f} s by {kill or status}", file=sys.stderr)
    if status != (0 if kill is None else -signal.SIGKILL):
        expected = 0 if kill is None else f"to be killed by {kill}"
        raise SystemExit(f"the run in {folder} ended with {status}; expected {expected}")


def main(argv: list[str] | None = None) -> None:
    """Run both and print the line."""
    parser = harness.parser_with(
        __doc__, "--size", "--folder", "--output", "--eager", completion=512 if CUDA else 32, kills=list(KILLS)
    )
    args = parser.parse_args(argv)
    vars(args).update(SETTINGS)
    base = str(written_apart(args.folder, args.size, args.base))
    kills = [KILLS[where] for where in args.kills]
    with tempfile.TemporaryDirectory() as name:
        straight, killed = (Path(name) / part for part in ("straight", "killed"))
        straight.mkdir()
        killed.mkdir()
        start(args, base, straight)
        for kill in (*kills, None):
            start(args, base, killed, kill)
        different = different_parts(straight / "run", killed / "run")
    if different:
        raise SystemExit(f"no result, the check is red: these differ: {different[:20]}")
    shape = {"model": args.size, "base": args.base, "rows": args.prompts * args.group, "completion": args.completion}
    told = [kill._asdict() for kill in kills]
    harness.emit("resume/equal-bits", shape, DTYPE, output=args.output, kills=told)


if __name__ == "__main__":
    main()
