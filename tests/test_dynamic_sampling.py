"""Dynamic sampling goes on sampling until the batch is full of groups whose completions earned different rewards. The
batch does not depend on how many prompts are sampled at once, or by how many ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.objective.advantages import group_advantages
from qerl_pl.rewards.base import RewardTable
from qerl_pl.rollout.dynamic_sampling import DynamicSampling, balanced
from qerl_pl.rollout.scored import ScoredBatch
from tests.two_ranks import on_two_ranks

G = 3


def evaluation(prompts: Sequence[Prompt]) -> ScoredBatch:
    """Imitate sampling and scoring. The completions of a prompt that ends in token 1 have different rewards, those of
    any other prompt the same."""
    return scored([[float(prompt.tokens[-1] == 1 and copy == 0) for copy in range(G)] for prompt in prompts], prompts)


def scored(
    rewards: Sequence[Sequence[float | None]],
    prompts: Sequence[Prompt] | None = None,
    finished: Sequence[Sequence[bool]] | None = None,
    **components: Sequence[Sequence[float]],
) -> ScoredBatch:
    """Make groups with these rewards; None is a completion without a score."""
    size = len(rewards[0])
    prompts = prompts or [Prompt((index,), "") for index in range(len(rewards))]
    values = torch.tensor([float("nan") if value is None else value for group in rewards for value in group])
    ends = [True] * len(values) if finished is None else [end for group in finished for end in group]
    table = RewardTable(
        values.nan_to_num(),
        ~values.isnan(),
        {"sum": values, **{name: torch.tensor(scores).flatten() for name, scores in components.items()}},
        {},
    )
    rows = tuple(prompt for prompt in prompts for _ in range(size))
    completions = tuple(Completion((row,), (0.0,), end, text=str(row)) for row, end in enumerate(ends))
    return ScoredBatch.of(rows, [""] * len(rows), completions, table, size)


def signal(groups: ScoredBatch, **settings: Any) -> list[bool]:
    """Return for each group whether it would be trained on under other settings."""
    made = ScoredBatch.of(
        groups.prompts, groups.prompt_texts, groups.completions, groups.table, groups.group_size, **settings
    )
    return made.has_signal.tolist()


def prompts(signals: Sequence[bool], start: int = 0) -> list[Prompt]:
    return [Prompt((start + index, int(signal)), str(index)) for index, signal in enumerate(signals)]


def run(settings: DynamicSampling, batch: Sequence[Prompt], more: Sequence[Prompt]) -> tuple[Any, ...]:
    """Fill a batch by dynamic sampling, with ``more`` as the prompts to refill it with. Returns all groups that were
    sampled, the number of refills, the groups of the batch that this rank trains on (None if there are none), and the
    number of prompts of each call that samples."""
    from qerl_pl.common import ranks

    calls = []

    def sample(some: Sequence[Prompt]) -> ScoredBatch:
        calls.append(len(some))
        return evaluation(some)

    everything, refills = settings.fill(batch, iter(more), sample, Stopwatch())
    size = len(batch) * ranks.num_ranks()
    chosen, places = settings.choose(everything, batch_size=size)
    if chosen is not None:
        assert len(places) == chosen.num_groups
        assert places == sorted(places) or ranks.are_several()
    return everything, refills, chosen, places, calls


@given(
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 5),
    st.sampled_from([1.0, 1.5, 3.0]),
)
def test_the_batch_is_the_first_groups_with_signal_of_what_was_sampled(batch, more, max_refills, oversample):
    supply, size = prompts(more, start=100), len(batch)
    settings = DynamicSampling(max_refills, oversample=oversample)
    everything, num_refills, chosen, _, calls = run(settings, prompts(batch), supply)
    assert num_refills == len(calls) - 1 <= max_refills
    assert all(1 <= count <= -(-oversample * size // 1) for count in calls)
    taken = supply[: sum(calls) - size]
    assert list(everything.prompts[::G]) == prompts(batch) + taken

    expected = [prompt for prompt in prompts(batch) + taken if prompt.tokens[-1] == 1][:size]
    assert (list(chosen.prompts[::G]) if chosen else []) == expected
    if len(expected) < size:
        assert num_refills == max_refills or len(taken) == len(supply), "gave up too early"
    if num_refills < max_refills:
        whole = [prompt for prompt in prompts(batch) + supply if prompt.tokens[-1] == 1][:size]
        assert expected == whole, "how much is asked for at once makes no difference"


def test_a_batch_that_is_full_samples_nothing_more():
    everything, num_refills, chosen, _, calls = run(DynamicSampling(), prompts([True, True]), prompts([True] * 9, 10))
    assert (num_refills, calls) == (0, [2])
    assert chosen.rows() == everything.rows()


def test_a_short_batch_is_an_error_where_one_is_asked_for():
    short = evaluation(prompts([True, False]))
    chosen, _ = DynamicSampling(when_short="smaller").choose(short, batch_size=2)
    assert chosen is not None
    assert chosen.num_groups == 1
    with pytest.raises(RuntimeError, match=r"1 groups with advantages other than 0 among 2.*needs 2"):
        DynamicSampling(when_short="error").choose(short, batch_size=2)
    none = evaluation(prompts([False, False]))
    assert DynamicSampling().choose(none, batch_size=2) == (None, [])


@pytest.mark.parametrize(("field", "value"), [("max_refills", 0), ("oversample", 0.9), ("oversample", float("nan"))])
def test_settings_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"^model\.dynamic_sampling\.{field} is {value}"):
        DynamicSampling(**{field: value})


def test_selecting_and_adding_keep_rows_with_their_rewards():
    one, other = evaluation(prompts([True, False])), evaluation(prompts([False, True], start=5))
    both = one + other
    assert both.rows() == one.rows() + other.rows()
    assert both.select(torch.tensor([3, 0])).rows() == other.rows()[G:] + one.rows()[:G]
    assert both.has_signal.tolist() == [True, False, False, True]


def test_a_group_has_a_signal_if_a_row_in_the_loss_has_an_advantage():
    rewards = [[1, 1, 1, 0], [0, 0.2, 0, 0.2], [1, 1, 0, None], [1, 1, None, None], [0, 0, 0, 0]]
    cut_off = [[False, False, False, True], [True] * 4, [True, True, False, True], [False] * 4, [True, *[False] * 3]]
    groups = scored(rewards, finished=[[not cut for cut in group] for group in cut_off])
    assert groups.has_signal.tolist() == [True, True, True, False, False]
    found = signal(groups, filter_truncated=True)
    assert found == [True, False, True, False, False]
    # By the definition, a group counts if the loss sees a token with an advantage that is not zero.
    advantages = group_advantages(groups.rewards, groups.scored)
    in_loss = groups.scored & ~torch.tensor(cut_off)
    assert found == [bool(row[keep].any()) for row, keep in zip(advantages, in_loss, strict=True)]


def test_a_metric_has_to_differ_too():
    form_alone = [0.0, 0.2, 0.0, 0.0]  # all wrong, one has the form
    right_alone = [1.2, 1.2, 1.2, 1.0]  # all right, one lacks the form
    mixed = [1.2, 0.0, 1.2, 0.0]
    answers = [[0.0] * 4, [1.0] * 4, [1.0, 0.0, 1.0, 0.0], [1.0, float("nan"), 0.0, 1.0]]
    groups = scored([form_alone, right_alone, mixed, [1, None, 1, 1]], accuracy=answers)
    assert groups.has_signal.tolist() == [True, True, True, False]
    assert signal(groups, metric="accuracy") == [False, False, True, False]


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=20))))
def test_groups_are_shared_equally_and_no_more_are_moved_than_have_to_be(case):
    num_ranks, owners = case
    found = balanced(owners, num_ranks)
    before, after = Counter(owners), Counter(found)
    shares = [after[rank] for rank in range(num_ranks)]
    assert sum(shares) == len(owners)
    assert max(shares) - min(shares) <= 1
    moved = sum(old != new for old, new in zip(owners, found, strict=True))
    base, extra = divmod(len(owners), num_ranks)
    counts = sorted((before[rank] for rank in range(num_ranks)), reverse=True)
    assert moved == sum(max(0, count - base - (place < extra)) for place, count in enumerate(counts))


CASES = [(seed, share, size, over) for seed in range(6) for share in (0.1, 0.3, 0.6) for size, over in ((2, 1), (8, 2))]


def on_every_case(rank: int) -> list[tuple[Any, ...]]:
    from qerl_pl.common import ranks

    found = []
    for seed, share, size, oversample in CASES:
        rng = random.Random(seed)
        stream = prompts([rng.random() < share for _ in range(size + 40)])
        batch, more = stream[:size], stream[size:]
        settings = DynamicSampling(max_refills=4, oversample=oversample)
        everything, refills, chosen, places, calls = run(settings, batch[rank :: ranks.num_ranks()], more)
        sampled = ranks.gather_groups(everything.rows(), G)
        own = list(zip(places, [row["answer"] for row in chosen.rows()[::G]] if chosen else [], strict=True))
        found.append((refills, [row["prompt"] for row in sampled], len(own), ranks.gather_values(own), sum(calls)))
        assert [row["answer"] for row in sampled[::G]] == [prompt.answer for prompt in stream[: len(sampled) // G]]
    return found


@pytest.mark.slow
def test_two_ranks_sample_and_train_on_what_one_does_and_share_it_equally(tmp_path):
    shares, whole = on_two_ranks(on_every_case, tmp_path), on_every_case(0)
    for first, second, one in zip(*shares, whole, strict=True):
        assert first[0] == second[0] == one[0], "refills"
        assert first[1] == one[1], "what was sampled"
        assert abs(first[2] - second[2]) <= 1
        assert first[2] + second[2] == one[2]
        together = [group for share in first[3] for group in share]
        assert sorted(together) == one[3][0], "the same groups at the same places"
        assert first[4] + second[4] == one[4]


@pytest.mark.parametrize(
    ("share", "oversample", "rounds", "groups"),
    [(0.3, 1, 4.0, 28.8), (0.3, 2, 2.2, 31.9), (0.3, 3, 1.6, 35.6), (0.15, 2, 3.8, 59.8), (0.15, 3, 2.7, 63.8)],
)
def test_oversampling_takes_fewer_rounds_for_a_few_more_groups(share, oversample, rounds, groups):
    rng, found = random.Random(0), []

    class Counted:  # an evaluation of which nothing but the number of groups with a signal is asked
        def __init__(self, num: int) -> None:
            self.has_signal = torch.tensor([rng.random() < share for _ in range(num)])

        def __add__(self, other: Counted) -> Counted:
            self.has_signal = torch.cat([self.has_signal, other.has_signal])
            return self

    settings = DynamicSampling(oversample=oversample)
    for _ in range(2000):
        supply = iter(prompts([True] * 400))
        everything, refills = settings.fill(prompts([True] * 8), supply, lambda p: Counted(len(p)), Stopwatch())  # pyright: ignore
        found.append((1 + refills, len(everything.has_signal), everything.has_signal.sum() >= 8))
    means = [sum(values) / len(found) for values in zip(*found, strict=True)]
    assert means[0] == pytest.approx(rounds, abs=0.15)
    assert means[1] == pytest.approx(groups, rel=0.03)
    assert means[2] > 0.99, "full batches"
