"""A model into which the adapter is merged equals the trained policy: exactly in fp32, and in a file of lower precision
up to the rounding of its dtype."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.tools.merge import measure_drift, merged_tensors, write_merged
from tests.families import tiny_config
from tests.rollout.conftest import random_adapter, save_dense

ROWS = [(list(range(8, 40)), 5), (list(range(50, 20, -1)), 2)]


@pytest.fixture(scope="module", params=["qwen2", "phi3", "gemma3_text"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[False, True], ids=["norms frozen", "norms trained"])
def policy(request: pytest.FixtureRequest, family: str, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("base")
    config = tiny_config(family)
    config.tie_word_embeddings = family == "gemma3_text"
    save_dense(folder / "dense", config)
    quantize_checkpoint(folder / "dense", folder / "nvfp4")
    lora = LoraSettings(rank=4, alpha=8, rslora=True, train_norms=request.param)
    policy = load_policy(str(folder / "nvfp4"), dtype=torch.float32, lora=lora, seed=0)
    policy.load_adapter_state(random_adapter(policy, seed=1))
    return policy.eval()


def test_merged_tensors_make_a_model_that_computes_what_the_policy_does(policy):
    model = AutoModelForCausalLM.from_config(policy.config, dtype=torch.float32).eval()
    model.load_state_dict(dict(merged_tensors(policy)))
    row = torch.tensor([ROWS[0][0]])
    with torch.no_grad():
        torch.testing.assert_close(model(row).logits, policy.causal_lm(row).logits, rtol=1e-4, atol=1e-4)


def test_a_merged_folder_is_loaded_by_stock_transformers_and_its_drift_grows_with_coarser_weights(policy, tmp_path):
    write_merged(policy, tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4")
    near, far = (measure_drift(policy, tmp_path / form, ROWS) for form in ("bf16", "nvfp4"))
    assert near.num_tokens == sum(len(tokens) - start for tokens, start in ROWS)
    assert 0 <= near.kl < 1e-2
    assert 100 * near.kl < far.kl
    assert near.same_argmax > 0.9
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", output_loading_info=True)
    stock, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert stock.dtype == torch.bfloat16
    row = torch.tensor([ROWS[0][0]])
    with torch.no_grad():
        p, q = (model(row).logits.log_softmax(-1) for model in (policy.causal_lm, stock.float()))
    assert (p.exp() * (p - q)).sum(-1).mean() < 1e-2
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())


def test_a_parameter_that_trainer_and_engine_hold_in_fp32_is_exported_in_fp32(tmp_path):
    save_dense(tmp_path / "base", tiny_config("qwen3_5_text"))
    policy = load_policy(str(tmp_path / "base"), dtype=torch.bfloat16, lora=LoraSettings(rank=2), seed=0).eval()
    write_merged(policy, tmp_path / "merged")
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "merged").glob("*.safetensors"):
        exported |= load_file(file)
    exact = {name for name in exported if policy.family.in_fp32(name)}
    assert exact
    own = policy.causal_lm.state_dict()
    for name, tensor in exported.items():
        assert tensor.dtype == (torch.float32 if name in exact else torch.bfloat16)
        if name in exact:
            assert torch.equal(tensor, own[name])
