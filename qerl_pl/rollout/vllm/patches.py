"""Run-time patches of vLLM and torch without which results would be wrong or vLLM would fail; patches that only make
vLLM faster are in ``hopper/patches.py``.

vLLM has no setting or hook for these changes, so attributes of its modules and classes are replaced in this process.
Each function is one patch: its docstring says the symptom without it, the cause, the versions that it was written for,
and the upstream issue or pull request. If the attribute to replace does not exist or has another signature than
expected, the patch raises an error that names it. ``python -m qerl_pl doctor`` prints ``PATCHES``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed as dist

from qerl_pl.rollout.vllm.replacing import replace, replace_module, replace_once, replaced


def apply_all() -> None:
    """Apply the patches that stay in force until the process ends; a second call changes nothing. The other patches of
    this module are context managers, which an engine uses. On platforms other than CPU and CUDA nothing is patched.
    Raises RuntimeError if an attribute that is to be patched is gone or has another signature."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or current_platform.is_cuda():
        adapters_in_fixed_order()
        text_models_without_torchvision()
        routers_in_fp32()
        slots_of_experts()
    if current_platform.is_cpu():
        delta_nets_in_fp32()
        experts_in_torch()


def adapters_in_fixed_order() -> None:
    """Make vLLM use this project's LoRA kernels, which sum in a fixed order.

    Symptom: on CUDA, equal calls sample different tokens; on a CPU, the adapter is also applied to tokens of requests
    without it. A decoding step also takes up to twice as long on CUDA, and on a CPU several times as long.
    Cause: on CUDA, vLLM's kernels add partial sums by atomics, in any order; they support many adapters at once and
    take several launches per linear layer.
    Versions: vLLM 0.32. Upstream: no issue known. vLLM has no setting for its LoRA kernels; a method of its platform
    returns their name.
    """
    from vllm.platforms import current_platform

    wrapper = f"qerl_pl.rollout.vllm.{'cpu' if current_platform.is_cpu() else 'cuda'}.adapter_kernels"
    if current_platform.get_punica_wrapper() != wrapper:
        replace(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: wrapper), takes=())


def delta_nets_in_fp32() -> None:
    """Make vLLM compute gated delta nets (recurrent layers of Qwen3.5) in fp32 on a CPU.

    Symptom: "CPU GDN attention requires BF16." with the first prompt in fp32.
    Cause: vLLM's CPU kernels for these layers exist in bf16 only.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    from qerl_pl.rollout.vllm.cpu_delta_net import with_fp32

    ops: Any = import_module("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    replace_once(ops, "cpu_gdn_attention_core", with_fp32, takes=("mixed_qkv", "b", "a", "core_attn_out", "layer_name"))


def experts_in_torch() -> None:
    """Make vLLM compute mixture-of-experts layers by torch on a CPU.

    Symptom: "triton.language has no attribute 'float32'" when a model with experts starts with adapters, even if only
    attention has adapters.
    Cause: with adapters, vLLM takes Triton's kernels for experts without asking whether the platform supports them.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    from qerl_pl.rollout.vllm.cpu_experts import in_torch

    methods: Any = import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    replace_once(methods, "select_unquantized_moe_backend", in_torch, takes=("moe_config",))


def routers_in_fp32() -> None:
    """Make vLLM compute the logits of the routers of mixture-of-experts layers in fp32, as the trainer does.

    Symptom: for many tokens, vLLM's routers choose other experts than the trainer's; on a CPU, vLLM's router weights
    cannot be compared with the trainer's.
    Cause: vLLM rounds the router logits of Qwen3-MoE to 16 bits. For one token in 18, the last expert that is chosen
    and the first that is not then have equal logits. On a CPU, vLLM also rearranges the weights of linear layers,
    unless they have the attribute that this patch sets.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    from qerl_pl.rollout.vllm.experts import router_in_fp32

    router: Any = import_module("vllm.model_executor.layers.fused_moe.router.gate_linear").GateLinear
    router._cpu_skip_gemm_dispatch = True
    replace_once(router, "forward", lambda _: router_in_fp32, takes=("self", "x"))


def slots_of_experts() -> None:
    """Let vLLM's adapter slots for experts have another rank than those for other linear layers.

    Symptom: the adapter slots of experts take several times the memory that the adapters need, and kernels also read
    the zeros with which the slots are padded.
    Cause: vLLM gives all slots the largest rank, and adapters on experts usually have a much smaller rank than those on
    attention.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    from qerl_pl.rollout.vllm.experts import of_own_rank

    layer: Any = import_module("vllm.lora.layers.fused_moe").FusedMoEWithLoRA
    takes = ("self", "max_loras", "lora_config", "model_config")
    replace_once(layer, "create_lora_weights", of_own_rank, takes=takes)


