"""A run can start from an adapter that PEFT has written. It computes what PEFT itself computes with the adapter, and
refuses adapters for which it would not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from qerl_pl.base.prepared import prepared_base
from qerl_pl.checkpoint import check_identity, lora_settings, run_identity
from qerl_pl.policy.lora import LoraSettings, open_settings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.policy.start import check_fits, digest, is_of_other_base, read_start
from tests.families import tiny_config, with_vision
from tests.rollout.conftest import save_dense

TOKENS = torch.arange(8, 48).view(2, 20)
WEIGHTS = "adapter_model.safetensors"


def write_stock(base: str, folder: Path, **settings: Any) -> Tensor:
    """Write a random adapter with PEFT itself. Returns the log-probabilities of two rows that PEFT computes with this
    adapter, [2, 19] nats."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(
        model, LoraConfig(**{"r": 3, "lora_alpha": 7, "task_type": "CAUSAL_LM", **settings})
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
        logprobs = adapted(input_ids=TOKENS).logits.log_softmax(-1)[:, :-1].gather(-1, TOKENS[:, 1:, None])[..., 0]
    adapted.save_pretrained(str(folder))
    return logprobs


@pytest.fixture(scope="module")
def stock(base, tmp_path_factory) -> tuple[Path, Tensor]:
    """Folder of an adapter that ``write_stock`` has written, and the log-probabilities that PEFT computes with this
    adapter, [2, 19] nats."""
    folder = tmp_path_factory.mktemp("stock") / "adapter"
    return folder, write_stock(base, folder, target_modules=["q_proj", "down_proj"], use_rslora=True, lora_dropout=0.1)


@pytest.fixture
def copy(stock, tmp_path) -> Path:
    return Path(shutil.copytree(stock[0], tmp_path / "adapter"))


def policy_of(base: str, lora: LoraSettings) -> Policy:
    return load_policy(base, dtype=torch.float32, lora=lora, seed=0)


@torch.no_grad()
def logprobs_of(policy: Policy) -> Tensor:
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[:, 0] = False
    return policy.token_stats(TOKENS, mask, temperature=1.0).logprobs[:, 1:]


