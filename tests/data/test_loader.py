"""A prompt loader gives every prompt once per epoch. Its position can be saved at any step, so that a resumed run goes
on with the next prompt."""

import copy
from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.loader import EvaluationLoader, TrainLoader
from qerl_pl.common.types import Prompt


def prompts(num: int) -> list[Prompt]:
    return [Prompt((token,), str(token)) for token in range(num)]


def forever(loader: TrainLoader):
    while True:
        yield from loader


def answers(batches) -> list[list[str]]:
    return [[prompt.answer for prompt in batch] for batch in batches]


@given(num=st.integers(1, 40), batch_size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_an_epoch_serves_no_prompt_twice_and_leaves_out_less_than_a_batch(num, batch_size, seed):
    if batch_size > num:
        return
    loader = TrainLoader(prompts(num), batch_size, seed=seed)
    served = list(chain.from_iterable(answers(loader)))
    assert len(served) == len(set(served)) == len(loader) * batch_size
    assert num - len(served) < batch_size


def test_every_epoch_has_an_order_of_its_own_and_a_seed_repeats_it():
    loader = TrainLoader(prompts(32), 8, seed=0)
    first, second = answers(loader), answers(loader)
    assert first != second
    again = TrainLoader(prompts(32), 8, seed=0)
    assert [answers(again), answers(again)] == [first, second]
    assert answers(TrainLoader(prompts(32), 8, seed=1)) != first


def test_a_loader_resumed_at_any_position_serves_what_the_first_would_have():
    served = answers(islice(forever(TrainLoader(prompts(23), 5, seed=3)), 13))  # 4 batches an epoch
    for cut in range(13):
        stopped = TrainLoader(prompts(23), 5, seed=3)
        assert answers(islice(forever(stopped), cut)) == served[:cut]
        resumed = TrainLoader(prompts(23), 5, seed=3)
        resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
        assert answers(islice(forever(resumed), 13 - cut)) == served[cut:]


def test_a_state_taken_while_a_batch_is_in_use_counts_it_as_served():
    loader = TrainLoader(prompts(8), 4, seed=0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = answers(iterator)
    resumed = TrainLoader(prompts(8), 4, seed=0)
    resumed.load_state_dict(state)
    assert answers(resumed) == rest


def test_making_an_iterator_moves_nothing():
    loader = TrainLoader(prompts(8), 4, seed=0)
    before = loader.state_dict()
    iter(loader)
    assert loader.state_dict() == before


def test_the_global_random_stream_is_left_alone():
    before = torch.random.get_rng_state()
    answers(TrainLoader(prompts(8), 4, seed=0))
    answers(EvaluationLoader(prompts(8), 4))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_the_batches_of_a_single_rank(num_ranks):
    whole = answers(TrainLoader(prompts(20), 6, seed=0))
    shares = [answers(TrainLoader(prompts(20), 6, seed=0, rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
    for step, batch in enumerate(whole):
        parts = [share[step] for share in shares]
        assert len({len(part) for part in parts}) == 1
        assert sorted(chain.from_iterable(parts)) == sorted(batch)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equal_prompts_of_a_batch_are_numbered_over_the_ranks(num_ranks):
    doubled = [Prompt((token % 4,), str(token)) for token in range(12)]
    whole = next(iter(TrainLoader(doubled, 6, seed=0)))
    shares = [next(iter(TrainLoader(doubled, 6, seed=0, rank=r, num_ranks=num_ranks))) for r in range(num_ranks)]
    assert [shares[row % num_ranks][row // num_ranks] for row in range(6)] == whole
    assert len({(prompt.tokens, prompt.copy) for prompt in whole}) == 6
    assert any(prompt.copy for prompt in whole)
    served = [batch for r in range(num_ranks) for batch in EvaluationLoader(doubled, 2, rank=r, num_ranks=num_ranks)]
    assert {(prompt.tokens, prompt.copy) for batch in served for prompt in batch} == {
        ((token,), copy) for token in range(4) for copy in range(3)
    }


def test_a_run_goes_on_with_another_number_of_ranks():
    single = TrainLoader(prompts(20), 6, seed=0)
    next(iter(single))
    pair = [TrainLoader(prompts(20), 6, seed=0, rank=rank, num_ranks=2) for rank in range(2)]
    for loader in pair:
        loader.load_state_dict(single.state_dict())
    parts = [answers(loader) for loader in pair]
    rest = answers(single)
    assert [sorted(chain.from_iterable(both)) for both in zip(*parts, strict=True)] == [sorted(batch) for batch in rest]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (TrainLoader(prompts(9), 4, seed=0), "num_prompts"),
        (TrainLoader(prompts(8), 2, seed=0), "batch_size"),
        (TrainLoader(prompts(8), 4, seed=1), "seed"),
        (TrainLoader(prompts(9)[1:], 4, seed=0), "prompt_digest"),
        (TrainLoader([*prompts(7), Prompt((7,), "8")], 4, seed=0), "prompt_digest"),
    ],
    ids=["more data", "other batch size", "other seed", "other data", "other answer"],
)
def test_a_position_in_another_run_is_refused(other, named):
    with pytest.raises(ValueError, match=f"cannot resume: .* {named}"):
        other.load_state_dict(TrainLoader(prompts(8), 4, seed=0).state_dict())


@pytest.mark.parametrize(
    ("num", "batch_size", "num_ranks", "message"),
    [(3, 4, 1, "data.batch_size is 4 but there are only 3 training prompts"), (9, 3, 2, "no multiple of 2")],
)
def test_a_batch_that_cannot_be_served_is_refused(num, batch_size, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        TrainLoader(prompts(num), batch_size, seed=0, num_ranks=num_ranks)


def test_an_evaluation_on_more_ranks_than_prompts_is_refused():
    with pytest.raises(ValueError, match="3 validation prompts are too few for 4 ranks"):
        EvaluationLoader(prompts(3), 2, num_ranks=4)


@given(num=st.integers(4, 30), batch_size=st.integers(1, 12), num_ranks=st.integers(1, 4))
def test_evaluation_serves_every_prompt_once_in_order(num, batch_size, num_ranks):
    loaders = [EvaluationLoader(prompts(num), batch_size, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    served = [list(chain.from_iterable(answers(loader))) for loader in loaders]
    assert [len(list(loader)) for loader in loaders] == [len(loader) for loader in loaders]
    assert sorted(chain.from_iterable(served), key=int) == [str(number) for number in range(num)]
    assert all(share == sorted(share, key=int) for share in served)
