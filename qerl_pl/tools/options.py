"""Command-line options of the tools whose imports take seconds, in a module that imports nothing slow.

The entry point parses the command line by these options before it imports the tool, so that ``--help`` and a faulty
option are answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from qerl_pl.common.program import CommandParser, called_as
from qerl_pl.model.quantization import FormatName, Method
from qerl_pl.tools.paths import (
    at_least,
    existing_base,
    existing_file,
    existing_folder,
    existing_run,
    finite,
    output_file,
    output_folder,
    picture_file,
)

MergedForm = Literal["bf16", "nvfp4"]
"""Forms in which ``export`` writes a model with the adapter merged into it."""
STUDY = """\
Train every arm (configuration) of a study with every seed, and compare the results (docs/study.md).

Every run is an ordinary `fit` in a folder of its own, followed by the evaluations that the study's file names. Given
again, the command continues the study: finished runs are not touched, and interrupted ones continue from their
checkpoint. Exit status: 0 if all runs finished; 1 if some failed; 3 if the time was up; 128 plus the number of a
signal.
"""


def tiny_options() -> CommandParser:
    """Make the parser of `tiny`."""
    parser = CommandParser(prog=called_as("tiny"), description="Make a small policy with a skill and a bad habit.")
    parser.add_argument("--output", type=output_folder, required=True, help="folder to write; it must be new or empty")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of weights and demonstrations (default: 0)")
    return parser


def quantize_options() -> CommandParser:
    """Make the parser of `quantize`."""
    parser = CommandParser(prog=called_as("quantize"), description="Write a 4-bit copy of a checkpoint.")
    parser.add_argument(
        "--model", type=existing_base, required=True, help="folder of a bf16, fp16 or fp32 checkpoint, or a GGUF file"
    )
    parser.add_argument("--output", type=output_folder, required=True, help="folder to make")
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
    parser.add_argument("--samples", type=at_least(1), default=256, help="calibration sequences (default: 256)")
    parser.add_argument(
        "--length", type=at_least(1), default=2048, help="tokens per calibration sequence (default: 2048)"
    )
    parser.add_argument(
        "--residual",
        type=at_least(1),
        metavar="RANK",
        help="also write OUTPUT/start, an adapter of this rank near the quantisation errors, for model.lora.start; "
        "needs --calibration",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="where the weights are computed (default: cuda if there is a GPU, else cpu)",
    )
    return parser


def study_options() -> CommandParser:
    """Make the parser of `study`."""
    parser = CommandParser(
        prog=called_as("study"), description=STUDY, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=existing_file, help="YAML file with arms and seeds")
    parser.add_argument("--output", type=output_folder, help="folder of the study (default: the file's output)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="value of a variable of the study's file"
    )
    parser.add_argument("--jobs", type=int, help="runs at a time on each GPU (default: the file's, or what fits)")
    parser.add_argument(
        "--minutes", type=finite(above=0), help="stop at the next checkpoints after so long (default: never)"
    )
    parser.add_argument(
        "--analyse",
        action="store_true",
        help="run nothing; write tables and curves of what is finished to OUTPUT/analysis, or the file's folder",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands of all runs and start none")
    return parser


def plan_options() -> CommandParser:
    """Make the parser of `plan`."""
    parser = CommandParser(
        prog=called_as("plan"),
        description="Predict the GPU memory of a run, part by part, before it is started. Reads the settings as `fit` "
        "does, and of the base its config.json and the headers of its weight files; a folder with config.json alone, "
        "or a model's name, is enough. Further arguments are those of `fit`, e.g. --model.lora.rank 64.",
    )
    parser.add_argument("-c", "--config", action="append", required=True, type=Path, help="as for `fit`; repeatable")
    parser.add_argument(
        "--gpu-memory", type=finite(above=0), help="GiB of the GPU (default: model.gpu_memory, or this GPU's)"
    )
    parser.add_argument(
        "--hopper",
        action="store_true",
        help="plan for an H100 or H200 with the package's extra [gpu], whatever this machine has",
    )
    parser.add_argument(
        "--longest",
        nargs="*",
        type=finite(above=0),
        metavar="GIB",
        help="print only how many tokens completions may have on GPUs of these sizes (default: 24 48 80 141)",
    )
    parser.add_argument("--json", type=output_file, help="write the plan there")
    parser.add_argument("--picture", type=picture_file, help="draw the plan into this PNG, PDF or SVG file")
    return parser


def export_options() -> CommandParser:
    """Make the parser of `export`."""
    parser = CommandParser(
        prog=called_as("export"),
        description="Write the adapter of a run as a PEFT folder, or the model with the adapter merged into it.",
    )
    parser.add_argument("--run", required=True, type=existing_run, help="run folder, with config.yaml and checkpoints/")
    parser.add_argument("--output", required=True, type=output_folder, help="folder to make; must not exist")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a file (default: last)")
    parser.add_argument(
        "--merge",
        choices=get_args(MergedForm),
        help="write a whole model in this form, and how far it is from the policy that was trained (drift.json)",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="also upload the folder to this repository of the Hugging Face hub, which is made private if it is new",
    )
    return parser


def report_options() -> CommandParser:
    """Make the parser of `report`."""
    parser = CommandParser(
        prog=called_as("report"),
        description="Report on runs from their TensorBoard event files: a table of results, a picture of curves, and "
        "an HTML page. Nothing is written into the runs' folders.",
    )
    parser.add_argument("runs", nargs="+", type=existing_folder, help="run folders; each becomes a column")
    parser.add_argument(
        "--picture",
        type=picture_file,
        help="draw the curves into this PNG, PDF or SVG file",
    )
    parser.add_argument("--json", type=output_file, help="write the table to this file, one JSON line per run")
    parser.add_argument(
        "--html", type=output_file, help="write an HTML page with curves, checks, settings, completions"
    )
    parser.add_argument(
        "--completions",
        type=at_least(0),
        default=10_000,
        help="most completions on a page (default: 10000, spread evenly)",
    )
    return parser


def chat_options() -> CommandParser:
    """Make the parser of `chat`."""
    parser = CommandParser(
        prog=called_as("chat"),
        description="Talk to the policy of a run and to its base model: both get the same questions. Sampled with "
        "transformers, printed token by token. Each line is a question of its own, as in training, unless "
        "--conversation is given. Ctrl-D ends the program.",
    )
    parser.add_argument("run", type=existing_run, help="run folder, with config.yaml and checkpoints/")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a file (default: last)")
    parser.add_argument("--temperature", type=finite(least=0), default=0.0, help="0: the most likely token (default)")
    parser.add_argument("--max-tokens", type=at_least(1), default=512, help="longest answer (default: 512)")
    parser.add_argument("--without-base", action="store_true", help="print answers of the policy only")
    parser.add_argument(
        "--conversation", action="store_true", help="keep what was said before; an empty line starts anew"
    )
    return parser


PARSERS: dict[str, Callable[[], CommandParser]] = {
    "tiny": tiny_options,
    "quantize": quantize_options,
    "study": study_options,
    "plan": plan_options,
    "export": export_options,
    "report": report_options,
    "chat": chat_options,
}
