"""Collect everything that an evaluation's records depend on, which is the key of the evaluation's cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from qerl_pl.evaluation.cache import EvaluationCache
from qerl_pl.evaluation.fingerprint import Indescribable, describe, digest_of
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.checksums import checksums
from qerl_pl.rollout.common import end_tokens


def described(*values: object) -> str | Indescribable:
    """Describe the settings and source of an engine and rewards; returns the error if they cannot be described.

    Call this before the engine starts, because a running engine holds more than its settings.
    """
    try:
        return describe(values)
    except Indescribable as error:
        return error.with_traceback(None)


def evaluation_identity(
    policy: Policy, sampling: Sampling, *, run: Mapping[str, Any], built: str | Indescribable
) -> dict[str, Any]:
    """Collect what the records of an evaluation depend on, except the prompts, as JSON-serialisable values.

    Args:
        policy: the policy with the adapter that is evaluated.
        sampling: settings with which completions are sampled.
        run: identity of the run: base, adapter settings, seed.
        built: description of engine and rewards, from ``described``.
    """
    base = Path(policy.base)
    tokenizer = chain.from_iterable(base.glob(name) for name in ("*token*", "vocab*", "merges*"))
    return {
        **run,
        "adapter": checksums(policy.adapter_state()),
        "sampling": asdict(sampling),
        "dtype": str(policy.dtype),
        "engine and rewards": built,
        "end_tokens": end_tokens(policy.base, policy.config),
        "tokenizer": digest_of(sorted(tokenizer)),
    }


def open_cache(folder: Path, identity: Mapping[str, Any]) -> EvaluationCache | None:
    """Open an evaluation's cache in a folder; returns None, with a warning, if engine or rewards cannot be
    described."""
    built = identity["engine and rewards"]
    if isinstance(built, Indescribable):
        rank_zero_warn(
            "this evaluation starts anew if it is interrupted: the engine or a reward cannot be described, and "
            f"finished batches of other ones must not be taken for theirs ({built})"
        )
        return None
    return EvaluationCache(folder, identity)
