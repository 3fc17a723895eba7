"""The ledger, a callback, splits the difference between the log-probabilities of trainer and sampler into parts by
cause. Each part comes from the cause it is named after, and the parts add up to the difference."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from callbacks.ledger import engine_logprobs, few_rows, trainer_logprobs
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.results.curves import Curve, read_curves
from qerl_pl.rollout.hf import TransformersEngine
from tests.callbacks.conftest import with_arguments
from tests.integration.conftest import VLLM

CAUSES = ("kernel", "noise", "decode", "staleness")
STATISTICS = ("k1", "k3", "mean_abs", "p99", "max", "outside_share")


@pytest.fixture
def policy(bases) -> Policy:
    return load_policy(str(bases["nvfp4"]), dtype=torch.float32, lora=LoraSettings(rank=4, dropout=0.5), seed=0)


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Draw four rows with prompts of 3 tokens and completions of different lengths. Returns the tokens [4, 14], the
    mask of the completions' tokens [4, 14], and the lengths [4] of the rows."""
    lengths = torch.tensor([9, 5, 12, 4])
    tokens = torch.randint(0, 250, (4, 14), generator=torch.Generator().manual_seed(0))
    column = torch.arange(14)
    return tokens, (column >= 3) & (column < lengths.unsqueeze(1)), lengths


def test_both_sides_see_the_same_tokens_without_dropout(policy):
    tokens, sampled, lengths = rows()
    policy.load_adapter_state({name: tensor + 0.1 for name, tensor in policy.adapter_state().items()})
    engine = TransformersEngine()
    engine.start(policy, max_model_len=16)
    by_trainer = trainer_logprobs(policy, tokens, sampled, micro_batch_tokens=14)
    scored = engine_logprobs(engine, tokens, lengths)
    torch.testing.assert_close(by_trainer, torch.where(sampled, scored, 0.0), rtol=0, atol=1e-5)
    assert (by_trainer[sampled] < 0).all()
    assert (scored[:, 0] == 0).all()


def test_dropout_of_the_trainer_draws_nothing_from_the_global_stream(policy):
    tokens, sampled, _ = rows()
    policy.load_adapter_state({name: tensor + 0.1 for name, tensor in policy.adapter_state().items()})
    before = torch.get_rng_state()
    trainer_logprobs(policy, tokens, sampled, micro_batch_tokens=100)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("num_rows", "num_chosen", "expected"),
    [(16, 4, [0, 4, 8, 12]), (10, 3, [0, 3, 6]), (2, 8, [0, 1]), (5, 1, [0]), (0, 4, [])],
)
def test_rows_are_spread_evenly(num_rows, num_chosen, expected):
    assert few_rows(torch.ones(num_rows), num_rows=num_chosen, max_tokens=1000).tolist() == expected


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(1000, [0, 2, 4, 6]), (70, [0, 2, 4, 6]), (69, [0, 2, 5]), (30, [0]), (1, [0])]
)
def test_long_rows_are_fewer_rows(max_tokens, expected):
    lengths = torch.tensor([10, 11, 20, 9, 30, 7, 10, 50])
    rows = few_rows(lengths, num_rows=4, max_tokens=max_tokens)
    assert rows.tolist() == expected
    assert len(rows) == 1 or lengths[rows].sum() <= max_tokens


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, [0, 2, 4, 6]), (2, [0, 4]), (3, [0, 4]), (4, [0]), (9, [0])])
def test_ranks_share_the_rows_and_their_tokens(num_ranks, expected):
    lengths = torch.full((8,), 10)
    assert few_rows(lengths, num_rows=4, max_tokens=60, num_ranks=num_ranks).tolist() == expected


LEDGER = "callbacks.ledger.MismatchLedger"


def every_row(folder: Path, *, every: int = 1) -> tuple[str, ...]:
    """Return the command-line arguments of a run of four steps with the callback ``Ledger``, which compares the
    sampler's and the trainer's log-probabilities at every ``every``-th rollout. A rollout has 8 rows, so few that all
    are compared."""
    settings = with_arguments(LEDGER, {"every": every}, folder)
    short = ("--trainer.max_steps", "4", "--trainer.limit_val_batches", "0")
    return *short, "--data.batch_size", "2", "-c", settings


def ledger(curves: dict[str, Curve], cause: str, statistic: str) -> list[float]:
    return curves[f"ledger/{cause}/{statistic}"].values


def assert_balanced(curves: dict[str, Curve], *, num_steps: int = 4) -> None:
    for cause in CAUSES:
        for statistic in STATISTICS:
            assert curves[f"ledger/{cause}/{statistic}"].steps == list(range(num_steps)), (cause, statistic)
    total = [sum(ledger(curves, cause, "k1")[step] for cause in CAUSES[:3]) for step in range(num_steps)]
    assert total == pytest.approx(curves["gap/k1"].values, abs=1e-6)
    sigma = curves["aqn/sigma"].values
    for step in range(num_steps):
        assert ledger(curves, "kernel", "mean_abs")[step] < 1e-5
        assert ledger(curves, "decode", "mean_abs")[step] < 1e-5
        noise, gap = ledger(curves, "noise", "mean_abs")[step], curves["gap/mean_abs"].values[step]
        if sigma[step] == 0:
            assert noise == 0
            assert gap < 1e-5
        else:
            assert noise > 1e-4
            assert gap == pytest.approx(noise, abs=2e-5), "noise accounts for the rest"
    assert {0.0} < set(sigma)
    assert min(ledger(curves, "staleness", "mean_abs")) > 1e-4, "every step moves the policy, the warm-up's first too"


@pytest.mark.slow
def test_the_ledger_balances(run, tmp_path):
    run("fit", tmp_path / "run", *every_row(tmp_path))
    assert_balanced(read_curves(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.vllm
def test_the_ledger_balances_with_vllm(run, tmp_path):
    run("fit", tmp_path / "run", *every_row(tmp_path), *VLLM)
    assert_balanced(read_curves(tmp_path / "run"))


@pytest.mark.slow
def test_at_another_temperature_noise_and_kernels_are_told_apart_in_the_rollouts_that_are_due(run, tmp_path):
    run("fit", tmp_path / "run", *every_row(tmp_path, every=3), "--model.sampling.temperature", "0.7")
    curves = read_curves(tmp_path / "run")
    assert "ledger/decode/mean_abs" not in curves
    for cause in set(CAUSES) - {"decode"}:
        assert curves[f"ledger/{cause}/k1"].steps == [0, 3], cause
    assert max(ledger(curves, "kernel", "max")) < 1e-4
    noisy = [curves["aqn/sigma"].values[step] > 0 for step in (0, 3)]
    assert [noise > 0 for noise in ledger(curves, "noise", "mean_abs")] == noisy == [False, True]
