"""A sampled token's log-probability on vLLM's CUDA platform, in parallel over the vocabulary.

vLLM 0.32 computes it with one program a sequence, which reads the logits block after block, three times. Only
``patches`` imports this module.
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
    """vLLM's ``compute_topk_scores`` as its sampler calls it; it is vLLM's own where more than this is asked for.

    Args:
        logits: [T, V], those that were sampled from.
        num_logprobs: so many of the likeliest tokens too.
        sampled_token_ids: [T].
        cu_num_logits: where each request's rows begin, if not each has one.
        max_per_req_token_ids: so many tokens that the requests name.
        logits_mode: logits instead of log-probabilities.
        others: what vLLM needs for tokens that the requests name.
    """
    if num_logprobs or max_per_req_token_ids or logits_mode:
        more = {"max_per_req_token_ids": max_per_req_token_ids, "logits_mode": logits_mode, **others}
        return compute_topk_scores(logits, num_logprobs, sampled_token_ids, cu_num_logits, **more)
    logprobs, ranks = token_scores(logits, sampled_token_ids)
    return LogprobsTensors(sampled_token_ids.unsqueeze(-1), logprobs.unsqueeze(-1), ranks, cu_num_logits)
