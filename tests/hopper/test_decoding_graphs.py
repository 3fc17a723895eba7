"""This project replays whole decoding steps of vLLM as CUDA graphs. They give the same bits as steps whose kernels vLLM
launches itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qerl_pl.hopper import driver
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.families import WINDOW, tiny_config
from tests.rollout.conftest import MAX_MODEL_LEN, make_policy, random_adapter, save_dense, some_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("decoding_graphs")]
PROMPTS = some_prompts(1, 40, 70)
needs_hopper = pytest.mark.skipif(not driver.is_available(torch.device("cuda", 0)), reason="needs Hopper")


@pytest.fixture(scope="module", params=["qwen2"])
def engine(unpadded, tmp_path_factory, request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    """An engine of a small Qwen2 in NVFP4. With the fixture's parameter "speculation" it samples by speculative
    decoding, with "qwen2" without; with another name of a family it has a small model of this family in bf16, without
    speculation."""
    base, speculation = unpadded, "off"
    if request.param == "speculation":
        speculation = "on"
    elif request.param != "qwen2":
        base = tmp_path_factory.mktemp(request.param)
        save_dense(base, tiny_config(request.param, head_dim=64))
    policy = make_policy(str(base), dtype=torch.bfloat16).cuda()
    policy.load_adapter_state(random_adapter(policy, seed=1))
    # The cache is too small for 160 sequences of 30 tokens.
    engine = VLLMEngine(kv_cache_bytes=6 * 2**20, max_num_seqs=160, speculation=speculation)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    yield engine
    engine.close()


def graphs(engine: VLLMEngine) -> Any:
    """Return the engine's ``DecodingGraphs``."""
    return engine._call(lambda worker: worker.model_runner.prepare_inputs.__self__)


