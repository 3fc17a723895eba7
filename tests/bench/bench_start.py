"""Measure the seconds that an engine takes to start, each time in a new process: python -m tests.bench.bench_start

``first``: no earlier start has left anything, neither vLLM's graphs nor kernels of Triton or of this project.
``again``: the same engine once more. ``other``: the same model with other lengths and another number of sequences, for
which vLLM compiles a new graph, while the kernels exist already.
"""

import argparse
import tempfile
import warnings

from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench.bench_rollout import checkpoint, policy_of
from tests.bench.harness import DTYPE, RANK, check_finite, decoding_kernel, emit, now, parser_with, run_apart

CACHES = "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"
SETTINGS = {"first": (64, 512), "again": (64, 512), "other": (32, 768)}  # sequences, and tokens of one


def start(args: argparse.Namespace) -> None:
    """Start an engine and print the line."""
    warnings.filterwarnings("ignore", message="Unsupported layer type")
    sequences, tokens = SETTINGS[args.kind]
    policy = policy_of(args.path, args.size, args.base, RANK)
    engine = VLLMEngine(max_num_seqs=sequences)
    begin = now()
    engine.start(policy, max_model_len=tokens)
    seconds, phases = now() - begin, engine.start_s
    check_finite(*engine.score([list(range(16))]))
    engine.close()
    shape = {"model": args.size, "base": args.base, "sequences": sequences, "tokens": tokens}
    shape["decoding"] = decoding_kernel("auto", args.base, DTYPE)
    emit(f"start/{args.kind}", shape, DTYPE, [seconds], phases_s=phases)


def main(argv: list[str] | None = None) -> None:
    """One start of each kind, in turn."""
    parser = parser_with(__doc__, "--size", "--folder", "--base", "--path")
    parser.add_argument("--kind", choices=SETTINGS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.kind:
        start(args)
        return
    options = ["--size", args.size, "--base", args.base, "--path", str(checkpoint(args.folder, args.size, args.base))]
    with tempfile.TemporaryDirectory() as caches:
        environment = {name: f"{caches}/{name}" for name in CACHES}
        for kind in SETTINGS:
            run_apart("bench_start", [*options, "--kind", kind], variables=environment)


if __name__ == "__main__":
    main()