def configure(folder: Path, **values: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_the_policy_starts_as_stock_peft_computes_and_takes_the_adapters_settings(base, stock):
    folder, expected = stock
    lora = LoraSettings(start=str(folder))
    assert (lora.rank, lora.alpha, lora.rslora, lora.targets) == (3, 7, True, ("down_proj", "q_proj"))
    policy = policy_of(base, lora)
    torch.testing.assert_close(logprobs_of(policy), expected, atol=1e-6, rtol=1e-6)
    assert all(tensor.dtype == torch.float32 for tensor in policy.adapter_state().values())


def test_the_reference_is_the_policy_at_its_start_and_the_policy_is_left_as_it_was(base, stock):
    policy = policy_of(base, LoraSettings(start=str(stock[0])))
    start = logprobs_of(policy)
    for tensor in policy.adapter_state().values():
        tensor.mul_(1.5)
    moved = logprobs_of(policy)
    with policy.as_reference():
        assert torch.equal(logprobs_of(policy), start)
    assert torch.equal(logprobs_of(policy), moved)
    assert not torch.equal(moved, start)
    fresh = policy_of(base, LoraSettings(rank=2))
    with fresh.as_reference(), fresh.model.disable_adapter():
        plain = logprobs_of(fresh)
    assert torch.equal(logprobs_of(fresh), plain)  # without a start adapter it is the base


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*self_attn\.[vo]_proj", "init_lora_weights": "gaussian"},
        {"target_modules": ["k_proj", "lm_head"], "exclude_modules": ["lm_head"]},
        {"target_modules": ["up_proj"], "modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
        {"target_modules": ["o_proj"], "init_lora_weights": "orthogonal", "r": 4, "lora_alpha": 0.5},
    ],
    ids=lambda settings: str(settings["target_modules"]),
)
def test_every_way_to_name_the_linears_gives_the_policy_of_stock_peft(base, tmp_path, settings):
    expected = write_stock(base, tmp_path / "adapter", **settings)
    start = LoraSettings(start=str(tmp_path / "adapter"), train_norms="modules_to_save" in settings)
    torch.testing.assert_close(logprobs_of(policy_of(base, start)), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("by_transformers_4", [False, True])
@torch.no_grad()
def test_an_adapter_of_a_vision_language_model_is_one_of_its_language_model(tmp_path, monkeypatch, by_transformers_4):
    """transformers 4 had the language model under another name."""
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    save_dense(tmp_path / "base", with_vision(tiny_config("gemma3_text")))
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).eval()
    for name, tensor in adapted.named_parameters():
        if "lora_B" in name:
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    expected = adapted(input_ids=TOKENS).logits.log_softmax(-1)[:, :-1].gather(-1, TOKENS[:, 1:, None])[..., 0]
    adapted.save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / WEIGHTS
    tensors = load_file(file)
    assert any("vision" in name for name in tensors), "whose layers are adapted too, without effect on text"
    if by_transformers_4:
        renamed = {name.replace("model.language_model.", "language_model.model."): tensors[name] for name in tensors}
        save_file(renamed, file)
    policy = policy_of(prepared_base(str(tmp_path / "base")), LoraSettings(start=str(tmp_path / "adapter")))
    torch.testing.assert_close(logprobs_of(policy), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 32}, "model.lora.rank is 32 .* has 3"),
        ({"alpha": 32}, "model.lora.alpha is 32 .* has 7"),
        ({"targets": ("q_proj",)}, "model.lora.targets is .'q_proj'. .* has .'down_proj', 'q_proj'."),
        ({"rslora": False}, "model.lora.rslora is False .* has True"),
        ({"train_norms": True}, "model.lora.train_norms is True"),
    ],
)
def test_a_setting_that_contradicts_the_adapter_is_refused_by_name(stock, given, message):
    with pytest.raises(ValueError, match=message):
        LoraSettings(start=str(stock[0]), **given)
    LoraSettings(start=str(stock[0]), rank=3, alpha=7, rslora=True, targets=("q_proj", "down_proj"))


@pytest.mark.parametrize(
    "values",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
        {"modules_to_save": ["lm_head"]},
        {"task_type": "SEQ_CLS"},
        {"peft_type": "IA3"},
        {"trainable_token_indices": [1]},
        {"layers_to_transform": [0]},
        {"layer_replication": [[0, 1]]},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "OLoRA"},
        {"init_lora_weights": "loftq"},
        {"fan_in_fan_out": True},
        {"use_qalora": True},
        {"target_parameters": ["mlp.experts.down_proj"]},
        {"alora_invocation_tokens": [1, 2]},
        {"a_feature_of_tomorrow": 1},
        {"r": "3"},
    ],
)
def test_an_adapter_with_more_than_plain_lora_is_refused_by_name(copy, values):
    configure(copy, **values)
    with pytest.raises(ValueError, match=next(iter(values))) as refused:
        LoraSettings(start=str(copy))
    assert len(str(refused.value).splitlines()) == 1


def _without_a_tensor(tensors: dict[str, Tensor]) -> None:
    del tensors[next(name for name in tensors if "lora_B" in name)]


