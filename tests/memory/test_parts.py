"""The memory plan's formulas for parts of a run's memory, against what torch allocates on a CPU and against
measurements on a GPU."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import PretrainedConfig

from qerl_pl.memory import parts
from qerl_pl.memory.settings import DRAFTS_BY_SEQUENCES, GRAPH_SEQUENCES, EngineMemory
from qerl_pl.memory.shape import checkpoint_shape, config_shape
from qerl_pl.model.family import with_merged
from qerl_pl.policy.delta_net import _scan
from qerl_pl.policy.elementwise import use_elementwise
from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.policy.packing import pack, packed_hidden_states
from qerl_pl.policy.policy import Policy
from qerl_pl.policy.recompute import Recompute, ladder
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.nvfp4 import NVFP4
from tests.bench.harness import RANK
from tests.memory.conftest import LiveBytes, policy_of, recurrent_config, sigmoid_config, small_config
from tests.random_models import model_config, run_of
from tests.reference.elementwise import REFERENCE

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "model.jsonl"
STEPS = [line for line in map(json.loads, MEASURED.read_text().splitlines()) if line["name"].startswith("step/nvfp4")]
TOKENS = 256


@contextmanager
def kept_bytes(policy: Policy) -> Iterator[list[int]]:
    """Count the bytes that autograd saves for the backward of the operations in this context, without the policy's
    parameters and buffers. The yielded list gets the number when the context ends."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*policy.parameters(), *policy.buffers())}
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    total: list[int] = []
    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield total
    total.append(sum(size for pointer, size in storages.items() if pointer not in known))


def kept_per_block(
    config_of: Callable[[int], PretrainedConfig],
    dtype: torch.dtype,
    how: Recompute,
    *,
    alive: bool,
    fused: bool = False,
    **lora: Any,
) -> float:
    """Return the bytes by which the memory between forward and backward grows with each additional transformer block.
    With ``alive`` all tensors that exist are counted, otherwise only those that autograd saves for backward."""
    kept = []
    for num_layers in (1, 2):
        policy = policy_of(config_of(num_layers), dtype, lora=lora)
        policy.set_recompute(how)
        if fused:
            use_elementwise(policy.causal_lm, REFERENCE)
        policy.causal_lm.enable_input_require_grads()
        packed = pack(torch.zeros(1, TOKENS, dtype=torch.int64), torch.tensor([TOKENS]))
        with LiveBytes() as count, kept_bytes(policy) as saved:
            hidden = packed_hidden_states(policy.causal_lm.model, packed)
            live = count.live
        kept.append(live if alive else saved[0])
        del hidden
    return kept[1] - kept[0]


