"""Command-line options of those commands whose imports take seconds. The program parses the command line with them
before it imports the command's module, so that ``--help`` and messages about wrong options are printed at once."""

import argparse
import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from qerl_pl.common.program import CommandParser, called_as
from qerl_pl.model.quantization import FormatName, Method

PICTURES = (".png", ".pdf", ".svg")
MergedForm = Literal["bf16", "nvfp4"]
"""Formats in which ``export`` writes a model with the adapter merged into it."""
STUDY = """\
Train every arm (configuration) of a study with every seed, and compare the results (docs/study.md).

Every run is an ordinary `fit` in a separate folder, followed by the evaluations that the study's file names. The same
command, given again, continues the study: finished runs are not touched, and interrupted runs continue from their
checkpoint. Exit status: 0 if all runs finished; 1 if some failed; 2 after an error in the study's file; 3 if the time
limit (--minutes) ended the work; 128 plus the number of a signal that ended it.
"""


def output_file(text: str | Path) -> Path:
    """Check that a file can be written at the path ``text``, and return the path; a type for arguments of argparse.
    Raises ArgumentTypeError if the path is empty, a folder or a device, or a parent of it is a file."""
    text, path = str(text), Path(text)  # jsonargparse calls this a second time, with the result
    if not text.strip() or path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder; expected a file, e.g. {path / 'result'}")
    if path.exists() and not path.is_file():
        raise ArgumentTypeError(f"{text!r} is no regular file, and would be replaced; expected the path of a file")
    above = next((parent for parent in path.parents if parent.exists()), Path())
    if not above.is_dir():
        raise ArgumentTypeError(f"{above} is a file and not a folder, so {text!r} cannot be written")
    return path


def output_folder(text: str) -> Path:
    """Check that a path is a folder or that one can be made there, and return it; a type for argparse. Raises
    ArgumentTypeError if it is empty (for example because a shell variable is not set), or it or one of its parents is a
    file."""
    path = Path(text)
    if not text.strip():
        raise ArgumentTypeError("the path is empty; expected a folder, such as . for the current one")
    above = next((folder for folder in (path, *path.parents) if folder.exists()), Path())
    if not above.is_dir():
        raise ArgumentTypeError(f"{above} is a file; expected a folder, new or existing")
    return path


def picture_file(text: str) -> Path:
    """Check that a picture can be saved at the path ``text``, whose ending names the format, and return the path; a
    type for arguments of argparse. Raises ArgumentTypeError if the ending is not that of a supported format, or the
    file cannot be written."""
    path = output_file(text)
    if path.suffix.lower() not in PICTURES:
        raise ArgumentTypeError(f"{text!r} does not end in one of {', '.join(PICTURES)}")
    return path


