"""Time GRPO steps of the same global batch on one GPU and on several: python -m tests.bench.bench_ddp --gpus 1 2

Runs train.py with random weights, once for each number of GPUs. The runs start together and take turns to train. The
batch should fill the engines of all GPUs: choose --prompts so that prompts x 8 is at least max-num-seqs x GPUs.
Otherwise each of several GPUs decodes fewer rows at a time than one GPU alone, which saves little time, so that several
GPUs look worse than they are. Prints a JSON line for each run, with the seconds of its phases and its curves of reward,
loss, gradient norm, entropy and the difference between trainer and engine.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from statistics import median

import torch

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.results.curves import read_curves
from tests.bench.bench_grpo import GROUP, model_settings
from tests.bench.harness import CUDA, DEVICE, DTYPE, PHASES, decoding_kernel, emit, fit_command, parser_with
from tests.bench.together import run_together
from tests.random_checkpoints import written_apart

PROMPT_TOKENS = 320
CURVES = ("train/reward", "train/loss", "train/grad_norm", "policy/entropy", "gap/mean_abs")


def even_tokens(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
    """Reward each completion by the share of its tokens that have an even number. Every token counts equally, so
    completions that differ in a few tokens have nearly equal rewards."""
    return [sum(token % 2 == 0 for token in row.tokens) / len(row.tokens) for row in completions]


def prepare(args: argparse.Namespace, base: str, gpus: int) -> list[str]:
    """Make the folder of a run; returns its command line."""
    folder = args.folder / f"ddp-{gpus}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = {"num_train": 4 * args.prompts, "num_validation": gpus}
    engine = {"max_num_seqs": args.max_num_seqs, "enforce_eager": args.eager}
    trainer = {"accelerator": DEVICE, "devices": gpus, "max_steps": args.steps, "limit_val_batches": 0}
    settings = {
        "run_dir": str(folder),
        "trainer": {**trainer, "callbacks+": [{"class_path": "tests.bench.together.Turn"}]},
        "model": model_settings(args, base, engine, "tests.bench.bench_ddp.even_tokens"),
        "data": {
            "source": {"class_path": "datamodules.arithmetic.Arithmetic", "init_args": source},
            "question_template": "what is it " * 20 + "{question}",
            "batch_size": args.prompts,
            "max_prompt_tokens": PROMPT_TOKENS,
        },
    }
    return fit_command(folder, settings)


def main(argv: list[str] | None = None) -> None:
    """Do a run for each number of GPUs, and print its line."""
    parser = parser_with(
        __doc__,
        *("--size", "--folder", "--eager", "--micro-batch-tokens"),
        gpus=[1, torch.cuda.device_count() if CUDA else 2],
        prompts=64 if CUDA else 4,
        completion=256 if CUDA else 16,
        max_num_seqs=256 if CUDA else 16,
        steps=4,
    )
    parser.set_defaults(group=GROUP, updates=1, plain=False)
    args = parser.parse_args(argv)
    base = str(written_apart(args.folder, args.size, "nvfp4"))
    numbers = sorted(set(args.gpus))
    run_together({f"{gpus} GPUs": (prepare(args, base, gpus), {}) for gpus in numbers}, stdout=sys.stderr)
    names = "size", "prompts", "completion", "max_num_seqs", "micro_batch_tokens", "steps", "eager"
    for gpus in numbers:
        curves = read_curves(args.folder / f"ddp-{gpus}")
        shape = {name: getattr(args, name) for name in names}
        shape |= {"gpus": gpus, "decoding_kernel": decoding_kernel("auto", "nvfp4", DTYPE)}
        times = {name: curves[f"time/{name}_s"].values[1:] for name in (*PHASES, "wait", "step")}  # after a warm-up
        steps = times.pop("step")
        phases = {name: median(seconds) for name, seconds in times.items()}
        values = {name: curves[name].values for name in CURVES}
        emit("ddp/step", shape, DEVICE, sorted(steps), phases_s=phases, curves=values)


if __name__ == "__main__":
    main()
