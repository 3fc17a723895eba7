"""Whole runs on a CPU: the files that a run writes, training on real problems, evaluation, prediction and export."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from peft import PeftModel
from transformers import AutoModelForCausalLM

from qerl_pl.__main__ import main as command
from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.phases import phase
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.results.curves import read_curves
from qerl_pl.rollout.token_file import read_tokens
from qerl_pl.tools.model_card import model_card
from qerl_pl.tools.page.completions import block
from tests.integration.conftest import IN_BACKGROUND, ROOT, SHORT, UNCHECKED, VLLM, load_last
from tests.integration.test_families import assert_stock_libraries_agree

DATA = Path(os.environ.get("QERL_DATA", ROOT.parent / "shared" / "data"))
GSM8K = DATA / "gsm8k_train.jsonl"


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_leaves_its_curves_its_completions_and_its_config(finished):
    curves = read_curves(finished)
    for tag in (
        "train/reward",
        "train/low_tokens",
        "train/format",
        "train/grad_norm",
        "policy/entropy",
        "policy/entropy_p90",
        "policy/clipped_high_share",
        "aqn/sigma",
        "gap/mean_abs",
        "rollout/truncated_share",
        "time/rollout_s",
        "time/train_s",
        "throughput/rollout_tokens_per_s",
        "lr-AdamW",
    ):
        assert curves[tag].steps == list(range(8)), tag
    assert curves["val/reward"].steps == [0, 2, 5, 7], "before the first step, as scheduled, and after the last"
    step, rollout, between = (curves[f"time/{name}_s"].values for name in ("step", "rollout", "between"))
    assert between[0] == 0 < min(between[1:])
    assert all(whole > part + rest for whole, part, rest in zip(step, rollout, between, strict=True))
    assert [row["reward"] for row in records(finished / "completions" / "train-000000.jsonl")]
    assert len(list((finished / "completions").glob("train-*.jsonl"))) == 8
    tokens = read_tokens(finished / "completions" / "train-000000.safetensors")
    assert tokens is not None
    rows = records(finished / "completions" / "train-000000.jsonl")
    assert tokens.offsets.diff().tolist() == [row["num_tokens"] for row in rows]
    assert tokens.gap.abs().mean().item() == pytest.approx(curves["gap/mean_abs"].values[0], abs=1e-4)
    assert tokens.entropy.float().mean().item() == pytest.approx(curves["policy/entropy"].values[0], rel=1e-3)
    assert set(tokens.pieces) == set(tokens.ids.tolist())
    assert (finished / "config.yaml").exists()
    saved = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert saved == ["best.ckpt", "last.ckpt", "previous.ckpt"]


@pytest.mark.slow
def test_the_page_on_metrics_explains_every_scalar_of_a_run(finished):
    names = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    patterns = [re.escape(name) for row in names for name in re.findall(r"`([^`]+)`", row)]
    for wildcard, meaning in ((r"\*", ".*"), ("/NAME", "/(low_tokens|format)"), ("@K", r"@\d+")):
        patterns = [pattern.replace(wildcard, meaning) for pattern in patterns]
    tags = set(read_curves(finished))
    assert {"train/loss", "train/format", "gap/count", "lr-AdamW"} <= tags
    assert {tag for tag in tags if not any(re.fullmatch(pattern, tag) for pattern in patterns)} == set()


@pytest.mark.slow
def test_unscored_completions_stop_a_run_or_are_counted_by_cause(run, tmp_path):
    more = ("--model.rewards+", "{name: odd, reward: tests.integration.toy.undecided}", *SHORT, *UNCHECKED)
    with pytest.raises(RuntimeError, match=r"50\.0%.*the most frequent reason: the reward does not say why"):
        run("fit", tmp_path / "a", *more)
    run("fit", tmp_path / "b", *more, "--model.max_unscored_share", "0.5")
    curves = read_curves(tmp_path / "b")
    assert curves["reward/unscored/unsaid"].values == [8.0] * 4
    assert curves["reward/unscored/hang"].values == [0.0] * 4
    [row, *_] = records(tmp_path / "b" / "completions" / "train-000000.jsonl")
    assert row["reward"] is None
    assert row["reasons"] == {"low_tokens": "", "format": "", "odd": "the reward does not say why"}


@pytest.mark.slow
def test_groups_that_an_update_learns_from_are_counted_and_a_reward_without_right_answers_is_told(
    run, tmp_path, recwarn
):
    """The reward has the name of a method of torch's modules."""
    half = '[{"name": "half", "weight": 1.0, "reward": "tests.integration.toy.half_of_a_batch"}]'
    few = (*SHORT, *UNCHECKED, "--trainer.limit_val_batches", "1")
    run("fit", tmp_path / "one", *few, "--model.rewards", half)
    assert not [warning for warning in recwarn if "never 1" in str(warning.message)], "no pass@k is measured"
    warning = "the reward half, the first of model.rewards, gives positive values and never 1"
    two = ("--model.val_sampling", "{num_completions: 2, max_tokens: 6, temperature: 1.0}")
    with pytest.warns(UserWarning, match=warning):
        run("fit", tmp_path / "two", *few, *two, "--model.rewards", half)
    with pytest.warns(UserWarning, match=warning):
        run("validate", tmp_path / "base", *UNCHECKED, "--trainer.limit_val_batches", "1", "--model.rewards", half)
    curves = read_curves(tmp_path / "one")
    shares = curves["rollout/groups_with_signal"].values
    assert min(shares) < 1
    assert curves["rollout/groups_trained"].values == [4 * share for share in shares]
    assert curves["rollout/groups_trained"].values == [2.0] * 4, "of 4 groups, 2 have equal rewards"


