"""A checkpoint is written completely or not at all, and has the values of its step even if training goes on while it is
written."""

import math
import os
import random
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_pl.checkpoint import SafeCheckpointIO, adapter_of, check_training_state, identity_of

IN_BACKGROUND = {"background_bytes": 0}
PARTS: dict[str, Any] = {"state_dict": {}, "optimizer_states": [], "global_step": 3}


def checkpoint() -> dict[str, Any]:
    return {**PARTS, "state": {"weight": torch.arange(6.0), "moments": [torch.ones(2, 3), torch.tensor(2)]}}


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
    result, expected = io.load_checkpoint(tmp_path / "folder" / "a.ckpt"), checkpoint()
    assert result["global_step"] == 3
    assert torch.equal(result["state"]["weight"], expected["state"]["weight"])
    assert all(torch.equal(a, b) for a, b in zip(result["state"]["moments"], expected["state"]["moments"], strict=True))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["a.ckpt"]


def large() -> dict[str, Any]:
    return {**PARTS, "weight": torch.arange(10000.0)}


@pytest.mark.parametrize("size", [0, 1, 3000, 10000, 30000, 40000])
def test_a_file_that_was_cut_anywhere_is_damaged(io, tmp_path, size):
    path = tmp_path / "last.ckpt"
    io.save_checkpoint(large(), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged"):
        io.load_checkpoint(path)
    io.save_checkpoint(large(), tmp_path / "previous.ckpt")
    with pytest.warns(UserWarning, match="damaged"):
        assert torch.equal(io.load_checkpoint(path)["weight"], large()["weight"])
    assert io.damaged == path


def test_one_flipped_bit_anywhere_is_seen(io, tmp_path):
    path = tmp_path / "a.ckpt"
    io.save_checkpoint({**PARTS, "weight": torch.arange(8.0)}, path)
    written = path.read_bytes()
    for place in random.Random(0).sample(range(len(written) * 8), 300):
        changed = bytearray(written)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"a\.ckpt is damaged"):
            io.load_checkpoint(path)


def test_where_both_are_damaged_both_are_named(io, tmp_path):
    for name in ("last.ckpt", "previous.ckpt"):
        (tmp_path / name).write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged(.|\n)*previous\.ckpt is damaged"):
        io.load_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PARTS | {"global_step": -1}, "global_step is -1"),
        (PARTS | {"global_step": 2**60}, "global_step is 1152921504606846976"),
        (PARTS | {"state_dict": None}, "state_dict is a NoneType; expected a dict"),
        (PARTS | {"state_dict": {"a": torch.tensor([0.0, math.nan])}}, "state_dict holds numbers that are not finite"),
        (PARTS | {"optimizer_states": [{"a": torch.tensor(math.inf)}]}, "optimizer_states holds numbers that are not"),
        *(({key: PARTS[key] for key in PARTS if key != name}, f"{name} is missing; expected") for name in PARTS),
        *((other, "expected a checkpoint's dict") for other in ([1, 2], torch.ones(3), "text")),
    ],
)
def test_what_no_run_can_go_on_from_is_refused(io, tmp_path, content, message):
    io.save_checkpoint(content, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=message):
        io.load_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("content", [{}, {"identity": None}, {"identity": {"seed": 1}}])
def test_a_checkpoint_of_another_program_is_of_no_base(content):
    with pytest.raises(ValueError, match="was not written by a run of this program"):
        identity_of(content)


def test_a_file_that_is_not_there_is_not_damaged(io, tmp_path):
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "a.ckpt")


@pytest.fixture
def free(monkeypatch):
    """Event before which nothing is written in the background."""
    event, save = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *args: event.wait(20) and save(*args))
    return event


@pytest.mark.parametrize(("background_bytes", "waits"), [(56, False), (57, True)])  # the tensors have 24 + 24 + 8
def test_it_returns_before_the_file_is_there_from_so_many_bytes_on(io, tmp_path, free, background_bytes, waits):
    if waits:
        free.set()
    io.save_checkpoint(checkpoint(), tmp_path / "a.ckpt", {"background_bytes": background_bytes})
    assert io.is_written() == waits == (tmp_path / "a.ckpt").exists()
    free.set()
    io.wait()
    assert io.is_written()
    assert (tmp_path / "a.ckpt").exists()


