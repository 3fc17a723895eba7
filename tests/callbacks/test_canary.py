"""The canary, the callback that compares engine and trainer, stops a run whose engine does not sample from the current
policy, and never stops a healthy run."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from callbacks import canary
from callbacks.canary import SyncCanary, describe_fault, dtype_held, expected, until_least_certain
from qerl_pl.common.checks import EARLY
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.model.family import PROJECTIONS
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.policy.shaken import shaken
from qerl_pl.results.curves import read_curves
from qerl_pl.rollout import comparison
from qerl_pl.rollout.comparison import LAST, MARGIN, Gap, gap_of, score_gaps, trainers_engine, wrong_ones
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.loop import RolloutLoop
from qerl_pl.rollout.probe import GOOD, STRENGTHS, best_strength, find_strength
from tests.callbacks.faults import FAULTS
from tests.integration.conftest import UNCHECKED, VLLM, differences, load_last
from tests.random_models import fixed_tokens

NOISES = [NormNoise(), NormNoise(0.05, seed=3)]
FIVE = ("--trainer.max_steps", "5", "--trainer.limit_val_batches", "0")  # more rollouts than ``EARLY``
BLOCK = ("--model.engine.init_args.block_size", "32")  # prompts and fixed tokens are longer than this


def make_policy(base: Path, *, train_norms: bool = False, dtype: torch.dtype = torch.float32) -> Policy:
    """Make a policy as in the middle of a run: its adapter changes the output, because the matrices B are not 0."""
    lora = LoraSettings(rank=4, alpha=8, train_norms=train_norms)
    policy = load_policy(str(base), dtype=dtype, lora=lora, seed=0)
    generator = torch.Generator().manual_seed(1)
    state = policy.adapter_state()
    policy.load_adapter_state(
        {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    )
    return policy


def synced(policy: Policy, noise: NormNoise) -> RolloutLoop:
    engine = TransformersEngine()
    engine.start(policy, max_model_len=64)
    loop = RolloutLoop(engine, [], None)  # pyright: ignore[reportArgumentType]  (nothing is decoded)
    loop.sync(policy.adapter_state(), noise)
    return loop


def gaps(loop: RolloutLoop, policy: Policy, noise: NormNoise, strength: float | None = None) -> dict[str, Gap]:
    tokens = fixed_tokens(policy.config.vocab_size, 40)
    with trainers_engine(policy, noise, max_model_len=41) as oracle:
        strength = strength or find_strength(oracle, policy, tokens, policy.dtype, seed=5)
        assert strength
        measured = score_gaps(loop, oracle, policy, policy.dtype, tokens=tokens, seed=5, strength=strength, scores=True)
    loop.sync(policy.adapter_state(), noise)
    return measured


class TestChecks:
    @pytest.mark.parametrize("noise", NOISES, ids=["clean", "noisy"])
    @pytest.mark.parametrize("train_norms", [False, True], ids=["frozen norms", "trained norms"])
    def test_a_healthy_engine_passes_and_everything_is_as_before(self, bases, train_norms, noise):
        policy = make_policy(bases["nvfp4"], train_norms=train_norms)
        loop = synced(policy, noise)
        held = loop.engine.fingerprint()
        before = {
            name: tensor.clone() for name, tensor in policy.state_dict().items() if "lora" in name or "norm" in name
        }
        stream = torch.get_rng_state()
        assert dtype_held(held, policy, noise) is torch.float32
        measured = gaps(loop, policy, noise)
        assert measured[comparison.PROBE].change > 0.05
        assert max(gap.nats for gap in measured.values()) < canary.TOLERANCE[torch.float32]
        assert loop.engine.fingerprint() == held
        assert all(torch.equal(policy.state_dict()[name], tensor) for name, tensor in before.items())
        assert torch.equal(torch.get_rng_state(), stream)
        assert policy.training

    @pytest.mark.parametrize("train_norms", [False, True], ids=["frozen norms", "trained norms"])
    @pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
    def test_an_engine_may_compute_in_another_dtype_than_the_trainer(self, bases, dtypes, train_norms):
        dtype, engines = dtypes
        same = [make_policy(bases["nvfp4"], train_norms=train_norms, dtype=dtype) for dtype in dtypes]
        noise = NOISES[1]
        held = synced(same[1], noise).engine.fingerprint()
        assert dtype_held(held, same[0], noise) is engines
        assert dtype_held(held, same[0], NormNoise()) is None
        assert dtype_held(expected(same[0], noise, dtype), same[0], noise) is dtype

    @pytest.mark.parametrize(
        ("fault", "noise", "message"),
        [
            ("lost_update", NOISES[0], "the adapter from before the last update. 28 of 32 tensors"),
            ("old_adapter", NOISES[0], "the adapter from before the last update. 28 of 32 tensors"),
            ("no_adapter", NOISES[1], "no adapter. 28 of 32 tensors"),
            ("swapped_matrix", NOISES[1], r"another adapter. 1 of 32 tensors.*layers\.1\.self_attn\.o_proj\.lora_A"),
            ("noise_left", NOISES[0], r"noise was left on its norms.*4 of 32 tensors.*layers\.0\.input_layernorm"),
            ("noise_missing", NOISES[1], "noise of sigma 0.05 is missing. 4 of 32"),
            ("other_noise", NOISES[1], "other noise .*sigma 0.05.* 4 of 32"),
        ],
    )
    def test_checksums_tell_what_is_wrong(self, bases, fault, noise, message):
        policy = make_policy(bases["nvfp4"])
        loop = synced(policy, noise)
        before = loop.engine.fingerprint()
        loop.engine = FAULTS[fault](loop.engine, policy.adapter_state())
        policy.load_adapter_state({name: tensor + 1e-6 for name, tensor in policy.adapter_state().items()})
        loop.sync(policy.adapter_state(), noise)
        held = loop.engine.fingerprint()
        assert dtype_held(held, policy, noise) is None
        assert re.search(message, describe_fault(held, policy, noise, before=before))

    def test_an_old_adapter_with_trained_norms_is_not_taken_for_noise(self, bases):
        policy = make_policy(bases["nvfp4"], train_norms=True)
        loop = synced(policy, NOISES[0])
        before = loop.engine.fingerprint()
        policy.load_adapter_state({name: tensor + 1e-6 for name, tensor in policy.adapter_state().items()})
        message = describe_fault(loop.engine.fingerprint(), policy, NOISES[0], before=before)
        assert message.startswith("it has the adapter from before the last update. 32 of 32")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_an_engine_that_computes_with_another_policy_is_seen_although_b_is_0(self, bases, dtype):
        policy = load_policy(str(bases["nvfp4"]), dtype=dtype, lora=LoraSettings(rank=4), seed=0)
        tokens = fixed_tokens(policy.config.vocab_size, 40)
        with trainers_engine(policy, NormNoise(), max_model_len=41) as oracle:
            strength = find_strength(oracle, policy, tokens, dtype, seed=5)
        for fault in ("unused_adapter", "stale_prefixes", None):
            loop = synced(policy, NormNoise())
            if fault:
                loop.engine = FAULTS[fault](loop.engine, policy.adapter_state())
            assert dtype_held(loop.engine.fingerprint(), policy, NormNoise()) is dtype
            wrong = wrong_ones(gaps(loop, policy, NormNoise(), strength), canary.TOLERANCE[dtype])
            assert wrong == ([comparison.PROBE] if fault else []), fault

    @pytest.mark.parametrize("block", [16, 32, 64, 128])
    def test_samples_follow_a_cached_block_at_once_and_after_some_tokens(self, bases, block):
        policy = make_policy(bases["nvfp4"])
        lengths = []

        class Engine(TransformersEngine):
            def generate(self, prompts, *args, **more):
                lengths.append([len(prompt) for prompt in prompts])
                return super().generate(prompts, *args, **more)

        engine, oracle = Engine(), TransformersEngine()
        for started in (engine, oracle):
            started.start(policy, max_model_len=200)
        tokens = fixed_tokens(policy.config.vocab_size, SyncCanary().num_tokens)
        comparison.probe_gap(engine, oracle, policy, tokens, torch.float32, seed=0, strength=0.5)
        [cached], sampled = lengths
        assert cached == max(sampled)
        assert min(sampled) > block, "each has a whole block in the cache"
        anew = [(length - 1) % block + 1 for length in sampled]  # tokens of its own
        assert min(anew) == 1
        assert max(anew) >= 15

    @pytest.mark.parametrize("length", [0, 5, LAST, 200])
    def test_the_text_ends_with_the_tokens_of_which_the_policy_was_least_certain(self, length):
        prompt = Prompt((1, 2, 3), "")
        logprobs = (-0.1 * torch.rand(length, generator=torch.Generator().manual_seed(0))).tolist()
        logprobs[50 : 50 + LAST] = [-1.0] * len(logprobs[50 : 50 + LAST])
        logprobs[100:102] = [-math.inf, math.nan] if length > 101 else []
        tokens = tuple(range(10, 10 + len(logprobs)))
        text, surprisal = until_least_certain(prompt, Completion(tokens, tuple(logprobs), finished=True))
        assert text == prompt.tokens + tokens[: 50 + LAST]
        assert surprisal == pytest.approx(-sum(logprobs[50 : 50 + LAST] if length > LAST else logprobs))

    @pytest.mark.parametrize("num", [1, 4, 5, 8, 14])
    def test_a_text_ends_with_the_first_row_and_repeats_rows_that_are_too_few(self, num):
        assert (
            comparison.own_text([[1, 2, 3], [], [4, 5]], num) == [3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3][-num:]
        )

    @pytest.mark.parametrize(
        ("gap", "is_wrong"),
        [
            (Gap(0.35, 0.3, MARGIN - 0.1), False),
            (Gap(0.35, 0.05, MARGIN + 0.1), True),
            (Gap(0.01, 1e-4, 100.0), False),
            (Gap(math.nan, 0.1, 1.0), False),
            (Gap(math.nan, math.nan, math.nan), True),
        ],
    )
    def test_an_engine_is_wrong_by_more_nats_than_always_allowed_and_by_more_than_rounding(self, gap, is_wrong):
        assert wrong_ones({comparison.PROBE: gap}, 0.02) == ([comparison.PROBE] if is_wrong else [])

    def test_a_difference_is_measured_in_rounding_errors_token_by_token_and_none_decides_alone(self):
        rounding, zeros = torch.tensor([0.0, 0.01, 0.1, 1.0]), torch.zeros(4)
        assert gap_of(2 * rounding, zeros, rounding).excess < 2
        assert gap_of(20 * rounding, zeros, rounding).excess > MARGIN
        assert gap_of(torch.tensor([1e3, 0, 0, 0]), zeros, rounding).excess <= MARGIN
        assert gap_of(zeros, zeros, zeros).excess == 0


def sharp_policy(base: Path, dtype: torch.dtype, sharpness: float, *targets: str) -> Policy:
    """Make a policy whose norms multiply by ``sharpness``. The larger this is, the more a small change of the weights
    changes the log-probabilities, as in pretrained models."""
    policy = load_policy(str(base), dtype=dtype, lora=LoraSettings(rank=4, targets=targets or PROJECTIONS), seed=0)
    with torch.no_grad():
        for weight in policy.norm_weights().values():
            weight.mul_(sharpness)
    return policy


class TestStrength:
    @pytest.mark.parametrize(
        ("dtype", "sharpness", "targets"),
        [
            (torch.float32, 1.0, ()),
            (torch.float32, 16.0, ()),
            (torch.bfloat16, 16.0, ()),
            (torch.bfloat16, 1.0, ("q_proj", "v_proj")),
            pytest.param(torch.bfloat16, 1.0, (), marks=pytest.mark.long),
            pytest.param(torch.float32, 1.0, ("q_proj", "v_proj"), marks=pytest.mark.long),
        ],
    )
    def test_right_engines_differ_by_a_tenth_of_the_change_at_most(self, bases, dtype, sharpness, targets):
        policy = sharp_policy(bases["nvfp4"], dtype, sharpness, *targets)
        loop = synced(policy, NormNoise())
        tokens = fixed_tokens(policy.config.vocab_size, 40)
        with trainers_engine(policy, NormNoise(), max_model_len=41) as oracle:
            strength = find_strength(oracle, policy, tokens, dtype, seed=0)
            assert strength in STRENGTHS
            for seed in range(2):
                measured = score_gaps(
                    loop, oracle, policy, dtype, tokens=tokens, seed=seed, strength=strength, scores=False
                )[comparison.PROBE]
                assert measured.nats < 0.1 * measured.change, "samples in batches with a cache, scores of packed rows"

    @pytest.mark.parametrize(
        ("shares", "best"),
        [
            ({1.0: 0.03, 0.5: 0.02, 0.25: 0.039, 0.125: 0.041}, 0.25),
            ({0.5: 0.04, 0.25: 0.06, 0.125: 0.07}, 0.25),
            ({0.5: 0.09, 0.25: 0.07, 0.125: 0.08}, 0.25),
            ({0.5: 0.3, 0.25: 0.11}, None),
            ({}, None),
        ],
        ids=["half as good", "good enough", "best of the usable", "none is usable", "none was tried"],
    )
    def test_the_weakest_of_the_good_strengths_is_taken(self, shares, best):
        assert best_strength(shares) == best

    def test_the_search_is_repeatable_and_has_no_result_if_rounding_hides_every_change(self, bases):
        policy = sharp_policy(bases["nvfp4"], torch.float32, 1.0)
        tokens = fixed_tokens(policy.config.vocab_size, 40)
        with trainers_engine(policy, NormNoise(), max_model_len=41) as oracle:
            measured = [find_strength(oracle, policy, tokens, torch.float32, seed=0) for _ in range(2)]
            assert measured[0] == measured[1]
            assert find_strength(oracle, policy, tokens, torch.float8_e5m2, seed=0) is None

    def test_shaken_results_have_rounding_errors_of_the_dtype_and_the_model_is_as_before(self, bases):
        policy = sharp_policy(bases["nvfp4"], torch.float32, 1.0)
        tokens = fixed_tokens(policy.config.vocab_size, 40)
        with trainers_engine(policy, NormNoise(), max_model_len=41) as oracle:
            plain = torch.tensor(oracle.score([tokens]))
            sizes = []
            for dtype in (torch.float16, torch.bfloat16):
                with shaken(policy.causal_lm, dtype, seed=1):
                    measured = torch.tensor(oracle.score([tokens] * 2))
                with shaken(policy.causal_lm, dtype, seed=1):
                    assert torch.equal(measured, torch.tensor(oracle.score([tokens] * 2)))
                assert not torch.equal(measured[0], measured[1]), "rows have errors of their own"
                sizes.append((measured - plain).square().mean().sqrt().item())
            assert sizes[1] == pytest.approx(8 * sizes[0], rel=0.1), "an error of bfloat16 is 8 times one of float16"
            assert torch.equal(plain, torch.tensor(oracle.score([tokens])))

    @pytest.mark.slow
    def test_a_run_without_a_usable_strength_says_so_and_makes_its_other_checks(self, run, tmp_path, monkeypatch):
        monkeypatch.setattr("callbacks.canary.find_strength", lambda *_, **__: None)
        with pytest.warns(UserWarning, match="found no random adapter"):
            run("fit", tmp_path, "--trainer.max_steps", "4", "--trainer.limit_val_batches", "0")
        curves = read_curves(tmp_path)
        assert curves["canary/probe_strength"].values == [0] * 4
        assert "canary/probe_gap" not in curves
        assert len(curves["canary/score_gap"].values) == 1


IN_A_RUN = [
    # Name of the fault, the rollout before which the engine gets it, the rollout in which the run has to stop, and the
    # fault in words. Rollouts 0 and 1 have no noise on the norms.
    ("lost_update", 2, 2, "the adapter from before the last update"),
    ("old_adapter", 2, 2, "another adapter was loaded"),
    ("no_adapter", 2, 2, "no adapter"),
    ("swapped_matrix", 1, 1, "another adapter"),
    ("unused_adapter", 1, 1, "another adapter was loaded"),
    ("noise_left", 0, 0, "noise was left"),
    ("noise_missing", 2, 2, "noise of sigma 0.1 is missing"),
    ("other_noise", 2, 2, "other noise"),
    ("stale_prefixes", 1, 1, "cached prefixes are those of an older policy"),
]


DOES_NOT = "the rollout engine does not .* the current policy.*"


def assert_stops(run, run_dir: Path, engine: tuple[str, ...], fault: str, at: int, stopped: int, message: str) -> None:
    sabotage = (
        "--trainer.callbacks+=tests.callbacks.faults.Sabotage",
        f"--trainer.callbacks.fault={fault}",
        f"--trainer.callbacks.at={at}",
    )
    with pytest.raises(RuntimeError, match=message):
        run("fit", run_dir, *FIVE, *engine, *sabotage)
    if stopped:
        assert load_last(run_dir)["global_step"] == stopped, "nothing was learned from the rollout that it stopped"
    else:
        assert not (run_dir / "checkpoints" / "last.ckpt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "at", "stopped", "message"), IN_A_RUN[::8], ids=[row[0] for row in IN_A_RUN[::8]])
def test_a_fault_stops_the_run_before_anything_is_learned_from_it(run, tmp_path, fault, at, stopped, message):
    assert_stops(run, tmp_path, (), fault, at, stopped, DOES_NOT + message)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("fault", "at", "stopped", "message"),
    [pytest.param(*row, id=row[0], marks=[] if row[0] == "swapped_matrix" else pytest.mark.long) for row in IN_A_RUN],
)
def test_a_fault_of_vllm_stops_the_run_too(run, tmp_path, fault, at, stopped, message):
    group = dist.is_initialized()
    assert_stops(run, tmp_path, (*VLLM, *BLOCK), fault, at, stopped, DOES_NOT + message)
    assert dist.is_initialized() == group, "the engine of a run that stopped is closed, and its group with it"


@pytest.mark.slow
def test_a_fault_that_begins_between_two_comparisons_of_samples_is_found_in_its_rollout(run, tmp_path):
    longer = ("--trainer.max_steps", "10")
    assert_stops(run, tmp_path, longer, "unused_adapter", 5, 5, "of rollout 5 differ from the trainer's by")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subcommand", "fault", "message"),
    [
        ("fit", "noise_left", "noise was left"),
        ("validate", "stale_prefixes", "cached prefixes"),
        ("test", "no_adapter", "no adapter"),
        ("predict", "unused_adapter", "another adapter was loaded"),
    ],
)
def test_a_fault_stops_an_evaluation(run, tmp_path, subcommand, fault, message):
    sabotage = (
        "--trainer.callbacks+=tests.callbacks.faults.Sabotage",
        f"--trainer.callbacks.fault={fault}",
        "--trainer.callbacks.in_validation=true",
    )
    with pytest.raises(RuntimeError, match=message):
        run(subcommand, tmp_path, *sabotage)


def assert_healthy(run, run_dir: Path, *engine: str) -> None:
    run("fit", run_dir, *FIVE, *engine)
    curves = read_curves(run_dir)
    assert set(curves["canary/tensors_checked"].values) == {28 + 4}
    assert curves["canary/tensors_checked"].steps == list(range(5))
    assert curves["canary/score_gap"].steps == [0]
    for name in ("probe_gap", "probe_change", "probe_rounding", "probe_share", "probe_excess"):
        assert curves[f"canary/{name}"].steps == list(range(EARLY)), name
    for name, least in (("score_gap", 0), ("probe_gap", 1e-12)):  # scores are the same computation with transformers
        assert least <= max(curves[f"canary/{name}"].values) < canary.TOLERANCE[torch.float32]
    assert max(curves["canary/probe_share"].values) < GOOD
    assert len(set(curves["canary/probe_strength"].values)) == 1
    assert max(curves["aqn/sigma"].values) > 0


@pytest.mark.slow
def test_a_healthy_run_passes_and_is_what_it_is_without_its_checks(run, tmp_path):
    assert_healthy(run, tmp_path / "with")
    run("fit", tmp_path / "without", *FIVE, *UNCHECKED)
    measured = ("canary/", "ledger/", "evidence/")
    assert not [tag for tag in read_curves(tmp_path / "without") if tag.startswith(measured)]
    states = [load_last(tmp_path / name) for name in ("with", "without")]
    for part in ("global_step", "state_dict", "optimizer_states"):
        assert differences(states[0][part], states[1][part]) == []


@pytest.mark.slow
@pytest.mark.vllm
def test_a_healthy_run_with_vllm_passes(run, tmp_path):
    assert_healthy(run, tmp_path, *VLLM, *BLOCK)
