"""Tests of MoE layers in vLLM that read the trainer's NVFP4 weights: their outputs equal those of a loop over tokens,
and their check finds weights that have changed. Kernels run on the GPU if there is one, else in Triton's
interpreter."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.quant import formats
from qerl_pl.quant.experts import StackedLinear
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nvfp4 import NVFP4

pytest.importorskip("qerl_pl.rollout.vllm.base_weights")
pytestmark = pytest.mark.vllm
KERNELS = "qerl_pl.hopper.native_experts"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no bf16
EXPERTS, HIDDEN, INNER = 5, 48, 32


def stacked(outputs: int, inputs: int, fmt: Any = NVFP4) -> StackedLinear:
    """Draw a linear layer of all experts in 4 bits; each expert has a tensor scale of its own."""
    linears: list[nn.Linear | FrozenLinear] = []
    for expert in range(EXPERTS):
        linear = FrozenLinear(inputs, outputs, fmt)
        linear.packed = formats.quantize((1 + expert) * torch.randn(outputs, inputs), fmt)
        linears.append(linear)
    return StackedLinear(linears).to(DEVICE)


@pytest.fixture
def parts() -> list[StackedLinear]:
    """Gate, up and down of a block's experts."""
    torch.manual_seed(0)
    return [stacked(INNER, HIDDEN), stacked(INNER, HIDDEN), stacked(HIDDEN, INNER)]


def adopted(kernels: ModuleType, parts: list[StackedLinear]) -> Any:
    stacks = kernels.Stacks._make(kernels.stack_of(part.linears) for part in parts)
    return kernels.Adopted(stacks, stacks.digest)


def test_a_stack_is_the_trainers_memory(kernels, parts):
    for part in parts:
        stack = kernels.stack_of(part.linears)
        assert (stack.codes.data_ptr(), stack.codes.shape) == (part.codes.data_ptr(), part.codes.shape)
        assert torch.equal(stack.codes, part.codes)
        assert torch.equal(stack.block_scale, part.block_scale)
        assert torch.equal(stack.global_scale, part.global_scale_bits.view(torch.float64).float())


def test_other_weights_are_no_stack(kernels, parts):
    first = parts[0].linears
    assert kernels.stack_of(stacked(HIDDEN, INNER, MXFP4).linears) is None
    assert kernels.stack_of([first[1], first[0], *first[2:]]) is None
    assert kernels.stack_of([*first[:2], *first[3:]]) is None
    alone = FrozenLinear(HIDDEN, INNER).to(DEVICE)
    alone.packed = formats.quantize(torch.randn(INNER, HIDDEN), NVFP4)
    assert kernels.stack_of([*first[:-1], alone.to(DEVICE)]) is None


@pytest.mark.parametrize("kind", ["codes", "block_scale"])
@pytest.mark.parametrize("number", range(3))
def test_weights_that_change_are_noticed(kernels, parts, number, kind):
    """A flipped bit, weights that two experts have exchanged, and a kernel that reads other memory."""
    used, firsts = adopted(kernels, parts), [part.linears[0] for part in parts]
    assert used.holds(firsts)
    weight = getattr(parts[number], kind)
    weight[3, -1, -1] ^= 4
    assert not used.holds(firsts)
    weight[3, -1, -1] ^= 4
    kept = weight.clone()
    weight[[1, 2]] = weight[[2, 1]]
    assert not used.holds(firsts)
    weight.copy_(kept)
    assert used.holds(firsts)
    assert not used.holds([part.linears[1] for part in parts])
    assert used.nbytes == sum(part.codes.nbytes + part.block_scale.nbytes for part in parts)


class Adapters:
    """Stand-in for vLLM's object that adds adapters. It adds 1 to the outputs of gate and up. To the first outputs of
    down, as many as down has inputs, it adds down's inputs times the weight that the router gives to the expert."""

    def add_lora_w13(self, y: Tensor, x: Tensor, *_: Any, **__: Any) -> tuple[None, Tensor, None, None]:
        y += 1
        return None, torch.tensor(7), None, None

    def add_lora_w2(
        self, y: Tensor, x: Tensor, a: Any, b: Any, weights: Tensor, first: None, ids: Tensor, *_: Any, **__: Any
    ) -> None:
        assert ids == 7
        y[..., : x.shape[1]] += weights.unsqueeze(2) * x.view(*y.shape[:2], -1)


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 2), (6, 3), (40, 1)])
def test_experts_equal_a_loop_over_tokens(kernels, parts, tokens, chosen, with_adapters, monkeypatch):
    experts = object.__new__(kernels.NativeExperts)  # its configuration needs an engine
    experts.stacks = adopted(kernels, parts).stacks
    experts.moe_config = SimpleNamespace(activation=None)

    def swiglu(_activation: Any, output: Tensor, both: Tensor) -> None:
        gate, up = both.chunk(2, dim=1)
        output.copy_(F.silu(gate) * up)

    monkeypatch.setattr(experts, "activation", swiglu)
    x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=DTYPE)
    ids = torch.rand(tokens, EXPERTS, device=DEVICE).argsort(dim=1)[:, :chosen].int()  # strides of the whole
    weights = torch.rand(tokens, chosen, device=DEVICE)
    if with_adapters:
        fields = dict.fromkeys(
            ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked"), ()
        )
        fields |= dict.fromkeys(("adapter_enabled", "max_loras", "top_k", "fully_sharded", "tp_rank"))
        fields |= dict.fromkeys(("local_num_experts", "use_tuned_config", "local_token_lora_mapping"))
        experts.set_lora_context(
            SimpleNamespace(**fields, w13_num_slices=2, enable_moe_shared_loras=False, punica_wrapper=Adapters())
        )
    first, second, shape = experts.workspace_shapes(tokens, 2 * INNER, HIDDEN, chosen, EXPERTS, EXPERTS, None, None)
    memory, scratch = torch.empty(first, device=DEVICE, dtype=DTYPE), torch.empty(second, device=DEVICE, dtype=DTYPE)
    output = memory.flatten()[: tokens * HIDDEN].view(shape)  # vLLM lets them overlap
    w1, w2 = torch.empty(EXPERTS, 2 * INNER, HIDDEN // 2), torch.empty(EXPERTS, HIDDEN, INNER // 2)
    experts.apply(output, x, w1, w2, weights, ids, None, EXPERTS, None, None, None, memory, scratch, None, False)
    gate, up, down = (part.dense(torch.float32).double() for part in parts)
    for token in range(tokens):
        expected = torch.zeros(HIDDEN, device=DEVICE, dtype=torch.float64)
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            inputs = x[token].double()
            product = F.silu(gate[expert] @ inputs + with_adapters) * (up[expert] @ inputs + with_adapters)
            expected += weight * (down[expert] @ product)
            expected[:INNER] += with_adapters * weight * product
        bound = 1e-5 if x.dtype == torch.float32 else 2**-5
        assert (output[token].double() - expected).abs().max() <= bound * expected.abs().max()
