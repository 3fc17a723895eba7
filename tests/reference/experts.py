"""A mixture of experts, computed by loops over tokens and experts in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def mixture(
    x: Tensor,
    router: Tensor,
    experts: Sequence[tuple[Tensor, Tensor, Tensor]],
    chosen: int,
    *,
    normalised: bool,
    ids: Sequence[Sequence[int]] | None = None,
    shared: tuple[Tensor | None, tuple[Tensor, Tensor, Tensor]] | None = None,
    correction: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute the output [T, H] of a mixture of experts.

    Args:
        x: inputs [T, H].
        router: weight of the router [E, H].
        experts: gate [I, H], up [I, H] and down [H, I] of each expert.
        chosen: number of experts per token.
        normalised: whether the shares of the chosen experts are divided by their sum.
        ids: experts that each token uses, instead of those that the router chooses; None: the router chooses.
        shared: an expert that all tokens use, as (gate of its share [H], its weights): the expert's output is
            multiplied by the sigmoid of the gate times the token; without a gate its share is 1.
        correction: what is added to an expert's share [E] when experts are chosen; shares are then sigmoids of the
            router's outputs. None: shares are a softmax.
        scale: number by which the shares of chosen experts are multiplied.
    """
    out = []
    for number, token in enumerate(x.double()):
        scores = torch.stack([(row.double() * token).sum() for row in router])
        shares = scores.exp() / scores.exp().sum() if correction is None else 1 / (1 + (-scores).exp())
        ranks = shares if correction is None else shares + correction.double()
        best = sorted(range(len(experts)), key=lambda expert: (-ranks[expert].item(), expert))[:chosen]
        best = best if ids is None else list(ids[number])
        whole = sum(shares[expert] for expert in best) if normalised else 1.0
        total = torch.zeros_like(token)
        for expert in best:
            total = total + scale * shares[expert] / whole * _expert(token, experts[expert])
        if shared is not None:
            share = 1.0 if shared[0] is None else 1 / (1 + (-(shared[0].double() * token).sum()).exp())
            total = total + share * _expert(token, shared[1])
        out.append(total)
    return torch.stack(out)


def _expert(token: Tensor, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    gate, up, down = (weight.double() for weight in weights)
    return down @ (F.silu(gate @ token) * (up @ token))


def adapted(
    experts: Sequence[tuple[Tensor, Tensor, Tensor]], adapter: Sequence[Tensor], scale: float
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the weights of E experts with LoRA updates added that are stored as PEFT stores them. In A [E r, K] the r
    rows of an expert follow each other; in B [N, r E] every E-th column belongs to the same expert. ``adapter`` has A
    and B of gate and up, which share them, and then A and B of down."""
    number, (a, b, down_a, down_b) = len(experts), adapter

    def update(a: Tensor, b: Tensor, expert: int) -> Tensor:
        rank = len(a) // number
        ranks = [torch.outer(b[:, one * number + expert], a[expert * rank + one]) for one in range(rank)]
        return scale * torch.stack(ranks).sum(0)

    found = []
    for expert, (gate, up, down) in enumerate(experts):
        both = update(a, b, expert)
        found.append((gate + both[: len(gate)], up + both[len(gate) :], down.double() + update(down_a, down_b, expert)))
    return found
