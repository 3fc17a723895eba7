"""Mistakes that newcomers make each end in a few lines that name the place and say what to do."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
import yaml

import train
from tests.integration.conftest import arguments

MINE = """
from lightning.pytorch import Callback


def one_list(question):
    return [0.0 for _ in question]


def reads_a_column(prompts, completions):
    return [float(prompt.row["level"]) for prompt in prompts]


def too_few(prompts, completions):
    return [0.0]


def a_text(prompts, completions):
    return ["good" for _ in prompts]


def no_list(prompts, completions):
    return "good"


def not_a_number(prompts, completions):
    return [float("nan") for _ in prompts]


def of_a_dict(prompts, completions):
    return [len(prompt["question"]) for prompt in prompts]


NUMBER = 3


class Scaled:
    def __init__(self, scale: float = 1.0):
        if scale <= 0:
            raise ValueError(f"scale is {scale}; expected more than 0")

    def __call__(self, prompts, completions):
        return [0.0 for _ in prompts]


class Watcher(Callback):
    def __init__(self, every: int = 1):
        if every < 1:
            raise ValueError(f"every is {every}; expected at least 1")


class Server(Callback):
    def __init__(self):
        raise RuntimeError("cannot reach the server")
"""
AQN = "callbacks.aqn.AdaptiveQuantizationNoise"
LOGGERS = "lightning.pytorch.loggers"
FILES = {
    "rows.jsonl": '{"problem": "1+1=?", "answer": 2}\n',
    "one.jsonl": '{"question": "1+1=?", "answer": 2}\n',
    "empty.jsonl": "",
    "python.jsonl": "{'question': '1+1=?', 'answer': 2}\n",
    "no_answer.jsonl": '{"question": "1+1=?", "answer": ""}\n',
    "rows.csv": "question,answer\n1+1=?,2\n",
    "a_file": "",
}
TABLE = {"class_path": "datamodules.table.Table", "init_args": {"train_path": "rows.jsonl", "validation_share": 0.5}}


def added(class_path: str, **settings: object) -> dict:
    return {"trainer": {"callbacks+": [{"class_path": class_path, "init_args": settings}]}}


def table(path: str) -> dict:
    source = {"class_path": "datamodules.table.Table", "init_args": {"train_path": path, "validation_share": 0.5}}
    return {"data": {"source": source}}


def optimizer(class_path: str, **settings: object) -> dict:
    return {"model": {"optimizer": {"class_path": class_path, "init_args": settings}}}


def reward(path: object, **more: object) -> dict:
    return {"model": {"rewards": [{"name": "mine", "reward": path, **more}]}}


MISTAKES = {
    "key at the top": ({"modle": {}}, r"mine\.yaml, line 1: 'modle' is no setting; did you mean model\?"),
    "key in the trainer": (
        {"trainer": {"max_step": 4}},
        r"no setting trainer\.max_step \(.*mine\.yaml, line 2\); did you mean trainer\.max_steps\?",
    ),
    "key deep down": (
        {"model": {"sampling": {"max_token": 4}}},
        r"line 3\); did you mean model\.sampling\.max_tokens\?",
    ),
    "key of a callback": (
        added(AQN, sigma_strat=0.1),
        r"AdaptiveQuantizationNoise has no setting sigma_strat \(.*line \d\); did you mean sigma_start",
    ),
    "key of the engine": (
        {"model": {"engine": {"class_path": "qerl_pl.rollout.hf.TransformersEngine", "init_args": {"batch_token": 1}}}},
        r"TransformersEngine has no setting batch_token .*did you mean batch_tokens",
    ),
    "key of a reward": (
        reward("mine.too_few", wieght=1.0),
        r"model\.rewards has no setting wieght .*did you mean weight\?",
    ),
    "key of the optimizer": (
        {"model": {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"learning_rate": 1}}}},
        r"AdamW has no setting learning_rate .*known names: lr, betas",
    ),
    "key of the logger": (
        {"trainer": {"logger": {"class_path": f"{LOGGERS}.TensorBoardLogger", "init_args": {"save_dirr": "x"}}}},
        r"TensorBoardLogger has no setting save_dirr .*did you mean save_dir",
    ),
    "option": (["--model.samplng.temperature", "1"], r"did you mean model\.sampling\.temperature\?"),
    "type": (["--trainer.max_steps", "many"], r"trainer\.max_steps is 'many'; expected a whole number"),
    "word": ({"model": {"dtype": "float23"}}, r"model\.dtype is 'float23' \(.*\); .*did you mean float32\?"),
    "word of a union": (["--model.objective", "dr_gpro"], r"objective\.preset is 'dr_gpro'.*did you mean dr_grpo\?"),
    "type in a callback": (
        added(AQN, num_stages="ten"),
        r"num_stages is 'ten' \(.*mine\.yaml, line \d+\); expected a whole number",
    ),
    "value in a callback": (added("mine.Watcher", every=0), r"^error: Watcher: every is 0; expected at least 1$"),
    "error in a callback": (added("mine.Server"), r"^error: Server: cannot reach the server$"),
    "value in a reward": (
        reward({"class_path": "mine.Scaled", "init_args": {"scale": 0}}),
        r"^error: Scaled: scale is 0\.0; expected more than 0$",
    ),
    "linear of the adapter": (
        ["--model.lora.targets", "[query]"],
        r"model\.lora\.targets has \['query'\], which match no",
    ),
    "value in the engine": (["--model.engine.batch_tokens", "0"], r"TransformersEngine: batch_tokens is 0; expected"),
    "class of a module": (
        added("callbacks.completions.CompletionLoger"),
        r"no 'CompletionLoger' in callbacks\.completions .*did you mean CompletionLogger\?",
    ),
    "module of a class": (
        added("callbacks.compeltions.X"),
        r"no 'compeltions' in callbacks .*did you mean completions",
    ),
    "module that is not there": (
        reward("nowhere.score"),
        r"there is no module nowhere .*in the working directory",
    ),
    "no callback": (added("collections.OrderedDict"), r"OrderedDict does not correspond to a subclass of Callback"),
    "signature of a reward": (
        reward("mine.one_list"),
        r"takes \(question\); expected two parameters named prompts and completions",
    ),
    "column that a reward reads": (reward("mine.reads_a_column"), r"failed on .*KeyError: 'level' \(mine\.py, line 10"),
    "too few scores": (reward("mine.too_few"), r"returned 1 scores for 6 rows; expected one per row"),
    "column": ({"data": {"source": TABLE}}, r"rows\.jsonl:1: no column 'question'; the row has 'problem', 'answer'"),
    "file of data": (["--data.source.train_path", "gone.jsonl"], r"gone\.jsonl does not exist"),
    "noise": (added(AQN), r"8 rollouts for 10 noise stages; lower num_stages or raise trainer\.max_steps"),
    "GPU": (["--trainer.accelerator", "gpu"], r"no CUDA GPU; use auto or cpu"),
    "logger that is not installed": (["--trainer.logger", f"{LOGGERS}.CometLogger"], r"CometLogger: .*pip install"),
    "value that follows": (
        ["--data.seed", "3"],
        r"data\.seed cannot be set: it follows from seed_everything",
    ),
    "file of settings": (["-c", "gone.yaml"], r"there is no file gone\.yaml"),
    "name of settings": (["-c", "gms8k"], r"did you mean gsm8k\? \(there are: "),
    "base": (["--model.base", "models/gone"], r"there is no folder models/gone; give a model.s name on the hub"),
    "file as a base": (
        ["--model.base", "rows.jsonl"],
        r"base: rows\.jsonl is a file; give the folder of the checkpoint",
    ),
    "data as settings": (
        ["-c", "rows.jsonl"],
        r"rows\.jsonl holds data and not settings: .*--data\.source\.train_path",
    ),
    "name of a base": (
        ["--model.base", "Qwen/Qwen2.5-7B"],
        r"no folder Qwen/Qwen2\.5-7B, and the hub cannot be reached .*hf download",
    ),
    "base without tokenizer": (["--model.base", "base"], r"base has no tokenizer \(tokenizer\.json .*copy it from"),
    "text as a score": (reward("mine.a_text"), r"'mine' scored row 0 as 'good'; expected a finite number or None"),
    "text as scores": (reward("mine.no_list"), r"'mine' returned 'good'; expected a list with a number"),
    "nan as a score": (reward("mine.not_a_number"), r"'mine' scored row 0 as nan; expected a finite number or None"),
    "prompt as a dict": (
        reward("mine.of_a_dict"),
        r"'mine' failed on a batch of 6 rows: TypeError.*mine\.py, line \d+",
    ),
    "number as a reward": (reward("mine.NUMBER"), r"mine\.NUMBER, which is 3; expected the path of a function"),
    "no reward": ({"model": {"rewards": []}}, r"model\.rewards is empty; expected at least one"),
    "empty file of data": (table("empty.jsonl"), r"empty\.jsonl has no rows; expected a JSON object per line"),
    "python for JSON": (table("python.jsonl"), r"python\.jsonl:1: not JSON: Expecting property name"),
    "empty answer": (table("no_answer.jsonl"), r"no_answer\.jsonl:1: column 'answer' is empty"),
    "CSV file": (table("rows.csv"), r"rows\.csv is of a kind that is not read; expected \.jsonl .* or \.parquet"),
    "one row": (table("one.jsonl"), r"Table gives no (validation|training) problems; give it more rows"),
    "folder of the run": (
        ["--run_dir", "a_file"],
        r"run_dir is a_file, in \S*a_file, which is no folder; choose another",
    ),
    "learning rate below 0": (
        ["--model.optimizer.init_args.lr", "-1e-3"],
        r"AdamW: .*-0\.001; change model\.optimizer",
    ),
    "learning rate in words": (
        optimizer("torch.optim.AdamW", lr="small"),
        r"lr is 'small' \(.*line 5\); expected a num",
    ),
    "optimizer by its name": (["--model.optimizer", "Adan"], r"is 'Adan'; expected a class by its path, such as torch"),
    "case of a class": (optimizer("torch.optim.Adamw", lr=1e-3), r"no 'Adamw' in torch\.optim .*did you mean AdamW\?"),
    "engine by its name": (["--model.engine", "vllm"], r"expected a class by its path, such as qerl_pl\.rollout\.vllm"),
    "no steps": (["--trainer.max_steps", "0"], r"max_steps is 0; expected the length of the run, at least 1"),
    "short prompts": (
        ["--data.max_prompt_tokens", "5"],
        r"more than data.max_prompt_tokens=5 tokens.*set .* to 28 or more",
    ),
    "batch": (
        ["--model.mini_batches", "3", "--trainer.max_steps", "12"],
        r"batch_size \(4 prompts\) is no multiple of model\.mini_batches \(3\)",
    ),
    "list for settings": ({"model": {"sampling": [1]}}, r"model\.sampling is \[1\]; expected settings by their names"),
    "seed": (["--seed_everything", "-1"], r"seed_everything is -1; expected a whole number from 0"),
    "checkpoint": (["--ckpt_path", "gone.ckpt"], r"there is no checkpoint gone\.ckpt; --ckpt_path is last, best"),
    "best checkpoint": (["--ckpt_path", "best"], r"'best', with which fit cannot go on: it goes on from 'last'"),
    "MLflow that is not installed": (
        ["--trainer.logger", f"{LOGGERS}.MLFlowLogger"],
        r"MLFlowLogger: mlflow-skinny is not installed; install it: pip install 'mlflow-skinny",
    ),
    "W&B that is not installed": (["--trainer.logger", f"{LOGGERS}.WandbLogger"], r"pip install .*wandb"),
}


def outcome(run: Callable[[], int | str], capsys: pytest.CaptureFixture[str]) -> int | str:
    """What the program says at its end, whether the parser or what comes after it refuses."""
    with contextlib.suppress(SystemExit):
        return run()
    return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_a_line_that_says_what_to_do(mistake, bases, tmp_path, monkeypatch, capsys):
    if mistake == "GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if mistake.endswith("that is not installed") and find_spec(
        {"W&B": "wandb", "MLflow": "mlflow"}.get(mistake.split()[0], "comet_ml")
    ):
        pytest.skip("it is installed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    wrong, said = MISTAKES[mistake]
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(wrong) if isinstance(wrong, dict) else "")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    if mistake == "base without tokenizer":
        shutil.copytree(bases["nvfp4"], tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer*"))
    more = ["-c", str(tmp_path / "mine.yaml")] if isinstance(wrong, dict) else wrong
    if mistake == "file of data":
        more = ["--data.source=datamodules.table.Table", "--data.source.validation_share=0.5", *more]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr("sys.argv", ["train.py"])
    status = outcome(lambda: train.exit_status(arguments("fit", bases["nvfp4"], tmp_path / "run", *more)), capsys)
    assert isinstance(status, str), status
    assert re.search(said, status), status
    assert len(status.splitlines()) <= 5
    assert not (tmp_path / "run" / "completions").exists()
