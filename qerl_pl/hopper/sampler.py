"""Faster replacements for parts of vLLM's sampler on CUDA: the log-probabilities of sampled tokens, and the copies of
the sequences' sampling state to the GPU. The module ``patches`` installs them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from qerl_pl.hopper.token_scores import token_scores


def sampled_scores(
    logits: Tensor,
    num_logprobs: int,
    sampled_token_ids: Tensor,
    cu_num_logits: list[int] | None = None,
    *,
    max_per_req_token_ids: int = 0,
    logits_mode: bool = False,
    **others: Any,
) -> LogprobsTensors:
    """Compute the log-probabilities of T sampled tokens, and their ranks, from logits [T, V]. Replaces vLLM's
    ``compute_topk_scores``, but calls it if log-probabilities of other tokens are wanted, too."""
    if num_logprobs or max_per_req_token_ids or logits_mode:
        others |= {"max_per_req_token_ids": max_per_req_token_ids, "logits_mode": logits_mode}
        return compute_topk_scores(logits, num_logprobs, sampled_token_ids, cu_num_logits, **others)
    logprobs, ranks = token_scores(logits, sampled_token_ids)
    return LogprobsTensors(sampled_token_ids.unsqueeze(-1), logprobs.unsqueeze(-1), ranks, cu_num_logits)


def copy_if_changed(self: UvaBackedTensor, n: int | None = None) -> torch.Tensor:
    """Copy one of vLLM's tables with the state of sequences to the GPU if it has changed since the last call, always to
    the same address, so that CUDA graphs can read it, and return the first n rows of the copy. Replaces
    ``UvaBackedTensor.copy_to_uva``."""
    copied = vars(self).get("copied")  # values on the GPU; None: ``self.gpu`` is still vLLM's buffer
    if copied is None:
        self.gpu = torch.zeros_like(self.gpu)
    if copied is None or not np.array_equal(copied, self.np):
        async_tensor_h2d(self.np, out=self.gpu)
        vars(self)["copied"] = self.np.copy()
    return self.gpu[:n]