@pytest.mark.slow
def test_dynamic_sampling_that_keeps_no_group_has_dropped_all(run, tmp_path):
    equal = '[{"name": "format", "weight": 1.0, "reward": "qerl_pl.rewards.format.think_answer_format"}]'  # 0 for all
    once = ("--model.dynamic_sampling.max_refills", "1", *SHORT, *UNCHECKED)
    run("fit", tmp_path, *once, "--model.rewards", equal)
    curves = read_curves(tmp_path)
    assert curves["rollout/groups_trained"].values == [0.0] * 4
    assert curves["rollout/groups_discarded"].values == [8.0] * 4, "4 prompts, and 4 of the refill"


@pytest.mark.slow
def test_token_values_belong_to_their_completions_if_dynamic_sampling_drops_some(run, tmp_path):
    half = '[{"name": "half", "weight": 1.0, "reward": "tests.integration.toy.half_of_a_batch"}]'
    run("fit", tmp_path, *SHORT, *UNCHECKED, "--model.rewards", half, "--model.dynamic_sampling.max_refills", "1")
    file = tmp_path / "completions" / "train-000000.jsonl"
    rows, tokens = block(file, 0)["rows"], read_tokens(file.with_suffix(".safetensors"))
    assert tokens is not None
    assert len(rows) == 8 * 4, "the batch and a refill, of each of which the first half has a signal"
    counts = tokens.offsets.diff().tolist()
    kept = [*[True] * 8, *[False] * 8] * 2
    assert counts == [row["n"] * keep for row, keep in zip(rows, kept, strict=True)]
    assert [bool(row["t"]) for row in rows] == kept
    assert [advantage != 0 for advantage in tokens.advantages.tolist()] == kept
    texts = ["".join(tokens.pieces[token] for token in part.tolist()) for part in tokens.ids.split(counts)]
    for text, row in zip(texts, rows, strict=True):  # bytes above 127 are parts of characters
        sampled, written = (re.sub(r"[^\x00-\x7f]", "", whole) for whole in (text, row["c"]))
        assert sampled.startswith(written) or not text, "an end token is only in the tokens"


