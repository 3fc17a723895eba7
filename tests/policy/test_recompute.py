"""With every setting of gradient checkpointing, gradients equal those without recomputation, and less memory is kept
between forward and backward."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.packing import pack, packed_hidden_states
from qerl_pl.policy.policy import Policy, make_policy
from qerl_pl.policy.recompute import Recompute, ladder, recompute_of
from tests.memory.conftest import FAMILIES, LiveBytes, policy_of, small_config
from tests.packed import frozen_linear, quantize_nvfp4

NUM_LAYERS = 4
RUNGS = ladder(NUM_LAYERS)


def make(family: str = "qwen2", *, packed: bool = False, **lora: Any) -> Policy:
    """Make a random fp32 policy with an adapter that is not zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family), dtype=torch.float32).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if packed and isinstance(module, torch.nn.Linear) and name != "lm_head":
            model.set_submodule(name, frozen_linear(quantize_nvfp4(module.weight), module.bias))
    settings = LoraSettings(**{"rank": 8, **lora})
    policy = make_policy(model, base="random", dtype=torch.float32, lora=settings, seed=0)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return policy


def gradients(policy: Policy, how: Recompute, *, device: str = "cpu") -> list[Tensor]:
    """Return the log-probabilities of three rows of different lengths, and then the gradient of each trained
    parameter."""
    policy.set_recompute(how)
    policy.zero_grad()
    torch.manual_seed(0)
    tokens = torch.randint(256, (3, 23))
    mask = (torch.arange(23) > 2) & (torch.arange(23) < torch.tensor([23, 7, 14]).unsqueeze(1))
    stats = policy.token_stats(tokens.to(device), mask.to(device), temperature=0.9)
    (stats.logprobs * torch.linspace(1, 2, 23, device=device)).sum().backward()
    found = [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
    assert all(gradient is not None for gradient in found)
    return [stats.logprobs.detach(), *(gradient.clone() for gradient in found if gradient is not None)]


@pytest.mark.filterwarnings("ignore:The PEFT config")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(pytest.param({"family": family}, marks=pytest.mark.long) for family in FAMILIES if family != "qwen2"),
        {"packed": True},
        {"targets": ("q_proj", "up_proj")},
        {"train_norms": True},
        {"dropout": 0.2},
    ],
    ids=str,
)
def test_every_rung_has_the_gradients_of_keeping_everything_bit_for_bit(settings):
    policy = make(**settings)
    plain = gradients(policy, Recompute())
    for how in RUNGS[1:]:
        found = gradients(policy, how)
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True)), how


class Products(TorchDispatchMode):
    """Counts products with frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.addmm_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:The PEFT config")
def test_products_run_again_in_whole_blocks_alone_and_the_last_of_a_block_nowhere():
    policy = make()
    for how in RUNGS:
        with Products() as count:
            gradients(policy, how)
        # Each block has 7 products with frozen weights in the forward pass, and 7 in the backward pass. In the backward
        # pass the first block lacks three, those of q_proj, k_proj and v_proj, because nothing before them is trained.
        # A block that is recomputed as a whole repeats six products of its forward pass; the output of the seventh is
        # not needed.
        assert count.number == 2 * 7 * NUM_LAYERS - 3 + 6 * how.blocks, how


@pytest.mark.filterwarnings("ignore:The PEFT config")
def test_each_rung_keeps_less_than_the_one_before_and_gives_all_of_it_back():
    policy = policy_of(small_config(), torch.float32)
    packed = pack(torch.zeros(1, 256, dtype=torch.int64), torch.tensor([256]))
    kept = []
    for how in RUNGS[:-1]:
        policy.set_recompute(how)
        with LiveBytes() as count:
            hidden = packed_hidden_states(policy.causal_lm.model, packed)
            kept.append(count.live)
            hidden.sum().backward()
            del hidden
            policy.zero_grad()
            assert count.live < kept[-1] / 100, "nothing outlives the graph"
    assert all(more > less for more, less in pairwise(kept))


@pytest.mark.filterwarnings("ignore:The PEFT config")
def test_a_second_backward_pass_over_kept_products_is_refused():
    policy = make()
    policy.set_recompute(Recompute(selective=True))
    packed = pack(torch.zeros(1, 8, dtype=torch.int64), torch.tensor([8]))
    loss = packed_hidden_states(policy.causal_lm.model, packed).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


@pytest.mark.parametrize("num_layers", [1, 2, 3, 28, 64])
def test_the_ladder_goes_down_in_small_steps_from_nothing_to_everything(num_layers):
    rungs = ladder(num_layers)
    assert rungs[0] == Recompute()
    assert [how.blocks for how in rungs[1:-1]] == sorted({how.blocks for how in rungs[1:-1]})
    assert [how.setting(num_layers) for how in rungs[-2:]] == ["blocks", "offload"]
    assert all(recompute_of(how.setting(num_layers), num_layers=num_layers) == how for how in rungs)


def test_words_numbers_and_switches_name_rungs():
    def named(setting: Any) -> Recompute | None:
        return recompute_of(setting, num_layers=4)

    assert named("auto") is None
    assert named(False) == named("none") == Recompute()
    assert named(True) == named("blocks") == named(4)
    assert named(1) == Recompute(selective=True, blocks=1)
    assert named(0) == named("selective")
    assert named("offload") == Recompute(selective=True, blocks=4, offload=True)


@pytest.mark.parametrize("setting", [-1, 5, "some", 2.5, None])
def test_what_names_no_rung_is_refused(setting):
    with pytest.raises(ValueError, match=r"gradient_checkpointing is .*auto, none, selective.*0 to 4"):
        recompute_of(setting, num_layers=4)
