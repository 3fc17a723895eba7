"""Writes the recipes, one file a run: python configs/make_recipes.py

The grid is the paper's (arXiv 2510.11696, tables 1, 2 and 4) with the arm that it left out, AQN on a dense base. Change
a value here and write the files again; tests/test_configs.py compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

CONFIGS = Path(__file__).parent


class Model(NamedTuple):
    """A size of Qwen2.5-Instruct."""

    name: str
    dense_gb: float
    """The base in bf16 (table 3 and tables 5 to 8)."""
    nvfp4_gb: float
    """The base in NVFP4 (likewise)."""
    levels: str
    """Of Big-Math that it trains on."""


class Arm(NamedTuple):
    """How the base is stored, and whether rollouts get noise."""

    name: str
    format: str
    noise: bool


class Task(NamedTuple):
    """What is trained on, and how (table 4)."""

    name: str
    title: str
    num_rollouts: int
    updates: int
    num_completions: int
    max_tokens: int
    rewards: str
    objective: str
    extra: tuple[str, ...]
    """Further lines under ``model``."""
    val_every: int


MODELS = (
    Model("3B", 6.2, 2.8, "3-5"),
    Model("7B", 15.2, 5.9, "3-5"),
    Model("14B", 29.6, 10.6, "3-5"),
    Model("32B", 62.3, 20.7, "4-5"),
)
ARMS = (
    Arm("nvfp4", "nvfp4", False),
    Arm("nvfp4_aqn", "nvfp4", True),
    Arm("nf4", "nf4", False),
    Arm("mxfp4", "mxfp4", False),
    Arm("bf16", "bf16", False),
    Arm("bf16_aqn", "bf16", True),
)
TASKS = (
    Task(
        name="gsm8k",
        title="GRPO on GSM8K",
        num_rollouts=600,
        updates=4,
        num_completions=8,
        max_tokens=4096,
        rewards="numeric_answer",
        objective="{preset: grpo, clip_high: 0.28, filter_truncated: true}",
        extra=(),
        val_every=20,
    ),
    Task(
        name="big_math",
        title="DAPO on Big-Math",
        num_rollouts=1000,
        updates=1,
        num_completions=16,
        max_tokens=8192,
        rewards="math_answer_overlong",
        objective="{preset: dapo, filter_truncated: true}",
        extra=("  dynamic_sampling: {metric: accuracy, oversample: 2.0}   # null: train on every group",),
        val_every=50,
    ),
)
TITLES = {"nvfp4": "NVFP4 base", "nf4": "NF4 base", "mxfp4": "MXFP4 base", "bf16": "bf16 base"}
WARMUP_SHARE = 0.1
CALIBRATION = "open-thoughts/OpenThoughts-114k"


def recipes() -> dict[Path, str]:
    """Every recipe's path under this folder, and its text."""
    return {path_of(task, model, arm): recipe(task, model, arm) for task in TASKS for model in MODELS for arm in ARMS}


def path_of(task: Task, model: Model, arm: Arm) -> Path:
    return Path(task.name, f"qwen2.5-{model.name.lower()}_{arm.name}.yaml")


def recipe(task: Task, model: Model, arm: Arm) -> str:
    """The text of one recipe."""
    max_steps = task.num_rollouts * task.updates
    lr = "5.0e-6" if arm.format == "bf16" else "1.0e-5"
    data = task.name if task.name == "gsm8k" else f"{task.name}_{model.levels}"
    lines = [
        *(f"# {line}".rstrip() for line in header(task, model, arm)),
        f"run_dir: runs/{path_of(task, model, arm).with_suffix('')}",
        "trainer:",
        f"  max_steps: {max_steps:<22} # optimizer steps: {task.num_rollouts} rollouts, {counted(task.updates)} each",
        f"  val_check_interval: {task.val_every:<13} # rollouts",
        *noise(arm),
        "model:",
        f"  base: {folder(model, arm.format)}",
        "  engine: qerl_pl.rollout.vllm.VLLMEngine",
        f"  rewards: ../shared/{task.rewards}.yaml",
        f"  sampling: {{num_completions: {task.num_completions}, max_tokens: {task.max_tokens}, temperature: 1.0}}",
        "  lora: {rank: 32, alpha: 32}",
        f"  objective: {task.objective}",
        *task.extra,
        f"  updates_per_rollout: {task.updates}",
        "  optimizer:",
        "    class_path: torch.optim.AdamW",
        f"    init_args: {{lr: {lr}, betas: [0.9, 0.99], weight_decay: 0.1}}",
        "  lr_schedule: cosine",
        f"  warmup_steps: {round(WARMUP_SHARE * max_steps)}",
        "  max_grad_norm: 0.2",
        "  gradient_checkpointing: true",
        f"data: ../shared/{data}.yaml",
    ]
    return "\n".join(lines) + "\n"