def plain_and_by_graphs(engine: VLLMEngine, sampling: Sampling, **how: Any) -> tuple[list, list]:
    """Sample the same completions twice: by kernels that vLLM launches itself, and by replaying CUDA graphs that a call
    in between has captured. Returns both results, log-probabilities included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs(engine), "most", 0)
        plain = engine.generate(PROMPTS, sampling, 5, **how)
    captured = engine.generate(PROMPTS, sampling, 5, **how)
    assert captured == plain
    return plain, engine.generate(PROMPTS, sampling, 5, **how)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["qwen2", "speculation"], indirect=True)
@pytest.mark.parametrize("copies", [1, 2, 7, 20, 40, 80])
def test_equal_bits_with_any_number_of_sequences(engine, copies, monkeypatch):
    """Graphs are captured for a number of sequences. This number and the sequences' order change during a call, because
    completions end at different steps and the KV cache becomes full."""
    scheduler, preempted = engine._scheduler(), []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(a), preempt(*a, **k))[1])
    plain, found = plain_and_by_graphs(engine, Sampling(num_completions=copies, max_tokens=40))
    assert found == plain
    lengths = {len(each.tokens) for group in plain for each in group}
    assert copies < 7 or len(lengths) > 3
    assert copies < 80 or len(preempted) > 3


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["mistral", "gemma3_text", "olmo3"], indirect=True)
def test_equal_bits_with_sliding_windows(engine):
    """Sampling by CUDA graphs gives the same bits as without them also if attention has a sliding window: in all layers
    (Mistral), or in some layers (Gemma 3, and OLMo 3, for which vLLM runs the code of transformers)."""
    plain, found = plain_and_by_graphs(engine, Sampling(num_completions=5, max_tokens=WINDOW + 16))
    assert found == plain
    assert graphs(engine).steps


@needs_hopper
@pytest.mark.gpu
def test_steps_are_run_by_graphs(engine, monkeypatch):
    sampling = Sampling(num_completions=2, max_tokens=8)
    engine.generate(PROMPTS, sampling, 5)
    own, launched = graphs(engine), Counter()
    for name in ("prepare_inputs_plainly", "sample_plainly", "prepare_attention_plainly", "build_metadata_plainly"):
        plain = getattr(own, name)

        def count(*args: Any, name: str = name, plain: Any = plain, **more: Any) -> Any:
            launched[name] += 1
            return plain(*args, **more)

        monkeypatch.setattr(own, name, count)
    engine.generate(PROMPTS, sampling, 5)
    assert len(launched) == 4
    assert max(launched.values()) <= 2, "more than the prompts is launched by vLLM"


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["qwen2", "speculation"], indirect=True)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3}], ids=str)
def test_equal_bits_with_each_way_to_sample(engine, settings):
    """Calls with different sampling settings follow each other in one engine. A graph that was captured for other
    settings would sample differently, so it must not be used."""
    for more in ({}, settings):
        plain, found = plain_and_by_graphs(engine, Sampling(num_completions=1, max_tokens=12, **more))
        assert found == plain


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["qwen2", "speculation"], indirect=True)
def test_graphs_use_the_adapter_and_the_noise_of_the_call(engine):
    sampling, policy = Sampling(num_completions=4, max_tokens=12), engine._policy
    first = engine.generate(PROMPTS, sampling, 5)
    found = [first]
    for change in (
        lambda: engine.load_adapter(random_adapter(policy, seed=2)),
        lambda: engine.set_norm_noise(NormNoise(0.3, 3)),
    ):
        change()
        plain, by_graphs = plain_and_by_graphs(engine, sampling)
        assert by_graphs == plain
        assert plain not in found
        found.append(plain)
    plain, by_graphs = plain_and_by_graphs(engine, sampling, adapter=False)
    assert by_graphs == plain
    engine.set_norm_noise(NormNoise())
    engine.load_adapter(policy.adapter_state())
    assert engine.generate(PROMPTS, sampling, 5) == first


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["qwen2", "speculation"], indirect=True)
@pytest.mark.parametrize("level", [0, 1])
def test_graphs_stay_valid_over_sleep(engine, level):
    sampling = Sampling(num_completions=4, max_tokens=12)
    before = engine.generate(PROMPTS, sampling, 5)
    engine.sleep_level = level
    engine.sleep()
    engine.wake()
    plain, found = plain_and_by_graphs(engine, sampling)
    assert before == plain == found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"has_prefill": True}, False),
        ({"num_draft_tokens_np": np.full(3, 2), "num_tokens": 9}, True),
        ({"num_draft_tokens_np": np.array([2, 2, 1]), "num_tokens": 8}, False),
        ({"num_draft_tokens_np": np.array([2, 1, 3]), "num_tokens": 9}, False),
        ({"num_draft_tokens_np": np.full(3, 2), "num_tokens": 10}, False),
        ({"num_draft_tokens_np": np.full(3, 20), "num_tokens": 63}, True),
        ({"num_draft_tokens_np": np.full(3, 21), "num_tokens": 66}, False),
        ({"num_tokens": 4}, False),
        ({"req_ids": ["a"] * 64, "num_tokens": 64}, True),
        ({"req_ids": ["a"] * 65, "num_tokens": 65}, False),
        ({"cg_mode": "PIECEWISE"}, False),
    ],
    ids=str,
)
def test_only_steps_of_equally_many_tokens_per_sequence_are_run_by_graphs(changes, expected):
    from vllm.config.compilation import CUDAGraphMode

    from qerl_pl.hopper.decoding_graphs import is_decoding

    state = {"req_ids": ["a", "b", "c"], "num_tokens": 3, "has_prefill": False, "num_draft_tokens_np": None} | changes
    mode = CUDAGraphMode[changes.get("cg_mode", "FULL")]
    assert is_decoding(SimpleNamespace(**state), SimpleNamespace(cg_mode=mode), 64) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ([{"temperature": 1}, {"temperature": 0}], (False, (0, 0))),
        ([{"temperature": 1}, {"temperature": 0.7}], (True, (0, 0))),
        ([{"temperature": 1, "logprobs": None}] * 2, (False, None)),
        ([{"temperature": 1}, {"top_p": 0.8}], None),
        ([{"temperature": 0.7}, {"top_k": 3}], None),
        ([{"temperature": 0.7}, {"temperature": 0.7, "min_p": 0.1}], None),
        ([{"temperature": 0.7}, {"temperature": 0.7, "repetition_penalty": 1.5}], None),
        ([{"temperature": 1}, {"temperature": 0.7, "logit_bias": {3: 1.0}}], None),
    ],
    ids=str,
)
def test_only_temperatures_and_log_probabilities_are_captured(options, kind):
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from qerl_pl.hopper.decoding_graphs import kind_of_sampling

    sizes: Any = {"max_num_reqs": 3, "vocab_size": 64, "device": torch.device("cpu")}
    states = RequestState(max_model_len=8, max_num_batched_tokens=8, num_speculative_steps=0, **sizes)
    config: Any = SimpleNamespace(reasoning_config=None)
    sampler = Sampler(vllm_config=config, req_states=states, **sizes)
    rows = np.array([2, 0])
    for row, settings in [(1, {"top_k": 5, "presence_penalty": 1.0}), *zip(rows.tolist(), options, strict=True)]:
        sampler.add_request(row, SamplingParams(**{"logprobs": 0, **settings}))
    assert kind_of_sampling(sampler, rows) == kind, "row 1 is no sequence of this batch"


def test_a_table_is_copied_to_one_address_and_only_after_a_change(monkeypatch):
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    from qerl_pl.hopper import sampler

    copies, copy = [], sampler.async_tensor_h2d
    monkeypatch.setattr(sampler, "async_tensor_h2d", lambda *a, **k: (copies.append(a), copy(*a, **k))[1])
    table = UvaBackedTensor(5, torch.int32)
    first = sampler.copy_if_changed(table)
    for value, count in [(0, 1), (7, 2), (7, 2), (0, 3)]:
        table.np[3] = value
        found = sampler.copy_if_changed(table, 4)
        assert found.tolist() == [0, 0, 0, value]
        assert (found.data_ptr(), len(copies)) == (first.data_ptr(), count)
        assert table.gpu.data_ptr() == first.data_ptr()
