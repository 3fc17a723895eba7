"""The settings of a run's loss (YAML section ``model.objective``), the published objectives, and default values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qerl_pl.objective.advantages import Baseline
from qerl_pl.objective.correction import Level, Mode, Rejection
from qerl_pl.objective.custom import user_advantages, user_surrogate
from qerl_pl.objective.losses import SURROGATES, Aggregation, KLKind
from qerl_pl.objective.resolved import ResolvedObjective
from qerl_pl.objective.teacher import TeacherTerm

Preset = Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"]
Surrogate = Literal["clipped", "sequence", "cispo"]

DEFINING = ("surrogate", "aggregation", "baseline")
"""Settings that cannot be changed together with a preset, because they define the published objective of that name."""

PUBLISHED: dict[Preset, dict[str, Any]] = {
    # Only the loss of DAPO (arXiv 2503.14476). DAPO's dynamic sampling, overlong filtering and length reward have
    # settings of their own.
    "dapo": {"surrogate": "clipped", "aggregation": "token", "baseline": "normalized", "clip_high": 0.28},
    # arXiv 2402.03300, without its KL (there kl_coefficient is 0.04)
    "grpo": {"surrogate": "clipped", "aggregation": "sequence", "baseline": "normalized", "clip_high": 0.2},
    # arXiv 2503.20783
    "dr_grpo": {"surrogate": "clipped", "aggregation": "constant", "baseline": "centered", "clip_high": 0.2},
    # arXiv 2507.18071
    "gspo": {"surrogate": "sequence", "aggregation": "sequence", "baseline": "normalized"},
    # arXiv 2506.13585
    "cispo": {"surrogate": "cispo", "aggregation": "token", "baseline": "normalized"},
}

CLIP_BOUNDS = {"clipped": (0.2, 0.28), "sequence": (3e-4, 4e-4), "cispo": (math.inf, 4.0)}
"""Distances from 1 of the lower and the upper clip bound of the ratio, for each surrogate loss. Those of "clipped" are
DAPO's, those of "sequence" GSPO's; those of "cispo" are this project's choice."""


