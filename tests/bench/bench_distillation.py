"""Measure what a teacher costs, and TRL's distillation for comparison: python -m tests.bench.bench_distillation WHAT

    python -m tests.bench.bench_distillation step --model qwen2.5-coder-0.5b.gguf --problems gsm8k_train.jsonl
    python -m tests.bench.bench_distillation loss --model qwen2.5-coder-0.5b.gguf --teacher qwen2.5-coder-1.5b.gguf \
        --problems gsm8k_train.jsonl
    python -m tests.bench.bench_distillation trl ...

``step`` trains with each of ``--divergences`` in turn, each run in its own process, and prints a line for each: seconds
per step and per phase of a step, sampled tokens, and ``over_none``, the run's seconds per step divided by those of the
run without a teacher. If no teacher is named, the model is its own teacher. ``loss`` computes the divergences of the
same tokens (problems with their solutions) by this trainer and by TRL, in fp32 on one GPU. ``trl`` times steps of TRL's
DistillationTrainer, with vLLM in its process, LoRA and the reverse KL, on the prompts, settings and numbers of
completions of a task; ``step --task heal --divergences reverse`` times the same with this trainer. ``loss`` and ``trl``
need TRL 1.16 (``pip install trl``). Other modules of tests/bench measure the rest: bench_four_bits the accuracy of
quantised models trained towards their dense original (variants with ~heal), bench_grpo the memory of a large teacher
(``--teacher``), and bench_real_runs what a policy learns from a teacher.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import yaml
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from qerl_pl.base.folder import base_folder
from qerl_pl.memory.device import others_bytes, used_bytes
from qerl_pl.model.tokenizer import read_tokenizer
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import TeacherStates, load_policy
from qerl_pl.policy.teacher import Teacher
from qerl_pl.results.curves import Curve, read_curves
from tests.bench.bench_trl import ALWAYS, StepTimes, imported_trl, lora_of, versions
from tests.bench.bench_trl_task import prompts_of, speed_settings
from tests.bench.harness import (
    CUDA,
    DEVICE,
    DTYPE,
    GIB,
    PHASES,
    child_environment,
    emit,
    fit_command,
    now,
    parser_with,
    task_file,
)
from tests.correctness.faults import sources

NONE = "none"
DIVERGENCES = (NONE, "sampled", "forward", "reverse", "jensen_shannon")
BETAS = (0.0, 0.5, 1.0)

# ---- a step with a teacher and without one ---------------------------------------------------------------------------


def trained(args: argparse.Namespace, divergence: str, folder: Path) -> dict[str, Curve]:
    """Train with one divergence from the teacher, in a process of its own. Returns the run's curves by name, and with
    them a curve "tokens": the number of sampled tokens in each step."""
    objective = {"teacher": {"divergence": divergence}}
    base = {"base": str(args.teacher.resolve()), "quantize": args.quantize}
    model: dict[str, Any] = {"base": str(args.model.resolve()), "quantize": args.quantize, "dtype": str(DTYPE)[6:]}
    model |= {} if divergence == NONE else {"teacher": base, "objective": objective}
    settings = {
        "run_dir": str(folder / "run"),
        "trainer": {"max_steps": args.steps, "limit_val_batches": 0},
        "model": model,
        "data": {"source": {"init_args": sources(args.problems)}},
    }
    command = [*fit_command(folder, settings, task_file(args.task)), *(f"--{each}" for each in args.set)]
    subprocess.run(command, stdout=sys.stderr, env=child_environment(), check=True)
    curves, settings = read_curves(folder / "run"), yaml.safe_load((folder / "run" / "config.yaml").read_text())
    rows = settings["data"]["batch_size"] * settings["model"]["sampling"]["num_completions"]
    means = curves["rollout/completion_tokens"]
    return {**curves, "tokens": means._replace(values=[rows * mean for mean in means.values])}


def step(args: argparse.Namespace) -> None:
    """Train with each divergence in turns, and print a line for each."""
    runs: dict[str, list[dict[str, Curve]]] = defaultdict(list)
    for _ in range(args.repeats):
        for divergence in args.divergences:
            with tempfile.TemporaryDirectory() as folder:
                runs[divergence].append(trained(args, divergence, Path(folder)))

    def after_first(divergence: str, tag: str) -> list[float]:
        return [value for curves in runs[divergence] if tag in curves for value in curves[tag].values[1:]]

    for divergence in args.divergences:
        steps = sorted(after_first(divergence, "time/step_s"))
        phases = {each: after_first(divergence, f"time/{each}_s") for each in ("teacher", *PHASES)}
        plain = median(after_first(NONE, "time/step_s")) if NONE in runs else None
        peaks = {
            name: max(after_first(divergence, f"memory/{name}"), default=None)
            for name in ("predicted_peak_gib", "peak_gib")
        }
        emit(
            "distillation/step",
            shape_of(args) | {"divergence": divergence},
            DTYPE,
            steps,
            output=args.output,
            over_none=plain and median(steps) / plain,
            phases_s={name: median(values) for name, values in phases.items() if values},
            tokens=median(after_first(divergence, "tokens")),
            tokens_per_s=sum(after_first(divergence, "tokens")) / sum(steps),
            memory_gib=peaks,
            agreement=after_first(divergence, "teacher/agreement"),
        )


# ---- TRL ------------------------------------------------------------------------------------------------------------


def trainer_of_trl(student: str, teacher: str, prompts: Sequence[str], lora: Mapping[str, Any], **settings: Any) -> Any:
    """Make TRL's DistillationTrainer. ``student`` and ``teacher`` are folders of models, ``prompts`` are texts, and
    ``settings`` are further fields of TRL's DistillationConfig."""
    trl = imported_trl(vllm=settings.get("use_vllm", False))
    loading = settings.setdefault("model_init_kwargs", {"dtype": "float32"})
    return trl.DistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=trl.DistillationConfig(
            teacher_model_init_kwargs=dict(loading), shuffle_dataset=False, **ALWAYS, **settings
        ),
        train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
        processing_class=read_tokenizer(student),
        peft_config=lora_of(lora["rank"], lora["alpha"]),
    )


