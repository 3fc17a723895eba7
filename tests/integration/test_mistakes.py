"""Typical mistakes of newcomers end with an error of a few lines that names the place of the mistake and says what to
do."""

import re
import shutil
import sys
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
PACKAGES = {"Comet": "comet_ml", "MLFlow": "mlflow", "Wandb": "wandb"}
FILES = {
    "rows.jsonl": '{"problem": "1+1=?", "answer": 2}\n',
    "one.jsonl": '{"question": "1+1=?", "answer": 2}\n',
    "empty.jsonl": "",
    "python.jsonl": "{'question': '1+1=?', 'answer': 2}\n",
    "no_answer.jsonl": '{"question": "1+1=?", "answer": ""}\n',
    "rows.csv": "question,answer\n1+1=?,2\n",
    "words.jsonl": "".join(f'{{"question": "What is {n}?", "answer": "see above"}}\n' for n in range(40)),
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


MISTAKES = [
    ({"modle": {}}, r"mine\.yaml, line 1: 'modle' is no setting; did you mean model\?"),
    (
        {"trainer": {"max_step": 4}},
        r"no setting trainer\.max_step \(.*mine\.yaml, line 2\); did you mean trainer\.max_steps\?",
    ),
    ({"model": {"sampling": {"max_token": 4}}}, r"line 3\); did you mean model\.sampling\.max_tokens\?"),
    (
        added(AQN, sigma_strat=0.1),
        r"AdaptiveQuantizationNoise has no setting sigma_strat \(.*line \d\); did you mean sigma_start",
    ),
    (
        {"model": {"engine": {"class_path": "qerl_pl.rollout.hf.TransformersEngine", "init_args": {"batch_token": 1}}}},
        r"TransformersEngine has no setting batch_token .*did you mean batch_tokens",
    ),
    (reward("mine.too_few", wieght=1.0), r"model\.rewards has no setting wieght .*did you mean weight\?"),
    (
        {"model": {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"learning_rate": 1}}}},
        r"AdamW has no setting learning_rate .*known names: lr, betas",
    ),
    (
        {"trainer": {"logger": {"class_path": f"{LOGGERS}.TensorBoardLogger", "init_args": {"save_dirr": "x"}}}},
        r"TensorBoardLogger has no setting save_dirr .*did you mean save_dir",
    ),
    ("--model.samplng.temperature 1", r"did you mean model\.sampling\.temperature\?"),
    ("--trainer.max_steps many", r"trainer\.max_steps is 'many'; expected a whole number"),
    ({"model": {"dtype": "float23"}}, r"model\.dtype is 'float23' \(.*\); .*did you mean float32\?"),
    ("--model.objective dr_gpro", r"objective\.preset is 'dr_gpro'.*did you mean dr_grpo\?"),
    (added(AQN, num_stages="ten"), r"num_stages is 'ten' \(.*mine\.yaml, line \d+\); expected a whole number"),
    (added("mine.Watcher", every=0), r"^error: Watcher: every is 0; expected at least 1$"),
    (added("mine.Server"), r"^error: Server: cannot reach the server$"),
    (
        reward({"class_path": "mine.Scaled", "init_args": {"scale": 0}}),
        r"^error: Scaled: scale is 0\.0; expected more than 0$",
    ),
    ("--model.lora.targets [query]", r"model\.lora\.targets has \['query'\], which match no"),
    ("--model.engine.batch_tokens 0", r"TransformersEngine: batch_tokens is 0; expected"),
    (
        added("callbacks.completions.CompletionLoger"),
        r"no 'CompletionLoger' in callbacks\.completions .*did you mean CompletionLogger\?",
    ),
    (added("callbacks.compeltions.X"), r"no 'compeltions' in callbacks .*did you mean completions"),
    (reward("nowhere.score"), r"there is no module nowhere .*in the working directory"),
    (added("collections.OrderedDict"), r"OrderedDict does not correspond to a subclass of Callback"),
    (reward("mine.one_list"), r"takes \(question\); expected two parameters named prompts and completions"),
    (reward("mine.reads_a_column"), r"failed on .*KeyError: 'level' \(mine\.py, line 10"),
    (reward("mine.too_few"), r"returned 1 scores for 6 rows; expected one per row"),
    ({"data": {"source": TABLE}}, r"rows\.jsonl:1: no column 'question'; the row has 'problem', 'answer'"),
    (
        "--data.source.train_path gone.jsonl",
        r"data\.source: train_path: there is no file gone\.jsonl \(searched in /\S+\)$",
    ),
    (added(AQN), r"8 rollouts for 10 noise stages; lower num_stages or raise trainer\.max_steps"),
    ("--trainer.accelerator gpu", r"no CUDA GPU; use auto or cpu"),
    (f"--trainer.logger {LOGGERS}.CometLogger", r"CometLogger: .*pip install"),
    ("--data.seed 3", r"data\.seed cannot be set: it follows from seed_everything"),
    ("--trainer.default_root_dir here", r"default_root_dir cannot be set: it follows from run_dir; set that"),
    ("-c gone.yaml", r"there is no file gone\.yaml"),
    ("-c gms8k", r"did you mean gsm8k\? \(there are: "),
    ("--model.base models/gone", r"there is no folder models/gone \(searched in \S+\); give a model.s name on the hub"),
    ("--model.base rows.jsonl", r"base: rows\.jsonl is a file; give the folder of the checkpoint"),
    ("-c rows.jsonl", r"rows\.jsonl holds data and not settings: .*--data\.source\.train_path"),
    ("--model.base Qwen/Qwen2.5-7B", r"no folder Qwen/Qwen2\.5-7B .*, and the hub cannot be reached .*hf download"),
    ("--model.base base", r"base has no tokenizer \(tokenizer\.json .*copy it from"),
    (reward("mine.a_text"), r"'mine' scored row 0 as 'good'; expected a finite number \(of 32 bits\) or None"),
    (reward("mine.no_list"), r"'mine' returned 'good'; expected a list with a number"),
    (reward("mine.not_a_number"), r"'mine' scored row 0 as nan; expected a finite number \(of 32 bits\) or None"),
    (reward("mine.of_a_dict"), r"'mine' failed on a batch of 6 rows: TypeError.*mine\.py, line \d+"),
    (reward("mine.NUMBER"), r"mine\.NUMBER, which is 3; expected the path of a function"),
    *(
        (
            {"model": {"rewards": [{"name": "all", "reward": "mine.too_few"}, {"name": "mine", "reward": path}]}},
            r"reward is 'accuracy' \(.*mine\.yaml, line [67]\); expected a function or class by its path, such as",
        )
        for path in ("accuracy", {"class_path": "accuracy"})
    ),
    ({"model": {"rewards": []}}, r"model\.rewards is empty; expected at least one"),
    (table("empty.jsonl"), r"empty\.jsonl has no rows; expected a JSON object per line"),
    (table("python.jsonl"), r"python\.jsonl:1: not JSON: Expecting property name"),
    (table("no_answer.jsonl"), r"no_answer\.jsonl:1: column 'answer' is empty"),
    (table("rows.csv"), r"rows\.csv is of an unknown kind; expected \.jsonl .* or \.parquet; .*converts CSV"),
    (
        table("words.jsonl") | reward("qerl_pl.rewards.math.NumericAnswer"),
        r"'mine' can read none of the first 26 answers .* 'see above'",
    ),
    (table("one.jsonl"), r"Table gives no (validation|training) problems; give it more rows"),
    ("--run_dir a_file", r"run_dir is a_file, in \S*a_file, which is no folder; choose another"),
    ("--model.optimizer.init_args.lr -1e-3", r"AdamW: .*-0\.001; change model\.optimizer"),
    (optimizer("torch.optim.AdamW", lr="small"), r"lr is 'small' \(.*line 5\); expected a num"),
    ("--model.optimizer Adan", r"is 'Adan'; expected a class by its path, such as torch"),
    (optimizer("torch.optim.Adamw", lr=1e-3), r"no 'Adamw' in torch\.optim .*did you mean AdamW\?"),
    ("--model.engine vllm", r"expected a class by its path, such as qerl_pl\.rollout\.vllm"),
    ("--trainer.max_steps 0", r"max_steps is 0; expected the length of the run, at least 1"),
    ("--data.max_prompt_tokens 5", r"more than data.max_prompt_tokens=5 tokens.*set .* to 28 or more"),
    (
        "--model.mini_batches 3 --trainer.max_steps 12",
        r"batch_size \(4 prompts\) is no multiple of model\.mini_batches \(3\)",
    ),
    ({"model": {"sampling": [1]}}, r"model\.sampling is \[1\]; expected settings by their names"),
    ("--seed_everything true", r"seed_everything is 'True'; expected a whole number"),
    ("--seed_everything -1", r"seed_everything is -1; expected a whole number from 0"),
    ("--ckpt_path ~/gone.ckpt", r"there is no checkpoint /.*gone\.ckpt; --ckpt_path is last, best"),
    ("--ckpt_path best", r"'best', with which fit cannot go on: it goes on from 'last'"),
    (
        f"--trainer.logger {LOGGERS}.MLFlowLogger",
        r"MLFlowLogger: mlflow-skinny is not installed; install it: pip install 'mlflow-skinny",
    ),
    (f"--trainer.logger {LOGGERS}.WandbLogger", r"pip install .*wandb"),
    ("--trainer.logger false", r"trainer\.logger is off"),
    ("--model.max_grad_norm -1", "max_grad_norm is -1"),
    ("--model.warmup_steps -5", "warmup_steps is -5"),
    ("--model.max_unscored_share 5", "max_unscored_share is 5"),
    ("--model.updates_per_rollout 3 --trainer.max_steps 13", "max_steps.*13.*updates_per_rollout.*3"),
    ("--model.mini_batches 0", "mini_batches is 0; expected at least 1"),
    ("--model.micro_batch_tokens 50", "micro_batch_tokens"),
    ("--model.sampling.num_completions 1", "at least 2"),
    ("--model.sampling.temperature 0", "temperature"),
    ("--model.sampling.max_tokens 4000 --model.micro_batch_tokens 9000", "2048 positions"),
    ("--data.batch_size 4000", "batch_size"),
    ("--trainer.precision bf16-true", "32-true"),
    (
        "--trainer.accelerator cpu --trainer.devices [1,2]",
        "^error: the trainer cannot be made: `devices` .* should be an int",
    ),
    ("--run_dir=", "run_dir is empty"),
    (added(AQN, sigma_start=1e-4), r"sigma_end.*above"),
    (added(AQN, num_stages=2), "at least 3"),
    (added(AQN, decay="square"), "decay"),
    ("--model.lora.start ~/gone", r"model\.lora\.start is /.*gone"),
    ("--model.lora.rank 1000000", r"model\.lora\.rank is 1000000; expected at most the model's hidden_size \(128\)"),
    (
        "--trainer.accelerator cpu --trainer.devices 9999",
        r"trainer\.devices is 9999 and this machine has \d+ CPU cores",
    ),
    ({"data": {"batch_size": None}}, r"data\.batch_size is null, or not given; expected a whole number"),
    ({"model": {"sampling": {"max_tokens": None}}}, r"model\.sampling\.max_tokens is null"),
    ({"model": {"base": None}}, r"model\.base is null, or not given; expected text"),
    ({"model": {"lora": None}}, r"model\.lora is null; expected settings by their names"),
    (added("callbacks.gradient_guard.GradientGuard", window=None), "GradientGuard: window is null"),
    ("--model.warmup_steps 1000000000", r"warmup_steps is 1000000000; expected at most trainer\.max_steps \(8\)"),
    (
        reward({"class_path": "os.system", "init_args": {"command": "touch executed"}}),
        r"rewards.reward is os\.system, a function that does not say what it makes",
    ),
    (
        {"trainer": {"logger": {"class_path": f"{LOGGERS}.CSVLogger", "init_args": None}}},
        r"trainer\.logger: .*CSVLogger: init_args has no value; give settings below it, or leave it out",
    ),
    ({"trainer": {"logger": [None]}}, r"trainer\.logger is null, .*expected a class by its path or"),
    (
        {"trainer": {"logger": {"class_path": f"{LOGGERS}.TensorBoardLogger", "init_args": {"sub_dir": [1]}}}},
        r"trainer\.logger: .*TensorBoardLogger: sub_dir has no usable value; expected text or a path",
    ),
    (
        {"trainer": {"logger": {"class_path": f"{LOGGERS}.CSVLogger", "init_args": {"flush_logs_every_n_steps": 0}}}},
        r"trainer\.logger: .*CSVLogger: flush_logs_every_n_steps is 0; expected at least 1",
    ),
    (
        '--model.objective {"aggregation":"tokens"}',
        r"error: model\.objective\.aggregation is 'tokens'; expected 'token'",
    ),
    ({"model": {"optimizer": None}}, r"optimizer is null.*such as torch\.optim\.AdamW"),
    *(
        (
            f"--model.teacher {value}",
            rf"^error: model\.teacher is '{value}'; expected a mapping such as \{{base: dense\}}",
        )
        for value in ("dense", "Qwen/Qwen2.5-7B", "3")
    ),
    (
        {"model": {"val_sampling": "greedy"}},
        r"val_sampling is 'greedy' \(.*mine\.yaml, line 2\); expected a mapping such as \{num_completions: 8\} or null",
    ),
    ("--model.lora dense", r"model\.lora is 'dense'; expected a mapping of settings, or a YAML file with one"),
    ("--model.quantize nvfp5", r"quantize is 'nvfp5'; expected 'nvfp4'.* or a mapping such as .* did you mean nvfp4\?"),
]


