"""Parts that benchmarks share: options, timing in turns, processes, result lines."""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from qerl_pl.common.program import use_expandable_segments
from qerl_pl.hopper import driver
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.results.curves import Curve
from qerl_pl.rollout.vllm import setup as vllm_setup
from tests.random_models import MODELS

use_expandable_segments()  # as the program does
ROOT = Path(__file__).parents[2]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32  # of policies that a vLLM engine samples from
RANK = 32
GIB = 2**30
PHASES = ("sync", "rollout", "reward", "check", "logprob", "train", "between")  # of a step, as runs log them
DECODING_KERNELS = ("auto", "native", "humming")
FORMATS = ("nvfp4", "bf16")
DIGITS = 5  # of the values of curves in result lines
OPTIONS: dict[str, dict[str, Any]] = {  # that several benchmarks have
    "--size": {"choices": MODELS, "default": "7B" if CUDA else "tiny", "help": "of the model"},
    "--folder": {"type": Path, "default": Path(tempfile.gettempdir()) / "qerl-bench", "help": "of random checkpoints"},
    "--base": {"choices": FORMATS, "default": "nvfp4", "help": "format of the base's weights"},
    "--output": {"type": Path, "help": "file to append the lines to; what it has already is not measured again"},
    "--eager": {"action": "store_true", "help": "vLLM without CUDA graphs"},
    "--micro-batch-tokens": {"type": int, "help": "default: by the memory plan"},
    "--path": {"help": argparse.SUPPRESS},  # checkpoint's folder, for a process that measures one engine
}


def parser_with(description: str | None, *options: str, **defaults: Any) -> argparse.ArgumentParser:
    """Make a parser with the options of ``OPTIONS`` that ``options`` names, and with one option per keyword argument.
    The value of the keyword argument is the option's default and decides its type; a list makes an option that takes
    several values of the type of its elements."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in options:
        parser.add_argument(name, **OPTIONS[name])
    for name, default in defaults.items():
        several = isinstance(default, list)
        kind, number = type(default[0] if several else default), "*" if several else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, nargs=number)
    return parser


def timed(
    variants: Mapping[str, Callable[[], object]], *, repeats: int, inner: int = 1, warmups: int = 2
) -> dict[str, list[float]]:
    """Time each variant several times; returns the seconds per run by the variant's name, sorted. The variants take
    turns, so that changes of the machine's speed affect all of them.

    Args:
        variants: name -> function to time.
        repeats: samples per variant.
        inner: runs per sample; above 1 the host may run ahead of the device, as it does in training.
        warmups: runs before the first sample.
    """
    for run in variants.values():
        for _ in range(warmups):
            run()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            start = now()
            for _ in range(inner):
                run()
            samples[name].append((now() - start) / inner)
    return {name: sorted(seconds) for name, seconds in samples.items()}


def now() -> float:
    """Read the clock, in seconds, after all work of the GPU is finished."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def native_kernels_run(benchmark: str) -> bool:
    """Return whether this machine can run this project's CUDA kernels. If not, print that the benchmark measures
    nothing."""
    available = driver.is_available(torch.device(DEVICE))
    if not available:
        needed = "a GPU of compute capability 9.0 and cuda-bindings"
        print(f"{benchmark}: nothing is measured without {needed}", file=sys.stderr)
    return available


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Capture a function's kernel launches as one CUDA graph, and return a function that replays the graph. The
    function is called once before, so that its kernels are compiled. Without a GPU it is returned unchanged."""
    if not CUDA:
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def reset_peak() -> int:
    """Reset ``torch.cuda.max_memory_allocated``; returns the bytes that are allocated now, or 0 without a GPU."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Divide the norm of the difference by the norm of ``exact``, in fp64."""
    return ((value.double() - exact.double()).norm() / exact.double().norm()).item()


