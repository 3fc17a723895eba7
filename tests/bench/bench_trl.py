"""Time whole GRPO steps of TRL with vLLM in its process, for comparison with bench_grpo: python -m
tests.bench.bench_trl

The setting is bench_grpo's, on a bf16 base with PEFT's LoRA; everything else has TRL's defaults. For instance, TRL
merges the adapter and loads all weights into vLLM before each rollout (``sync``), and computes log-probabilities once
more before the update (``logprob``). ``train`` is the rest of a step's time after its other phases. The end token does
not end a completion. After each step a JSON line with medians over all steps so far is printed, so the last line is
the result of a run. In a line, ``measured`` is the number of these steps, without the first one, which is a warm-up. A
run that was stopped cannot be continued. Without TRL nothing is measured: ``pip install trl`` (1.16, which warns about
vLLM 0.32 but runs).

``--mean``, ``--group`` and ``--updates`` mean what they mean in bench_grpo: ``--mean`` gives each completion the number
of tokens that it has there, and a step is a rollout with all of its updates.
"""

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback, TrainerState

from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Completion
from qerl_pl.memory.device import others_bytes, used_bytes
from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.rollout.vllm.setup import prepare_environment
from tests.bench.bench_grpo import GROUP, PROMPT_TOKENS, coin, lengths, peak_memory
from tests.bench.harness import CUDA, DEVICE, GIB, RANK, emit, kept, now, parser_with, run_apart
from tests.random_checkpoints import written_apart

PACKAGES = ("trl", "vllm", "transformers", "peft")
ALWAYS = {"use_cpu": not CUDA, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
"""Settings that all trainers of TRL have here."""


def reward(completion_ids: list[list[int]], **others: Any) -> list[float | None]:
    """The reward of bench_grpo, with TRL's arguments."""
    return coin([], [Completion(tuple(tokens), (), False) for tokens in completion_ids])


def settings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Settings of TRL's GRPOConfig where they are not its defaults."""
    rows = args.group * args.prompts
    return {
        "output_dir": str(folder),
        "model_init_kwargs": {"dtype": "bfloat16"},
        "bf16": True,
        **ALWAYS,
        "gradient_checkpointing": True,
        "max_steps": args.steps * args.updates,
        "num_iterations": args.updates,
        "per_device_train_batch_size": args.rows,
        "gradient_accumulation_steps": rows // args.rows,
        "num_generations": args.group,
        "max_completion_length": args.completion,
        "temperature": 1.0,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": args.utilization,
        "vllm_max_model_length": PROMPT_TOKENS + args.completion,
        "vllm_enable_sleep_mode": args.sleep,
        "generation_kwargs": {"ignore_eos": True},
    }


def lora_of(rank: int, alpha: int) -> LoraConfig:
    """Make PEFT's settings of an adapter on all linear layers."""
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")


def imported_trl(*, vllm: bool = True) -> Any:
    """Import TRL, which is optional, in a process whose vLLM does not have this repository's kernels."""
    warnings.filterwarnings("ignore")
    prepare_environment()
    os.environ["VLLM_PLUGINS"] = ""
    trl = importlib.import_module("trl")
    if vllm and not CUDA:  # otherwise vLLM repacks weights for oneDNN, and new ones cannot be loaded
        ops: Any = importlib.import_module("vllm._custom_ops")
        ops._supports_onednn = False
    return trl


def run(args: argparse.Namespace, base: str) -> None:
    """Train, and print a line after each step."""
    trl = imported_trl()
    questions = [f"{index:03} " + "what is it " * 20 for index in range(32)]
    with tempfile.TemporaryDirectory() as name, peak_memory() as peak:
        lines = Lines(args, peak)
        trainer = trl.GRPOTrainer(
            model=base,
            reward_funcs=reward,
            args=trl.GRPOConfig(**settings(args, Path(name))),
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": question}]} for question in questions]
            ),
            peft_config=lora_of(RANK, RANK),
            callbacks=[lines],
        )
        lines.times.time_phases(trainer)
        if args.mean:
            limit_each(trainer.vllm_generation.llm, args.mean)
        trainer.train()


def limit_each(llm: Any, mean: int) -> None:
    """Make ``generate`` of a vLLM engine limit each completion to the number of tokens that ``bench_grpo.lengths``
    draws for it."""
    whole = llm.generate

    def limited(prompts: list[Any], *, sampling_params: Any, **others: Any) -> Any:
        params = [copy(sampling_params) for _ in prompts]
        for row, limit in zip(params, lengths(mean, sampling_params.max_tokens, len(prompts)), strict=True):
            row.max_tokens = limit
        return whole(prompts, sampling_params=params, **others)

    llm.generate = limited