EARLIER = ("--trainer.callbacks+=callbacks.gradient_guard.GradientGuard", "--trainer.callbacks.min_steps=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "found", "how"),
    [
        (".nan", "is nan", ()),
        pytest.param(".nan", "is nan", IN_BACKGROUND, marks=pytest.mark.long),
        ("1e6", "times the usual", EARLIER),
    ],
)
def test_a_step_that_would_spoil_the_policy_is_not_taken_and_the_run_goes_on_from_before_it(
    run, short, tmp_path, factor, found, how
):
    spoil = ("--trainer.callbacks+", "tests.integration.toy.SpoilGradient", "--trainer.callbacks.at", "2")
    with pytest.raises(CheckFailed, match=found) as error:
        run("fit", tmp_path, *SHORT, *UNCHECKED, *how, *spoil, "--trainer.callbacks.factor", factor)
    file = tmp_path / "faults" / "rollout_000002_rank_0.jsonl"
    assert str(file) in str(error.value)
    assert all(row["prompt"] and row["completion"] for row in records(file))
    left_out = how == IN_BACKGROUND  # while the checkpoint of the step before is written
    assert load_last(tmp_path)["global_step"] in (2 - left_out, 2)
    run("fit", tmp_path, *SHORT, *UNCHECKED, *how, "--ckpt_path", "last")
    left, right = (load_last(run_dir)["state_dict"] for run_dir in (tmp_path, short))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_training_moves_the_policy_towards_the_reward(run, tmp_path):
    # At the temperature 1, the adapter could change this model's probabilities only a little: a norm and an output
    # matrix of small random weights come after it.
    batch = ("--model.sampling.num_completions", "16", "--model.sampling.max_tokens", "4", *UNCHECKED)
    batch += ("--model.sampling.temperature", "0.1", "--trainer.limit_val_batches", "0")
    run("fit", tmp_path, *batch, "--model.micro_batch_tokens", "4000", "--model.optimizer.init_args.lr", "1e-2")
    rewards = read_curves(tmp_path)["train/low_tokens"].values
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.4


@pytest.mark.slow
def test_a_run_says_how_far_it_is(run, tmp_path, capsys, monkeypatch):
    named: list[str] = []
    monkeypatch.setattr("qerl_pl.module.phase", lambda what, **more: named.append(what) or phase(what, **more))
    run("fit", tmp_path / "file", "--trainer.max_steps", "4", *UNCHECKED)
    assert named.count("starting TransformersEngine") == 1
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("rollout ")]
    reward = r"reward -?[\d.]+, [\d.]+ s, 0:\d\d:\d\d left"
    assert all(re.fullmatch(rf"rollout {number} of 4: {reward}", line) for number, line in enumerate(lines, 1))
    assert len(lines) == 4
    assert "low_tokens" not in "".join(lines)
    assert re.search(r"^validation: reward -?\d\.\d{3}$", printed, re.MULTILINE)
    end = rf"trained for 0:00:\d\d; `\S*python -m qerl_pl report {tmp_path}/file` shows the run"
    assert any(re.fullmatch(end, line) for line in printed.splitlines())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    run("fit", tmp_path / "terminal", "--trainer.max_steps", "4", *UNCHECKED)
    shown = capsys.readouterr().out
    assert "rollout 1 of 4" not in shown
    assert "low_tokens 0." in shown
    assert re.search(r"rollouts 4/4 .* left, reward -?[\d.]+, entropy [\d.]+ nats", shown)
    assert "validation, batches 1/" in shown
    assert "Epoch" not in shown


@pytest.mark.slow
def test_prediction_writes_every_completion_of_the_trained_policy(run, finished, tmp_path):
    run("predict", tmp_path, *UNCHECKED, "--ckpt_path", str(finished / "checkpoints" / "last.ckpt"))
    rows = records(next((tmp_path / "predict" / "arithmetic-last" / "completions").glob("predict-*.jsonl")))
    assert len(rows) == 6
    assert {"prompt", "completion", "answer", "reward", "finished"} <= rows[0].keys()
    run("predict", tmp_path / "base", *UNCHECKED)
    base = records(next((tmp_path / "base" / "predict" / "arithmetic" / "completions").glob("predict-*.jsonl")))
    assert [row["completion"] for row in rows] != [row["completion"] for row in base], "the adapter was not applied"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("problems", [64, pytest.param(1319, marks=pytest.mark.long, id="the whole test set")])
