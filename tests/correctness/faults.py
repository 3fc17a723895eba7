"""Which faults of rollouts stop a run, and how many healthy rollouts do: python -m tests.correctness.faults

Each fault of tests/callbacks/rollout_faults.py is put into the engine of a quickstart run of its own when rollout 2
begins; the run has to stop, or to warn, before the update of the first rollout that the fault changes. One JSON line
per fault: "stopped" or "warned", in which rollout and with which words, or "silent". `--healthy N` makes a run of N
rollouts without a fault for each of five seeds, every other one with noise, and counts those that stop or warn; these
lines also have the seconds of a step and of each check in it.

    python -m tests.correctness.faults > docs/results/faults.jsonl
    python -m tests.correctness.faults --healthy 100 >> docs/results/faults.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import yaml
from lightning.pytorch import Callback

import train
from tests.bench.harness import emit
from tests.callbacks.rollout_faults import OF_ANY_ENGINE, OF_THE_MODEL
from tests.integration.conftest import ROOT

AT = 2
LATER = re.compile("old adapter|lost update|noise missing|other noise")  # right in rollout AT, wrong from the next on
ROLLOUTS = 14  # of a run with a fault
ENGINES = {"transformers": "qerl_pl.rollout.hf.TransformersEngine", "vllm": "qerl_pl.rollout.vllm.VLLMEngine"}
WARNINGS = re.compile("the sampler's log-probabilities|no group had a signal")


class RolloutFault(Callback):
    """Puts a fault into a run's engine when a rollout begins."""

    def __init__(self, fault: str, at: int = AT) -> None:
        self.fault = fault
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_index == self.at:
            pl_module.loop.engine = (OF_ANY_ENGINE | OF_THE_MODEL)[self.fault](pl_module.loop.engine, pl_module.policy)


class Watch(Callback):
    """Notes which rollout a run is at, and the seconds that its steps and each check in them take."""

    rollout: ClassVar[int] = 0
    seconds: ClassVar[dict[str, list[float]]] = defaultdict(list)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        Watch.seconds.clear()
        pl_module.loop.observers = [self._timed(check) for check in pl_module.loop.observers]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        Watch.rollout, self._start = pl_module.rollout_index, time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        Watch.seconds["step"].append(time.perf_counter() - self._start)

    def _timed(self, check: Any) -> Callable[[Any], None]:
        def timed(rollout: Any) -> None:
            start = time.perf_counter()
            check(rollout)
            Watch.seconds[owner].append(time.perf_counter() - start)

        method = check.func if isinstance(check, partial) else check
        owner = type(method.__self__).__name__
        return timed


def settings(
    base: Path, folder: Path, *, engine: str, noise: bool, seed: int, rollouts: int, fault: str | None
) -> dict[str, Any]:
    """Make the settings that differ from the quickstart's."""
    callbacks = yaml.safe_load((ROOT / "configs" / "base.yaml").read_text())["trainer"]["callbacks"]
    if noise:
        callbacks += yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())["trainer"]["callbacks+"]
    # A block of vLLM's cache on a CPU holds more tokens than any sequence here, so prefixes would never be cached.
    blocks = {"init_args": {"block_size": 32}} if (engine, fault) == ("vllm", "stale prefixes") else {}
    return {
        "run_dir": str(folder / "run"),
        "seed_everything": seed,
        "trainer": {"callbacks": callbacks, "max_steps": rollouts, "val_check_interval": 1000},
        "model": {"base": str(base), "engine": {"class_path": ENGINES[engine]} | blocks},
    }


def outcome(base: Path, *, engine: str, noise: bool, seed: int, rollouts: int, fault: str | None) -> dict[str, Any]:
    """Do a run; returns whether it stopped or warned, in which rollout, and with which words."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = Path(name)
        changes = settings(base, folder, engine=engine, noise=noise, seed=seed, rollouts=rollouts, fault=fault)
        (folder / "changes.yaml").write_text(yaml.safe_dump(changes))
        command = ["fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), "-c", str(folder / "changes.yaml")]
        if fault is not None:
            command += ["--trainer.callbacks+=tests.correctness.faults.RolloutFault"]
            command += [f"--trainer.callbacks.fault={fault}"]
        command += ["--trainer.callbacks+=tests.correctness.faults.Watch"]
        heard: list[tuple[int, str]] = []

        def hear(message: Warning | str, *_: Any, **__: Any) -> None:
            if WARNINGS.search(str(message)):
                heard.append((Watch.rollout, str(message)))

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = hear
            try:
                train.main(command)
            except (RuntimeError, FloatingPointError, ValueError) as error:
                heard = [*heard, (Watch.rollout, f"stopped: {error}")]
    if not heard:
        return {"outcome": "silent", "rollout": None, "said": ""}
    at, said = heard[0]
    outcome = "stopped" if said.startswith("stopped: ") else "warned"
    return {"outcome": outcome, "rollout": at, "said": said.removeprefix("stopped: ")[:200]}


def shares() -> dict[str, Any]:
    """Median seconds of a step, and what each check takes of it."""
    step = statistics.median(Watch.seconds["step"])
    checks = {name: values for name, values in Watch.seconds.items() if name != "step"}
    return {"step_s": step, "check_s": {name: statistics.median(values) for name, values in checks.items()}}


def main(argv: list[str] | None = None) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("models/tiny-0-nvfp4"), help="the quickstart's policy")
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    parser.add_argument("--healthy", type=int, default=0, metavar="N", help="healthy rollouts of each of five runs")
    parser.add_argument("--only", default="", help="faults, or numbers of healthy runs, that match this expression")
    args = parser.parse_args(argv)
    sys.argv = sys.argv[:1]
    shape = {"completions": 256, "max_tokens": 48, "engine": args.engine}
    run = partial(outcome, args.base, engine=args.engine)
    for seed in range(5 if args.healthy else 0):
        if re.search(args.only, str(seed)):
            found = run(noise=bool(seed % 2), seed=seed, rollouts=args.healthy, fault=None)
            name = f"healthy, {'AQN' if seed % 2 else 'no noise'}, seed {seed}"
            emit(name, shape, "float32", rollouts=args.healthy, **found, **shares())
    faults = OF_ANY_ENGINE | (OF_THE_MODEL if args.engine == "transformers" else {})
    for name in () if args.healthy else faults:
        if re.search(args.only, name):
            noise = name.startswith(("noise", "other noise"))  # they are about noise, of which stage 0 has none
            found = run(noise=noise, seed=0, rollouts=30 if noise else ROLLOUTS, fault=name)
            emit(name, shape, "float32", appears=AT + bool(LATER.search(name)), **found)


if __name__ == "__main__":
    from tests.correctness import faults  # the module that runs import their callbacks from

    faults.main()
