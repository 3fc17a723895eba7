"""The formulas against what torch really allocates, on the CPU and as it was measured on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from qerl_pl.memory import parts
from qerl_pl.memory.shape import checkpoint_shape, config_shape
from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.policy.packing import pack, packed_hidden_states
from qerl_pl.policy.policy import Policy
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.nvfp4 import NVFP4
from tests.bench.harness import RANK, model_config
from tests.memory.conftest import LiveBytes, policy_of, small_config

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "model.jsonl"
STEPS = [line for line in map(json.loads, MEASURED.read_text().splitlines()) if line["name"].startswith("step/nvfp4")]
TOKENS = 1024


@contextmanager
def kept_bytes(policy: Policy) -> Iterator[list[int]]:
    """Bytes of what autograd keeps inside the block, parameters and what is shared with them left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*policy.parameters(), *policy.buffers())}
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    total: list[int] = []
    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield total
    total.append(sum(size for pointer, size in storages.items() if pointer not in known))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_block_keeps_what_the_formula_lists(family, dtype):
    kept = {}
    for num_layers in (1, 3):
        policy = policy_of(small_config(family, num_hidden_layers=num_layers), dtype)
        policy.causal_lm.enable_input_require_grads()
        packed = pack(torch.zeros(1, TOKENS, dtype=torch.int64), torch.tensor([TOKENS]))
        with kept_bytes(policy) as total:
            hidden = packed_hidden_states(policy.causal_lm.model, packed)
        kept[num_layers] = total[0]
        del hidden
    shape = config_shape(small_config(family), None, dtype)
    predicted = parts.block_kept(shape, TOKENS, dtype.itemsize, rank=8, targets=PROJECTIONS)
    # A CPU pads for its attention, so that the unpadded output is kept beside the padded one.
    padding = TOKENS * shape.query_width * dtype.itemsize
    assert (kept[3] - kept[1]) / 2 == pytest.approx(predicted + padding, rel=0.02)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_peak_of_a_pass_is_the_larger_of_head_and_block(checkpointing):
    config = small_config(vocab_size=64)
    policy = policy_of(config, torch.float32, gradient_checkpointing=checkpointing)
    tokens = torch.zeros(1, TOKENS + 1, dtype=torch.int64)
    mask = torch.arange(TOKENS + 1).unsqueeze(0) > 0
    with LiveBytes() as count:
        policy.token_stats(tokens, mask, temperature=1.0).logprobs.sum().backward()
    shape = config_shape(config, None, torch.float32)
    kept = parts.block_kept(shape, TOKENS, 4, rank=8, targets=PROJECTIONS) + TOKENS * shape.query_width * 4
    inputs = parts.checkpoints(shape, TOKENS, 4, offload=False) if checkpointing else 0
    blocks = kept if checkpointing else shape.num_layers * kept
    predicted = inputs + blocks + parts.block_backward(shape, TOKENS, 4)
    assert count.peak == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("line", STEPS, ids=lambda line: f"{line['name']}-{line['shape']['model']}")
def test_a_pass_takes_what_was_measured_on_a_gpu(line: dict[str, Any]):
    shape = config_shape(model_config(line["shape"]["model"]), NVFP4, torch.bfloat16)
    tokens, offload = line["shape"]["tokens"], line["name"].endswith("offload")
    predicted = (
        parts.checkpoints(shape, tokens, 2, offload=offload)
        + parts.block_kept(shape, tokens, 2, rank=RANK, targets=PROJECTIONS)
        + parts.block_backward(shape, tokens, 2)
    )
    assert predicted == pytest.approx(line["peak_bytes"], rel=0.02)
    adapter = 4 * parts.adapter_values(shape, rank=RANK, targets=PROJECTIONS, train_norms=False)
    assert shape.base_bytes + adapter == pytest.approx(line["resident_bytes"], rel=0.03)


@pytest.mark.parametrize("base", ["dense", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_base_has_the_bytes_that_its_headers_say(base, dtype, bases):
    model = load_base(bases[base], dtype=dtype, device="cpu")
    weights = {tensor.data_ptr(): tensor.nbytes for name, tensor in model.state_dict().items()}
    shape = checkpoint_shape(bases[base], dtype)
    assert shape.base_bytes == sum(weights.values())
    assert (shape.largest_packed > 0) == (base == "nvfp4")


def test_an_adapter_has_the_values_that_the_formula_counts(family):
    config = small_config(family)
    policy = policy_of(config, torch.float32)
    shape = config_shape(config, None, torch.float32)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert parts.adapter_values(shape, rank=8, targets=PROJECTIONS, train_norms=False) == trained
    norms = parts.adapter_values(shape, rank=8, targets=PROJECTIONS, train_norms=True) - trained
    assert norms == 2 * config.hidden_size * config.num_hidden_layers


def test_slots_have_the_ranks_that_vllm_accepts():
    pytest.importorskip("vllm")
    from qerl_pl.rollout.vllm.setup import accepted_rank

    assert [parts.slot_rank(rank) for rank in range(1, 513)] == [accepted_rank(rank) for rank in range(1, 513)]
