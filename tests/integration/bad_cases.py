"""Seeded cases of bad input: a command line each, with its files, environment and limits of the process."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import train
from qerl_pl.__main__ import main as command
from qerl_pl.tools.tiny import make_tiny

TOY = Path(__file__).with_name("toy.yaml")
STEPS = ["--trainer.max_steps", "4"]


class Case(NamedTuple):
    """One call of the program."""

    name: str
    arguments: list[str]
    environment: Mapping[str, str] = {}
    file_bytes: int | None = None
    """Largest size of a file that the process may write, as where a disk is full; None: any."""
    unprivileged: bool = False
    """Whether the process gives up the privileges of root, if it has them."""


class Bases:
    """What cases change one thing in, each made when a case first needs it.

    Args:
        folder: for all of it.
        dense: folder of a checkpoint of the toy policy; None makes one.
    """

    def __init__(self, folder: Path, dense: Path | None = None) -> None:
        self.folder = folder
        self._dense = dense

    @cached_property
    def dense(self) -> Path:
        """A checkpoint in fp32."""
        if self._dense is None:
            make_tiny(self.folder / "dense", seed=0, sft_steps=0)
        return self._dense or self.folder / "dense"

    @cached_property
    def nvfp4(self) -> Path:
        """The same checkpoint in 4 bits."""
        assert command(["quantize", "--model", str(self.dense), "--output", str(self.folder / "nvfp4")]) == 0
        return self.folder / "nvfp4"

    @cached_property
    def run(self) -> Path:
        """The folder of a finished run."""
        assert train.exit_status([*fit(self.dense, self.folder / "run"), *STEPS]) == 0
        (self.folder / "run" / "checkpoints" / "previous.ckpt").unlink()  # a damaged last.ckpt would not be missed
        return self.folder / "run"


def fit(base: Path, run: Path) -> list[str]:
    """The command line of the toy run."""
    return ["fit", "-c", str(TOY), "--run_dir", str(run), "--model.base", str(base)]


WRONG = ("nan", ".nan", "-1", "-.inf", "abc", "[1, 2]", "{a: 1}")
SETTINGS = (
    "model.gpu_memory",
    "model.lora.rank",
    "model.lora.alpha",
    "model.max_grad_norm",
    "model.max_unscored_share",
    "model.micro_batch_tokens",
    "model.sampling.max_tokens",
    "model.sampling.num_completions",
    "model.sampling.temperature",
    "model.updates_per_rollout",
    "model.warmup_steps",
    "data.batch_size",
    "data.max_prompt_tokens",
    "data.max_dropped_share",
    "trainer.max_steps",
    "trainer.val_check_interval",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.limit_train_batches",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip_val",
)
HARMLESS = {("trainer.devices", "-1"), ("model.max_grad_norm", ".inf")}


def setting(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A wrong value of a setting."""
    name, value = drawn.choice(SETTINGS), drawn.choice(WRONG)
    if (name, value) in HARMLESS:
        value = "abc"
    return Case(f"{name}={value}", [*fit(bases.dense, folder / "run"), f"--{name}={value}"])


TOGETHER = (
    "--model.objective.kl k2",
    "--model.objective.kl_in reward",
    "--model.objective.correction none --model.objective.correction_high 3",
    "--model.objective.ratio_against sampler --model.objective.correction_low 0.3",
    "--model.val_sampling.temperature 0 --model.val_sampling.top_p 0.5",
    "--model.val_sampling.temperature 0 --model.val_sampling.num_completions 2",
    "--model.sampling.temperature 1e-3",
    "--model.sampling.top_k -2",
    "--model.quantize.format nvfp4 --model.quantize.samples 7",
    "--model.quantize.format nf4 --model.quantize.method gptq",
    "--model.mini_batches 3",
    "--model.updates_per_rollout 3",
    "--model.sampling.num_completions 1",
    "--model.rewards []",
    "--model.lora.start /nowhere",
    "--model.lora.targets []",
    "--trainer.max_epochs 3",
    "--trainer.fast_dev_run true",
    "--trainer.precision 16-true",
    "--trainer.strategy nonsense",
    "--trainer.accelerator tpu",
    "--trainer.max_time 1",
    "--trainer.min_steps 99",
    "--trainer.plugins []",
    "--trainer.limit_train_batches 0",
    "--trainer.barebones true",
    "--data.stop ['']",
    "--data.question_template none",
    "--data.date tomorrow",
    "--data.held_out -3",
    "--nothing 3",
    "-c /nowhere.yaml",
    "--model.base /nowhere",
    "--model",
)
"""Settings that have no effect with the others or that contradict them, and options that do not exist."""


