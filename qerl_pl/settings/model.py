"""Checks of the module's settings that need no model, so that a mistake is found before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from qerl_pl.memory.device import check_gpu_memory
from qerl_pl.policy.elementwise import FusedSetting, fused_wanted
from qerl_pl.policy.recompute import Setting, recompute_of
from qerl_pl.rollout.base import Sampling


def check_counts(
    *,
    updates_per_rollout: int,
    mini_batches: int,
    warmup_steps: int,
    max_grad_norm: float,
    max_unscored_share: float,
    gpu_memory: float | None,
) -> None:
    """Check single numbers of the section ``model``.

    Raises:
        ValueError: one is out of its range.
    """
    for name, value in (("updates_per_rollout", updates_per_rollout), ("mini_batches", mini_batches)):
        if value < 1:
            raise ValueError(f"model.{name} is {value}; expected at least 1")
    if not max_grad_norm >= 0:
        raise ValueError(f"model.max_grad_norm is {max_grad_norm}; expected a norm above 0, or 0 for no clipping")
    if warmup_steps < 0:
        raise ValueError(f"model.warmup_steps is {warmup_steps}; expected 0 optimizer steps or more")
    if not 0 <= max_unscored_share <= 1:
        raise ValueError(f"model.max_unscored_share is {max_unscored_share}; expected 0 to 1")
    check_gpu_memory(gpu_memory, "model.gpu_memory")


def check_sampling(sampling: Sampling) -> None:
    """Check that advantages and importance ratios mean something for completions that are sampled so.

    Raises:
        ValueError: sampling is greedy, a group has one completion, or top_p or top_k cut the distribution.
    """
    if sampling.temperature == 0:
        raise ValueError("model.sampling.temperature is 0; training explores by sampling: set it above 0, e.g. 1.0")
    if sampling.num_completions < 2:
        raise ValueError(
            f"model.sampling.num_completions is {sampling.num_completions}; advantages compare the completions of "
            "one prompt, so expected at least 2"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ValueError(
            f"model.sampling has top_p {sampling.top_p} and top_k {sampling.top_k}; training samples from all "
            "tokens, top_p 1 and top_k 0: the sampler's log-probabilities would be over the tokens that are kept, "
            "the trainer's are over all. Evaluation may cut them: model.val_sampling"
        )


def check_micro_batch(micro_batch_tokens: int | None, *, prompt_tokens: int, completion_tokens: int) -> None:
    """Check that the longest row fits a micro-batch.

    Raises:
        ValueError: it does not.
    """
    longest = prompt_tokens + completion_tokens
    if micro_batch_tokens is not None and longest > micro_batch_tokens:
        raise ValueError(
            f"a prompt of {prompt_tokens} and a completion of {completion_tokens} tokens are {longest}, more than "
            f"model.micro_batch_tokens ({micro_batch_tokens}); raise it, or shorten prompts or completions"
        )


def check_passes(
    base_config: Mapping, gradient_checkpointing: Setting, offload_checkpoints: bool, fused_elementwise: FusedSetting
) -> None:
    """Check how training passes are computed.

    Raises:
        ValueError: there are fewer blocks, nothing to offload, or a library that is asked for is not installed.
    """
    recompute_of(gradient_checkpointing, base_config["num_hidden_layers"], offload_checkpoints)
    fused_wanted(fused_elementwise)