def test_ctrl_c_ends_the_waiting_and_not_the_writing(io, tmp_path, free):
    io.save_checkpoint(checkpoint(), tmp_path / "a.ckpt", IN_BACKGROUND)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            io.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not io.is_written()
    free.set()
    io.wait()
    assert (tmp_path / "a.ckpt").exists()


def kept_open() -> int:
    """Count the deleted checkpoints that this process still has open, so that their disk space is not free yet."""
    links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(link.endswith(".ckpt (deleted)") for link in links)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's list of open files")
def test_a_file_that_is_replaced_is_freed_in_the_background(io, tmp_path, free):
    io.save_checkpoint(checkpoint(), tmp_path / "other.ckpt", IN_BACKGROUND)
    for name in ("new", "target"):
        (tmp_path / f"{name}.ckpt").write_text(name)
    io.replace(tmp_path / "new.ckpt", tmp_path / "target.ckpt")
    assert (tmp_path / "target.ckpt").read_text() == "new"
    assert not (tmp_path / "new.ckpt").exists()
    assert kept_open() == 1
    free.set()
    io.teardown()
    assert kept_open() == 0
    io.replace(tmp_path / "target.ckpt", tmp_path / "free name")
    assert (tmp_path / "free name").read_text() == "new"
    with pytest.raises(FileNotFoundError):
        io.replace(tmp_path / "new.ckpt", tmp_path / "free name")
    assert (tmp_path / "free name").read_text() == "new"


@pytest.fixture
def pinned():
    """List to which the fixture ``copies`` adds an entry for each checkpoint that is written: for each of its tensors,
    whether the tensor was in pinned memory."""
    return []


@pytest.fixture
def copies(monkeypatch, pinned):
    """List with an entry for each checkpoint that was written: weak references to the copies of tensors from which it
    was written."""
    written, save = [], torch.save

    def note(checkpoint, path):
        tensors = (checkpoint["state"]["weight"], *checkpoint["state"]["moments"])
        written.append([weakref.ref(tensor) for tensor in tensors])
        pinned.append([torch.cuda.is_available() and tensor.is_pinned() for tensor in tensors])
        save(checkpoint, path)

    monkeypatch.setattr(torch, "save", note)
    return written


def test_copies_of_the_same_structure_share_their_memory_and_files_do_not(io, tmp_path, copies):
    weight, other = torch.arange(6.0), torch.arange(6.0, requires_grad=True) * 2
    for name, tensor in {"a": weight, "b": other}.items():
        io.save_checkpoint(
            {**PARTS, "state": {"weight": tensor, "moments": [tensor + 1]}}, tmp_path / name, IN_BACKGROUND
        )
        io.wait()
    assert copies[0] == copies[1]
    for name, tensor in {"a": weight, "b": other}.items():
        state = io.load_checkpoint(tmp_path / name)["state"]
        assert torch.equal(state["weight"], tensor)
        assert torch.equal(state["moments"][0], tensor + 1)
        assert not state["weight"].requires_grad
    io.teardown()
    assert [ref() for ref in copies[0]] == [None, None]


@pytest.mark.parametrize(
    ("moments", "is_reused"),
    [
        ([torch.ones(3, 2), torch.tensor(7)], False),  # another shape
        ([torch.ones(2, 3).bool(), torch.tensor(7)], False),  # another dtype
        ([torch.ones(3, 2).t(), torch.tensor(7)], True),  # other strides only
        ([torch.ones(2, 3)], False),
        ([torch.ones(2, 3), torch.tensor(7), torch.ones(4, 0)], False),
    ],
)
def test_another_structure_gets_new_memory(io, tmp_path, copies, moments, is_reused):
    io.save_checkpoint(checkpoint(), tmp_path / "a", IN_BACKGROUND)
    io.wait()
    state = {"weight": torch.zeros(6), "moments": moments}
    io.save_checkpoint({**PARTS, "state": state}, tmp_path / "b", IN_BACKGROUND)
    io.wait()
    assert all(ref() is not None for ref in copies[1])
    assert [ref() is not None for ref in copies[0]] == [is_reused] * len(copies[0])
    loaded = io.load_checkpoint(tmp_path / "b")["state"]
    for tensor, expected in zip([loaded["weight"], *loaded["moments"]], [state["weight"], *moments], strict=True):
        assert torch.equal(tensor, expected)
        assert tensor.dtype == expected.dtype