def header(task: Task, model: Model, arm: Arm) -> list[str]:
    """What the recipe is, how to launch it, what it takes."""
    aqn = " with AQN" if arm.noise else ""
    dense, base = folder(model, "bf16"), folder(model, arm.format)
    lines = [
        f"Qwen2.5-{model.name}-Instruct, {TITLES[arm.format]}{aqn}, {task.title}. Written by make_recipes.py.",
        "",
        f"  hf download Qwen/Qwen2.5-{model.name}-Instruct --local-dir {dense}",
    ]
    if arm.format != "bf16":
        lines.append(f"  python -m qerl_pl quantize --model {dense} --output {base} --format {arm.format}")
        if arm.format != "nf4":
            lines[-1] += " \\"
            lines.append(f"    --method awq --calibration {CALIBRATION}")
    lines += [
        f"  python train.py fit -c configs/{path_of(task, model, arm)} --ckpt_path last",
        "",
        *memory(model, arm),
        *differences(task, arm),
    ]
    return lines


def differences(task: Task, arm: Arm) -> list[str]:
    """What is not as in the paper's table 4, or is not said there."""
    lines = [
        "Differs from the paper: AdamW's state is fp32, not 8 bits. Not said there, so as in its release: cosine",
        "schedule, 10 % warm-up, gradient norm 0.2, weight decay 0.1, the rewards' weights. More in configs/README.md.",
    ]
    if task.name == "big_math":
        lines.append(
            "Not in its release: dynamic sampling by the accuracy, the soft overlong punishment, and a training"
        )
        lines.append("set that is held against the benchmarks.")
    if arm.format == "bf16":
        lines.append(
            "The lr of a dense base is half that of the others; equal ones: --model.optimizer.init_args.lr 1e-5"
        )
    if arm.format == "bf16" and arm.noise:
        lines.append("The paper has no such run: it tells noise from quantisation.")
    return lines


def memory(model: Model, arm: Arm) -> list[str]:
    """What is known of the memory that a run takes."""
    size = {"nvfp4": model.nvfp4_gb, "bf16": model.dense_gb}.get(arm.format)
    weighs = "The base" if size is None else f"The base has {size} GB (by the paper) and"
    lines = [f"{weighs} is on the GPU twice, for the trainer and for vLLM."]
    if arm.format == "nf4":
        lines = [f"vLLM 0.32 runs no NF4 base: it holds the weights dequantised, {model.dense_gb} GB (by the paper)."]
    if arm.format == "mxfp4":
        lines.append("On Blackwell vLLM 0.32 would quantise activations too: there it holds the weights dequantised.")
    if arm.format in ("bf16", "nf4") and model.name == "32B":
        lines.append("So one 80 GB GPU does not hold it.")
    return [*lines, "What else is, and whether it fits: python -m qerl_pl plan -c THIS_FILE --gpu-memory 80"]


def noise(arm: Arm) -> list[str]:
    if not arm.noise:
        return []
    return [
        "  callbacks+:",
        "    - class_path: callbacks.aqn.AdaptiveQuantizationNoise",
        "      init_args: {sigma_start: 1.0e-2, sigma_end: 5.0e-4, num_stages: 10}",
    ]


def folder(model: Model, format: str) -> str:
    return f"models/qwen2.5-{model.name.lower()}" + ("" if format == "bf16" else f"-{format}")


def counted(updates: int) -> str:
    return "1 update" if updates == 1 else f"{updates} updates"


if __name__ == "__main__":
    for path, text in recipes().items():
        (CONFIGS / path).parent.mkdir(exist_ok=True)
        (CONFIGS / path).write_text(text)
    print(f"{len(recipes())} recipes written")
