"""Mistakes that newcomers make each end in a few lines that name the place and say what to do."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable

import pytest
import torch
import yaml

import train
from tests.integration.conftest import arguments

MINE = """
from lightning.pytorch import Callback


def one_list(prompts):
    return [0.0 for _ in prompts]


def reads_a_column(prompts, completions):
    return [float(prompt.row["level"]) for prompt in prompts]


def too_few(prompts, completions):
    return [0.0]


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
TABLE = {"class_path": "datamodules.table.Table", "init_args": {"train_path": "rows.jsonl", "validation_share": 0.5}}


def added(class_path: str, **settings: object) -> dict:
    return {"trainer": {"callbacks+": [{"class_path": class_path, "init_args": settings}]}}


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
    "type in a callback": (added(AQN, num_stages="ten"), r"num_stages is 'ten'; expected a whole number"),
    "value in a callback": (added("mine.Watcher", every=0), r"^error: Watcher: every is 0; expected at least 1$"),
    "error in a callback": (added("mine.Server"), r"^error: Server: cannot reach the server$"),
    "value in a reward": (
        reward({"class_path": "mine.Scaled", "init_args": {"scale": 0}}),
        r"^error: Scaled: scale is 0\.0; expected more than 0$",
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
    "signature of a reward": (reward("mine.one_list"), r"expected two parameters, the prompts and the completions"),
    "column that a reward reads": (reward("mine.reads_a_column"), r"failed on .*KeyError: 'level' \(mine\.py, line 10"),
    "too few scores": (reward("mine.too_few"), r"returned 1 scores for 6 rows; expected one a row"),
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
    "base": (["--model.base", "models/gone"], r"there is no folder models/gone; download a checkpoint"),
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
    wrong, said = MISTAKES[mistake]
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(wrong) if isinstance(wrong, dict) else "")
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1=?", "answer": 2}\n')
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
