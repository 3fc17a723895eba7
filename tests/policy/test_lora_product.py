"""``lora_product`` multiplies by a frozen weight and its LoRA update as a single autograd node. Output and gradients
equal those of the sum of two linear layers."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from qerl_pl.policy.lora_product import Adapted, lora_product, lora_products
from tests.reference.lora_product import lora_product_reference

N, K, R = 24, 40, 3


class Weight:
    """A frozen matrix that counts how often its values are requested."""

    def __init__(self, rows: int = N, cols: int = K) -> None:
        self.values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.times = 0

    def __call__(self, dtype: torch.dtype) -> Tensor:
        self.times += 1
        return self.values.to(dtype)


def draw(*leading: int, dtype: torch.dtype = torch.float64, cols: int = K, rows: int = N) -> tuple[Tensor, ...]:
    """Draw x, A and B of a linear layer with LoRA, which require gradients, and a bias, which does not. A and B are in
    fp32 if ``dtype`` is smaller."""
    generator = torch.Generator().manual_seed(1)
    shapes = (*leading, cols), (R, cols), (rows, R), (rows,)
    x, a, b, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    master = torch.promote_types(dtype, torch.float32)
    return x.to(dtype).requires_grad_(), a.to(master).requires_grad_(), b.to(master).requires_grad_(), bias.to(dtype)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3, 5), (0,)], ids=str)
def test_output_and_gradients_equal_the_definition(leading, with_bias):
    weight = Weight()
    results = []
    for function in (lora_product, lambda x, adapted: lora_product_reference(x, *adapted[:-1])):
        x, a, b, bias = draw(*leading)
        y = function(x, Adapted(weight, bias if with_bias else None, a, b, 0.7))
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
        results.append([y.detach(), x.grad, a.grad, b.grad])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("used", [(True, True, True), (True, False, True), (False, False, True)], ids=str)
@pytest.mark.parametrize("leading", [(7,), (2, 3), (0,)], ids=str)
def test_products_of_one_input_are_those_of_each_alone(leading, used):
    rows, ranks, scalings = (24, 8, 16), (3, 1, 5), (0.7, 1.0, 2.0)
    generator = torch.Generator().manual_seed(3)
    shapes = [(n, r) for n, r in zip(rows, ranks, strict=True)]

    def gradients(together: bool) -> list[Tensor | None]:
        generator.manual_seed(3)
        x = torch.randn(*leading, K, generator=generator, dtype=torch.float64).requires_grad_()
        a = [torch.randn(r, K, generator=generator, dtype=torch.float64).requires_grad_() for r in ranks]
        b = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
        linears = [
            Adapted(Weight(n), torch.ones(n, dtype=torch.float64) if n != 8 else None, *of)
            for n, of in zip(rows, zip(a, b, scalings, strict=True), strict=True)
        ]
        ys = lora_products(x, linears) if together else [lora_product(x, each) for each in linears]
        torch.stack([y.sin().sum() for y, wanted in zip(ys, used, strict=True) if wanted]).sum().backward()
        return [*(y.detach() for y in ys), x.grad, *(t.grad for t in (*a, *b))]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert found is not None
        expected = torch.zeros_like(found) if expected is None else expected  # of a product that nothing uses
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_bf16_products_stay_within_their_rounding_and_masters_get_fp32_gradients():
    weight = Weight()
    x, a, b, bias = draw(16, dtype=torch.bfloat16)
    y = lora_product(x, Adapted(weight, bias, a, b, 2.0))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    y.backward(dy)
    wide = [t.detach().double().requires_grad_() for t in (x, a, b)]
    exact = lora_product_reference(wide[0], weight, bias.double(), wide[1], wide[2], 2.0)
    exact.backward(dy.double())
    assert y.dtype == torch.bfloat16
    pairs = [(y, exact), *((low.grad, high.grad) for low, high in zip((x, a, b), wide, strict=True))]
    for found, expected in pairs:
        assert found is not None
        assert expected is not None
        assert found.dtype == (torch.float32 if found is a.grad or found is b.grad else torch.bfloat16)
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 4 * torch.finfo(torch.bfloat16).eps  # W, A or B, the inner product and the result are rounded


@pytest.mark.parametrize("scaling", [0.7, 12 / 6**0.5, 2.0])
def test_b_is_scaled_in_fp32_and_rounded_once(scaling):
    _, _, b, _ = draw(1, dtype=torch.bfloat16)
    first = torch.eye(R, K, requires_grad=True)  # so that y is a column of what stands for B
    x = torch.eye(R, K).bfloat16()
    y = lora_product(x, Adapted(lambda dtype: torch.zeros(N, K, dtype=dtype), None, first, b, scaling))
    assert torch.equal(y.t(), (b * scaling).bfloat16())
    exact = b.double() * scaling
    assert ((y.t() - exact).abs() <= exact.abs() * (2**-8 + 1e-6)).all()  # two roundings go up to twice as far


def test_autograd_keeps_the_input_and_nothing_large():
    weight = Weight()
    x, a, b, bias = draw(7)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        lora_product(x, Adapted(weight, bias, a, b, 1.0))
    assert [tuple(tensor.shape) for tensor in saved] == [(7, K), (7, R), (R, K), (N, R)]
    assert saved[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointing_repeats_every_product_but_the_last(offload):
    first, last = Weight(K, K), Weight(K, K)

    def block(x: Tensor, a: Tensor, b: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
        inner = lora_product(x, Adapted(first, None, a, b, 1.0)).sin()
        return x + lora_product(inner, Adapted(last, None, a2, b2, 1.0))

    def gradients(checkpointed: bool) -> list[Tensor | None]:
        x, a, b, _ = draw(5, rows=K)
        inputs = [x, a, b, *(t.detach().clone().requires_grad_() for t in (a, b))]
        first.times = last.times = 0
        y = checkpoint(block, *inputs, use_reentrant=False) if checkpointed else block(*inputs)
        assert isinstance(y, Tensor)
        y.square().sum().backward()
        return [tensor.grad for tensor in inputs]

    plain = gradients(False)
    assert (first.times, last.times) == (2, 2)
    if offload:
        with save_on_cpu():
            found = gradients(True)
    else:
        found = gradients(True)
    assert (first.times, last.times) == (3, 2)
    for value, expected in zip(found, plain, strict=True):
        assert value is not None
        assert expected is not None
        assert torch.equal(value, expected)


def test_the_weight_is_not_asked_for_where_no_gradient_goes_through_it():
    weight = Weight()
    x, a, b, bias = draw(4)
    lora_product(x.detach(), Adapted(weight, bias, a, b, 1.0)).sum().backward()
    assert weight.times == 1
    assert a.grad is not None
    with torch.no_grad():
        assert lora_product(x, Adapted(weight, bias, a, b, 1.0)).grad_fn is None
