"""The callback RolloutEvidence stops a run in the first rollout whose completions are not samples of the policy, and
lets a run with true samples go on."""

import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import train
from callbacks.rollout_evidence import RolloutEvidence
from qerl_pl.checkpoint import read_checkpoint, write_checkpoint
from qerl_pl.common.checks import EXIT_STATUS, CheckFailed
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy import jumps
from qerl_pl.policy.evidence import ALTERNATIVES, SHARES, accumulated, log_false_alarm, order_evidence
from qerl_pl.results.curves import read_curves
from qerl_pl.rewards.base import WeightedReward, score_rewards
from qerl_pl.rewards.calling import Progress
from qerl_pl.rollout import gaps
from qerl_pl.rollout.other_policies import OTHER_POLICIES
from qerl_pl.rollout.readings import have_own_rewards, lengths_and_means
from qerl_pl.rollout.scored import ScoredBatch
from tests.callbacks.conftest import with_arguments
from tests.integration.conftest import SHORT, VLLM, arguments, differences, load_last
from tests.integration.toy import majority

AT = 1
LONGER = (*SHORT, "--trainer.max_steps", "8")
EVIDENCE = "callbacks.rollout_evidence.RolloutEvidence"
COARSE = (  # bf16, and updates so small that other policies change log-probabilities about as much as rounding errors
    *("--model.dtype=bfloat16", "--model.optimizer.init_args.lr=3e-5", "--data.batch_size=8"),
    *("--model.sampling.num_completions=16", "--model.sampling.max_tokens=12", "--model.micro_batch_tokens=2000"),
    *("--trainer.callbacks.sigma_start=0.02", "--trainer.limit_val_batches=0"),
)


def sabotage(fault: str, at: int = AT) -> tuple[str, ...]:
    """Return command-line arguments of a run whose engine gets the named fault when rollout ``at`` begins."""
    callback = "--trainer.callbacks+=tests.correctness.faults.RolloutFault"
    return callback, f"--trainer.callbacks.fault={fault}", f"--trainer.callbacks.at={at}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("2 % of the tokens altered", "differ from the trainer's"),
        ("log-probabilities NaN", "log-probability that is nan"),
        ("one completion copied over its group", "repeat others of the same prompt"),
        ("top_p 0.8, scored over all", "top_p 0.8 explains them best"),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("the second half of each group copied from the first", "repeat others of the same prompt"),
                (
                    "one completion of every second group from another",
                    "differ from the trainer's|have a probability in",
                ),
                ("old adapter for later completions", "does not compute with the current policy"),
            )
        ),
    ],
)
def test_a_fault_stops_the_run_in_its_rollout(run, tmp_path, fault, message):
    with pytest.raises(RuntimeError, match=message):
        run("fit", tmp_path, *SHORT, *sabotage(fault))
    assert load_last(tmp_path)["global_step"] == AT, "nothing was learned from it"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("fault", ["a third without the adapter", "a quarter without the noise"])
def test_another_policy_for_a_part_of_the_rows_stops_the_run_although_its_effect_is_like_rounding_errors(
    run, tmp_path, fault
):
    named = fault.partition(" without ")[2]
    tested = with_arguments(EVIDENCE, {"policy_tokens": 4096}, tmp_path)
    with pytest.raises(CheckFailed, match=f"look as if they were sampled .*without {named}"):
        run("fit", tmp_path, "-c", tested, *COARSE, *sabotage(fault, at=3))
    assert max(read_curves(tmp_path)["evidence/gap"].values) < 2e-3, "the gap does not show it"


