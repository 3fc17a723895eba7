"""Compare the experts that the sampler chose with those that the trainer's routers would have chosen. Shapes: B rows, S
token positions, L mixture-of-experts layers with E experts, k of which compute each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.common.checks import CheckFailed
from qerl_pl.quant.experts import UNSEEN
from qerl_pl.training.passes import Batch

MOST_OTHERS = 0.25
"""Largest allowed share of the sampler's choices of experts in a layer that differ from the trainer's. The share is
some hundredths in correct runs, and would be near 1 - k / E if the experts were those of another token or layer."""


def checked_routing(batch: Batch) -> dict[str, Tensor]:
    """Check that the experts with which the sampler computed the tokens of a rollout, and which training used again,
    are mostly those that the trainer's routers choose. Returns metrics [] over the tokens and layers of all ranks;
    empty if training did not use the sampler's experts. Raises CheckFailed if, in some layer, more than a share
    ``MOST_OTHERS`` of the experts differ.
    """
    routes, others_of = batch.experience.routes, batch.others
    if routes is None or others_of is None:
        return {}
    seen = others_of != UNSEEN  # [B, S, L]
    sums = seen, others_of * seen, (others_of > 0) & seen
    counts, others, changed = ranks.mean(torch.stack([values.sum(dim=(0, 1)) for values in sums]).double())  # [L]
    share = others / (counts * routes.shape[-1])
    assert batch.policy.routing is not None
    loads = ranks.mean(_loads(routes, batch.experience.lengths, batch.policy.routing.num_experts))  # [L, E]
    if share.max() > MOST_OTHERS:
        raise CheckFailed(
            f"{float(share.max()):.0%} of the experts that the engine returned for a layer are not those that the "
            f"trainer's router chooses (allowed: {MOST_OTHERS:.0%}): they belong to other tokens or layers, or to "
            "another policy. Set model.router_replay to off to train without them"
        )
    return {
        "router/changed_share": changed.sum() / counts.sum(),
        "router/other_experts": share.mean(),
        "router/other_experts_max": share.max(),
        "router/max_load": (loads.amax(dim=1) / loads.mean(dim=1)).mean(),
        "router/idle_share": (loads == 0).double().mean(),
    }


def _loads(routes: Tensor, lengths: Tensor, num_experts: int) -> Tensor:
    """Count the tokens that each expert of each layer computed, [L, E] fp64, without the last token of each row, which
    no forward pass of the sampler has as input."""
    computed = torch.arange(routes.shape[1], device=routes.device) < lengths.unsqueeze(1) - 1
    layers = (layer[computed].flatten().long() for layer in routes.unbind(dim=2))
    return torch.stack([ids.bincount(minlength=num_experts) for ids in layers]).double()
