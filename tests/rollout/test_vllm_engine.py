"""Mistakes that only the vLLM engine could make."""

import inspect
import os
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qerl_pl.common.phases import Phase
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.rollout.base import Sampling, expected_fingerprint
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.rollout.vllm import plugin as vllm_plugin
from qerl_pl.rollout.vllm import setup as vllm_setup
from qerl_pl.rollout.vllm import worker as vllm_worker
from qerl_pl.rollout.vllm.arguments import accepted_rank
from tests.rollout.conftest import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Setup,
    make_engine,
    make_policy,
    out_of_memory,
    random_adapter,
    save_dense,
    some_prompts,
    started_engine,
)

PROMPTS = some_prompts(1, 40, 70)
SAMPLING = Sampling(num_completions=2, max_tokens=6)


@pytest.fixture(scope="module")
def started(checkpoints):
    with started_engine(make_policy(checkpoints["dense"])) as setup:
        yield setup.engine


@torch.no_grad()
def own_scores(policy, tokens):
    """Compute the log-probabilities of a row's tokens after the first, [S - 1] nats, by the forward pass of the
    trainer's policy."""
    row = torch.tensor([tokens])
    return policy.model(input_ids=row).logits[0, :-1].float().log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]


@pytest.mark.vllm
def test_finished_completions_are_counted_while_others_are_sampled(started, monkeypatch):
    counted = []
    monkeypatch.setattr(Phase, "update", lambda self, units=1: counted.append((self.what, self.total, units)))
    started.generate(PROMPTS, SAMPLING, seed=1)
    assert counted == [("sampling", 6, 1)] * 6


@pytest.mark.vllm
def test_the_trainers_deterministic_mode_is_not_vllms(started):
    torch.use_deterministic_algorithms(True)
    try:
        assert not started._call(lambda worker: torch.are_deterministic_algorithms_enabled())
        assert started.generate(PROMPTS, SAMPLING, seed=1)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.vllm
@pytest.mark.timeout(60)
def test_a_call_that_fails_inside_vllm_does_not_hang_the_next_one(started):
    expected = started.generate(PROMPTS, SAMPLING, seed=1)
    adapter = started._policy.adapter_state()
    started._call(lambda worker: vllm_worker._manager(worker).remove_adapter(vllm_worker.ADAPTER_ID))
    with pytest.raises(Exception, match="in memory"):  # vLLM now looks for the adapter in a folder
        started.generate(PROMPTS, SAMPLING, seed=1)
    started._call(vllm_worker.reserve_adapter, started._lora_request)
    started.load_adapter(adapter)
    assert started.generate(PROMPTS, SAMPLING, seed=1) == expected


@pytest.mark.vllm
@pytest.mark.timeout(60)
def test_a_call_that_is_interrupted_does_not_hang_the_next_one(started):
    expected = started.generate(PROMPTS, SAMPLING, seed=1)
    calls = []

    def interrupt_the_third_time(*_):
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = started._call(lambda worker: worker.get_model().model.norm.register_forward_hook(interrupt_the_third_time))
    with pytest.raises(KeyboardInterrupt):
        started.generate(PROMPTS, SAMPLING, seed=1)
    hook.remove()
    assert started.generate(PROMPTS, SAMPLING, seed=1) == expected


@pytest.mark.vllm
def test_embeddings_and_head_exist_once(started):
    parameters = started._call(lambda worker: dict(worker.get_model().named_parameters()))
    shared = started._policy.embedding_weights()
    assert set(shared) == {"model.embed_tokens.weight", "lm_head.weight"}
    for name, weight in shared.items():
        assert parameters[name].data_ptr() == weight.data_ptr()


@pytest.mark.vllm
def test_what_computes_each_fused_linear_is_known(started):
    fused = 4 * started._policy.config.num_hidden_layers  # q/k/v, o, gate/up, down
    assert started._call(vllm_worker.linear_kernels) == {"UnquantizedLinearMethod": fused}


