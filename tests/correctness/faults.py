"""Measure which faults of rollouts stop a run, and how many healthy runs stop: python -m tests.correctness.faults

Each fault of tests/callbacks/rollout_faults.py is put into the engine of its own quickstart run when a rollout begins;
which of the rollouts 2 to 7 this is differs among the faults. Ideally, the run stops before the update of the first
rollout that the fault changes. One JSON line per fault has the number of this rollout as `appears`, and says what the
run did: "stopped", "warned" (that log-probabilities of sampler and trainer differ) or "silent" (neither), with the
rollout and the message. `--healthy N` makes a run of N rollouts without a fault for each of five seeds, every second
run with noise on the norms, and records whether the run stopped or warned; these lines also have the seconds of a
training step and of each check in it.

    python -m tests.correctness.faults > docs/results/faults.jsonl
    python -m tests.correctness.faults --healthy 100 >> docs/results/faults.jsonl

With `--model` and `--problems`, runs are of a pretrained model on GSM8K instead. One healthy run makes a checkpoint at
the beginning of rollout 2 (for faults of the noise, a second healthy run with noise does). The run of each fault
resumes from this checkpoint in the same process, with a new engine.

    python -m tests.correctness.faults --model FOLDER --problems gsm8k_train.jsonl --engine vllm

`--part 1/8` to `--part 8/8` divide the faults among eight processes. With `--model`, the last line of a process counts
its faults: as `within_two` those whose run stopped in the rollout `appears` or in the next one, and as `warned` those
whose run only warned. With `--model` and `--healthy N`, each process makes one run of N + 1 rollouts without a fault
instead; each part has another seed, and even parts have noise.
"""

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import yaml
from lightning.pytorch import Callback

import train
from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.types import Completion
from qerl_pl.results.curves import read_curves
from tests.bench.harness import DEVICE, DTYPE, base_callbacks, curve, emit
from tests.callbacks.rollout_faults import OF_ANY_ENGINE, OF_THE_MODEL
from tests.integration.conftest import ROOT

AT, LAST = 2, 7  # rollouts at which faults of the quickstart begin; those of a pretrained model all begin at AT
LATER = re.compile(
    "old adapter|lost update|noise missing|other noise|without the noise|of the rollout before"
)  # right in their first rollout, wrong after it
NOISY = (
    "noise missing",
    "other noise",
    "a quarter without the noise",
)  # faults that need noise, which stage 0 does not have
ROLLOUTS = 12  # of a run with a fault, from its beginning
COUNTED = ("stopped", "warned", "silent")  # not "failed": a run without enough memory says nothing about a check
COMPLETIONS = 8  # per prompt in runs of a pretrained model
ENGINES = {"transformers": "qerl_pl.rollout.hf.TransformersEngine", "vllm": "qerl_pl.rollout.vllm.VLLMEngine"}
GPU_MEMORY = "memory that a run may use on a GPU that others use, too"
OF_A_GAP = re.compile("the sampler's log-probabilities")
WARNINGS = re.compile(f"{OF_A_GAP.pattern}|more than chance explains|no group had a signal")


class RolloutFault(Callback):
    """Puts a fault into a run's engine when a rollout begins."""

    def __init__(self, fault: str, at: int = AT) -> None:
        self.fault = fault
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_index == self.at:
            pl_module.start_engine()  # a fault may change what the engine has only when it runs
            pl_module.loop.engine = (OF_ANY_ENGINE | OF_THE_MODEL)[self.fault](pl_module.loop.engine, pl_module.policy)


class StopAt(Callback):
    """Ends a run, with a checkpoint, before rollout number ``rollout``."""

    def __init__(self, rollout: int = AT) -> None:
        self.rollout = rollout

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        trainer.should_stop = pl_module.rollout_index == self.rollout


class Watch(Callback):
    """Records the number of a run's current rollout, the seconds of every training step, and the seconds of every
    check, by the name of the check's class."""

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


def every_check() -> list[dict[str, Any]]:
    """Return the callbacks of configs/base.yaml, with the test of other policies switched on."""
    callbacks = base_callbacks()
    for callback in callbacks:
        if callback["class_path"] == "callbacks.rollout_evidence.RolloutEvidence":
            callback["init_args"]["policy_tokens"] = callback["init_args"]["max_tokens"]
    return callbacks


