"""LoRA adapters on the frozen experts of a mixture, with the names and shapes of PEFT's ``target_parameters``.

Letters: E experts of a block, k experts per token, r rank, N outputs and K inputs of one part of an expert.
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
"""Ranks are padded to a multiple of this, because grouped products on a GPU need rows of whole 16 bytes."""


def expert_rank(rank: int, setting: int | None, targets: Collection[str], chosen: int) -> int:
    """Return the rank of the adapters on experts: 0 if the base has no experts (``chosen`` is 0) or LoRA's ``targets``
    do not name the MLP, else the ``setting``; null means rank / k, at least 1, because k experts compute each token."""
    if not chosen or not set(MLP) <= set(targets):
        return 0
    return max(1, rank // chosen) if setting is None else setting


def adapted(names: Iterable[str]) -> list[str]:
    """List, sorted, the LoRA targets of an adapter whose tensors have these names; an adapter on experts counts as the
    targets ``MLP`` (gate_proj, up_proj, down_proj)."""
    linears = {name.split(".")[-3] for name in names if name.endswith(".lora_A.weight")}
    return sorted(linears - {"experts", "base_layer"} | (set(MLP) if "experts" in linears else set()))


def of_experts(name: str) -> bool:
    """Return whether a tensor of an adapter, given by PEFT's name, belongs to experts."""
    return name.split(".")[-3] in ("experts", "base_layer")


def stacked(a: Tensor, b: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """View the matrices of an adapter on E experts in PEFT's form, A [E r, K] and B [N, r E], as A [E, r, K] and B [E,
    N, r]. In A the rows of one expert are consecutive, in B the columns of one rank."""
    return a.view(number, -1, a.shape[1]), b.view(len(b), -1, number).permute(2, 0, 1)


def expert_update(adapter: Mapping[str, Tensor], experts: str, part: str, number: int) -> Tensor | None:
    """Compute B A of one part, such as up_proj, of all experts, [E, N, K]; ``experts`` is PEFT's name of the experts'
    module. Returns None if the adapter has no tensors of this part."""
    name = f"{experts}.lora_" if part == "down_proj" else f"{experts}.base_layer.lora_"
    if f"{name}A.weight" not in adapter:
        return None
    a, b = stacked(adapter[f"{name}A.weight"], adapter[f"{name}B.weight"], number)
    return (b if part == "down_proj" else b.chunk(2, dim=1)[part == "up_proj"]) @ a


class LoraExperts(nn.Module, LoraLayer):
    """PEFT layer that holds the adapter of the down_proj of a block's frozen experts. Inside it is another such layer,
    which holds the adapter of gate_proj and up_proj together, and inside that are the experts. PEFT's own layer is not
    used, because it would build the sum of all experts' dense weights and updates."""

    def __init__(
        self, base_layer: nn.Module, config: LoraConfig, adapter: str, *, sizes: tuple[int, int, int, int], scale: float
    ) -> None:
        """Add an adapter of ``sizes`` E, r, N and K, whose update is multiplied by ``scale``."""
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.number, rank, self.out_features, self.in_features = sizes
        self._active_adapter = adapter
        self.update_layer(adapter, self.number * rank, lora_alpha=1, config=config)
        self.scaling[adapter] = scale
        self.lora_A.float()
        self.lora_B.float()

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [E, R, K] and scaled B [E, N, R] in fp32, differentiable. R is the rank padded with zeros to a
        multiple of ``MULTIPLE``, as the grouped products need."""
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
    """Add adapters on experts, of the given rank (0: none), to PEFT's configuration. Their updates B A are multiplied
    by ``scaling``, as those of other linears are."""
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
