"""NVFP4 linear layers of vLLM that this project's CUDA kernels compute: for which layers the kernels are used, and how
torch.compile treats them."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl import hopper, native
from qerl_pl.hopper import driver, engine, lora_hopper, nvfp4_batch, nvfp4_decode
from qerl_pl.quant.formats import pack
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.rollout.vllm import setup as vllm_setup
from qerl_pl.rollout.vllm.arguments import inductor_settings, policy_arguments
from tests.hopper.nvfp4_linears import E2M1, random_linear
from tests.reference.fragments import fragments
from tests.reference.lora import add_lora_reference
from tests.rollout.conftest import make_policy

pytestmark = pytest.mark.vllm
N, K = 512, 256
CODES, SCALES = random_linear(N, K)
DENSE = E2M1[CODES.long()] * SCALES.float().repeat_interleave(16, 1) * 2**-9  # of moderate size


class Linear(nn.Module):
    """Imitates a linear layer of vLLM after its weight was read from a checkpoint and before it is converted. The
    weight is the first ``outputs`` rows and ``inputs`` columns of the random NVFP4 weight ``CODES`` and ``SCALES``."""

    def __init__(self, bias: Tensor | None = None, outputs: int = N, inputs: int = K) -> None:
        super().__init__()
        self.weight = nn.Parameter(pack(CODES[:outputs, :inputs].contiguous()), requires_grad=False)
        self.weight_scale = nn.Parameter(SCALES[:outputs, : inputs // 16].contiguous(), requires_grad=False)
        self.weight_global_scale = nn.Parameter(torch.tensor(2.0**-9), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)


def prepared(bias: Tensor | None = None, outputs: int = N, inputs: int = K, device: str = "cpu") -> tuple[Any, Any]:
    """Return this project's ``NativeLinear``, the object through which vLLM calls the kernels, and a linear layer whose
    weight this object has converted."""
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig

    from qerl_pl.hopper.native_linear import NativeLinear

    kernel, layer = NativeLinear(NvFp4LinearLayerConfig()), Linear(bias, outputs, inputs).to(device)
    kernel.process_weights_after_loading(layer)
    return kernel, layer


def in_order_of(tokens: int, bias: Tensor | None) -> Tensor | None:
    """Return the bias [N] in the order that a product of ``tokens`` tokens expects. This project's CUDA kernels take it
    in tile order; more tokens than they accept are multiplied by a dense weight, with the bias unchanged."""
    return bias if bias is None or tokens > nvfp4_batch.MOST_TOKENS else nvfp4_decode.humming_bias(bias)


def product(x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x by the dense weight; the result has x's dtype."""
    return (x.float() @ DENSE.T.to(x.device) + (0 if bias is None else bias)).to(x.dtype)


def silu_and_mul(y: Tensor) -> Tensor:
    """Compute silu(gate) * up; ``y`` has gate and up next to each other."""
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