@pytest.mark.vllm
def test_rows_without_adapter_in_a_mixed_batch_do_not_get_it(started):
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    greedy = Sampling(1, max_tokens=6, temperature=0)
    apart = [started.generate(PROMPTS, greedy, seed=1, adapter=adapter) for adapter in (True, False)]
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS] * 2
    lora = [started._lora_request] * len(PROMPTS) + [None] * len(PROMPTS)
    params = SamplingParams(max_tokens=6, temperature=0, stop_token_ids=started._end_tokens, detokenize=False)
    with torch.compiler.set_stance("force_eager"):
        mixed = started._llm.generate(inputs, params, use_tqdm=False, lora_request=lora)
    assert [tuple(row.outputs[0].token_ids) for row in mixed] == [g.tokens for group in apart for [g] in group]


@pytest.mark.vllm
@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_that_vllm_would_change_is_refused(started, temperature):
    with pytest.raises(ValueError, match=rf"temperature.* is {temperature}"):
        started.generate(PROMPTS, Sampling(2, max_tokens=4, temperature=temperature), seed=1)


@pytest.mark.vllm
def test_a_noisy_norm_that_is_put_back_by_hand_is_seen(started):
    assert started.set_norm_noise(NormNoise(0.1, 1)) == 4
    fingerprint = started.fingerprint()
    name = "model.layers.1.input_layernorm.weight"
    started._call(lambda worker: vllm_worker.live_norms(worker)[name].copy_(started._clean_norms[name]))
    changed = started.fingerprint()
    assert [key for key in changed if changed[key] != fingerprint[key]] == [name]
    started.set_norm_noise(NormNoise())


@pytest.mark.vllm
def test_bf16_with_some_targets_and_fp32_norms_holds_what_the_trainer_expects(checkpoints):
    lora = LoraSettings(rank=3, alpha=7, targets=("q_proj", "down_proj"), train_norms=True)
    policy = load_policy(checkpoints["nvfp4"], dtype=torch.bfloat16, lora=lora, seed=0)
    with started_engine(policy) as setup:
        engine, adapter = setup.engine, setup.adapter
        expected = {"scaling": policy.lora_scaling, "dtype": torch.bfloat16}
        assert engine.fingerprint() == expected_fingerprint(adapter, policy.norm_weights(), **expected)
        assert isinstance(engine, VLLMEngine)
        held = engine._call(vllm_worker.read_adapter, 3, 0)
        for name in [name for name in adapter if ".lora_B" in name]:
            assert torch.equal(held[name], (adapter[name] * (7 / 3)).bfloat16()), f"{name} is rounded twice"
        engine.set_norm_noise(NormNoise(0.05, 3))
        noisy = noisy_norms(policy.norm_weights(), NormNoise(0.05, 3))
        assert engine.fingerprint() == expected_fingerprint(adapter, noisy, **expected)
        engine.set_norm_noise(NormNoise(5e-4, 3))
        for name, weight in noisy_norms(policy.norm_weights(), NormNoise(5e-4, 3)).items():
            held = engine._call(vllm_worker.live_norms)[name]
            assert torch.equal(held, weight), "bf16 would swallow nearly all of such noise"
        assert engine.set_norm_noise(NormNoise(0.05, 3, rounded=True)) == 4
        rounded = {name: weight.bfloat16() for name, weight in noisy.items()}
        assert engine.fingerprint() == expected_fingerprint(adapter, rounded, **expected)
        engine.set_norm_noise(NormNoise())
        x, residual = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
        norm = engine._call(lambda worker: worker.get_model().get_submodule("model.layers.1.input_layernorm"))
        own = policy.norm_modules()["model.layers.1.input_layernorm.weight"]
        with torch.no_grad():
            assert torch.equal(norm(x.clone()), own(x)), "vLLM's norm is that of the trainer, bit for bit"
            for found, wanted in zip(norm(x.clone(), residual.clone()), (own(x + residual), x + residual), strict=True):
                assert torch.equal(found, wanted)
        logits = engine._call(lambda worker: worker.get_model().compute_logits(x))
        head = policy.causal_lm.get_output_embeddings().weight
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, x.float() @ head.float().T, rtol=1e-5, atol=1e-5)
        [score] = engine.score(PROMPTS[-1:])
        assert (torch.tensor(score) - own_scores(policy, PROMPTS[-1])).abs().mean() < 0.05  # two bf16 implementations


