"""Whole GRPO steps of TRL with vLLM in its process, beside those of bench_grpo: python -m tests.bench.bench_trl

The setting is bench_grpo's on a bf16 base with PEFT's LoRA; what is not given here is as TRL has it by default. For
instance it merges the adapter and loads all weights into vLLM before each rollout (``sync``), and it computes
log-probabilities once more before the update (``logprob``). ``train`` is what the other phases leave of a step. The end
token does not end a completion. A line is written after each step in place of the one before: ``measured`` is how many
steps it has beside the first, and a run that was stopped is measured again. Nothing is measured where TRL is missing:
``pip install trl`` (1.16; it warns of vLLM 0.32, and runs).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from qerl_pl.common.stopwatch import Stopwatch
from qerl_pl.common.types import Completion
from qerl_pl.memory.device import others_bytes, used_bytes
from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.rollout.vllm.setup import prepare_environment
from tests.bench.bench_grpo import DEVICE, GROUP, PROMPT_TOKENS, coin, peak_memory
from tests.bench.checkpoints import written_apart
from tests.bench.harness import RANK, emit

NAME = "grpo/trl"
PACKAGES = ("trl", "vllm", "transformers", "peft")


def reward(completion_ids: list[list[int]], **others: Any) -> list[float | None]:
    """bench_grpo's, with TRL's arguments."""
    del others
    return coin([], [Completion(tuple(tokens), (), False) for tokens in completion_ids])


def settings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Of TRL's GRPOConfig, where they are not its defaults."""
    rows = GROUP * args.prompts
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": args.utilization,
        "vllm_max_model_length": PROMPT_TOKENS + args.completion,
        "vllm_enable_sleep_mode": args.sleep,
        "generation_kwargs": {"ignore_eos": True},
    }
    return {
        "output_dir": str(folder),
        "model_init_kwargs": {"dtype": "bfloat16"},
        "bf16": True,
        "use_cpu": DEVICE == "cpu",
        "gradient_checkpointing": True,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.rows,
        "gradient_accumulation_steps": rows // args.rows,
        "num_generations": GROUP,
        "max_completion_length": args.completion,
        "temperature": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **({"generation_kwargs": {"min_new_tokens": args.completion}} if args.no_vllm else vllm),
    }


def run(args: argparse.Namespace, base: str) -> None:
    """Train, and print a line after each step."""
    warnings.filterwarnings("ignore")
    prepare_environment()
    os.environ["VLLM_PLUGINS"] = ""  # vLLM as it comes, without the kernels of this repository
    trl: Any = importlib.import_module("trl")  # optional
    if DEVICE == "cpu":  # or vLLM gives the weights to oneDNN, and new ones cannot be loaded
        ops: Any = importlib.import_module("vllm._custom_ops")
        ops._supports_onednn = False
    questions = [f"{index:03} " + "what is it " * 20 for index in range(32)]
    with tempfile.TemporaryDirectory() as name, peak_memory() as peak:
        lines = Lines(args, peak)
        trainer = trl.GRPOTrainer(
            model=base,
            reward_funcs=reward,
            args=trl.GRPOConfig(**settings(args, Path(name))),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": each}]} for each in questions]),
            peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"),
            callbacks=[lines],
        )
        lines.time_phases(trainer)
        trainer.train()


