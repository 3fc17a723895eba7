"""The kernel of GPTQ equals its definition in torch. It runs on the GPU if there is one, else in Triton's
interpreter."""

import pytest
import torch

from qerl_pl.quant import rounding
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4
from tests.combinations import pairwise

KERNELS = "qerl_pl.kernels.gptq"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 16, slice(0, 16)), (3, 48, slice(0, 48)), (17, 64, slice(32, 64)), (40, 192, slice(128, 192))]
# rows, columns, columns that are rounded: programs with few rows, a last one with some, and columns in the middle


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")  # numpy's, meant here
@pytest.mark.parametrize(
    ("shape", "fmt"), pairwise(SHAPES, [NVFP4, MXFP4, NF4]), ids=lambda each: getattr(each, "name", str(each))
)
def test_the_kernel_rounds_as_its_definition_does(kernels, shape, fmt):
    rows, width, columns = shape
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, width, generator=generator).to(DEVICE)
    scale = torch.rand(rows, width, generator=generator).add(0.1).to(DEVICE)
    scale[0, columns.start] = weight[0, columns.start] = 0  # NF4's scale of a block of zeros
    inputs = torch.randn(4 * width, width, generator=generator)
    factor = rounding.inverse_factor(inputs.T @ inputs).to(DEVICE)
    codes, limits = rounding.rounding_limits(fmt)
    values = torch.tensor(fmt.values)[codes.int()].to(DEVICE)
    before = weight.clone()
    expected = rounding.round_columns(weight, scale, factor, limits.to(DEVICE), values, columns)
    found = kernels.round_columns(weight, scale, factor, limits.to(DEVICE), values, columns)
    assert torch.equal(weight, before)
    if DEVICE == "cpu":
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    else:  # the GPU may round a product and a sum once, and a weight next to a limit may then get the next value
        assert (found[0] != expected[0]).float().mean() < 0.01
        torch.testing.assert_close(
            found[1][found[0] == expected[0]].mean(), expected[1][found[0] == expected[0]].mean()
        )
