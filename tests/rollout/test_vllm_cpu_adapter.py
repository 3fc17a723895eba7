"""The adapter kernels for vLLM on a CPU, against a loop over tokens."""

import pytest
import torch

pytestmark = pytest.mark.vllm


def make_kernels(indices: list[int], max_loras: int = 1):
    from vllm.config.lora import LoRAConfig

    from qerl_pl.rollout.vllm.cpu import adapter_kernels

    kernels = adapter_kernels(
        64, max_batches=8, device=torch.device("cpu"), lora_config=LoRAConfig(max_loras=max_loras)
    )
    kernels._token_lora_indices[: len(indices)] = torch.tensor(indices)
    kernels.indices_len[0] = len(indices)
    return kernels


@pytest.mark.parametrize("indices", [[0] * 5, [-1] * 5, [0, -1, -1, 0, -1], [0], [-1]])
@pytest.mark.parametrize("slices", [(6,), (6, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_with_the_adapter_get_it_and_the_others_keep_what_they_had(indices, slices, dtype):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x, y = draw(len(indices), 8), draw(len(indices), sum(slices))
    a = tuple(draw(1, 1, 4, 8) for _ in slices)
    b = tuple(draw(1, 1, size, 4) for size in slices)
    expected = y.clone()
    for token, index in enumerate(indices):
        if index >= 0:
            hidden = [matrix[0, 0].float() @ x[token].float() for matrix in a]
            update = torch.cat([matrix[0, 0].float() @ h for matrix, h in zip(b, hidden, strict=True)])
            expected[token] = (y[token].float() + 0.5 * update).to(dtype)
    make_kernels(indices).add_lora_linear(y, x, a, b, 0.5, slices)
    bound = 1e-5 if dtype == torch.float32 else 2**-4
    torch.testing.assert_close(y, expected, rtol=bound, atol=bound)
    without = [token for token, index in enumerate(indices) if index < 0]
    assert torch.equal(y[without], expected[without])


def test_more_than_one_adapter_is_left_to_vllm():
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    assert type(make_kernels([0], max_loras=2)) is PunicaWrapperCPU


def test_registering_twice_is_registering_once():
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.platforms import current_platform

    from qerl_pl.rollout.vllm import plugin as vllm_plugin
    from qerl_pl.rollout.vllm.cpu import NVFP4Config

    vllm_plugin.register()
    before = current_platform.get_punica_wrapper
    vllm_plugin.register()
    assert current_platform.get_punica_wrapper == before
    assert get_quantization_config("compressed-tensors") is NVFP4Config