KEYED = (*VLLM, "--trainer.callbacks+=tests.rollout.keyed_sampling.SampleByKeys", *SHORT)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    "fault",
    [
        "the likelier half of twice as many",
        *(
            pytest.param(fault, marks=pytest.mark.long)
            for fault in (
                "a quarter of the prompts without the last token",
                "half of the rows with the first token twice",
                "a tenth of the rows with two tokens of the prompt exchanged",
            )
        ),
    ],
)
def test_completions_that_the_random_numbers_of_their_requests_do_not_give_stop_the_run(run, tmp_path, fault):
    blind = with_arguments(EVIDENCE, {"max_gap": 10.0, "max_jump": None}, tmp_path)
    with pytest.raises(CheckFailed, match="not those that the random numbers of their requests give"):
        run("fit", tmp_path, "-c", blind, *KEYED, *sabotage(fault))
    assert load_last(tmp_path)["global_step"] == AT
    curves = read_curves(tmp_path)
    assert curves["evidence/other_draws"].values[0] == 0, "the rollout before the fault"
    assert curves["margin/max"].values[0] < 1e-3


@pytest.mark.slow
def test_a_check_that_ends_a_run_says_so_without_a_traceback_and_leaves_a_run_that_goes_on(
    run, bases, tmp_path, capsys
):
    wrong = sabotage("a limit of a quarter of the tokens, reported as finished")
    status = train.exit_status(arguments("fit", bases["nvfp4"], tmp_path, *SHORT, *wrong))
    message = capsys.readouterr().err
    assert status == EXIT_STATUS
    assert re.search(r"^stopped: .* as finished; its last token \d+ is no end token", message, re.MULTILINE)
    assert "Traceback" not in message
    assert load_last(tmp_path)["global_step"] == AT
    assert read_curves(tmp_path)["train/reward"].steps == list(range(AT))
    run("fit", tmp_path, *SHORT, "--ckpt_path", "last")
    assert load_last(tmp_path)["global_step"] == 4


@pytest.mark.slow
def test_a_gap_that_jumps_stops_and_below_the_bound_of_the_yaml_warns(run, tmp_path):
    fault = "log-probabilities that are off by 4 times as much in each rollout"
    bound = with_arguments(EVIDENCE, {"max_jump": 12.0}, tmp_path)
    with (
        pytest.warns(UserWarning, match=r"of rollout 2 differ .* by 4e-05 nats per token, 4\.0 times the usual"),
        pytest.raises(RuntimeError, match=r"of rollout 3 differ .* 16\.0 times the usual"),
    ):
        run("fit", tmp_path / "run", *LONGER, "-c", bound, *sabotage(fault, at=2))
    assert load_last(tmp_path / "run")["global_step"] == 3
    with pytest.raises(RuntimeError, match=r"of rollout 3 differ .* by 4e-05 nats per token, 4\.0 times the usual"):
        run("fit", tmp_path / "run", *LONGER, *sabotage(fault, at=3), "--ckpt_path", "last")


@pytest.mark.slow
def test_a_gap_that_rounding_errors_explain_is_no_jump(run, short, tmp_path, monkeypatch, recwarn):
    monkeypatch.setitem(gaps.GAP_FLOOR, torch.float32, 1e-9)
    shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = read_checkpoint(file, "cpu")
    state = checkpoint["callbacks"]["RolloutEvidence"]
    state["gaps"] = {name: [value / 20 for value in values] for name, values in state["gaps"].items()}
    write_checkpoint(checkpoint, file)
    run("fit", tmp_path, *SHORT, "--trainer.max_steps", "5", "--ckpt_path", "last")
    assert load_last(tmp_path)["global_step"] == 5, "the usual was 20 times smaller, and the rounding errors too"
    assert not [warned for warned in recwarn if "times the usual" in str(warned.message)]
    state["excess"] = {name: value / 20 for name, value in state["excess"].items()}
    write_checkpoint(checkpoint, file)
    with pytest.raises(RuntimeError, match="times the usual"):
        run("fit", tmp_path, *SHORT, "--trainer.max_steps", "6", "--ckpt_path", "last")