def together(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """Settings that do not go together."""
    words = drawn.choice(TOGETHER)
    return Case(words, [*fit(bases.dense, folder / "run"), *words.split()])


CALLBACKS = (
    "[{class_path: callbacks.aqn.AdaptiveQuantizationNoise, init_args: {decay: constant, sigma_end: 1.0e-3}}]",
    "[{class_path: callbacks.aqn.AdaptiveQuantizationNoise, init_args: {sigma_start: .inf}}]",
    "[{class_path: callbacks.evaluation.EvaluationReport, init_args: {level: 2}}]",
    "[{class_path: callbacks.process.StopTogether}]",
    "[{class_path: callbacks.canary.Canary, init_args: {every_n_rollouts: 0}}]",
    "[{class_path: callbacks.canary.NoSuchClass}]",
    "[{class_path: lightning.pytorch.callbacks.StochasticWeightAveraging, init_args: {swa_lrs: 0.1}}]",
    "[{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: no/such}}]",
    "[{class_path: torch.nn.Linear, init_args: {in_features: 1, out_features: 1}}]",
    "[{class_path: builtins.print}]",
    "[1]",
    "nothing",
)
OPTIMIZERS = (
    "{class_path: torch.optim.LBFGS}",
    "{class_path: torch.optim.SparseAdam}",
    "{class_path: torch.optim.AdamW, init_args: {lr: .inf}}",
    "{class_path: torch.optim.AdamW, init_args: {lr: 1.0e-3, maximize: true}}",
    "{class_path: torch.optim.AdamW, init_args: {lr: 1.0e-3, betas: [2, 3]}}",
    "{class_path: torch.optim.AdamW, init_args: {lr: 1.0e-3, eps: .nan}}",
    "{class_path: torch.optim.AdamW, init_args: {lr: 1.0e-3, fused: true, foreach: true}}",
    "{class_path: torch.optim.SGD, init_args: {lr: 1.0e39}}",
    "{class_path: torch.optim.SGD, init_args: {lr: 1.0e-3, nesterov: true}}",
    "{class_path: torch.nn.Linear}",
    "{class_path: torch.optim.NoSuch}",
    "[torch.optim.AdamW]",
)


def part(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A callback or an optimizer that cannot be used."""
    key, values = drawn.choice((("trainer: {callbacks+: ", CALLBACKS), ("model: {optimizer: ", OPTIMIZERS)))
    return of_yaml(f"{key}{drawn.choice(values)}}}\n".encode(), bases, folder)


YAML = (
    b"data: {batch_sise: 4}\n",
    b"trainer: {max_stepps: 4}\n",
    b"run_dir: ''\n",
    b"model: {engine: {class_path: nowhere.Engine}}\n",
    b"model: !!python/object/apply:os.system [true]\n",
    b"model: !mine {}\n",
    b"model: {<<: 3}\n",
    b"model: {<<: [1, {}]}\n",
    b"model: {warmup_steps: " + b"9" * 5000 + b"}\n",
    b"model: {warmup_steps: 1.0e99999}\n",
    b"model: {dtype: \xff\xfe}\n",
    b"model: {dtype: '\xed\xa0\x80'}\n",
    b"model: {dtype: 2026-99-99}\n",
    b"model: {? {a: 1} : 1}\n",
    b"--- {}\n--- {}\n",
    b"%YAML 9.9\n--- {}\n",
    b"model: {lora: *nothing}\n",
    b"model: {3: 4}\n",
    b"model: {'': 4}\n",
    b"model: 3\n",
    b"model: {sampling: 3}\n",
    b"model: {lora: [rank]}\n",
    b"data: {source: {class_path: datamodules.table.Table, init_args: {train_path: [], validation_share: 0.5}}}\n",
    b"seed_everything: [1]\n",
    b"trainer: {logger: {class_path: nowhere}}\n",
)


def of_yaml(content: bytes, bases: Bases, folder: Path) -> Case:
    """A run with one more configuration file."""
    file, (name, *rest) = folder / "more.yaml", fit(bases.dense, folder / "run")
    file.write_bytes(content)
    return Case(f"yaml {content[:200].decode(errors='replace')!r}", [name, *rest[:2], "-c", str(file), *rest[2:]])


def yaml_file(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A configuration file that is wrong as a whole."""
    return of_yaml(drawn.choice(YAML), bases, folder)


def strange(drawn: random.Random, path: Path) -> str:
    """Put something else in place of a file or folder; returns in words what."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    what = drawn.choice(("a pipe", "a folder", "a link to nothing", "a link to itself", "a socket's like", "empty"))
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    elif what == "a link to nothing":
        path.symlink_to("nothing")
    elif what == "a link to itself":
        path.symlink_to(path.name)
    elif what == "a socket's like":
        path.symlink_to("/dev/zero")
        what = "a link to /dev/zero"
    else:
        path.write_bytes(b"")
    return what


NAMES = (
    "a\0b",
    "a\udcffb",
    "a" * 300,
    "/proc/self/mem",
    "/dev/full",
    "",
    " ",
    "https://example.invalid/x",
    "~nobody9/x",
)


def place(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A place that is no file or folder, for the base, a file of it, a configuration or a run's folder."""
    arguments, kind = fit(bases.dense, folder / "run"), drawn.choice(("base", "file", "config", "run", "name"))
    if kind == "name":
        name, at = drawn.choice(NAMES), drawn.choice((2, 4, 6))
        if at == 4 and (name.startswith("https") or name == "a" * 300):
            name = "a\0b"
        arguments[at] = name
        return Case(f"{arguments[at - 1]} {name[:60]!r}", arguments)
    if kind == "config":
        arguments[2] = str(folder / "toy.yaml")
        return Case(f"-c is {strange(drawn, folder / 'toy.yaml')}", arguments)
    if kind == "run":
        name = drawn.choice(("checkpoints", "config.yaml", "checkpoints/last.ckpt", "completions"))
        shutil.copytree(bases.run, folder / "run")
        what = strange(drawn, there := folder / "run" / name)
        if name in ("checkpoints", "completions") and what == "a folder":
            there.rmdir()
            there.write_text(what := "a file")
        return Case(f"{name} of the run is {what}", [*arguments, *STEPS, "--ckpt_path", "last"])
    own = folder / "base"
    arguments[6] = str(own)
    if kind == "base":
        return Case(f"the base is {strange(drawn, own)}", arguments)
    shutil.copytree(bases.dense, own)
    name = drawn.choice(("config.json", "tokenizer.json", "model.safetensors"))
    return Case(f"{name} of the base is {strange(drawn, own / name)}", arguments)


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
CONTENT = (b"", b"{", b"{}", b"[]", b"null", b"\xff\xfe", b"3", b"\x00" * 64, b'{"a": ' * 9000)


def file(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """Other content of a file of the base."""
    own = folder / "base"
    shutil.copytree(bases.dense, own)
    name, content = drawn.choice(FILES), drawn.choice(CONTENT)
    if name == "generation_config.json":
        content = b"{"
    if name == "tokenizer_config.json" and content in (b"{}", b""):
        content = b"[]"
    (own / name).write_bytes(content)
    return Case(f"{name} is {content[:40]!r}", fit(own, folder / "run"))


STUDY = "output: {out}\narms: {{a: {{}}, b: {{}}}}\nseeds: [1, 2]\n"
COMMANDS = (
    "quantize --model {dense} --output {folder}/file",
    "quantize --model {dense} --output {folder}/out --samples 0",
    "quantize --model {dense} --output {folder}/out --length -1",
    "quantize --model {dense} --output {folder}/out --residual 2",
    "quantize --model {dense} --output {folder}/out --residual 0",
    "quantize --model {dense} --output {folder}/out --residual 99999 --calibration {folder}/text.txt",
    "quantize --model {dense} --output {folder}/out --residual 2 --calibration {folder}/pipe",
    "quantize --model {dense} --output {folder}/out --residual 2 --calibration {folder}/empty.txt",
    "quantize --model {dense} --output {folder}/out --residual x",
    "quantize --model {dense} --output {folder}/out --method gptq",
    "quantize --model {dense} --output {folder}/out --ignore re:[",
    "quantize --model {dense} --output {folder}/out --ignore no_such",
    "quantize --model {nvfp4} --output {folder}/out",
    "quantize --model {dense} --output {dense}",
    "quantize --model {folder}/pipe --output {folder}/out",
    "report {folder} --json {folder}",
    "report {folder} --html {folder}/pipe",
    "report {run} --completions -1",
    "report {run} --completions x",
    "report {run} --html {folder}",
    "report {run} --picture {folder}/a.xyz",
    "report {run} {run} {folder}/none",
    "report {folder} --completions -1",
    "report {letters}",
    "score --reward math --input {folder}/rows --output {folder}",
    "score --reward math --input {folder}/rows --output /dev/null",
    "score --reward math --input {folder}/rows --output {folder}/pipe",
    "score --reward math --input {letters} --output {folder}/scored",
    "score --reward math --input {folder}/pipe --output {folder}/scored",
    "score --reward math --input {folder} --output {folder}/scored",
    "score --reward maths --input {folder}/rows --output {folder}/scored",
    "score --reward os.system --input {folder}/rows --output {folder}/scored",
    "score --reward math --reward.fallback x --input {folder}/rows --output {folder}/scored",
    "study {folder}/study.yaml --jobs 0",
    "study {folder}/study.yaml --set x",
    "study {folder}/study.yaml --output {folder}/file",
    "study {letters}",
    "study {folder}/pipe",
    "tiny --output {folder}/file",
    "init {folder}/file",
    "init {folder}",
    "chat {folder}/some --max-tokens 0",
    "chat {folder}/some",
    "chat {run} --checkpoint {folder}/pipe",
    "chat {run} --checkpoint nothing",
    "export --run {folder}/some --output {folder}/file",
    "export --run {folder}/some --output {folder}/out",
    "export --run {run} --output {run}",
    "export --run {run} --output {folder}/out --merge int4",
    "export --run {run} --output {folder}/out --checkpoint {folder}/file",
    "plan -c gsm8k --picture {folder}/a.png",
    "plan -c gsm8k --longest 0",
    "plan -c {letters}",
    "plan -c {folder}/pipe",
    "fit -c {letters}",
    "fit -c {folder}/pipe",
    "doctor -c {folder}/pipe",
    "doctor -c {letters}",
    "test -c {toy} --model.base {dense} --run_dir {folder}/out --ckpt_path {folder}/file",
    "predict -c {toy} --model.base {dense} --run_dir {folder}/out --ckpt_path {folder}/pipe",
    "validate -c {toy} --model.base {dense} --run_dir {folder}/out --ckpt_path {folder}",
)


FIT = "fit -c {toy} --model.base {dense} --run_dir "
FULL = (
    FIT + "{folder}/run",
    "quantize --model {dense} --output {folder}/out",
    "score --reward gsm8k --input {folder}/many --output {folder}/scored",
    "export --run {run} --output {folder}/out --merge bf16",
    "report {run} --html {folder}/page.html",
    "report {run} --picture {folder}/a.png",
    "init {folder}/new",
)
READ_ONLY = (
    FIT + "{folder}/shut/run",
    FIT + "{folder}/shut",
    FIT + "{folder}/run -c {folder}/secret",
    "quantize --model {dense} --output {folder}/shut/out",
    "score --reward math --input {folder}/rows --output {folder}/shut/scored",
    "score --reward math --input {folder}/secret --output {folder}/scored",
    "export --run {run} --output {folder}/shut/out",
    "report {run} --json {folder}/shut/a.json",
    "report {run} --picture {folder}/shut/a.png",
    "init {folder}/shut/new",
    "tiny --output {folder}/shut/tiny",
    "study {folder}/study.yaml --jobs 1 --output {folder}/shut/out",
    "study {folder}/secret",
    "plan -c {folder}/secret",
)


def call(text: str, bases: Bases, folder: Path) -> list[str]:
    """The words of a command line, whose files are written to the folder."""
    (folder / "some").mkdir()
    for name in ("file", "some/config.yaml"):
        (folder / name).write_text("{}\n")
    for name, rows in (("rows", 1), ("many", 3000)):
        (folder / name).write_text('{"completion": "1", "answer": "1"}\n' * rows)
    (folder / "text.txt").write_text("One plus two is three. " * 200)
    (folder / "empty.txt").write_text("")
    (folder / "study.yaml").write_text(STUDY.format(out=folder / "out"))
    os.mkfifo(folder / "pipe")
    (folder / "shut").mkdir(mode=0o555)
    (folder / "secret").write_text(TOY.read_text())
    (folder / "secret").chmod(0o000)
    made = {name: getattr(bases, name) for name in ("dense", "nvfp4", "run") if f"{{{name}}}" in text}
    places = {"folder": folder, "letters": "a" * 5000, "toy": TOY, **made}
    return [word.format(**places) for word in text.split()]


def words(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A wrong call of one of the other commands."""
    text = drawn.choice(COMMANDS)
    return Case(text, call(text, bases, folder))


def full(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A process whose files may not become large, as on a full disk."""
    text, size = drawn.choice(FULL), drawn.choice((0, 20, 100) if drawn.random() < 0.7 else (200,))
    return Case(f"files of at most {size} bytes: {text}", call(text, bases, folder), file_bytes=size)


def read_only(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A folder that the user may not write to, or a file that they may not read."""
    text = drawn.choice(READ_ONLY)
    return Case(f"read-only: {text}", call(text, bases, folder), unprivileged=True)


ENVIRONMENT = (
    {"LOCAL_RANK": "x"},
    {"SLURM_NTASKS": "x", "SLURM_JOB_NAME": "a"},
    {"SLURM_NTASKS": "7", "SLURM_JOB_NAME": "a"},
    {"QERL_PL_CACHE": "/dev/null"},
    {"QERL_PL_CACHE": "/proc/nowhere"},
    {"XDG_CACHE_HOME": "/dev/null", "QERL_PL_CACHE": ""},
)


def environment(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A variable of the environment that something reads during a run."""
    values = drawn.choice(ENVIRONMENT)
    arguments = fit(bases.dense, folder / "run")
    if any("CACHE" in name for name in values):
        arguments += ["--model.quantize.format", "nvfp4"]
    return Case(f"environment {values}", arguments, environment=values)


def _flipped(content: bytes, start: int, stop: int) -> bytes:
    raw = bytearray(content)
    raw[start:stop] = bytes(byte ^ 0xFF for byte in raw[start:stop])
    return bytes(raw)


def damaged(drawn: random.Random, path: Path) -> str:
    """Damage a file; returns in words how."""
    content, how = (
        path.read_bytes(),
        drawn.choice(("is cut", "is empty", "is flipped", "is missing", "is text", "is a list")),
    )
    if how == "is missing":
        path.unlink()
        return how
    middle = len(content) // 2
    other = {"is cut": content[:middle], "is empty": b"", "is text": b"text\n", "is a list": b"[1, 2]"}
    path.write_bytes(other.get(how, _flipped(content, 0, middle)))
    return how


RUN_FILES = ("config.yaml", "checkpoints/last.ckpt")


def run(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A finished run of which one file is damaged, given to the commands that read it."""
    own, file = folder / "run", drawn.choice(RUN_FILES)
    shutil.copytree(bases.run, own)
    how = damaged(drawn, own / file)
    calls = [["export", "--run", str(own), "--output", str(folder / "out")], ["chat", str(own)]]
    if file != "config.yaml" and how != "is missing":  # without a checkpoint, fit begins anew
        calls += [[*fit(bases.dense, own), *STEPS, "--ckpt_path", "last"]]
        calls += [["test", *fit(bases.dense, folder / "t")[1:], "--ckpt_path", str(own / file)]]
    arguments = drawn.choice(calls)
    return Case(f"{arguments[0]}: {file} {how}", arguments)


KINDS = (setting, together, part, yaml_file, place, file, words, words, environment, run, full, read_only)


def draw(seed: int, bases: Bases, folder: Path) -> Case:
    """Make the case of a seed; its files are written to ``folder``."""
    drawn = random.Random(seed)
    return drawn.choice(KINDS)(drawn, bases, folder)