@pytest.mark.parametrize(("wrong", "said"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_ends_in_a_line_that_says_what_to_do(wrong, said, bases, tmp_path, monkeypatch, capsys):
    if wrong == "--trainer.accelerator gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if (logger := re.search(r"(Comet|MLFlow|Wandb)Logger", str(wrong))) and find_spec(PACKAGES[logger[1]]):
        pytest.skip("it is installed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, text in {"mine.py": MINE, **FILES}.items():
        (tmp_path / name).write_text(text)
    more = wrong.split() if isinstance(wrong, str) else ["-c", str(tmp_path / "mine.yaml")]
    if not isinstance(wrong, str):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(wrong))
    if wrong == "--model.base base":
        shutil.copytree(bases["nvfp4"], tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer*"))
    if wrong == "--data.source.train_path gone.jsonl":
        more = ["--data.source=datamodules.table.Table", "--data.source.validation_share=0.5", *more]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr("sys.argv", ["train.py"])
    try:
        status = train.exit_status(arguments("fit", bases["nvfp4"], tmp_path / "run", *more))
    except SystemExit:  # the parser's, which prints the message
        status = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert isinstance(status, str), status
    assert re.search(said, status), status
    assert len(status.splitlines()) <= 5
    assert not (tmp_path / "run" / "completions").exists()
    assert not (tmp_path / "executed").exists(), "a setting was called as a command"