@dataclass(frozen=True)
class Objective:
    """Settings of a run's loss: a published objective by its name, optionally with some settings changed, or a free
    combination.

    ``objective: gspo`` in YAML and ``--model.objective gspo`` are short for ``objective: {preset: gspo}``. A setting of
    null gets a value that follows from the other settings; ``--print_config`` shows all resulting values. The ratio is
    new / old probability of a token or completion. "Trainer" and "sampler" are the two models that compute the policy's
    probabilities, for training and in the rollout engine. "Noise" is that of AQN, which is added to the norm weights of
    the engine during a rollout, and never to those of the trainer.

    Args:
        preset: "dapo", "grpo", "dr_grpo", "gspo" or "cispo". It fixes surrogate, aggregation and baseline, which cannot
            be set to other values, and sets the clip bounds. null: DAPO's loss with the given settings changed.
        surrogate: policy loss: "clipped" ratio per token (GRPO, DAPO, Dr. GRPO), "sequence" for a clipped ratio per
            completion (GSPO), "cispo", or the import path of a function of your own (docs/extending.md).
        aggregation: how token losses are averaged: over each "token" (DAPO), over each "sequence" (GRPO), or by a
            "constant", max_tokens per sequence (Dr. GRPO). null: "sequence" with the "sequence" surrogate, else
            "token".
        clip_low: distance of the ratio's lower bound from 1; null: 0.2 for "clipped", 3e-4 for "sequence", no bound for
            "cispo".
        clip_high: distance of the ratio's upper bound from 1; null: 0.28 for "clipped", 4e-4 for "sequence", 4 for
            "cispo".
        max_ratio: two-sided clip: largest ratio where the advantage is negative, more than 1 + clip_high; null: no
            bound. Not for "cispo", whose bounds hold for both signs.
        baseline: how the rewards of a group (the completions of a prompt) become advantages: the group's mean is
            subtracted ("centered"), and the difference divided by the group's std ("normalized") or by that of all
            rewards of the rollout, without groups that dynamic sampling dropped ("batch_normalized"); or the mean of
            the other completions is subtracted ("leave_one_out"); or the import path of a function of your own
            (docs/extending.md). null: "centered" with the "constant" aggregation (Dr. GRPO), else "normalized".
        ratio_against: denominator of the surrogate's ratio. "trainer": the trainer's probabilities before the first
            update, so the ratio starts at 1 and contains no noise. "sampler": the engine's probabilities, noise
            included, as in Algorithm 1 of arXiv 2510.11696, whose old policy is the noisy one; the clip bounds then
            also act on the difference between trainer and sampler.
        correction: importance weights trainer / sampler: "truncate" clamps the weight to its bounds, "mask" sets it to
            0 where it is outside of them, "none" corrects nothing. null: "none" if ratio_against is "sampler", else
            "truncate".
        correct_noise: True: the weights correct the whole difference, from kernels and noise together. False: rollouts
            with noise are not corrected at all, so the loss keeps the effect of noise. To correct the difference
            between kernels alone, every rollout would have to be scored a second time without noise
            (docs/correctness.md has the sizes of both effects).
        correction_level: one weight per "token", one per "sequence" (the product of its tokens' ratios), or one per
            sequence that is the "geometric" mean of these ratios. null: "geometric" with the "sequence" surrogate,
            whose ratio has that form, else "token".
        correction_low: lower bound of a weight, from 0 to 1.
        correction_high: upper bound of a weight, at least 1; .inf: no bound.
        correction_divisor: the policy loss is averaged over "all" tokens or completions, including those of weight 0,
            which "mask" or rejection leaves out (IcePop's formula: this makes the optimizer step smaller), or only over
            the "kept" ones, whose weight is above 0, which costs a forward pass before the first update. KL, entropy
            and teacher terms are always averaged over all.
        rejection: bounds on a completion's ratio of trainer to sampler, outside of which the whole completion is left
            out of the loss, in addition to the importance weights. This ratio is the product of the tokens' ratios with
            ``level`` "sequence", their geometric mean with "geometric". null: none.
        filter_truncated: leave completions that were cut off at max_tokens out of the loss (DAPO's overlong filtering).
            Their rewards still count in the mean and std of their group.
        kl_coefficient: coefficient of the KL to the reference, which is the policy at the start of the run (the base,
            or the base with the adapter of model.lora.start); with 0, the reference is not computed.
        kl: estimator of the KL. With kl_in "loss": "k3" (GRPO's; its gradient is that of KL(reference || policy)) or
            "k2" (that of KL(policy || reference)); not "k1", whose gradient is 0 in expectation. With kl_in "reward":
            only "k1", because the gradient of the others vanishes near the reference. null: "k3" in the loss, "k1" in
            the reward.
        kl_in: "loss": the KL is a term of the loss. "reward": the KL of a completion, less the mean of its group, is
            subtracted from the advantage, without division by the std of "normalized" (see
            ``qerl_pl.objective.advantages.less_penalty``).
        entropy_coefficient: coefficient of an entropy bonus, which is averaged as the loss is (as in verl, while TRL
            always takes the mean over tokens). With "constant" aggregation, the bonus is mean length / max_tokens times
            as large as a mean over tokens.
        top_entropy_share: share of the tokens that have a policy loss, those with the highest entropies of the rollout.
        teacher: term of the loss that draws the policy towards ``model.teacher`` on the policy's own samples
            (distillation), with or without rewards; null: no such term.
    """

    preset: Preset | None = None
    surrogate: Surrogate | str | None = None
    aggregation: Aggregation | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    max_ratio: float | None = None
    baseline: Baseline | str | None = None
    ratio_against: Literal["trainer", "sampler"] = "trainer"
    correction: Mode | None = None
    correction_level: Level | None = None
    correction_low: float = 0.0
    correction_high: float = 2.0
    correction_divisor: Literal["all", "kept"] = "all"
    correct_noise: bool = True
    rejection: Rejection | None = None
    filter_truncated: bool = False
    kl_coefficient: float = 0.0
    kl: KLKind | None = None
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coefficient: float = 0.0
    top_entropy_share: float = 1.0
    teacher: TeacherTerm | None = None

    def __post_init__(self) -> None:
        self.resolve()

    def resolve(self) -> ResolvedObjective:
        """Return the objective with values in place of nulls and functions in place of import paths.

        Raises:
            ValueError: a value is out of range, contradicts another or has no effect with it, or an import path names
                no suitable function.
        """
        values = completed(vars(self))
        del values["preset"]
        bounds = {name: values[name] for name in ("clip_low", "clip_high", "max_ratio") if values[name] is not None}
        if (surrogate := SURROGATES.get(values["surrogate"])) is None:
            surrogate = user_surrogate(values["surrogate"], **bounds)
        if (baseline := values["baseline"]) not in get_args(Baseline):
            baseline = user_advantages(baseline)
        return ResolvedObjective(**values | {"surrogate": surrogate, "baseline": baseline})


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an objective with values in place of those nulls that follow from other settings.
    ``values`` has all settings by name.

    With the "constant" aggregation, the rule for advantages becomes "centered", as in Dr. GRPO, which weighs every
    token and every prompt equally. Importance weights are on, because the probabilities of sampler and trainer always
    differ a little. They are off if the denominator of the surrogate's ratio is the sampler's probability, because the
    ratio then contains the difference. There is one weight per token or, with the "sequence" surrogate, one per
    completion, the geometric mean over its tokens, as GSPO's ratio is. Clip bounds of a user's own surrogate stay null.

    Raises:
        ValueError: a setting contradicts the published objective that the setting ``preset`` names, or names neither a
            known surrogate or baseline nor an import path.
    """
    settings = dict(values)
    preset: Preset | None = settings["preset"]
    for name, value in PUBLISHED[preset].items() if preset is not None else ():
        if settings[name] is None:
            settings[name] = value
        elif name in DEFINING and settings[name] != value:
            raise ValueError(
                f"model.objective.{name} is {settings[name]!r} and preset is {preset!r}, which has {value!r}: "
                f"leave {name} out (or null), or the preset, whose other values may be given one by one"
            )
    usual = {
        "surrogate": lambda: "clipped",
        "aggregation": lambda: "sequence" if settings["surrogate"] == "sequence" else "token",
        "baseline": lambda: "centered" if settings["aggregation"] == "constant" else "normalized",
        "clip_low": lambda: CLIP_BOUNDS.get(settings["surrogate"], (None, None))[0],
        "clip_high": lambda: CLIP_BOUNDS.get(settings["surrogate"], (None, None))[1],
        "kl": lambda: "k3" if settings["kl_in"] == "loss" else "k1",
        "correction": lambda: "none" if settings["ratio_against"] == "sampler" else "truncate",
        "correction_level": lambda: "geometric" if settings["surrogate"] == "sequence" else "token",
    }
    for name, value in usual.items():  # in this order, because some values follow from those of earlier settings
        if settings[name] is None:
            settings[name] = value()
    for name, known in (("surrogate", get_args(Surrogate)), ("baseline", get_args(Baseline))):
        if settings[name] not in known and "." not in settings[name]:
            raise ValueError(
                f"model.objective.{name} is {settings[name]!r}; expected {', '.join(known)}, or the import path of a "
                "function, such as my_module.my_function"
            )
    return settings