@pytest.fixture
def capable(monkeypatch) -> None:
    """Imitate a machine that has everything that this project's kernels need."""

    monkeypatch.setattr(driver, "is_available", lambda device: True)
    monkeypatch.setattr(native, "why_off", lambda: None)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, int]]:
    """Replace this project's CUDA kernels by products with the dense weight, so that these tests run without a GPU.
    Returns a list to which each call adds the kernel's name and the number of tokens."""
    from qerl_pl.hopper import native_linear

    found: list[tuple[str, int]] = []

    def native(
        name: str,
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        global_scale: Tensor,
        bias: Tensor | None,
        schedule: Any,
        out: Tensor | None = None,
        update: lora_hopper.Update | None = None,
        adapter: lora_hopper.Adapter | None = None,
        next_weight: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        found.append((name, len(x)))
        if next_weight is not None:
            found.append(("next", len(next_weight)))
        y = product(x, bias)
        if update is not None:
            parts = y.split([len(matrix) for matrix in update.b], dim=1)
            for part, hidden, matrix in zip(parts, update.hidden, update.b, strict=True):
                part += hidden @ matrix.T
        if adapter is not None:
            found.append(("with adapter", len(x)))
            y = add_lora_reference(y, x, *adapter)
        if gated:
            found.append(("gated", len(x)))
            y = silu_and_mul(y)
        return y if out is None else out.copy_(y)

    def shrink(x: Tensor, a: list[Tensor], indices: Tensor, schedule: lora_hopper.Schedule) -> Tensor:
        assert schedule.clusters <= -(-len(x) // schedule.tokens)
        found.append(("shrink", len(x)))
        return torch.stack([x @ matrix.T for matrix in a]) * (indices[: len(x)] >= 0).unsqueeze(1)

    def add_lora(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], indices: Tensor) -> None:
        found.append(("adapter", len(x)))
        y.copy_(add_lora_reference(y, x, a, b, indices))

    monkeypatch.setattr(native_linear, "_apply_with_adapter", lambda *_: found.append(("vllm", 0)))
    monkeypatch.setattr(native_linear, "add_lora", add_lora)
    monkeypatch.setattr(lora_hopper, "shrink", shrink)
    native_linear.prepare.cache_clear()
    monkeypatch.setattr(driver, "prepare", lambda kernels, device: found.append(("prepare", len(kernels))))
    for name, module in {"decode": nvfp4_decode, "batch": nvfp4_batch}.items():
        monkeypatch.setattr(module, f"{name}_linear", partial(native, name))
    # The operator is for CUDA; here the same function serves a CPU.
    library = torch.library.Library("qerl_pl", "IMPL")
    library.impl("nvfp4_linear", native_linear.nvfp4_linear, "CPU")
    monkeypatch.setattr(native_linear, "_CPU", library, raising=False)  # lives as long as the test
    return found


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_number_of_tokens_chooses_the_kernel_when_it_runs(calls, compile, with_bias):
    bias = torch.randn(N).bfloat16() if with_bias else None
    kernel, layer = prepared(bias)
    needed = *nvfp4_decode.kernels_for(N, K), *nvfp4_batch.kernels_for(N, K), *lora_hopper.all_kernels()
    assert calls == [("prepare", len(needed))]
    assert torch.equal(layer.weight, fragments(CODES, SCALES)[0])
    assert torch.equal(layer.weight_scale.view(torch.uint8), fragments(CODES, SCALES)[1].view(torch.uint8))
    calls.clear()

    def run(x: Tensor) -> Tensor:
        return torch.relu(kernel.apply_weights(layer, x * 2, layer.bias))

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compile else run
    for tokens in (8, 32, 33, 200, 256, 257, 512, 2048, 2049):
        x = torch.randn(tokens, K).bfloat16()
        if compile:
            torch._dynamo.mark_dynamic(x, 0)  # an error if anything makes a constant of it
        y, exact = function(x), torch.relu(product(2 * x.float(), in_order_of(tokens, bias)))
        assert (y - exact).abs().max() <= 2**-7 * exact.abs().max()
    chosen = [("decode", 8), ("decode", 32), *(("batch", tokens) for tokens in (33, 200, 256, 257, 512, 2048))]
    assert calls == chosen, "compiled once, chosen each time; with more tokens the weight is dequantised"
    calls.clear()
    skipped = kernel.apply_weights(layer, x[:200].view(2, 100, K))
    assert torch.equal(skipped, product(x[:200], None).view(2, 100, N)), "without the bias, for any shape"


def test_each_linear_is_told_the_weight_after_its_own(calls):
    from qerl_pl.hopper import native_linear
    from qerl_pl.hopper.one_copy import tell_next_weights

    (_, first), (_, last) = prepared(), prepared()
    tell_next_weights(nn.ModuleDict({"first": first, "without": nn.Linear(2, 2), "last": last}))
    calls.clear()

    def run(x: Tensor) -> Tensor:
        return native_linear.call(first, x, None)[:, :1] + native_linear.call(last, x, None)

    x = torch.randn(8, K).bfloat16()
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
    assert calls == 2 * [("decode", 8), ("next", K // 16), ("decode", 8)], "compiled or not"
    assert {name for name, _ in first.named_parameters()} == {"weight", "weight_scale", "weight_scale_2"}


@pytest.mark.parametrize(
    ("rank", "compile"),
    [(0, False), (16, True), (72, False)]
    + [pytest.param(rank, compile, marks=pytest.mark.long) for rank, compile in ((0, True), (16, False), (72, True))],
)
def test_a_gated_linear_returns_silu_of_gate_times_up_for_any_number_of_tokens(calls, compile, rank):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul

    from qerl_pl.hopper import native_linear
    from qerl_pl.hopper.one_copy import move_activations

    mlp: Any = nn.Module()
    _, layer = prepared()
    with set_current_vllm_config(VllmConfig()):
        mlp.gate_up_proj, mlp.act_fn = layer, SiluAndMul()
    move_activations(mlp)
    assert isinstance(mlp.act_fn, nn.Identity)
    wrapped = with_adapter(layer, rank or 8, (N // 2, N // 2))

    def run(x: Tensor) -> Tensor:
        return mlp.act_fn(native_linear.apply_with_adapter(wrapped, x) if rank else native_linear.call(layer, x, None))

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compile else run
    for tokens in (8, 33, 257, 2049):
        calls.clear()
        x = torch.randn(tokens, K).bfloat16()
        if compile:
            torch._dynamo.mark_dynamic(x, 0)
        y, whole = function(x), sums(wrapped, x, None) if rank else product(x.float(), None)
        exact = silu_and_mul(whole.float())
        assert y.shape == (tokens, N // 2)
        assert (y - exact).abs().max() <= 2**-6 * exact.abs().max()
        assert (("gated", tokens) in calls) == (tokens == 8 and rank < 72), (
            "by the decode GEMM, if it takes the adapter"
        )


@pytest.mark.parametrize("kind", ["not native", "with a bias", "another function"])
def test_other_activations_stay_where_they_are(calls, kind):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

    from qerl_pl.hopper.one_copy import move_activations

    (_, layer), mlp = prepared(torch.randn(N).bfloat16() if kind == "with a bias" else None), nn.Module()
    if kind == "not native":
        del layer.native
    with set_current_vllm_config(VllmConfig()):
        mlp.gate_up_proj, mlp.act_fn = layer, GeluAndMul() if kind == "another function" else SiluAndMul()
    kept = mlp.act_fn
    move_activations(mlp)
    assert mlp.act_fn is kept
    assert not getattr(layer, "native", (None, False))[1]


def with_adapter(layer: Linear, rank: int, slices: tuple[int, ...] = (384, 128), device: str = "cpu") -> Any:
    """Wrap a linear layer as vLLM does for LoRA, with random A and B for each slice of the output. Of every four
    tokens, the second and the third do not use the adapter."""
    from qerl_pl.rollout.vllm.cuda import OneAdapterKernels

    wrapper: Any = object.__new__(OneAdapterKernels)
    wrapper._token_lora_indices = torch.tensor([0, -1, -1, 0], device=device).repeat(600)
    wrapper.token_mapping_meta = SimpleNamespace(no_lora_flag_cpu=torch.tensor([False]))
    a = tuple(torch.randn(1, 1, rank, K, device=device).bfloat16() for _ in slices)
    b = tuple(torch.randn(1, 1, width, rank, device=device).bfloat16() * 0.1 for width in slices)
    return SimpleNamespace(base_layer=layer, punica_wrapper=wrapper, lora_a_stacked=a, lora_b_stacked=b)


def sums(wrapped: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the output of base and adapter in fp64."""

    a, b = ([matrix[0, 0] for matrix in stacked] for stacked in (wrapped.lora_a_stacked, wrapped.lora_b_stacked))
    return add_lora_reference(product(x.float(), bias), x, a, b, wrapped.punica_wrapper._token_lora_indices)


@pytest.mark.parametrize(
    ("outputs", "inputs", "compile"),
    [(288, 256, False), (256, 112, True), (8, 16, False)]
    + [pytest.param(*case, marks=pytest.mark.long) for case in ((288, 256, True), (256, 112, False), (8, 16, True))],
)
def test_a_shape_that_the_native_kernels_do_not_take_is_dequantised(calls, outputs, inputs, compile):
    bias = torch.randn(outputs).bfloat16()
    kernel, layer = prepared(bias, outputs, inputs)
    assert not hasattr(layer, "native")
    run: Any = partial(kernel.apply_weights, layer, bias=layer.bias)
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compile else run
    for shape in ((1, inputs), (2, 300, inputs)):
        x = torch.randn(shape).bfloat16()
        exact = x.float() @ DENSE[:outputs, :inputs].T + bias
        assert (run(x) - exact).abs().max() <= 2**-7 * exact.abs().max()
    assert calls == []


@pytest.mark.parametrize("fails", [False, True])
def test_linears_that_are_loaded_later_get_vllms_kernel(calls, capable, monkeypatch, checkpoints, fails):
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4

    from qerl_pl.hopper import native_linear

    owners: list[Any] = [compressed_tensors_w4a4_nvfp4, modelopt]
    before = [owner.init_nvfp4_linear_kernel for owner in owners]
    lora: Any = BaseLinearLayerWithLoRA
    monkeypatch.setattr(lora, "_apply_sync", lora._apply_sync)  # put back after the test
    compiling = []
    monkeypatch.setattr(driver, "start_compiling", compiling.append)
    with suppress(KeyError), engine.loading(make_policy(checkpoints["nvfp4"])):
        scheme = compressed_tensors_w4a4_nvfp4.CompressedTensorsW4A4Fp4(use_a16=True)
        assert isinstance(scheme.kernel, native_linear.NativeLinear)
        assert isinstance(owners[1].init_nvfp4_linear_kernel(use_a16=True), native_linear.NativeLinear)
        if fails:
            raise KeyError
    assert compiling, "before vLLM has loaded"
    assert [owner.init_nvfp4_linear_kernel for owner in owners] == before
    assert lora._apply_sync is native_linear.apply_with_adapter
    lora._apply_sync(with_adapter(Linear(), rank=16), torch.zeros(3, K))
    assert calls == [("vllm", 0)]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_an_adapter_is_added_by_the_bases_kernel_where_it_can(calls, compile, with_bias):
    from qerl_pl.hopper import native_linear

    bias = torch.randn(N).bfloat16() if with_bias else None
    wrapped = with_adapter(prepared(bias)[1], rank=16)
    calls.clear()

    def run(x: Tensor) -> Tensor:
        return native_linear.apply_with_adapter(wrapped, x, wrapped.base_layer.bias)

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compile else run
    for tokens in (8, 64, 65, 257):
        x = torch.randn(tokens, K).bfloat16()
        if compile:
            torch._dynamo.mark_dynamic(x, 0)
        exact = sums(wrapped, x, in_order_of(tokens, bias))
        assert (function(x) - exact).abs().max() <= 2**-6 * exact.abs().max()
    together = [("decode", 8), ("with adapter", 8), ("shrink", 64), ("batch", 64), ("shrink", 65), ("batch", 65)]
    assert calls == [*together, ("batch", 257), ("adapter", 257)]
    calls.clear()
    wrapped.punica_wrapper.token_mapping_meta.no_lora_flag_cpu.fill_(True)
    exact = product(x.float(), in_order_of(tokens, bias))
    assert (function(x) - exact).abs().max() <= 2**-7 * exact.abs().max()
    assert calls == [("batch", 257)], "no request has the adapter"


@pytest.mark.gpu
@pytest.mark.skipif(not driver.is_available(torch.device("cuda", 0)), reason="needs Hopper")
@pytest.mark.parametrize("tokens", [1, 33, 65, 256, 257, 300, 512, 2048, 2049])
def test_on_hopper_any_number_of_tokens_gets_base_and_adapter(tokens):
    from qerl_pl.hopper import native_linear

    bias = torch.randn(N, device="cuda").bfloat16()
    kernel, layer = prepared(bias, device="cuda")
    wrapped, x = with_adapter(layer, rank=16, device="cuda"), torch.randn(tokens, K, device="cuda").bfloat16()
    exact = product(x.float(), bias)
    assert (kernel.apply_weights(layer, x, layer.bias) - exact).abs().max() <= 2**-7 * exact.abs().max()
    exact = sums(wrapped, x, bias)
    found, again = (native_linear.apply_with_adapter(wrapped, x, layer.bias) for _ in range(2))
    assert (found - exact).abs().max() <= 2**-6 * exact.abs().max()
    assert torch.equal(found, again), "sums have a fixed order"


@pytest.mark.parametrize(("rank", "slices"), [(72, (384, 128)), (4, (N,)), (16, (480, 32))])
def test_an_adapter_that_does_not_fit_in_is_added_afterwards(calls, rank, slices):
    from qerl_pl.hopper import native_linear

    wrapped, x = with_adapter(prepared()[1], rank, slices), torch.randn(2, 3, K).bfloat16()
    calls.clear()
    y = native_linear.apply_with_adapter(wrapped, x)
    exact = sums(wrapped, x.view(6, K), None).view(2, 3, N)
    assert (y - exact).abs().max() <= 2**-6 * exact.abs().max()
    assert calls == [("decode", 6), ("adapter", 6)]


def test_adapters_that_vllms_kernels_add_stay_vllms(calls):
    from qerl_pl.hopper import native_linear

    wrapped = with_adapter(prepared()[1], rank=16)
    calls.clear()
    wrapped.punica_wrapper = object()
    native_linear.apply_with_adapter(wrapped, torch.zeros(3, K))
    native_linear.apply_with_adapter(with_adapter(Linear(), rank=16), torch.zeros(3, K))
    assert calls == [("vllm", 0)] * 2, "another wrapper; a linear that is not ours"


def test_an_engine_has_our_kernel_where_it_can_run(capable, monkeypatch, caplog):
    def chosen(fmt: Any = NVFP4, dtype: torch.dtype = torch.bfloat16) -> str:
        return vllm_setup.decoding_kernel(VLLMEngine().decoding_kernel, fmt, dtype)

    assert chosen() == "native"
    with caplog.at_level(logging.INFO):
        vllm_setup.log_any_order(NVFP4, torch.bfloat16, "native")
    assert not caplog.text
    assert chosen(fmt=None) == chosen(fmt=NF4) == chosen(dtype=torch.float32) == "humming"
    assert vllm_setup.decoding_kernel("humming", NVFP4, torch.bfloat16) == "humming"
    assert VLLMEngine().memory.dequantises
    assert not VLLMEngine(decoding_kernel="humming").memory.dequantises
    monkeypatch.setattr(driver, "is_available", lambda device: False)
    assert chosen() == "humming"


MISSING = {"vllm": "a vLLM with NVFP4 linears", "cuda.bindings": "nvidia-cuda-nvrtc"}


@pytest.mark.parametrize("package", MISSING)
def test_a_package_that_is_missing_is_named(capable, monkeypatch, caplog, package):
    for module in (hopper, driver):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else find_spec(name))
    assert vllm_setup.decoding_kernel("auto", NVFP4, torch.bfloat16) == "humming"
    with caplog.at_level(logging.INFO):
        vllm_setup.log_any_order(NVFP4, torch.bfloat16, "humming")
    assert MISSING[package] in caplog.text
    with pytest.raises(ValueError, match=MISSING[package]):
        vllm_setup.check_kernel("native", NVFP4, torch.bfloat16)


def test_an_engine_whose_results_may_differ_between_equal_calls_says_why(capable, monkeypatch, caplog):
    def said(fmt: Any, kernel: Any, dtype: torch.dtype = torch.bfloat16) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            vllm_setup.log_any_order(fmt, dtype, kernel)
        return caplog.text

    monkeypatch.setattr(vllm_setup, "lacks", lambda fmt: fmt is NF4)  # as on a GPU
    assert not said(None, "humming")
    assert not said(NF4, "humming")
    assert not said(NVFP4, "native")
    assert "run if decoding_kernel is 'auto'" in said(NVFP4, "humming")
    assert re.search(r"this nvfp4 base.*need bfloat16", said(NVFP4, "humming", torch.float32))
    assert re.search(r"this mxfp4 base.*need a base in NVFP4", said(MXFP4, "humming"))
    monkeypatch.setattr(driver, "is_available", lambda device: False)
    assert re.search(r"this nvfp4 base.*need a Hopper GPU", said(NVFP4, "humming"))


def test_a_graph_compiled_for_one_kernel_is_not_taken_for_the_other(checkpoints):
    from vllm.config import VllmConfig

    policy = make_policy(checkpoints["nvfp4"])
    keys = set()
    for kernel in ("native", "humming"):
        arguments = policy_arguments(policy, dtype=torch.bfloat16, max_model_len=64, decoding_kernel=kernel)
        keys.add(VllmConfig(additional_config=arguments["additional_config"]).compute_hash())
    assert len(keys) == 2


def test_compiled_kernels_are_not_chosen_by_their_speed():
    from torch._inductor import config
    from vllm.config import CompilationConfig, VllmConfig

    plain, overlapping = {"deterministic": True}, {"triton.enable_pdl": True, "deterministic": True}
    assert inductor_settings("humming", recurrent=False) == inductor_settings("humming", recurrent=True) == plain
    assert inductor_settings("native", recurrent=False) == overlapping
    assert inductor_settings("native", recurrent=True) == plain, "Inductor's fills wait for no kernel"
    keys = set()
    for settings in ({}, plain, overlapping):
        assert settings.keys() <= config.get_config_copy().keys(), "Inductor has no such setting"
        compiled = CompilationConfig(inductor_compile_config={**settings})
        keys.add(VllmConfig(compilation_config=compiled).compute_hash())
    assert len(keys) == 3, "a graph of the one is not taken for the other"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_asking_for_it_where_it_cannot_run_is_an_error_before_anything_is_loaded(checkpoints):
    policy = make_policy(checkpoints["dense"])
    with pytest.raises(
        ValueError, match=r"decoding_kernel is 'native', which needs a Hopper GPU .* and a base in NVFP4"
    ):
        VLLMEngine(decoding_kernel="native").start(policy, max_model_len=64)
