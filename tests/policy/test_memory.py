"""Upper bounds of the memory that a training step takes on a GPU."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from qerl_pl.memory import parts
from qerl_pl.memory.shape import config_shape
from qerl_pl.policy.elementwise import PACKAGE
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, make_policy
from qerl_pl.policy.recompute import ladder
from qerl_pl.quant.nvfp4 import NVFP4
from tests.packed import frozen_linear, quantize_nvfp4
from tests.random_models import run_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed"),
]
HIDDEN, INNER, LAYERS, TOKENS = 2048, 8192, 12, 4096
LARGEST = 2 * HIDDEN * INNER  # bytes of the largest weight in bf16
CHECKPOINT = 2 * HIDDEN * TOKENS  # bytes of a block's input
SLACK = 2**25  # roundings of the allocator, workspaces


def make(*, packed: bool, **settings: Any) -> Policy:
    """Make a random bf16 policy on the GPU."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if packed and isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, frozen_linear(quantize_nvfp4(module.weight), module.bias))
    lora = LoraSettings(rank=32)
    policy = make_policy(model, base="random", dtype=torch.bfloat16, lora=lora, seed=0, **settings).cuda()
    step(policy)  # workspaces, caches
    return policy


def step(policy: Policy) -> tuple[int, int]:
    """Do one forward and one backward pass. Returns by how many bytes the GPU's allocated memory exceeds the memory
    before: at its peak, and between the two passes."""
    tokens = torch.randint(4096, (2, TOKENS // 2), device="cuda")
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, :64] = False
    policy.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stats = policy.token_stats(tokens, mask, temperature=1.0)
    between = torch.cuda.memory_allocated() - before
    stats.logprobs.sum().backward()
    return torch.cuda.max_memory_allocated() - before, between


def adapter_bytes(policy: Policy) -> int:
    """Return the bytes of the gradients that a step leaves."""
    return sum(parameter.nbytes for parameter in policy.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_packed_base_takes_one_dense_weight_more_than_a_dense_one(checkpointing):
    peaks = [step(make(packed=packed, gradient_checkpointing=checkpointing)) for packed in (True, False)]
    (packed_peak, packed_between), (dense_peak, dense_between) = peaks
    assert packed_peak <= dense_peak + LARGEST + SLACK
    assert packed_between <= dense_between + SLACK


def test_checkpoints_are_all_that_outlives_a_forward_pass_and_host_memory_can_take_them():
    on_device = step(make(packed=True, gradient_checkpointing=True))
    on_host = step(make(packed=True, gradient_checkpointing="offload"))
    assert on_device[1] <= (LAYERS + 4) * CHECKPOINT + SLACK  # the final norm and the head keep the rest
    assert on_host[1] <= 3 * CHECKPOINT + SLACK
    assert on_host[0] <= on_device[0] - LAYERS // 2 * CHECKPOINT


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ladder(LAYERS)[:-1:3], ids=lambda how: str(how.setting(LAYERS)))
def test_the_peak_of_a_step_is_what_the_plan_says(how, fused):
    if fused:
        pytest.importorskip(PACKAGE)
    policy = make(packed=True, gradient_checkpointing=how.setting(LAYERS), fused_elementwise=fused)
    peak, _ = step(policy)
    shape, run = config_shape(policy.config, NVFP4, torch.bfloat16), run_of(2, rank=32, fused=fused)
    tokens = TOKENS - 2  # a row's last token predicts nothing
    predicted = (
        parts.checkpoints(shape, tokens, 2, how=how)
        + parts.blocks_kept(shape, run, tokens, how=how)[1]
        + parts.block_backward(shape, run, tokens)
    )
    assert 0.95 * predicted - SLACK <= peak <= 1.05 * predicted + adapter_bytes(policy) + SLACK


def test_the_peak_of_a_step_is_what_one_block_needs():
    policy = make(packed=True, gradient_checkpointing=True)
    peak, between = step(policy)
    # A block keeps for its backward the inputs of its linear layers, their outputs if an activation follows, and fp32
    # copies in the norms. All of this is less than ten tensors [T, H] and five tensors [T, inner] in bf16.
    block = 2 * TOKENS * (10 * HIDDEN + 5 * INNER)
    head = 4 * TOKENS * 4096 * 2  # fp32 logits and their gradients: fewer bytes than a chunk may have
    assert peak <= between + adapter_bytes(policy) + 2 * LARGEST + max(block, head) + SLACK


def test_resident_bytes_are_four_and_a_half_bits_a_weight():
    gc.collect()
    before = torch.cuda.memory_allocated()
    weight = torch.randn(INNER, HIDDEN, device="cuda").bfloat16()
    layer = frozen_linear(quantize_nvfp4(weight))
    del weight
    assert torch.cuda.memory_allocated() - before <= INNER * HIDDEN * 9 // 16 + 3 * 512  # 512: the allocator's unit
    assert layer.codes.is_cuda
