"""Trainer and engine share one copy of an NVFP4 base: the trainer's weights are put in tile order, the order in which
the Hopper kernels read them, and vLLM's linear layers use the same memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from qerl_pl.hopper.tile_order import is_in_tile_order, whole_of
from qerl_pl.quant import formats, nvfp4
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.vllm import memory

base_weights = pytest.importorskip("qerl_pl.rollout.vllm.base_weights")
one_copy = pytest.importorskip("qerl_pl.hopper.one_copy")
LinearBase = pytest.importorskip("vllm.model_executor.layers.linear").LinearBase
pytestmark = pytest.mark.vllm


def packed(outputs: int, inputs: int) -> FrozenLinear:
    """Make a random NVFP4 linear layer. Its tensor scale is the same in every call, because layers that vLLM fuses
    share one scale."""
    linear = FrozenLinear(inputs, outputs)
    linear.packed = formats.quantize(torch.randn(outputs, inputs), NVFP4, torch.tensor(2e-3, dtype=torch.float64))
    return linear


def test_the_trainers_linears_become_views_of_the_engines_weights():
    """The trainer's linear layers that vLLM fuses, such as q_proj, k_proj and v_proj, become views of one weight in
    tile order. o_proj, whose 160 outputs are not a multiple of a tile's 64, stays in the layout of checkpoints."""
    shapes = {"q_proj": (128, 128), "k_proj": (64, 128), "v_proj": (64, 128), "o_proj": (160, 128), "out": (256, 128)}
    linears = {f"a.{name}": packed(*shape) for name, shape in shapes.items()}
    dense = {name: linear.dense(torch.bfloat16) for name, linear in linears.items()}
    for _ in range(2):
        one_copy.put_in_tile_order(linears)
        assert all(torch.equal(linear.dense(torch.bfloat16), dense[name]) for name, linear in linears.items())
        in_order = [name for name, linear in linears.items() if is_in_tile_order(linear.packed)]
        assert in_order == ["a.q_proj", "a.k_proj", "a.v_proj", "a.out"]
    group = [linears[f"a.{name}"].packed for name in ("q_proj", "k_proj", "v_proj")]
    whole = whole_of(group)
    assert whole is not None
    assert torch.equal(nvfp4.dequantize(whole, torch.bfloat16), torch.cat([dense[name] for name in in_order[:3]]))
    assert whole_of(group[:2]) is None
    assert whole_of([group[1], group[0], group[2]]) is None
    assert whole_of([linears["a.o_proj"].packed]) is None


def test_linears_that_were_moved_apart_are_fused_again():
    """When a module is moved to another device and back, the weight of each linear layer is copied separately, so that
    fused layers are no longer views of one weight. Putting the layers in tile order again repairs this."""
    linears = {f"a.{name}": packed(rows, 128) for name, rows in {"gate_proj": 128, "up_proj": 128}.items()}
    dense = [linear.dense(torch.bfloat16) for linear in linears.values()]
    one_copy.put_in_tile_order(linears)
    for linear in linears.values():
        linear._apply(torch.clone)
    assert whole_of([linear.packed for linear in linears.values()]) is None
    one_copy.put_in_tile_order(linears)
    assert whole_of([linear.packed for linear in linears.values()]) is not None
    assert all(torch.equal(a.dense(torch.bfloat16), b) for a, b in zip(linears.values(), dense, strict=True))


def test_gradients_are_those_of_the_other_order():
    linears = {"out": packed(256, 128)}
    x = torch.randn(3, 128, requires_grad=True)
    [before] = torch.autograd.grad(linears["out"](x).square().sum(), x)
    one_copy.put_in_tile_order(linears)
    [after] = torch.autograd.grad(linears["out"](x).square().sum(), x)
    assert torch.equal(before, after)


class Converted(LinearBase):
    """A linear layer of vLLM after its weights were converted to tile order."""

    def __init__(self, weight: PackedWeight) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight.codes.clone(), requires_grad=False)
        scales = weight.block_scale.view(torch.float8_e4m3fn).clone()
        self.weight_scale = nn.Parameter(scales, requires_grad=False)
        self.trainers_weight: PackedWeight | None = weight


def test_the_engine_takes_the_trainers_memory_if_it_holds_the_same_bits():
    linears = {"out": packed(256, 128)}
    one_copy.put_in_tile_order(linears)
    whole = whole_of([linears["out"].packed])
    assert whole is not None
    same, other, unknown = Converted(whole), Converted(whole), Converted(whole)
    other.weight[0, 0] ^= 1
    unknown.trainers_weight = None
    elsewhere = Converted(PackedWeight(whole.codes.to("meta"), whole.block_scale.to("meta"), whole.global_scale))
    elsewhere.trainers_weight = whole
    assert one_copy.adopt(same)
    assert same.weight.data_ptr() == whole.codes.data_ptr() == linears["out"].codes.data_ptr()
    assert same.weight_scale.data_ptr() == whole.block_scale.data_ptr()
    for layer in (other, unknown, elsewhere):
        own = layer.weight.data_ptr()
        assert not one_copy.adopt(layer)
        assert layer.weight.data_ptr() == own
    assert not hasattr(other, "trainers_weight")