def test_two_iterations_on_real_problems_and_validation_on_the_test_set(run, tmp_path, problems):
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} is missing; set QERL_DATA to a folder with gsm8k_train.jsonl and gsm8k_test.jsonl")
    (tmp_path / "some.jsonl").write_text("".join(GSM8K.read_text().splitlines(keepends=True)[:200]))
    source = ("--data.source", "datamodules.gsm8k.GSM8K", f"--data.source.train_path={tmp_path / 'some.jsonl'}")
    source += (f"--data.source.validation_path={DATA / 'gsm8k_test.jsonl'}", "--data.max_prompt_tokens", "1100")
    small = ("--model.micro_batch_tokens", "4096", "--trainer.val_check_interval", "100", *UNCHECKED, *VLLM)
    run("fit", tmp_path, *source, *small, "--trainer.max_steps", "4", "--data.val_limit", "8", "--data.batch_size", "2")
    assert load_last(tmp_path)["global_step"] == 4
    events = read_curves(tmp_path)
    run("validate", tmp_path, *source, *small, "--ckpt_path", "last", "--data.val_limit", str(problems))
    assert read_curves(tmp_path) == events, "an evaluation wrote into the curves of the training"
    rows = records(next((tmp_path / "validate" / "gsm8k-last" / "completions").glob("validate-*.jsonl")))
    assert len(rows) == problems
    assert all(row["reward"] is not None for row in rows)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("adapter", [True, pytest.param(False, marks=pytest.mark.long)], ids=["adapter", "base"])
