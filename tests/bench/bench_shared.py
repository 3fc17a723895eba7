"""Measure rollouts of several processes that share a GPU, as runs of a study do: python -m tests.bench.bench_shared

Engines of the same small model, each in a process of its own, sample at the same time for some seconds: first one of
them, then more. A line has the sampled tokens per second of all processes together, so it shows how many runs a GPU is
worth sharing among. Everything is measured without NVIDIA's Multi-Process Service (MPS) and, where
``nvidia-cuda-mps-control`` is installed, with it. The line of one process also has ``busy``, the share of time in which
the GPU executes a kernel, and the kernels that take most of it; a share near 1 means that faster kernels would help,
and a small one that the process itself is too slow.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench import harness
from tests.bench.bench_rollout import NEW_TOKENS, PROMPT_TOKENS, checkpoint, policy_of
from tests.bench.harness import CUDA, RANK
from tests.random_models import MODELS

MPS = "nvidia-cuda-mps-control"
TOP = 12  # kernels that are named


def sample(engine: VLLMEngine, sequences: int, seconds: float, seed: int) -> float:
    """Sample rollouts of random prompts until ``seconds`` are over; returns the tokens per second."""
    generator, tokens, begin = torch.Generator().manual_seed(seed), 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds or not tokens:
        prompts = torch.randint(256, (sequences, PROMPT_TOKENS), generator=generator).tolist()
        groups = engine.generate(prompts, Sampling(1, NEW_TOKENS), seed=seed)
        tokens += sum(len(completion.tokens) for [completion] in groups)
        seed += 1
    return tokens / took if took else 0.0


def traced(engine: VLLMEngine, sequences: int) -> dict[str, Any]:
    """Return the share of time in which the GPU executes kernels, and the kernels that take most of this time as shares
    of it."""
    prompts = torch.randint(256, (sequences, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        begin = time.perf_counter()
        engine.generate(prompts, Sampling(1, NEW_TOKENS // 4), seed=0)
        took = time.perf_counter() - begin
    seconds, calls = Counter[str](), Counter[str]()
    for event in trace.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seconds[event.name[:60]] += event.device_time / 1e6
            calls[event.name[:60]] += 1
    busy = sum(seconds.values())
    kernels = {name: [round(part / busy, 4), calls[name]] for name, part in seconds.most_common(TOP)}
    return {"busy": busy / took, "kernels": kernels} if busy else {}


def child(args: argparse.Namespace) -> None:
    """Start an engine and, in each phase in which this process takes part, sample and write the speed to the folder."""
    policy = policy_of(args.path, args.size, args.base, RANK)
    engine = VLLMEngine(max_num_seqs=args.sequences, kv_cache_bytes=args.cache)
    engine.start(policy, max_model_len=PROMPT_TOKENS + NEW_TOKENS + 8)
    sample(engine, args.sequences, 0, 0)  # a warm-up
    for phase, number in enumerate(args.processes):
        (args.child / f"ready-{phase}-{args.place}").touch()
        while not (args.child / f"go-{phase}").exists():
            time.sleep(0.01)
        if args.place < number:
            speed = sample(engine, args.sequences, args.seconds, 1 + args.place)
            about = traced(engine, args.sequences) if number == 1 and args.trace else {}
            part = args.child / f"part-{phase}-{args.place}"
            part.write_text(json.dumps({"speed": speed, **about}))
            part.rename(args.child / f"speed-{phase}-{args.place}")  # the parent never reads a half-written file
    engine.close()


def measure(args: argparse.Namespace, path: Path, *, mps: bool) -> None:
    """Start all processes, let more and more of them sample at the same time, and print a line for each number."""
    with tempfile.TemporaryDirectory() as name:
        folder, most = Path(name), max(args.processes)
        words = ["--size", args.size, "--base", args.base, "--path", str(path), "--child", name]
        words += ["--sequences", str(args.sequences), "--seconds", str(args.seconds), "--cache", str(args.cache)]
        words += ["--processes", *map(str, args.processes), *(["--trace"] if CUDA and not mps else [])]
        command = [sys.executable, "-m", "tests.bench.bench_shared", *words, "--place"]
        children = [
            subprocess.Popen([*command, str(place)], env=harness.child_environment(), stdout=sys.stderr)
            for place in range(most)
        ]
        try:
            for phase, number in enumerate(args.processes):
                wait_for(children, folder, f"ready-{phase}-*", most)
                (folder / f"go-{phase}").touch()
                wait_for(children, folder, f"speed-{phase}-*", number)
                results = [json.loads(file.read_text()) for file in folder.glob(f"speed-{phase}-*")]
                speeds = sorted(result.pop("speed") for result in results)
                shape = {"model": args.size, "base": args.base, "sequences": args.sequences}
                harness.emit(
                    "rollout/shared",
                    {**shape, "processes": number, "mps": mps},
                    harness.DTYPE,
                    output=args.output,
                    tokens_per_s=sum(speeds),
                    of_each=speeds,
                    **(results[0] if number == 1 else {}),
                )
            for process in children:
                process.wait()
        finally:
            for process in children:
                process.kill()


def wait_for(children: list[subprocess.Popen[Any]], folder: Path, pattern: str, number: int) -> None:
    """Wait until a folder has ``number`` files that match a pattern."""
    while len(list(folder.glob(pattern))) < number:
        if any(process.poll() for process in children):
            raise SystemExit("an engine failed; its message is above")
        time.sleep(0.05)


@contextmanager
def service() -> Iterator[None]:
    """Start MPS, and end it with the context."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ.update(variables)
        subprocess.run([MPS, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([MPS], input="quit\n", text=True, check=False)
            for name in variables:
                del os.environ[name]


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = harness.parser_with(
        __doc__, "--output", "--folder", "--base", "--path", processes=[1, 2, 4, 6] if CUDA else [1, 2],
        sequences=256 if CUDA else 4, seconds=10.0 if CUDA else 0.1,
    )  # fmt: skip
    add = parser.add_argument
    add("--size", choices=MODELS, default="0.5B" if CUDA else "tiny")
    add("--cache", type=int, default=3 * 2**30 if CUDA else 2**22, help="bytes of each engine's KV cache")
    for name, kind in (("child", Path), ("place", int)):
        add(f"--{name}", type=kind, help=argparse.SUPPRESS)
    add("--trace", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(args)
        return
    path = checkpoint(args.folder, args.size, args.base)
    measure(args, path, mps=False)
    if CUDA and shutil.which(MPS):
        with service():
            measure(args, path, mps=True)


if __name__ == "__main__":
    main()
