"""Measure a step of pretraining: python -m tests.bench.bench_pretrain --size 10m

Prints two JSON lines: a step whose batches are drawn beforehand, and a step with the waiting for the processes that
draw problems, as in `pretrain`. Without a GPU, the size is "toy" and a step has 32 problems.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from qerl_pl.pretraining.batches import Batches, Rows
from qerl_pl.pretraining.fit import Settings, batches_of, loader_of, new_policy, train_step
from qerl_pl.pretraining.loss import prepare, token_losses
from qerl_pl.pretraining.sizes import LEARNING_RATES, SHAPES
from tests.bench.harness import CUDA, DEVICE, DTYPE, emit


def step_seconds(
    model: Qwen2ForCausalLM, batches: Iterable[list[Rows]], learning_rate: float, *, warmups: int
) -> list[float]:
    """Measure the seconds of each step after the warm-ups, sorted. The device is waited for after each fifth of them,
    so that the host may run ahead of it, as it does in training."""
    device = torch.device(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    found, began = [], 0.0
    for step, rows in enumerate(batches, start=1 - warmups):
        train_step(model, optimizer, rows, device)
        if step >= 0 and step % 5 == 0:
            if CUDA:
                torch.cuda.synchronize()
            now = time.perf_counter()
            found += [(now - began) / 5] if step else []
            began = now
    return sorted(found)


def agrees(model: Qwen2ForCausalLM, batches: Batches) -> bool:
    """Whether the loss in the dtype of training is that in fp32."""
    rows, device = batches[0][0], torch.device(DEVICE)
    with torch.no_grad():
        own, exact = (token_losses(model, rows, device, dtype).mean().item() for dtype in (DTYPE, torch.float32))
    return abs(own - exact) < 0.02


def main(argv: Sequence[str] | None = None) -> None:
    """Print the times of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="10m" if CUDA else "toy")
    parser.add_argument("--batch-size", type=int, default=512 if CUDA else 32, help="problems per step")
    parser.add_argument("--steps", type=int, default=100 if CUDA else 10, help="a multiple of 5")
    parser.add_argument("--workers", type=int, default=max(0, min(12, len(os.sched_getaffinity(0)) - 1)))
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    args = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warmups = 10
    steps = warmups + args.steps
    settings = Settings(
        size=args.size, steps=steps, batch_size=args.batch_size, learning_rate=LEARNING_RATES[args.size]
    )
    model, tokenizer = new_policy(settings)
    torch.nn.Module.to(model, DEVICE)
    prepare(model, torch.device(DEVICE))
    batches = batches_of(tokenizer, settings)
    if not agrees(model, batches):
        print("pretrain: the loss is not that in fp32; nothing is measured", file=sys.stderr)
        return
    drawn = [batches[step] for step in range(10)]
    sources: dict[str, Iterable[list[Rows]]] = {
        "drawn": (drawn[step % len(drawn)] for step in range(steps)),
        "loader": loader_of(batches, done=0, num_workers=args.workers),
    }
    shape = {"size": args.size, "problems": args.batch_size, "tokens": sum(len(rows.tokens) for rows in drawn[0])}
    for name, source in sources.items():
        seconds = step_seconds(model, source, settings.learning_rate, warmups=warmups)
        emit(f"pretrain/{name}", shape, str(DTYPE), seconds, output=args.output, workers=args.workers)


if __name__ == "__main__":
    main()
