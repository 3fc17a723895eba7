"""Laws that hold for the policies of every model family, about quantisation, packed rows, adapters, noise on the norms
and memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.model.family import FAMILIES, family_of
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.lora_experts import adapted
from qerl_pl.policy.packing import attends_to_everything, pack, packed_hidden_states, share_prompts
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.quant.experts import PARTS, FrozenExperts, packed_experts
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.quantize import quantize_checkpoint
from tests.families import NAMES, WINDOW, tiny_config
from tests.policy.test_shared_prompts import places
from tests.policy.test_shared_prompts import rows as shared_rows
from tests.rollout.conftest import save_dense

LENGTHS = (WINDOW + 17, 3, WINDOW - 4)
TEMPERATURE = 0.8


@pytest.fixture(scope="module", params=NAMES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random NVFP4 checkpoint, once for each model family."""
    folder = tmp_path_factory.mktemp(request.param)
    save_dense(folder / "dense", tiny_config(request.param))
    quantize_checkpoint(folder / "dense", folder / "nvfp4")
    return folder / "nvfp4"


@pytest.fixture(scope="module")
def policy(base: Path) -> Policy:
    """Load a policy with an adapter that is not zero, which no test changes."""
    policy = load_policy(str(base), dtype=torch.float32, lora=LoraSettings(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    for tensor in policy.adapter_state().values():
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return policy


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(8, 64, (length,), generator=generator) for length in LENGTHS]


def gradients(policy: Policy) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.requires_grad and p.grad is not None}
    policy.zero_grad()
    return found


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all floating-point tensors, weights dequantised, by their names in transformers' model."""
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear):
            state[f"{name}.weight"] = module.dense(torch.float32)
        elif isinstance(module, FrozenExperts):
            gate, up, down = (
                part.dense(torch.float32) for part in (module.gate_proj, module.up_proj, module.down_proj)
            )
            state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.")}
            state[f"{name}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            state[f"{name}.down_proj"] = down
    return state


def test_a_packed_model_computes_what_the_dequantised_one_does(base):
    packed = load_base(base, dtype=torch.float32, device="cpu")
    linears = {name: module for name, module in packed.named_modules() if isinstance(module, FrozenLinear)}
    family = FAMILIES[packed.config.model_type]
    names = {name.rpartition(".")[2] for name in (*linears, *dict(packed_experts(packed)))}
    assert names == {*family.projections, *(PARTS if family.experts else ())}
    dense = AutoModelForCausalLM.from_config(packed.config, dtype=torch.float32).eval()
    dense.load_state_dict(dense_state(packed))
    names = {name for name, linear in dense.named_modules() if isinstance(linear, nn.Linear)}
    assert linears.keys() == {name for name in names - {"lm_head"} if name.rpartition(".")[2] not in family.dense}
    [row, *_] = rows()
    with torch.no_grad():
        found, expected = (model(input_ids=row.unsqueeze(0)).logits for model in (packed, dense))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_base_is_loaded_as_transformers_loads_it(base):
    dense = base.parent / "dense"
    expected = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).state_dict()
    found = dense_state(load_base(dense, dtype=torch.float32, device="cpu"))
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


