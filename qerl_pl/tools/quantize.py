"""Write a 4-bit copy of a checkpoint."""

import argparse
import sys
from pathlib import Path

import torch

from qerl_pl.base.folder import base_folder
from qerl_pl.model.files import CONFIG, NOT_USED, has_vision, read_json
from qerl_pl.model.quantization import check_calibrated, method_of
from qerl_pl.quant.calibration import read_calibration
from qerl_pl.quant.output import REPORT
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.quant.residual import START
from qerl_pl.tools.options import quantize_options


def main(argv: list[str] | None = None) -> int:
    """Quantise a checkpoint; returns the exit status, 130 after Ctrl-C."""
    arguments = quantize_options().parse_args(argv)
    try:
        run(arguments)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Quantise a checkpoint according to parsed arguments, and print the largest relative errors of weights and
    outputs."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but this machine has no CUDA GPU; use --device cpu")
    check_calibrated(arguments.calibration, arguments.samples, arguments.length)
    calibration, model = None, Path(base_folder(str(arguments.model), None))
    if arguments.calibration is not None:
        calibration = read_calibration(arguments.calibration, model, samples=arguments.samples, length=arguments.length)
    layers = quantize_checkpoint(
        model,
        arguments.output,
        format=arguments.format,
        method=method_of(arguments.method, arguments.calibration),
        ignore=arguments.ignore,
        calibration=calibration,
        residual=arguments.residual,
        device=device,
    )
    if has_vision(read_json(model / CONFIG)):
        print(f"{arguments.model}: {NOT_USED}")
    worst = max(layers, key=lambda layer: layer.weight_error)
    print(f"{len(layers)} linears packed; relative weight error at most {worst.weight_error:.4f} ({worst.name})")
    if calibration is not None:
        worst = max(layers, key=lambda layer: layer.output_error or 0.0)
        print(f"relative output error on calibration data at most {worst.output_error:.4f} ({worst.name})")
    if arguments.residual is not None:
        print(f"adapter to start from: --model.lora.start {arguments.output / START}")
    print(f"{arguments.output} (per layer: {arguments.output / REPORT})")