def test_a_base_whose_fused_linears_have_scales_of_their_own_is_refused_on_a_gpu(checkpoints):
    vllm_setup.check_fused_scales(checkpoints["dense"])
    vllm_setup.check_fused_scales(checkpoints["nvfp4"])
    with pytest.raises(ValueError, match=r"_proj.*qerl_pl quantize"):
        vllm_setup.check_fused_scales(checkpoints["separate"])


@pytest.mark.vllm
def test_heads_that_vllm_does_not_compute_on_a_cpu_are_refused_at_the_start(tmp_path):
    save_dense(tmp_path, head_dim=24)
    engine = VLLMEngine(block_size=BLOCK_SIZE)
    with pytest.raises(ValueError, match=r"^the base has attention heads of dimension 24,.* expected one of 32, 64, "):
        engine.start(make_policy(str(tmp_path)), max_model_len=MAX_MODEL_LEN)


@pytest.mark.vllm
def test_starts_that_fail_before_or_after_vllm_runs_are_none_and_do_not_spoil_the_next(checkpoints, monkeypatch):
    policy, group = make_policy(checkpoints["dense"]), dist.is_initialized()
    adapter = random_adapter(policy, seed=1)
    policy.load_adapter_state(adapter)
    too_small = VLLMEngine(block_size=BLOCK_SIZE, kv_cache_bytes=1024)
    with pytest.raises(ValueError, match=r"(?i)^[^\n]*cache[^\n]*qerl-\w+\.log") as refused:
        too_small.start(policy, max_model_len=MAX_MODEL_LEN)
    assert "\n" not in str(refused.value)
    with pytest.raises(RuntimeError, match="not running"):
        too_small.generate(PROMPTS, SAMPLING, seed=1)
    assert dist.is_initialized() == group
    engine = make_engine("vllm")
    with monkeypatch.context() as patch:
        patch.setattr(vllm_worker, "write_adapter", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.start(policy, max_model_len=MAX_MODEL_LEN)
    with pytest.raises(RuntimeError, match="not running"):
        engine.fingerprint()
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    setup = Setup(engine, policy, adapter, adapter, policy.norm_weights())
    assert engine.fingerprint() == setup.expected_fingerprint()
    assert len(engine.generate(PROMPTS, SAMPLING, seed=1)) == len(PROMPTS)
    engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize(("rank", "accepted"), [(1, 1), (2, 8), (32, 32), (33, 64), (512, 512)])
def test_ranks_are_rounded_up_to_what_vllm_takes(rank, accepted):
    assert accepted_rank(rank) == accepted


@pytest.mark.vllm
def test_a_rank_above_vllms_largest_is_refused():
    with pytest.raises(ValueError, match=r"model\.lora\.rank is 513"):
        accepted_rank(513)


def test_the_plugin_is_declared_to_vllm():
    [entry] = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "qerl_pl"]
    assert entry.load() is vllm_plugin.register


def test_a_worker_process_is_refused_and_other_settings_of_the_user_stay(monkeypatch):
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "DEBUG"})
    vllm_setup.prepare_environment()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING is '1'"):
        vllm_setup.prepare_environment()


@pytest.mark.vllm
@pytest.mark.parametrize("chosen", [True, False])
def test_engines_of_all_configurations_share_triton_kernels(monkeypatch, tmp_path, chosen):
    from triton import knobs
    from vllm.compilation.compiler_interface import InductorAdaptor

    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop("TRITON_CACHE_DIR", None)
    shared = knobs.cache.dir
    if chosen:
        shared = os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "users")
    vllm_setup.prepare_environment()
    takes = inspect.signature(InductorAdaptor).parameters  # vLLM 0.33 has an argument here that 0.32 lacks
    options: Any = {"use_aot_compile": True} if "use_aot_compile" in takes else {}
    InductorAdaptor(**options).initialize_cache(str(tmp_path / "configuration"))
    assert os.environ["TRITON_CACHE_DIR"] == shared


@pytest.mark.parametrize("bad", [{"max_num_seqs": 0}])
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        VLLMEngine(**bad)
