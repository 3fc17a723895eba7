"""Measure the seconds that an engine takes to start, each time in a new process: python -m tests.bench.bench_start

The results named ``first`` are of starts with empty caches: neither vLLM's compiled graphs nor compiled kernels of
Triton or of this project are left from an earlier start. ``again`` is the next start of the same engine.
"""

import argparse
import tempfile
import warnings

from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench.bench_rollout import checkpoint, policy_of
from tests.bench.harness import DTYPE, RANK, check_finite, decoding_kernel, emit, now, parser_with, run_apart

CACHES = "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"
KINDS, SEQUENCES, TOKENS = ("first", "again"), 64, 512  # tokens of one sequence


def start(args: argparse.Namespace) -> None:
    """Start an engine and print the line."""
    warnings.filterwarnings("ignore", message="Unsupported layer type")
    policy = policy_of(args.path, args.size, args.base, RANK)
    engine = VLLMEngine(max_num_seqs=SEQUENCES)
    begin = now()
    engine.start(policy, max_model_len=TOKENS)
    seconds, phases = now() - begin, engine.start_s
    check_finite(*engine.score([list(range(16))]))
    engine.close()
    shape = {"model": args.size, "base": args.base, "sequences": SEQUENCES, "tokens": TOKENS}
    shape["decoding"] = decoding_kernel("auto", args.base, DTYPE)
    emit(f"start/{args.kind}", shape, DTYPE, [seconds], phases_s=phases)


def main(argv: list[str] | None = None) -> None:
    """One start of each kind, in turn."""
    parser = parser_with(__doc__, "--size", "--folder", "--base", "--path")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.kind:
        start(args)
        return
    options = ["--size", args.size, "--base", args.base, "--path", str(checkpoint(args.folder, args.size, args.base))]
    with tempfile.TemporaryDirectory() as caches:
        environment = {name: f"{caches}/{name}" for name in CACHES}
        for kind in KINDS:
            run_apart("bench_start", [*options, "--kind", kind], variables=environment)


if __name__ == "__main__":
    main()
