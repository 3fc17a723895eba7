"""Seconds that an engine takes to start, each time in a process of its own: python -m tests.bench.bench_start

``first``: nothing is kept of an earlier start, neither graphs of vLLM nor kernels of Triton and of this project.
``again``: the same engine once more. ``other``: the same model for other lengths and numbers of sequences, which vLLM
compiles a graph for, with the kernels that are there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings

import torch

from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench.bench_rollout import checkpoint, policy_of
from tests.bench.harness import DTYPE, RANK, check, decoding_kernel, emit, keep, parser_with, run_apart
from tests.random_checkpoints import FORMATS

CACHES = "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"
SETTINGS = {"first": (64, 512), "again": (64, 512), "other": (32, 768)}  # sequences, and tokens of one


def start(args: argparse.Namespace, kind: str) -> None:
    """Start an engine and print the line."""
    warnings.filterwarnings("ignore", message="Unsupported layer type")
    sequences, tokens = SETTINGS[kind]
    policy = policy_of(args.path, args.size, args.base, RANK)
    engine = VLLMEngine(max_num_seqs=sequences)
    begin = time.perf_counter()
    engine.start(policy, max_model_len=tokens)
    seconds, phases = time.perf_counter() - begin, engine.start_s
    [scores] = engine.score([list(range(16))])
    check([("the number of scores that are not finite", float(not torch.tensor(scores).isfinite().all()), 0)])
    engine.close()
    shape = {"model": args.size, "base": args.base, "sequences": sequences, "tokens": tokens}
    kernel = decoding_kernel("auto", args.base, DTYPE)
    emit(f"start/{kind}", {**shape, "decoding": kernel}, str(DTYPE).removeprefix("torch."), [seconds], phases_s=phases)


def main(argv: list[str] | None = None) -> None:
    """One start of each kind, in turn."""
    parser = parser_with(__doc__, "--size", "--folder")
    parser.add_argument("--base", choices=FORMATS, default="nvfp4")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=SETTINGS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.kind:
        start(args, args.kind)
        return
    options = ["--size", args.size, "--base", args.base, "--path", str(checkpoint(args.folder, args.size, args.base))]
    with tempfile.TemporaryDirectory() as caches:
        environment = {name: f"{caches}/{name}" for name in CACHES}
        for kind in SETTINGS:
            for line in run_apart("bench_start", [*options, "--kind", kind], **environment):
                keep(line, None)


if __name__ == "__main__":
    main()
