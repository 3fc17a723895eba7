"""Model loader for vLLM that shares memory with the trainer where possible, and gives vLLM the trainer's weights
dequantised if vLLM has no kernels for their 4-bit format. All other parameters are read from the checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from qerl_pl.model.family import FAMILIES
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.rollout.vllm import base_weights, norms
from qerl_pl.rollout.vllm.routes import RouteRecorder

LOAD_FORMAT = "with_trainer"
MATRICES = ".weight_packed", ".weight", ".weight_scale"
"""Endings of the names of a linear layer's NVFP4 codes and block scales in checkpoints of compressed-tensors and
ModelOpt."""


def register_loader(
    shared: Mapping[str, Tensor],
    unpacked: Mapping[str, FrozenLinear],
    packed: Mapping[str, FrozenLinear],
    hooks: Any = None,
    recorder: RouteRecorder | None = None,
) -> str:
    """Register a model loader with vLLM, and return the value of vLLM's ``load_format`` that selects it.

    Args:
        shared: the trainer's tensors that vLLM is to use, by the model's names (``model.embed_tokens.weight``). Their
            memory must not move while the engine runs. Tensors whose shape, dtype or device differs from vLLM's
            parameter are not shared, for example because vLLM pads vocabularies to a multiple of 64.
        unpacked: the trainer's linear layers with 4-bit weights, by name, that vLLM is to hold dequantised.
        packed: the trainer's other linear layers with 4-bit weights, by name, which vLLM is to hold in 4 bits, too. The
            weights that vLLM reads for them are compared with the trainer's.
        hooks: the module ``hopper.one_copy``, whose functions let vLLM use the trainer's memory for ``packed``; None if
            this project's CUDA kernels do not compute these layers.
        recorder: records the experts that vLLM's routers choose; None if they are not needed.
    """

    class WithTrainerLoader(DefaultModelLoader):
        def __init__(self, load_config: LoadConfig) -> None:
            super().__init__(replace(load_config, load_format="safetensors"))
            self._unread: dict[str, list[str]] = {}

        def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
            waiting = dict(unpacked)
            self._unread = hooks.unread(model, packed) if hooks else {}
            linears = [name for members in self._unread.values() for name in members]
            known = {f"{name}{matrix}" for name in linears for matrix in MATRICES} | _shared_by(model, shared).keys()
            for name, tensor in super().get_all_weights(model_config, model):
                linear = name.partition(".weight")[0]
                if name in known:
                    continue
                if linear not in unpacked:
                    yield name, tensor
                elif linear in waiting:
                    yield f"{linear}.weight", waiting.pop(linear).dense(model_config.dtype)

        def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
            model = super().load_model(vllm_config, model_config, prefix)
            # vLLM's setting may also be "auto" by its type, but is a device when a model is loaded.
            device: Any = vllm_config.device_config.device
            lora = vllm_config.lora_config
            base_weights.note_experts(model)
            if hooks:
                hooks.loaded(model, packed, device, one_adapter=not lora or lora.max_loras == 1)
            if recorder:
                recorder.bind(model, vllm_config)
            return model

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            super().load_weights(model, model_config)
            base_weights.check_same_base(model, packed, model_config.model, unread=self._unread)
            if hooks:
                hooks.lend(model, packed, unread=self._unread)
            norms.widen(model, FAMILIES[model_config.hf_text_config.model_type].noise_norms)
            for name, parameter in _shared_by(model, shared).items():
                parameter.data = shared[name].detach()

    register_model_loader(LOAD_FORMAT)(WithTrainerLoader)
    return LOAD_FORMAT


def forget() -> None:
    """Free the references of the registered model loader to the trainer's tensors, by registering a loader without such
    references. vLLM never releases the loader class that was registered last, so the tensors could not be freed
    otherwise."""
    register_loader({}, {}, {})


def _shared_by(model: nn.Module, shared: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Find the parameters of vLLM's model that can be set to the trainer's tensors of the same names."""

    def kind(tensor: Tensor) -> tuple[object, ...]:
        return tensor.shape, tensor.dtype, tensor.device

    parameters = dict(model.named_parameters())  # without the head if it uses the embedding's weight
    both = {name: parameters[name] for name in shared if name in parameters}
    return {name: parameter for name, parameter in both.items() if kind(parameter) == kind(shared[name])}