def test_both_engines_give_the_same_greedy_validation(run, finished, tmp_path, adapter):
    more = ("--data.source.num_validation", "24", "--model.sampling.max_tokens", "24")
    more += ("--ckpt_path", str(finished / "checkpoints" / "last.ckpt")) if adapter else ()
    for name, engine in {"transformers": (), "vllm": VLLM}.items():
        run("validate", tmp_path / name, *more, *engine)
    rows, summaries = [], []
    for name in ("transformers", "vllm"):
        folder = tmp_path / name / "validate" / ("arithmetic-last" if adapter else "arithmetic")
        rows.append(records(next((folder / "completions").glob("validate-*.jsonl"))))
        summaries.append(json.loads((folder / "evaluation" / "validate.json").read_text()))
    assert len({row["completion"] for row in rows[0]}) > 12, "the policy says the same to everything"
    assert rows[0] == rows[1]
    assert summaries[0] == summaries[1]


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "adapter"
    assert command(["export", "--run", str(finished), "--output", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_stock_peft_loads_the_exported_adapter(exported, finished, bases):
    settings = LoraSettings(rank=4, alpha=8)
    policy = load_policy(str(bases["dense"]), dtype=torch.float32, lora=settings, seed=0)
    policy.load_adapter_state(load_last(finished)["state_dict"])
    tokens = torch.arange(40).view(2, 20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[:, 1:] = True
    ours = policy.token_stats(tokens, mask, temperature=1.0).logprobs[:, 1:]

    base = AutoModelForCausalLM.from_pretrained(bases["dense"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, exported)
    adapted = torch.log_softmax(model(tokens).logits, -1)
    stock = adapted[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(stock, ours, atol=1e-5, rtol=0)
    with model.disable_adapter():
        assert not torch.allclose(torch.log_softmax(model(tokens).logits, -1), adapted, atol=1e-3)


@pytest.mark.slow
def test_a_run_that_starts_from_the_exported_adapter_starts_at_its_policy_bit_for_bit(exported, finished, bases):
    trained = load_policy(str(bases["dense"]), dtype=torch.float32, lora=LoraSettings(rank=4, alpha=8), seed=0)
    trained.load_adapter_state(load_last(finished)["state_dict"])
    started = load_policy(str(bases["dense"]), dtype=torch.float32, lora=LoraSettings(start=str(exported)), seed=1)
    tokens = torch.arange(40).view(2, 20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[:, 1:] = True
    one, other = (policy.token_stats(tokens, mask, temperature=1.0).logprobs for policy in (trained, started))
    assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "nvfp4"])
def test_the_code_on_the_card_of_an_adapter_loads_it(exported, finished, bases, name):
    settings = LoraSettings(rank=4, alpha=8)
    card = model_card(load_last(finished), settings, base=str(bases[name]), folder=str(exported), run=finished)
    [code] = re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"](torch.arange(20).view(1, 20)).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.vllm
def test_stock_vllm_answers_with_a_merged_model_as_stock_transformers_does(finished, tmp_path, capsys):
    for form, kl, same in (("bf16", 1e-2, 0.95), ("nvfp4", 1.0, 0.5)):
        folder = tmp_path / form
        assert command(["export", "--run", str(finished), "--output", str(folder), "--merge", form]) == 0
        assert "nats per token" in capsys.readouterr().out
        drift = json.loads((folder / "drift.json").read_text())
        assert drift["num_tokens"] > 0
        assert 0 <= drift["kl"] < kl
        assert drift["same_argmax"] > same
    assert_stock_libraries_agree(tmp_path / "bf16")


@pytest.mark.slow
def test_training_after_an_evaluation_in_one_process_validates_what_it_trains(run, tmp_path):
    cli = run("validate", tmp_path, "--trainer.max_steps", "4", *UNCHECKED)
    before, seen = [row["completion"] for row in cli.model.evaluated], []
    follow = LambdaCallback(on_validation_end=lambda trainer, module: seen.append(list(module.evaluated)))
    cli.trainer.callbacks.append(follow)
    cli.trainer.fit(cli.model, cli.datamodule)
    fresh, *trained = [[row["completion"] for row in rows] for rows in seen]
    assert fresh == before
    assert len(trained) == 2, "one as scheduled, and one after the last step"
    assert all(completions != before for completions in trained)


@pytest.mark.slow
def test_an_evaluation_reports_and_goes_on_from_the_batches_it_has(run, finished, tmp_path, capsys):
    sampling = "{num_completions: 3, max_tokens: 8, temperature: 0.7}"
    more = ("--model.val_sampling", sampling, "--data.val_batch_size", "2", *UNCHECKED)
    checkpoint = ("--ckpt_path", str(finished / "checkpoints" / "last.ckpt"))
    cli = run("test", tmp_path, *more, *checkpoint)
    assert "tests.integration.toy.low_tokens" in cli.model.built
    assert " at 0x" not in cli.model.built, "an address in memory is another one in the process that goes on"
    assert "pass@3" in capsys.readouterr().out
    of_policy, of_base = (tmp_path / "test" / name / "evaluation" for name in ("arithmetic-last", "arithmetic"))
    whole = json.loads((of_policy / "test.json").read_text())
    assert (whole["num_problems"], whole["num_completions"], whole["checkpoint"]) == (6, 3, checkpoint[1])
    batches = sorted(of_policy.glob("*/*.jsonl"))
    assert len(batches) == 3
    kept = {path: path.stat().st_mtime_ns for path in batches[:2]}
    text = batches[2].read_text()
    batches[2].unlink()
    run("test", tmp_path, *more, *checkpoint)
    assert {path: path.stat().st_mtime_ns for path in batches[:2]} == kept, "a finished batch was sampled again"
    assert batches[2].read_text() == text, "the missing batch came out differently"
    assert json.loads((of_policy / "test.json").read_text()) == whole
    run("test", tmp_path, *more)
    assert "the base, 6 problems x 3" in capsys.readouterr().out
    assert json.loads((of_base / "test.json").read_text())["checkpoint"] is None
    assert len(list(of_base.glob("*/*.jsonl"))) == 3
    assert json.loads((of_policy / "test.json").read_text()) == whole, "the base's table replaced the policy's"
    run("test", tmp_path, *more, *checkpoint, "--data.val_limit", "2")
    of_two = tmp_path / "test" / "arithmetic-last-2" / "evaluation" / "test.json"
    assert json.loads(of_two.read_text())["num_problems"] == 2
    assert json.loads((of_policy / "test.json").read_text()) == whole, "other problems' table replaced it"


@pytest.mark.slow
def test_stop_strings_hold_in_training_and_evaluation_and_end_completions(run, tmp_path):
    """The stop strings are the ten digits. In the quickstart's tokenizer each digit is a token, so a random policy soon
    samples one."""
    stop = [*"0123456789"]
    cli = run("fit", tmp_path / "run", *SHORT, *UNCHECKED, "--data.stop", json.dumps(stop))
    assert cli.model.sampling.stop == cli.model.settings.evaluation.stop == tuple(stop)
    assert cli.trainer.callback_metrics["rollout/truncated_share"] < 0.9
