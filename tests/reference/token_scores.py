"""Scores of tokens in plain PyTorch, the definition that tests compare ``hopper.token_scores`` with."""

from torch import Tensor


def token_scores_reference(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``token_scores`` in plain PyTorch, log-probabilities in fp64."""
    picked = tokens[:, None]
    logprobs = logits.double().log_softmax(-1).gather(1, picked)[:, 0]
    return logprobs, (logits >= logits.gather(1, picked)).sum(1)
