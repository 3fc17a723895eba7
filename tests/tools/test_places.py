"""Commands refuse, by name, paths to a file where a folder is expected and the reverse, before they read or compute
anything."""

import os
import re
import resource
import subprocess
import sys
from argparse import ArgumentTypeError
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from safetensors.torch import save_file

from datamodules.rows import Row
from qerl_pl.base.folder import base_folder
from qerl_pl.common.files import in_words
from qerl_pl.common.run_folder import check_places, run_files, run_folder
from qerl_pl.model.files import Checkpoint
from qerl_pl.tools.options import output_folder
from tests.support import drop_privileges


@pytest.mark.parametrize("place", ["base", "base/tokenizer.json", "base/config.json"])
def test_a_named_pipe_for_the_base_or_a_file_of_it_is_refused_and_not_read(tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / place)
    with pytest.raises(ValueError, match=f"{place} is no regular file"):
        base_folder(str(tmp_path / "base"), None)


def test_links_to_files_and_names_of_the_hub_are_taken(tmp_path):
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").symlink_to(tmp_path / "blob")
    assert base_folder(str(tmp_path / "base"), None) == str(tmp_path / "base")
    assert base_folder("Qwen/Qwen3-8B", None) == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("name", ["checkpoints", "completions"])
def test_a_file_where_the_run_needs_a_folder_is_refused(tmp_path, name):
    check_places(tmp_path / "new")
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=f"{name} is no folder"):
        check_places(tmp_path)


def test_a_full_disk_is_named_before_anything_is_loaded(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # a write beyond it fails, as on a full disk
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            check_places(tmp_path / "new" / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert in_words(raised.value).startswith(f"{tmp_path}/new/run: a file may not become this large here")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["checkpoints", "completions"])
def test_a_folder_that_a_run_cannot_write_to_is_refused_for_training_alone(tmp_path, name):
    (tmp_path / name).mkdir(mode=0o555)
    with ProcessPoolExecutor(1, get_context("fork"), drop_privileges) as user:
        user.submit(check_places, tmp_path, trains=False).result()
        with pytest.raises(ValueError, match=f"{name} cannot be written to"):
            user.submit(check_places, tmp_path).result()


def test_weights_that_this_user_may_not_read_are_not_said_to_be_missing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").chmod(0)
    with ProcessPoolExecutor(1, get_context("fork"), drop_privileges) as user, pytest.raises(PermissionError):
        user.submit(Checkpoint, tmp_path).result()


def test_a_run_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"run_dir is .*/run, in .*/file, which is no folder; choose another"):
        check_places(tmp_path / "file" / "run")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("gone", path)])
@pytest.mark.parametrize("name", ["config.yaml", ".lock", "checkpoints/last.ckpt", "checkpoints/best.ckpt"])
def test_something_else_where_the_run_needs_a_file_is_refused(tmp_path, name, make):
    (tmp_path / "checkpoints").mkdir()
    make(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is no regular file"):
        check_places(tmp_path)


def test_a_pipe_is_no_checkpoint_of_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="there is no checkpoint"):
        run_files(tmp_path, str(tmp_path / "pipe"))


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "a\udcff", "", "  "])
def test_a_name_that_no_folder_should_have_is_refused(name):
    with pytest.raises(ArgumentTypeError, match="run_dir is"):
        run_folder(name)


def test_an_output_folder_is_given_and_no_file_is_above_it(tmp_path):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    assert output_folder(str(tmp_path / "new" / "er")) == tmp_path / "new" / "er"
    assert output_folder(".") == Path()
    for wrong in ("", "  ", str(tmp_path / "file"), str(tmp_path / "file" / "x"), str(tmp_path / "pipe"), "/dev/null"):
        with pytest.raises(ArgumentTypeError, match="expected a folder"):
            output_folder(wrong)


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("plan", "TQDM_MININTERVAL"),
        pytest.param("plan", "RANK", marks=pytest.mark.long),  # which is read after imports that take seconds
        ("doctor", "TQDM_MININTERVAL"),
    ],
)
def test_a_variable_of_the_environment_that_a_package_cannot_read_is_named(command, variable):
    words = [sys.executable, "-m", "qerl_pl", command, "-c", "quickstart"]
    done = subprocess.run(words, env={**os.environ, variable: "abc"}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(f"^error: a package cannot be loaded: .*'abc' .environment: {variable}=abc.$", done.stderr, re.M)
    assert "Traceback" not in done.stderr


def test_a_question_that_shows_nothing_is_empty():
    with pytest.raises(ValueError, match="column 'question' is empty"):
        Row("rows:1", {"question": "\u200b \ufeff\n"}).text("question")
