"""Measure the seconds that ``qerl quantize`` takes, each time in a new process: python -m tests.bench.bench_quantize

    python -m tests.bench.bench_quantize --size 7B --problems gsm8k_train.jsonl --output docs/results/quantize.jsonl

The model has random weights, in bf16. It is quantised to NVFP4 by rounding (rtn) and by gptq with ``--samples``
calibration sequences of ``--length`` tokens; ``--residual`` also writes a start adapter of this rank. Seconds are those
of the whole command, with loading, calibration and writing; ``bytes`` are those of the files read and written.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.harness import DTYPE, ROOT, child_environment, emit, now, parser_with
from tests.random_checkpoints import written_apart

METHODS = ("rtn", "gptq")


def words_of(method: str, args: argparse.Namespace) -> list[str]:
    """Return the options of ``qerl quantize`` for a method."""
    if method == "rtn":
        return ["--method", "rtn"]
    calibration = ["--calibration", str(args.problems), "--samples", str(args.samples), "--length", str(args.length)]
    residual = ["--residual", str(args.residual)] if args.residual else []
    return ["--method", "gptq", *calibration, *residual]


def main(argv: list[str] | None = None) -> None:
    """Quantise with each method in turn, and print a line for each."""
    parser = parser_with(__doc__, "--size", "--folder", "--output", samples=64, length=512, residual=0)
    parser.add_argument("--problems", type=Path, help="text or JSON lines to calibrate by; required by gptq")
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=METHODS)
    args = parser.parse_args(argv)
    if "gptq" in args.methods and args.problems is None:
        parser.error("gptq needs --problems, a file to calibrate by")
    source = written_apart(args.folder, args.size, "bf16")
    for method in args.methods:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            words = ["quantize", "--model", str(source), "--output", f"{folder}/{args.size}", *words_of(method, args)]
            begin = now()
            command = [sys.executable, "-m", "qerl_pl", *words]
            subprocess.run(command, cwd=ROOT, env=child_environment(), stdout=sys.stderr, check=True)
            seconds = now() - begin
            sizes = [
                sum(file.stat().st_size for file in place.rglob("*.safetensors")) for place in (source, Path(folder))
            ]
        calibration = {} if method == "rtn" else {"calibration_tokens": [args.samples, args.length]}
        shape = {"model": args.size, "method": method, "residual": args.residual if calibration else 0, **calibration}
        emit("quantize", shape, DTYPE, [seconds], output=args.output, bytes=sizes)


if __name__ == "__main__":
    main()
