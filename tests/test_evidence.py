"""Draws raise no alarm at the stated rate; what is no draw does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from callbacks.rollout_evidence import repeats
from qerl_pl.policy.evidence import (
    ALTERNATIVES,
    NUCLEI,
    OUTSIDE,
    POWERS,
    accumulated,
    alternative_logprobs,
    copy_evidence,
    jump,
    log_false_alarm,
)


def logits_of(kind: str, num: int, generator: torch.Generator) -> Tensor:
    """[num, 50]: from nearly uniform to nearly certain."""
    scale = {"flat": 0.1, "usual": 2.0, "sharp": 8.0}.get(kind)
    if scale is None:  # one certain token, and rare others
        logits = torch.zeros(num, 50)
        logits[:, 0] = 9 + 3 * torch.rand(num, generator=generator)
        return logits
    return scale * torch.randn(num, 50, generator=generator)


def measured(logits: Tensor, sampled_from: Tensor, reported: Tensor, generator: torch.Generator) -> Tensor:
    """[K] evidence of draws from one of three [N, V] logits; the trainer has the first, the engine reports the last."""
    tokens = torch.multinomial(sampled_from.softmax(1), 1, generator=generator)
    found = alternative_logprobs(logits.double(), tokens[:, 0])
    return (found[:, 1:] - reported.double().log_softmax(1).gather(1, tokens)).sum(0)


def nucleus(logits: Tensor, mass: float) -> Tensor:
    """The logits with -inf for what top_p leaves out."""
    p, order = logits.softmax(1).sort(dim=1, descending=True)
    is_out = (p.cumsum(1) - p >= mass).gather(1, order.argsort(dim=1))
    return logits.masked_fill(is_out, -torch.inf)


class TestAlternatives:
    def test_they_are_the_distributions_that_they_are_called(self):
        generator = torch.Generator().manual_seed(6)
        logits = torch.cat([logits_of(kind, 3, generator) for kind in ("flat", "usual", "sharp", "rare")]).double()
        every = torch.stack(
            [alternative_logprobs(logits, torch.full((len(logits),), token)) for token in range(logits.shape[1])], dim=2
        )  # [R, 1 + K, V]
        torch.testing.assert_close(every.exp().sum(2), torch.ones(every.shape[:2]).double())
        torch.testing.assert_close(every[:, 0], logits.log_softmax(1))
        for column, power in enumerate(POWERS, 1):
            torch.testing.assert_close(every[:, column], (power * logits).log_softmax(1))
        for column, mass in enumerate(NUCLEI, 1 + len(POWERS)):
            outside = nucleus(logits, mass).isinf()
            expected = math.log(OUTSIDE) + every[:, 0]
            torch.testing.assert_close(every[:, column][outside], expected[outside])
            inside = every[:, column].exp().masked_fill(outside, 0).sum(1)
            assert bool((inside >= 1 - OUTSIDE).all())
        assert every.shape[1] == 1 + len(ALTERNATIVES)

    def test_equal_tokens_have_equal_shares_of_a_nucleus(self):
        every = torch.stack([alternative_logprobs(torch.zeros(1, 4), torch.tensor([token])) for token in range(4)])
        torch.testing.assert_close(every.exp().sum(0), torch.ones(1, every.shape[2]))
        torch.testing.assert_close(every, torch.full_like(every, 0.25).log())


class TestSampling:
    @pytest.mark.parametrize("noise", [0.0, 0.3], ids=["same", "other kernels and noise"])
    @pytest.mark.parametrize("kind", ["flat", "usual", "sharp", "rare"])
    def test_the_probability_is_a_bound_for_draws(self, kind, noise):
        generator = torch.Generator().manual_seed(1)
        logits = logits_of(kind, 100, generator)
        engine = logits + noise * torch.randn(logits.shape, generator=generator)
        found = torch.tensor([log_false_alarm(measured(logits, engine, engine, generator)) for _ in range(500)])
        for level in (0.3, 0.1, 0.01):
            assert (found < math.log(level)).double().mean() <= level
        assert found.min() > math.log(1e-6)

    @pytest.mark.parametrize(("temperature", "best"), [(1e-3, 0.25), (0.5, 0.5), (0.8, 0.8), (1.33, 1.3), (2.0, 2.0)])
    def test_tokens_of_another_temperature_are_seen_although_they_are_scored_at_1(self, temperature, best):
        generator = torch.Generator().manual_seed(2)
        logits = logits_of("usual", 2000, generator)
        found = measured(logits, logits / temperature, logits, generator)
        assert log_false_alarm(found) < math.log(1e-9)
        assert ALTERNATIVES[int(found.argmax())] == f"temperature x {best:g}"

    @pytest.mark.parametrize("mass", [0.8, 0.95])
    def test_a_nucleus_scored_afterwards_is_seen(self, mass):
        generator = torch.Generator().manual_seed(3)
        logits = logits_of("usual", 2000, generator)
        found = measured(logits, nucleus(logits, mass), logits, generator)
        assert log_false_alarm(found) < math.log(1e-9)
        assert ALTERNATIVES[int(found.argmax())] == f"top_p {mass:g}"

    def test_what_one_rollout_does_not_show_several_do_and_draws_never(self):
        generator = torch.Generator().manual_seed(4)
        logits = logits_of("rare", 200, generator)
        start = torch.full((len(ALTERNATIVES),), -torch.inf).double()
        alarms = {}
        for temperature in (1.0, 1.5):
            state, alarms[temperature] = start, []
            for _ in range(100):
                state = accumulated(state, measured(logits, logits / temperature, logits, generator))
                alarms[temperature].append(log_false_alarm(state) < math.log(1e-6))
        assert not any(alarms[1.0])
        assert not alarms[1.5][0]
        assert alarms[1.5][-1]

    def test_the_first_rollout_counts_alone_and_no_tokens_are_no_evidence(self):
        start = torch.full((3,), -torch.inf).double()
        evidence = torch.tensor([1.0, -5.0, 0.0]).double()
        assert torch.equal(accumulated(start, evidence), evidence)
        twice = accumulated(accumulated(start, evidence), evidence)
        torch.testing.assert_close(twice.exp(), (1 + evidence.exp()) * evidence.exp())
        assert log_false_alarm(accumulated(start, torch.zeros(3).double())) == 0.0


class TestCopies:
    def rows(self, num_groups: int, size: int, num_values: int, generator: torch.Generator) -> list:
        logits = 2 * torch.randn(num_groups, num_values, generator=generator)
        drawn = torch.multinomial(logits.softmax(1), size, replacement=True, generator=generator)
        logprobs = logits.log_softmax(1).gather(1, drawn)
        return [
            (group, value, logprob)
            for group, (values, scores) in enumerate(zip(drawn.tolist(), logprobs.tolist(), strict=True))
            for value, logprob in zip(values, scores, strict=True)
        ]

    @pytest.mark.parametrize("num_values", [2, 20, 1000])
    def test_draws_repeat_as_often_as_they_may(self, num_values):
        generator = torch.Generator().manual_seed(5)
        found = torch.tensor(
            [log_false_alarm(copy_evidence(repeats([], self.rows(8, 8, num_values, generator)))) for _ in range(500)]
        )
        for level in (0.1, 0.01):
            assert (found < math.log(level)).double().mean() <= level

    def test_a_completion_copied_over_its_group_is_seen_and_one_that_is_certain_is_not(self):
        others = [(group, 100 + index, -30.0) for group in range(1, 30) for index in range(8)]
        assert log_false_alarm(copy_evidence(repeats([], [*others, *[(0, 0, -20.0)] * 8]))) < math.log(1e-9)
        assert log_false_alarm(copy_evidence(repeats([], [*others, *[(0, 0, -0.01)] * 8]))) == 0.0

    def test_one_group_of_copies_is_seen_among_many_that_nearly_always_repeat(self):
        likely = [(group, 0, -0.1) for group in range(1, 32) for _ in range(8)]
        rare = [(group, 1, -2.4) for group in range(1, 32, 2)]
        assert log_false_alarm(copy_evidence(repeats([], [*likely, *rare]))) > math.log(0.5)
        assert log_false_alarm(copy_evidence(repeats([], [*likely, *rare, *[(0, 0, -4.0)] * 8]))) < math.log(1e-6)

    def test_completions_of_an_earlier_rollout_are_seen(self):
        rows = [(prompt, index, -10.0) for prompt in range(4) for index in range(4)]
        assert log_false_alarm(copy_evidence(repeats([], rows))) == 0.0
        seen = [(prompt, completion) for prompt, completion, _ in rows]
        assert log_false_alarm(copy_evidence(repeats(seen, rows))) < math.log(1e-9)


class TestJump:
    def test_it_is_against_the_median_and_small_values_and_short_histories_do_not_count(self):
        assert jump(1.0, [1e-3], floor=1e-6) == (1.0, 0.0)
        assert jump(1e-5, [1e-7, 1e-7], floor=1e-4) == (1.0, 0.0)
        found = jump(0.1, [0.01, 0.011, 0.009, 5.0, 0.01], floor=1e-6)
        assert found.ratio == pytest.approx(10)
        assert found.sigmas > 6
