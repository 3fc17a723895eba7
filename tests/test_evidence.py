"""Tests of the evidence that completions are not samples of the policy: with true samples, a false alarm is at most as
probable as ``log_false_alarm`` says, and other samples do raise alarms."""

import math
import warnings

import pytest
import torch
from torch import Tensor

from qerl_pl.policy.evidence import (
    ALTERNATIVES,
    END_ODDS,
    NUCLEI,
    OUTSIDE,
    POWERS,
    RANDOM,
    TOPS,
    accumulated,
    alternative_logprobs,
    copy_evidence,
    in_shares,
    log_false_alarm,
    order_evidence,
    repeats,
)
from qerl_pl.policy.jumps import apart, change, far_share, high_gap, jump, logit_gap

ENDS = torch.tensor([3, 7])


def logits_of(kind: str, num: int, generator: torch.Generator) -> Tensor:
    """Draw logits [num, 50] of a kind, from nearly uniform to nearly certain."""
    scale = {"flat": 0.1, "usual": 2.0, "sharp": 8.0}.get(kind)
    if scale is None:  # one certain token, and rare others
        logits = torch.zeros(num, 50)
        logits[:, 0] = 9 + 3 * torch.rand(num, generator=generator)
        return logits
    return scale * torch.randn(num, 50, generator=generator)


def measured(logits: Tensor, sampled_from: Tensor, reported: Tensor, generator: torch.Generator) -> Tensor:
    """Sample N tokens from the logits ``sampled_from`` [N, V], and return the evidence [K] for each of K other ways to
    sample. The trainer computes ``logits``; the engine reports log-probabilities that follow from the logits
    ``reported``."""
    tokens = torch.multinomial(sampled_from.softmax(1), 1, generator=generator)
    found = alternative_logprobs(logits.double(), tokens[:, 0], ENDS)
    return (found[:, 1:] - reported.double().log_softmax(1).gather(1, tokens)).sum(0)


def nucleus(logits: Tensor, mass: float) -> Tensor:
    """Set the logits of tokens that top_p leaves out to -inf."""
    p, order = logits.softmax(1).sort(dim=1, descending=True)
    is_out = (p.cumsum(1) - p >= mass).gather(1, order.argsort(dim=1))
    return logits.masked_fill(is_out, -torch.inf)