@pytest.mark.parametrize("block", [64, 256, 2**20])
def test_a_file_holds_no_other_bytes_than_its_tensors(io, tmp_path, monkeypatch, block):
    monkeypatch.setattr("qerl_pl.checkpoint.BLOCK", block)
    drawn = torch.Generator().manual_seed(0)
    sizes = (7, 64, 1, 200, 0, 33)
    tensors = [torch.randn(size, generator=drawn).to(dtype) for size in sizes for dtype in (torch.bfloat16, torch.int8)]
    for path, options in (("at once", None), ("in the background", IN_BACKGROUND)):
        io.save_checkpoint({**PARTS, "state": tensors}, tmp_path / path, options)
        io.wait()
        loaded = io.load_checkpoint(tmp_path / path)["state"]
        assert all(map(torch.equal, loaded, tensors))
        assert [tensor.untyped_storage().nbytes() for tensor in loaded] == [tensor.nbytes for tensor in tensors]


@pytest.mark.gpu
def test_copies_from_a_gpu_are_whole_and_in_pinned_memory(io, tmp_path, copies, pinned):
    for step in range(2):
        weight = torch.full((2**26,), float(step), device="cuda")
        state = {"weight": weight, "moments": [weight[:8].view(2, 4).t(), torch.tensor(step)]}
        io.save_checkpoint({**PARTS, "state": state}, tmp_path / str(step), IN_BACKGROUND)
        weight.fill_(-1)  # the next step
        io.wait()
    assert copies[0] == copies[1], "the memory is used again"
    assert pinned == [[True, True, False]] * 2
    for step in range(2):
        state = io.load_checkpoint(tmp_path / str(step))["state"]
        assert bool((state["weight"] == step).all())
        assert torch.equal(state["moments"][0], torch.full((4, 2), float(step)))


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


IDENTITY = {"base": "digest", "lora.rank": 2}
A, B = "base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"
ADAPTER = {A: torch.ones(2, 5), B: torch.ones(3, 2)}


@pytest.mark.parametrize(
    "adapter",
    [
        {},
        "text",
        {A: ADAPTER[A]},
        {**ADAPTER, B: torch.ones(3, 4)},
        {**ADAPTER, B: torch.ones(3)},
        {**ADAPTER, A: ADAPTER[A].to(torch.int8)},
        {**ADAPTER, A: "text"},
        {**ADAPTER, "extra": "text"},
    ],
)
def test_an_adapter_that_no_run_wrote_is_refused(adapter):
    assert adapter_of({"identity": IDENTITY, "state_dict": ADAPTER}) is ADAPTER
    with pytest.raises(ValueError, match="adapter"):
        adapter_of({"identity": IDENTITY, "state_dict": adapter})


@pytest.mark.parametrize("name", ["loops", "callbacks", "optimizer_states", "lr_schedulers"])
@pytest.mark.parametrize("value", [None, "text", ["text"], {"Timer": "text"}])
def test_training_goes_on_only_from_a_whole_state(name, value):
    state: dict = {"loops": {}, "callbacks": {"Timer": {}}, "optimizer_states": [{}], "lr_schedulers": [{}]}
    state["global_step"] = 4
    check_training_state(state, max_steps=4)
    with pytest.raises(ValueError, match=name):
        check_training_state({**state, name: value}, max_steps=4)
    with pytest.raises(ValueError, match=r"trainer\.max_steps is 3 and the checkpoint has done 4"):
        check_training_state(state, max_steps=3)
