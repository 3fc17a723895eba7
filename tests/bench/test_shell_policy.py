"""The policy of the rollout benchmarks, whose base has no values."""

from __future__ import annotations

import pytest

from qerl_pl.quant.nvfp4 import NVFP4
from tests.bench.bench_rollout import shell_policy


@pytest.mark.parametrize("fmt", [NVFP4, None])
def test_a_base_without_values_has_the_format_of_the_real_one(fmt):
    policy = shell_policy("somewhere", "tiny", 8, fmt)
    assert policy.packed_format is fmt
    assert len(policy.packed_linears()) == (14 if fmt else 0)
    assert all(tensor.is_meta for linear in policy.packed_linears().values() for tensor in linear.buffers())
    assert all(weight.is_meta for weight in policy.embedding_weights().values())
    assert not any(matrix.is_meta for matrix in policy.adapter_state().values())