def test_packed_rows_say_what_transformers_says_of_each_row_with_its_own_masks(policy):
    """The policy computes all rows packed one after the other; transformers computes each row alone and makes the
    attention mask itself. The comparison detects errors in sliding windows, in the scaling of logits and in the
    positions of rotary embeddings."""
    some, longest = rows(), max(LENGTHS)
    tokens = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in some])
    mask = torch.arange(longest) < torch.tensor(LENGTHS).unsqueeze(1)
    mask[:, 0] = False
    stats = policy.token_stats(tokens, mask, temperature=TEMPERATURE)
    stats.logprobs.sum().backward()
    found = gradients(policy)
    attention = policy.causal_lm.config._attn_implementation
    for number, row in enumerate(some):
        policy.causal_lm.set_attn_implementation("eager")
        logits = policy.model(input_ids=row.unsqueeze(0)).logits[0, :-1] / TEMPERATURE
        policy.causal_lm.set_attn_implementation(attention)
        expected = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
        torch.testing.assert_close(stats.logprobs[number, 1 : len(row)], expected, rtol=0, atol=2e-5)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(stats.entropy[number, 1 : len(row)], entropy, rtol=0, atol=2e-5)
        expected.sum().backward()
    whole = gradients(policy)
    assert found.keys() == whole.keys()
    for name, gradient in whole.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_a_shared_prompt_is_what_it_is_in_each_row_alone(policy):
    """Families with sliding windows or recurrent layers do not share prompts."""
    others = {"gemma3_text", "gemma4_text", "mistral", "olmo3", "qwen3_5_text", "qwen3_5_moe_text"}
    assert attends_to_everything(policy.config) == (policy.config.model_type not in others)
    if not attends_to_everything(policy.config):
        return
    some, prompts, lengths = shared_rows()
    some = 8 + some % 56  # no control tokens
    layout = share_prompts(some, prompts, lengths)
    assert layout is not None
    together = packed_hidden_states(policy.causal_lm.model, layout.packed)
    weights = torch.randn(together.shape[1], generator=torch.Generator().manual_seed(3))
    found = torch.cat([together[places(layout, row, prompts, lengths)] for row in range(len(some))]) @ weights
    found.sin().sum().backward()
    shared = gradients(policy)
    rows_alone = [pack(some[row : row + 1], lengths[row : row + 1]) for row in range(len(some))]
    alone = torch.cat([packed_hidden_states(policy.causal_lm.model, row) for row in rows_alone]) @ weights
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    alone.sin().sum().backward()
    for name, gradient in gradients(policy).items():
        assert (shared[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name


def test_every_projection_of_every_block_is_adapted(policy):
    assert set(adapted(policy.adapter_state())) == {*policy.family.projections, *(PARTS if policy.routing else ())}
    names = [name.rpartition(".")[2] for name in policy.packed_linears()]
    of_experts = 2 * policy.routing.num_layers if policy.routing else 0
    assert len(policy.adapter_state()) == 2 * (sum(name in policy.family.projections for name in names) + of_experts)


def test_noise_on_each_named_norm_changes_the_policy_and_no_other_norm_has_any(policy):
    [row, *_] = rows()
    clean = {name: weight.clone() for name, weight in policy.norm_weights().items()}
    names = [f"model.layers.{i}.{norm}.weight" for i in range(policy.num_layers) for norm in policy.family.noise_norms]
    assert sorted(clean) == sorted(names)
    with torch.no_grad():
        before = policy.causal_lm(input_ids=row.unsqueeze(0)).logits
        for name, weight in noisy_norms(clean, NormNoise(0.1, 3)).items():
            policy.norm_weights()[name].copy_(weight)
            assert not torch.allclose(policy.causal_lm(input_ids=row.unsqueeze(0)).logits, before, atol=1e-3), name
            policy.norm_weights()[name].copy_(clean[name])
        assert torch.equal(policy.causal_lm(input_ids=row.unsqueeze(0)).logits, before)


def test_the_memory_of_a_family_is_planned_from_its_files(base, policy):
    shape = checkpoint_shape(base, torch.float32)
    assert {name for _, linears in shape.linears for name, _, _ in linears} == set(policy.family.projections)
    norms = [name for name, _ in policy.causal_lm.model.layers[0].named_children() if name.endswith("norm")]
    assert shape.block_norms == len(norms)
    held = sum(tensor.nbytes for tensor in load_base(base, dtype=torch.float32, device="cpu").state_dict().values())
    assert shape.base_bytes == held


def test_all_parts_of_a_merged_linear_stand_for_it():
    phi, llama = FAMILIES["phi3"], FAMILIES["llama"]
    assert set(phi.targets(LoraSettings().filled_in()[2])) == set(phi.projections)
    assert phi.targets(("qkv_proj",)) == ("qkv_proj",)
    assert phi.targets(("gate_proj", "up_proj")) == ("gate_up_proj",)
    assert llama.targets(("q_proj",)) == ("q_proj",)
    with pytest.raises(ValueError, match=r"model\.lora\.targets has \['q_proj'\], which are a part of qkv_proj"):
        phi.targets(("q_proj", "o_proj"))


def test_a_family_that_is_not_supported_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="somewhere is a 'gpt2' model; expected one of qwen2, qwen3, llama, mistral"):
        family_of("gpt2", path="somewhere")
