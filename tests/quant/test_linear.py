"""The frozen quantised linear against a dense linear with the same weight."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qerl_pl.quant.formats import Format, quantize
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4
from tests.packed import frozen_linear
from tests.reference.dequantize import dequantize_reference


def make_layer(rows: int = 24, cols: int = 48, *, bias: bool = True, fmt: Format = NVFP4) -> FrozenLinear:
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(rows, cols, generator=generator), fmt)
    return frozen_linear(weight, torch.randn(rows, generator=generator) if bias else None, fmt)


def packed_tensors(layer: FrozenLinear) -> list[Tensor]:
    return [layer.codes, layer.block_scale, layer.global_scale_bits]


def saved_by(layer: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Call a layer; returns its output, and the tensors that autograd saves for the backward pass."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return layer(x), saved


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4, NF4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (7,), (2, 3, 5), (0,)], ids=str)
def test_output_and_gradient_equal_a_dense_linear_in_fp64(leading, bias, fmt):
    layer = make_layer(cols=192, bias=bias, fmt=fmt).double()
    x = torch.randn(*leading, 192, dtype=torch.float64, requires_grad=True)
    expected = F.linear(x, dequantize_reference(layer.packed, fmt).double(), layer.bias)
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    dy = torch.randn_like(y)
    gradients = (torch.autograd.grad(output, x, dy)[0] for output in (y, expected))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-9)])
def test_lower_precision_stays_within_the_rounding_of_its_format(dtype, epsilon):
    layer = make_layer(64, 128, bias=False)
    weight = dequantize_reference(layer.packed, NVFP4).double()
    x = torch.randn(5, 128).to(dtype).requires_grad_()
    y = layer(x)
    dy = torch.randn(5, 64).to(dtype)
    y.backward(dy)
    assert x.grad is not None
    # The weight and the result are rounded once each, and K products are added in fp32. The error is therefore less
    # than this share of the sum of the products' absolute values.
    share = 2.1 * epsilon + 128 * 2**-24
    bound = share * (x.detach().double().abs() @ weight.abs().T)
    assert ((y.double() - x.detach().double() @ weight.T).abs() <= bound).all()
    bound = share * (dy.double().abs() @ weight.abs())
    assert ((x.grad.double() - dy.double() @ weight).abs() <= bound).all()


def test_autograd_saves_the_packed_weight_and_nothing_else_and_without_a_gradient_nothing():
    layer = make_layer()
    y, saved = saved_by(layer, torch.randn(4, 48, requires_grad=True))
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in packed_tensors(layer)]
    y.sum().backward()
    assert layer(torch.randn(2, 48)).grad_fn is None
    with torch.no_grad():
        assert layer(torch.randn(2, 48, requires_grad=True)).grad_fn is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_layer_computes_the_same_and_saves_no_more():
    layer = make_layer(64, 128)
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.randn(4, 128, requires_grad=True)
    y, saved = saved_by(compiled, x)
    assert torch.equal(y, layer(x))
    assert sum(tensor.nbytes for tensor in saved) <= sum(tensor.nbytes for tensor in packed_tensors(layer)) + 1024
    expected = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(use_reentrant):
    layers = nn.Sequential(make_layer(48, 48), nn.SiLU(), make_layer(24, 48))
    x = torch.randn(3, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(layers(x).square().sum(), x)
    y = checkpoint(layers, x, use_reentrant=use_reentrant)
    assert isinstance(y, Tensor)
    y.square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_casting_the_module_leaves_the_weight_alone(dtype):
    layer = make_layer()
    before = [tensor.clone() for tensor in packed_tensors(layer)]
    nn.Sequential(layer).to(dtype)
    assert layer.bias is not None
    assert layer.bias.dtype == dtype
    for tensor, old in zip(packed_tensors(layer), before, strict=True):
        assert tensor.dtype == old.dtype
        assert torch.equal(tensor, old)
    assert layer(torch.randn(2, 48, dtype=dtype)).dtype == dtype


def test_a_state_dict_holds_the_whole_layer_which_has_no_parameter_that_could_be_trained():
    source, target = make_layer(), FrozenLinear(48, 24, bias=True)
    target.load_state_dict(source.state_dict())
    x = torch.randn(2, 48)
    assert torch.equal(target(x), source(x))
    assert list(target.parameters()) == []


def test_in_features_that_do_not_divide_into_blocks_are_refused():
    with pytest.raises(ValueError, match="in_features is 40; expected a multiple of 16"):
        FrozenLinear(40, 8)
