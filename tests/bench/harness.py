"""Parts that benchmarks share: options, timing in turns, processes, result lines."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from qerl_pl.common.program import use_expandable_segments
from qerl_pl.kernels import hopper
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.vllm import setup as vllm_setup
from tests.random_models import SIZES

use_expandable_segments()  # as the program does
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32  # of policies that a vLLM engine samples from


RANK = 32
PHASES = ("sync", "rollout", "reward", "check", "logprob", "train", "between")  # of a step, as runs log them
DECODING_KERNELS = ("auto", "native", "humming")
OPTIONS: dict[str, dict[str, Any]] = {
    "--size": {"choices": SIZES, "default": "7B" if CUDA else "tiny", "help": "of the model"},
    "--folder": {"type": Path, "default": Path(tempfile.gettempdir()) / "qerl-bench", "help": "of random checkpoints"},
    "--output": {"type": Path, "help": "file to append the lines to; what it has already is not measured again"},
    "--eager": {"action": "store_true", "help": "vLLM without CUDA graphs"},
    "--micro-batch-tokens": {"type": int, "help": "default: by the memory plan"},
}
"""Options that several benchmarks have."""


def parser_with(description: str | None, *options: str) -> argparse.ArgumentParser:
    """Make a parser that knows some of ``OPTIONS``; a benchmark adds its own ones."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in options:
        parser.add_argument(name, **OPTIONS[name])
    return parser


def timed(
    variants: Mapping[str, Callable[[], object]], *, repeats: int, inner: int = 1, warmups: int = 2
) -> dict[str, list[float]]:
    """Measure the seconds of each variant, sorted; they take turns, so that changes of the machine affect all of them.

    Args:
        variants: what to run.
        repeats: samples per variant.
        inner: runs per sample; above 1 the host may run ahead of the device, as it does in training.
        warmups: runs before the first sample.
    """
    for run in variants.values():
        for _ in range(warmups):
            run()
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            start = now()
            for _ in range(inner):
                run()
            found[name].append((now() - start) / inner)
    return {name: sorted(seconds) for name, seconds in found.items()}


def now() -> float:
    """Read the clock, in seconds, after all work of the GPU is finished."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def native_kernels_run(benchmark: str) -> bool:
    """Return whether this machine runs the native kernels; if it does not, print that a benchmark measures nothing."""
    if hopper.is_available(torch.device(DEVICE)):
        return True
    print(
        f"{benchmark}: nothing is measured without a GPU of compute capability 9.0 and cuda-bindings", file=sys.stderr
    )
    return False


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Capture a function's launches as one CUDA graph, after a call that compiles it; on a CPU, return the function."""
    if not CUDA:
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def device_seconds(run: Callable[[], object], *, times: int = 5) -> float | None:
    """Measure the seconds that the kernels of one run take, without the gaps between launches; None without a GPU."""
    if not CUDA:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / times * 1e-6


def reset_peak() -> int:
    """Let ``torch.cuda.max_memory_allocated`` start anew; returns the bytes that are allocated now, 0 without a GPU."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Divide the norm of the difference by the norm of ``exact``, in fp64."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def check(errors: Iterable[tuple[str, float, float]]) -> None:
    """Refuse to go on where an error exceeds its bound or is NaN: (what, error, bound).

    Raises:
        SystemExit: names every error.
    """
    wrong = [
        f"{what} is off by {error:.1e}, more than {bound:.1e}" for what, error, bound in errors if not error <= bound
    ]
    if wrong:
        raise SystemExit("no result, the check is red: " + "; ".join(wrong))


def decoding_kernel(
    wanted: Literal["auto", "native", "humming"], base: str, dtype: torch.dtype
) -> Literal["native", "humming"]:
    """Return the kernel that an engine decodes with, by its option; bases other than "nvfp4" have vLLM's kernels."""
    return vllm_setup.decoding_kernel(wanted, NVFP4, dtype) if base == "nvfp4" else "humming"


def child_environment() -> dict[str, str]:
    """Environment of a program of this repository that a benchmark starts: it finds the same modules."""
    found = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([".", found] if found else ["."])}


def run_apart(module: str, arguments: Sequence[str], **variables: str) -> Iterator[str]:
    """Run a benchmark in a process of its own; yields each line of results, the rest goes to stderr.

    Args:
        module: its name in tests/bench.
        arguments: of its command line.
        variables: of its environment, beside the present ones.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", f"tests.bench.{module}", *arguments]
    environment = child_environment() | variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            if line.startswith('{"name"'):
                yield line.strip()
            else:
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def emit(
    name: str,
    shape: Mapping[str, object],
    dtype: str,
    seconds: list[float] | None = None,
    *,
    output: Path | None = None,
    **more: Any,
) -> None:
    """Print one result as a JSON line, and append it to a file."""
    timing = {"median_s": median(seconds), "spread_s": [seconds[0], seconds[-1]]} if seconds else {}
    keep(json.dumps({"name": name, "shape": shape, "dtype": dtype, **timing, **more, **_origin()}), output)


def keep(line: str, output: Path | None) -> None:
    """Print a line, and append it to a file."""
    print(line, flush=True)
    if output:
        with output.open("a") as file:
            file.write(line + "\n")


def kept(output: Path | None) -> list[dict[str, Any]]:
    """Read the lines of a file of results; none where there is no file."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output and output.exists() else []


@cache
def _origin() -> dict[str, str]:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "commit": os.environ.get("BENCH_COMMIT") or run.stdout.strip() or "unknown",  # a copy may have another .git
    }
