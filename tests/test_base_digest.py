"""The digest of a base changes with any byte of its weights."""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qerl_pl.base.digest import KEPT, base_digest


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for part in (1, 2):
        save_file({"weight": torch.arange(50_000.0) + part}, folder / f"part-{part}.safetensors")
    return folder


def test_any_byte_counts(base):
    before, path = base_digest(base), base / "part-2.safetensors"
    draw = random.Random(0)
    for _ in range(5):
        written = bytearray(path.read_bytes())
        written[draw.randrange(len(written))] ^= 1
        path.write_bytes(written)
        assert base_digest(base) != before
        before = base_digest(base)


def test_a_copy_is_the_same_base_and_another_config_is_not(base, tmp_path):
    copy = shutil.copytree(base, tmp_path / "copy")
    assert base_digest(copy) == base_digest(base)
    (copy / "config.json").write_text('{"rope_theta": 1}')
    assert base_digest(copy) != base_digest(base)


def test_files_that_swap_their_names_are_another_base(base):
    before = base_digest(base)
    for old, new in (("part-1.safetensors", "x"), ("part-2.safetensors", "part-1.safetensors")):
        (base / old).rename(base / new)
    (base / "x").rename(base / "part-2.safetensors")
    assert base_digest(base) != before


def test_what_was_read_is_not_read_again(base):
    digest, kept = base_digest(base), json.loads((base / KEPT).read_text())
    kept["part-1.safetensors"][1] = "0" * 64  # stands for having been read
    (base / KEPT).write_text(json.dumps(kept))
    assert base_digest(base) != digest
    time.sleep(0.01)
    os.utime(base / "part-1.safetensors")
    assert base_digest(base) == digest


@pytest.mark.parametrize("text", ["", "[]", '{"part-1.safetensors": 3}', "\0"])
def test_what_was_kept_may_be_damaged(base, text):
    digest = base_digest(base)
    (base / KEPT).write_text(text)
    assert base_digest(base) == digest


def test_a_folder_that_cannot_be_written_is_read_all_the_same(base):
    digest = base_digest(base)
    (base / KEPT).unlink()
    (base / KEPT).mkdir()  # whoever runs this, no file can take a folder's place
    assert base_digest(base) == digest