def at_least(smallest: int) -> Callable[[str], int]:
    """Make an argument type for argparse: a whole number that is at least ``smallest``."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise ArgumentTypeError(f"it is {text}; expected {smallest} or more")
        return value

    number.__name__ = "whole number"  # argparse writes this name into its message if a text is no number
    return number


def finite(*, above: float | None = None, least: float | None = None) -> Callable[[str], float]:
    """Make an argument type for argparse: a finite number greater than ``above``, or at least ``least``."""

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or (above is not None and value <= above) or (least is not None and value < least):
            limit = f"more than {above:g}" if least is None else f"{least:g} or more"
            raise ArgumentTypeError(f"it is {text}; expected {limit}")
        return value

    number.__name__ = "number"
    return number


def existing_file(text: str) -> Path:
    """Return the path of an existing file. Raises ArgumentTypeError if there is no such file."""
    return _existing(text, "file", Path.is_file)


def existing_folder(text: str) -> Path:
    """Return the path of an existing folder. Raises ArgumentTypeError if there is no such folder."""
    return _existing(text, "folder", Path.is_dir)


def existing_base(text: str) -> Path:
    """Return the path of a base model, an existing folder or GGUF file. Raises ArgumentTypeError if there is
    neither."""
    return existing_file(text) if text.lower().endswith(".gguf") or Path(text).is_file() else existing_folder(text)


def existing_run(text: str) -> Path:
    """Return the path of a run's folder, which has a config.yaml. Raises ArgumentTypeError if there is no such
    folder."""
    path = existing_folder(text)
    if not (path / "config.yaml").is_file():
        raise ArgumentTypeError(f"{text} is no run folder: it has no config.yaml")
    return path


def _existing(text: str, kind: str, exists: Callable[[Path], bool]) -> Path:
    path = Path(text)
    if not exists(path):
        raise ArgumentTypeError(f"there is no {kind} {text}; check the path")
    return path


def tiny_options() -> CommandParser:
    parser = CommandParser(
        prog=called_as("tiny"), description="Make a small policy that can do arithmetic but makes careless mistakes."
    )
    parser.add_argument("--output", type=output_folder, required=True, help="folder to write; it must be new or empty")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of weights and demonstrations (default: 0)")
    return parser


def quantize_options() -> CommandParser:
    parser = CommandParser(prog=called_as("quantize"), description="Write a 4-bit copy of a checkpoint.")
    parser.add_argument(
        "--model", type=existing_base, required=True, help="folder of a bf16, fp16 or fp32 checkpoint, or a GGUF file"
    )
    parser.add_argument("--output", type=output_folder, required=True, help="folder to make")
    parser.add_argument("--format", choices=get_args(FormatName), default="nvfp4", help="4-bit format (default: nvfp4)")
    parser.add_argument(
        "--method",
        choices=get_args(Method),
        help="rtn: round to nearest; gptq: GPTQ, which minimises the error of each layer's outputs on calibration data "
        "(default: gptq with --calibration, else rtn)",
    )
    parser.add_argument(
        "--ignore",
        nargs="*",
        default=["lm_head"],
        metavar="NAME",
        help='linear layers that are not quantised: names, or "re:PATTERN" (default: lm_head)',
    )
    parser.add_argument(
        "--calibration",
        metavar="SOURCE",
        help=".txt or .jsonl file, or dataset of the Hugging Face hub; required by gptq and --residual",
    )
    parser.add_argument("--samples", type=at_least(1), default=256, help="calibration sequences (default: 256)")
    parser.add_argument(
        "--length", type=at_least(1), default=2048, help="tokens per calibration sequence (default: 2048)"
    )
    parser.add_argument(
        "--residual",
        type=at_least(1),
        metavar="RANK",
        help="also write OUTPUT/start, an adapter of this rank that makes up for part of the quantisation errors, for "
        "model.lora.start; needs --calibration",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="device on which the quantised weights are computed (default: cuda if there is a GPU, else cpu)",
    )
    return parser


def study_options() -> CommandParser:
    parser = CommandParser(
        prog=called_as("study"), description=STUDY, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=existing_file, help="YAML file with arms and seeds")
    parser.add_argument("--output", type=output_folder, help="folder of the study (default: the file's output)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="value of a variable of the study's file"
    )
    parser.add_argument("--jobs", type=at_least(1), help="runs at once on each GPU (default: the file's, or what fits)")
    parser.add_argument(
        "--minutes", type=finite(above=0), help="stop runs at a checkpoint after this many minutes (default: never)"
    )
    parser.add_argument(
        "--analyse",
        action="store_true",
        help="run nothing; write tables and curves of what is finished to OUTPUT/analysis, or the file's folder",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands of all runs and start none")
    return parser


def plan_options() -> CommandParser:
    parser = CommandParser(
        prog=called_as("plan"),
        description="Predict the GPU memory of a run by purpose (weights, KV cache, activations, ...), before it is "
        "started. The settings are read as by `fit`; of the base, config.json and the headers of its weight files are "
        "read. A folder with only config.json, or a model's name, is enough. Further arguments are those of `fit`, "
        "e.g. --model.lora.rank 64.",
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
    parser.add_argument("--json", type=output_file, help="also write the plan to this JSON file")
    return parser


def export_options() -> CommandParser:
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
        help="write a whole model in this form, and measure its distance from the trained policy (drift.json)",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="also upload the folder to this repository of the Hugging Face hub, which is made private if it is new",
    )
    return parser


def report_options() -> CommandParser:
    parser = CommandParser(
        prog=called_as("report"),
        description="Report on runs from their TensorBoard event files: a table of results, a picture of curves, and "
        "an HTML page. Nothing is written into the runs' folders.",
    )
    parser.add_argument("runs", nargs="+", type=existing_folder, help="run folders; each becomes a column")
    parser.add_argument("--picture", type=picture_file, help="draw the curves into this PNG, PDF or SVG file")
    parser.add_argument("--json", type=output_file, help="write the table to this file, one JSON line per run")
    parser.add_argument("--html", type=output_file, help="write an HTML page with checks, settings, completions")
    parser.add_argument(
        "--completions",
        type=at_least(0),
        default=10_000,
        help="limit on the completions on the page (default: 10000, spread evenly over each run)",
    )
    return parser


def chat_options() -> CommandParser:
    parser = CommandParser(
        prog=called_as("chat"),
        description="Talk to the policy of a run and to its base model: both get the same questions. Answers are "
        "sampled with transformers and printed token by token. Each line is a separate question, as in training, "
        "unless --conversation is given. Ctrl-D ends the program.",
    )
    parser.add_argument("run", type=existing_run, help="run folder, with config.yaml and checkpoints/")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a file (default: last)")
    parser.add_argument("--temperature", type=finite(least=0), default=0.0, help="0: the most likely token (default)")
    parser.add_argument("--max-tokens", type=at_least(1), default=512, help="longest answer (default: 512)")
    parser.add_argument("--without-base", action="store_true", help="print answers of the policy only")
    parser.add_argument(
        "--conversation",
        action="store_true",
        help="answer with the earlier lines as context; an empty line starts a new conversation",
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