class TestAlternatives:
    def test_they_are_the_distributions_that_they_are_called(self):
        generator = torch.Generator().manual_seed(6)
        logits = torch.cat([logits_of(kind, 3, generator) for kind in ("flat", "usual", "sharp", "rare")]).double()
        every = torch.stack(
            [alternative_logprobs(logits, torch.full((len(logits),), token), ENDS) for token in range(logits.shape[1])],
            dim=2,
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
        first = 1 + len(POWERS) + len(NUCLEI)
        for column, size in enumerate(TOPS, first):
            kept = logits.topk(min(size, logits.shape[1]), dim=1).indices
            inside = torch.zeros_like(logits, dtype=torch.bool).scatter(1, kept, value=True)
            cut = logits.masked_fill(~inside, -torch.inf).softmax(1)
            expected = (OUTSIDE * logits.softmax(1) + (1 - OUTSIDE) * cut)[:9]  # the others have ties, all kept
            torch.testing.assert_close(every[:9, column].exp(), expected)
        for column, odds in enumerate(END_ODDS, first + len(TOPS)):
            weights = torch.ones(logits.shape[1]).double().index_fill(0, ENDS, odds)
            torch.testing.assert_close(every[:, column], (logits + weights.log()).log_softmax(1))
        mixed = (1 - RANDOM) * logits.softmax(1) + RANDOM / logits.shape[1]
        torch.testing.assert_close(every[:, -1].exp(), mixed)
        assert every.shape[1] == 1 + len(ALTERNATIVES)

    def test_a_share_of_units_is_a_mixture(self):
        evidence = torch.tensor([[3.0, -2.0, 0.0], [40.0, -50.0, -50.0]]).double()
        found = in_shares(evidence)
        torch.testing.assert_close(found[:2], evidence.sum(1))
        torch.testing.assert_close(found[2:4], (3 / 4 + evidence.exp() / 4).log().sum(1))
        torch.testing.assert_close(found[4:], (15 / 16 + evidence.exp() / 16).log().sum(1))
        assert found[3] > 30, "one row of three is no less wrong because the others are right"

    def test_equal_tokens_have_equal_shares_of_a_nucleus(self):
        none = torch.tensor([], dtype=torch.int64)
        every = torch.stack([alternative_logprobs(torch.zeros(1, 4), torch.tensor([i]), none) for i in range(4)])
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

    @pytest.mark.parametrize(("temperature", "best"), [(1e-3, 0.25), (0.5, 0.5), (0.8, 0.8), (1.33, 1.33), (2.0, 2.0)])
    def test_tokens_of_another_temperature_are_seen_although_they_are_scored_at_1(self, temperature, best):
        generator = torch.Generator().manual_seed(2)
        logits = logits_of("usual", 2000, generator)
        found = measured(logits, logits / temperature, logits, generator)
        assert log_false_alarm(found) < math.log(1e-9)
        assert ALTERNATIVES[int(found.argmax())] == f"temperature x {best:g}"

    def test_a_choice_of_the_likelier_half_is_seen_by_its_tokens(self):
        generator = torch.Generator().manual_seed(12)
        rows, length = 128, 150
        logits = logits_of("usual", length, generator).double()  # the same for all rows, so that only draws differ
        tokens = torch.multinomial(logits.softmax(1), 2 * rows, replacement=True, generator=generator)  # [length, 2 R]
        logprobs = logits.log_softmax(1).gather(1, tokens)
        likelier = logprobs.sum(0).argsort(descending=True)[:rows]
        for which, is_seen in ((likelier, True), (torch.arange(rows), False)):
            of_rows = [
                alternative_logprobs(logits, tokens[:, row], ENDS)[:, 1:].sum(0) - logprobs[:, row].sum()
                for row in which.tolist()
            ]
            found = torch.stack(of_rows).sum(0)
            assert (log_false_alarm(found) < math.log(1e-6)) == is_seen

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

    def test_copies_of_half_the_completions_are_seen_whichever_way_they_were_made(self):
        own = [(group, [f"{group} {index}" for index in range(8)]) for group in range(4)]
        for copied in (
            lambda x: x[:4] * 2,
            lambda x: [y for y in x[:4] for _ in range(2)],
            lambda x: [x[0]] * 4 + x[4:],
        ):
            rows = [(group, hash(each), -6.0) for group, texts in own for each in copied(texts)]
            assert log_false_alarm(copy_evidence(repeats([], rows))) < math.log(1e-9)

    def test_groups_that_avoid_repeats_are_seen_and_groups_with_no_likely_completion_are_not(self):
        likely = [(group, value, math.log(0.3) if value < 3 else -8.0) for group in range(16) for value in range(6)]
        assert log_false_alarm(copy_evidence(repeats([], likely))) < math.log(1e-6)
        unlikely = [(group, value, -8.0) for group in range(16) for value in range(6)]
        assert log_false_alarm(copy_evidence(repeats([], unlikely))) > math.log(0.5)


class TestOrder:
    def drawn(self, generator: torch.Generator, groups: int = 16, size: int = 8) -> Tensor:
        """Draw two numbers for each completion, [2, groups, size]: a length, many of which are equal, and a real
        number."""
        lengths = torch.randint(3, 8, (groups, size), generator=generator).double()
        return torch.stack([lengths, torch.randn(groups, size, generator=generator).double()])

    def test_draws_are_in_any_order(self):
        generator = torch.Generator().manual_seed(8)
        found = []
        for _ in range(500):
            values = self.drawn(generator)
            uniforms = torch.rand(values.shape, generator=generator)
            found.append(log_false_alarm(order_evidence(values, uniforms)))
        for level in (0.1, 0.01):
            assert (torch.tensor(found) < math.log(level)).double().mean() <= level

    def test_sorted_groups_and_a_later_half_that_is_longer_are_seen_and_constants_are_not(self):
        generator = torch.Generator().manual_seed(9)
        values = self.drawn(generator)
        uniforms = torch.rand(values.shape, generator=generator)
        assert log_false_alarm(order_evidence(values.sort(dim=2).values, uniforms)) < math.log(1e-9)
        longer = self.drawn(generator, groups=32)
        longer[0, :, 4:] += 10
        assert log_false_alarm(order_evidence(longer, torch.rand(longer.shape, generator=generator))) < math.log(1e-6)
        assert log_false_alarm(order_evidence(torch.ones_like(values), uniforms)) > math.log(1e-3)
        half = self.drawn(generator)
        half[1, ::2] = half[1, ::2].sort(dim=1, descending=True).values
        assert log_false_alarm(order_evidence(half, uniforms)) < math.log(1e-6), "every other group is sorted"


class TestChange:
    def test_means_of_one_distribution_differ_by_chance(self):
        generator = torch.Generator().manual_seed(10)
        for draw in (lambda: torch.randn(16, generator=generator), lambda: torch.rand(16, generator=generator).round()):
            found = torch.tensor([change(draw().tolist(), draw().tolist()) for _ in range(500)])
            for level in (0.1, 0.01):
                assert (found < level).double().mean() <= 1.5 * level

    def test_what_falls_to_nothing_has_changed_and_few_equal_values_and_constants_have_not(self):
        generator = torch.Generator().manual_seed(11)
        healthy = (0.6 + 0.2 * torch.randn(16, generator=generator)).tolist()
        assert change([0.0] * 16, healthy) < 1e-6
        assert change([0.0] * 16, [1.0] * 16) < 1e-6
        assert change([0.0] * 2, [1.0] * 2) > 0.01
        assert change([1.0] * 16, [1.0] * 16) == 1.0
        with warnings.catch_warnings(action="error"):  # equal but for the rounding of means
            assert change([0.1, 0.1 + 1e-9, 0.1], [0.1, 0.1 - 2e-9]) == 1.0


class TestApart:
    @staticmethod
    def ranges(rollouts):
        return [[min(values), max(values), len(values)] for values in rollouts]

    @pytest.mark.parametrize(("num", "earlier"), [(5, 11), (8, 3), (11, 2), (16, 1)])
    @pytest.mark.parametrize("factor", [100.0, 0.01])
    def test_a_hundredfold_change_of_few_values_shows_after_some_rollouts(self, num, earlier, factor):
        values = torch.randn(earlier + 1, num, generator=torch.Generator().manual_seed(14)).exp().clamp(0.2, 5)
        *before, now = values.tolist()
        assert 2 * apart([factor * value for value in now], self.ranges(before)) < 1e-6
        assert apart([factor * value for value in now], self.ranges(before[1:])) > 1e-6 / 2
        assert apart(now, self.ranges(before)) == 1.0

    def test_draws_are_apart_no_more_often_than_it_says(self):
        rollouts = torch.rand(4000, 4, 3, generator=torch.Generator().manual_seed(15)).tolist()
        found = torch.tensor([apart(now, self.ranges(before)) for *before, now in rollouts], dtype=torch.float64)
        for probability in found.unique():
            assert (found <= probability).double().mean() <= 1.5 * probability
        assert found.unique().tolist() == pytest.approx([2 / math.comb(n, 3) for n in (12, 9, 6)] + [1.0])

    def test_only_the_latest_rollouts_count_and_rounding_is_no_distance(self):
        assert apart([1.0, 1.0], self.ranges([[5.0, 0.0], [3.0, 2.0], [4.0, 3.0]])) == 2 / math.comb(6, 2)
        assert apart([1.0 + 1e-9, 1.0], self.ranges([[1.0 - 1e-9, 1.0 - 1e-9]])) == 1.0
        assert apart([1.0], []) == 1.0


class TestGaps:
    def test_a_few_wrong_rows_or_tokens_show(self):
        healthy = 0.02 * torch.randn(20000, generator=torch.Generator().manual_seed(12))
        assert far_share(healthy) == 0
        assert far_share(torch.cat([healthy, torch.full((400,), -9.0)])) > 1 / 256
        assert far_share(torch.tensor([])) == 0
        rows = torch.full((64,), 0.006)
        rows[:3] = 2.0
        assert high_gap(rows) == 2.0
        rows[1:] = 0.006
        assert high_gap(rows) == pytest.approx(0.006), "one row alone may be an accident"
        assert high_gap(rows[:1]) == 2.0

    @pytest.mark.parametrize("certainty", [0.5, 1.0, 3.0])
    def test_errors_of_logits_have_one_size_and_rounded_log_probabilities_show(self, certainty):
        generator = torch.Generator().manual_seed(13)
        logits = certainty * 3 * torch.randn(20000, 50, generator=generator, dtype=torch.float64)
        errors = 0.02 * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        tokens = logits.softmax(dim=1).multinomial(1, generator=generator)
        own, other = (z.log_softmax(dim=1).gather(1, tokens)[:, 0] for z in (logits, logits + errors))
        error = logit_gap(own, other).mean().item()
        assert 0.01 < error < 0.03, "about the mean difference of two errors, weighed by probabilities"
        assert (logit_gap(own, other) <= 2 * errors.abs().amax()).all()
        assert logit_gap(own, (10 * other).round() / 10).mean() > error * (1.2 if certainty < 1 else 4)
        assert logit_gap(torch.zeros(1), torch.tensor([-20.0])) == 1


class TestJump:
    def test_it_is_against_the_median_and_small_values_and_short_histories_do_not_count(self):
        assert jump(1.0, [1e-3], floor=1e-6) == (1.0, 0.0)
        assert jump(1e-5, [1e-7, 1e-7], floor=1e-4) == (1.0, 0.0)
        ratio, sigmas = jump(0.1, [0.01, 0.011, 0.009, 5.0, 0.01], floor=1e-6)
        assert ratio == pytest.approx(10)
        assert sigmas > 6