def check(errors: Iterable[tuple[str, float, float]]) -> None:
    """Check that errors are within their bounds. If in any triple (what was computed, error, bound) the error exceeds
    the bound or is NaN, the program ends with a message that names all such triples, so no result is printed."""
    wrong = [
        f"{what} is off by {error:.1e}, more than {bound:.1e}" for what, error, bound in errors if not error <= bound
    ]
    if wrong:
        raise SystemExit("no result, the check is red: " + "; ".join(wrong))


def check_finite(*scores: Sequence[float]) -> None:
    """End the program if an engine returned a score that is not finite."""
    finite = torch.tensor([value for row in scores for value in row]).isfinite().all()
    check([("the number of scores that are not finite", float(not finite), 0)])


def decoding_kernel(
    wanted: Literal["auto", "native", "humming"], base: str, dtype: torch.dtype
) -> Literal["native", "humming"]:
    """Return which kernels an engine decodes with if its setting is ``wanted``: this project's ("native") or vLLM's
    ("humming"). This project has kernels for "nvfp4" bases only."""
    return vllm_setup.decoding_kernel(wanted, NVFP4, dtype) if base == "nvfp4" else "humming"


def base_callbacks() -> list[dict[str, Any]]:
    """Read the callbacks of configs/base.yaml."""
    return yaml.safe_load((ROOT / "configs" / "base.yaml").read_text())["trainer"]["callbacks"]


def fit_command(folder: Path, settings: Mapping[str, Any], *files: Path) -> list[str]:
    """Write ``settings`` to a configuration file in a folder; returns the command that trains with configs/base.yaml,
    then ``files``, then this file, of which a later one overrides earlier ones."""
    config = folder / "bench.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    return [sys.executable, "train.py", "fit", *(word for file in (*files, config) for word in ("-c", str(file)))]


def task_file(name: str) -> Path:
    """Return the path of a file of configs/tasks."""
    return ROOT / "configs" / "tasks" / f"{name}.yaml"


def child_environment() -> dict[str, str]:
    """Return the environment variables for a program of this repository that a benchmark starts in the current folder:
    PYTHONPATH also has this folder, so that the program imports the same modules as the benchmark."""
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([".", path] if path else ["."])}


def run_apart(
    module: str, arguments: Sequence[str], *, output: Path | None = None, variables: Mapping[str, str] | None = None
) -> None:
    """Run a benchmark in a process of its own. The JSON lines of its results are printed and appended to ``output``;
    everything else that it prints goes to stderr.

    Args:
        module: name of the benchmark in tests/bench.
        arguments: words of its command line.
        output: file to which the JSON lines are appended; None: they are only printed.
        variables: environment variables, in addition to the present ones.

    Raises:
        subprocess.CalledProcessError: the benchmark failed.
    """
    command = [sys.executable, "-m", f"tests.bench.{module}", *arguments]
    environment = {**child_environment(), **(variables or {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            if line.startswith('{"name"'):
                keep(line.strip(), output)
            else:
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def emit(
    name: str,
    shape: Mapping[str, object],
    dtype: str | torch.dtype,
    seconds: list[float] | None = None,
    *,
    output: Path | None = None,
    **values: Any,
) -> None:
    """Print one result as a JSON line, and append it to a file."""
    timing = {"median_s": median(seconds), "spread_s": [seconds[0], seconds[-1]]} if seconds else {}
    about = {"name": name, "shape": shape, "dtype": str(dtype).removeprefix("torch.")}
    keep(json.dumps({**about, **timing, **values, **_origin()}), output)


def curve(curves: Mapping[str, Curve], tag: str) -> list[float]:
    """Return a curve's values with ``DIGITS`` digits; empty if nothing was logged."""
    return [float(f"{value:.{DIGITS}g}") for value in curves[tag].values] if tag in curves else []


def keep(line: str, output: Path | None) -> None:
    """Print a line, and append it to a file."""
    print(line, flush=True)
    if output:
        with output.open("a") as file:
            file.write(line + "\n")


def kept(output: Path | None) -> list[dict[str, Any]]:
    """Read the JSON lines of a file of results; an empty list if there is no such file."""
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
