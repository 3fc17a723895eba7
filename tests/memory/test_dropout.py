"""Memory and time of training passes with LoRA dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qerl_pl.memory import parts
from qerl_pl.memory.fitting import checkpointing_options
from qerl_pl.memory.shape import config_shape
from qerl_pl.policy.elementwise import use_elementwise
from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.policy.packing import pack, packed_hidden_states
from qerl_pl.policy.recompute import Recompute
from tests.memory.conftest import LiveBytes, policy_of, small_config
from tests.memory.test_parts import TOKENS, kept_bytes
from tests.memory.test_plan import AUTO, GIB, SHAPES
from tests.reference.elementwise import REFERENCE


@pytest.mark.usefixtures("masks_of_bytes")
@pytest.mark.parametrize("targets", [PROJECTIONS, ("q_proj", "up_proj")], ids=["all", "some"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", [Recompute(), Recompute(selective=True)], ids=["none", "selective"])
def test_a_block_with_dropout_keeps_what_the_formulas_list(family, how, dtype, fused, targets):
    kept = {}
    for num_layers in (1, 3):
        lora = {"dropout": 0.05, "targets": targets}
        policy = policy_of(small_config(family, num_hidden_layers=num_layers), dtype, lora=lora)
        policy.set_recompute(how)
        if fused:
            use_elementwise(policy.causal_lm, REFERENCE)
        policy.causal_lm.enable_input_require_grads()
        packed = pack(torch.zeros(1, TOKENS, dtype=torch.int64), torch.tensor([TOKENS]))
        with LiveBytes() as count, kept_bytes(policy) as total:
            hidden = packed_hidden_states(policy.causal_lm.model, packed)
            live = count.live
        kept[num_layers] = live if how.selective else total[0]
        del hidden
    shape = config_shape(small_config(family), None, dtype)
    options: dict[str, Any] = {"targets": targets, "fused": fused, "dropout": True}
    if how.selective:
        predicted = parts.block_kept_selectively(shape, TOKENS, dtype.itemsize, **options)
        # A CPU pads for its attention, so that the unpadded output is set aside beside the padded one.
        predicted += TOKENS * shape.query_width * dtype.itemsize
    else:
        predicted = parts.block_kept(shape, TOKENS, dtype.itemsize, rank=8, **options)
    assert (kept[3] - kept[1]) / 2 == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("size", SHAPES)
def test_with_dropout_keeping_all_takes_more_memory_and_selective_as_much_time_as_recomputing_blocks(size):
    shape, run = SHAPES[size], replace(AUTO, micro_batch_tokens=16384)
    without, dropped = (
        {option.setting: option for option in checkpointing_options(shape, replace(run, dropout=dropout), 80 * GIB)}
        for dropout in (False, True)
    )
    assert dropped["none"].train > 1.2 * without["none"].train
    assert dropped["none"].time == without["none"].time
    assert dropped["selective"].time == dropped["blocks"].time == without["blocks"].time
    assert dropped["selective"].train < without["selective"].train
