"""Mixture of experts: a router that chooses k of E small MLPs (experts) for each token, with frozen weights.

While a checkpoint's weights are read, the model has ``SeparateExperts``, whose linear layers the quantiser and the
loader treat like all others. The loader then replaces them by ``FrozenExperts``, with grouped matrix products. Letters:
T tokens, S = k T rows (one per token and chosen expert), H hidden size, I inner size of an expert, N outputs and K
inputs of a linear layer, L blocks that have experts.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.model.family import Experts
from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.grouped import Factors, Routes, grouped_experts, sort_rows, summed
from qerl_pl.quant.linear import FrozenLinear

PARTS = ("gate_proj", "up_proj", "down_proj")
"""Names of the linear layers of an expert, which computes y = down(silu(gate(x)) * up(x))."""
UNSEEN = 255
"""Entry of ``Replay.others`` (uint8) for tokens that no forward pass has computed yet."""
OF_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)")
"""Pattern of the full name of an expert's linear layer, such as ``model.layers.0.mlp.experts.3.up_proj``. Its two
groups are the name up to ``experts``, and the layer's own name, here ``up_proj``."""


class Routing(NamedTuple):
    """Sizes of the tensor of routes that a rollout engine returns for a mixture-of-experts model: [tokens, L, k], the
    indices of the k experts that computed each token in each of the model's L mixture-of-experts layers."""

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
    """Experts that the trainer uses for the tokens of a forward pass instead of those that its routers would choose:
    the experts that the rollout engine used when it sampled."""

    ids: Tensor
    """[..., k] uint8 or int16, the indices of the experts to use for each token, in any order."""
    others: Tensor
    """[...] uint8, output: per token, the number of used experts that the router would not have chosen."""


def choose(scores: Tensor, chosen: int) -> Tensor:
    """Choose for each of T tokens the k = ``chosen`` experts with the highest router scores. ``scores`` is [T, E] for E
    experts; returns the experts' indices, [T, k] int64. Of experts with equal scores, lower indices come first."""
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, :chosen]


def weigh(scores: Tensor, ids: Tensor, *, normalised: bool, scale: float = 1.0) -> Tensor:
    """Compute the weights, [T, k], by which the outputs of each token's k experts are multiplied before they are added:
    the router's scores of these experts, divided by their sum per token if ``normalised``, times ``scale``. ``scores``
    [T, E] are the scores of all experts, and ``ids`` [T, k] int64 the indices of the chosen ones."""
    weights = scores.gather(1, ids)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights if scale == 1 else weights * scale


class _Unset(nn.Linear):
    """Linear layer whose weights are not initialised, because initialising the 18 000 linear layers of a large
    mixture-of-experts model would take longer than reading their weights."""

    def reset_parameters(self) -> None:
        pass


class Expert(nn.Module):
    """One expert, an MLP with three linear layers, which are on the meta device until their weights are read."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        linear = partial(_Unset, bias=False, dtype=dtype, device="meta")
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the expert for its rows [n, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SeparateExperts(nn.ModuleList):
    """Experts of one block as separate modules, with linear layers named like ``experts.3.up_proj``."""

    def forward(self, x: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        """Compute, for each token of x [T, H], the sum of its k experts' outputs, each times the router's weight in
        ``weights`` [T, k]; returns [T, H]. ``routes`` says which experts compute each token."""
        rows = x[routes.order // weights.shape[1]].tensor_split(routes.ends[:-1].tolist())
        return summed(torch.cat([expert(part) for expert, part in zip(self, rows, strict=True)]), routes, weights)


class StackedLinear(nn.Module):
    """Frozen weights [E, N, K] of one linear layer, such as up_proj, of all E experts of a mixture-of-experts layer.
    They are stored either dense (``weight``) or in a 4-bit format: two 4-bit codes per byte [E, N, K/2], a scale for
    each block of columns [E, N, K/block], and a scale for each expert, [E], stored as the bits of an fp64 number."""

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
        """The 4-bit linear layer of each expert, as views of the stacked tensors; empty if the weights are dense."""
        return [] if self.fmt is None else list(map(self._linear, range(len(self.codes))))

    def _linear(self, expert: int) -> FrozenLinear:
        assert self.fmt is not None
        linear = FrozenLinear(self.in_features, self.out_features, self.fmt, device="meta")
        for name in ("codes", "block_scale", "global_scale_bits"):
            setattr(linear, name, getattr(self, name)[expert])
        return linear


class FrozenExperts(nn.Module):
    """All experts of one mixture-of-experts layer, with frozen weights stacked over experts: one ``StackedLinear`` each
    for gate_proj, up_proj and down_proj. Autograd keeps the outputs of gate_proj and up_proj for backward."""

    def __init__(self, experts: SeparateExperts) -> None:
        super().__init__()
        stack = [StackedLinear([expert.get_submodule(part) for expert in experts]) for part in PARTS]  # pyright: ignore[reportArgumentType]
        self.gate_proj, self.up_proj, self.down_proj = stack
        self.around: Callable[[Callable[[], Tensor]], Tensor] = lambda compute: compute()
        """Wrapper that is called with the function that computes the experts, and returns its result; gradient
        checkpointing replaces this wrapper."""

    def forward(
        self, x: Tensor, weights: Tensor, routes: Routes, factors: Callable[[], Factors | None] = lambda: None
    ) -> Tensor:
        """Compute, for each token of x [T, H], the sum of its k experts' outputs, each times the router's weight in
        ``weights`` [T, k] fp32; returns [T, H] in the dtype of x. ``routes`` says which experts compute each token.
        Products of output and weight are rounded to the dtype of x, and added in fp32. ``factors`` is a function that
        returns the experts' LoRA adapters, or None if there are none."""
        parts = self.gate_proj.dense, self.up_proj.dense, self.down_proj.dense
        return self.around(lambda: grouped_experts(x, weights, routes, parts, factors()))


