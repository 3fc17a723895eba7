"""Measure how soon every command prints something, and its longest pause: python -m tests.bench.bench_silence

The commands are those that a new user tries in the first hour. They run in an empty folder, each in its own process.
``first_s`` is the time to the first output, ``silence_s`` the longest time without any output, and ``after`` the line
before that pause. If the machine does other work, all commands take longer; ``cpu_s`` is the program's CPU time.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qerl_pl.__main__ import COMMANDS, TRAINING
from tests.bench.harness import ROOT, emit, parser_with

SETTINGS = "-c own/mine.yaml --data.source.train_path own/problems.jsonl --run_dir run --trainer.max_steps 4"
HOUR = [
    "--version",
    *(f"{command} --help" for command in (*TRAINING, *COMMANDS)),
    "doctor",
    "tiny --output tiny",
    "quantize --model tiny --output tiny-nvfp4",
    "init own --base tiny-nvfp4",
    f"doctor {SETTINGS} --model.quantize null",
    f"plan {SETTINGS} --model.quantize null --gpu-memory 80",
    f"fit {SETTINGS} --model.quantize null --smoke",
    f"fit {SETTINGS} --model.quantize null",
    f"validate {SETTINGS} --model.quantize null --ckpt_path last",
    "report run --html page.html",
    "export --run run --output adapter",
    "export --run run --output merged --merge bf16",
    "score --reward gsm8k --input rows.jsonl --output gsm8k.jsonl",
    "score --reward math --input rows.jsonl --output math.jsonl",
]
"""Command lines, in an order in which earlier ones write the files that later ones need."""


def observe(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Run a command of the program; returns its exit status and measurements."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = [sys.executable, "-m", "qerl_pl", *arguments]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'own'}"}
    process = subprocess.Popen(
        words, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    first, last, silence, line, after = None, begin, 0.0, "", ""
    while True:
        chunk = os.read(process.stdout.fileno(), 65536)
        now = time.monotonic()
        if now - last > silence:
            silence, after = now - last, line
        last = now
        if not chunk:
            break
        first = now - begin if first is None else first
        lines = re.findall(r"[^\r\n]+", chunk.decode(errors="replace"))
        line = lines[-1][:80] if lines else line
    status, used = process.wait(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "status": status,
        "first_s": None if first is None else round(first, 2),
        "silence_s": round(silence, 2),
        "after": after,
        "wall_s": round(time.monotonic() - begin, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 2),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the commands one after the other, each of which prints a line."""
    args = parser_with(__doc__, "--output").parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rows.jsonl").write_text('{"completion": "so \\\\boxed{18}", "answer": "18"}\n')
        for line in HOUR:
            emit(f"silence/{line}", {}, "", output=args.output, **observe(line.split(), Path(folder)))


if __name__ == "__main__":
    main()
