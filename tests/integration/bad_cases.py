"""Seeded cases of bad input: a command line each, with its files, environment and limits of the process."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from torch import Tensor

import train
from qerl_pl.__main__ import main as command
from qerl_pl.tools.export import export_adapter
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

    @cached_property
    def adapter(self) -> Path:
        """The adapter of that run, for model.lora.start."""
        export_adapter(self.run, self.folder / "adapter")
        return self.folder / "adapter"

    @cached_property
    def gguf(self) -> Path:
        """The checkpoint as a GGUF file."""
        from tests.test_gguf import write_gguf  # skips where the package gguf is missing

        return write_gguf(self.dense, self.folder / "base.gguf")


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
)
"""Settings that have no effect with the others, or that contradict them."""


def together(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """Settings that do not go together."""
    words = drawn.choice(TOGETHER)
    return Case(words, [*fit(bases.dense, folder / "run"), *words.split()])


CALLBACKS = (
    "[{class_path: callbacks.aqn.AdaptiveQuantizationNoise, init_args: {decay: constant, sigma_end: 1.0e-3}}]",
    "[{class_path: callbacks.aqn.AdaptiveQuantizationNoise, init_args: {sigma_start: .inf}}]",
    "[{class_path: callbacks.evaluation.EvaluationReport, init_args: {level: 2}}]",
    "[{class_path: callbacks.stop_together.StopTogether}]",
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
    b"modell: {}\n",
    b"model:\n",
    b"model: {lora: {rank: 2}}\nmodel: {}\n",
    b"model: &a {lora: *a}\n",
    b"model: {\n",
    b"- 1\n",
    b"data: {batch_sise: 4}\n",
    b"trainer: {max_stepps: 4}\n",
    b"run_dir: ''\n",
    b"model: {engine: {class_path: nowhere.Engine}}\n",
    b"\x00",
    b"",
    b"model: &a [1, 2]\n"
    + "".join(f"x{n}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)).encode(),
    b"model: !!python/object/apply:os.system [true]\n",
    b"model: !mine {}\n",
    b"model: {<<: 3}\n",
    b"model: {<<: [1, {}]}\n",
    b"model: {warmup_steps: " + b"9" * 5000 + b"}\n",
    b"model: {warmup_steps: 1.0e99999}\n",
    b"model: {dtype: \xff\xfe}\n",
    b"model: {dtype: '\xed\xa0\x80'}\n",
    b"model: {dtype: 2026-99-99}\n",
    b"model: {? [a] : 1}\n",
    b"model: {? {a: 1} : 1}\n",
    b"--- {}\n--- {}\n",
    b"%YAML 9.9\n--- {}\n",
    b"model: " + b"[" * 3000 + b"]" * 3000 + b"\n",
    b"model: {lora: *nothing}\n",
    b"\tmodel: {}\n",
    b"model: {on: 1}\n",
    b"model: {3: 4}\n",
    b"model: {null: 4}\n",
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


CONFIG: dict[str, tuple[Any, ...]] = {
    "model_type": ("gemma3", "qwen2_moe", None, 3),
    "vocab_size": (3, -1, "x", None),
    "num_hidden_layers": (0, -2, 99, 1.5, 10**6),
    "hidden_size": (0, 7, "64", 10**9),
    "num_attention_heads": (0, 3, None),
    "num_key_value_heads": (0, 3),
    "rms_norm_eps": (float("nan"), -1.0, "x", 1e9),
    "eos_token_id": (-1, 10**6, "x"),
    "hidden_act": ("gelu", "no such", 3),
    "attention_bias": ("false", 1),
    "layer_types": (["full_attention"], "full_attention", [3, 3]),
    "sliding_window": (0, -1, "x"),
    "attn_logit_softcapping": (30.0,),
    "logits_scaling": (8.0,),
    "is_causal": (False,),
    "rope_parameters": ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 3, {"rope_theta": -1}),
    "tie_word_embeddings": ("false", 2),
    "quantization_config": ("nvfp4", {"quant_method": "awq"}, [], {"quant_method": "fp8"}),
    "max_position_embeddings": (0, -5, "x", 2),
    "intermediate_size": (0, 5, None, 10**12),
    "dual_chunk_attention_config": ({"chunk_size": 64},),
}


def config(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A value of config.json that is impossible, or that trainer and vLLM compute differently."""
    own = folder / "base"
    shutil.copytree(bases.dense, own)
    name = drawn.choice(sorted(CONFIG))
    value = drawn.choice(CONFIG[name])
    known = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**known, name: value}))
    return Case(f"config.json {name}={value!r}", fit(own, folder / "run"))


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "lacks a row": lambda tensor: tensor[:-1].contiguous(),
    "is int8": lambda tensor: tensor.to(torch.int8),
    "is bool": lambda tensor: tensor.to(torch.bool),
    "is complex": lambda tensor: tensor.to(torch.complex64),
    "holds NaN": lambda tensor: tensor * torch.nan,
    "holds infinity": lambda tensor: tensor + torch.inf,
    "has one more axis": lambda tensor: tensor.unsqueeze(0),
    "has no axis": lambda tensor: tensor.flatten()[0].clone(),
    "has no element": lambda tensor: tensor[:0].contiguous(),
}
"""Changes of one tensor of the base."""
SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "has a block of NaN": lambda tensor: _with_byte(tensor, 0x7F),
    "has a negative block": lambda tensor: _with_byte(tensor, 0xB8),
    "lacks a column": lambda tensor: tensor[:, :-1].contiguous(),
    "is fp32": lambda tensor: tensor.float(),
}
"""Changes of the block scales of a 4-bit base."""
GLOBAL: dict[str, Callable[[Tensor], Tensor]] = {
    "is 0": torch.zeros_like,
    "is negative": torch.neg,
    "is infinite": lambda tensor: tensor + torch.inf,
    "has two elements": lambda tensor: tensor.flatten().repeat(2),
}