@pytest.mark.usefixtures("masks_of_bytes")
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("how", [Recompute(), Recompute(selective=True)], ids=["none", "selective"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("targets", "dtype"),
    [(PROJECTIONS, torch.bfloat16), (PROJECTIONS, torch.float32), (("q_proj", "up_proj"), torch.bfloat16)],
    ids=["all, bf16", "all, fp32", "some, bf16"],
)
def test_a_block_keeps_what_the_formulas_list(family, targets, dtype, fused, how, dropout):
    def config_of(num_layers: int) -> PretrainedConfig:
        return small_config(family, num_hidden_layers=num_layers)

    kept = kept_per_block(config_of, dtype, how, alive=how.selective, fused=fused, targets=targets, dropout=dropout)
    shape = config_shape(small_config(family), None, dtype)
    run = run_of(dtype.itemsize, rank=8, targets=targets, fused=fused, dropout=dropout > 0)
    predicted = (parts.block_kept_selectively if how.selective else parts.block_kept)(shape, run, TOKENS)
    # Attention on a CPU pads, so its output exists padded and unpadded, and inputs that are kept exist twice.
    padding = 0 if dropout and not how.selective else shape.query_width
    if how.selective and not dropout:
        twice = ["v_proj", *(("q_proj", "k_proj") if fused and family != "qwen3" else ())]
        [(_, linears)] = shape.linears
        padding += sum(rows for name, rows, _ in linears if name in twice and name in targets)
    predicted += TOKENS * padding * dtype.itemsize
    if targets != PROJECTIONS and not how.selective and not dropout:  # the formula counts the inputs of all linears
        assert kept < predicted
    else:
        assert kept == pytest.approx(predicted, rel=0.02)


@pytest.mark.usefixtures("masks_of_bytes")
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("how", ladder(4)[:-1], ids=lambda how: str(how.setting(4)))
def test_the_peak_of_a_pass_is_what_the_formulas_add_up_to(how, dropout):
    config = small_config(vocab_size=64)
    policy = policy_of(config, torch.float32, lora={"dropout": dropout})
    policy.set_recompute(how)
    tokens = torch.zeros(1, TOKENS + 1, dtype=torch.int64)
    mask = torch.arange(TOKENS + 1).unsqueeze(0) > 0
    with LiveBytes() as count:
        policy.token_stats(tokens, mask, temperature=1.0).logprobs.sum().backward()
    shape = config_shape(config, None, torch.float32)
    run = run_of(4, rank=8, dropout=dropout > 0)
    _, blocks = parts.blocks_kept(shape, run, TOKENS, how=how)
    kept_twice = shape.num_layers - how.blocks if how.selective else 0
    # Attention on a CPU pads its output, which then exists padded and unpadded. Without dropout, this holds for each
    # block that is not recomputed or, if all are recomputed, for the block whose backward runs.
    outputs_twice = kept_twice if dropout else max(1, shape.num_layers - how.blocks)
    values_twice = 0 if dropout else kept_twice
    padding = 4 * TOKENS * (outputs_twice * shape.query_width + values_twice * shape.key_width)
    predicted = parts.checkpoints(shape, TOKENS, 4, how=how) + blocks + parts.block_backward(shape, run, TOKENS)
    assert count.peak == pytest.approx(predicted + padding, rel=0.05)


@pytest.mark.usefixtures("masks_of_bytes")
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("how", [Recompute(), Recompute(selective=True)], ids=["none", "selective"])
@pytest.mark.parametrize("experts", [False, True])
def test_a_recurrent_layer_keeps_no_more_than_the_formula_lists(how, dropout, experts):
    if experts and dropout:
        pytest.skip("adapters on experts have no dropout")
    config_of = partial(recurrent_config, experts=experts)
    kept = kept_per_block(config_of, torch.bfloat16, how, alive=True, dropout=dropout)
    shape, targets = config_shape(config_of(3), None, torch.bfloat16), with_merged(PROJECTIONS)
    run = run_of(2, rank=8, targets=targets, dropout=dropout > 0, expert_rank=4 * experts)
    predicted = (parts.block_kept_selectively if how.selective else parts.block_kept)(shape, run, TOKENS)
    assert 0.93 * predicted < kept <= predicted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", [Recompute(), Recompute(selective=True)], ids=["none", "selective"])
def test_a_mixture_with_shared_experts_keeps_no_more_than_the_formula_lists(how, dtype):
    kept = kept_per_block(sigmoid_config, dtype, how, alive=True)
    shape = config_shape(sigmoid_config(3), None, dtype)
    run = run_of(dtype.itemsize, rank=8, expert_rank=4)
    if how.selective:
        predicted = parts.block_kept_selectively(shape, run, TOKENS)
        # Attention on a CPU pads, so its output and the values exist padded and unpadded.
        predicted += TOKENS * (shape.query_width + shape.key_width) * dtype.itemsize
    else:
        predicted = parts.block_kept(shape, run, TOKENS)
    assert 0.9 * predicted < kept <= predicted


def test_backward_through_a_recurrence_takes_what_was_measured():
    policy = policy_of(recurrent_config(1), torch.bfloat16)
    layer: Any = policy.causal_lm.get_submodule("model.layers.0.linear_attn")
    shape = config_shape(recurrent_config(1), None, torch.bfloat16)
    own = [torch.randn(TOKENS, width, dtype=torch.bfloat16, requires_grad=True) for width in (512, 2, 2)]
    with LiveBytes() as count:
        _scan(layer, *own, inside=torch.ones(2, TOKENS // 2, dtype=torch.bool)).square().sum().backward()
    widths = shape.recurrent.query_width + shape.recurrent.value_width
    assert count.peak == pytest.approx(parts.SCAN_BYTES * TOKENS * widths, rel=0.1)


@pytest.mark.parametrize(
    ("recurrent", "attention", "length", "blocks", "group"),
    [(3, 1, 64, 3 + 1, 1), (5, 2, 300, 3 + 2, 2), (1, 3, 100, 1 + 3 * 1, 1)],
)
def test_a_cache_of_states_and_keys_is_what_vllm_divides_into_blocks(recurrent, attention, length, blocks, group):
    shape = config_shape(recurrent_config(recurrent, attention), None, torch.float32)
    assert parts.recurrent_state(shape, 4) == 4 * 2 * 128 * 128 + 4 * 3 * 512
    page = 288 * 4 * 2 * 64  # 137216 bytes of a state are those of 268 tokens in a layer, rounded up to blocks of 32
    result = parts.kv_cache(shape, 4, block=32, length=length, num_sequences=5)
    assert result == (5 * blocks + 1) * page * group


@pytest.mark.parametrize("line", STEPS, ids=lambda line: f"{line['name']}-{line['shape']['model']}")
def test_a_pass_takes_what_was_measured_on_a_gpu(line: dict[str, Any]):
    shape = config_shape(model_config(line["shape"]["model"]), NVFP4, torch.bfloat16)
    tokens, (*_, blocks, offload) = line["shape"]["tokens"], ladder(shape.num_layers)
    how = offload if line["name"].endswith("offload") else blocks
    run = run_of(2, rank=RANK)
    _, kept = parts.blocks_kept(shape, run, tokens, how=how)
    predicted = parts.checkpoints(shape, tokens, 2, how=how) + kept + parts.block_backward(shape, run, tokens)
    assert predicted == pytest.approx(line["peak_bytes"], rel=0.02)
    adapter = 4 * parts.adapter_values(shape, run)
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
    assert parts.adapter_values(shape, run_of(4, rank=8)) == trained
    norms = parts.adapter_values(shape, run_of(4, rank=8, train_norms=True)) - trained
    assert norms == 2 * config.hidden_size * config.num_hidden_layers


def test_an_adapter_of_blocks_that_differ_has_the_values_that_the_formula_counts():
    config = recurrent_config(3)
    trained = sum(value.numel() for value in policy_of(config, torch.float32).adapter_state().values())
    shape, targets = config_shape(config, None, torch.float32), with_merged(PROJECTIONS)
    assert parts.adapter_values(shape, run_of(4, rank=8, targets=targets)) == trained


def test_slots_have_the_ranks_that_vllm_accepts():
    pytest.importorskip("vllm")
    from qerl_pl.rollout.vllm.arguments import accepted_rank

    assert [parts.slot_rank(rank) for rank in range(1, 513)] == [accepted_rank(rank) for rank in range(1, 513)]


def test_graphs_of_decoding_steps_keep_two_copies_of_logits_up_to_a_number_of_sequences():
    shape = config_shape(model_config("7B"), NVFP4, torch.bfloat16)
    graphs = {
        count: parts.engine_state(shape, EngineMemory(max_num_seqs=count), length=0)
        - parts.engine_state(shape, EngineMemory(max_num_seqs=count, enforce_eager=True), length=0)
        for count in (1, 8, GRAPH_SEQUENCES, 2 * GRAPH_SEQUENCES)
    }
    one = 2 * 4 * shape.vocabulary + parts.GRAPHS_PER_COUNT
    assert graphs[8] - graphs[1] == 7 * one
    assert graphs[GRAPH_SEQUENCES] - graphs[8] == (GRAPH_SEQUENCES - 8) * one
    assert graphs[2 * GRAPH_SEQUENCES] == graphs[GRAPH_SEQUENCES]


@pytest.mark.parametrize(
    ("sequences", "rows"), [(1, 8), (3, 24), (5, 32), (9, 36), (16, 64), (40, 80), (100, 128), (256, 256)]
)
def test_speculation_keeps_logits_of_drafts_and_graphs_and_tokens(sequences, rows):
    """``rows`` is the largest number of rows of logits, drafts included, in a decoding step of up to ``sequences``
    sequences. The test also computes it as the maximum over all these numbers of sequences."""
    shape, length = config_shape(model_config("7B"), NVFP4, torch.bfloat16), 300
    steps = {n: next((drafts for most, drafts in DRAFTS_BY_SEQUENCES if n <= most), 0) for n in range(1, sequences + 1)}
    assert rows == max(n * (1 + drafts) for n, drafts in steps.items())
    sizes, engine = dict[bool, int](), EngineMemory(max_num_seqs=sequences)
    for eager in (False, True):
        off, on = (
            parts.engine_state(shape, replace(engine, enforce_eager=eager, speculates=speculates), length=length)
            for speculates in (False, True)
        )
        sizes[eager] = on - off
    tokens, sets = 4 * sequences * length, len(DRAFTS_BY_SEQUENCES)
    assert sizes[True] == tokens
    of_rows = (2 * 4 * shape.vocabulary + parts.GRAPHS_PER_COUNT) * (rows - sequences)
    assert sizes[False] == tokens + of_rows + sets * parts.GRAPHS_PER_LAYER * shape.num_layers


@pytest.mark.vllm
@pytest.mark.parametrize("size", ["tiny-A", "30B-A3B", "7B"])
def test_experts_workspace_has_the_two_tensors_that_vllms_kernel_asks_for(size):
    marlin = pytest.importorskip("vllm.model_executor.layers.fused_moe.experts.marlin_moe").MarlinExperts
    shape = config_shape(model_config(size, num_layers=1), NVFP4, torch.bfloat16)
    sizes, hidden = shape.experts, shape.hidden
    first, second, _ = marlin.workspace_shapes(
        None, 100, sizes.inner, hidden, sizes.chosen, sizes.num, sizes.num, None, None
    )
    assert parts.expert_workspace(shape, 2, batched_tokens=100) == 2 * (math.prod(first) + math.prod(second))
