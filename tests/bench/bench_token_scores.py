"""Log-probabilities of sampled tokens, ours and vLLM's: python -m tests.bench.bench_token_scores

What follows the sampling of a decoding step: one token a row of bf16 logits. ``read`` is one pass over the logits.
Nothing is measured without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from qerl_pl.kernels.token_scores import token_scores, token_scores_reference
from tests.bench.harness import check, device_seconds, emit, timed

VOCABULARY, INNER = 152064, 20


def compare(rows: int, repeats: int) -> None:
    """Check ours, and time everybody."""
    logits = 5 * torch.randn(rows, VOCABULARY, device="cuda").bfloat16()
    tokens = torch.randint(VOCABULARY, (rows,), device="cuda")
    found, exact = token_scores(logits, tokens), token_scores_reference(logits, tokens)
    differences = [(a.double() - b.double()).abs().max().item() for a, b in zip(found, exact, strict=True)]
    check([("the log-probability", differences[0], 1e-4), ("the rank", differences[1], 0)])
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: token_scores(logits, tokens),
        "read": lambda: logits.amax(-1),
    }
    if importlib.util.find_spec("vllm"):
        theirs: Any = import_module("vllm.v1.worker.gpu.sample.logprob")
        runs["vllm"] = lambda: theirs.compute_topk_scores(logits, 0, tokens)
    for name, seconds in timed(runs, repeats=repeats, inner=INNER).items():
        shape = {"rows": rows, "vocabulary": VOCABULARY}
        emit(f"token-scores/{name}", shape, "bfloat16", seconds, device_s=device_seconds(runs[name]))


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("token_scores: nothing is measured without a CUDA GPU", file=sys.stderr)
        return
    for rows in args.rows:
        compare(rows, args.repeats)


if __name__ == "__main__":
    main()
