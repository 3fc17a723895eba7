"""Measure TRL's GRPOTrainer on a task, with a real model, vLLM and LoRA: python -m tests.bench.bench_trl_task

The task is a configuration file, by default GSM8K with verl's settings. Model, prompts and their order, settings of the
objective and of the optimizer, and the code that scores completions are those that ``train.py`` uses with this file.
Settings that decide the speed follow TRL's guide and are part of the results; vLLM runs in TRL's process. The greedy
accuracy on test problems is measured before, in the middle of and after training (``--at``); of the times in the
results, only ``evaluating_s`` and ``sampling_s`` include these evaluations.

    python -m tests.bench.bench_trl_task --model models/qwen2.5-coder-1.5b --problems gsm8k_train.jsonl

After each evaluation and at the end a JSON line about all steps so far is printed; the last line of a run counts. A run
that gets SIGINT or SIGTERM, or fails after its first step, prints a line, too; ``ended`` says how it ended. ``curve``
has one value per step; its ``train_s`` are the seconds since the first step began, without evaluations.
``generated_per_s`` counts sampled tokens, and ``trained_per_s`` tokens of prompts and completions without padding;
``padded_share`` is the share of padding among the tokens that TRL computes. Without TRL (``pip install trl``, 1.16) or
a model nothing is measured. ``--generation transformers`` samples without vLLM, for machines on which TRL does not work
with vLLM.
"""

import argparse
import importlib
import importlib.util
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
import yaml
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState

from datamodules.gsm8k import GSM8K
from datamodules.prompts import PromptDataModule
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.memory.device import others_bytes, used_bytes
from qerl_pl.model.tokenizer import read_tokenizer
from qerl_pl.rollout.decode import completion_texts
from tests.bench.bench_trl import ALWAYS, StepTimes, imported_trl, lora_of, versions
from tests.bench.harness import CUDA, DEVICE, DTYPE, GIB, ROOT, emit, now, parser_with
from tests.correctness.faults import sources

LOGGED = ("kl", "entropy", "grad_norm", "completions/clipped_ratio")  # by TRL, for each step
FIXED = {"surrogate": "clipped", "aggregation": "token", "baseline": "normalized", "correction": "none", "kl": "k3"}
"""Settings of the objective that ``objective_settings`` knows in TRL's terms."""


class Scorer:
    """Scores completions by all rewards of a task; those of weight 0 are computed, too, but do not count in the sum.
    ``ends`` are the tokens that end a completion."""

    def __init__(
        self, rewards: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
    ) -> None:
        self.weights = {reward["name"]: float(reward["weight"]) for reward in rewards}
        self._rewards = {reward["name"]: made(reward["reward"]) for reward in rewards}
        self._tokenizer, self._ends = tokenizer, frozenset(ends)

    def scores(self, prompts: Sequence[Prompt], rows: Sequence[Sequence[int]]) -> dict[str, list[float]]:
        """Return each reward's scores of completions, by the name of the reward. A completion that a reward cannot
        score gets 0."""
        cut = [Completion(tuple(row), (), bool(row) and row[-1] in self._ends) for row in rows]
        texts = completion_texts(self._tokenizer, cut)
        rows_read = [replace(row, text=text) for row, text in zip(cut, texts, strict=True)]
        return {name: [score or 0.0 for score in reward(prompts, rows_read)] for name, reward in self._rewards.items()}

    def total(self, scores: Mapping[str, Sequence[float]]) -> list[float]:
        """Return the weighted sum of scores, for each completion."""
        names = list(scores)
        rows = zip(*scores.values(), strict=True)
        return [sum(self.weights[name] * score for name, score in zip(names, row, strict=True)) for row in rows]


