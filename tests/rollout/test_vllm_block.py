"""What vLLM's models compute between their linears on CUDA, through vLLM's own tables; without a GPU, interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.vllm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def vllm_block() -> Iterator[Any]:
    """The module, installed for as long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        from vllm import ir
        from vllm.model_executor import custom_op

        patch.setattr(custom_op, "op_registry_oot", {})
        operators = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
        for operator in operators:
            patch.setattr(operator, "impls", dict(operator.impls))
        module = import_module("qerl_pl.rollout.vllm_block")
        module.install()
        first, second = (operator.set_priority([module.PROVIDER, "native"]) for operator in operators)
        with first, second:
            yield module


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def native(name: str, *arguments: Any) -> Any:
    from vllm import ir

    return getattr(ir.ops, name).impls["native"].impl_fn(*arguments)


@pytest.mark.parametrize("compiled", [False, True])
def test_norms_are_those_that_vllm_defines(vllm_block, compiled):
    from vllm import ir

    def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        first = ir.ops.rms_norm(x, weight, 1e-6)
        return first, *ir.ops.fused_add_rms_norm(first, residual, weight, 1e-6)

    x, residual, weight = draw(5, 48), draw(5, 48, seed=1), draw(48, seed=2)
    run = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True) if compiled else block
    first = native("rms_norm", x, weight, 1e-6)
    for found, expected in zip(
        run(x, residual, weight), (first, *native("fused_add_rms_norm", first, residual, weight, 1e-6)), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_our_kernels_are_the_ones_that_run(vllm_block, monkeypatch):
    from vllm import ir

    calls = []
    for name in ("rms_norm", "add_rms_norm"):
        real = getattr(vllm_block.block, name)
        monkeypatch.setattr(vllm_block.block, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    x, weight = draw(3, 16), draw(16)
    ir.ops.rms_norm(x, weight, 1e-6)
    ir.ops.fused_add_rms_norm(x, x, weight, 1e-6)
    assert calls == ["rms_norm", "add_rms_norm"]


@pytest.mark.parametrize(
    "arguments",
    [(None, 1e-6), (draw(16), 1e-6, 8), (draw(16, dtype=torch.float16), 1e-6)],
    ids=["no weight", "mean of a part", "another dtype"],
)
def test_other_norms_are_left_to_vllm(vllm_block, arguments):
    from vllm import ir

    x = draw(3, 16)
    assert ir.ops.rms_norm.dispatch(x, *arguments).provider == "native"
    assert ir.ops.fused_add_rms_norm.dispatch(x, x, *arguments).provider == "native"
    torch.testing.assert_close(ir.ops.rms_norm(x, *arguments), native("rms_norm", x, *arguments))


def test_the_gate_is_what_vllm_makes_for_a_model(vllm_block):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul

    x = draw(2, 3, 20)
    expected = SiluAndMul.forward_native(x)
    with set_current_vllm_config(VllmConfig()):
        gate = SiluAndMul()
    assert isinstance(gate, vllm_block.EarlySiluAndMul)
    compiled = torch.compile(gate.forward_native, backend="aot_eager", fullgraph=True, dynamic=True)
    for found in (gate.forward_native(x), gate.forward_cuda(x), compiled(x)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_and_mul"])
def test_what_torch_compile_is_told_of_shapes_is_true(vllm_block, name):
    x, weight = draw(4, 6, 32)[:, :3], draw(32)
    arguments = {"rms_norm": (x, weight, 1e-6), "add_rms_norm": (x, x, weight, 1e-6), "silu_and_mul": (x,)}[name]
    operator = getattr(torch.ops.qerl_pl, name)
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        told = operator(*(mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments))
    for one, other in zip(pytree.tree_leaves(told), pytree.tree_leaves(real), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
