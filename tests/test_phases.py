"""The program prints what it is doing: before slow imports, and every few seconds while one thing takes long."""

import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from qerl_pl.__main__ import COMMANDS, TRAINING
from qerl_pl.common import phases
from qerl_pl.common.phases import phase
from qerl_pl.rollout.vllm.sampling_bar import sampling_bar
from qerl_pl.tools.options import PARSERS

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "FIRST_S", 0.05)
    monkeypatch.setattr(phases, "LINE_S", 0.05)
    for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def wait_until(said, capsys: pytest.CaptureFixture[str]) -> str:
    """Read stderr until the function ``said`` returns True for all that was printed; returns this text. Fails after 20
    seconds."""
    text, end = "", time.monotonic() + 20
    while not said(text):
        assert time.monotonic() < end, text
        time.sleep(0.01)
        text += capsys.readouterr().err
    return text


def test_a_phase_that_lasts_has_lines_until_it_ends(capsys):
    with phase("starting the engine"):
        wait_until(lambda text: text.count("starting the engine ...\n") >= 3, capsys)
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr() == ("", "")


def test_a_short_phase_prints_nothing_and_one_that_is_named_at_once_a_line(capsys, monkeypatch):
    monkeypatch.setattr(phases, "FIRST_S", 60.0)
    monkeypatch.setattr(phases, "LINE_S", 60.0)
    with phase("reading"):
        pass
    assert capsys.readouterr().err == ""
    with phase("loading packages", at_once=True):
        assert capsys.readouterr().err == "loading packages ...\n"


def test_a_phase_with_lines_a_minute_apart_has_more_of_them_within_another_phase(capsys, monkeypatch):
    with phase("sampling", total=3, unit="completions", seldom=True):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
    with phase("validation"), phase("sampling", total=3, unit="completions", seldom=True) as inner:
        inner.update(2)
        wait_until(lambda text: text.count("sampling: 2 of 3 completions") >= 2, capsys)
    monkeypatch.setattr(phases, "SELDOM_S", 0.05)
    with phase("sampling", total=3, unit="completions", seldom=True):
        wait_until(lambda text: text.count("sampling: 0 of 3 completions") >= 2, capsys)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("first_s", [0.0, 60.0])
def test_on_a_terminal_finished_completions_have_a_bar_which_short_calls_do_not_show(first_s, capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(phases, "FIRST_S", first_s)
    with sampling_bar(3) as use_tqdm:
        prompts = [[1], [2], [3]]
        assert use_tqdm(prompts, desc="Rendering prompts") is prompts
        bar = use_tqdm(total=3, desc="Processed prompts", dynamic_ncols=True, postfix="0 toks/s")  # as vLLM calls it
        for _ in range(2):
            time.sleep(0.15)  # longer than tqdm's pause between two updates of a bar
            bar.postfix = f"{10 / bar.format_dict['elapsed']} toks/s"
            bar.update(1)
        bar.update(1)
        if bar.n == 3:
            bar.refresh()
        bar.close()
    assert ("sampling 2/3" in terminal.getvalue()) == (first_s == 0)
    assert not terminal.getvalue() or first_s == 0
    assert capsys.readouterr().err == ""


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with phase("loading", at_once=True):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


SLOW = {"torch", "lightning", "transformers", "peft", "vllm", "scipy", "pandas", "datasets", "bitsandbytes"}
"""Packages whose import takes a second or more."""


@pytest.mark.parametrize(
    "arguments",
    [
        *([command, "--help"] for command in (*TRAINING, *COMMANDS) if command not in PARSERS),  # see test_options.py
        ["plan", "-c", "quickstart"],
        ["doctor", "-c", "quickstart"],
        ["fit", "--no_such"],
        ["fit", "-c", "no_such"],
        ["quantize", "--model", ".", "--output", "new"],
    ],
    ids=" ".join,
)
def test_the_first_line_comes_before_slow_imports(arguments):
    program = [sys.executable, "-X", "importtime", "-m", "qerl_pl", *arguments]  # each import is a line of stderr
    with subprocess.Popen(program, cwd=ROOT, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        imported, line = [], ""
        for line in process.stdout:
            if not line.startswith("import time:"):
                break
            imported.append(line.rpartition("|")[2].strip())
        process.kill()
    assert line.strip()
    assert not line.startswith("import time:")
    assert not SLOW & {*imported}


ROW = {"completion": "so \\boxed{18}", "answer": "18", "level": 2}
REWARD = "def right(completions, level, **kwargs):\n    return [float('18' in text) for text in completions]\n"


@pytest.mark.parametrize(
    "arguments",
    [
        "score --input rows.jsonl --output scores.jsonl --reward gsm8k",
        "score --input rows.jsonl --output scores.jsonl --reward math",
        "score --input rows.jsonl --output scores.jsonl --reward rewards_of_this_folder.right",
        "score --help",
        "report runs/one --html page.html",
        "init new",
    ],
)
def test_a_command_that_needs_no_model_imports_none_of_the_slow_packages(arguments, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "rewards_of_this_folder.py").write_text(REWARD)
    with SummaryWriter(str(tmp_path / "runs" / "one")) as writer:
        for step in range(3):
            writer.add_scalar("reward/mean", step / 2, step)
    program = [sys.executable, "-X", "importtime", "-m", "qerl_pl", *arguments.split()]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 0, done.stdout
    assert "argparse" in imported
    assert not SLOW & imported


FREEZES = """
import gc
from qerl_pl.common.program import kept_for_good
made = []
with kept_for_good():
    made.append([made])
    assert not gc.isenabled()
assert gc.isenabled() and all(each is not made for each in gc.get_objects())
try:
    with kept_for_good():
        raise ValueError
except ValueError:
    assert gc.isenabled()
"""


def test_what_imports_make_is_left_out_of_garbage_collections_which_go_on_afterwards():
    subprocess.run([sys.executable, "-c", FREEZES], cwd=ROOT, check=True)
