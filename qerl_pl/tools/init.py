"""Write a small configuration, a reward and some problems into a folder, as the start of your own project."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from qerl_pl.common.files import write_whole
from qerl_pl.common.program import CommandParser, called_as

BASE = "Qwen/Qwen2.5-0.5B-Instruct"
CONFIGURATION = """\
# A run of your own, to start from. Later files and --KEY VALUE override it: qerl fit -c mine.yaml --data.batch_size 8
# `qerl doctor -c mine.yaml` checks every part, `qerl fit --help` lists all settings.
trainer:
  max_steps: 100                  # optimizer steps of the whole run, here one per rollout
  val_check_interval: 10          # rollouts between two validations
model:
  base: {base}   # name on the Hugging Face hub, or a local folder
  quantize: nvfp4                 # 4-bit format of the frozen base, made at the first start; null: 16 bits
  engine: qerl_pl.rollout.vllm.VLLMEngine   # without vLLM: qerl_pl.rollout.hf.TransformersEngine (slow)
  rewards:                        # a completion's reward is the sum of weight * score
    - {{name: accuracy, weight: 1.0, reward: my_reward.accuracy}}   # file my_reward.py, function accuracy
    - {{name: brevity, weight: 0.1, reward: my_reward.brevity}}
  sampling:
    num_completions: 8            # per prompt; they are compared with each other
    max_tokens: 256               # longest completion
    temperature: 1.0
  lora: {{rank: 16, alpha: 32}}
  objective: dapo                 # or grpo, dr_grpo, gspo, cispo
  optimizer:
    class_path: torch.optim.AdamW
    init_args: {{lr: 3.0e-5}}
data:
  source:
    class_path: datamodules.table.Table
    init_args:
      train_path: problems.jsonl  # or .parquet, or a data set of the hub
      validation_share: 0.3       # of the problems, chosen by a hash of the question
      question: question          # names of the columns
      answer: answer
  batch_size: 2                   # prompts per rollout; raise it when you have more problems
  max_prompt_tokens: 512          # longer prompts are dropped and counted
  system_prompt: Think step by step, and end with the answer as a number.
"""
REWARD = '''\
"""Rewards of mine.yaml: functions of two lists, with a score for each completion."""

import re


def accuracy(prompts, completions):
    """Score 1 if the last number of a completion is the answer of its problem, and 0 otherwise.

    A prompt has text, answer and row (all columns of its problem), a completion text and finished.
    """
    scores = []
    for prompt, completion in zip(prompts, completions):
        numbers = re.findall(r"-?[0-9]+", completion.text)
        scores.append(1.0 if numbers and numbers[-1] == prompt.answer else 0.0)
    return scores


def brevity(prompts, completions):
    """Score up to 1 for a short completion, so that there is something to learn where all answers are equally good."""
    return [1 / (1 + len(completion.text) / 100) for completion in completions]
'''
PROBLEMS = (
    ("Tom has 12 apples and gives 5 away. How many are left?", "7"),
    ("A box holds 6 eggs. How many eggs are in 4 boxes?", "24"),
    ("Ann is 9 years old and Ben is 5 years older. How old is Ben?", "14"),
    ("A train of 8 cars has 40 seats in each. How many seats are there?", "320"),
    ("Share 36 sweets equally among 9 children. How many does each get?", "4"),
    ("A book has 120 pages and 45 are read. How many are not?", "75"),
    ("Three pens cost 6 coins. How many coins do 7 pens cost?", "14"),
    ("What is 17 plus 28 minus 6?", "39"),
)
"""Questions and answers of the example data. They are enough for the example's configuration to split off validation
problems and to have at least one batch left for training."""
MORE = """\
  qerl fit -c mine.yaml --smoke    # tries every part in two small rollouts
  qerl fit -c mine.yaml            # trains"""


def main(argv: Sequence[str]) -> int:
    """Parse the command line, write the files and print the next commands; returns the exit status."""
    parser = CommandParser(prog=called_as("init"), description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), help="folder to write to (default: the current one)"
    )
    parser.add_argument(
        "--base",
        default=BASE,
        help=f"model to train: a name on the Hugging Face hub, or a folder (default: {BASE}, a download of 1 GB)",
    )
    options = parser.parse_args(argv)
    written = write_files(options.folder, base=options.base)
    print(f"written: {', '.join(map(str, written))}\n\nnext:")
    if options.folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(options.folder))}")
    print(MORE.replace("qerl fit", called_as("fit")))
    return 0


def write_files(folder: Path, *, base: str) -> list[Path]:
    """Write an example configuration, reward and problems into a new or existing folder; returns the paths of the
    files. If an error occurs, the files already written are removed. ``base`` becomes the value of ``model.base``; the
    path of a folder is made absolute. ValueError: one of the files exists, or ``folder`` is a file."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder, new or existing")
    local = Path(base).expanduser()
    named = str(local.resolve()) if local.is_dir() else base
    problems = "".join(json.dumps({"question": asked, "answer": answer}) + "\n" for asked, answer in PROBLEMS)
    texts = {
        folder / "mine.yaml": CONFIGURATION.format(base=json.dumps(named)),
        folder / "my_reward.py": REWARD,
        folder / "problems.jsonl": problems,
    }
    if existing := [str(path) for path in texts if path.exists()]:
        raise ValueError(f"{', '.join(existing)} exists already and is not overwritten; give another folder")
    try:
        for path, text in texts.items():
            write_whole(path, text)
    except OSError:
        for path in texts:
            with suppress(OSError):
                path.unlink()
        raise
    return list(texts)