def settings(
    base: Path, folder: Path, *, engine: str, noise: bool, seed: int, rollouts: int, fault: str | None
) -> dict[str, Any]:
    """Make the settings that differ from the quickstart's."""
    callbacks = every_check()
    if noise:
        callbacks += yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())["trainer"]["callbacks+"]
    # A block of vLLM's cache on a CPU holds more tokens than any sequence here, so prefixes would never be cached.
    blocks = {"init_args": {"block_size": 32}} if (engine, fault) == ("vllm", "stale prefixes") else {}
    return {
        "run_dir": str(folder / "run"),
        "seed_everything": seed,
        "trainer": {"callbacks": callbacks, "max_steps": rollouts, "limit_val_batches": 0},
        "model": {"base": str(base), "engine": {"class_path": ENGINES[engine]} | blocks},
    }


def outcome(
    base: Path, *, engine: str, noise: bool, seed: int, rollouts: int, fault: str | None, at: int = AT
) -> dict[str, Any]:
    """Train with configs/quickstart.yaml, with a fault from rollout ``at`` on or without one. Returns, as ``heard_in``
    does, whether the run stopped, warned or failed, in which rollout, and the message."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        changes = settings(base, folder, engine=engine, noise=noise, seed=seed, rollouts=rollouts, fault=fault)
        (folder / "changes.yaml").write_text(yaml.safe_dump(changes))
        command = ["fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), "-c", str(folder / "changes.yaml")]
        return heard_in(command, fault, at=at)


def heard_in(command: list[str], fault: str | None, *, at: int = AT) -> dict[str, Any]:
    """Run a command that trains, with a fault from rollout ``at`` on or without one. Returns under "outcome" whether
    the run stopped, warned, failed or did none of these ("silent"), under "rollout" in which rollout, and under "said"
    the message.

    A run that a check stops counts as stopped, even if it warned before. A run that ends by another error, such as too
    little memory, counts as failed. In a run with a fault, only the warning that log-probabilities of sampler and
    trainer differ counts: other warnings also come from healthy policies that learn.
    """
    words = WARNINGS if fault is None else OF_A_GAP
    if fault is not None:
        command = [*command, "--trainer.callbacks+=tests.correctness.faults.RolloutFault"]
        command += [f"--trainer.callbacks.fault={fault}", f"--trainer.callbacks.at={at}"]
    command = [*command, "--trainer.callbacks+=tests.correctness.faults.Watch"]
    heard: list[tuple[int, str]] = []

    def hear(message: Warning | str, *_: Any, **__: Any) -> None:
        if words.search(str(message)):
            heard.append((Watch.rollout, str(message)))

    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        try:
            train.main(command)
        except CheckFailed as error:
            heard = [*heard, (Watch.rollout, f"stopped: {error}")]
        except (RuntimeError, ValueError) as error:
            return {"outcome": "failed", "rollout": Watch.rollout, "said": f"{type(error).__name__}: {error}"[:400]}
    stops = [(rollout, said) for rollout, said in heard if said.startswith("stopped: ")]  # a warning may come before
    if not heard:
        return {"outcome": "silent", "rollout": None, "said": ""}
    rollout, said = (stops or heard)[0]
    outcome = "stopped" if stops else "warned"
    return {"outcome": outcome, "rollout": rollout, "said": said.removeprefix("stopped: ")[:400]}


def sources(problems: Path) -> dict[str, str]:
    """Return the paths of GSM8K's files as arguments of its data source: the training problems, ``problems``, and the
    test problems, gsm8k_test.jsonl in the same folder."""
    return {
        "train_path": str(problems.resolve()),
        "validation_path": str(problems.resolve().with_name("gsm8k_test.jsonl")),
    }


def of_chance(prompts: Sequence[Any], completions: Sequence[Completion]) -> list[float]:
    """Reward each completion by its checksum, scaled to [0, 1]. Such rewards differ within every group, so every update
    changes the policy, as faults of the adapter need to have an effect. They cannot be learned, so lengths and rewards
    of a healthy run do not drift."""
    return [zlib.crc32(row.text.encode()) / 2**32 for row in completions]


def aqn(num_stages: int) -> dict[str, Any]:
    """Make the configuration of the callback AdaptiveQuantizationNoise, the noise of the QeRL paper, with
    ``num_stages`` stages."""
    noise = {"sigma_start": 1e-2, "sigma_end": 5e-4, "num_stages": num_stages}
    return {"class_path": "callbacks.aqn.AdaptiveQuantizationNoise", "init_args": noise}


class OfRealModel:
    """Trains a pretrained model on GSM8K, all runs in this process. Runs with a fault resume from the checkpoint of a
    healthy run.

    Args:
        options: options of this module's command line.
        seed: seed of the runs.
        folder: folder for the runs.
    """

    def __init__(self, options: argparse.Namespace, seed: int, folder: Path) -> None:
        self.options, self.seed, self.folder = options, seed, folder
        self.rollouts = options.healthy or options.rollouts
        self.healthy: dict[bool, Path] = {}
        """Checkpoint of the healthy run without noise (False) and with it (True)."""

    def outcome(self, fault: str, *, noise: bool) -> dict[str, Any]:
        """Resume the healthy run with a fault. Returns, as ``heard_in`` does, whether the resumed run stopped, warned
        or failed, in which rollout, and the message; and under "evidence" the values of each rollout that the run
        logged under evidence/. The first call for each ``noise`` makes the healthy run.

        Raises:
            RuntimeError: a check stopped the healthy run, or it failed.
        """
        if noise not in self.healthy:
            stop = ["--trainer.callbacks+=tests.correctness.faults.StopAt"]
            result = heard_in([*self._command(f"healthy-{noise}", noise), *stop], None)
            if result["outcome"] in ("stopped", "failed"):
                raise RuntimeError(f"the healthy run of {self.options.model} did not end: {result}")
            self.healthy[noise] = self.folder / f"healthy-{noise}" / "checkpoints" / "last.ckpt"
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            command = [*self._command(f"{Path(name).name}/run", noise), "--ckpt_path", str(self.healthy[noise])]
            # A resumed engine starts with the adapter of AT, so the first update that can be lost is the one after it.
            result = heard_in(command, fault, at=AT + (fault == "lost update"))
            run = Path(name) / "run"
            curves = read_curves(run) if list(run.glob("events.*")) else {}
        return result | {"evidence": {tag: curve(curves, tag) for tag in curves if tag.startswith("evidence/")}}

    def without_fault(self, *, noise: bool) -> dict[str, Any]:
        """Do a run without a fault. Returns, as ``heard_in`` does, whether it stopped, warned or failed, in which
        rollout, and the message; and the seconds from ``shares``."""
        return heard_in(self._command(f"without-{noise}", noise), None) | shares()

    def _command(self, run: str, noise: bool) -> list[str]:
        options = self.options
        callbacks = every_check()
        if noise:
            callbacks += [aqn(self.rollouts + 1)]  # a stage per rollout; the first has no noise
        # Every run starts an engine of its own, which takes a minute with compilation and graphs.
        sizes = (
            {"max_num_seqs": 2 * options.prompts * COMPLETIONS, "kv_cache_bytes": 2**30, "enforce_eager": True}
            if options.engine == "vllm"
            else {}
        )
        changes = {
            "run_dir": str(self.folder / run),
            "seed_everything": self.seed,
            "trainer": {"callbacks": callbacks, "max_steps": self.rollouts + 1, "limit_val_batches": 0},
            "model": {
                "base": str(options.model.resolve()),
                "gpu_memory": options.gpu_memory,
                "dtype": str(DTYPE).removeprefix("torch."),
                "engine": {"class_path": ENGINES[options.engine], "init_args": sizes},
                "sampling": {"num_completions": COMPLETIONS, "max_tokens": options.tokens, "temperature": 1.0},
                # Faults that are about adapters have an effect only if every update changes the policy.
                "rewards": [{"name": "of_chance", "weight": 1.0, "reward": "tests.correctness.faults.of_chance"}],
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": options.lr, "weight_decay": 0.0}},
            },
            "data": {"batch_size": options.prompts, "source": {"init_args": sources(options.problems)}, "held_out": 64},
        }
        file = self.folder / f"changes-{noise}.yaml"
        file.write_text(yaml.safe_dump(changes))
        return ["fit", "-c", str(ROOT / "configs" / "tasks" / "gsm8k_verl.yaml"), "-c", str(file)]


def shares() -> dict[str, Any]:
    """Return the median seconds of a step, and of each check in it."""
    step = statistics.median(Watch.seconds["step"])
    checks = {name: values for name, values in Watch.seconds.items() if name != "step"}
    return {"step_s": step, "check_s": {name: statistics.median(values) for name, values in checks.items()}}


def main(argv: list[str] | None = None) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("models/tiny-0-nvfp4"), help="the quickstart's policy")
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    healthy = "healthy rollouts of each of five runs, or of one with --model"
    parser.add_argument("--healthy", type=int, default=0, metavar="N", help=healthy)
    parser.add_argument("--only", default="", help="faults, or numbers of healthy runs, that match this expression")
    parser.add_argument("--model", type=Path, help="folder of a pretrained model, instead of the quickstart's policy")
    parser.add_argument("--problems", type=Path, help="GSM8K's training problems, next to gsm8k_test.jsonl")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th fault, from the I-th on, I = 1 to N")
    parser.add_argument("--rollouts", type=int, default=6, help="last rollout of a run of a pretrained model")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per rollout of a pretrained model")
    parser.add_argument("--tokens", type=int, default=256, help="longest completion of a pretrained model")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of a pretrained model")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help=GPU_MEMORY)
    args = parser.parse_args(argv)
    sys.argv = sys.argv[:1]
    faults = OF_ANY_ENGINE | (OF_THE_MODEL if args.engine == "transformers" else {})
    faults = {name: fault for name, fault in faults.items() if re.search(args.only, name)}
    first, step = map(int, args.part.split("/"))
    faults = dict(islice(faults.items(), first - 1, None, step))
    if args.model:
        if args.problems is None:
            parser.error("--model needs --problems FILE, GSM8K's training problems as JSON lines")
        return of_real_model(args, tuple(faults))
    shape = {"completions": 256, "max_tokens": 48, "engine": args.engine}
    run = partial(outcome, args.base, engine=args.engine)
    for seed in range(5 if args.healthy else 0):
        if re.search(args.only, str(seed)):
            result = run(noise=bool(seed % 2), seed=seed, rollouts=args.healthy, fault=None)
            name = f"healthy, {'AQN' if seed % 2 else 'no noise'}, seed {seed}"
            emit(name, shape, "float32", rollouts=args.healthy, **result, **shares())
    for number, name in enumerate(() if args.healthy else faults):
        noise = name.startswith(NOISY)
        at = AT if noise else AT + number % (LAST + 1 - AT)
        result = run(noise=noise, seed=0, rollouts=30 if noise else at + ROLLOUTS, fault=name, at=at)
        emit(name, shape, "float32", appears=at + bool(LATER.search(name)), **result)
    return None


def of_real_model(args: argparse.Namespace, faults: Sequence[str]) -> None:
    """Put each of ``faults`` into a run of a pretrained model, and print a JSON line per fault and a last one with the
    number of faults that were found. With ``--healthy``, make one run without a fault instead."""
    shape = {"completions": args.prompts * COMPLETIONS, "max_tokens": args.tokens, "engine": args.engine}
    shape |= {"model": args.model.name}
    lines = []
    with tempfile.TemporaryDirectory() as name:
        seed = int(args.part.split("/")[0]) - 1
        runs = OfRealModel(args, seed, Path(name))
        if args.healthy:
            noise = bool(seed % 2)
            what = f"healthy, {'AQN' if noise else 'no noise'}, seed {seed}"
            emit(what, shape, str(DTYPE), rollouts=args.healthy + 1, on=DEVICE, **runs.without_fault(noise=noise))
            return
        for fault in faults:
            begin = time.perf_counter()
            try:
                result = runs.outcome(fault, noise=fault.startswith(NOISY))
            except AssertionError as error:  # a model without biases has none to change
                result = {"outcome": "not applicable", "rollout": None, "said": str(error)}
            lines.append({"appears": AT + bool(LATER.search(fault)), **result})
            emit(fault, shape, str(DTYPE), run_s=time.perf_counter() - begin, on=DEVICE, **lines[-1])
    stopped = [line for line in lines if line["outcome"] == "stopped"]
    at_once, within_two = (sum(line["rollout"] <= line["appears"] + more for line in stopped) for more in (0, 1))
    of, warned = (sum(line["outcome"] in names for line in lines) for names in (COUNTED, ("warned",)))
    counts = {"of": of, "stopped": len(stopped), "at_once": at_once, "within_two": within_two, "warned": warned}
    emit("faults found", shape, str(DTYPE), None, output=None, **counts)


if __name__ == "__main__":
    from tests.correctness import faults  # the module that runs import their callbacks from

    faults.main()
