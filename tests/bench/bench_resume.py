"""A run that is killed and resumed, beside one that is not: python -m tests.bench.bench_resume

Both are runs of train.py in which rollouts and training are deterministic. One gets SIGKILL in the middle of a rollout,
of an update and of writing a checkpoint, in three different steps, and goes on from its last checkpoint each time.
Adapter, optimizer state, curves and completions are compared at the end; there is a line only if all bits are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning.pytorch import Callback

from tests.bench import bench_grpo, harness
from tests.bench.harness import CUDA
from tests.integration.conftest import different_parts
from tests.random_checkpoints import written_apart

STEPS = 5


class Kill(NamedTuple):
    """Point at which a run kills itself."""

    where: Literal["rollout", "update", "checkpoint"]
    step: int
    """Number of optimizer steps before."""
    after_s: float
    """Seconds after the rollout began, the gradient was ready, or the writing of the checkpoint began."""


KILLS = {kill.where: kill for kill in (Kill("rollout", 1, 1.0), Kill("update", 2, 0.0), Kill("checkpoint", 3, 0.2))}


class KillsItself(Callback):
    """Sends SIGKILL to its own process at a point of training."""

    def __init__(self, where: Literal["rollout", "update", "checkpoint"], step: int, after_s: float) -> None:
        self._at = Kill(where, step, after_s)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._is_at("rollout", trainer.global_step):
            pl_module.start_engine()
            self._kill()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._is_at("update", trainer.global_step):
            self._kill()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._is_at("checkpoint", trainer.global_step):
            self._kill()

    def _is_at(self, where: str, step: int) -> bool:
        return (where, step) == self._at[:2]

    def _kill(self) -> None:
        threading.Timer(self._at.after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def settings(args: argparse.Namespace, base: str, folder: Path, kill: Kill | None) -> dict[str, Any]:
    """Settings of one start of a run."""
    found = bench_grpo.settings(args, base, folder)
    found["model"]["engine"]["init_args"]["decoding_kernel"] = "auto"
    found["trainer"]["deterministic"] = True
    found["ckpt_path"] = "last"
    if kill is not None:
        found["trainer"]["callbacks"].append(
            {"class_path": "tests.bench.bench_resume.KillsItself", "init_args": kill._asdict()}
        )
    return found


def start(args: argparse.Namespace, base: str, folder: Path, kill: Kill | None = None) -> None:
    """Start a run, or go on with it, and wait for its end.

    Raises:
        SystemExit: it ended in another way than it should.
    """
    config = folder / "config.yaml"
    config.write_text(json.dumps(settings(args, base, folder, kill)))  # JSON is YAML
    command = [sys.executable, "train.py", "fit", "-c", str(config)]
    begin = time.perf_counter()
    found = subprocess.run(command, stdout=sys.stderr, env=harness.child_environment(), check=False).returncode
    print(f"{folder.name}: ended after {time.perf_counter() - begin:.0f} s by {kill or found}", file=sys.stderr)
    if found != (0 if kill is None else -signal.SIGKILL):
        raise SystemExit(f"the run in {folder} ended with {found}; expected {f'to be killed by {kill}' if kill else 0}")


def main(argv: list[str] | None = None) -> None:
    """Run both and print the line."""
    parser = harness.parser_with(__doc__, "--size", "--folder", "--output", "--eager")
    parser.add_argument("--kills", nargs="*", choices=KILLS, default=list(KILLS), help="where the run is killed")
    parser.add_argument("--completion", type=int, default=512 if CUDA else 32)
    args = parser.parse_args(argv)
    usual = {"base": "nvfp4", "aqn": True, "prompts": 2, "group": 8, "mean": None, "updates": 1, "plain": False}
    usual |= {"steps": STEPS, "cap": None, "memory": None, "sleep_level": 0, "decoding_kernel": "auto"}
    usual |= {"micro_batch_tokens": None, "tolerance": None}
    vars(args).update(usual)
    base = str(written_apart(args.folder, args.size, args.base))
    with tempfile.TemporaryDirectory() as name:
        straight, killed = (Path(name) / part for part in ("straight", "killed"))
        for folder in (straight, killed):
            folder.mkdir()
        start(args, base, straight)
        for where in args.kills:
            start(args, base, killed, KILLS[where])
        start(args, base, killed)
        different = different_parts(straight / "run", killed / "run")
    if different:
        raise SystemExit(f"no result, the check is red: these differ: {different[:20]}")
    shape = {"model": args.size, "base": args.base, "rows": args.prompts * args.group, "completion": args.completion}
    kills = [KILLS[where]._asdict() for where in args.kills]
    harness.emit("resume/equal-bits", shape, str(harness.DTYPE).removeprefix("torch."), output=args.output, kills=kills)


if __name__ == "__main__":
    main()