class Mixture(nn.Module):
    """Mixture-of-experts layer, which a decoder block has in place of an MLP: a router and its experts. The router's
    weight ``gate`` is not quantised, and the router's logits are computed in fp32."""

    experts: nn.Module
    """``SeparateExperts``, ``FrozenExperts``, or a layer that wraps ``FrozenExperts`` and adds adapters."""

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
        """Experts that compute the T tokens of the next call; None: the router chooses them."""
        self.shared_expert: Any = None
        """MLP that computes every token, in addition to the chosen experts; None: there is none."""
        self.shared_expert_gate: Any = None
        """Linear layer [1, H]; the sigmoid of its output is the weight of the shared expert's output."""
        self.shared_experts: Any = None
        """MLP that computes every token, and whose output is added with weight 1; None: there is none."""

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
            self.replay.others.copy_((ids.unsqueeze(2) != own.unsqueeze(1)).all(dim=2).sum(dim=1))
        weights = weigh(scores, ids, normalised=self.normalised, scale=self.scale)
        routed = self.experts(tokens, weights, sort_rows(ids, scores.shape[1])).view(x.shape)
        if self.shared_experts is not None:
            return routed + self.shared_experts(x)
        if self.shared_expert is None:
            return routed
        return routed + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)

    def scores(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the router's score of every expert for each token of ``tokens`` [T, H]. Returns two tensors [T, E]
        fp32: the scores from which the weights of the experts' outputs are computed, and those by which experts are
        chosen, to which some model families add a learned bias per expert; in the other families, both results are the
        same tensor."""
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
    """Make a model's decoder blocks accept the keyword argument ``replay``, a ``Replay`` with the experts to use for
    each token in each of the model's mixture-of-experts layers; without it, the routers choose. The argument is given
    to the block and not to the mixture-of-experts layer inside, so that gradient checkpointing passes it to the block's
    recomputation too."""
    found = [(block, mixture) for block in model.model.layers for mixture in mixtures(block)]

    def hand_over(mixture: Mixture, number: int, block: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        replay: Replay | None = kwargs.get("replay")
        mixture.replay = replay and Replay(replay.ids[:, number], replay.others[:, number])

    for number, (block, mixture) in enumerate(found):
        block.register_forward_pre_hook(partial(hand_over, mixture, number), with_kwargs=True)


def separate_experts(model: nn.Module, config: Any, names: Experts, dtype: torch.dtype) -> None:
    """Replace the mixture-of-experts layers of a model, which transformers has created on the meta device, by
    ``Mixture`` with ``SeparateExperts``. transformers stacks the weights of all experts in one parameter; afterwards
    each linear layer of an expert is a module, with the name that it has in the checkpoint."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "experts") and hasattr(module, "gate"):
            mixture = Mixture(config, names, dtype)
            for child, inside in module.named_children():
                if child.startswith("shared_expert"):
                    setattr(mixture, child, inside)
            model.set_submodule(name, mixture)


def check_alike(packed: Collection[str], model: nn.Module) -> None:
    """Raise ValueError if the experts of one mixture-of-experts layer have both 4-bit linear layers (named in
    ``packed``) and others, because inference engines compute all of them by one kernel, for one format."""
    for name, module in model.named_modules():
        if isinstance(module, SeparateExperts):
            inside = [f"{name}.{expert}.{part}" for expert in range(len(module)) for part in PARTS]
            dense = [linear for linear in inside if linear not in packed]
            if 0 < len(dense) < len(inside):
                some = next(linear for linear in inside if linear in packed)
                raise ValueError(f"{some} is in 4 bits and {dense[0]} is not; engines use one format for all experts")


def stack_experts(block: nn.Module) -> None:
    """Replace each ``SeparateExperts`` in a block or model, whose weights have been read, by ``FrozenExperts``."""
    for mixture in mixtures(block):
        if isinstance(mixture.experts, SeparateExperts):
            mixture.experts = FrozenExperts(mixture.experts)


def packed_experts(model: nn.Module) -> Iterator[tuple[str, FrozenLinear]]:
    """Yield, for each 4-bit linear layer of each expert in a model whose experts are stacked, its name in a checkpoint
    and the layer itself."""
    for name, module in model.named_modules():
        if isinstance(module, StackedLinear):
            parent, _, part = name.replace(".base_layer", "").rpartition(".")
            yield from ((f"{parent}.{expert}.{part}", linear) for expert, linear in enumerate(module.linears))
