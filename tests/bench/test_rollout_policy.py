"""The policies of the rollout benchmarks: a packed base has its values, another one has none."""

from __future__ import annotations

import pytest

from qerl_pl.quant.nvfp4 import NVFP4
from tests.bench.bench_rollout import policy_of
from tests.random_checkpoints import write_random_checkpoint


@pytest.mark.parametrize("base", ["nvfp4", "bf16"])
def test_only_a_packed_base_has_values(base, tmp_path):
    policy = policy_of(str(write_random_checkpoint(tmp_path, "tiny", base)), "tiny", base, 8)
    packed = base == "nvfp4"
    assert policy.packed_format is (NVFP4 if packed else None)
    assert len(policy.packed_linears()) == (14 if packed else 0)
    assert any(weight.is_meta for weight in policy.embedding_weights().values()) == (not packed)
    assert not any(tensor.is_meta for linear in policy.packed_linears().values() for tensor in linear.buffers())
    assert all(matrix.any() for matrix in policy.adapter_state().values())
