"""Laws of sampling and scoring that every rollout engine has to keep, tested on a dense base, an NVFP4 base, and a base
whose norms are trained."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.rollout.base import Sampling
from tests.rollout.conftest import (
    END_TOKENS,
    MAX_MODEL_LEN,
    NUM_LAYERS,
    VOCAB_SIZE,
    Setup,
    sampling_error,
    some_prompts,
    total_variation,
)

PROMPTS = some_prompts(1, 40, 70)  # shorter and longer than a block of the cache
LONG = some_prompts(100)
SAMPLING = Sampling(num_completions=2, max_tokens=6)
GREEDY = Sampling(num_completions=1, max_tokens=6, temperature=0)
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def assert_logprobs_are_the_policys(setup: Setup, prompts, groups, *, temperature=1.0, adapter=True):
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            own = setup.logprobs(prompt, completion.tokens, temperature=temperature, adapter=adapter)
            torch.testing.assert_close(torch.tensor(completion.logprobs), own, **TOLERANCE)


class TestSampling:
    @pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
    def test_sampler_logprobs_are_the_policys_own_at_the_sampling_temperature(self, setup, temperature):
        groups = setup.engine.generate(PROMPTS, Sampling(2, max_tokens=6, temperature=temperature), seed=1)
        assert [len(group) for group in groups] == [2] * len(PROMPTS)
        assert_logprobs_are_the_policys(setup, PROMPTS, groups, temperature=temperature)

    def test_equal_arguments_give_equal_tokens_whatever_ran_before(self, setup):
        first = setup.engine.generate(PROMPTS, SAMPLING, seed=1)
        setup.engine.generate(PROMPTS[2:], SAMPLING, seed=7)
        setup.engine.score(PROMPTS, adapter=False)
        assert setup.engine.generate(PROMPTS, SAMPLING, seed=1) == first

    def test_seeds_prompts_and_completions_all_sample_differently(self, setup):
        same_prompt = [LONG[0]] * 3
        groups = [setup.engine.generate(same_prompt, SAMPLING, seed=seed) for seed in (1, 3, [5, 6, 7])]
        sampled = [completion.tokens for call in groups for group in call for completion in group]
        assert len(set(sampled)) == len(sampled)

    def test_samples_follow_the_reported_distribution(self, setup):
        count = 800
        prompt = PROMPTS[1]
        [group] = setup.engine.generate([prompt], Sampling(count, max_tokens=1, temperature=0.8), seed=3)
        probabilities = (setup.logits(prompt)[-1] / 0.8).softmax(-1)
        counts = torch.bincount(torch.tensor([c.tokens[0] for c in group]), minlength=VOCAB_SIZE)
        assert total_variation(counts, probabilities) < 1.2 * sampling_error(probabilities, count)

    def test_greedy_takes_the_policys_likeliest_token_and_reports_it_at_temperature_1(self, setup):
        groups = setup.engine.generate(PROMPTS, GREEDY, seed=1)
        assert_logprobs_are_the_policys(setup, PROMPTS, groups)
        for prompt, [completion] in zip(PROMPTS, groups, strict=True):
            likeliest = setup.logits([*prompt, *completion.tokens])[len(prompt) - 1 : -1].argmax(-1)
            assert completion.tokens == tuple(likeliest.tolist())

    @pytest.mark.parametrize("cut", [{"temperature": 1.3, "top_k": 4}, {"top_p": 0.6}], ids=str)
    def test_logprobs_of_a_cut_distribution_are_those_of_the_tokens_kept(self, setup, cut):
        groups = setup.engine.generate(PROMPTS, Sampling(2, max_tokens=6, **cut), seed=1)
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for completion in group:
                logits = setup.logits([*prompt, *completion.tokens])[len(prompt) - 1 : -1] / cut.get("temperature", 1.0)
                values, order = logits.softmax(-1).sort(descending=True)
                more_likely = torch.zeros_like(logits).scatter(1, order, values.cumsum(-1) - values)
                is_out = logits < logits.topk(4).values[:, -1:] if "top_k" in cut else more_likely >= 0.6
                logprobs = logits.masked_fill(is_out, -torch.inf).log_softmax(-1)
                expected = logprobs.gather(1, torch.tensor([completion.tokens]).T)[:, 0]
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **TOLERANCE)

    def test_a_completion_ends_at_its_first_end_token_or_at_max_tokens(self, setup):
        [group] = setup.engine.generate(PROMPTS[:1], Sampling(200, max_tokens=8, temperature=1.5), seed=4)
        assert {completion.tokens[-1] for completion in group if completion.finished} == END_TOKENS
        assert {completion.finished for completion in group} == {True, False}
        for completion in group:
            assert not END_TOKENS & set(completion.tokens[:-1])
            assert completion.finished == (completion.tokens[-1] in END_TOKENS)
            assert len(completion.tokens) == 8 or completion.finished
            assert len(completion.logprobs) == len(completion.tokens)

    def test_a_stop_string_ends_a_completion_as_an_end_token_does(self, setup):
        """The tokenizer writes token 8 as "w8" and so on. The first stop string is the text of one token, the second
        that of two tokens."""
        plain = Sampling(30, max_tokens=12, temperature=1.5)
        [whole] = setup.engine.generate(PROMPTS[1:2], plain, seed=4)
        pairs = Counter(pair for completion in whole for pair in itertools.pairwise(completion.tokens))
        first, second = next(
            p for p, _ in pairs.most_common() if not END_TOKENS & {*p} and all(token > 9 for token in p)
        )
        stop = ("w11", f"w{first}w{second}")
        [group] = setup.engine.generate(PROMPTS[1:2], replace(plain, stop=stop), seed=4)
        num_stopped = 0
        for completion, unstopped in zip(group, whole, strict=True):
            text = ["".join(f"w{t}" for t in unstopped.tokens[:n]) for n in range(1, len(unstopped.tokens) + 1)]
            found = next((n for n, each in enumerate(text, 1) if any(string in each for string in stop)), None)
            length = len(unstopped.tokens) if found is None else found
            assert completion.tokens == unstopped.tokens[:length]
            assert completion.logprobs == pytest.approx(unstopped.logprobs[:length], abs=1e-4)
            assert completion.finished == (unstopped.finished or found is not None)
            num_stopped += found is not None
        assert num_stopped > 2
        assert setup.engine.generate(PROMPTS[1:2], plain, seed=4) == [whole]

    def test_a_completion_may_fill_the_context_to_the_last_token(self, setup):
        prompts = some_prompts(MAX_MODEL_LEN - 3)
        [group] = setup.engine.generate(prompts, Sampling(20, max_tokens=3), seed=1)
        assert max(len(completion.tokens) for completion in group) == 3
        assert_logprobs_are_the_policys(setup, prompts, [group])

    def test_batches_beyond_every_limit_of_the_engine_change_nothing(self, setup):
        prompts = some_prompts(*[62, 63] * 8)  # vLLM has room for these prompts, but not for a third block of each
        groups = setup.engine.generate(prompts, Sampling(1, max_tokens=40), seed=1)
        assert_logprobs_are_the_policys(setup, prompts, groups)
        assert setup.engine.generate(prompts, Sampling(1, max_tokens=40), seed=1) == groups

    def test_no_prompts_give_no_completions(self, setup):
        assert setup.engine.generate([], SAMPLING, seed=1) == []
        assert setup.engine.score([]) == []


class TestScore:
    def test_every_token_but_the_first_is_scored_at_temperature_1(self, setup):
        sequences = [*PROMPTS, *LONG, *some_prompts(MAX_MODEL_LEN)]
        scores = setup.engine.score(sequences)
        assert [len(score) for score in scores] == [len(sequence) - 1 for sequence in sequences]
        for sequence, score in zip(sequences[1:], scores[1:], strict=True):
            torch.testing.assert_close(torch.tensor(score), setup.logprobs(sequence[:1], sequence[1:]), **TOLERANCE)

    def test_a_cached_prefix_changes_nothing(self, setup):
        before = setup.engine.score(LONG)
        setup.engine.generate([LONG[0][:70]], SAMPLING, seed=1)
        assert setup.engine.score(LONG) == before

    def test_without_adapter_the_base_scores(self, setup):
        [score] = setup.engine.score(LONG, adapter=False)
        own = setup.logprobs(LONG[0][:1], LONG[0][1:], adapter=False)
        torch.testing.assert_close(torch.tensor(score), own, **TOLERANCE)


class TestAdapter:
    def test_loading_twice_is_loading_once(self, setup):
        once = setup.engine.generate(PROMPTS, SAMPLING, seed=1)
        fingerprint = setup.engine.fingerprint()
        setup.engine.load_adapter(setup.adapter)
        assert setup.engine.generate(PROMPTS, SAMPLING, seed=1) == once
        assert setup.engine.fingerprint() == fingerprint

    def test_a_new_adapter_is_used_from_the_first_token_of_a_long_prompt_on(self, setup):
        old = setup.engine.generate(LONG, SAMPLING, seed=1)
        setup.engine.load_adapter(setup.other_adapter)
        new = setup.engine.generate(LONG, SAMPLING, seed=1)
        assert new != old
        setup.policy.load_adapter_state(setup.other_adapter)
        assert_logprobs_are_the_policys(setup, LONG, new)

    def test_what_was_loaded_is_sampled_from_even_when_the_trainer_moves_on(self, setup):
        before = setup.engine.generate(PROMPTS, SAMPLING, seed=1)
        fingerprint = setup.engine.fingerprint()
        setup.policy.load_adapter_state(setup.other_adapter)
        assert setup.engine.generate(PROMPTS, SAMPLING, seed=1) == before
        assert setup.engine.fingerprint() == fingerprint
        for name, tensor in setup.policy.adapter_state().items():
            assert torch.equal(tensor, setup.other_adapter[name]), name

    def test_without_adapter_the_base_samples(self, setup):
        groups = setup.engine.generate(PROMPTS, SAMPLING, seed=1, adapter=False)
        assert_logprobs_are_the_policys(setup, PROMPTS, groups, adapter=False)

    def test_a_call_without_adapter_leaves_the_next_one_as_it_was(self, setup):
        before = setup.engine.generate(PROMPTS, SAMPLING, seed=1)
        setup.engine.generate(PROMPTS, SAMPLING, seed=1, adapter=False)
        assert setup.engine.generate(PROMPTS, SAMPLING, seed=1) == before
        assert setup.engine.fingerprint() == setup.expected_fingerprint()

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
    def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(self, setup, fault):
        name = next(name for name in setup.other_adapter if name.endswith("layers.1.mlp.up_proj.lora_A.weight"))
        adapter = dict(setup.other_adapter)
        tensor = adapter.pop(name)
        if fault == "shape":
            adapter[name] = tensor[:, :-1]
        elif fault == "unknown":
            adapter |= {name: tensor, name.replace("layers.1", "layers.2"): tensor}
        with pytest.raises(ValueError, match=r"layers\.[12]\.mlp\.up_proj\.lora_A"):
            setup.engine.load_adapter(adapter)
        assert setup.engine.fingerprint() == setup.expected_fingerprint()


class TestNoise:
    def test_noise_is_that_of_the_trainers_norms_and_covers_two_norms_a_layer(self, setup):
        clean = setup.engine.generate(LONG, SAMPLING, seed=1)
        assert setup.engine.set_norm_noise(NormNoise(0.1, 5)) == 2 * NUM_LAYERS
        noisy = setup.engine.generate(LONG, SAMPLING, seed=1)
        assert noisy != clean
        with setup.noisy_policy(0.1, seed=5):
            assert_logprobs_are_the_policys(setup, LONG, noisy)

    def test_noise_comes_off_bit_for_bit(self, setup):
        clean = setup.engine.generate(PROMPTS, SAMPLING, seed=1)
        setup.engine.set_norm_noise(NormNoise(0.1, 5))
        setup.engine.generate(PROMPTS, SAMPLING, seed=1)
        assert setup.engine.set_norm_noise(NormNoise()) == 0
        assert setup.engine.generate(PROMPTS, SAMPLING, seed=1) == clean
        assert setup.engine.fingerprint() == setup.expected_fingerprint()

    def test_noise_never_accumulates(self, setup):
        for seed in (4, 5):
            setup.engine.set_norm_noise(NormNoise(0.1, seed))
        norms = noisy_norms(setup.norms, NormNoise(0.1, 5))
        assert setup.engine.fingerprint() == setup.expected_fingerprint(norms=norms)

    def test_noise_stays_on_when_an_adapter_is_loaded(self, setup):
        setup.engine.set_norm_noise(NormNoise(0.1, 5))
        setup.engine.load_adapter(setup.other_adapter)
        setup.policy.load_adapter_state(setup.other_adapter)
        norms = noisy_norms(setup.policy.norm_weights(), NormNoise(0.1, 5))
        assert setup.engine.fingerprint() == setup.expected_fingerprint(setup.other_adapter, norms)
        with setup.noisy_policy(0.1, seed=5):
            assert_logprobs_are_the_policys(setup, LONG, setup.engine.generate(LONG, SAMPLING, seed=1))

    def test_the_trainers_norms_stay_clean(self, setup):
        setup.engine.set_norm_noise(NormNoise(0.1, 5))
        setup.engine.generate(PROMPTS, SAMPLING, seed=1)
        for name, weight in setup.policy.norm_weights().items():
            assert torch.equal(weight, setup.norms[name]), name

    def test_a_negative_sigma_is_refused_and_changes_nothing(self, setup):
        setup.engine.set_norm_noise(NormNoise(0.1, 5))
        fingerprint = setup.engine.fingerprint()
        with pytest.raises(ValueError, match=r"-0\.1"):
            setup.engine.set_norm_noise(NormNoise(-0.1, 5))
        setup.engine.load_adapter(setup.adapter)
        assert setup.engine.fingerprint() == fingerprint


class TestFingerprint:
    def test_it_is_the_expected_one_and_a_change_of_any_tensor_shows_there_alone(self, setup):
        expected = setup.expected_fingerprint()
        assert setup.engine.fingerprint() == expected
        for name in setup.adapter:
            setup.engine.load_adapter({**setup.adapter, name: setup.adapter[name] + 1e-3})
            found = setup.engine.fingerprint()
            [changed] = [key for key in expected if found[key] != expected[key]]
            assert name.endswith(changed)  # a trained norm goes by the model's name for it


class TestBadInput:
    @pytest.mark.parametrize(
        ("prompts", "max_tokens", "message"),
        [
            ([*PROMPTS, []], 4, "prompt 3 is empty"),
            ([*PROMPTS, [8, VOCAB_SIZE]], 4, f"prompt 3 holds token {VOCAB_SIZE}"),
            ([[8, -1], *PROMPTS], 4, "prompt 0 holds token -1"),
            ([*PROMPTS, *some_prompts(MAX_MODEL_LEN - 3)], 4, f"prompt 3 has {MAX_MODEL_LEN - 3} tokens"),
            (some_prompts(MAX_MODEL_LEN + 50), 4, f"prompt 0 has {MAX_MODEL_LEN + 50} tokens"),
        ],
        ids=["empty", "unknown token", "negative token", "no room for max_tokens", "too long"],
    )
    def test_a_bad_prompt_is_named_and_the_next_call_works(self, setup, prompts, max_tokens, message):
        before = setup.engine.generate(PROMPTS, SAMPLING, seed=1)
        with pytest.raises(ValueError, match=message):
            setup.engine.generate(prompts, Sampling(2, max_tokens=max_tokens), seed=1)
        assert setup.engine.generate(PROMPTS, SAMPLING, seed=1) == before

    @pytest.mark.parametrize("sequence", [[], [8, VOCAB_SIZE], some_prompts(MAX_MODEL_LEN + 1)[0]])
    def test_a_sequence_that_cannot_be_scored_is_refused(self, setup, sequence):
        with pytest.raises(ValueError, match="prompt 1 "):
            setup.engine.score([PROMPTS[1], sequence])
