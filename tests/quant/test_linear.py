"""The frozen quantised linear against a dense linear with the same weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.nvfp4 import NVFP4Weight, dequantize_reference
from tests.packed import frozen_linear, quantize_nvfp4


def make_layer(
    rows: int = 24, cols: int = 48, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> FrozenLinear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, cols, generator=generator)
    return frozen_linear(quantize_nvfp4(weight), torch.randn(rows, generator=generator).to(dtype) if bias else None)


def packed_tensors(layer: FrozenLinear) -> list[Tensor]:
    return [layer.codes, layer.block_scale, layer.global_scale_bits]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3, 5), (0,)], ids=str)
def test_output_and_gradient_equal_a_dense_linear_in_fp64(leading: tuple[int, ...], bias: bool) -> None:
    layer = make_layer(bias=bias, dtype=torch.float64)
    x = torch.randn(*leading, 48, dtype=torch.float64, requires_grad=True)
    dense_x = x.detach().clone().requires_grad_()
    expected = F.linear(dense_x, dequantize_reference(layer.packed).double(), layer.bias)
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(x.grad, dense_x.grad, rtol=0, atol=1e-12)


def test_gradcheck_passes() -> None:
    x = torch.randn(3, 48, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(make_layer(dtype=torch.float64), (x,), fast_mode=True)


@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-9)])
def test_lower_precision_stays_within_the_rounding_of_its_format(dtype: torch.dtype, epsilon: float) -> None:
    layer = make_layer(64, 128, bias=False)
    weight = dequantize_reference(layer.packed).double()
    x = torch.randn(5, 128).to(dtype).requires_grad_()
    y = layer(x)
    dy = torch.randn(5, 64).to(dtype)
    y.backward(dy)
    assert x.grad is not None
    # One rounding of W, one of the result, and fp32 accumulation over K: each product errs by at most that share.
    share = 2.1 * epsilon + 128 * 2**-24
    bound = share * (x.detach().double().abs() @ weight.abs().T)
    assert ((y.double() - x.detach().double() @ weight.T).abs() <= bound).all()
    bound = share * (dy.double().abs() @ weight.abs())
    assert ((x.grad.double() - dy.double() @ weight).abs() <= bound).all()


def test_autograd_saves_the_packed_weight_and_nothing_else() -> None:
    layer = make_layer()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(4, 48, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in packed_tensors(layer)]
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_layer_computes_the_same_and_saves_no_more() -> None:
    layer = make_layer(64, 128)
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.randn(4, 128, requires_grad=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = compiled(x)
    assert torch.equal(y, layer(x))
    assert sum(tensor.nbytes for tensor in saved) <= sum(tensor.nbytes for tensor in packed_tensors(layer)) + 1024
    expected = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected[0])


def test_nothing_is_saved_for_an_input_without_gradient_or_under_no_grad() -> None:
    layer = make_layer()
    assert layer(torch.randn(2, 48)).grad_fn is None
    with torch.no_grad():
        assert layer(torch.randn(2, 48, requires_grad=True)).grad_fn is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    layers = nn.Sequential(make_layer(48, 48), nn.SiLU(), make_layer(24, 48))
    x = torch.randn(3, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(layers(x).square().sum(), x)
    y = checkpoint(layers, x, use_reentrant=use_reentrant)
    assert isinstance(y, Tensor)
    y.square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_casting_the_module_leaves_the_weight_alone(dtype: torch.dtype) -> None:
    layer = make_layer()
    before = [tensor.clone() for tensor in packed_tensors(layer)]
    dense = layer.dense(torch.float32)
    model = nn.Sequential(layer, nn.Linear(24, 4)).to(dtype)
    assert model[1].weight.dtype == dtype
    assert layer.bias is not None
    assert layer.bias.dtype == dtype
    for tensor, old in zip(packed_tensors(layer), before, strict=True):
        assert tensor.dtype == old.dtype
        assert torch.equal(tensor, old)
    assert torch.equal(layer.dense(torch.float32), dense)
    assert layer(torch.randn(2, 48, dtype=dtype)).dtype == dtype


def test_a_layer_made_on_the_meta_device_takes_its_weight_later() -> None:
    source = make_layer()
    layer = FrozenLinear(48, 24, bias=True, device="meta")
    assert all(buffer.is_meta for buffer in layer.buffers())
    layer.packed, layer.bias = source.packed, source.bias
    x = torch.randn(2, 48)
    assert torch.equal(layer(x), source(x))


def test_state_dict_round_trip_is_exact() -> None:
    source, target = make_layer(), FrozenLinear(48, 24, bias=True)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.dense(torch.float32), source.dense(torch.float32))


def test_the_layer_has_no_parameters_so_no_optimizer_and_no_peft_setting_can_train_it() -> None:
    assert list(make_layer().parameters()) == []


def test_an_fp32_multiplier_is_kept_exactly() -> None:
    weight = quantize_nvfp4(torch.randn(2, 32))
    weight = NVFP4Weight(weight.codes, weight.block_scale, weight.global_scale.float())
    assert torch.equal(frozen_linear(weight).dense(torch.float32), dequantize_reference(weight))


def test_in_features_that_do_not_divide_into_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="in_features is 40; expected a multiple of 16"):
        FrozenLinear(40, 8)
