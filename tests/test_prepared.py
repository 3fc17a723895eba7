"""Published checkpoints that the product cannot load as they are get converted once, into a folder of a cache, which
runs then load. A lock keeps two processes from converting at the same time, and the folder's name depends on the
content of the checkpoint."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest
import torch

from qerl_pl.base.cache import made_once
from qerl_pl.base.prepared import prepared_base
from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.quant.quantize import quantize_checkpoint
from tests.quant.conftest import _compressed_tensors_without_its_compiler, make_checkpoint
from tests.quant.published import compressed, modelopt, read_all, rewrite

__all__ = ["_compressed_tensors_without_its_compiler", "make_checkpoint"]
pytestmark = pytest.mark.usefixtures("_compressed_tensors_without_its_compiler", "cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_published_checkpoint_is_converted_once_and_the_log_says_what_was_ignored(make_checkpoint, cache, caplog):
    path = make_checkpoint("qwen3")
    compressed(path)
    with caplog.at_level("INFO"):
        first = Path(prepared_base(str(path)))
    assert first.parent == cache
    assert "their scales are ignored" in caplog.text
    written = {file.name: file.stat().st_mtime_ns for file in first.iterdir()}
    assert prepared_base(f"{path}/") == str(first)
    assert {file.name: file.stat().st_mtime_ns for file in first.iterdir()} == written
    moved = path.rename(path.with_name("elsewhere"))
    shutil.copytree(first, path)
    assert prepared_base(str(path)) == str(path), "what is canonical already is used where it is"
    assert Path(prepared_base(str(moved))).name.rpartition("-")[2] == first.name.rpartition("-")[2], "by content"


def test_a_changed_chat_template_is_not_taken_from_the_cache(make_checkpoint):
    path = make_checkpoint("qwen3")
    compressed(path)
    first = Path(prepared_base(str(path)))
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    second = Path(prepared_base(str(path)))
    assert second != first
    assert (second / "chat_template.jinja").exists()


def test_damage_is_told_in_one_line_and_leaves_nothing(make_checkpoint, cache):
    path = make_checkpoint("qwen3")
    compressed(path)
    rewrite(path, {name: tensor for name, tensor in read_all(path).items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"incomplete checkpoint: model\.norm\.weight") as refused:
        prepared_base(str(path))
    assert "\n" not in str(refused.value)
    assert [file.suffix for file in cache.iterdir()] in ([], [".lock"])


def test_many_at_once_make_it_once(make_checkpoint):
    path, made = make_checkpoint(), []

    def make(folder: Path) -> None:
        made.append(folder)
        sleep(0.3)
        folder.mkdir()

    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: made_once(path, "copy", {"of": 1}, make), range(4)))
    assert len(made) == len(folders) == 1
    assert made_once(path, "copy", {"of": 2}, make) not in folders
    assert len(made) == 2


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "config.json alone"])
def test_plan_counts_a_published_checkpoint_as_it_is_held(make_checkpoint, tmp_path, weights):
    path, packed = make_checkpoint("qwen3"), tmp_path / "packed"
    quantize_checkpoint(path, packed)
    modelopt(path)
    if not weights:
        (path / "model.safetensors").unlink()
    assert checkpoint_shape(path, torch.bfloat16) == checkpoint_shape(packed, torch.bfloat16)


def test_plan_counts_fp8_linears_in_16_bits(make_checkpoint):
    path = make_checkpoint("qwen3")
    compressed(path, lambda name: "FP8_DYNAMIC" if "self_attn" in name else "NVFP4")
    expected = checkpoint_shape(Path(prepared_base(str(path))), torch.bfloat16)
    assert checkpoint_shape(path, torch.bfloat16) == expected
    config = json.loads((path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mixed-precision"
