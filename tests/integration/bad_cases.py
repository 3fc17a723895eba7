"""Cases of bad input to the program. Each case is a command line with the files that it reads, and the environment
variables and limits of its process."""

from __future__ import annotations

import os
import random
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import train
from qerl_pl.__main__ import main as command
from qerl_pl.tools.tiny import make_tiny

TOY = Path(__file__).with_name("toy.yaml")
FIT = "fit -c {toy} --model.base {dense} --run_dir {folder}/run"


class Case(NamedTuple):
    """One call of the program."""

    words: str
    """Command line; the folder of the case, the toy's configuration and parts of ``Bases`` are names in braces."""
    make: Callable[[Bases, Path], object] | None = None
    """Function that writes additional files of this case to its folder."""
    what: str = ""
    """Description of these files, for the name of the case."""
    environment: Mapping[str, str] = {}
    file_bytes: int | None = None
    """Largest size of a file that the process may write, to imitate a full disk; None: no limit."""
    unprivileged: bool = False
    """Whether the process gives up the privileges of root if it has them."""

    @property
    def name(self) -> str:
        limit = f" with files of at most {self.file_bytes} bytes" if self.file_bytes is not None else ""
        return f"{self.words.replace(FIT, 'fit')} {self.what} {self.environment or ''}{limit}".strip()

    def arguments(self, bases: Bases, folder: Path) -> list[str]:
        """Write the files that the case needs to ``folder``; returns the words of its command line, with the paths of
        these files."""
        (folder / "some").mkdir()
        for name in ("file", "some/config.yaml", "problems.jsonl"):
            (folder / name).write_text("{}\n")
        for name, rows in (("rows", 1), ("many", 3000)):
            (folder / name).write_text('{"completion": "1", "answer": "1"}\n' * rows)
        (folder / "text.txt").write_text("One plus two is three. " * 200)
        (folder / "empty.txt").write_text("")
        (folder / "study.yaml").write_text(f"output: {folder}/out\narms: {{a: {{}}, b: {{}}}}\nseeds: [1, 2]\n")
        os.mkfifo(folder / "pipe")
        (folder / "shut").mkdir(mode=0o555)
        (folder / "secret").write_text(TOY.read_text())
        (folder / "secret").chmod(0o000)
        if self.make:
            self.make(bases, folder)
        made = {name: getattr(bases, name) for name in ("dense", "nvfp4", "run") if f"{{{name}}}" in self.words}
        places = {"folder": folder, "letters": "a" * 5000, "toy": TOY, **made}
        return [word.format(**places) for word in shlex.split(self.words)]


class Bases:
    """Two checkpoints and a finished run, valid inputs of the program. Cases change one thing in copies of them. Each
    is made when it is first needed.

    Args:
        folder: folder to which the checkpoints and the run are written.
        dense: folder of an existing dense checkpoint of the quickstart's model; None makes one.
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
        """The dense checkpoint, quantised to NVFP4."""
        assert command(["quantize", "--model", str(self.dense), "--output", str(self.folder / "nvfp4")]) == 0
        return self.folder / "nvfp4"

    @cached_property
    def run(self) -> Path:
        """The folder of a finished run."""
        fit = ["fit", "-c", str(TOY), "--model.base", str(self.dense), "--trainer.max_steps", "4"]
        assert train.exit_status([*fit, "--run_dir", str(self.folder / "run")]) == 0
        (self.folder / "run" / "checkpoints" / "previous.ckpt").unlink()  # a damaged last.ckpt would not be missed
        return self.folder / "run"


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
"""Settings that have no effect together with the other settings or contradict them, and unknown options."""


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


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
CONTENT = (b"", b"{", b"{}", b"[]", b"null", b"\xff\xfe", b"3", b"\x00" * 64, b'{"a": ' * 9000)
HARMLESS_FILES = {("tokenizer_config.json", content) for content in (b"", b"{}")}
HARMLESS_FILES |= {("generation_config.json", content) for content in CONTENT if content != b"{"}
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


FULL = (
    FIT,
    "quantize --model {dense} --output {folder}/out",
    "score --reward gsm8k --input {folder}/many --output {folder}/scored",
    "export --run {run} --output {folder}/out --merge bf16",
    "report {run} --html {folder}/page.html",
    "report {run} --picture {folder}/a.png",
    "init {folder}/new",
)
READ_ONLY = (
    FIT + " --run_dir {folder}/shut/run",
    FIT + " --run_dir {folder}/shut",
    FIT + " -c {folder}/secret",
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


ENVIRONMENT = (
    {"LOCAL_RANK": "x"},
    {"SLURM_NTASKS": "x", "SLURM_JOB_NAME": "a"},
    {"SLURM_NTASKS": "7", "SLURM_JOB_NAME": "a"},
    {"QERL_PL_CACHE": "/dev/null"},
    {"QERL_PL_CACHE": "/proc/nowhere"},
    {"XDG_CACHE_HOME": "/dev/null", "QERL_PL_CACHE": ""},
)


STRANGE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "empty": lambda path: path.write_bytes(b""),
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "text": lambda content: b"text\n",
    "a list": lambda content: b"[1, 2]",
    "flipped": lambda content: bytes(byte ^ 0xFF for byte in content),
}


def in_copy(part: str, name: str, change: Callable[[Path], object], bases: Bases, folder: Path) -> None:
    """Copy a checkpoint or the run of ``bases``, whichever ``part`` names, into ``folder``, and call ``change`` with
    the path of ``name`` in the copy."""
    path = shutil.copytree(getattr(bases, part), folder / part) / name
    change(path)


def replaced(by: Callable[[Path], object], path: Path) -> None:
    """Delete the file or folder at ``path``, and call ``by`` to make something else there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    by(path)


