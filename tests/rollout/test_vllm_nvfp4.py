"""Our decoding kernel in vLLM's linears: where it is used, and how torch.compile sees it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import Barrier, Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qerl_pl.kernels import costs, hopper, lora_hopper, nvfp4_batch, nvfp4_decode
from qerl_pl.kernels.nvfp4_decode import fragments
from qerl_pl.quant.formats import pack
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.vllm import VLLMEngine, arguments
from qerl_pl.rollout.vllm import setup as vllm_setup
from qerl_pl.rollout.vllm import worker as vllm_worker
from qerl_pl.rollout.vllm.arguments import inductor_settings, policy_arguments
from tests.kernels.nvfp4_linears import E2M1, random_linear
from tests.rollout.conftest import make_policy

pytestmark = pytest.mark.vllm
N, K = 512, 256
SHAPE, BLOCKS = {"shape_n": N, "shape_k": K}, [{"block_shape": [136, 256, 64]}, {"block_shape": [176, 256, 64]}]
CODES, SCALES = random_linear(N, K)
DENSE = E2M1[CODES.long()] * SCALES.float().repeat_interleave(16, 1) * 2**-9  # of moderate size


@dataclass
class Config:
    """What is looked at of Humming's."""

    shape_n: int = N
    shape_k: int = K
    pad_shape_n: int = 0
    pad_shape_k: int = 0
    weight_scale_group_size: int = 16
    b_dtype: Any = field(default_factory=lambda: SimpleNamespace(num_bits=4))
    input_quant_mode: Any = field(default_factory=lambda: SimpleNamespace(should_quantize=False))

    def to_str(self) -> str:
        return json.dumps({"shape_n": self.shape_n, "shape_k": self.shape_k})


class Kernel:
    """vLLM's for one linear."""

    def __init__(self, config: Config, batch_invariant: bool = False) -> None:
        self.layer_config = config
        self.compute_config = json.dumps({"use_batch_invariant": batch_invariant})
        self.locks = torch.zeros(4, dtype=torch.int32)


class Linear(nn.Module):
    """As it is after vLLM's part of the loading."""

    def __init__(self, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16, scales: int = 1) -> None:
        super().__init__()
        self.params_dtype = dtype
        self.weight, self.weight_scale = fragments(CODES, SCALES)
        self.weight_scale_2 = torch.full((scales,), 2.0**-9)
        if bias is not None:
            self.bias, self.zero_bias = bias, torch.zeros_like(bias)


def product(x: Tensor, bias: Tensor | None) -> Tensor:
    """In x's dtype."""
    return (x.float() @ DENSE.T + (0 if bias is None else bias)).to(x.dtype)


