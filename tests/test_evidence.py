"""Draws raise no alarm at the stated rate; what is no draw does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from callbacks.rollout_evidence import repeats
from qerl_pl.evidence import Surprise, copy_evidence, copy_log_p, jump, surprise
from qerl_pl.logprobs import token_logprobs, token_moments


def logits_of(kind: str, num: int, generator: torch.Generator) -> Tensor:
    """[num, 50]: from nearly uniform to nearly certain."""
    scale = {"flat": 0.1, "usual": 2.0, "sharp": 8.0}.get(kind)
    if scale is None:  # one certain token, and rare others
        logits = torch.zeros(num, 50)
        logits[:, 0] = 9 + 3 * torch.rand(num, generator=generator)
        return logits
    return scale * torch.randn(num, 50, generator=generator)


def measured(logits: Tensor, sampled_from: Tensor, reported: Tensor, generator: torch.Generator) -> Surprise:
    """Draws from one of three [N, V] logits; the trainer has the first, the engine reports the last."""
    tokens = torch.multinomial(sampled_from.softmax(1), 1, generator=generator)
    log_q, log_p = logits.log_softmax(1), reported.log_softmax(1)
    entropy = -(log_q.exp() * log_q).sum(1)
    varentropy = (log_q.exp() * (log_q + entropy.unsqueeze(1)).square()).sum(1)
    return surprise(log_q.gather(1, tokens)[:, 0], entropy, varentropy, log_p.gather(1, tokens)[:, 0])


class TestSurprise:
    @pytest.mark.parametrize("noise", [0.0, 0.3], ids=["same", "other kernels and noise"])
    @pytest.mark.parametrize("kind", ["flat", "usual", "sharp", "rare"])
    def test_the_probability_is_a_bound_for_draws(self, kind, noise):
        generator = torch.Generator().manual_seed(1)
        count = 1000
        logits = logits_of(kind, 100, generator)
        engine = logits + noise * torch.randn(logits.shape, generator=generator)
        found = torch.tensor([measured(logits, engine, engine, generator).log_p for _ in range(count)])
        for level in (0.3, 0.1, 0.01):
            assert (found < math.log(level)).double().mean() <= level
        assert found.min() > math.log(1e-6)

    @pytest.mark.parametrize("temperature", [1e-3, 0.5, 1.5])
    def test_tokens_of_another_temperature_are_seen_although_they_are_scored_at_1(self, temperature):
        generator = torch.Generator().manual_seed(2)
        logits = logits_of("usual", 1000, generator)
        found = measured(logits, logits / temperature, logits, generator)
        assert found.log_p < math.log(1e-9)
        assert (found.excess > 0) == (temperature > 1)

    def test_a_nucleus_scored_afterwards_is_seen(self):
        generator = torch.Generator().manual_seed(3)
        logits = logits_of("usual", 3000, generator)
        kept = logits.masked_fill(logits < logits.quantile(0.9, dim=1, keepdim=True), -torch.inf)
        assert measured(logits, kept, logits, generator).log_p < math.log(1e-9)

    def test_parts_join_to_the_whole(self):
        values = torch.rand(3, 9, generator=torch.Generator().manual_seed(4)).double()
        whole = surprise(-values[0], values[1], values[2], -values[0])
        parts = [surprise(-v[0], v[1], v[2], -v[0]) for v in (values[:, :4], values[:, 4:])]
        assert tuple(parts[0].joined(parts[1])) == pytest.approx(tuple(whole))

    def test_no_tokens_are_no_evidence(self):
        assert surprise(*[torch.zeros(0)] * 4).log_p == 0.0

    def test_shapes_that_differ_are_refused(self):
        with pytest.raises(ValueError, match="shape"):
            surprise(torch.zeros(2), torch.zeros(3), torch.zeros(2), torch.zeros(2))


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
            [copy_log_p(copy_evidence(repeats([], self.rows(8, 8, num_values, generator)))) for _ in range(500)]
        )
        for level in (0.1, 0.01):
            assert (found < math.log(level)).double().mean() <= level

    def test_a_completion_copied_over_its_group_is_seen_and_one_that_is_certain_is_not(self):
        others = [(group, 100 + index, -30.0) for group in range(1, 30) for index in range(8)]
        assert copy_log_p(copy_evidence(repeats([], [*others, *[(0, 0, -20.0)] * 8]))) < math.log(1e-9)
        assert copy_log_p(copy_evidence(repeats([], [*others, *[(0, 0, -0.01)] * 8]))) == 0.0

    def test_completions_of_an_earlier_rollout_are_seen(self):
        rows = [(prompt, index, -10.0) for prompt in range(4) for index in range(4)]
        assert copy_log_p(copy_evidence(repeats([], rows))) == 0.0
        seen = [(prompt, completion) for prompt, completion, _ in rows]
        assert copy_log_p(copy_evidence(repeats(seen, rows))) < math.log(1e-9)


class TestJump:
    def test_it_is_against_the_median_and_small_values_and_short_histories_do_not_count(self):
        assert jump(1.0, [1e-3], floor=1e-6) == (1.0, 0.0)
        assert jump(1e-5, [1e-7, 1e-7], floor=1e-4) == (1.0, 0.0)
        found = jump(0.1, [0.01, 0.011, 0.009, 5.0, 0.01], floor=1e-6)
        assert found.ratio == pytest.approx(10)
        assert found.sigmas > 6


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_moments_are_those_of_the_distribution(temperature):
    generator = torch.Generator().manual_seed(6)
    hidden, weight = (torch.randn(size, 5, generator=generator).double() for size in (7, 11))
    targets = torch.randint(11, (7,), generator=generator)
    logprobs, entropy, varentropy = token_moments(hidden, weight, targets, temperature=temperature, chunk_bytes=1000)
    torch.testing.assert_close(
        (logprobs, entropy), token_logprobs(hidden, weight, targets, temperature=temperature), rtol=1e-10, atol=1e-12
    )
    log_p = (hidden @ weight.t() / temperature).log_softmax(1)
    second = (log_p.exp() * log_p.square()).sum(1)
    torch.testing.assert_close(varentropy, second - entropy.square(), rtol=1e-9, atol=1e-10)