class Lines(TrainerCallback):
    """Times steps and their phases, and prints a line of those so far after each."""

    def __init__(self, args: argparse.Namespace, peak: Mapping[str, int]) -> None:
        self._args, self._peak, self._began = args, peak, now()
        self._others = others_bytes(torch.device(DEVICE)) if DEVICE == "cuda" else 0
        self._watch = Stopwatch()
        self._step_began = 0.0
        self._steps: list[float] = []
        self._phases: list[dict[str, float]] = []

    def time_phases(self, trainer: Any) -> None:
        """Put a clock around the methods of a trainer that are phases."""
        if not self._args.no_vllm:
            self._time("sync", trainer.vllm_generation, "sync_weights")
        self._time("rollout", trainer, "_generate_single_turn")  # it calls sync_weights
        self._time("reward", trainer, "_calculate_rewards")
        self._time("logprob", trainer, "_get_per_token_logps_and_entropies")

    def _time(self, phase: str, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if phase == "logprob" and torch.is_grad_enabled():  # the update's own forward pass
                return method(*args, **kwargs)
            with self._watch.phase(phase):
                return method(*args, **kwargs)

        setattr(owner, name, timed)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._watch.seconds.clear()
        self._step_began = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        step = now() - self._step_began
        phases = {phase: self._watch.seconds[phase] for phase in ("sync", "rollout", "reward", "logprob")}
        phases["rollout"] -= phases["sync"]
        self._steps.append(step)
        self._phases.append({**phases, "train": step - sum(phases.values())})

    def on_log(self, *args: Any, logs: Mapping[str, float], **kwargs: Any) -> None:
        if "completions/mean_length" not in logs:  # the summary at the end
            return
        timed = self._phases[1:] or self._phases
        used = used_bytes(torch.device(DEVICE)) - self._others if DEVICE == "cuda" else 0
        emit(
            NAME,
            shape_of(self._args),
            "bfloat16",
            sorted(self._steps[1:]),
            measured=len(self._steps) - 1,
            first_s=self._steps[0],
            phases_s={phase: statistics.median(phases[phase] for phases in timed) for phase in timed[0]},
            tokens=logs["completions/mean_length"] * GROUP * self._args.prompts,
            gap=logs.get("sampling/sampling_logp_difference/mean"),
            peak_bytes=self._peak["bytes"],
            logged={"peak_gib": max(used, self._peak["bytes"]) / 2**30},
            total_s=now() - self._began,
            versions={name: importlib.import_module(name).__version__ for name in PACKAGES},
        )


def now() -> float:
    """Seconds, once the GPU has done what it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """What tells a line from the others."""
    names = "size", "prompts", "completion", "steps", "rows", "utilization", "sleep", "no_vllm"
    shape = {"model" if name == "size" else name: getattr(args, name) for name in names}
    return {**shape, "base": "bf16", "aqn": False}


def is_this_run(args: argparse.Namespace, line: str) -> bool:
    """Whether a line is one of these arguments'."""
    read = json.loads(line)
    return read["name"] == NAME and read["shape"] == shape_of(args)


def keep(output: Path, args: argparse.Namespace, line: str) -> None:
    """Put a line into a file, in place of the earlier one of this run."""
    before = output.read_text().splitlines() if output.exists() else []
    partial = output.with_name(f".{output.name}.partial")
    partial.write_text("\n".join([*(other for other in before if not is_this_run(args, other)), line]) + "\n")
    partial.replace(output)


def main(argv: list[str] | None = None) -> None:
    """One run of TRL, unless ``--output`` has it whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="7B" if DEVICE == "cuda" else "tiny")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--completion", type=int, default=2048 if DEVICE == "cuda" else 32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=GROUP, help="completions of a micro-batch")
    parser.add_argument("--utilization", type=float, default=0.3, help="share of the GPU for vLLM; 0.3 is TRL's own")
    parser.add_argument("--sleep", action="store_true", help="vLLM gives its memory back during updates")
    parser.add_argument("--no-vllm", action="store_true", help="sample with transformers")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "qerl-bench")
    parser.add_argument("--output", type=Path, help="file of JSON lines to go on with; default: print the line")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        run(args, args.child)
        return
    if importlib.util.find_spec("trl") is None:
        print("nothing measured: trl is not installed", file=sys.stderr)
        return
    before = args.output.read_text().splitlines() if args.output and args.output.exists() else []
    if any(is_this_run(args, line) and json.loads(line)["measured"] == args.steps - 1 for line in before):
        return
    base = written_apart(args.folder, args.size, "bf16")
    command = [sys.executable, "-m", "tests.bench.bench_trl", *(argv or sys.argv[1:]), "--child", str(base)]
    line, others = None, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for text in child.stdout or ():
            if not text.startswith('{"name"'):
                others.append(text)
                continue
            line = text.strip()
            if args.output:
                keep(args.output, args, line)
            print(f"{json.loads(line)['measured']} steps measured", file=sys.stderr)
    if child.returncode or line is None:
        raise SystemExit(f"the run failed with {child.returncode}:\n{''.join(others)[-2000:]}")
    print(line)


if __name__ == "__main__":
    main()