def test_last_bits_of_the_first_of_equal_completions_are_no_order():
    generator = torch.Generator().manual_seed(0)
    total = torch.full((len(SHARES) * 12,), -torch.inf, dtype=torch.float64)
    for _ in range(30):
        errors = 1e-7 * torch.randn(32, generator=generator).sign()
        rows = [(-0.1 + error * (place == 0),) for error in errors.tolist() for place in range(8)]
        completions = [Completion((7,), logprobs, True) for logprobs in rows]
        prompts = [Prompt((group,), "") for group in range(32) for _ in range(8)]
        batch: Any = SimpleNamespace(prompts=prompts, completions=completions)
        values = torch.tensor(lengths_and_means(batch), dtype=torch.float64).T.reshape(2, 32, 8)
        uniforms = torch.rand(values.shape, generator=generator, dtype=torch.float64)
        total = accumulated(total, order_evidence(values, uniforms))
    assert log_false_alarm(total) > -5


@pytest.mark.parametrize("num_rows", [2, 512])
def test_the_gap_of_a_few_tokens_is_no_jump(num_rows, monkeypatch):
    """In a rollout of two completions of one token, of which the policy is certain in most rollouts, the gap is that of
    one or two rounding errors, and so is what the trainer estimates of it."""
    evidence, generator = RolloutEvidence(), torch.Generator().manual_seed(0)
    module: Any = SimpleNamespace(
        settings=SimpleNamespace(lora=SimpleNamespace(dropout=0.0)),
        norm_noise=NormNoise(),
        policy=SimpleNamespace(dtype=torch.bfloat16),
        trainer=SimpleNamespace(loggers=[]),
    )

    def rollout(index: int, factor: float = 1.0) -> None:
        is_certain = torch.rand(num_rows, 1, generator=generator) < 0.7
        trainer, sizes = -torch.rand(num_rows, 1, generator=generator), torch.where(is_certain, 2e-5, 2e-2)
        other, rounding = (
            trainer + size * torch.randn(num_rows, 1, generator=generator) for size in (factor * sizes, sizes)
        )
        sampled = torch.ones(num_rows, 1, dtype=torch.bool)
        experience = SimpleNamespace(sampled=sampled, sampler_logprobs=other)
        values = (trainer.flatten().double(), rounding.flatten().double(), torch.arange(num_rows))
        measured = SimpleNamespace(**dict(zip(("trainer", "shaken", "rows"), values, strict=True)))
        monkeypatch.setattr(evidence, "_measured", lambda *_, **__: measured)
        update = SimpleNamespace(experience=experience, old_logprobs=trainer)
        outputs = {"update": update, "rollout": SimpleNamespace(sampled=None), "rollout_index": index}
        evidence.on_train_batch_end(module.trainer, module, outputs)

    for index in range(300):
        rollout(index)
    with nullcontext() if num_rows == 2 else pytest.raises(CheckFailed, match="times the usual"):
        rollout(300, factor=4.0)


@pytest.mark.parametrize(("num_groups", "earlier"), [(5, 11), (8, 3), (32, 1)])
def test_a_hundredfold_change_of_the_length_between_two_rollouts_is_warned_of(num_groups, earlier, recwarn):
    evidence, generator = RolloutEvidence(), torch.Generator().manual_seed(0)

    def rollout(index: int, factor: int) -> None:
        shares = torch.rand(num_groups * 4, generator=generator).tolist()
        rows = [Completion((7,) * round(factor * (1 + share)), (-0.1,), True) for share in shares]
        prompts = [Prompt((index, group), "7") for group in range(num_groups) for _ in range(4)]
        table = score_rewards([WeightedReward("half", lambda prompts, completions: [0.5] * len(rows))], prompts, rows)
        evidence._warn_of_changes(ScoredBatch.of(prompts, [""] * num_groups, rows, table, 4), index)

    for index in range(earlier):
        rollout(index, 400)
    assert not recwarn.list
    state = evidence.state_dict()
    evidence = RolloutEvidence()
    evidence.load_state_dict(state)
    with pytest.warns(
        UserWarning, match=rf"mean length .* in rollout {earlier - 1} to \d\S+ in rollout {earlier}, more"
    ):
        rollout(earlier, 4)


