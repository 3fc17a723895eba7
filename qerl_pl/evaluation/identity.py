"""What the records of an evaluation depend on, so that a kept one is found again by an equal evaluation alone."""

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
    """A description of an engine and rewards as they were built, or why there is none.

    Ask before they start: an engine that runs holds more than its settings.
    """
    try:
        return describe(values)
    except Indescribable as error:
        return error.with_traceback(None)


def evaluation_identity(
    policy: Policy, sampling: Sampling, *, run: Mapping[str, Any], built: str | Indescribable
) -> dict[str, Any]:
    """What the records of an evaluation are a function of, beside the prompts: JSON-ready.

    Args:
        policy: with the adapter that is evaluated.
        sampling: of the completions.
        run: what stays the same over a run: base, adapter settings, seed.
        built: from ``described``.
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
    """The cache of an evaluation in a folder; None, with a warning, where its engine or rewards have no description."""
    built = identity["engine and rewards"]
    if isinstance(built, Indescribable):
        rank_zero_warn(
            "this evaluation starts anew if it is interrupted: the engine or a reward cannot be described, and "
            f"finished batches of other ones must not be taken for theirs ({built})"
        )
        return None
    return EvaluationCache(folder, identity)
