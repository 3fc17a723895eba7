"""How long an engine takes to start, each time in a process of its own: python -m tests.bench.bench_start

``first``: nothing is kept of an earlier start, neither graphs of vLLM nor kernels of Triton, Humming and this project.
``again``: the same engine once more. ``other``: the same model for other lengths and numbers of sequences, which vLLM
compiles a graph for, with the kernels that are there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench.bench_rollout import DEVICE, DTYPE, checkpoint, format_of, shell_policy
from tests.bench.checkpoints import FORMATS
from tests.bench.harness import RANK, SIZES, check, child_environment, decoding_kernel, emit

CACHES = "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "HUMMING_CACHE_DIR"
SETTINGS = {"first": (64, 512), "again": (64, 512), "other": (32, 768)}  # sequences, and tokens of one


def start(args: argparse.Namespace, kind: str) -> None:
    """Start an engine and print the line."""
    warnings.filterwarnings("ignore", message="Unsupported layer type")
    sequences, tokens = SETTINGS[kind]
    policy = shell_policy(str(args.path), args.size, RANK, format_of(args))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7B" if DEVICE == "cuda" else "tiny")
    parser.add_argument("--base", choices=FORMATS, default="nvfp4")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "qerl-bench", help="of checkpoints"
    )
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=SETTINGS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.kind:
        start(args, args.kind)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint(args.folder, args.size, args.base)
    command = [sys.executable, "-m", "tests.bench.bench_start", "--size", args.size, "--base", args.base]
    with tempfile.TemporaryDirectory() as caches:
        environment = {**child_environment(), **{name: f"{caches}/{name}" for name in CACHES}}
        for kind in SETTINGS:
            subprocess.run([*command, "--path", str(path), "--kind", kind], env=environment, check=True)


if __name__ == "__main__":
    main()