def own_length(prompts: list[Any], completions: list[Any]) -> list[float]:
    return [float(len(completion.tokens)) for completion in completions]


VOTE = (
    *("--model.sampling.max_tokens=1", "--model.sampling.num_completions=8", "--model.sampling.temperature=0.015"),
    *("--data.batch_size=16", "--model.optimizer.init_args.lr=1e-6", "--trainer.max_steps=16"),
    *(
        "--trainer.limit_val_batches=0",
        '--model.rewards=[{"name": "vote", "reward": "tests.integration.toy.majority"}]',
    ),
)


@pytest.mark.parametrize(("reward", "are_own"), [(majority, False), (own_length, True)])
def test_rewards_that_compare_completions_are_told_by_completions_scored_alone(reward, are_own):
    """Seven of eight completions agree, so a vote among every second one has the same result."""
    prompts = tuple(Prompt((index,), "7") for index in (1, 2) for _ in range(8))
    completions = tuple(Completion((3, 3 + (place == 5)), (-0.1, -0.2), True) for place in (*range(8), *range(8)))
    rewards = [WeightedReward("vote", reward)]
    table = score_rewards(rewards, prompts, completions)
    batch: Any = SimpleNamespace(prompts=prompts, completions=completions, table=table, group_size=8)
    loop: Any = SimpleNamespace(rewards=rewards, progress=Progress())
    assert have_own_rewards(loop, batch) is are_own


@pytest.mark.slow
def test_rewards_that_compare_completions_are_no_choice_of_the_engine(run, tmp_path):
    """A completion that repeats an earlier one makes the earlier one's reward higher, so that later completions seem to
    follow the good ones."""
    strict = with_arguments(EVIDENCE, {"false_alarm": 0.05, "max_tokens": 256}, tmp_path)
    with pytest.warns(UserWarning, match="rewards depend on other completions"):
        run("fit", tmp_path / "run", "-c", strict, *VOTE)
    assert load_last(tmp_path / "run")["global_step"] == 16
    assert not load_last(tmp_path / "run")["callbacks"]["RolloutEvidence"]["rewards_are_own"]


@pytest.mark.slow
def test_noise_that_the_engine_rightly_has_stops_no_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(jumps, "FAR", 1.001)  # noise changes this model's probabilities by less than the usual factor
    run("fit", tmp_path, *SHORT)
    curves = read_curves(tmp_path)
    assert max(curves["evidence/far_share_of_all"].values) > jumps.MAX_FAR_SHARE, "trainer without noise"
    assert max(curves["evidence/far_share"].values) == 0, "trainer with the engine's noise"


@pytest.mark.slow
def test_what_is_remembered_is_in_the_checkpoint(run, tmp_path):
    tested = with_arguments(EVIDENCE, {"policy_tokens": 4096}, tmp_path)
    run("fit", tmp_path, "-c", tested, *SHORT)
    state = load_last(tmp_path)["callbacks"]["RolloutEvidence"]
    assert len(state["gaps"]["evidence/gap"]) == 2 + 4, "the trainer's own rounding errors are the first two"
    assert len(state["numbers"]["mean reward"]) == 4, "one a group"
    assert len(state["seen"]) == 4 * 16
    assert len(state["evidence"]["other_sampling"]) == len(SHARES) * len(ALTERNATIVES)
    assert len(state["evidence"]["other_policy"]) == len(SHARES) * len(OTHER_POLICIES)
    assert state["strengths"].keys() == set(OTHER_POLICIES)
    curves = read_curves(tmp_path)
    assert max(curves["evidence/gap"].values) < 1e-5, "with noise on both sides"
    for seen in (state["seen"], state["seen"].tolist()):  # a list in checkpoints of earlier versions
        other = RolloutEvidence()
        other.load_state_dict({**state, "seen": seen})
        assert differences(other.state_dict(), state) == []