def losses_of_trl(
    student: str, teacher: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, temperature: float = 1.0
) -> dict[float, float]:
    """Compute TRL's distillation loss for each beta in ``BETAS`` (0 is the forward KL, 1 the reverse KL). ``rows`` are
    pairs of prompt tokens and completion tokens. The student has an untrained adapter, so it computes as without
    one."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of_trl(
            student, teacher, ["-"], {"rank": 4, "alpha": 4}, output_dir=folder, bf16=False, temperature=temperature
        )
    heads, tails = ([torch.tensor(row[part]) for row in rows] for part in (0, 1))
    sides = {"prompt": (heads, "left"), "completion": (tails, "right")}
    inputs = {
        f"{name}_{kind}": torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_side=side).to(DEVICE)
        for name, (texts, side) in sides.items()
        for kind, values in (("ids", texts), ("mask", [torch.ones_like(row) for row in texts]))
    }
    trainer.model.eval()
    found = {}
    for trainer.beta in BETAS:
        with torch.no_grad():
            found[trainer.beta] = trainer.compute_loss(trainer.model, inputs).item()
    return found


def losses(
    student: str, teacher: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, temperature: float = 1.0
) -> dict[float, float]:
    """Compute what ``losses_of_trl`` does with this trainer's divergences: the mean over the tokens of the completions,
    for each beta in ``BETAS``."""
    lengths = [len(head) + len(tail) for head, tail in rows]
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64, device=DEVICE)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for index, (head, tail) in enumerate(rows):
        tokens[index, : lengths[index]] = torch.tensor([*head, *tail])
        mask[index, len(head) : lengths[index]] = True
    policy = load_policy(student, dtype=torch.float32, lora=LoraSettings(rank=4, alpha=4), seed=0, device=DEVICE)
    model = Teacher(teacher, dtype=torch.float32, device=DEVICE)
    _, hidden = model.score(tokens, mask, temperature=temperature)

    def loss(beta: float) -> float:
        states = TeacherStates(hidden, model.head(temperature), beta)
        with torch.no_grad():
            values = policy.token_stats(tokens, mask, temperature=temperature, teacher=states).divergence
        return cast("Tensor", values)[mask].double().mean().item()

    return {beta: loss(beta) for beta in BETAS}


def loss(args: argparse.Namespace) -> None:
    """Print the losses of both trainers."""
    student, teacher = (base_folder(str(path), None) for path in (args.model, args.teacher))
    tokenizer = read_tokenizer(student)
    problems = [json.loads(line) for line in args.problems.read_text().splitlines()[: args.rows]]
    texts = [(problem["question"], problem["answer"]) for problem in problems]
    rows = [(tokenizer(question)["input_ids"], tokenizer(answer)["input_ids"]) for question, answer in texts]
    torch.backends.cuda.matmul.allow_tf32 = False
    ours, theirs = losses(student, teacher, rows), losses_of_trl(student, teacher, rows)
    emit(
        "distillation/loss",
        shape_of(args) | {"rows": args.rows, "tokens": sum(len(tail) for _, tail in rows)},
        "float32",
        output=args.output,
        loss=ours,
        loss_of_trl=theirs,
        largest_difference=max(abs(ours[beta] - theirs[beta]) for beta in BETAS),
        versions=versions(),
    )


class Clock(TrainerCallback):
    """Times the steps of TRL's trainer, and counts the tokens that it samples."""

    def __init__(self, trainer: Any) -> None:
        self.times, self.tokens = StepTimes(), list[int]()
        self.times.time_phases(trainer)
        whole = trainer._generate

        def counted(prompts: list[Any]) -> Any:
            results = whole(prompts)
            self.tokens.append(sum(map(len, results[1])))
            return results

        trainer._generate = counted

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.end()


