"""Which faults of rollouts stop a run, and how many healthy rollouts do: python -m tests.bench.bench_faults --base DIR

Each fault of tests/callbacks/rollout_faults.py is put into the engine of a run of its own when rollout 2 begins; before
the update of that rollout the run has to stop, or to warn. One JSON line a fault: "stopped" or "warned", by what and in
which rollout, or "silent". `--healthy N` runs N rollouts without a fault for each of four settings and seeds and counts
those that stop or warn: one line a run.

    python -m tests.bench.bench_faults --base models/tiny-nvfp4 > docs/results/faults.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback

import train
from tests.bench.harness import emit
from tests.callbacks.rollout_faults import OF_ANY_ENGINE, OF_THE_MODEL
from tests.integration.conftest import ROOT

AT = 2
ENGINES = {"transformers": "qerl_pl.rollout.hf.TransformersEngine", "vllm": "qerl_pl.rollout.vllm.VLLMEngine"}
WARNINGS = "the sampler's log-probabilities|no group had a signal"


class RolloutFault(Callback):
    """Puts a fault into a run's engine when a rollout begins."""

    def __init__(self, fault: str, at: int = AT) -> None:
        self.fault = fault
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_index == self.at:
            pl_module.loop.engine = (OF_ANY_ENGINE | OF_THE_MODEL)[self.fault](pl_module.loop.engine, pl_module.policy)


def settings(
    base: Path, folder: Path, *, engine: str, noise: bool, seed: int, rollouts: int, batch_size: int
) -> dict[str, Any]:
    """What differs from the quickstart."""
    callbacks = yaml.safe_load((ROOT / "configs" / "base.yaml").read_text())["trainer"]["callbacks"]
    if noise:
        callbacks += yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())["trainer"]["callbacks+"]
    return {
        "run_dir": str(folder / "run"),
        "seed_everything": seed,
        "trainer": {
            "callbacks": callbacks,
            "max_steps": rollouts,
            "val_check_interval": 1000,
            "enable_progress_bar": False,
        },
        "model": {
            "base": str(base),
            "warmup_steps": 0,
            "engine": {"class_path": ENGINES[engine]},
            "sampling": {"num_completions": 8, "max_tokens": 48},
        },
        "data": {"batch_size": batch_size},
    }


def outcome(base: Path, *, engine: str, noise: bool, seed: int, rollouts: int, fault: str | None) -> dict[str, Any]:
    """What a run says."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = Path(name)
        size = 32 if fault else 4  # healthy rollouts are many
        changes = settings(base, folder, engine=engine, noise=noise, seed=seed, rollouts=rollouts, batch_size=size)
        (folder / "changes.yaml").write_text(yaml.safe_dump(changes))
        command = ["fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), "-c", str(folder / "changes.yaml")]
        if fault is not None:
            command += ["--trainer.callbacks+=tests.bench.bench_faults.RolloutFault"]
            command += [f"--trainer.callbacks.fault={fault}"]
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                train.main(command)
            except (RuntimeError, FloatingPointError, ValueError) as error:
                at = len(list((folder / "run" / "completions").glob("train-*")))
                return {"outcome": "stopped", "said": str(error)[:200], "rollouts_done": at}
        found = [str(one.message) for one in heard if any(part in str(one.message) for part in WARNINGS.split("|"))]
        if found:
            return {"outcome": "warned", "said": found[0][:200], "rollouts_done": rollouts}
        return {"outcome": "silent", "said": "", "rollouts_done": rollouts}


def main(argv: list[str] | None = None) -> int:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="the quickstart's policy")
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    parser.add_argument("--healthy", type=int, default=0, metavar="N", help="healthy rollouts of each of four runs")
    parser.add_argument("--only", default="", help="faults with this in their names")
    args = parser.parse_args(argv)
    sys.argv = sys.argv[:1]
    shape = {"completions": 32 if args.healthy else 256, "max_tokens": 48, "engine": args.engine}
    if args.healthy:
        for number in range(4):
            found = outcome(
                args.base, engine=args.engine, noise=bool(number % 2), seed=number, rollouts=args.healthy, fault=None
            )
            noise = "AQN" if number % 2 else "no noise"
            emit(f"healthy, {noise}, seed {number}", shape, "float32", rollouts=args.healthy, **found)
        return 0
    faults = OF_ANY_ENGINE | (OF_THE_MODEL if args.engine == "transformers" else {})
    for name in faults:
        if args.only in name:
            noise = name.startswith(("noise", "other noise"))  # they are about noise
            rollouts = 30 if noise else AT + 1  # of ten stages the first has none
            emit(
                name,
                shape,
                "float32",
                **outcome(args.base, engine=args.engine, noise=noise, seed=0, rollouts=rollouts, fault=name),
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
