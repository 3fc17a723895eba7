"""python -m qerl_pl quantize: write a 4-bit copy of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from qerl_pl.quant.output import REPORT
from qerl_pl.quant.quantize import quantize_checkpoint


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 after an error that the user can mend, in one line on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device is cuda, but this machine has no CUDA GPU; use --device cpu")
        layers = quantize_checkpoint(
            arguments.model, arguments.output, format=arguments.format, ignore=arguments.ignore, device=arguments.device
        )
    except (ValueError, OSError) as error:
        print(f"quantize: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quantize: stopped; the same command continues where it was", file=sys.stderr)
        return 130
    worst = max(layers, key=lambda layer: layer.weight_error)
    print(f"{len(layers)} linears packed; relative weight error at most {worst.weight_error:.4f} ({worst.name})")
    print(f"{arguments.output} (per layer: {arguments.output / REPORT})")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qerl_pl quantize", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a bf16, fp16 or fp32 checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--format", choices=["nvfp4", "mxfp4", "nf4"], default="nvfp4")
    parser.add_argument("--method", choices=["rtn"], default="rtn", help="rtn: round to nearest")
    parser.add_argument(
        "--ignore",
        nargs="*",
        default=["lm_head"],
        metavar="NAME",
        help='linears left alone: names, or "re:PATTERN" (default: lm_head)',
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    return parser