def trl(args: argparse.Namespace) -> None:
    """Time TRL's steps."""
    model = args.of_task["model"]
    others = others_bytes(torch.device(DEVICE)) if CUDA else 0
    each = model["sampling"]["num_completions"]
    args.sleep = args.checkpointing = False
    student, teacher = (base_folder(str(path), None) for path in (args.model, args.teacher))
    own, _ = prompts_of(args.of_task, args, student, max_dropped_share=1.0)
    prompts = [prompt.text for prompt in own for _ in range(each)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of_trl(
            student,
            teacher,
            prompts,
            model["lora"],
            output_dir=folder,
            max_steps=args.steps,
            beta=1.0,
            max_completion_length=model["sampling"]["max_tokens"],
            temperature=model["sampling"]["temperature"],
            learning_rate=model["optimizer"]["init_args"]["lr"],
            **speed_settings(args, args.of_task),
        )
        clock = Clock(trainer)
        trainer.add_callback(clock)
        begin = now()
        trainer.train()
    steps, tokens = sorted(clock.times.steps[1:]), median(clock.tokens[1:])
    phases = clock.times.phases[1:]
    emit(
        "distillation/trl",
        shape_of(args) | {"rows": args.rows, "utilization": args.utilization},
        DTYPE,
        steps,
        output=args.output,
        phases_s={name: median(phase[name] for phase in phases) for name in phases[0]},
        tokens=tokens,
        tokens_per_s=tokens / median(steps),
        total_s=now() - begin,
        used_gib=(used_bytes(torch.device(DEVICE)) - others) / GIB if CUDA else None,
        versions=versions(),
    )


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """Make the settings that distinguish the lines of results."""
    names = ("task", "steps", "quantize") if args.what != "loss" else ()
    return {"model": args.model.stem, "teacher": args.teacher.stem, **{name: getattr(args, name) for name in names}}


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = parser_with(__doc__, "--output", repeats=2, steps=6, rows=8, utilization=0.3)
    add = parser.add_argument
    add("what", choices=("step", "loss", "trl"))
    add("--model", type=Path, required=True, help="GGUF file or folder of the student")
    add("--teacher", type=Path, help="GGUF file or folder of the teacher (default: the model)")
    add("--quantize", help="4-bit format of both models, e.g. nvfp4 (default: 16 bits); only for step")
    add("--problems", type=Path, required=True, help="gsm8k_train.jsonl, next to gsm8k_test.jsonl")
    add("--task", default="gsm8k_verl", help="file of configs/tasks (default: %(default)s)")
    add("--divergences", nargs="+", choices=DIVERGENCES, default=[NONE, "sampled", "reverse"])
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the task")
    add("--liger", action=argparse.BooleanOptionalAction, default=CUDA, help="Liger's fused layers in TRL")
    add("--generation", choices=["vllm", "transformers"], default="vllm", help="of TRL")
    args = parser.parse_args(argv)
    args.teacher = args.teacher or args.model
    args.of_task = yaml.safe_load(task_file(args.task).read_text())
    if args.what != "step" and importlib.util.find_spec("trl") is None:
        print("nothing measured: trl is not installed", file=sys.stderr)
        return
    {"step": step, "loss": loss, "trl": trl}[args.what](args)


if __name__ == "__main__":
    main()