def made(spec: Mapping[str, Any]) -> Any:
    """Create the object that a configuration file names."""
    module, _, name = spec["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**spec.get("init_args", {}))


def objective_settings(task: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a task's settings of objective, optimizer and sampling to those of TRL's GRPOConfig. If TRL has no
    equal setting, the program ends with a message."""
    model = task["model"]
    objective, optimizer = model["objective"], model["optimizer"]
    other = {name: objective.get(name) for name, value in FIXED.items() if objective.get(name) != value}
    if other or optimizer["class_path"] != "torch.optim.AdamW" or model.get("updates_per_rollout", 1) != 1:
        raise SystemExit(f"the task is not known in TRL's terms: {other or optimizer}; expected {FIXED} and AdamW")
    adam = optimizer["init_args"]
    return {
        "num_generations": model["sampling"]["num_completions"],
        "max_completion_length": model["sampling"]["max_tokens"],
        "temperature": model["sampling"]["temperature"],
        "loss_type": "dapo",  # mean over all tokens of the batch
        "scale_rewards": "group",
        "epsilon": objective["clip_low"],
        "epsilon_high": objective["clip_high"],
        "delta": objective["max_ratio"],
        "vllm_importance_sampling_correction": False,
        "beta": objective["kl_coefficient"],
        "use_bias_correction_kl": False,
        "entropy_coef": objective["entropy_coefficient"],
        "learning_rate": adam["lr"],
        "adam_beta1": adam["betas"][0],
        "adam_beta2": adam["betas"][1],
        "weight_decay": adam["weight_decay"],
        "lr_scheduler_type": model["lr_schedule"],
        "warmup_steps": model["warmup_steps"],
        "max_grad_norm": model["max_grad_norm"],
    }


def speed_settings(args: argparse.Namespace, task: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of TRL's GRPOConfig that decide its speed and memory."""
    whole = task["data"]["batch_size"] * task["model"]["sampling"]["num_completions"]
    if whole % args.rows:
        raise SystemExit(f"--rows is {args.rows}; expected a divisor of the {whole} completions of a step")
    settings = {
        "bf16": CUDA,
        "model_init_kwargs": {"dtype": "bfloat16" if CUDA else "float32", "attn_implementation": "sdpa"},
        "optim": "adamw_torch_fused",
        "use_liger_kernel": args.liger,
        "gradient_checkpointing": args.checkpointing,
        "per_device_train_batch_size": args.rows,
        "gradient_accumulation_steps": whole // args.rows,
        "use_vllm": args.generation == "vllm",
    }
    if not settings["use_vllm"]:
        return settings
    return settings | {
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": args.utilization,
        "vllm_max_model_length": task["data"]["max_prompt_tokens"] + task["model"]["sampling"]["max_tokens"],
        "vllm_enable_sleep_mode": args.sleep,
    }


class Course(TrainerCallback):
    """Evaluates TRL's GRPOTrainer on test prompts at the steps of ``--at``, and collects the values for the JSON lines
    of results.

    ``settings`` are copied to these lines.
    """

    def __init__(
        self, args: argparse.Namespace, scorer: Scorer, tests: Sequence[Prompt], settings: Mapping[str, Any]
    ) -> None:
        self.times = StepTimes()
        self.trainer: Any = None
        self._args, self._scorer, self._tests, self._settings = args, scorer, tests, settings
        self._started, self._began, self._startup_s, self._evaluating_s = now(), 0.0, 0.0, 0.0
        self._others = others_bytes(torch.device(DEVICE)) if CUDA else 0
        self._peak = 0
        self._evaluations: list[dict[str, float]] = []
        self._curve: dict[str, list[float]] = defaultdict(list)
        self._rollout: dict[str, float] = {}
        self._count: dict[str, int] = {}
        self._counts: list[dict[str, int]] = []

    def reward(self, prompts: Sequence[Prompt], rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the total reward of each completion of a step, and record the rewards, lengths and tokens of the step
        for the JSON line."""
        scores = self._scorer.scores(prompts, rows)
        lengths, heads = [len(row) for row in rows], [len(prompt.tokens) for prompt in prompts]
        self._note_memory()
        self._rollout = {name: fmean(values) for name, values in scores.items()} | {"mean_tokens": fmean(lengths)}
        padded = len(rows) * (max(lengths) + max(heads))
        self._count = {"generated": sum(lengths), "trained": sum(lengths) + sum(heads), "computed": padded}
        return self._scorer.total(scores)

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self._startup_s = now() - self._started
        self._evaluate(state.global_step)
        self._evaluating_s = 0.0
        self._began = now()

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self.times.begin()

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self.times.end()
        self._note_memory()
        self._counts.append(self._count)
        row = {"train_s": now() - self._began - self._evaluating_s, "step_s": self.times.steps[-1], **self._rollout}
        for name, value in row.items():
            self._curve[name].append(round(value, 4))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
        print(f"step {state.global_step} of {self._args.steps}: {shown}", file=sys.stderr, flush=True)
        self._evaluate(state.global_step)

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        for name in LOGGED:
            if logs and name in logs:
                self._curve[name].append(round(float(logs[name]), 6))

    def _evaluate(self, step: int) -> None:
        if step not in self._args.at:
            return
        begin = now()
        rows = greedy(self.trainer, self._tests)
        seconds = now() - begin
        scores = self._scorer.scores(self._tests, rows)
        self._evaluations.append(
            {
                "step": step,
                "train_s": self._curve["train_s"][-1] if self._curve["train_s"] else 0.0,
                "problems": len(rows),
                **{name: fmean(values) for name, values in scores.items()},
                "mean_tokens": fmean(map(len, rows)),
                "sampling_s": seconds,
            }
        )
        print(f"evaluation: {self._evaluations[-1]}", file=sys.stderr, flush=True)
        self._evaluating_s += now() - begin
        if self.times.steps:
            self.line("running")

    def _note_memory(self) -> None:
        if CUDA:
            self._peak = max(self._peak, used_bytes(torch.device(DEVICE)) - self._others)

    def line(self, ended: str) -> None:
        """Print a JSON line about the steps so far; without a finished step nothing is printed. ``ended`` says how the
        run ended."""
        steps, phases = self.times.steps, self.times.phases
        if not steps:
            return
        timed, counts = (phases[1:], self._counts[1:]) if len(steps) > 1 else (phases, self._counts)
        sums = {phase: sum(step[phase] for step in timed) for phase in (*StepTimes.PHASES, "train")}
        tokens = {name: sum(step[name] for step in counts) for name in counts[0]}
        emit(
            "task/trl",
            shape_of(self._args),
            DTYPE,
            sorted(steps[1:] or steps),
            output=self._args.output,
            ended=ended,
            steps_done=len(steps),
            startup_s=self._startup_s,
            first_s=steps[0],
            train_s=self._curve["train_s"][-1],
            evaluating_s=self._evaluating_s,
            phases_s={phase: seconds / len(timed) for phase, seconds in sums.items()},
            tokens={name: number / len(counts) for name, number in tokens.items()},
            generated_per_s=tokens["generated"] / sums["rollout"],
            trained_per_s=tokens["trained"] / (sums["train"] + sums["logprob"]),
            padded_share=1 - tokens["trained"] / tokens["computed"],
            evaluations=self._evaluations,
            curve=dict(self._curve),
            peak_gib=self._peak / GIB,
            allocated_gib=torch.cuda.max_memory_allocated() / GIB if CUDA else 0.0,
            settings=dict(self._settings),
            versions=versions(),
        )


def greedy(trainer: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the tokens of greedy completions, which TRL's trainer generates as in training, with the policy's current
    weights."""
    tokens = [list(prompt.tokens) for prompt in prompts]
    if trainer.use_vllm:
        owner, changed = trainer.vllm_generation, {"temperature": 0.0}
    else:
        owner, changed = trainer.generation_config, {"do_sample": False}
    kept = {name: getattr(owner, name) for name in changed}
    vars(owner).update(changed)
    try:
        rows, _ = trainer._generate_single_turn(tokens, None, {}, 1)
    finally:
        vars(owner).update(kept)
    if trainer.use_vllm:
        trainer._last_loaded_step = -1  # the next rollout loads the weights itself, as without this evaluation
    return rows


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """Make the settings that distinguish the lines of results."""
    names = "steps", "rows", "checkpointing", "liger", "generation", "utilization", "sleep", "test", "tiny"
    return {"model": args.model.name, "task": args.task.stem, **{name: getattr(args, name) for name in names}}


def prompts_of(
    task: Mapping[str, Any], args: argparse.Namespace, model: str, **more: Any
) -> tuple[list[Prompt], list[Prompt]]:
    """Return two lists: the prompts of the first ``args.steps`` training steps, in the order in which ``train.py``
    takes them, and the test prompts."""
    names = ("batch_size", "max_prompt_tokens", "system_prompt", "question_template")
    module = PromptDataModule(
        GSM8K(**cast("dict[str, Any]", sources(args.problems))),
        model,
        **{name: task["data"][name] for name in names if name in task["data"]},
        **more,
    )
    module.setup("fit")
    loader, prompts, number = module.train_dataloader(), list[Prompt](), args.steps * task["data"]["batch_size"]
    while len(prompts) < number:
        prompts += chain.from_iterable(loader)  # an epoch
    return prompts[:number], [prompt for batch in module.val_dataloader() for prompt in batch]


def run(args: argparse.Namespace, task: Mapping[str, Any]) -> None:
    """Train with TRL, and print the JSON lines of results.

    Raises:
        SystemExit: TRL would turn a prompt into other tokens than ``train.py`` does.
    """
    trl = imported_trl(vllm=args.generation == "vllm")
    tokenizer = read_tokenizer(args.model)
    prompts, tests = prompts_of(task, args, str(args.model), val_limit=args.test, seed=args.seed)
    if tokenizer(text=[each.text for each in prompts])["input_ids"] != [list(each.tokens) for each in prompts]:
        raise SystemExit("TRL's tokenizer call adds tokens to the prompts of this model, so they cannot be compared")
    settings = objective_settings(task) | speed_settings(args, task)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder, max_steps=args.steps, seed=args.seed, shuffle_dataset=False, **ALWAYS, **settings
        )
        scorer = Scorer(task["model"]["rewards"], tokenizer, end_tokens(args.model, tokenizer))
        course = Course(args, scorer, tests, settings)

        def reward(completion_ids: list[list[int]], number: list[int], **others: Any) -> list[float]:
            del others
            return course.reward([prompts[each] for each in number], completion_ids)

        lora = task["model"]["lora"]
        trainer = trl.GRPOTrainer(
            model=str(args.model),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict(
                {"prompt": [each.text for each in prompts], "number": list(range(len(prompts)))}
            ),
            processing_class=tokenizer,
            peft_config=lora_of(lora["rank"], lora["alpha"]),
            callbacks=[course],
        )
        course.trainer = trainer
        course.times.time_phases(trainer)
        ended = "stopped"
        try:
            trainer.train()
            ended = "finished"
        except Exception as error:
            ended = f"failed: {type(error).__name__}: {str(error)[:200]}"
            raise
        finally:
            course.line(ended)


def end_tokens(model: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a completion: those of the tokenizer and of the generation settings."""
    file = model / "generation_config.json"
    ends_of_file = yaml.safe_load(file.read_text()).get("eos_token_id") if file.exists() else None
    ends: list[int | None] = ends_of_file if isinstance(ends_of_file, list) else [ends_of_file]
    of_tokenizer: Any = tokenizer.eos_token_id
    return [token for token in {*ends, of_tokenizer} if token is not None]


def main(argv: list[str] | None = None) -> None:
    """Do one run of TRL."""
    parser = parser_with(__doc__, "--output")
    add = parser.add_argument
    add("--model", type=Path, help="folder of the model, in bf16")
    add("--problems", type=Path, help="GSM8K's training problems, next to gsm8k_test.jsonl")
    add("--task", type=Path, default=ROOT / "configs" / "tasks" / "gsm8k_verl.yaml")
    add("--steps", type=int, help="default: the task's")
    add("--at", type=int, nargs="*", help="steps to evaluate at; default: 0, the middle and the end")
    add("--test", type=int, help="test problems of an evaluation, from the first on; default: all")
    add("--seed", type=int, default=0)
    add("--rows", type=int, default=8, help="completions of a micro-batch")
    add("--checkpointing", action="store_true", help="recompute activations, to save memory")
    add("--liger", action=argparse.BooleanOptionalAction, default=CUDA, help="Liger's fused layers")
    add("--generation", choices=["vllm", "transformers"], default="vllm")
    add("--utilization", type=float, default=0.3, help="share of the GPU for vLLM; 0.3 is TRL's own")
    add("--sleep", action="store_true", help="vLLM gives its memory back during updates")
    add("--tiny", action="store_true", help="4 prompts with completions of 16 tokens, for a trial")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("trl") is None or args.model is None or args.problems is None:
        print("nothing measured: it needs trl, --model and --problems", file=sys.stderr)
        return
    task = yaml.safe_load(args.task.read_text())
    if args.tiny:
        task["data"]["batch_size"], task["model"]["sampling"]["max_tokens"] = 4, 16
    args.steps = task["trainer"]["max_steps"] if args.steps is None else args.steps
    args.at = sorted({0, args.steps // 2, args.steps}) if args.at is None else args.at
    for each in (signal.SIGINT, signal.SIGTERM):  # a shell starts background processes with SIGINT ignored
        signal.signal(each, signal.default_int_handler)
    run(args, task)


if __name__ == "__main__":
    main()
