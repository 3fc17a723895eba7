"""Describe in words what the checks of a run found, from its logged scalars."""

from collections.abc import Mapping
from typing import Any

from qerl_pl.results.curves import Curve

# Limit on the share of tokens whose probability in the trainer is not within 10 % of the sampler's; with a larger
# share, the check counts as failed. With correct engines and pretrained models in bf16, the share is up to 0.06.
OUTSIDE = 0.15

CAUSES = {
    "routing": "the sampler's experts",
    "kernel": "kernels and precision",
    "noise": "the noise that was added",
    "decode": "decoding token by token",
    "staleness": "the updates since the rollout",
}
"""Names of the causes into which ``callbacks.ledger`` splits the difference between sampler and trainer."""
Verdict = tuple[bool | None, str]
"""Result of a check: True if it found no fault, False if it found one, None if it did not run; and a text."""


def verdicts(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Describe what each check of a run found, from its logged scalars: one dict per check with ``check`` (its name),
    ``good`` (True: no fault, False: a fault, None: it did not run) and ``text``."""
    checks = {
        "Canary": _canary,
        "Sampler and trainer": _gap,
        "Ledger": _ledger,
        "Noise (AQN)": _noise,
        "Memory plan": _memory,
    }
    results = {check: verdict(curves) for check, verdict in checks.items()}
    return [{"check": check, "good": good, "text": text} for check, (good, text) in results.items()]


def _canary(curves: Mapping[str, Curve]) -> Verdict:
    if "canary/tensors_checked" not in curves:
        return None, "It did not run: nothing proves which policy the completions came from."
    checked = curves["canary/tensors_checked"].values
    gaps = curves.get("canary/score_gap")
    scores = f" Scores of its own text differed by at most {max(gaps.values):.2g} nats." if gaps else ""
    return True, (
        f"After each of {len(checked)} rollouts {max(checked):.0f} tensors were read back from the engine and equalled "
        f"the trainer's.{scores}"
    )


def _gap(curves: Mapping[str, Curve]) -> Verdict:
    if "gap/mean_abs" not in curves:
        return None, "No gap between sampler and trainer was logged."
    mean, outside = curves["gap/mean_abs"].values, curves.get("gap/outside_share")
    share = max(outside.values) if outside else 0.0
    return share <= OUTSIDE, (
        f"Log-probabilities of the sampled tokens differ by {sum(mean) / len(mean):.2g} nats on average over the run, "
        f"{max(mean):.2g} in the worst rollout; at most {share:.1%} of a rollout's tokens have a probability ratio "
        "outside 0.9 to 1.1."
    )


def _ledger(curves: Mapping[str, Curve]) -> Verdict:
    means = {
        words: sum(curve.values) / len(curve.values)
        for cause, words in CAUSES.items()
        if (curve := curves.get(f"ledger/{cause}/mean_abs")) is not None
    }
    if not means:
        return None, "It did not run: the gap is not split into its causes."
    split = ", ".join(f"{words} {mean:.2g}" for words, mean in means.items())
    before = {words: mean for words, mean in means.items() if words != CAUSES["staleness"]}
    most = f" Before the update most is due to {max(before, key=before.__getitem__)}." if before else ""
    return True, f"Mean difference by cause, in nats: {split}.{most}"


def _noise(curves: Mapping[str, Curve]) -> Verdict:
    if "aqn/sigma" not in curves:
        return None, "Rollouts were sampled without added noise."
    asked, real = curves["aqn/sigma"], curves.get("aqn/sigma_realized")
    if real is None or not any(asked.values):
        return None, f"Scheduled; at most {max(asked.values):.2g} so far."
    at = dict(zip(asked.steps, asked.values, strict=True))
    ratios = [value / at[step] for step, value in zip(real.steps, real.values, strict=True) if at.get(step)]
    off = abs(sum(ratios) / len(ratios) - 1)
    return off <= 0.05, (
        f"Sigma went from {max(asked.values):.2g} to {asked.values[-1]:.2g}; after rounding, the "
        f"noise differed from sigma by {off:.1%} on average over the run."
    )


def _memory(curves: Mapping[str, Curve]) -> Verdict:
    pairs = {
        tag.removeprefix("memory/predicted_"): (max(curve.values), max(curves[measured].values))
        for tag, curve in curves.items()
        if tag.startswith("memory/predicted_") and (measured := tag.replace("predicted_", "")) in curves
    }
    if not pairs:
        return None, "There is none without a GPU."
    words = "; ".join(
        f"{name.removesuffix('_gib')}: {planned:.1f} GiB planned, {real:.1f} GiB measured"
        for name, (planned, real) in pairs.items()
    )
    return max(real / planned - 1 for planned, real in pairs.values()) <= 0.05, words + "."