@pytest.fixture
def capable(monkeypatch) -> None:
    """A machine that has all that our kernel needs."""

    def found(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "humming" else find_spec(name)

    monkeypatch.setattr(hopper, "is_available", lambda device: True)
    monkeypatch.setattr(vllm_setup, "find_spec", found)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, int]]:
    """Which kernel served how many tokens; all multiply by the dense weight here."""
    from qerl_pl.kernels import lora
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    found: list[tuple[str, int]] = []

    def native(
        name: str,
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        global_scale: Tensor,
        bias: Tensor | None,
        schedule: Any,
        update: lora_hopper.Update | None = None,
        next_weight: Tensor | None = None,
    ) -> Tensor:
        found.append((name, len(x)))
        if next_weight is not None:
            found.append(("next", len(next_weight)))
        y = product(x, bias)
        if update is not None:
            parts = y.split([len(matrix) for matrix in update.b], dim=1)
            for part, hidden, matrix in zip(parts, update.hidden, update.b, strict=True):
                part += hidden @ matrix.T
        return y

    def shrink(x: Tensor, a: list[Tensor], indices: Tensor, schedule: lora_hopper.Schedule) -> Tensor:
        assert schedule.clusters <= -(-len(x) // schedule.tokens)
        found.append(("shrink", len(x)))
        return torch.stack([x @ matrix.T for matrix in a]) * (indices[: len(x)] >= 0).unsqueeze(1)

    def add_lora(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], indices: Tensor) -> None:
        found.append(("adapter", len(x)))
        y.copy_(lora.add_lora_reference(y, x, a, b, indices))

    def humming(
        *, inputs: Tensor, bias: Tensor | None, layer_config: str, compute_config: str, tuning_config: str, **_: Any
    ) -> Tensor:
        assert json.loads(layer_config) == SHAPE
        assert not json.loads(compute_config)["use_batch_invariant"]
        [blocks] = [blocks for first, last, blocks in json.loads(tuning_config) if first < len(inputs) <= last]
        assert blocks == BLOCKS[len(inputs) > 264]
        found.append(("humming", len(inputs)))
        return product(inputs, bias)

    def schedules(layer: dict[str, int], use_batch_invariant: bool) -> list[tuple[int, int, Any]]:
        assert layer == SHAPE
        assert not use_batch_invariant
        return [(0, 8, {"few": 1}), (8, 256, {"some": 1}), (256, 264, BLOCKS[0]), (264, 2**30, BLOCKS[1])]

    hummings = {
        "humming.kernel.humming": SimpleNamespace(HummingKernel=SimpleNamespace(prepare_kernels=lambda *_: None)),
        "humming.ops": SimpleNamespace(humming_gemm=humming),
        "humming.tune": SimpleNamespace(get_heuristics_config=schedules),
    }
    monkeypatch.setattr(vllm_nvfp4, "import_module", hummings.__getitem__)
    monkeypatch.setattr(vllm_nvfp4, "_process", lambda kernel, layer: None)
    monkeypatch.setattr(vllm_nvfp4, "_apply", lambda *_: found.append(("vllm", 0)))
    monkeypatch.setattr(vllm_nvfp4, "_apply_with_adapter", lambda *_: found.append(("vllm", 0)))
    monkeypatch.setattr(vllm_nvfp4, "add_lora", add_lora)
    monkeypatch.setattr(lora_hopper, "shrink", shrink)
    vllm_nvfp4.prepare.cache_clear()
    vllm_nvfp4.prompt_schedules.cache_clear()
    vllm_nvfp4.compiling.cache_clear()
    monkeypatch.setattr(hopper, "prepare", lambda kernels, device: found.append(("prepare", len(kernels))))
    for name, module in {"decode": nvfp4_decode, "batch": nvfp4_batch}.items():
        monkeypatch.setattr(module, f"{name}_linear", partial(native, name))
    # The operator is for CUDA; here the same function serves a CPU.
    library = torch.library.Library("qerl_pl", "IMPL")
    library.impl("nvfp4_linear", vllm_nvfp4.nvfp4_linear, "CPU")
    monkeypatch.setattr(vllm_nvfp4, "_CPU", library, raising=False)  # lives as long as the test
    return found


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_number_of_tokens_chooses_the_kernel_when_it_runs(calls, compile, with_bias):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    bias = torch.randn(N).bfloat16() if with_bias else None
    kernel, layer = Kernel(Config()), Linear(bias)
    vllm_nvfp4.process_weights_after_loading(kernel, layer)
    needed = *nvfp4_decode.kernels_for(N, K), *nvfp4_batch.kernels_for(N, K), *lora_hopper.all_kernels()
    assert calls == [("prepare", len(needed))]
    calls.clear()

    def run(x: Tensor) -> Tensor:
        return torch.relu(vllm_nvfp4.apply_weights(kernel, layer, x * 2, bias))

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compile else run
    for tokens in (8, 32, 33, 256, 257, 300):
        x = torch.randn(tokens, K).bfloat16()
        if compile:
            torch._dynamo.mark_dynamic(x, 0)  # an error if anything makes a constant of it
        assert torch.equal(function(x), torch.relu(product(2 * x, bias)))
    chosen = [("decode", 8), ("decode", 32), ("batch", 33), ("batch", 256), ("humming", 257), ("humming", 300)]
    assert calls == chosen, "compiled once, chosen each time"
    calls.clear()
    skipped = vllm_nvfp4.apply_weights(kernel, layer, x[:200].view(2, 100, K))
    assert torch.equal(skipped, product(x[:200], None).view(2, 100, N)), "without the bias, for any shape"


