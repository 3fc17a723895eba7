"""Commands whose output cannot be written, or whose standard streams are closed."""

import os
import subprocess
import sys

import pytest

VARIABLES = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def unread():
    """Open a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("words", [["init", "new"], ["init", "--help"], ["--help"]])
@pytest.mark.parametrize(
    ("where", "why"),
    [(lambda: os.open("/dev/full", os.O_WRONLY), "the disk is full"), (unread, "the program that reads it has ended")],
)
def test_output_that_cannot_be_written_is_an_error_of_one_line(tmp_path, words, where, why):
    output, command = where(), [sys.executable, "-m", "qerl_pl", *words]
    ended = subprocess.run(
        command, stdout=output, stderr=subprocess.PIPE, env=VARIABLES, cwd=tmp_path, text=True, check=False
    )
    os.close(output)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert why in ended.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_with_closed_streams_does_its_work_and_no_file_gets_their_numbers(tmp_path, closed):
    code = "import os; from qerl_pl.__main__ import main; main(); assert open('more', 'w').fileno() > 2; "
    code += "assert all(map(os.get_inheritable, range(3)))"
    command = f"'{sys.executable}' -c \"{code}\" init new {closed}"
    assert subprocess.run(command, shell=True, cwd=tmp_path, check=False).returncode == 0
    assert len(list((tmp_path / "new").iterdir())) == 3
