"""Small random models, and a count of the memory that their tensors take."""

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Glm4MoeConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, make_policy
from tests.integration.conftest import bases
from tests.random_models import random_model

__all__ = ["LiveBytes", "bases", "family", "policy_of", "recurrent_config", "sigmoid_config", "small_config"]

FAMILIES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def small_config(family: str = "qwen2", **changes: Any) -> PretrainedConfig:
    """Make the configuration of a small model of one of ``FAMILIES``, whose widths have the proportions of a real
    model; ``changes`` replaces its values."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "tie_word_embeddings": False,
    }
    return FAMILIES[family](**{**sizes, **changes})


def recurrent_config(num_recurrent: int, num_attention: int = 1, *, experts: bool = False) -> PretrainedConfig:
    """Make the configuration of a small Qwen3.5: a mixture of experts if ``experts`` is True, else a dense model.
    ``num_recurrent`` gated delta nets come first, with heads of the same size as in real models, and then the attention
    layers."""
    mixture: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    own: dict[str, Any] = mixture | {"shared_expert_intermediate_size": 256} if experts else {"intermediate_size": 512}
    kinds = num_recurrent * ["linear_attention"] + num_attention * ["full_attention"]
    return (Qwen3_5MoeTextConfig if experts else Qwen3_5TextConfig)(
        hidden_size=128,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        vocab_size=256,
        **own,
    )


def sigmoid_config(num_layers: int) -> PretrainedConfig:
    """Make the configuration of a small GLM-4.5, all of whose blocks have routed and shared experts."""
    return Glm4MoeConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        first_k_dense_replace=0,
        vocab_size=256,
        pad_token_id=None,
    )


def policy_of(config: PretrainedConfig, dtype: torch.dtype, lora: Mapping[str, Any] = {}, **settings: Any) -> Policy:
    """Make a random policy with an adapter of rank 8."""
    model = random_model(config, None, dtype=dtype, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_policy(model, base="random", dtype=dtype, lora=LoraSettings(rank=8, **lora), seed=0, **settings)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that were made in this context and still exist (``live``), and the largest such
    number so far (``peak``)."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage()) not in given | set(self._seen):
                self._seen.add(storage)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return result

    def _count(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


@pytest.fixture(params=["qwen2", "qwen3", pytest.param("llama", marks=pytest.mark.long)])
def family(request: pytest.FixtureRequest) -> str:
    """Name of a model family, one of ``FAMILIES``."""
    return request.param


@pytest.fixture
def masks_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make dropout on a CPU keep a mask of one byte per value for backward, as on a GPU. Without this, torch keeps a
    mask in the input's dtype."""

    def dropout(x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
        assert not inplace
        return torch.native_dropout(x, p, training)[0]

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
