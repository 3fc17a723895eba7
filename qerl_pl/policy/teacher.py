"""The teacher: a frozen model whose next-token distribution the policy is trained to approach."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from qerl_pl.model.family import family_of
from qerl_pl.policy.attention import use_packed_attention
from qerl_pl.policy.delta_net import use_packed_delta_nets
from qerl_pl.policy.logprobs import Head, head_of, token_logprobs
from qerl_pl.policy.packing import predicting
from qerl_pl.quant.loading import load_base

Place = Literal["gpu", "host"]


class Teacher:
    """Frozen causal language model that computes log-probabilities in packed forward passes. Raises ValueError if
    ``folder`` holds no supported model.

    Args:
        folder: checkpoint folder, with dense or 4-bit weights.
        dtype: compute dtype.
        device: device of the passes.
        keep: "gpu": the weights stay on the device; "host": they are on the device only inside the context ``ready``,
            and in host memory otherwise.
    """

    def __init__(self, folder: str, *, dtype: torch.dtype, device: torch.device | str, keep: Place = "gpu") -> None:
        self.folder, self.device, self.keep = folder, torch.device(device), keep
        self.model: Any = load_base(folder, dtype=dtype, device=device if keep == "gpu" else "cpu")
        self.family = family_of(self.model.config.model_type, path=folder)
        use_packed_attention(self.model)
        use_packed_delta_nets(self.model)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Move the weights to the device inside the context, if they are kept in host memory."""
        if self.keep == "gpu":
            yield
            return
        try:
            self.model.to(device=self.device)
            yield
        finally:
            self.model.to(device=torch.device("cpu"))

    def head(self, temperature: float) -> Head:
        """Return the output head at the sampling temperature, with its weight on ``device``."""
        head = head_of(self.model, self.family, temperature)
        return head._replace(weight=head.weight.to(self.device))

    @torch.no_grad()
    def score(self, tokens: Tensor, mask: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Compute the log-probabilities of the tokens that a mask selects, and the hidden states from which they are
        predicted. It must be called inside the context ``ready``. Raises ValueError if a token has no embedding in this
        model.

        Args:
            tokens: [B, S] int64, right-padded with any valid token.
            mask: [B, S] bool, True for the N tokens to select, never in column 0.
            temperature: sampling temperature, by which logits are divided.

        Returns:
            Log-probabilities, [B, S] fp32 in nats, 0 where the mask is False; and hidden states, [N, H] in row-major
            order of the N masked tokens.
        """
        wanted, hidden, _ = predicting(self.model, tokens, mask)
        head = head_of(self.model, self.family, temperature)
        logprobs, _ = token_logprobs(
            hidden, head.weight, tokens[wanted], temperature=head.temperature, logit_cap=head.logit_cap
        )
        return logprobs.new_zeros(mask.shape).index_put(wanted, logprobs), hidden