class StepTimes:
    """Times the steps of a TRL trainer and the phases of each step, in seconds. The phase ``train`` is the rest of a
    step's time after all other phases."""

    PHASES = ("sync", "rollout", "reward", "logprob")

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.phases: list[dict[str, float]] = []
        self._watch = Stopwatch()
        self._began = 0.0

    def time_phases(self, trainer: Any) -> None:
        """Wrap the methods of a trainer that do one phase of a step, so that their time is recorded. TRL's
        DistillationTrainer has no method for rewards, so this phase is left out for it."""
        if trainer.use_vllm:
            self._time("sync", trainer.vllm_generation, "sync_weights")
        self._time("rollout", trainer, "_generate_single_turn")  # it calls sync_weights
        for phase, name in (("reward", "_calculate_rewards"), ("logprob", "_get_per_token_logps_and_entropies")):
            if hasattr(trainer, name):
                self._time(phase, trainer, name)

    def _time(self, phase: str, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if phase == "logprob" and torch.is_grad_enabled():  # the update's own forward pass
                return method(*args, **kwargs)
            with self._watch.phase(phase):
                return method(*args, **kwargs)

        setattr(owner, name, timed)

    def begin(self) -> None:
        """Start the clock of a step."""
        self._watch.seconds.clear()
        self._began = now()

    def end(self) -> None:
        """Record the step that ends now."""
        step = now() - self._began
        phases = {phase: self._watch.seconds[phase] for phase in self.PHASES}
        phases["rollout"] -= phases["sync"]
        self.steps.append(step)
        self.phases.append({**phases, "train": step - sum(phases.values())})


class Lines(TrainerCallback):
    """Times steps (each a rollout with all of its updates) and their phases, and after each step prints a JSON line
    about all steps so far."""

    def __init__(self, args: argparse.Namespace, peak: Mapping[str, int]) -> None:
        self.times = StepTimes()
        self._args, self._peak, self._began = args, peak, now()
        self._others = others_bytes(torch.device(DEVICE)) if CUDA else 0
        self._logs: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        if state.global_step % self._args.updates == 0:
            self.times.begin()

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        if state.global_step % self._args.updates == 0:
            self.times.end()

    def on_log(self, args: Any, state: TrainerState, *_: Any, logs: Any = None, **__: Any) -> None:
        self._logs |= logs  # values of a rollout are logged at its first update only
        # an update that is not the last, or the summary at the end
        if state.global_step % self._args.updates or "train_runtime" in logs:
            return
        steps, phases = self.times.steps, self.times.phases
        timed = phases[1:] or phases
        used = used_bytes(torch.device(DEVICE)) - self._others if CUDA else 0
        emit(
            name_of(self._args),
            shape_of(self._args),
            "bfloat16",
            sorted(steps[1:]),
            measured=len(steps) - 1,
            first_s=steps[0],
            phases_s={phase: median(step[phase] for step in timed) for phase in timed[0]},
            tokens=self._logs["completions/mean_length"] * self._args.group * self._args.prompts,
            gap=self._logs.get("sampling/sampling_logp_difference/mean"),
            peak_bytes=self._peak["bytes"],
            logged={"peak_gib": max(used, self._peak["bytes"]) / GIB},
            total_s=now() - self._began,
            versions=versions(),
        )


def versions() -> dict[str, str]:
    """Return the versions of the packages that the measurement is about."""
    return {name: importlib.import_module(name).__version__ for name in PACKAGES}


def name_of(args: argparse.Namespace) -> str:
    """Return the name of the lines."""
    return "recipe/trl" if args.mean else "grpo/trl"


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """Make the settings that distinguish the lines of results."""
    names = ("prompts", "completion", "steps", "rows", "utilization", "sleep")
    names += ("group", "mean", "updates") if args.mean else ()
    return {"model": args.size, **{name: getattr(args, name) for name in names}, "base": "bf16", "aqn": False}


def main(argv: list[str] | None = None) -> None:
    """Do one run of TRL, unless ``--output`` has all its steps."""
    parser = parser_with(__doc__, "--size", "--folder", "--output", prompts=1, completion=2048 if CUDA else 32)
    add = parser.add_argument
    add("--group", type=int, default=GROUP, help="completions per prompt")
    add("--mean", type=int, help="mean length of completions that are as different as a recipe's")
    add("--updates", type=int, default=1, help="passes over each rollout")
    add("--steps", type=int, default=3, help="rollouts")
    add("--rows", type=int, default=GROUP, help="completions of a micro-batch")
    add("--utilization", type=float, default=0.3, help="share of the GPU for vLLM; 0.3 is TRL's own")
    add("--sleep", action="store_true", help="vLLM gives its memory back during updates")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        run(args, args.child)
        return
    if importlib.util.find_spec("trl") is None:
        print("nothing measured: trl is not installed", file=sys.stderr)
        return
    before = [line for line in kept(args.output) if (line["name"], line["shape"]) == (name_of(args), shape_of(args))]
    if any(line["measured"] == args.steps - 1 for line in before):
        return
    base = written_apart(args.folder, args.size, "bf16")
    run_apart("bench_trl", [*(argv or sys.argv[1:]), "--child", str(base)], output=args.output)


if __name__ == "__main__":
    main()
