"""Time whole GRPO steps through train.py, each run in a process of its own: python -m tests.bench.bench_grpo

The setting is QeRL's: prompts of 256 tokens, groups of 8, gradient checkpointing, and completions of the greatest
allowed length, because random weights hardly ever end a completion. Rewards are drawn at random, so that nearly every
group of completions has different rewards and thus a gradient. With ``--cap GIB`` another process holds all but this
much of the GPU's memory, to imitate a smaller GPU; a run that does not fit is a result, too. With ``--mean``
completions have realistic lengths: the limit of each is drawn once from a lognormal distribution with this mean, cut at
``--completion``, and is the same for every base and setting. Steps like those on GSM8K are ``--prompts 16 --mean 250
--completion 4096 --updates 4``, and like those on Big-Math ``--prompts 8 --group 16 --mean 2000 --completion 8192``.
``--plain`` trains without fused kernels: every block is recomputed, by transformers' sequences of kernels.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple

import psutil
import torch
from lightning.pytorch import Callback

from qerl_pl.common.checks import EARLY
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.memory.device import used_bytes
from qerl_pl.results.curves import Curve, read_curves
from tests.bench import harness
from tests.bench.harness import CUDA, DEVICE, DTYPE, GIB, RANK
from tests.bench.together import is_together
from tests.random_checkpoints import written_apart
from tests.random_models import MODELS

PROMPT_TOKENS, GROUP, STAGES = 256, 8, 3
PIPE_S = 5.0  # wait for a killed process's output, which its orphaned children may keep open
LIMITS = {"callbacks.canary.SyncCanary": "tolerance", "callbacks.rollout_evidence.RolloutEvidence": "max_gap"}
CHECKS_PERIOD = 8  # rollouts; configs/base.yaml
LAST_ERRORS, TOO_SMALL = 60, ("out of memory", "of the GPU's")  # the plan's refusal is the second


def coin(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
    """Reward each completion by 0 or 1, the last bit of a hash of its tokens."""
    return [float(zlib.crc32(str(completion.tokens).encode()) & 1) for completion in completions]


def lengths(mean: int, longest: int, number: int) -> list[int]:
    """Draw for each of ``number`` completions the number of tokens at which it is cut: from 8 to ``longest``, lognormal
    with sigma 0.8, and scaled so that the mean of the clamped numbers is ``mean``. Equal arguments give equal
    numbers."""
    drawn = torch.randn(number, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(0.8).exp()
    for _ in range(50):  # cutting the tail off lowers the mean
        drawn = (drawn * mean / drawn.clamp(8, longest).mean()).clamp(min=8)
    return drawn.clamp(8, longest).round().int().tolist()


class Lengths(Callback):
    """Gives each completion of a training rollout its own limit."""

    def __init__(self, mean: int) -> None:
        self._mean = mean

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        from qerl_pl.rollout.vllm import requests

        whole = requests.sampling_params

        def limited(sampling: Any, seeds: Iterable[int], end_tokens: list[int]) -> list[Any]:
            rows = whole(sampling, seeds, end_tokens)
            if sampling == pl_module.sampling:
                for row, limit in zip(rows, lengths(self._mean, sampling.max_tokens, len(rows)), strict=True):
                    row.max_tokens = limit
            return rows

        requests.sampling_params = limited


def taught(args: argparse.Namespace) -> dict[str, Any]:
    """Write a teacher with random NVFP4 weights, and return the settings with which the policy learns from the
    probabilities that this teacher gives to all tokens of the vocabulary (reverse KL)."""
    base = str(written_apart(args.folder, args.teacher, "nvfp4"))
    return {"teacher": {"base": base}, "objective": {"teacher": {"divergence": "reverse"}}}


def model_settings(args: argparse.Namespace, base: str, engine: dict[str, Any], reward: str) -> dict[str, Any]:
    """Make the settings ``model`` of a run's configuration. ``engine`` has the arguments of the vLLM engine, and
    ``reward`` is the import path of a reward."""
    return {
        "base": base,
        "dtype": str(DTYPE).removeprefix("torch."),
        "engine": {"class_path": "qerl_pl.rollout.vllm.VLLMEngine", "init_args": engine},
        "rewards": [{"name": reward.rpartition(".")[2], "weight": 1.0, "reward": reward}],
        "sampling": {"num_completions": args.group, "max_tokens": args.completion, "temperature": 1.0},
        "lora": {"rank": RANK, "alpha": RANK},
        "updates_per_rollout": args.updates,
        "gradient_checkpointing": "blocks" if args.plain else "auto",
        "fused_elementwise": False if args.plain else "auto",
        "micro_batch_tokens": args.micro_batch_tokens,
    }


def settings(args: argparse.Namespace, base: str, folder: Path) -> dict[str, Any]:
    """Make the settings that differ from configs/base.yaml."""
    rows = folder / "problems.jsonl"
    problems = [{"question": f"{index:03} " + "what is it " * 20, "answer": "1"} for index in range(32)]
    rows.write_text("\n".join(json.dumps(problem) for problem in problems))
    engine = {"sleep_level": args.sleep_level, "max_num_seqs": args.group * args.prompts, "enforce_eager": args.eager}
    engine["decoding_kernel"] = harness.decoding_kernel(args.decoding_kernel, args.base, DTYPE)
    noise = {"sigma_start": 1e-2, "sigma_end": 5e-4, "num_stages": STAGES}
    callbacks = harness.base_callbacks()
    for callback in callbacks:
        if args.tolerance and (name := LIMITS.get(callback["class_path"])):
            callback["init_args"][name] = args.tolerance
    if args.mean:
        callbacks.append({"class_path": "tests.bench.bench_grpo.Lengths", "init_args": {"mean": args.mean}})
    if args.aqn:
        callbacks.append({"class_path": "callbacks.aqn.AdaptiveQuantizationNoise", "init_args": noise})
    if is_together():
        callbacks.append({"class_path": "tests.bench.together.Turn"})
    model = model_settings(args, base, engine, "tests.bench.bench_grpo.coin") | (taught(args) if args.teacher else {})
    source = {"train_path": str(rows), "validation_share": 0.1}
    return {
        "run_dir": str(folder / "run"),
        "trainer": {"max_steps": args.steps * args.updates, "limit_val_batches": 0, "callbacks": callbacks},
        "model": model | {"gpu_memory": args.cap or args.memory},
        "data": {
            "source": {"class_path": "datamodules.table.Table", "init_args": source},
            "batch_size": args.prompts,
            "max_prompt_tokens": PROMPT_TOKENS,
        },
    }


def run(args: argparse.Namespace, base: str, folder: Path) -> None:
    """Train in a process of its own, and print its result as a JSON line. A run that needs more memory than the GPU has
    gets a line, too.

    Raises:
        SystemExit: the run failed for another reason than too little memory, or ended before the second step.
    """
    command = harness.fit_command(folder, settings(args, base, folder))
    start, errors = time.perf_counter(), deque[str](maxlen=LAST_ERRORS)
    with capped(args.cap), peak_memory() as peak:
        process = subprocess.Popen(
            command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, env=harness.child_environment()
        )
        assert process.stderr is not None
        reader = threading.Thread(target=pass_on, args=(process.stderr, errors), daemon=True)
        reader.start()
        usage = follow(process, args.limit)
        reader.join(timeout=PIPE_S)
    total_s = time.perf_counter() - start
    if process.returncode > 0:
        reason = memory_reason(errors) if args.cap else None
        if reason is None:
            raise SystemExit(f"the run ended with {process.returncode}")
        harness.emit("grpo/too-small", shape_of(args), "bfloat16", output=args.output, reason=reason)
        return
    curves = read_curves(folder / "run")
    warm_up = 1 if args.steps > 1 else 0
    times = {name: curve.values[warm_up:] for name, curve in curves.items() if name.startswith("time/")}
    phases = {phase: times[f"time/{phase}_s"] for phase in ("teacher", *harness.PHASES) if f"time/{phase}_s" in times}
    steps = times.get("time/step_s", [])
    if not steps or not (process.returncode == 0 or args.limit):
        raise SystemExit(f"the run ended with {process.returncode} and {len(steps)} steps after {warm_up} of warm-up")
    memory = {name.split("/")[1]: max(curve.values) for name, curve in curves.items() if name.startswith("memory/")}
    if is_together():  # what the GPU's driver counts is everybody's
        memory, peak = {}, {"bytes": None}
    harness.emit(
        "recipe/step" if args.mean else "grpo/step",
        shape_of(args),
        "bfloat16",
        sorted(steps),
        output=args.output,
        phases_s={phase: median(values) for phase, values in phases.items()},
        check_share=check_share(curves),
        tokens=curves["rollout/completion_tokens"].values[-1] * args.group * args.prompts,
        gap=curves["gap/mean_abs"].values[-1],
        peak_bytes=peak["bytes"],
        logged=memory,
        finished=process.returncode == 0,
        steps_done=len(steps) + warm_up,
        quarters=quarters(curves, usage) if len(steps) >= 40 else None,
        total_s=total_s,
    )


def pass_on(stream: IO[str], last: deque[str]) -> None:
    """Copy the lines of a stream to stderr, and keep the most recent ones in ``last``."""
    for line in stream:
        sys.stderr.write(line)
        last.append(line.strip())


def memory_reason(errors: Iterable[str]) -> str | None:
    """Return the last error among the lines of a failed run's output if this error says that the GPU's memory is too
    small; otherwise None."""
    raised = [line for line in errors if re.match(r"(\[rank\d+\]: )?[\w.]*Error: ", line)]
    return raised[-1] if raised and any(word in raised[-1] for word in TOO_SMALL) else None


class Usage(NamedTuple):
    """Resources in use while a run is being watched: GPU memory of all programs, and the run's own memory and open
    files. ``time`` is in seconds since the epoch."""

    time: float
    gpu_bytes: int  # taken on the GPU by all processes
    host_bytes: int  # resident, pages of mapped files included
    files: int  # open file handles


def follow(process: subprocess.Popen[Any], limit_s: float | None) -> list[Usage]:
    """Wait until a process ends, and kill it after ``limit_s`` seconds (None: never). Returns a sample of the resources
    in use for every half second."""
    start, samples = time.perf_counter(), []
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        now = time.perf_counter()
        with suppress(psutil.Error):  # it has just ended
            gpu = used_bytes(torch.device(DEVICE)) if CUDA else 0
            samples.append(Usage(time.time(), gpu, watched.memory_info().rss, watched.num_fds()))
        if limit_s is not None and now - start > limit_s:
            process.kill()
        time.sleep(0.5)
    return samples


def check_share(curves: Mapping[str, Curve]) -> float | None:
    """Compute which share of the time of training is spent on the callbacks that check a run. Every check runs in each
    of the first ``EARLY`` steps and later only once in ``CHECKS_PERIOD`` steps, so the first ``EARLY`` steps and an
    incomplete period at the end are left out. None if there is no whole period."""
    check, step = (curves[f"time/{name}_s"].values[EARLY:] for name in ("check", "step"))
    whole = len(step) // CHECKS_PERIOD * CHECKS_PERIOD
    return sum(check[:whole]) / sum(step[:whole]) if whole else None


def quarters(curves: Mapping[str, Curve], usage: Sequence[Usage]) -> dict[str, list[float]]:
    """Compute the median seconds per step and the largest use of each resource in each quarter of a run, to show
    whether a long run becomes slower or larger. The first step is left out."""
    steps = curves["time/step_s"]
    edges = [round(part * (len(steps.times) - 1) / 4) for part in range(5)]
    parts = [
        [use for use in usage if steps.times[first] <= use.time <= steps.times[last]] for first, last in pairwise(edges)
    ]
    return {
        "step_s": [median(steps.values[1:][first:last]) for first, last in pairwise(edges)],
        **{
            name: [max(getattr(use, name) for use in part) for part in parts]
            for name in ("gpu_bytes", "host_bytes", "files")
        },
    }


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """Make the settings that distinguish the lines of results."""
    names = "size", "base", "aqn", "prompts", "completion", "cap", "memory", "sleep_level", "steps"
    names += "micro_batch_tokens", "eager"
    if args.mean:
        names += "group", "mean", "updates", "plain"
    if args.teacher:
        names += ("teacher",)
    shape = {"model" if name == "size" else name: getattr(args, name) for name in names}
    return {**shape, "decoding_kernel": harness.decoding_kernel(args.decoding_kernel, args.base, DTYPE)}


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Read the memory that all processes use on the GPU every 5 ms. The yielded dictionary has under "bytes" by how
    much this memory has grown at most since the start."""
    peak = {"bytes": 0}
    if not CUDA:
        yield peak
        return
    before, stop = torch.cuda.mem_get_info()[0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            peak["bytes"] = max(peak["bytes"], before - torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


@contextmanager
def capped(gib: float | None) -> Iterator[None]:
    """Leave other processes ``gib`` GiB of the GPU's memory, by holding the rest."""
    ballast = None
    if gib and CUDA:
        ballast = torch.empty(torch.cuda.mem_get_info()[0] - int(gib * GIB), dtype=torch.uint8, device=DEVICE)
    yield
    del ballast
    torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> None:
    """Do one run of train.py, unless ``--output`` has its line."""
    parser = harness.parser_with(
        __doc__, "--size", "--base", "--folder", "--output", "--eager", "--micro-batch-tokens", prompts=1, group=GROUP
    )
    add = parser.add_argument
    add("--aqn", action="store_true", help="noise on the norms of rollouts")
    add("--completion", type=int, default=2048 if CUDA else 32)
    add("--mean", type=int, help="mean length of completions that are as different as a recipe's")
    add("--updates", type=int, default=1, help="passes over each rollout")
    add("--plain", action="store_true", help="recompute every block, without fused kernels")
    add("--teacher", choices=MODELS, help="size of a teacher in NVFP4 (default: none)")
    add("--steps", type=int, default=3, help="rollouts; of several, the first is a warm-up")
    add("--cap", type=float, help="GiB of the GPU that the run gets")
    add("--memory", type=float, help="GiB that the memory plan assumes; the run may take more")
    add("--sleep-level", type=int, default=0)
    add("--decoding-kernel", default="auto", choices=harness.DECODING_KERNELS, help="of an NVFP4 base")
    add("--tolerance", type=float, help="nats; random weights of 80 layers differ by more than 0.3")
    add("--limit", type=float, help="seconds after which the run is ended")
    args = parser.parse_args(argv)
    if args.aqn and args.steps < STAGES:
        parser.error(f"--aqn has {STAGES} stages of noise: expected at least so many --steps, not {args.steps}")
    if any(line["shape"] == shape_of(args) for line in harness.kept(args.output)):
        return
    base = written_apart(args.folder, args.size, args.base)
    with tempfile.TemporaryDirectory() as folder:
        run(args, str(base), Path(folder))


if __name__ == "__main__":
    main()