def _with_another(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(2, 2)


def _of_another_shape(tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if "down_proj.lora_A" in name)
    tensors[name] = torch.zeros(3, 5)


@pytest.mark.parametrize("change", [_without_a_tensor, _with_another, _of_another_shape])
def test_tensors_that_do_not_fit_the_base_are_refused(base, copy, change):
    tensors = load_file(copy / WEIGHTS)
    change(tensors)
    save_file(tensors, copy / WEIGHTS)
    with pytest.raises(ValueError, match=r"model\.lora\.start is .*adapter"):
        policy_of(base, LoraSettings(start=str(copy)))


def test_an_adapter_of_another_base_is_refused_before_the_base_is_loaded(stock):
    start = read_start(stock[0])
    layers = len({name.split(".layers.")[1].split(".")[0] for name in start.tensors})
    hidden = next(tensor.shape[1] for name, tensor in start.tensors.items() if "q_proj.lora_A" in name)
    check_fits(start, num_layers=layers, hidden=hidden)
    with pytest.raises(ValueError, match=f"of {layers} decoder layers"):
        check_fits(start, num_layers=layers + 1, hidden=hidden)
    with pytest.raises(ValueError, match=f"of hidden size {hidden}"):
        check_fits(start, num_layers=layers, hidden=2 * hidden)


def test_a_rank_that_is_not_the_tensors_is_refused_before_the_base_is_loaded(copy):
    configure(copy, r=4)
    with pytest.raises(ValueError, match=r"lora_A.weight has the shape \[3, .*r = 4") as refused:
        LoraSettings(start=str(copy))
    assert len(str(refused.value).splitlines()) == 1


def test_a_base_of_another_name_is_told_apart_from_a_copy_of_the_adapters_base(stock):
    start = read_start(stock[0])
    assert Path(start.base).name == "tiny"
    named = start._replace(base="Qwen/Qwen2.5-7B")
    for base in ("qwen2.5-7b-nvfp4/", "RedHatAI/Qwen2.5-7B-NVFP4"):
        assert not is_of_other_base(named, base)
        assert not is_of_other_base(named, "elsewhere/a-copy", base)
    assert is_of_other_base(named, "Qwen/Qwen2.5-Coder-7B", "cache/qwen2.5-coder-7b-nvfp4")
    assert not is_of_other_base(start._replace(base=""), "a")
    of_file = start._replace(base="/cache/small-8092973499")  # the dequantised copy of small.gguf
    assert not is_of_other_base(of_file, "models/small.gguf", "/cache/small-nvfp4-4de12f7da9")


@pytest.mark.parametrize("value", [1e300, float("nan"), torch.int8, torch.complex64])
def test_tensors_that_are_no_finite_numbers_are_refused(copy, value):
    tensors = load_file(copy / WEIGHTS)
    name = next(iter(tensors))
    changed = tensors[name].to(value) if isinstance(value, torch.dtype) else tensors[name].double() + value
    tensors[name] = changed
    save_file(tensors, copy / WEIGHTS)
    with pytest.raises(ValueError, match="finite"):
        LoraSettings(start=str(copy))


def test_files_that_are_missing_damaged_or_pickles_are_refused(copy, tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        LoraSettings(start=str(tmp_path / "none"))
    (copy / WEIGHTS).write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="cannot be read"):
        LoraSettings(start=str(copy))
    (copy / WEIGHTS).rename(copy / "adapter_model.bin")
    with pytest.raises(ValueError, match="a pickle"):
        LoraSettings(start=str(copy))
    (copy / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        LoraSettings(start=str(copy))


def test_the_start_is_part_of_the_runs_identity_whatever_its_folder_is(base, stock, copy):
    saved = run_identity(base=base, lora=LoraSettings(start=str(stock[0])), seed=0)
    check_identity(saved, run_identity(base=base, lora=LoraSettings(start=str(copy)), seed=0))
    without = lora_settings(saved)  # the folder is gone: the checkpoint holds the adapter
    assert without.start is None
    check_identity(saved, run_identity(base=base, lora=without, seed=0))
    tensors = load_file(copy / WEIGHTS)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, copy / WEIGHTS)
    with pytest.raises(ValueError, match=r"model\.lora\.start"):
        check_identity(saved, run_identity(base=base, lora=LoraSettings(start=str(copy)), seed=0))
    with pytest.raises(ValueError, match=r"model\.lora\.start"):
        check_identity(run_identity(base=base, lora=without, seed=0), saved)
    assert digest(tensors) == digest(dict(reversed(tensors.items())))


def test_a_command_line_that_names_only_the_start_takes_all_else_from_it(stock):
    parser = ArgumentParser()
    parser.add_argument("--lora", type=LoraSettings, default=open_settings())
    found = [parser.instantiate(parser.parse_args(given)).lora for given in (["--lora.start", str(stock[0])], [])]
    assert found == [LoraSettings(start=str(stock[0])), LoraSettings()]
