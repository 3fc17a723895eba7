"""Mixture of experts: a router that chooses k of E small MLPs for each token, with frozen weights.

A checkpoint stores each expert's linears separately. Before its weights are read, a model therefore has
``SeparateExperts``, whose linears the quantiser and the loader treat like all other linears. The loader then replaces
them by ``FrozenExperts``, which computes the products of all experts as one grouped product. Letters: T tokens, S = k T
rows, H hidden size, I inner size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.model.family import Experts
from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.grouped import Factors, Routes, grouped_experts, sort_rows, summed
from qerl_pl.quant.linear import FrozenLinear

PARTS = ("gate_proj", "up_proj", "down_proj")
"""Names of the linears of an expert, y = down(silu(gate(x)) up(x))."""
UNSEEN = 255
"""Value for tokens that were not computed, in tensors that count, per token, experts that a router would not have
chosen."""
OF_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)")
"""Pattern of an expert's linear; its groups are the experts' module and the linear's name in ``PARTS``."""


class Routing(NamedTuple):
    """Sizes of the routes that a rollout engine returns: the numbers of the experts that it chose, [tokens, L, k]."""

    num_layers: int
    """Number of blocks with a mixture, L."""
    num_experts: int
    """Number of experts of a block, E."""
    chosen: int
    """Number of experts that compute each token, k."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of routes, the smallest that holds an expert's number."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16


class Replay(NamedTuple):
    """Experts that a pass uses instead of those that its routers would choose."""

    ids: Tensor
    """[..., k] uint8 or int16, the experts of each token, in any order."""
    others: Tensor
    """[...] uint8, into which the pass writes how many of these experts the router would not have chosen."""

    def of_layer(self, number: int) -> Self:
        """Return the part of mixture ``number`` of this replay of L mixtures; its tensors are views."""
        return type(self)(self.ids[:, number], self.others[:, number])


def choose(scores: Tensor, chosen: int) -> Tensor:
    """Return the k experts of each token with the highest scores [T, E], [T, k] int64; of equal ones, the lower
    index."""
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, :chosen]


def weigh(scores: Tensor, ids: Tensor, *, normalised: bool, scale: float = 1.0) -> Tensor:
    """Return the scores [T, k] of experts ``ids`` [T, k] int64, if ``normalised`` divided by their sum, times
    ``scale``."""
    weights = scores.gather(1, ids)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights if scale == 1 else weights * scale


def count_others(ids: Tensor, own: Tensor) -> Tensor:
    """Count, for each token, the experts of ``ids`` [T, k] that are not among those that the router chooses, ``own``
    [T, k]; returns [T] uint8."""
    return (ids.unsqueeze(2) != own.unsqueeze(1)).all(dim=2).sum(dim=1).to(torch.uint8)


class _Unset(nn.Linear):
    """Linear whose weights are not initialised when it is made, because initialising the 18 000 linears of a large
    mixture would take longer than reading their weights."""

    def reset_parameters(self) -> None:
        pass


class Expert(nn.Module):
    """One expert with linears of its own, on the meta device until its weights are read."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        linear = partial(_Unset, bias=False, dtype=dtype, device="meta")
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the expert for its rows [n, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SeparateExperts(nn.ModuleList):
    """Experts as separate modules, with linears such as ``experts.3.up_proj``; forward computes one expert after
    another."""

    def forward(self, x: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        """Compute the weighted sum of experts, [T, H], as ``FrozenExperts`` does."""
        rows = x[routes.order // weights.shape[1]].tensor_split(routes.ends[:-1].tolist())
        return summed(torch.cat([expert(part) for expert, part in zip(self, rows, strict=True)]), routes, weights)


class StackedLinear(nn.Module):
    """Frozen weights [E, N, K] of one linear (such as up_proj) of all E experts, dense (``weight``), or packed as in
    ``FrozenLinear``: codes [E, N, K/2], block scales [E, N, K/block], and bits of the tensor scales, [E]."""

    codes: Tensor
    block_scale: Tensor
    global_scale_bits: Tensor
    weight: Tensor

    def __init__(self, linears: Sequence[nn.Linear | FrozenLinear]) -> None:
        super().__init__()
        first = linears[0]
        self.out_features, self.in_features = first.out_features, first.in_features
        self.fmt: Format | None = first.fmt if isinstance(first, FrozenLinear) else None
        for name, tensor in (*first.named_parameters(), *first.named_buffers()):
            stack = torch.stack([getattr(linear, name) for linear in linears])
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, nn.Parameter(stack, requires_grad=False))
            else:
                self.register_buffer(name, stack)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights, [E, N, K] of ``dtype``."""
        if self.fmt is None:
            return self.weight.to(dtype)
        factors = self.global_scale_bits.view(torch.float64)
        packed = PackedWeight(self.codes.flatten(0, 1), self.block_scale.flatten(0, 1), factors)
        return self.fmt.dequantize(packed, dtype).unflatten(0, (len(factors), -1))

    @cached_property
    def linears(self) -> list[FrozenLinear]:
        """The packed linear of each expert, as views of the stacks; empty if the weights are dense."""
        return [] if self.fmt is None else list(map(self._linear, range(len(self.codes))))

    def _linear(self, expert: int) -> FrozenLinear:
        assert self.fmt is not None
        linear = FrozenLinear(self.in_features, self.out_features, self.fmt, device="meta")
        for name in ("codes", "block_scale", "global_scale_bits"):
            setattr(linear, name, getattr(self, name)[expert])
        return linear


class FrozenExperts(nn.Module):
    """Experts whose frozen weights are stacked: one ``StackedLinear`` for each linear that an expert has (``PARTS``).
    For backward, autograd keeps the outputs of gate_proj and up_proj."""

    def __init__(self, experts: SeparateExperts) -> None:
        super().__init__()
        stack = [StackedLinear([expert.get_submodule(part) for expert in experts]) for part in PARTS]  # pyright: ignore[reportArgumentType]
        self.gate_proj, self.up_proj, self.down_proj = stack
        self.around: Callable[[Callable[[], Tensor]], Tensor] = lambda compute: compute()
        """Function that calls its argument, which computes the experts; gradient checkpointing replaces it."""

    def forward(
        self, x: Tensor, weights: Tensor, routes: Routes, factors: Callable[[], Factors | None] = lambda: None
    ) -> Tensor:
        """Compute, for each token of x [T, H], the outputs of its k experts (``routes``) times the router's ``weights``
        [T, k] fp32, summed: [T, H] in the dtype of x. The outputs times weights are rounded to this dtype, and added in
        fp32. ``factors`` returns the experts' LoRA adapters, or None."""
        parts = self.gate_proj.dense, self.up_proj.dense, self.down_proj.dense
        return self.around(lambda: grouped_experts(x, weights, routes, parts, factors()))


class Mixture(nn.Module):
    """MLP of a block with experts: the router and the experts. The router's weight ``gate`` is dense, and its logits
    are computed in fp32."""

    experts: nn.Module
    """``SeparateExperts``, ``FrozenExperts``, or a layer around the latter that adds adapters."""

    def __init__(self, config: Any, names: Experts, dtype: torch.dtype) -> None:
        super().__init__()
        number, self.inner = getattr(config, names.number), getattr(config, names.inner)
        self.chosen, self.normalised = getattr(config, names.chosen), getattr(config, names.normalised, True)
        self.scale = getattr(config, names.scale) if names.scale else 1.0
        self.gate = nn.Linear(config.hidden_size, number, bias=False, dtype=dtype, device="meta")
        self.correction = names.correction
        if names.correction is not None:
            self.gate.register_parameter(
                names.correction, nn.Parameter(torch.empty(number, dtype=torch.float32, device="meta"))
            )
        self.experts = SeparateExperts(Expert(config.hidden_size, self.inner, dtype) for _ in range(number))
        self.replay: Replay | None = None
        """Experts of the T tokens of the next call; None: the router chooses them."""
        self.shared_expert: Any = None
        """MLP that computes every token; None: there is none."""
        self.shared_expert_gate: Any = None
        """Linear [1, H], the sigmoid of whose output is the weight of the shared expert's output."""
        self.shared_experts: Any = None
        """MLP that computes every token with weight 1; None: there is none."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of experts, experts per token, and inner size of an expert."""
        return self.gate.out_features, self.chosen, self.inner

    def forward(self, x: Tensor) -> Tensor:
        """Compute the mixture for x [..., H]; returns the same shape and dtype."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, corrected = self.scores(tokens)
        ids = own = choose(corrected, self.chosen)
        if self.replay is not None:
            ids = self.replay.ids.long()
            self.replay.others.copy_(count_others(ids, own))
        weights = weigh(scores, ids, normalised=self.normalised, scale=self.scale)
        routed = self.experts(tokens, weights, sort_rows(ids, scores.shape[1])).view(x.shape)
        if self.shared_experts is not None:
            return routed + self.shared_experts(x)
        if self.shared_expert is None:
            return routed
        return routed + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)

    def scores(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the router's score of every expert for each token of ``tokens`` [T, H], [T, E] fp32, and the corrected
        scores by which experts are chosen; without a correction, these are the same tensor."""
        logits = F.linear(tokens.float(), self.gate.weight.float())
        if self.correction is None:
            scores = logits.softmax(-1)
            return scores, scores
        scores = logits.sigmoid()
        return scores, scores.detach() + self.gate.get_parameter(self.correction)


def mixtures(model: nn.Module) -> list[Mixture]:
    """List the mixtures of experts of a model or a decoder block, in the order of the blocks."""
    return [module for module in model.modules() if isinstance(module, Mixture)]


def use_replay(model: Any) -> None:
    """Make a model's blocks accept the argument ``replay``, the experts to use; in calls without it, the routers
    choose. The block has the argument, and not only the mixture inside, so that gradient checkpointing passes it to the
    block's recomputation too."""
    found = [(block, mixture) for block in model.model.layers for mixture in mixtures(block)]

    def hand_over(mixture: Mixture, number: int, block: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        replay: Replay | None = kwargs.get("replay")
        mixture.replay = replay and replay.of_layer(number)

    for number, (block, mixture) in enumerate(found):
        block.register_forward_pre_hook(partial(hand_over, mixture, number), with_kwargs=True)


def separate_experts(model: nn.Module, config: Any, names: Experts, dtype: torch.dtype) -> None:
    """Replace the mixtures of experts of a model on the meta device, whose weights transformers stacks, by ``Mixture``
    with ``SeparateExperts``, so that each linear of an expert is a module, as in the checkpoint."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "experts") and hasattr(module, "gate"):
            mixture = Mixture(config, names, dtype)
            for child, inside in module.named_children():
                if child.startswith("shared_expert"):
                    setattr(mixture, child, inside)
            model.set_submodule(name, mixture)


def check_alike(packed: Collection[str], model: nn.Module) -> None:
    """Raise ValueError for a mixture of experts some of whose linears are named in ``packed`` (have 4-bit weights) and
    others are not, because engines compute all experts of a mixture by one kernel."""
    for name, module in model.named_modules():
        if isinstance(module, SeparateExperts):
            inside = [f"{name}.{expert}.{part}" for expert in range(len(module)) for part in PARTS]
            dense = [linear for linear in inside if linear not in packed]
            if 0 < len(dense) < len(inside):
                some = next(linear for linear in inside if linear in packed)
                raise ValueError(f"{some} is packed and {dense[0]} is not; engines compute all experts in one format")


def stack_experts(block: nn.Module) -> None:
    """Replace each ``SeparateExperts`` in a block or model, whose weights must have been read, by ``FrozenExperts``."""
    for mixture in mixtures(block):
        if isinstance(mixture.experts, SeparateExperts):
            mixture.experts = FrozenExperts(mixture.experts)


def packed_experts(model: nn.Module) -> Iterator[tuple[str, FrozenLinear]]:
    """Yield the packed linears of stacked experts by the names that they have in a checkpoint."""
    for name, module in model.named_modules():
        if isinstance(module, StackedLinear):
            parent, _, part = name.replace(".base_layer", "").rpartition(".")
            yield from ((f"{parent}.{expert}.{part}", linear) for expert, linear in enumerate(module.linears))