def _with_byte(tensor: Tensor, byte: int) -> Tensor:
    raw = tensor.clone()
    raw.view(torch.uint8)[0, 0] = byte
    return raw


def tensor(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """Another tensor in a dense or 4-bit base."""
    own, packed = folder / "base", drawn.random() < 0.4
    shutil.copytree(bases.nvfp4 if packed else bases.dense, own)
    stored = drawn.choice(sorted(own.glob("*.safetensors")))
    tensors = load_file(stored)
    scales, divisors = ([name for name in sorted(tensors) if name.endswith(end)] for end in ("scale", "global_scale"))
    names, changes = sorted(tensors), TENSORS
    if packed:
        wide = [name for name in scales if name not in divisors]
        names, changes = drawn.choice(((wide, SCALES), (divisors, GLOBAL))) if wide else (names, TENSORS)
    name, how = drawn.choice(names), drawn.choice(sorted(changes))
    save_file({**tensors, name: changes[how](tensors[name])}, stored, metadata={"format": "pt"})
    quantize = ["quantize", "--model", str(own), "--output", str(folder / "out")]
    return Case(
        f"{name} {how}", fit(own, folder / "run") if packed else drawn.choice((fit(own, folder / "run"), quantize))
    )


ARMS = "output: {out}\narms: {{a: {{}}, b: {{}}}}\nseeds: [1, 2]\n"
STUDIES = (
    ARMS.replace("b:", "a:"),
    ARMS.replace("b: {{}}", "b: 3"),
    ARMS.replace("b: {{}}", "b: [1]"),
    ARMS.replace("b: {{}}", "b: {{modell: {{}}}}"),
    ARMS.replace("b: {{}}", "b: {{run_dir: x}}"),
    ARMS.replace("b: {{}}", "b: {{seed_everything: 3}}"),
    ARMS.replace("b:", "../b:"),
    ARMS.replace("b:", "yes:"),
    ARMS.replace("b:", "null:"),
    ARMS.replace("1, 2", "x"),
    ARMS.replace("1, 2", "-1"),
    ARMS.replace("1, 2", "[1]"),
    ARMS.replace("1, 2", "1, 1"),
    ARMS.replace("1, 2", "1, true"),
    ARMS.replace("1, 2", ""),
    ARMS.replace("[1, 2]", "3"),
    ARMS.replace("{out}", "$name"),
    ARMS.replace("{out}", "3"),
    ARMS.replace("{out}", "[a]"),
    ARMS.replace("{out}", "''"),
    ARMS.replace("output: {out}\n", "output:\n"),
    ARMS.replace("arms", "amrs"),
    ARMS + "gpu_memory: .nan\n",
    ARMS + "jobs: 1.5\n",
    ARMS + "attempts: yes\n",
    ARMS + "attempts: -1\n",
    ARMS + "config: [3]\n",
    ARMS + "config: [no_such]\n",
    ARMS + "config: [[a]]\n",
    ARMS + "config: quickstart\n",
    ARMS + "after: {{a: a}}\n",
    ARMS + "after: {{a: c}}\n",
    ARMS + "after: {{a: b, b: a}}\n",
    ARMS + "after: {{a: [b]}}\n",
    ARMS + "after: [a, b]\n",
    ARMS + "after: {{a: }}\n",
    ARMS + "settings: 3\n",
    ARMS + "settings: {{run_dir: elsewhere}}\n",
    ARMS + "settings: {{modell: {{}}}}\n",
    ARMS + "grid: {{model.lora.rank: 3}}\n",
    ARMS + "grid: {{model.lora.rank: []}}\n",
    ARMS + "grid: {{model.lora.rank: [4, 4]}}\n",
    ARMS + "grid: {{model.lora.rank: [4, '4']}}\n",
    ARMS + "grid: {{3: [1]}}\n",
    ARMS + "grid: {{run_dir: [a, b]}}\n",
    ARMS + "grid: {{seed_everything: [3]}}\n",
    ARMS + "grid: {{data.date: [2026-99-99, $seed]}}\n",
    ARMS + "evaluations: {{fit: {{}}}}\n",
    ARMS + "evaluations: {{x: 3}}\n",
    ARMS + "evaluations: [x]\n",
    ARMS + "analysis: {{comparisons: 3}}\n",
    ARMS + "analysis: {{comparisons: [a]}}\n",
    ARMS + "analysis: {{comparisons: [[a, [b]]]}}\n",
    ARMS + "analysis: {{comparisons: [[a, c]]}}\n",
    ARMS + "analysis: {{folder: 3}}\n",
    ARMS + "analysis: {{validation: [a]}}\n",
    ARMS + "analysis: {{metric: 3}}\n",
    ARMS + "analysis: 3\n",
    ARMS + "variables: [a]\n",
    ARMS + "variables: {{seed: 3}}\n",
    ARMS + "variables: {{x: [1]}}\nsettings: {{model: {{base: $x}}}}\n",
    ARMS + "variables: {{x: 1}}\nsettings: {{model: {{base: $y}}}}\n",
    ARMS.replace("a: {{}}, b:", "$x: {{}}, $y:") + "variables: {{x: a, y: a}}\n",
    ARMS + "x: !!python/name:os.system\n",
    ARMS + "jobs: " + "9" * 5000 + "\n",
)


def study(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A study's file that is wrong."""
    text = drawn.choice(STUDIES).format(out=folder / "out")
    (folder / "study.yaml").write_text(text)
    last = text.replace(str(folder), "").partition("seeds: [1, 2]\n")
    return Case(f"study {(last[2] or text)[:80]!r}", ["study", str(folder / "study.yaml"), "--dry-run"])


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
    "report {folder} --json /dev/null",
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
    "study {folder}/study.yaml --minutes nan",
    "study {folder}/study.yaml --jobs 0",
    "study {folder}/study.yaml --set x",
    "study {folder}/study.yaml --output {folder}/file",
    "study {letters}",
    "study {folder}/pipe",
    "tiny --output {folder}/tiny --seed -1",
    "tiny --output {folder}/file",
    "init {folder}/file",
    "init {folder}",
    "problems --output {folder}/problems",
    "chat {folder}/some --temperature nan",
    "chat {folder}/some --max-tokens 0",
    "chat {folder}/some",
    "chat {run} --checkpoint {folder}/pipe",
    "chat {run} --checkpoint nothing",
    "export --run {folder}/some --output {folder}/file",
    "export --run {folder}/some --output {folder}/out",
    "export --run {run} --output {run}",
    "export --run {run} --output {folder}/out --merge int4",
    "export --run {run} --output {folder}/out --checkpoint {folder}/file",
    "plan -c gsm8k --gpu-memory nan",
    "plan -c gsm8k --json {folder}",
    "plan -c gsm8k --picture {folder}/a.txt",
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


def words(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A wrong call of one of the other commands."""
    (folder / "some").mkdir()
    for name in ("file", "some/config.yaml"):
        (folder / name).write_text("{}\n")
    (folder / "rows").write_text('{"completion": "1", "answer": "1"}\n')
    (folder / "text.txt").write_text("One plus two is three. " * 200)
    (folder / "empty.txt").write_text("")
    (folder / "study.yaml").write_text(ARMS.format(out=folder / "out"))
    os.mkfifo(folder / "pipe")
    text = drawn.choice(COMMANDS)
    made = {name: getattr(bases, name) for name in ("dense", "nvfp4", "run") if f"{{{name}}}" in text}
    places = {"folder": folder, "letters": "a" * 5000, "toy": TOY, **made}
    return Case(text, [word.format(**places) for word in text.split()])


OPTIONS = (["--nothing", "3"], ["-c", "/nowhere.yaml"], ["--model.base", "/nowhere"], ["--model"])


def option(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A wrong option of fit."""
    more = drawn.choice(OPTIONS)
    return Case(f"command {' '.join(more)}", [*fit(bases.dense, folder / "run"), *more])


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


def of_source(name: str, text: str, bases: Bases, folder: Path) -> Case:
    """A run on a table with the settings in ``text``, as YAML."""
    source = f"data: {{source: {{class_path: datamodules.table.Table, init_args: {{{text}}}}}}}\n"
    return of_yaml(source.encode(), bases, folder)._replace(name=name)


ROWS = {"question": [f"What is {n} + 1?" for n in range(40)], "answer": [str(n + 1) for n in range(40)]}
PARQUET: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "cut to its start": lambda path: path.write_bytes(path.read_bytes()[:4]),
    "with one page flipped": lambda path: path.write_bytes(_flipped(path.read_bytes(), 4, 400)),
    "with its footer flipped": lambda path: path.write_bytes(_flipped(path.read_bytes(), -300, -8)),
    "with a footer of 4 GiB": lambda path: path.write_bytes(path.read_bytes()[:-8] + b"\xff\xff\xff\xff" + b"PAR1"),
    "JSON lines": lambda path: path.write_text('{"question": "a", "answer": "1"}\n'),
    "a ZIP file": lambda path: path.write_bytes(b"PK\x03\x04" + b"\0" * 99),
    "empty": lambda path: path.write_bytes(b""),
    "without rows": lambda path: parquet.write_table(pyarrow.table(ROWS).slice(0, 0), path),
    "without columns": lambda path: parquet.write_table(pyarrow.table({}), path),
    "with a column twice": lambda path: _write(
        path, [*ROWS.values(), ROWS["answer"]], ["question", "answer", "answer"]
    ),
    "of bytes": lambda path: _write(path, [[b"\xff\xfe"] * 40, ROWS["answer"]], ["question", "answer"]),
    "of nulls": lambda path: _write(path, [[None] * 40, ROWS["answer"]], ["question", "answer"]),
    "of lists": lambda path: _write(path, [[[1, 2]] * 40, ROWS["answer"]], ["question", "answer"]),
    "of lists of answers": lambda path: _write(path, [ROWS["question"], [["1", "2"]] * 40], ["question", "answer"]),
    "without an answer": lambda path: _write(path, [ROWS["question"]], ["question"]),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def _write(path: Path, columns: list[Any], names: list[str]) -> None:
    parquet.write_table(pyarrow.table([pyarrow.array(column) for column in columns], names=names), path)


def _flipped(content: bytes, start: int, stop: int) -> bytes:
    raw = bytearray(content)
    raw[start:stop] = bytes(byte ^ 0xFF for byte in raw[start:stop])
    return bytes(raw)


def container(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A Parquet file that is damaged, or whose columns are not what they should be."""
    path, how = folder / "rows.parquet", drawn.choice(sorted(PARQUET))
    parquet.write_table(pyarrow.table(ROWS), path)
    PARQUET[how](path)
    return of_source(f"a Parquet file {how}", f"train_path: {path}, validation_share: 0.3", bases, folder)


TABLES = (
    "train_path: '{folder}/*.parquet', validation_share: 0.3",
    "train_path: '{folder}/**/x*.jsonl', validation_share: 0.3",
    "train_path: https://example.invalid/rows.parquet, validation_share: 0.3",
    "train_path: s3://bucket/rows.jsonl, validation_share: 0.3",
    "train_path: {folder}/rows.csv, validation_share: 0.3",
    "train_path: [{rows}, {rows}], validation_share: 0.3",
    "train_path: [], validation_share: 0.3",
    "train_path: {rows}, validation_share: 1.5",
    "train_path: {rows}, validation_share: .nan",
    "train_path: {rows}",
    "train_path: {rows}, validation_path: {rows}, validation_share: 0.5",
    "train_path: {rows}, validation_share: 1.0e-9",
    "train_path: {rows}, validation_share: 0.3, question: nothing",
    "train_path: {rows}, validation_share: 0.3, question: []",
    "train_path: {rows}, validation_share: 0.3, question: ''",
    "train_path: {rows}, validation_share: 0.3, answer: question.text",
    "train_path: {rows}, validation_share: 0.3, marker: boxed",
    "train_path: {rows}, validation_share: 0.3, marker: hash, answer: null",
    "train_path: {rows}, validation_share: 0.3, system: nothing",
    "train_path: {rows}, validation_share: 0.3, only: {{level: []}}",
    "train_path: {rows}, validation_share: 0.3, only: {{nothing: [1]}}",
    "train_path: {rows}, validation_share: 0.3, only: {{level: [null]}}",
    "train_path: {rows}, validation_share: 0.3, only: {{level: [77]}}",
    "train_path: {rows}, validation_share: 0.3, only: {{level: 4}}",
    "train_path: {rows}, validation_share: 0.3, only: {{level: {{a: 1}}}}",
    "train_path: {rows}, validation_share: 0.3, only: [level]",
    "train_path: {rows}, validation_share: 0.3, only: {{level: [.nan]}}",
    "train_path: {rows}, validation_share: 0.3, only: {{tags: [a]}}",
    "train_path: {rows}, validation_share: 0.3, between: {{level: [9, 1]}}",
    "train_path: {rows}, validation_share: 0.3, between: {{level: [.nan, 1]}}",
    "train_path: {rows}, validation_share: 0.3, between: {{level: [1]}}",
    "train_path: {rows}, validation_share: 0.3, between: {{level: [1, 2, 3]}}",
    "train_path: {rows}, validation_share: 0.3, between: {{level: [a, b]}}",
    "train_path: {rows}, validation_share: 0.3, between: {{question: [0, 1]}}",
    "train_path: {rows}, validation_share: 0.3, between: {{level: [100, 200]}}",
    "train_path: {rows}, validation_share: 0.3, between: {{tags: [0, 1]}}",
    "train_path: {rows}, validation_share: 0.3, between: {{nothing: [0, 1]}}",
    "train_path: {rows}, validation_share: 0.3, bad_rows: ignore",
    "train_path: {rows}, validation_share: 0.3, train_split: nothing, colour: red",
)


def table(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """Wrong settings of a table, of its places or of its filters."""
    rows = folder / "rows.jsonl"
    columns = [
        {"question": q, "answer": a, "level": n % 5, "tags": ["a"]}
        for n, (q, a) in enumerate(zip(*ROWS.values(), strict=True))
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in columns))
    (folder / "rows.csv").write_text("question,answer\n1,1\n")
    text = drawn.choice(TABLES)
    return of_source(f"table {text}", text.format(folder=folder, rows=rows), bases, folder)


SCORED = (
    b"",
    b"\n\n",
    b"{}\n",
    b"[]\n",
    b"{\n",
    b"\xff\xfe\n",
    b'{"completion": "1"}\n',
    b'{"answer": "1"}\n',
    b'{"completion": 1, "answer": "1"}\n',
    b'{"completion": null, "answer": "1"}\n',
    b'{"completion": "1", "answer": {}}\n',
    b'{"completion": "1", "answer": ["1", "2"]}\n',
    b'{"completion": "1", "answer": NaN}\n',
    b'{"completion": "1", "answer": true}\n',
    b'{"completion": "1", "completion": "2", "answer": "1"}\n',
    b'{"completion": "1", "answer": "1"}{"completion": "1", "answer": "1"}\n',
    b'{"completion": "1", "answer": "1", "x": ' + b"[" * 900 + b"]" * 900 + b"}\n",
    b'{"completion": "1", "answer": ' + b"9" * 5000 + b"}\n",
    b"PAR1\0\0\0\0PAR1",
    b"completion,answer\n1,1\n",
)


def scored(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """Input of ``score`` that cannot be scored."""
    content, good = drawn.choice(SCORED), b'{"completion": "1", "answer": "1"}\n' * drawn.choice((0, 2))
    (folder / "rows").write_bytes((good if content.strip() else b"") + content)
    places = ["--input", str(folder / "rows"), "--output", str(folder / "scored")]
    reward = drawn.choice(("gsm8k", "math", "dapo"))
    return Case(f"{reward} {len(good)} + {content[:60]!r}", ["score", "--reward", reward, *places])


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


ADAPTER: dict[str, tuple[Any, ...]] = {
    "r": (0, -1, "x", None, 3, 10**9),
    "lora_alpha": (0, "x", None, float("nan"), -4),
    "target_modules": ([], ["no_such"], 3, None, "["),
    "peft_type": ("IA3", None, 3),
    "modules_to_save": (["lm_head"], 3),
    "bias": ("all", 3),
    "rank_pattern": ({"q_proj": 7}, 3),
    "use_dora": (True, "x"),
    "base_model_name_or_path": ([1], {"a": 1}),
    "layers_to_transform": ([0], "x"),
    "use_rslora": ("x",),
}


def start(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """An adapter to start from, with one file of it damaged, or one value or tensor of it wrong."""
    own, kind = folder / "adapter", drawn.choice(("file", "config", "tensor"))
    shutil.copytree(bases.adapter, own)
    weights, settings = own / "adapter_model.safetensors", own / "adapter_config.json"
    if kind == "file":
        path = drawn.choice((weights, settings))
        name = f"{path.name} {damaged(drawn, path)}"
    elif kind == "config":
        key = drawn.choice(sorted(ADAPTER))
        value = drawn.choice(ADAPTER[key])
        settings.write_text(json.dumps({**json.loads(settings.read_text()), key: value}))
        name = f"{key}={value!r}"
    else:
        tensors, how = load_file(weights), drawn.choice(sorted(TENSORS))
        key = drawn.choice(sorted(tensors))
        save_file({**tensors, key: TENSORS[how](tensors[key])}, weights, metadata={"format": "pt"})
        name = f"{key} {how}"
    lora = f"model: {{lora: {{start: {own}, rank: null, alpha: null}}}}\n"
    return of_yaml(lora.encode(), bases, folder)._replace(name=f"lora.start: {name}")


def gguf(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A GGUF file that is cut, of another family, one of several parts, or with a byte of its head changed."""
    from tests.test_gguf import write_gguf

    path, kind = folder / "own.gguf", drawn.choice(("cut", "family", "split", "damaged", "scaled", "name"))
    name = kind
    if kind == "family":
        name = drawn.choice(("gpt2", "mamba", "unheard", "qwen2moe", "clip"))
        write_gguf(bases.dense, path, architecture=name)
    elif kind == "split":
        write_gguf(bases.dense, path, metadata={"split.count": 3})
    elif kind == "scaled":
        write_gguf(bases.dense, path, metadata={"qwen2.rope.scaling.type": "yarn"})
    else:
        content = bases.gguf.read_bytes()
        at = drawn.choice((3, 8, 24, 100, 1000, len(content) // 2, len(content) - 10))
        how = {"cut": content[:at], "damaged": _flipped(content, 8, 8 + min(at, 64)), "name": b"GGML" + content[4:]}
        path.write_bytes(how[kind])
        name = f"{kind} {at}"
    environment = {"QERL_PL_CACHE": str(folder / "cache")}
    quantize = ["quantize", "--model", str(path), "--output", str(folder / "out")]
    return Case(f"gguf {name}", drawn.choice((fit(path, folder / "run"), quantize)), environment=environment)


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


def full(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A process whose files may not become large, as on a full disk."""
    (folder / "rows").write_text('{"completion": "1", "answer": "1"}\n' * 3000)
    calls = (
        fit(bases.dense, folder / "run"),
        ["quantize", "--model", str(bases.dense), "--output", str(folder / "out")],
        ["score", "--reward", "gsm8k", "--input", str(folder / "rows"), "--output", str(folder / "scored")],
        ["export", "--run", str(bases.run), "--output", str(folder / "out"), "--merge", "bf16"],
        ["report", str(bases.run), "--html", str(folder / "page.html")],
        ["report", str(bases.run), "--picture", str(folder / "a.png")],
        ["init", str(folder / "new")],
    )
    arguments, size = drawn.choice(calls), drawn.choice((0, 20, 100) if drawn.random() < 0.7 else (200,))
    return Case(f"files of at most {size} bytes: {arguments[0]}", arguments, file_bytes=size)


def read_only(drawn: random.Random, bases: Bases, folder: Path) -> Case:
    """A folder that the user may not write to, or a file that they may not read."""
    shut, secret = folder / "shut", folder / "secret"
    shut.mkdir(mode=0o555)
    (folder / "rows").write_text('{"completion": "1", "answer": "1"}\n')
    secret.write_text((TOY).read_text())
    secret.chmod(0o000)
    (folder / "study.yaml").write_text(ARMS.format(out=shut / "out") + "jobs: 1\n")
    calls = (
        fit(bases.dense, shut / "run"),
        fit(bases.dense, shut),
        ["fit", "-c", str(secret), *fit(bases.dense, folder / "run")[3:]],
        ["quantize", "--model", str(bases.dense), "--output", str(shut / "out")],
        ["score", "--reward", "math", "--input", str(folder / "rows"), "--output", str(shut / "scored")],
        ["score", "--reward", "math", "--input", str(secret), "--output", str(folder / "scored")],
        ["export", "--run", str(bases.run), "--output", str(shut / "out")],
        ["report", str(bases.run), "--json", str(shut / "a.json")],
        ["report", str(bases.run), "--picture", str(shut / "a.png")],
        ["init", str(shut / "new")],
        ["tiny", "--output", str(shut / "tiny")],
        ["study", str(folder / "study.yaml")],
        ["study", str(secret)],
        ["plan", "-c", str(secret)],
    )
    arguments = drawn.choice(calls)
    shown = " ".join(arguments).replace(str(folder), "").replace(str(bases.folder), "")
    return Case(f"read-only: {shown[:80]}", arguments, unprivileged=True)


KINDS = (
    setting,
    together,
    part,
    yaml_file,
    place,
    file,
    config,
    tensor,
    study,
    words,
    words,
    option,
    environment,
    container,
    table,
    scored,
    start,
    gguf,
    run,
    full,
    read_only,
)


def draw(seed: int, bases: Bases, folder: Path) -> Case:
    """Make the case of a seed; its files are written to ``folder``."""
    drawn = random.Random(seed)
    return drawn.choice(KINDS)(drawn, bases, folder)