def damaged(how: Callable[[bytes], bytes], path: Path) -> None:
    path.write_bytes(how(path.read_bytes()))


def quoted(*words: str) -> str:
    return shlex.join(words).replace("{", "{{").replace("}", "}}")


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for name, value in product(SETTINGS, WRONG):
        if (name, value) not in HARMLESS:
            yield Case(f"{FIT} {quoted(f'--{name}={value}')}")
    yield from (Case(f"{FIT} {quoted(*words.split())}") for words in TOGETHER)
    contents = [f"trainer: {{callbacks+: {callbacks}}}\n".encode() for callbacks in CALLBACKS]
    contents += [f"model: {{optimizer: {optimizer}}}\n".encode() for optimizer in OPTIMIZERS]
    for content in (*contents, *YAML):
        write = partial(lambda content, _, folder: (folder / "more.yaml").write_bytes(content), content)
        yield Case(f"{FIT} -c {{folder}}/more.yaml", write, repr(content[:200]))
    for option, name in product(("-c", "--run_dir", "--model.base"), NAMES):
        if option != "--run_dir" or not name.startswith(("https", "aaa")):
            yield Case(f"{FIT} {option} {quoted(name)}")
    yield from (Case(words) for words in COMMANDS)
    for words, size in product(FULL, (0, 20, 100, 200)):
        yield Case(words, file_bytes=size)
    yield from (Case(words, unprivileged=True) for words in READ_ONLY)
    for values in ENVIRONMENT:
        more = " --model.quantize.format nvfp4" if any("CACHE" in name for name in values) else ""
        yield Case(FIT + more, environment=values)

    other_base, own_run = FIT.replace("{dense}", "{folder}/dense"), "--trainer.max_steps 4 --ckpt_path last"
    for (what, by), name in product(STRANGE.items(), ("config.json", "tokenizer.json", "model.safetensors")):
        yield Case(other_base, partial(in_copy, "dense", name, partial(replaced, by)), f"{name} is {what}")
    for what, by in STRANGE.items():
        yield Case(other_base, partial(lambda by, _, folder: by(folder / "dense"), by), f"the base is {what}")
        write = partial(lambda by, _, folder: by(folder / "toy.yaml"), by)
        yield Case(FIT.replace("{toy}", "{folder}/toy.yaml"), write, f"the configuration is {what}")
    for (what, by), name in product(STRANGE.items(), ("config.yaml", "checkpoints/last.ckpt")):
        if what == "empty":
            continue  # a checkpoint: below; and without a config.yaml, a run takes the settings in its checkpoint
        yield Case(f"{FIT} {own_run}", partial(in_copy, "run", name, partial(replaced, by)), f"{name} is {what}")
    for (what, by), name in product(STRANGE.items(), ("checkpoints", "completions")):
        if what != "a folder":
            yield Case(f"{FIT} {own_run}", partial(in_copy, "run", name, partial(replaced, by)), f"{name} is {what}")
    for name, content in product(FILES, CONTENT):
        if (name, content) in HARMLESS_FILES:
            continue
        write = partial(in_copy, "dense", name, partial(lambda content, path: path.write_bytes(content), content))
        yield Case(other_base, write, f"{name} is {content[:40]!r}")
    readers = ["export --run {folder}/run --output {folder}/out", "chat {folder}/run"]
    resumed = [f"{FIT} {own_run}", f"test {FIT[4:]}/test --ckpt_path {{folder}}/run/checkpoints/last.ckpt"]
    for (what, how), name in product(DAMAGES.items(), ("config.yaml", "checkpoints/last.ckpt")):
        for words in readers if name == "config.yaml" else [*readers, *resumed]:
            yield Case(words, partial(in_copy, "run", name, partial(damaged, how)), f"{name} is {what}")
    for words, name in product(readers, ("config.yaml", "checkpoints/last.ckpt")):
        yield Case(words, partial(in_copy, "run", name, Path.unlink), f"{name} is missing")


CASES = list(cases())
random.Random(0).shuffle(CASES)  # so that any few of them are of several kinds
