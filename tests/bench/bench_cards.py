"""Training passes with what the memory plan chooses for cards of some sizes: python -m tests.bench.bench_cards

For each card the plan of a run with vLLM asleep beside the trainer chooses gradient checkpointing and the micro-batch;
then a batch of packed rows goes forward and backward in such micro-batches, while torch may take no more than the card
would leave it. ``peak_bytes`` is against ``predicted_bytes``, what the plan says of the trainer at its largest moment
without the sleeping engine, the optimizer's state and the CUDA context, none of which is here. ``allocator_retries`` is
how often torch's allocator had to free everything it had cached, which waits for the GPU.
"""

from __future__ import annotations

import sys
import warnings
from statistics import median

import torch

from qerl_pl.common.batching import micro_batches
from qerl_pl.kernels import hopper
from qerl_pl.memory.fitting import fitted
from qerl_pl.memory.settings import EngineMemory, RunMemory
from qerl_pl.memory.shape import config_shape
from qerl_pl.policy.elementwise import fused_wanted
from qerl_pl.quant.nvfp4 import NVFP4
from tests.bench.bench_model import DTYPE, clear, draw, last_columns, ours, step
from tests.bench.harness import CUDA, DEVICE, RANK, emit, parser_with, reset_peak, timed
from tests.random_models import model_config, random_model

GIB = 2**30
AWAY = ("CUDA, libraries", "engine's base", "engine's adapter", "engine's state, CUDA graphs", "optimizer state")
ROWS = 128
PROMPT = 256


def measure(size: str, gib: int, tokens: int, repeats: int) -> None:
    """One model on one card, in a line of results, or on stderr why not."""
    config = model_config(size)
    batch, mask = draw(tokens, config.vocab_size)
    lengths = last_columns(mask) + 1
    fused = CUDA and fused_wanted("auto")
    run = RunMemory(
        rows=ROWS,
        prompt_tokens=PROMPT,
        completion_tokens=int(lengths.max()) - PROMPT,
        rank=RANK,
        gradient_checkpointing="auto",
        fused=fused,
        engine=EngineMemory(one_copy=CUDA and hopper.is_available(torch.device(DEVICE))),
    )
    found = fitted(config_shape(config, NVFP4, DTYPE), run, gib * GIB)
    moment = max(("head", "block"), key=found.total)
    room = found.total(moment) - sum(found.parts[name].get(moment, 0) for name in AWAY if name in found.parts)
    chosen = f"{size} on {gib} GiB: {found.summary()}"
    print(chosen, file=sys.stderr)
    clear()
    try:
        set_share(1.0)
        reset_peak()
        policy = ours(
            random_model(config, NVFP4, dtype=DTYPE, device=DEVICE),
            gradient_checkpointing=found.run.gradient_checkpointing,
            fused_elementwise=fused,
        )
        held = torch.cuda.memory_allocated()
        away = found.total(moment) - room
        set_share((gib * GIB - away) / torch.cuda.get_device_properties(0).total_memory if CUDA else 1.0)
        parts = [rows.to(batch.device) for rows in micro_batches(lengths.cpu(), found.micro_batch_tokens)]

        def passes() -> None:
            for rows in parts:
                width = int(lengths[rows].max())
                step(policy, batch[rows, :width], mask[rows, :width])

        name = f"cards/{found.run.gradient_checkpointing}"
        passes()  # a warm-up
        retries = torch.cuda.memory_stats()["num_alloc_retries"] if CUDA else 0
        seconds = timed({name: passes}, repeats=repeats, warmups=0)[name]
        emit(
            name,
            {"model": size, "card_gib": gib, "tokens": tokens, "rank": RANK},
            "bfloat16",
            seconds,
            tokens_per_s=tokens / median(seconds),
            fused=fused,
            micro_batch_tokens=found.micro_batch_tokens,
            passes=len(parts),
            peak_bytes=torch.cuda.max_memory_allocated(),
            predicted_bytes=room,
            resident_bytes=held,
            allocator_retries=torch.cuda.memory_stats()["num_alloc_retries"] - retries if CUDA else None,
        )
    except torch.OutOfMemoryError as error:
        print(f"{chosen}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
    finally:
        set_share(1.0)


def set_share(share: float) -> None:
    """Let torch take at most a share of the GPU's memory."""
    if CUDA:
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = parser_with(__doc__)
    parser.add_argument("--sizes", nargs="*", default=["7B", "14B", "32B"] if CUDA else ["tiny"])
    parser.add_argument("--cards", nargs="*", type=int, default=[141, 80, 24] if CUDA else [8], help="GiB")
    parser.add_argument("--tokens", type=int, default=16384 if CUDA else 512, help="of the batch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="The PEFT config's|Unsupported layer type")
    for size in args.sizes:
        for gib in args.cards:
            measure(size, gib, args.tokens, args.repeats)


if __name__ == "__main__":
    main()
