"""Write a 4-bit copy of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import torch

from qerl_pl.common.program import CommandParser, called_as
from qerl_pl.quant.calibration import read_calibration
from qerl_pl.quant.files import CONFIG, read_json
from qerl_pl.quant.output import REPORT
from qerl_pl.quant.quantize import FormatName, Method, quantize_checkpoint
from qerl_pl.quant.text_part import NOT_USED, has_vision


def main(argv: list[str] | None = None) -> int:
    """Quantise a checkpoint; returns 0, or 2 after an error, which is printed to stderr in one line."""
    arguments = _parser().parse_args(argv)
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Quantise with parsed arguments and print the largest errors."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but this machine has no CUDA GPU; use --device cpu")
    calibration = None
    if arguments.calibration is not None:
        samples, length = arguments.samples, arguments.length
        calibration = read_calibration(arguments.calibration, arguments.model, samples=samples, length=length)
    layers = quantize_checkpoint(
        arguments.model,
        arguments.output,
        format=arguments.format,
        method=arguments.method,
        ignore=arguments.ignore,
        calibration=calibration,
        device=arguments.device,
    )
    if has_vision(read_json(arguments.model / CONFIG)):
        print(f"{arguments.model}: {NOT_USED}")
    worst = max(layers, key=lambda layer: layer.weight_error)
    print(f"{len(layers)} linears packed; relative weight error at most {worst.weight_error:.4f} ({worst.name})")
    if calibration is not None:
        worst = max(layers, key=lambda layer: layer.output_error or 0.0)
        print(f"relative output error on calibration data at most {worst.output_error:.4f} ({worst.name})")
    print(f"{arguments.output} (per layer: {arguments.output / REPORT})")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog=called_as("quantize"), description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a bf16, fp16 or fp32 checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--format", choices=get_args(FormatName), default="nvfp4", help="4-bit format (default: nvfp4)")
    parser.add_argument(
        "--method",
        choices=get_args(Method),
        default="rtn",
        help="rtn: round to nearest; mse: search block scales; awq: also fold scales into norms; gptq: second order",
    )
    parser.add_argument(
        "--ignore",
        nargs="*",
        default=["lm_head"],
        metavar="NAME",
        help='linears that stay dense: names, or "re:PATTERN" (default: lm_head)',
    )
    parser.add_argument(
        "--calibration",
        metavar="SOURCE",
        help=".txt or .jsonl file, or dataset of the Hugging Face hub; required by awq and gptq, optional for others",
    )
    parser.add_argument("--samples", type=int, default=256, help="calibration sequences (default: 256)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per calibration sequence (default: 2048)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default=device, help=f"where the weights are computed (default: {device})"
    )
    return parser
