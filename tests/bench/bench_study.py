"""Speed of several trainings on one GPU: python -m tests.bench.bench_study --policy models/words-0 --jobs 1 6 12

Without ``--policy``, a random one is made, whose completions are as long as they may be. For each number of ``--jobs``,
so many seeds of configs/word_problems.yaml are trained at the same time by the command ``study``. A line has the median
seconds of a rollout (a whole step, while all runs are training) and of its phases, and the rollouts per second of all
runs together.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from qerl_pl.__main__ import main as command
from qerl_pl.tools.curves import Curve, read_curves
from tests.bench.harness import CUDA, DTYPE, PHASES, emit, parser_with


def study_of(args: argparse.Namespace, jobs: int, output: Path) -> dict[str, Any]:
    """Make the study's file: one arm, as many seeds as jobs, no validation."""
    model = {"base": str(args.policy), **({} if args.base_format is None else {"base_format": args.base_format})}
    return {
        "output": str(output),
        "config": ["configs/word_problems.yaml", str(args.policy / "task.yaml")],
        "settings": {"trainer": {"max_steps": args.rollouts, "limit_val_batches": 0}, "model": model},
        "gpu_memory": args.gpu_memory,
        "arms": {"one": {}},
        "seeds": list(range(jobs)),
    }


def random_policy(folder: Path) -> Path:
    """Make a policy that has been trained for one step."""
    few = ["--measure-problems", "1", "--reach-problems", "1", "--samples", "1", "--workers", "0"]
    size = ["--size", "10m"] if CUDA else ["--size", "toy", "--batch-size", "8"]
    if command(["pretrain", "--output", str(folder), *size, "--steps", "1", *few]):
        raise SystemExit("the policy could not be made")
    return folder


def together(runs: Sequence[Curve]) -> list[float]:
    """Return the seconds of the rollouts that began after every run had done its first, and ended before any run had
    done its last.

    Args:
        runs: the curve of `time/step_s` of each run.
    """
    began, ended = max(run.times[0] for run in runs), min(run.times[-1] for run in runs)
    return [
        seconds
        for run in runs
        for seconds, end in zip(run.values, run.times, strict=True)
        if began <= end - seconds and end <= ended
    ]


def measure(args: argparse.Namespace, jobs: int) -> None:
    """Train ``jobs`` seeds at the same time, and print a line."""
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder, "study.yaml"), Path(folder, "study")
        file.write_text(yaml.safe_dump(study_of(args, jobs, output)))
        if command(["study", str(file), "--jobs", str(jobs)]):
            raise SystemExit(f"the study with {jobs} jobs failed")
        runs = [read_curves(run) for run in output.glob("runs/one/seed-*")]
    seconds = sorted(together([run["time/step_s"] for run in runs]))
    if not seconds:
        raise SystemExit(f"{jobs} runs never trained at the same time: set --rollouts higher")
    shape = {"policy": args.policy.name, "base": args.base_format or "bf16", "jobs": jobs}
    rate = jobs / median(seconds)
    names = {phase: f"time/{phase}_s" for phase in PHASES}
    values = {
        phase: [each for run in runs if name in run for each in run[name].values] for phase, name in names.items()
    }
    phases = {phase: median(found) for phase, found in values.items() if found}
    emit("study/speed", shape, str(DTYPE)[6:], seconds, output=args.output, rollouts_per_s=rate, phases_s=phases)


def main(argv: list[str] | None = None) -> None:
    """Run a study for each number of jobs, and print a line for each."""
    parser = parser_with(__doc__, "--output")
    parser.add_argument("--policy", type=Path, help="made by `python -m qerl_pl pretrain` (default: a random one)")
    parser.add_argument("--base-format", choices=["nvfp4"], help="use this copy of the policy (default: the policy)")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 6], help="trainings at a time (default: 1 6)")
    parser.add_argument("--rollouts", type=int, default=40 if CUDA else 4, help="of each training (default: 40)")
    parser.add_argument("--gpu-memory", type=float, default=6.0, help="GiB of each training (default: 6)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        args.policy = args.policy or random_policy(Path(folder, "random"))
        for jobs in args.jobs:
            measure(args, jobs)


if __name__ == "__main__":
    main()