class Read(LinearBase):
    """A linear layer of vLLM before it reads its weights."""

    def __init__(self, outputs: int, inputs: int) -> None:
        nn.Module.__init__(self)
        codes, scales = torch.zeros(outputs, inputs // 2), torch.zeros(outputs, inputs // 16)
        self.weight_packed = nn.Parameter(codes.to(torch.uint8), requires_grad=False)
        self.weight_scale = nn.Parameter(scales.to(torch.float8_e4m3fn), requires_grad=False)


def test_a_linear_that_is_not_read_takes_no_memory_until_it_is_given_the_trainers_weight():
    linears = {"out": packed(256, 128), "small": packed(96, 128)}
    codes, scales = linears["out"].codes.clone(), linears["out"].block_scale.clone()
    one_copy.put_in_tile_order(linears)
    model = nn.Module()
    model.out, model.small = out, small = Read(256, 128), Read(96, 128)
    unread = one_copy.unread(model, linears)
    assert unread == {"out": ["out"]}, "the other one is in row order"
    one_copy.lend(model, linears, unread=unread)
    assert [each.weight_packed.untyped_storage().nbytes() for each in (out, small)] == [1, 96 * 64]
    assert (out.weight_packed.shape, out.weight_scale.shape) == (codes.shape, scales.shape)
    with pytest.raises(RuntimeError, match="converted out with a kernel that is not this project's"):
        one_copy.place(model, linears, torch.device("cpu"))
    for each in (out, small):
        one_copy.give(each)
    assert torch.equal(out.weight_packed, codes)
    assert torch.equal(out.weight_scale.view(torch.uint8), scales)
    assert not small.weight_packed.any()
    one_copy.place(model, linears, torch.device("cpu"))


class Adopted(NamedTuple):
    """Imitates an engine's worker whose model has one fused linear layer, with the trainer's two linear layers (gate
    and up) whose memory this layer uses, and their dense weights for comparison."""

    worker: Any
    linears: dict[str, FrozenLinear]
    dense: dict[str, torch.Tensor]

    def check_trainers(self) -> None:
        assert all(torch.equal(self.linears[name].dense(torch.bfloat16), dense) for name, dense in self.dense.items())


@pytest.fixture
def adopted() -> Adopted:
    linears = {f"mlp.{name}": packed(128, 128) for name in ("gate_proj", "up_proj")}
    dense = {name: linear.dense(torch.bfloat16) for name, linear in linears.items()}
    one_copy.put_in_tile_order(linears)
    whole = whole_of([linear.packed for linear in linears.values()])
    assert whole is not None
    model, mlp = nn.Module(), nn.Module()
    model.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}  # pyright: ignore[reportArgumentType]
    model.mlp, mlp.gate_up_proj = mlp, Converted(whole)
    one_copy.lend(model, linears)
    assert one_copy.adopt(mlp.gate_up_proj)
    return Adopted(SimpleNamespace(get_model=lambda: model), linears, dense)


def test_a_linear_with_the_trainers_memory_is_compared_whole(adopted):
    assert base_weights.check_rows(adopted.worker, adopted.linears) == 1
    for tensor in (adopted.linears["mlp.up_proj"].codes, adopted.linears["mlp.gate_proj"].block_scale):
        tensor[-1, -1] ^= 1
        with pytest.raises(RuntimeError, match=r"1 of 1 linears differ.*gate_up_proj"):
            base_weights.check_rows(adopted.worker, adopted.linears)
        tensor[-1, -1] ^= 1
    assert base_weights.check_rows(adopted.worker, adopted.linears) == 1


def test_parameters_that_vllm_has_moved_are_put_into_the_trainers_memory_again(adopted):
    """After converting weights, vLLM moves back to host memory every parameter that it created there and whose name is
    still the same. ``place`` then gives the trainer's memory back to the parameter."""
    model = adopted.worker.get_model()
    layer, scales = model.mlp.gate_up_proj, adopted.linears["mlp.gate_proj"].block_scale
    layer.weight_scale.data = layer.weight_scale.data.clone()
    assert layer.weight_scale.data_ptr() != scales.data_ptr()
    model.mlp.other = Converted(packed(128, 128).packed)  # not one of the trainer's
    one_copy.place(model, adopted.linears, torch.device("cpu"))
    assert layer.weight_scale.data_ptr() == scales.data_ptr()
    assert layer.weight.data_ptr() == adopted.linears["mlp.gate_proj"].codes.data_ptr()
    assert base_weights.check_rows(adopted.worker, adopted.linears) == 1


def test_a_trainer_that_was_moved_away_from_the_shared_memory_is_seen(adopted):
    for linear in adopted.linears.values():
        linear._apply(torch.clone)
    with pytest.raises(RuntimeError, match="does not compute with the trainer's base"):
        base_weights.check_rows(adopted.worker, adopted.linears)


def test_an_engine_that_ends_leaves_the_trainers_memory_as_it_is(adopted):
    places = [linear.codes.data_ptr() for linear in adopted.linears.values()]
    memory.free(adopted.worker)
    assert adopted.worker.get_model().mlp.gate_up_proj.weight.numel() == 0
    adopted.check_trainers()
    assert [linear.codes.data_ptr() for linear in adopted.linears.values()] == places
    one_copy.put_in_tile_order(adopted.linears)  # as the next engine does before it starts
    assert [linear.codes.data_ptr() for linear in adopted.linears.values()] == places
