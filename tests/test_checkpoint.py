"""A checkpoint is written whole or not at all, also while training goes on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from qerl_pl.checkpoint import SafeCheckpointIO

IN_BACKGROUND = {"background_bytes": 0}


def checkpoint() -> dict[str, Any]:
    return {"step": 3, "state": {"weight": torch.arange(6.0), "moments": [torch.ones(2, 3), torch.tensor(2)]}}


@pytest.fixture
def io():
    io = SafeCheckpointIO()
    yield io
    io.teardown()


@pytest.mark.parametrize("options", [None, {}, {"background_bytes": 57}, {"background_bytes": 56}, IN_BACKGROUND])
def test_what_is_loaded_is_what_was_there_when_it_was_saved(io, tmp_path, options):
    saved = checkpoint()
    io.save_checkpoint(saved, tmp_path / "folder" / "a.ckpt", options)
    saved["state"]["weight"].zero_()  # the next step
    saved["state"]["moments"].clear()
    io.wait()
    found, expected = io.load_checkpoint(tmp_path / "folder" / "a.ckpt"), checkpoint()
    assert found["step"] == 3
    assert torch.equal(found["state"]["weight"], expected["state"]["weight"])
    assert all(torch.equal(a, b) for a, b in zip(found["state"]["moments"], expected["state"]["moments"], strict=True))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize(("background_bytes", "waits"), [(56, False), (57, True)])  # the tensors have 24 + 24 + 8
def test_it_returns_before_the_file_is_there_from_so_many_bytes_on(io, tmp_path, monkeypatch, background_bytes, waits):
    free, save = threading.Event(), torch.save

    def slow(*args):
        assert waits or free.wait(20)
        save(*args)

    monkeypatch.setattr(torch, "save", slow)
    io.save_checkpoint(checkpoint(), tmp_path / "a.ckpt", {"background_bytes": background_bytes})
    assert io.is_written() == waits == (tmp_path / "a.ckpt").exists()
    free.set()
    io.wait()
    assert io.is_written()
    assert (tmp_path / "a.ckpt").exists()


@pytest.mark.parametrize("then", ["wait", "teardown", "save"])
def test_what_could_not_be_written_in_the_background_is_told_once(io, tmp_path, monkeypatch, then):
    io.save_checkpoint(checkpoint(), tmp_path / "a.ckpt")
    before = (tmp_path / "a.ckpt").read_bytes()

    def full(checkpoint, path):
        path.write_bytes(b"half")
        raise RuntimeError("unexpected pos 64 vs 0")  # what torch makes of a full disk

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        io.save_checkpoint({"step": 4}, tmp_path / "a.ckpt", IN_BACKGROUND)
        while not io.is_written():
            time.sleep(0.001)
    more = {"wait": io.wait, "teardown": io.teardown, "save": lambda: io.save_checkpoint({}, tmp_path / "b.ckpt")}
    with pytest.raises(OSError, match=r"could not write the checkpoint .*a\.ckpt"):
        more[then]()
    io.wait()
    assert (tmp_path / "a.ckpt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
