"""Tests of the evidence that an engine used another policy for a part of the rows: with rounding errors alone, whatever
their distribution, a false alarm is at most as probable as ``log_false_alarm`` says, and another policy does raise an
alarm although its effect is smaller than rounding errors."""

import math

import pytest
import torch
from torch import Tensor

from qerl_pl.policy.evidence import SHARES, accumulated, in_shares, log_false_alarm
from qerl_pl.policy.other_policy import (
    LARGER,
    LINEAR,
    STRONGEST,
    TOLERATED,
    effect,
    is_first,
    moved,
    next_strength,
    rounding_scale,
    token_evidence,
)

ROWS, TOKENS = 128, 200
ROUNDING, EFFECT = 0.02, 0.006  # nats, root mean square
FEW = {"rows": 16, "tokens": 50}


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def heavy(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw from Student's t distribution with 2 degrees of freedom, which has no variance."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    return (2 * uniform - 1) / (2 * uniform * (1 - uniform)).sqrt()


def rollout(
    generator: torch.Generator,
    *,
    share: float = 0.0,
    rounding=normal,
    offset: float = 0.0,
    part: float = 0.0,
    blur: float = ROUNDING / LARGER,
    rows: int = ROWS,
    tokens: int = TOKENS,
) -> Tensor:
    """Simulate a rollout. Returns the log-likelihood ratios, [len(SHARES)] in nats, of the hypotheses that the engine
    sampled each row with another policy with a probability of 1, 1/4 or 1/16 (``SHARES``) to the hypothesis that it
    never did.

    Each row comes from the other policy with the probability ``share``. The log-probabilities of a right engine differ
    from the trainer's by rounding errors, a constant ``offset`` and a ``part`` of the other policy's effect. ``blur``
    is the size of the errors with which the trainer knows the effect.
    """
    shape = (rows, tokens)
    of_tokens = EFFECT * normal(shape, generator)
    wrong = (torch.rand((rows, 1), generator=generator, dtype=torch.float64) < share).double()
    trainer = -1 - normal(shape, generator).abs()
    error = ROUNDING * rounding(shape, generator) + offset + (wrong + part) * of_tokens
    scale = rounding_scale(trainer.flatten(), (trainer + error).flatten()).reshape(shape)
    known = of_tokens + blur * normal(shape, generator)
    return in_shares(token_evidence(error, known, scale).sum(dim=1).unsqueeze(0))


class TestRatio:
    @pytest.mark.parametrize("part", [TOLERATED, 0.0, -0.5])
    def test_its_mean_over_the_signs_of_rounding_errors_is_at_most_1(self, part):
        generator = torch.Generator().manual_seed(0)
        size, change = 5 * torch.rand(100_000, generator=generator).double(), normal((100_000,), generator)
        scale = 0.1 + torch.rand(100_000, generator=generator).double()
        either = [token_evidence(part * change + sign * size, change, scale).exp() for sign in (1, -1)]
        mean = torch.stack(either).mean(dim=0)
        assert mean.max() <= 1 + 1e-12
        if part == TOLERATED:
            torch.testing.assert_close(mean, torch.ones_like(mean))

    def test_a_policy_that_is_equal_gives_exactly_no_evidence(self):
        generator = torch.Generator().manual_seed(1)
        error = heavy((1000,), generator)
        scale = rounding_scale(error.abs().neg() - 1, error)
        assert token_evidence(error, torch.zeros(1000).double(), scale).abs().max() == 0

    def test_one_token_counts_at_most_log_2(self):
        error = torch.tensor([1e9, 1e9, -1e9]).double()
        found = token_evidence(error, torch.tensor([1.0, 1e9, 1e-9]).double(), torch.tensor([1e-6, 1.0, 1.0]).double())
        assert bool(found.isfinite().all())
        assert found.max() <= math.log(2)

    def test_scale_does_not_depend_on_signs_and_is_smaller_for_tokens_that_are_nearly_certain(self):
        trainer, error = torch.tensor([-0.5, -1.0, -0.02]).double(), torch.tensor([0.01, 0.03, 1e-3]).double()
        scale = rounding_scale(trainer, trainer + error)
        torch.testing.assert_close(scale, rounding_scale(trainer, trainer - error))
        assert scale[2] < scale[0] < scale[1]


class TestRollouts:
    @pytest.mark.parametrize("share", [1 / 3, 1.0])
    @pytest.mark.parametrize("rounding", [normal, heavy])
    def test_another_policy_below_rounding_errors_is_found_in_the_first_or_second_rollout(self, rounding, share):
        generator = torch.Generator().manual_seed(2)
        for _ in range(20):
            state = torch.full((len(SHARES),), -math.inf).double()
            for _ in range(2):
                state = accumulated(state, rollout(generator, share=share, rounding=rounding))
            assert log_false_alarm(state) < math.log(1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "engine",
        [
            {},
            {"rounding": heavy},
            {"offset": 1e-3},
            {"part": 0.01},
            {"part": -0.01},
            {"rounding": heavy, "part": TOLERATED, "offset": -1e-3},
        ],
        ids=["normal", "heavy tails", "offset", "effect 1 % smaller", "effect 1 % larger", "all"],
    )
    def test_a_right_engine_is_not_found_in_2000_rollouts(self, engine):
        generator = torch.Generator().manual_seed(3)
        state, found = torch.full((len(SHARES),), -math.inf).double(), []
        for _ in range(2000):
            state = accumulated(state, rollout(generator, **engine, **FEW))
            found.append(log_false_alarm(state))
        assert min(found) > math.log(1e-6)

    def test_the_bound_holds_for_single_rollouts(self):
        generator = torch.Generator().manual_seed(4)
        found = torch.tensor([log_false_alarm(rollout(generator, **FEW)) for _ in range(1000)])
        for level in (0.3, 0.1, 0.01):
            assert (found < math.log(level)).double().mean() <= level


class TestEffect:
    def measured(self, generator: torch.Generator, *, central: bool) -> Tensor:
        """Simulate a rollout of a correct engine, and return the evidence that it sampled with another policy than the
        trainer's current one (``other_policy.token_evidence``). The trainer's forward passes have equally large
        rounding errors of two kinds: one kind is the same in every pass, the other is drawn for each pass. The change
        of log-probabilities from the current to the other policy is computed from two passes: if ``central``, one with
        the current policy moved towards the other one and one with it moved as far in the opposite direction; else the
        first of these and one with the current policy."""
        shape, strength = (ROWS, TOKENS), 4.0
        common, own, engine, *ends = (ROUNDING * normal(shape, generator) for _ in range(5))
        current, moved = common + own, strength * EFFECT / 4 * normal(shape, generator)
        towards, away = (sign * moved + common + end for sign, end in zip((1, -1), ends, strict=True))
        error = engine - current
        found = effect(towards, away, strength=strength) if central else (towards - current) / strength
        scale = rounding_scale(torch.full((error.numel(),), -1.0).double(), -1 + error.flatten()).reshape(shape)
        return in_shares(token_evidence(error, found, scale).sum(dim=1).unsqueeze(0))

    def test_rounding_errors_of_the_current_policys_pass_raise_alarms_unless_they_cancel(self):
        generator = torch.Generator().manual_seed(5)
        alarms = {
            central: [log_false_alarm(self.measured(generator, central=central)) < math.log(1e-6) for _ in range(20)]
            for central in (True, False)
        }
        assert not any(alarms[True])
        assert all(alarms[False]), "errors that are in both would be mistaken for the other policy"

    def test_it_is_the_change_whatever_the_strength_where_log_probabilities_are_linear(self):
        generator = torch.Generator().manual_seed(6)
        current, slope = normal((10,), generator), normal((10,), generator)
        for strength in (1.0, 8.0):
            found = effect(current + strength * slope, current - strength * slope, strength=strength)
            torch.testing.assert_close(found, slope)

    def test_moved_by_1_is_the_other_policy_and_by_minus_1_is_its_reflection(self):
        generator = torch.Generator().manual_seed(7)
        one, two = ({"b": torch.randn(3, 2, generator=generator)} for _ in range(2))
        torch.testing.assert_close(moved(one, two, by=1.0), two)
        torch.testing.assert_close(moved(one, two, by=-1.0)["b"], 2 * one["b"] - two["b"])

    def test_strength_makes_the_change_larger_than_errors_and_stays_in_its_range(self):
        assert next_strength(1.0, 0.01, 0.005) == pytest.approx(LARGER * 0.005 / 0.01)
        assert next_strength(8.0, 0.2, 1.0) == pytest.approx(8 * LINEAR / 0.2)
        assert next_strength(8.0, 100.0, 0.01) == 1.0
        assert next_strength(8.0, 0.0, 0.01) == STRONGEST


def test_a_beginning_that_rows_share_counts_once():
    rows = [([1], [5, 6, 7]), ([1], [5, 6, 8, 9]), ([2], [5, 6, 7]), ([1], [5, 6, 7])]
    assert is_first(rows) == [[True] * 3, [False, False, True, True], [True] * 3, [False] * 3]
