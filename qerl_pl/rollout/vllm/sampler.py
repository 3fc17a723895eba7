"""Log-probabilities of sampled tokens on vLLM's CUDA platform, computed in parallel over the vocabulary.

vLLM 0.32 runs one Triton program per sequence, which reads the logits three times, block after block. Only ``patches``
imports this module.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from qerl_pl.kernels.token_scores import token_scores


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
    """Compute log-probabilities and ranks of sampled tokens; replaces vLLM's ``compute_topk_scores``.

    If the arguments ask for more than the sampled tokens' log-probabilities and ranks, vLLM's function is called.

    Args:
        logits: [T, V], the logits that tokens were sampled from.
        num_logprobs: number of most likely tokens to score in addition to the sampled one.
        sampled_token_ids: [T].
        cu_num_logits: index of each request's first row, if requests have several rows.
        max_per_req_token_ids: largest number of token ids that a request asks to be scored in addition.
        logits_mode: return logits instead of log-probabilities.
        others: further arguments of vLLM's function.
    """
    if num_logprobs or max_per_req_token_ids or logits_mode:
        more = {"max_per_req_token_ids": max_per_req_token_ids, "logits_mode": logits_mode, **others}
        return compute_topk_scores(logits, num_logprobs, sampled_token_ids, cu_num_logits, **more)
    logprobs, ranks = token_scores(logits, sampled_token_ids)
    return LogprobsTensors(sampled_token_ids.unsqueeze(-1), logprobs.unsqueeze(-1), ranks, cu_num_logits)
