"""Messages of the sequential tests by which the callback RolloutEvidence stops a run."""

from torch import Tensor

from qerl_pl.policy.evidence import ALTERNATIVES, COPIED, COPY_RATES, SHARES
from qerl_pl.rollout.other_policies import OTHER_POLICIES

FAULTS = {  # by the test's name; {best}: the fault that explains its results best
    "order": (
        "length or log-probability of the completions up to rollout {rollout} depends on their place in the group "
        "({chance}), so they are no independent draws: the engine sorts or chooses completions, or samples some of a "
        "group in another way"
    ),
    "copies": (
        "completions up to rollout {rollout} repeat others of the same prompt {best} often than independent draws "
        "would ({chance}): the engine copies completions or chooses among them, or its seed does not change from one "
        "to the next"
    ),
    "branches": (
        "completions up to rollout {rollout} begin like others of their group that are short, long, good or bad more "
        "often than their probabilities say ({chance}): the engine chooses among completions, or copies them"
    ),
    "other_sampling": (
        "the sampled tokens up to rollout {rollout} are no draws from the distribution whose log-probabilities the "
        "engine reports ({chance}); {best} explains them best. Look for another temperature, greedy decoding, top_p, "
        "top_k or limits of length in the engine, a choice among completions, or altered tokens"
    ),
    "other_draws": (
        "some or all tokens up to rollout {rollout} are not those that the random numbers of their requests give "
        "({chance}): the engine answered other prompts than it was given, such as prompts with a token more or less, "
        "chose among completions, exchanged or copied them, or changed tokens after sampling"
    ),
    "other_policy": (
        "some or all completions up to rollout {rollout} look as if they were sampled {best} ({chance}): the "
        "log-probabilities that the engine reports differ from the trainer's as those of such a policy do. Look for "
        "requests that the engine answers without the adapter or the noise, with an old adapter, or with cached "
        "prefixes of an older policy"
    ),
}
AMBIGUOUS = 5.0  # nats; policies whose evidence is less than this below the largest are named in the message, too


def verdict(name: str, log_m: Tensor, *, rollout: int, chance: float) -> str:
    """Return a message that says what is wrong with the rollouts of a run up to ``rollout``, according to the test
    ``name`` with the results ``log_m`` (``evidence.accumulated``). In a correct run, the probability of such results is
    below ``chance`` per rollout."""
    best, place = "", int(log_m.argmax())
    if name == "other_sampling":
        best = ALTERNATIVES[place % len(ALTERNATIVES)]
    elif name == "copies":
        best = "more" if place % (len(log_m) // len(SHARES)) < len(COPY_RATES) * len(COPIED) else "less"
    elif name == "other_policy":
        values = log_m.reshape(-1, len(OTHER_POLICIES)).amax(dim=0)
        near = values > values.max() - AMBIGUOUS
        best = ", or ".join(policy for policy, is_near in zip(OTHER_POLICIES, near, strict=True) if is_near)
    return FAULTS[name].format(rollout=rollout, chance=f"chance: below {chance:.1g} per rollout", best=best)
