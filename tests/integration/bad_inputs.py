"""Bad input from a seeded generator: python -m tests.integration.bad_inputs [--number 300] [--seed 0].

Every case starts the toy run or another command with one thing wrong, in this process, and prints one JSON line:
``refused`` (a message of at most ten lines), ``ran``, ``raw`` (an exception that is no message), ``long`` (a longer
message) or ``timeout``. All but the first mean that something is to be mended; so the command ends with status 1 if
there was one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import train
from qerl_pl.__main__ import main as main_of_commands
from qerl_pl.tools.tiny import make_tiny

TOY = Path(__file__).with_name("toy.yaml")
SECONDS = 30
MOST_LINES = 10
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
YAML = (
    "modell: {}\n",
    "model:\n",
    "model: {lora: {rank: 2}}\nmodel: {}\n",
    "model: &a {lora: *a}\n",
    "model: {\n",
    "- 1\n",
    "data: {batch_sise: 4}\n",
    "trainer: {max_stepps: 4}\n",
    "run_dir: ''\n",
    "model: {engine: {class_path: nowhere.Engine}}\n",
    "\x00",
    "",
    "model: &a [1, 2]\n" + "".join(f"x{n}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)),
)
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
CONTENT = (b"", b"{", b"{}", b"[]", b"null", b"\xff\xfe", b"3")
CONFIG = {
    "model_type": ("gemma3", "qwen2_moe", None, 3),
    "vocab_size": (3, -1, "x", None),
    "num_hidden_layers": (0, -2, 99, 1.5, 10**6),
    "hidden_size": (0, 7, "64", 10**9),
    "num_attention_heads": (0, 3, None),
    "num_key_value_heads": (0, 3),
    "rms_norm_eps": (float("nan"), -1.0, "x", 1e9),
    "eos_token_id": (-1, 10**6, "x"),
}


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "lacks a row": lambda tensor: tensor[:-1].contiguous(),
    "is int8": lambda tensor: tensor.to(torch.int8),
    "holds NaN": lambda tensor: tensor * torch.nan,
    "has one more axis": lambda tensor: tensor.unsqueeze(0),
}
"""Changes of one tensor of the base."""
STUDY = "output: {out}\narms: {{a: {{}}, b: {{}}}}\nseeds: [1, 2]\n"
STUDIES = (
    STUDY.replace("b:", "a:"),
    STUDY.replace("1, 2", "x"),
    STUDY.replace("1, 2", "-1"),
    STUDY.replace("{out}", "$name"),
    STUDY + "gpu_memory: .nan\n",
    STUDY + "jobs: 1.5\n",
    STUDY + "attempts: yes\n",
)
COMMANDS = (
    "quantize --model {base} --output {folder}/file",
    "quantize --model {base} --output {folder}/out --samples 0",
    "quantize --model {base} --output {folder}/out --length -1",
    "report {folder} --json {folder}",
    "report {folder} --json /dev/null",
    "report {folder} --html {folder}/pipe",
    "report {folder} --follow --port 99999999",
    "report {folder} --completions -1",
    "report {letters}",
    "score --reward math --input {folder}/rows --output {folder}",
    "score --reward math --input {folder}/rows --output /dev/null",
    "score --reward math --input {folder}/rows --output {folder}/pipe",
    "score --reward math --input {letters} --output {folder}/scored",
    "study {folder}/study.yaml --minutes nan",
    "study {letters}",
    "tiny --output {folder}/tiny --seed -1",
    "tiny --output {folder}/file",
    "problems --output {folder}/problems --train -1",
    "problems --output {folder}/file",
    "chat {folder}/run --temperature nan",
    "chat {folder}/run --max-tokens 0",
    "export --run {folder}/run --output {folder}/file",
    "plan -c gsm8k --gpu-memory nan",
    "plan -c gsm8k --json {folder}",
    "plan -c {letters}",
    "fit -c {letters}",
)


def draw_command(drawn: random.Random, base: Path, folder: Path) -> tuple[str, list[str]]:
    """Name and arguments of a faulty call of one of the other commands, or of a faulty study."""
    (folder / "run").mkdir()
    for name in ("file", "run/config.yaml"):
        (folder / name).write_text("{}\n")
    (folder / "rows").write_text('{"completion": "1", "answer": "1"}\n')
    (folder / "study.yaml").write_text(STUDY.format(out=folder / "out"))
    os.mkfifo(folder / "pipe")
    if drawn.random() < 0.25:
        text = drawn.choice(STUDIES).format(out=folder / "out")
        (folder / "study.yaml").write_text(text)
        return f"study {text!r}", ["study", str(folder / "study.yaml"), "--dry-run"]
    words = drawn.choice(COMMANDS)
    places = {"base": base, "folder": folder, "letters": "a" * 5000}
    return words, [word.format(**places) for word in words.split()]


def draw(seed: int, base: Path, folder: Path) -> tuple[str, list[str]]:
    """Name and arguments of one case; its files are written to ``folder``."""
    drawn = random.Random(seed)
    arguments = ["fit", "-c", str(TOY), "--run_dir", str(folder / "run"), "--model.base", str(base)]
    kind = drawn.choice(("setting", "yaml", "file", "config", "tensor", "command", "other command", "other command"))
    if kind == "other command":
        return draw_command(drawn, base, folder)
    if kind == "setting":
        name, value = drawn.choice(SETTINGS), drawn.choice(WRONG)
        if (name, value) in HARMLESS:
            value = "abc"
        return f"{name}={value}", [*arguments, f"--{name}={value}"]
    if kind == "yaml":
        text = drawn.choice(YAML)
        (folder / "more.yaml").write_text(text)
        return f"yaml {text!r}", [arguments[0], "-c", str(TOY), "-c", str(folder / "more.yaml"), *arguments[5:]]
    if kind == "command":
        words = drawn.choice((["--nothing", "3"], ["-c", "/nowhere.yaml"], ["--model.base", "/nowhere"], ["--model"]))
        return f"command {' '.join(words)}", [*arguments, *words]
    own = folder / "base"
    shutil.copytree(base, own)
    arguments[-1] = str(own)
    if kind == "file":
        name, content = drawn.choice(FILES), drawn.choice(CONTENT)
        if name == "generation_config.json":
            content = b"{"
        (own / name).write_bytes(content)
        return f"{name} is {content!r}", arguments
    if kind == "tensor":
        file, how = own / "model.safetensors", drawn.choice(sorted(TENSORS))
        tensors = load_file(file)
        name = drawn.choice(sorted(tensors))
        save_file({**tensors, name: TENSORS[how](tensors[name])}, file, metadata={"format": "pt"})
        quantize = ["quantize", "--model", str(own), "--output", str(folder / "out")]
        return f"{name} {how}", drawn.choice((arguments, quantize))
    name = drawn.choice(sorted(CONFIG))
    value = drawn.choice(CONFIG[name])
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, name: value}))
    return f"config.json {name}={value!r}", arguments


def outcome(run: Callable[[], int | str]) -> tuple[str, str]:
    """What became of a run: one of the words above, and what was said."""

    def too_long(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    said, before = io.StringIO(), signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = run()
    except SystemExit as stop:  # the parser's: it has said what is wrong
        status = said.getvalue() if stop.code == 2 else str(stop.code)
    except TimeoutError:
        return "timeout", ""
    except BaseException as error:
        return "raw", f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if status == 0:
        return "ran", ""
    text = said.getvalue() if isinstance(status, int) else status
    return ("raw" if "Traceback" in text else "long" if text.count("\n") > MOST_LINES else "refused"), text


def try_cases(seeds: range, base: Path, folder: Path) -> list[dict[str, object]]:
    """A record a case."""
    found = []
    for seed in seeds:
        own = folder / str(seed)
        own.mkdir()
        name, arguments = draw(seed, base, own)
        run = train.exit_status if arguments[0] == "fit" and len(arguments) > 3 else main_of_commands
        word, said = outcome(lambda run=run, arguments=arguments: run(arguments))
        if word == "refused" and (own / "run" / "completions").exists():
            word = "late"
        found.append({"seed": seed, "case": name, "outcome": word, "said": said[:400]})
        shutil.rmtree(own)
    return found


def main() -> int:
    """Print a line a case, and how many there were of each outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder / "dense", seed=0, sft_steps=0)
        counts: Counter[object] = Counter()
        for seed in range(options.seed, options.seed + options.number):
            record = try_cases(range(seed, seed + 1), folder / "dense", folder)[0]
            counts[record["outcome"]] += 1
            print(json.dumps(record), flush=True)
    print(json.dumps(counts))
    return int(set(counts) != {"refused"})


if __name__ == "__main__":
    sys.exit(main())