def text_models_without_torchvision() -> None:
    """Let vLLM import the text model of Qwen3.5 where torchvision is not installed; do nothing where it is installed.

    Symptom: "Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected", caused by a missing torchvision.
    Cause: vLLM defines the text model in one file with the vision model, which imports a function for the sizes of
    images from a module of transformers that needs torchvision; transformers has the same function in a module that
    does not need it.
    Versions: vLLM 0.32, transformers 5.16 to 5.19. Upstream: no issue known.
    """
    models = "transformers.models.qwen2_vl.image_processing"
    if find_spec("torchvision") is None:
        replace_module(f"{models}_qwen2_vl", f"{models}_pil_qwen2_vl", has={"smart_resize": ("height", "width")})


@contextmanager
def memory_of_ended_engines(pool: Any, current_usage: Callable[[], int]) -> Iterator[None]:
    """Let a vLLM engine start although memory of an ended engine is still allocated in vLLM's pool.

    Symptom: "CuMem allocator can only be used for one instance per process" when a process starts its second engine.
    Cause: before loading weights, vLLM refuses to start if any byte of its memory pool is in use.
    Versions: vLLM 0.32. Upstream: no issue known.

    Args:
        pool: vLLM's ``CuMemAllocator``.
        current_usage: replaces the pool's ``get_current_usage``, and returns the bytes that a running engine uses,
            without those of ended engines.
    """
    replace(pool, "get_current_usage", current_usage, takes=())
    try:
        yield
    finally:
        del pool.get_current_usage  # the method of the pool's class is then used again


@contextmanager
def sleep_beside_other_processes(given_back: Callable[[], int]) -> Iterator[None]:
    """Let a vLLM engine sleep while other processes take memory of the same GPU.

    Symptom: "Memory usage increased after sleeping", an AssertionError that ends the run.
    Cause: vLLM compares the free memory of the whole GPU before and after it frees its own.
    Versions: vLLM 0.32. Upstream: no issue known.

    ``given_back`` returns the bytes that vLLM's pool has given back to the GPU, which are compared instead.
    """
    plainly = torch.accelerator.get_memory_info

    def own_memory(device_index: Any = None) -> tuple[int, int]:
        return given_back(), plainly(device_index)[1]

    with replaced(torch.accelerator, "get_memory_info", own_memory, takes=("device_index",)):
        yield


@contextmanager
def decoder_classes_apart() -> Iterator[None]:
    """Make vLLM's Transformers backend, which runs a model by the code of transformers, use a subclass of the model's
    decoder class.

    Symptom: once an engine of OLMo 3 has started, the trainer's model fails: "no attribute 'do_not_compile'".
    Cause: the backend decorates the decoder class for torch.compile, and the trainer's model is an instance of the same
    class.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    base: Any = import_module("vllm.model_executor.models.transformers.base").Base
    models: Any = import_module("transformers").AutoModel._model_mapping
    decorate, added = base._decorate_cls_for_torch_compile, []

    def decorate_subclass(self: Any, cls: type, **options: Any) -> None:
        subclass = type(cls.__name__, (cls,), {"__module__": cls.__module__})
        decorate(self, subclass, **options)
        if type(self.config) not in models._extra_content:
            models._extra_content[type(self.config)] = subclass  # vLLM looks up the class of its model in this mapping
            added.append(type(self.config))

    takes = ("self", "cls", "dynamic_arg_dims", "enable_if", "is_encoder")
    with replaced(base, "_decorate_cls_for_torch_compile", decorate_subclass, takes=takes), ExitStack() as at_end:
        at_end.callback(lambda: [models._extra_content.pop(config) for config in added])
        yield


@contextmanager
def kept_process_group() -> Iterator[None]:
    """Keep torch's default process group, which belongs to the trainer, when an engine ends within this context.

    Symptom: in a run of several ranks, the first collective after an engine was closed fails.
    Cause: vLLM destroys the default process group at its end, even if it did not create it.
    Versions: vLLM 0.32. Upstream: no issue known. Other groups than the default one are destroyed as before.
    """
    destroy = dist.destroy_process_group
    others = lambda group=None: destroy(group) if group is not None else None  # noqa: E731
    with replaced(dist, "destroy_process_group", others, takes=("group",)):
        yield


PATCHES: tuple[Callable[..., Any], ...] = (
    adapters_in_fixed_order,
    delta_nets_in_fp32,
    experts_in_torch,
    routers_in_fp32,
    slots_of_experts,
    text_models_without_torchvision,
    memory_of_ended_engines,
    sleep_beside_other_processes,
    decoder_classes_apart,
    kept_process_group,
)
