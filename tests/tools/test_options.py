"""Commands print their help, and errors about options and paths, before they import anything slow, such as torch."""

import subprocess
import sys

from qerl_pl.__main__ import COMMANDS
from qerl_pl.tools.options import PARSERS

WRONG_PATHS = {
    "quantize --model nowhere --output out": "there is no folder nowhere",
    "study nowhere.yaml": "there is no file nowhere.yaml",
    "export --run nowhere --output out": "there is no folder nowhere",
    "export --run empty --output out": "empty is no run folder: it has no config.yaml",
    "report empty nowhere": "there is no folder nowhere",
    "chat empty": "empty is no run folder: it has no config.yaml",
    "plan -c gsm8k --json empty": "'empty' is a folder",
    "report empty --json /dev/null": "'/dev/null' is no regular file",
    "chat run --temperature nan": "--temperature: it is nan; expected 0 or more",
    "tiny --output out --seed -1": "--seed: it is -1; expected 0 or more",
    "tiny --output out --seed x": "--seed: invalid whole number value: 'x'",
    "study file --minutes nan": "--minutes: it is nan; expected more than 0",
    "plan -c gsm8k --gpu-memory inf": "--gpu-memory: it is inf; expected more than 0",
}
PROGRAM = """
import sys
from qerl_pl.__main__ import main
for line in {lines}:
    try:
        main(line.split())
        raise AssertionError(line)
    except SystemExit as stop:
        assert stop.code == (0 if line.endswith("--help") else 2), (line, stop.code)
slow = {{"torch", "transformers", "lightning", "datasets", "vllm", "matplotlib"}} & sys.modules.keys()
assert not slow, slow
"""


def test_they_are_answered_without_slow_imports(tmp_path):
    assert PARSERS.keys() <= COMMANDS.keys()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    commands = (*PARSERS, "doctor")
    lines = [f"{command} {option}" for command in commands for option in ("--help", "--no-such-option")]
    program = PROGRAM.format(lines=[*lines, *WRONG_PATHS])
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(commands)
    errors = [line for line in done.stderr.splitlines() if not line.endswith(": loading packages ...")]
    assert all(line.startswith("error: ") and line.endswith("--help` lists the options") for line in errors)
    for error, expected in zip(errors, [*commands, *WRONG_PATHS.values()], strict=True):
        assert expected in error