def test_each_linear_is_told_the_weight_after_its_own(calls):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4
    from qerl_pl.rollout.vllm.loader import tell_next_weights

    first, last = prepared(), prepared()
    tell_next_weights(nn.ModuleDict({"first": first, "without": nn.Linear(2, 2), "last": last}))
    calls.clear()

    def run(x: Tensor) -> Tensor:
        return vllm_nvfp4.call(first, x, None)[:, :1] + vllm_nvfp4.call(last, x, None)

    x = torch.randn(8, K).bfloat16()
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
    assert calls == 2 * [("decode", 8), ("next", K // 16), ("decode", 8)], "compiled or not"


@pytest.mark.parametrize("fails", [False, True])
def test_hummings_kernels_are_compiled_once_per_shape_before_they_are_called(monkeypatch, calls, fails):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    begun, may_end, given = Event(), Event(), []

    def prepare_kernels(*arguments: Any) -> None:
        given.append(arguments)
        begun.set()
        assert may_end.wait(10)
        calls.append(("compiled", 0))
        if fails:
            raise RuntimeError("no compiler")

    kernels: Any = vllm_nvfp4.import_module("humming.kernel.humming").HummingKernel
    monkeypatch.setattr(kernels, "prepare_kernels", prepare_kernels)
    layers = [prepared(), prepared()]
    assert begun.wait(10), "without being called"
    calls.clear()
    Timer(0.1, may_end.set).start()
    for layer, tokens in zip(layers, (8, 300), strict=True):
        vllm_nvfp4.apply_weights(Kernel(Config()), layer, torch.randn(tokens, K).bfloat16())
    assert calls == [("compiled", 0), ("decode", 8), ("humming", 300)], "native kernels wait, too"
    first: Any = layers[0]
    _, layer_config, compute_config, _ = first.decoding
    schedules = vllm_nvfp4.prompt_schedules(layer_config, compute_config)
    assert given == [(layer_config, compute_config, schedules, torch.device("cpu"))], "what the call will ask for"


def with_adapter(layer: Linear, rank: int, slices: tuple[int, ...] = (384, 128)) -> Any:
    """As vLLM wraps a linear; of four tokens the second and the third are without the adapter."""
    from qerl_pl.rollout.vllm.cuda import OneAdapterKernels

    wrapper: Any = object.__new__(OneAdapterKernels)
    wrapper._token_lora_indices = torch.tensor([0, -1, -1, 0]).repeat(100)
    wrapper.token_mapping_meta = SimpleNamespace(no_lora_flag_cpu=torch.tensor([False]))
    a = tuple(torch.randn(1, 1, rank, K).bfloat16() for _ in slices)
    b = tuple(torch.randn(1, 1, width, rank).bfloat16() * 0.1 for width in slices)
    return SimpleNamespace(base_layer=layer, punica_wrapper=wrapper, lora_a_stacked=a, lora_b_stacked=b)


def prepared(bias: Tensor | None = None) -> Linear:
    """A linear that has the native kernels."""
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    layer = Linear(bias)
    vllm_nvfp4.process_weights_after_loading(Kernel(Config()), layer)
    return layer


def sums(wrapped: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Base and adapter in fp64."""
    from qerl_pl.kernels.lora import add_lora_reference

    a, b = ([matrix[0, 0] for matrix in stacked] for stacked in (wrapped.lora_a_stacked, wrapped.lora_b_stacked))
    return add_lora_reference(product(x.float(), bias), x, a, b, wrapped.punica_wrapper._token_lora_indices)


def without_humming(bias: Tensor | None = None, outputs: int = N, inputs: int = K) -> tuple[Any, Linear]:
    """Kernel and linear as vLLM has them when it has read the first rows and columns of the weight."""
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig

    from qerl_pl.rollout.vllm.without_humming import WithoutHumming

    layer, kernel = Linear(), WithoutHumming(NvFp4LinearLayerConfig())
    del layer.weight_scale_2
    layer.weight = nn.Parameter(pack(CODES[:outputs, :inputs].contiguous()), requires_grad=False)
    layer.weight_scale = nn.Parameter(SCALES[:outputs, : inputs // 16].contiguous(), requires_grad=False)
    layer.weight_global_scale = nn.Parameter(torch.tensor(2.0**-9), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
    kernel.process_weights_after_loading(layer)
    return kernel, layer


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_without_humming_prompts_are_dequantised(calls, compile, with_bias):
    bias = torch.randn(N).bfloat16() if with_bias else None
    kernel, layer = without_humming(bias)
    assert torch.equal(layer.weight, fragments(CODES, SCALES)[0])
    assert torch.equal(layer.weight_scale.view(torch.uint8), fragments(CODES, SCALES)[1].view(torch.uint8))
    calls.clear()
    given = None if bias is None else layer.bias

    def run(x: Tensor) -> Tensor:
        return torch.relu(kernel.apply_weights(layer, x * 2, given))

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compile else run
    for tokens in (8, 33, 200, 257, 300):
        x = torch.randn(tokens, K).bfloat16()
        if compile:
            torch._dynamo.mark_dynamic(x, 0)
        y, order = function(x), None if bias is None else nvfp4_decode.humming_bias(bias)
        exact = torch.relu(product(2 * x.float(), bias if tokens > 256 else order))  # ``native`` adds what it is given
        assert (y - exact).abs().max() <= 2**-7 * exact.abs().max()
    assert calls == [("decode", 8), ("batch", 33), ("batch", 200)]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(320, 256), (256, 112), (8, 16)])
def test_without_humming_a_shape_that_the_native_kernels_do_not_take_is_computed(calls, outputs, inputs, compile):
    bias = torch.randn(outputs).bfloat16()
    kernel, layer = without_humming(bias, outputs, inputs)
    run: Any = partial(kernel.apply_weights, layer, bias=layer.bias)
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compile else run
    for shape in ((1, inputs), (2, 300, inputs)):
        x = torch.randn(shape).bfloat16()
        exact = x.float() @ DENSE[:outputs, :inputs].T + bias
        assert (run(x) - exact).abs().max() <= 2**-7 * exact.abs().max()
    assert calls == []


def test_prompts_are_dequantised_from_the_measured_number_of_tokens_on(calls, monkeypatch):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    layer = prepared()
    monkeypatch.setattr(costs, "DEQUANTISED_FROM", 300)
    calls.clear()
    for tokens in (257, 299, 300):
        x = torch.randn(tokens, K).bfloat16()
        exact = product(x.float(), None)
        assert (vllm_nvfp4.call(layer, x, None) - exact).abs().max() <= 2**-7 * exact.abs().max()
    assert calls == [("humming", 257), ("humming", 299)]


@pytest.mark.parametrize("fails", [False, True])
def test_linears_that_are_loaded_later_get_vllms_kernel(fails):
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4

    owners: list[Any] = [compressed_tensors_w4a4_nvfp4, modelopt]
    before = [owner.init_nvfp4_linear_kernel for owner in owners]
    with suppress(KeyError), arguments.without_humming():
        scheme = compressed_tensors_w4a4_nvfp4.CompressedTensorsW4A4Fp4(use_a16=True)
        assert type(scheme.kernel).__name__ == "WithoutHumming"
        assert type(owners[1].init_nvfp4_linear_kernel(use_a16=True)).__name__ == "WithoutHumming"
        if fails:
            raise KeyError
    assert [owner.init_nvfp4_linear_kernel for owner in owners] == before


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_an_adapter_is_added_by_the_bases_kernel_where_it_can(calls, compile, with_bias):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    bias = torch.randn(N).bfloat16() if with_bias else None
    wrapped = with_adapter(prepared(bias), rank=16)
    calls.clear()

    def run(x: Tensor) -> Tensor:
        return vllm_nvfp4.apply_with_adapter(wrapped, x, bias)

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compile else run
    for tokens in (8, 64, 65, 257):
        x = torch.randn(tokens, K).bfloat16()
        if compile:
            torch._dynamo.mark_dynamic(x, 0)
        exact = sums(wrapped, x, bias)
        assert (function(x) - exact).abs().max() <= 2**-6 * exact.abs().max()
    together = [("shrink", 8), ("decode", 8), ("shrink", 64), ("batch", 64), ("shrink", 65), ("batch", 65)]
    assert calls == [*together, ("humming", 257), ("adapter", 257)]
    calls.clear()
    wrapped.punica_wrapper.token_mapping_meta.no_lora_flag_cpu.fill_(True)
    assert torch.equal(function(x), product(x, bias))
    assert calls == [("humming", 257)], "no request has the adapter"


@pytest.mark.parametrize(("rank", "slices"), [(72, (384, 128)), (4, (N,)), (16, (480, 32))])
def test_an_adapter_that_does_not_fit_in_is_added_afterwards(calls, rank, slices):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    wrapped, x = with_adapter(prepared(), rank, slices), torch.randn(2, 3, K).bfloat16()
    calls.clear()
    y = vllm_nvfp4.apply_with_adapter(wrapped, x)
    exact = sums(wrapped, x.view(6, K), None).view(2, 3, N)
    assert (y - exact).abs().max() <= 2**-6 * exact.abs().max()
    assert calls == [("decode", 6), ("adapter", 6)]


@pytest.mark.parametrize(
    ("rank", "slices", "late", "fewest"),
    [(16, (384, 128), 9.0, 257), (16, (384, 128), 0.0, 65), (72, (384, 128), 9.0, 1), (4, (N,), 9.0, 1)],
)
def test_where_an_adapter_is_added_apart_from_the_base_is_known_beforehand(
    calls, monkeypatch, rank, slices, late, fewest
):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    monkeypatch.setattr(costs, "TOO_LATE", late)
    wrapped = with_adapter(prepared(), rank, slices)
    assert vllm_nvfp4.fewest_unfused(wrapped) == fewest
    for tokens in (1, 33, 64, 65, 100, 256, 257):
        calls.clear()
        vllm_nvfp4.apply_with_adapter(wrapped, torch.zeros(tokens, K).bfloat16())
        assert (("adapter", tokens) in calls) == (tokens >= fewest)


def test_an_engine_compiles_for_each_kind_of_linear_what_it_needs(calls, monkeypatch):
    from qerl_pl.rollout.vllm import cuda as vllm_cuda

    ours, another, dense = (with_adapter(linear, rank=16) for linear in (prepared(), prepared(), Linear()))
    large, stock = with_adapter(prepared(), rank=72), with_adapter(Linear(), rank=16)
    stock.punica_wrapper = object()
    modules = dict(enumerate((ours, another, dense, large, stock)))
    manager = SimpleNamespace(_adapter_manager=SimpleNamespace(modules=modules))
    compiled = []
    together = Barrier(3, timeout=20)

    def compile_kernels(a: tuple[Tensor, ...], b: tuple[Tensor, ...], fewest: int) -> None:
        together.wait()
        compiled.append((len(a[0][0, 0]), fewest))

    monkeypatch.setattr(vllm_cuda, "compile_kernels", compile_kernels)
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    vllm_worker.compile_adapter_kernels(worker)
    assert sorted(compiled) == [(16, 1), (16, 257), (72, 1)]
    modules.clear()
    vllm_worker.compile_adapter_kernels(worker)


def test_adapters_that_vllms_kernels_add_stay_vllms(calls):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    wrapped = with_adapter(prepared(), rank=16)
    calls.clear()
    wrapped.punica_wrapper = object()
    vllm_nvfp4.apply_with_adapter(wrapped, torch.zeros(3, K))
    vllm_nvfp4.apply_with_adapter(with_adapter(Linear(), rank=16), torch.zeros(3, K))
    assert calls == [("vllm", 0)] * 2, "another wrapper; a linear that is not ours"


@pytest.mark.parametrize(
    ("config", "layer", "invariant"),
    [
        (Config(pad_shape_n=64), {}, False),
        (Config(pad_shape_k=32), {}, False),
        (Config(weight_scale_group_size=32), {}, False),
        (Config(b_dtype=SimpleNamespace(num_bits=8)), {}, False),
        (Config(input_quant_mode=SimpleNamespace(should_quantize=True)), {}, False),
        (Config(), {"dtype": torch.float16}, False),
        (Config(), {"scales": 2}, False),
        (Config(), {}, True),
    ],
)
def test_linears_of_another_kind_stay_vllms(calls, config, layer, invariant):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    linear, kernel = Linear(**layer), Kernel(config, invariant)
    vllm_nvfp4.process_weights_after_loading(kernel, linear)
    vllm_nvfp4.apply_weights(kernel, linear, torch.zeros(3, K))
    assert calls == [("vllm", 0)]


@pytest.mark.parametrize("fails", [False, True])
def test_linears_that_are_loaded_later_get_hummings(monkeypatch, calls, capable, checkpoints, fails):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    vllms: Any = import_module("vllm.model_executor.kernels.linear.nvfp4.humming").HummingNvFp4LinearKernel
    before = vllms.process_weights_after_loading
    monkeypatch.setattr(vllm_nvfp4, "_process", before)
    monkeypatch.setattr(vllms, "apply_weights", vllms.apply_weights)  # put back after the test
    lora: Any = import_module("vllm.lora.layers.base_linear").BaseLinearLayerWithLoRA
    monkeypatch.setattr(lora, "_apply_sync", lora._apply_sync)
    with suppress(KeyError), vllm_nvfp4.for_linears_of(make_policy(checkpoints["nvfp4"]), torch.bfloat16):
        assert vllms.process_weights_after_loading is vllm_nvfp4.process_weights_after_loading
        if fails:
            raise KeyError
    assert vllms.process_weights_after_loading is before
    vllms.apply_weights(Kernel(Config()), Linear(), torch.zeros(3, K))
    assert lora._apply_sync is vllm_nvfp4.apply_with_adapter
    lora._apply_sync(with_adapter(Linear(), rank=16), torch.zeros(3, K))
    assert calls == [("vllm", 0)] * 2


def test_an_engine_has_our_kernel_where_it_can_run(capable, monkeypatch, caplog):
    def chosen(fmt: Any = NVFP4, dtype: torch.dtype = torch.bfloat16) -> str:
        return vllm_setup.decoding_kernel(VLLMEngine().decoding_kernel, fmt, dtype)

    assert chosen() == "native"
    with caplog.at_level(logging.INFO):
        vllm_setup.log_decoding_lacks(torch.bfloat16)
    assert not caplog.text
    assert chosen(fmt=None) == chosen(fmt=NF4) == chosen(dtype=torch.float32) == "humming"
    assert vllm_setup.decoding_kernel("humming", NVFP4, torch.bfloat16) == "humming"
    assert [vllm_setup.prompt_kernel(deterministic=yes) for yes in (False, True)] == ["humming", "dequantised"]
    assert VLLMEngine(deterministic=True).memory.dequantises
    assert not VLLMEngine().memory.dequantises
    monkeypatch.setattr(vllm_setup, "find_spec", lambda name: None if name == "humming" else find_spec(name))
    assert chosen() == "native"
    assert vllm_setup.prompt_kernel(deterministic=False) == "dequantised"
    assert VLLMEngine().memory.dequantises
    assert not VLLMEngine(decoding_kernel="humming").memory.dequantises
    monkeypatch.setattr(hopper, "is_available", lambda device: False)
    assert chosen() == "humming"


MISSING = {"vllm": "a vLLM that has Humming's", "cuda.bindings": "nvidia-cuda-nvrtc"}


@pytest.mark.parametrize("package", MISSING)
def test_a_package_that_is_missing_is_named(capable, monkeypatch, caplog, checkpoints, package):
    from qerl_pl.rollout.vllm import nvfp4 as vllm_nvfp4

    found = vllm_setup.find_spec
    for module in (vllm_setup, hopper):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else found(name))
    assert vllm_setup.decoding_kernel("auto", NVFP4, torch.bfloat16) == "humming"
    with caplog.at_level(logging.INFO):
        vllm_setup.log_decoding_lacks(torch.bfloat16)
    assert MISSING[package] in caplog.text
    before = vllm_nvfp4.HummingNvFp4LinearKernel.apply_weights
    ours = vllm_nvfp4.for_linears_of(make_policy(checkpoints["nvfp4"]), torch.bfloat16)
    with pytest.raises(ValueError, match=MISSING[package]), ours:
        pass
    assert vllm_nvfp4.HummingNvFp4LinearKernel.apply_weights is before


def test_an_engine_that_cannot_be_deterministic_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="deterministic is true and decoding_kernel 'humming'"):
        VLLMEngine(deterministic=True, decoding_kernel="humming")
    monkeypatch.setattr(vllm_setup, "lacks", lambda fmt: fmt is NF4)  # as on a GPU
    with pytest.raises(ValueError, match=r"this nvfp4 base.*need a Hopper GPU"):
        vllm_setup.check_deterministic(NVFP4, torch.bfloat16, "humming")
    with pytest.raises(ValueError, match=r"this mxfp4 base.*need .*a base in NVFP4"):
        vllm_setup.check_deterministic(MXFP4, torch.bfloat16, "humming")
    vllm_setup.check_deterministic(None, torch.bfloat16, "humming")
    vllm_setup.check_deterministic(NF4, torch.bfloat16, "humming")
    vllm_setup.check_deterministic(NVFP4, torch.bfloat16, "native")


@pytest.mark.slow
def test_to_choose_a_kernel_imports_nothing_of_vllm():
    choice = "vllm_setup.decoding_kernel('auto', NVFP4, torch.bfloat16)"
    imports = (
        "import sys, torch; from qerl_pl.quant.nvfp4 import NVFP4; from qerl_pl.rollout.vllm import setup as vllm_setup"
    )
    subprocess.run([sys.executable, "-c", f"{imports}; {choice}; assert 'vllm' not in sys.modules"], check=True)


def test_a_graph_compiled_for_one_kernel_is_not_taken_for_the_other(checkpoints):
    from vllm.config import VllmConfig

    policy = make_policy(checkpoints["nvfp4"])
    keys = set()
    for kernel in ("native", "humming"):
        arguments = policy_arguments(policy, dtype=torch.bfloat16, max_model_len=64, decoding_kernel=kernel)
        keys.add(VllmConfig(additional_config=arguments["additional_config"]).compute_hash())
    assert len(keys) == 2


def test_kernels_of_a_deterministic_engine_are_not_chosen_by_their_speed():
    from torch._inductor import config
    from vllm.config import CompilationConfig, VllmConfig

    assert inductor_settings("humming", deterministic=False) == {}
    assert inductor_settings("native", deterministic=True) == {"triton.enable_pdl": True, "deterministic": True}
    keys = set()
    for deterministic in (False, True):
        settings = inductor_settings("native", deterministic=deterministic)
        assert settings.keys() <= config.get_config_copy().keys(), "Inductor has no such setting"
        compiled = CompilationConfig(inductor_compile_config=settings)
        keys.add(VllmConfig(compilation_config=compiled).compute_hash())
    assert len(keys) == 2, "a graph of the one is not taken for the other"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_asking_for_it_where_it_cannot_run_is_an_error_before_anything_is_loaded(checkpoints):
    policy = make_policy(checkpoints["dense"])
    with pytest.raises(
        ValueError, match=r"decoding_kernel is 'native', which needs a Hopper GPU .* and a base in NVFP4"
    ):
        VLLMEngine(decoding_kernel="native").start(policy, max_model_len=64)
