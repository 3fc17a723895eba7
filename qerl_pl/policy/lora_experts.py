"""LoRA adapters on the frozen experts of mixture-of-experts (MoE) layers, with the names and shapes that PEFT uses for
``target_parameters``. Letters: E experts of a layer, r rank; N outputs and K inputs of one linear layer of an expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.model.family import MLP
from qerl_pl.quant.experts import FrozenExperts, mixtures
from qerl_pl.quant.grouped import Factors, Routes

PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Names, in transformers, of the stacked weights that an adapter on experts adapts."""
MULTIPLE = 8
"""Number to a multiple of which ranks are padded, because grouped matrix products on a GPU need rows whose bytes are a
multiple of 16."""


def expert_rank(rank: int, setting: int | None, targets: Collection[str], chosen: int) -> int:
    """Return the rank of the adapters on experts, for LoRA of the given ``rank`` and ``targets`` on a base with
    ``chosen`` experts per token: 0 for a dense base (``chosen`` 0), or if ``targets`` lacks gate_proj, up_proj or
    down_proj; otherwise the user's ``setting`` or, if that is None, rank / chosen, at least 1."""
    if not chosen or not set(MLP) <= set(targets):
        return 0
    return max(1, rank // chosen) if setting is None else setting


def adapted(names: Iterable[str]) -> list[str]:
    """List, sorted, the linear layers that an adapter adapts, from PEFT's names of its tensors. An adapter on experts
    counts as one on gate_proj, up_proj and down_proj."""
    linears = {name.split(".")[-3] for name in names if name.endswith(".lora_A.weight")}
    return sorted(linears - {"experts", "base_layer"} | (set(MLP) if "experts" in linears else set()))


def of_experts(name: str) -> bool:
    """Return whether an adapter's tensor, by PEFT's name, belongs to experts of an MoE layer."""
    return name.split(".")[-3] in ("experts", "base_layer")


def stacked(a: Tensor, b: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """View the LoRA matrices of E experts (``number``) in PEFT's shapes, A [E r, K] and B [N, r E], as A [E, r, K] and
    B [E, N, r]. PEFT orders the rows of A by expert, then by rank index, and the columns of B by rank index, then by
    expert."""
    return a.view(number, -1, a.shape[1]), b.view(len(b), -1, number).permute(2, 0, 1)


def expert_update(adapter: Mapping[str, Tensor], experts: str, part: str, number: int) -> Tensor | None:
    """Compute B A, [E, N, K], without the factor alpha / r, for the linear layer ``part``, such as up_proj, of all E
    (``number``) experts of the module that PEFT names ``experts``; None if the ``adapter`` does not adapt it."""
    name = f"{experts}.lora_" if part == "down_proj" else f"{experts}.base_layer.lora_"
    if f"{name}A.weight" not in adapter:
        return None
    a, b = stacked(adapter[f"{name}A.weight"], adapter[f"{name}B.weight"], number)
    return (b if part == "down_proj" else b.chunk(2, dim=1)[part == "up_proj"]) @ a


class LoraExperts(nn.Module, LoraLayer):
    """PEFT layer that holds the adapters on down_proj of all experts of an MoE layer. It wraps a second
    ``LoraExperts``, which holds the adapters on gate_proj and up_proj together and wraps the frozen experts. PEFT's own
    layer is not used, because it would build a dense sum of weight and update for all experts."""

    def __init__(
        self, base_layer: nn.Module, config: LoraConfig, adapter: str, *, sizes: tuple[int, int, int, int], scale: float
    ) -> None:
        """Add a LoRA adapter per expert. ``sizes`` are the number of experts, the rank, and the numbers of outputs and
        inputs of a linear layer; B A x is multiplied by ``scale``."""
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.number, rank, self.out_features, self.in_features = sizes
        self._active_adapter = adapter
        self.update_layer(adapter, self.number * rank, lora_alpha=1, config=config)
        self.scaling[adapter] = scale
        self.lora_A.float()
        self.lora_B.float()

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the LoRA matrices A [E, R, K] and B [E, N, R] of all experts, in fp32 and differentiable; B is
        multiplied by the scale. R is the rank, padded with zeros to a multiple of ``MULTIPLE``, as grouped matrix
        products need."""
        (name,) = self.active_adapters
        a, b = self.lora_A[name].get_parameter("weight"), self.lora_B[name].get_parameter("weight")
        a, b = stacked(a, self.scaling[name] * b, self.number)
        more = -a.shape[1] % MULTIPLE
        return F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more)).contiguous()

    def forward(self, x: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        """Compute ``FrozenExperts`` with the adapters."""
        experts, inner = self.get_base_layer(), self.base_layer
        assert isinstance(experts, FrozenExperts)
        if self.disable_adapters:
            return experts(x, weights, routes)
        assert isinstance(inner, LoraExperts)
        return experts(x, weights, routes, lambda: Factors(*inner.factors(), *self.factors()))


def with_experts(config: LoraConfig, rank: int, scaling: float) -> LoraConfig:
    """Add adapters on experts, of the given rank (0: none), to PEFT's configuration, which is changed and returned.
    ``scaling`` is the factor of B A, as for other linear layers."""
    if rank:
        alpha: Any = scaling * (rank**0.5 if config.use_rslora else rank)
        config.target_parameters = list(PARAMETERS)
        config.rank_pattern = dict.fromkeys(PARAMETERS, rank)
        config.alpha_pattern = dict.fromkeys(PARAMETERS, alpha)
    return config


def adapt_experts(model: nn.Module, config: LoraConfig, adapter: str, *, rank: int, scale: float) -> None:
    """Add an adapter to all experts of a model, as ``with_experts`` describes it."""
    for mixture in mixtures(model):
        number, _, inner = mixture.sizes
        hidden = mixture.gate.in_features
        layer: nn.Module = mixture.experts
        for sizes in ((number, rank, 2 * inner, hidden), (number, rank, hidden, inner)):
            layer = LoraExperts(layer, config, adapter, sizes=sizes, scale=scale)
        mixture.experts = layer.to(mixture.gate.weight.device)
