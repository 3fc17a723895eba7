"""Logits in fp32 against logits rounded to bf16: python -m tests.bench.bench_head

``head/product``: the head alone, what an engine's step has of it, for some numbers of tokens. ``head/rollout``: a
decoding step, and the difference between engine and trainer (whose logits are fp32) at sampled tokens: mean and 99th
percentile of the absolute values, in nats. "rounded" is vLLM's own head, of which the trainer's differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from qerl_pl.policy.logprobs import fp32_logits
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench.checkpoints import DEVICE
from tests.bench.exact_engines import NEW_TOKENS, VARIANTS, decoding, prompts, run_variants, started
from tests.bench.harness import SIZES, captured, check, emit, relative_error, timed

SAMPLED = 16  # sequences whose tokens are compared


def product(size: str, rows: int, repeats: int) -> None:
    """Time the two products, the rounded one with the conversion that sampling begins with."""
    shape = SIZES[size]
    weight = torch.randn(shape.vocabulary, shape.hidden, device=DEVICE).bfloat16()
    hidden = torch.randn(rows, shape.hidden, device=DEVICE).bfloat16()
    check([("the product", relative_error(fp32_logits(hidden, weight), hidden.double() @ weight.double().t()), 1e-4)])
    runs: dict[str, Callable[[], object]] = {
        "exact": captured(lambda: fp32_logits(hidden, weight)),
        "rounded": captured(lambda: (hidden @ weight.t()).float()),
    }
    for name, seconds in timed(runs, repeats=repeats).items():
        about = {"variant": name, "tokens": rows, "vocabulary": shape.vocabulary, "hidden": shape.hidden}
        emit("head/product", about, "bfloat16", seconds)


@torch.no_grad()
def gaps(engine: VLLMEngine, policy: Policy) -> torch.Tensor:
    """|trainer - engine| in nats at the tokens of some completions."""
    found = []
    groups = engine.generate(prompts(SAMPLED), Sampling(1, NEW_TOKENS), seed=1)
    for prompt, [completion] in zip(prompts(SAMPLED), groups, strict=True):
        row = torch.tensor([[*prompt, *completion.tokens]], device=DEVICE)
        sampled = torch.arange(row.shape[1], device=DEVICE)[None] >= len(prompt)
        own = policy.token_stats(row, sampled, temperature=1.0).logprobs[0, len(prompt) :]
        found.append((own.cpu() - torch.tensor(completion.logprobs)).abs())
    return torch.cat(found)


def measure(args: argparse.Namespace) -> None:
    """Print the lines of one variant; the products come with the first."""
    if args.variant == VARIANTS[0]:
        for rows in args.sequences:
            product(args.size, rows, 20)
    engine, policy = started(args.path, max(args.sequences), _fp32_head=args.variant == "exact")
    apart = gaps(engine, policy)
    difference = {"gap_mean": apart.mean().item(), "gap_p99": apart.quantile(0.99).item(), "tokens": len(apart)}
    for count in args.sequences:
        steps, speed = decoding(engine, count, args.repeats)
        about = {"variant": args.variant, "model": args.size, "base": args.base, "sequences": count}
        emit("head/rollout", about, "bfloat16", steps, tokens_per_s=speed, **difference)
    engine.close()


if __name__ == "__main__":
    run_variants("tests.bench.bench_head", None, measure)
