"""Trainer and engine compute with the same base, and the start fails if they would not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rollout.conftest import MAX_MODEL_LEN, make_engine, make_policy

pytestmark = pytest.mark.vllm
CHANGES = {
    "a code": ("model.layers.1.mlp.up_proj.weight_packed", lambda codes: codes[3, 5].bitwise_xor_(1)),
    "a scale": ("model.layers.0.self_attn.v_proj.weight_scale", lambda scale: scale.view(torch.uint8)[2, 1].add_(1)),
    "a tensor scale": ("model.layers.0.mlp.down_proj.weight_global_scale", lambda divisor: divisor.mul_(1.5)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_base_that_changes_between_trainer_and_engine_stops_the_start(checkpoints, tmp_path, change):
    base = tmp_path / "base"
    shutil.copytree(checkpoints["nvfp4"], base)
    policy = make_policy(str(base))
    name, write = CHANGES[change]
    _rewrite(base, name, write)
    engine = make_engine("vllm")
    with pytest.raises(ValueError, match=rf"base has changed.*{name.split('.')[2]}.*start the run again"):
        engine.start(policy, max_model_len=MAX_MODEL_LEN)


def _rewrite(base: Path, name: str, write) -> None:
    for file in base.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            write(tensors[name])
            save_file(tensors, file, metadata={"format": "pt"})
            return
    raise AssertionError(name)
