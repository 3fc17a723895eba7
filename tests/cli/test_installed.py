"""Tests of the installed wheel, run in an empty folder: all commands, the configurations that it contains, by name, and
the plug-in for vLLM."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import yaml

from qerl_pl.__main__ import COMMANDS, TRAINING

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from those files of the repository that a Docker build would see, and install it, both without
    network. Returns the folder in which it is installed."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ignored = (ROOT / ".dockerignore").read_text().split()
    seen = tuple(name.removeprefix("!") for name in ignored if name.startswith("!"))
    for name in files.split("\0"):
        if name.startswith(seen) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    alone = ["--no-deps", "--no-index"]
    subprocess.run([*PIP, "wheel", *alone, "--no-build-isolation", "-w", str(wheels), str(source)], check=True)
    [wheel] = wheels.glob("qerl_pl-*.whl")
    subprocess.run([*PIP, "install", *alone, "--target", str(target), str(wheel)], check=True)
    return target


@pytest.fixture
def qerl(installed, tmp_path):
    """Return a function that runs the console script in an empty folder: ``qerl("plan", ...)``."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, str(installed / "bin" / "qerl"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_the_wheel_has_all_that_a_run_needs(installed):
    for pattern in ("qerl_pl/**/*", "callbacks/**/*", "datamodules/**/*", "configs/**/*.yaml"):
        paths = {path.relative_to(ROOT) for path in ROOT.glob(pattern) if path.is_file() and path.suffix != ".pyc"}
        assert paths
        assert [str(path) for path in paths if not (installed / path).exists()] == []
    assert not (installed / "tests").exists()
    [info] = installed.glob("qerl_pl-*.dist-info")
    entries = {(entry.group, entry.name): entry.value for entry in PathDistribution(info).entry_points}
    assert entries["vllm.general_plugins", "qerl_pl"] == "qerl_pl.rollout.vllm.plugin:register"
    assert entries["console_scripts", "qerl"] == "qerl_pl.__main__:main"


def both_in_one_process(installed: Path, folder: Path, *commands: list[str]) -> list[str]:
    """Run several command lines of the installed command ``qerl`` in one process, because its imports take ten seconds.
    Returns what each command line printed."""
    script = f"""
import sys
from qerl_pl.__main__ import main
for arguments in {list(commands)!r}:
    sys.argv = ["qerl", *arguments]
    try:
        assert not main(), arguments
    except SystemExit as stop:
        assert not stop.code, stop.code
    print("NEXT", flush=True)
"""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("NEXT\n")[:-1]


def test_names_of_configurations_are_those_of_the_wheel_and_own_code_is_that_of_the_folder(installed, qerl, tmp_path):
    names = ["-c", "gsm8k", "-c", "qwen2.5-7b", "-c", "nvfp4_aqn"]
    code = f"from qerl_pl.cli.yaml_files import with_paths; print(*with_paths({names}), sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.check_output([sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, text=True)
    files = ("tasks/gsm8k", "models/qwen2.5-7b", "arms/nvfp4_aqn")
    assert said.split()[1::2] == [str(installed / "configs" / f"{file}.yaml") for file in files]

    (tmp_path / "mine.py").write_text("def reward(prompts, completions):\n    return [0.25 for _ in prompts]\n")
    (tmp_path / "rows").write_text('{"completion": "1", "answer": "1"}\n')
    done = qerl("score", "--reward", "mine.reward", "--input", "rows", "--output", "scored")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "scored").read_text())["score"] == 0.25


@pytest.mark.long
def test_a_plan_and_a_training_have_shipped_configurations_and_own_code(installed, tmp_path):
    (tmp_path / "mine.py").write_text("def reward(prompts, completions):\n    return [0.0 for _ in prompts]\n")
    reward = "--model.rewards=[{name: mine, reward: mine.reward}]"
    recipe = ["-c", "gsm8k", "-c", "qwen2.5-7b"]
    fit = ["fit", "--print_config", *recipe, "-c", "nvfp4_aqn", reward]
    plan = ["plan", *recipe, "-c", "bf16", "--gpu-memory", "24", "--model.base", "models/qwen2.5-7b"]
    base = tmp_path / "models" / "qwen2.5-7b"
    base.mkdir(parents=True)
    (base / "config.json").write_text(
        '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 1000, "hidden_size": 64, '
        '"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}'
    )
    planned, printed = both_in_one_process(installed, tmp_path, plan, fit)
    assert "fits: the peak is" in planned, "a config.json is enough"
    config = yaml.safe_load(printed)
    assert config["run_dir"] == "runs/gsm8k_qwen2.5-7b_nvfp4_aqn"
    assert config["model"]["quantize"] == "nvfp4"
    assert config["model"]["rewards"][0]["reward"] == "mine.reward"
    assert (installed / "configs" / "base.yaml").exists()


def test_help_lists_every_command(qerl):
    done = qerl("--help")
    assert done.returncode == 0, done.stderr
    assert set(COMMANDS | TRAINING) <= set(done.stdout.split())
