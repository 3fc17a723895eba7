"""What the host does in a decoding step beside the model: python -m tests.bench.bench_host

Seconds a step that vLLM's scheduler and its output processor take, with vLLM's own scheduler and with ours, on the tiny
policy. These parts are the same on every platform, and how fast they are depends on the host alone. Each scheduler in a
process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench.bench_rollout import shell_policy
from tests.bench.checkpoints import written_apart
from tests.bench.harness import RANK, child_environment, emit

SCHEDULERS = {
    "vllm": "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    "ours": "qerl_pl.rollout.vllm.scheduler.RolloutScheduler",
}
PROMPT_TOKENS, NEW_TOKENS = 16, 64


def timed_method(owner: type, name: str, seconds: defaultdict[str, float]) -> None:
    """Add up what a method takes."""
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def run(*args: Any, **more: Any) -> Any:
        start = time.perf_counter()
        result = method(*args, **more)
        seconds[name] += time.perf_counter() - start
        return result

    setattr(owner, name, run)


def measure(who: str, base: str, sequences: list[int], repeats: int) -> None:
    """Print the lines of one scheduler."""
    from vllm import SamplingParams
    from vllm.v1.engine.output_processor import OutputProcessor

    engine = VLLMEngine(max_num_seqs=max(sequences))
    engine._arguments["scheduler_cls"] = SCHEDULERS[who]
    engine.start(shell_policy(base, "tiny", RANK, None), max_model_len=PROMPT_TOKENS + NEW_TOKENS + 8, seed=0)
    seconds = defaultdict[str, float](float)
    scheduler = engine._core().engine_core.scheduler
    for owner, name in (
        (type(scheduler), "schedule"),
        (type(scheduler), "update_from_output"),
        (OutputProcessor, "process_outputs"),
    ):
        timed_method(owner, name, seconds)
    generator = torch.Generator().manual_seed(0)
    for count in sequences:
        found: list[dict[str, float]] = []
        for repeat in range(1 + repeats):  # the first is a warm-up
            prompts = torch.randint(256, (count, PROMPT_TOKENS), generator=generator).tolist()
            params = [
                SamplingParams(
                    max_tokens=NEW_TOKENS,
                    ignore_eos=True,
                    seed=index,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                )
                for index in range(count)
            ]
            seconds.clear()
            engine._run(prompts, params, adapter=True)
            found += [{name: spent / NEW_TOKENS for name, spent in seconds.items()}] if repeat else []
        found.sort(key=lambda parts: sum(parts.values()))
        steps = [sum(parts.values()) for parts in found]
        emit("host/step", {"scheduler": who, "sequences": count}, "float32", steps, parts_s=found[len(found) // 2])
    engine.close()


def main(argv: list[str] | None = None) -> None:
    """One process for each scheduler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "qerl-bench")
    parser.add_argument("--child", choices=SCHEDULERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    base = written_apart(args.folder, "tiny", "bf16")
    if args.child:
        measure(args.child, str(base), args.sequences, args.repeats)
        return
    for who in SCHEDULERS:
        command = [sys.executable, "-m", "tests.bench.bench_host", "--child", who, "--folder", str(args.folder)]
        command += ["--repeats", str(args.repeats), "--sequences", *map(str, args.sequences)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=child_environment())
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith('{"name"')), flush=True)


if __name__ == "__main__":
    main()
