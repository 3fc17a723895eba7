"""Tests of ``branch_evidence``, which compares completions of one prompt where they branch: it detects completions that
were chosen among several, and a false alarm is at most as probable as ``log_false_alarm`` says."""

import math
import random
from functools import cache

import pytest
import torch

from qerl_pl.policy.branches import CERTAIN, ODDS, branch_evidence
from qerl_pl.policy.evidence import SHARES, log_false_alarm

END = 0
MOST = 12


@cache
def weights_at(prompt: int, place: int, before: tuple[int, ...]) -> list[float]:
    """Return the weights of the four tokens at a place of a completion, given the token before, if there is one."""
    chain = random.Random(f"{prompt} {place} {before}")
    return [chain.random() ** 6 for _ in range(4)]


def draw(rng: random.Random, prompt: int) -> tuple[list[int], list[float]]:
    """Draw a completion of tokens 1 to 3 and an end token from a small Markov chain. A token's probabilities depend on
    the prompt, on the token's place and on the token before. Returns the tokens and their log-probabilities."""
    tokens, logprobs = [], []
    for place in range(MOST):
        weights = weights_at(prompt, place, tuple(tokens[-1:]))
        token = rng.choices(range(4), weights)[0]
        tokens.append(token)
        logprobs.append(math.log(weights[token] / sum(weights)))
        if token == END:
            break
    return tokens, logprobs


def evidence_of(rng: random.Random, choose, *, groups: int = 32, size: int = 8) -> float:
    """Let ``choose`` select completions, and return how clearly ``branch_evidence`` shows this: the log of a bound on
    the probability that completions which were not selected give at least as much evidence. For each of ``groups``
    prompts, ``choose`` orders 2 ``size`` completions, and the first ``size`` are kept."""
    found = [choose([draw(rng, prompt) for _ in range(2 * size)])[:size] for prompt in range(groups)]
    numbers = [[[len(tokens), float(tokens[0])] for tokens, _ in group] for group in found]
    return log_false_alarm(branch_evidence(found, numbers))


def test_draws_raise_alarms_no_more_often_than_stated():
    rng = random.Random(1)
    chances = torch.tensor([evidence_of(rng, lambda rows: rows, groups=8) for _ in range(300)])
    for level in (0.3, 0.1, 0.01):
        assert (chances < math.log(level)).double().mean() <= level


@pytest.mark.parametrize(
    "choose",
    [
        lambda rows: sorted(rows, key=lambda row: len(row[0])),
        lambda rows: sorted(rows, key=lambda row: -len(row[0])),
        lambda rows: sorted(rows, key=lambda row: -row[0][0]),
        lambda rows: [row for row, _ in zip(rows[:4], rows, strict=False) for _ in range(2)],
    ],
    ids=["shortest", "longest", "best", "copied"],
)
def test_a_choice_is_seen_in_one_rollout(choose):
    assert evidence_of(random.Random(2), choose) < math.log(1e-6)


def test_a_certain_policy_and_one_that_never_repeats_give_no_evidence():
    certain = [[([1, 2, END], [0.0, 0.0, 0.0])] * 8] * 4
    assert log_false_alarm(branch_evidence(certain, [[[3.0]] * 8] * 4)) == pytest.approx(0.0)
    apart = [[([index, END], [-9.0, 0.0]) for index in range(8)] for _ in range(4)]
    assert log_false_alarm(branch_evidence(apart, [[[2.0]] * 8] * 4)) > -1.0


def reference(group, numbers):
    """Compute by loops, for one group, the log-likelihood ratios that the docstring of ``branch_evidence`` defines: for
    each property, direction and o, that of an engine that selects completions to an engine that does not. For each
    token of a completion, all earlier completions are searched for those with the same tokens before this place."""
    found = []
    for number in range(len(numbers[0])):
        for sign in (1, -1):
            for odds in ODDS:
                total = 0.0
                for index, (tokens, _) in enumerate(group):
                    mean = sum(own[number] for own in numbers[:index]) / max(1, index)
                    for place, token in enumerate(tokens):
                        same = [k for k in range(index) if group[k][0][: place + 1][:-1] == tokens[:place]]
                        ways: dict[int, list[int]] = {}
                        for k in same:
                            if len(group[k][0]) > place:
                                ways.setdefault(group[k][0][place], []).append(k)
                        chance = {way: math.exp(group[ks[0]][1][place]) for way, ks in ways.items()}
                        if not ways or sum(chance.values()) > CERTAIN:
                            continue
                        good = [
                            way
                            for way, ks in ways.items()
                            if sign * (sum(numbers[k][number] for k in ks) / len(ks) - mean) <= 0
                        ]
                        mass = min(1.0, sum(chance[way] for way in good))
                        total += math.log(odds) * (token in good) - math.log1p((odds - 1) * mass)
                found.append(total)
    return found


def test_evidence_is_that_of_comparing_every_pair_of_prefixes():
    rng = random.Random(3)
    for _ in range(20):
        group = [draw(rng, prompt=0) for _ in range(6)]
        group += [(tokens[: rng.randrange(len(tokens))], logprobs) for tokens, logprobs in group[:3]]
        group = [(tokens, logprobs[: len(tokens)]) for tokens, logprobs in rng.sample(group, len(group))]
        numbers = [[float(len(tokens)), rng.random()] for tokens, _ in group]
        found = branch_evidence([group], [numbers]).view(len(SHARES), -1)[0]
        assert found.tolist() == pytest.approx(reference(group, numbers))
