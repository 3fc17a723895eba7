"""On Hopper, equal calls of the vLLM engine give equal tokens and log-probabilities, bit for bit, in the same process
and in another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qerl_pl.hopper import driver
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    assert_sampled_by_its_policy,
    make_policy,
    random_adapter,
    some_prompts,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.xdist_group("equal_bits"),  # one process has the engine
    pytest.mark.skipif(not driver.is_available(torch.device("cuda", 0)), reason="needs Hopper"),
]
SEQUENCES = [1, 8, 64, 250]


def start(base: Path, *, prefix_caching: bool) -> VLLMEngine:
    policy = make_policy(str(base), dtype=torch.bfloat16).cuda()
    policy.load_adapter_state(random_adapter(policy, seed=1))
    engine = VLLMEngine(kv_cache_bytes=2**30, enable_prefix_caching=prefix_caching)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    return engine


@pytest.fixture(scope="module", params=[True, False], ids=["prefixes", "no prefixes"])
def engine(unpadded, request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    engine = start(unpadded, prefix_caching=request.param)
    yield engine
    engine.close()


def samples(engine: VLLMEngine, count: int) -> list:
    """Sample completions of ``count`` prompts of 40 tokens, with log-probabilities."""
    return engine.generate(some_prompts(*[40] * count), Sampling(num_completions=1, max_tokens=12), 5)


def test_prompts_and_decoding_are_those_of_the_trainer(engine):
    for copies in (1, 40, 80):
        assert_sampled_by_its_policy(engine, some_prompts(1, 40, 70), Sampling(num_completions=copies, max_tokens=12))


@pytest.mark.parametrize("count", SEQUENCES)
def test_a_repeated_call_gives_equal_tokens_and_log_probabilities(engine, count):
    first = samples(engine, count)
    engine.generate(some_prompts(70, 3), Sampling(num_completions=30, max_tokens=12), 6)
    assert samples(engine, count) == first
    for level in (0, 1):
        engine.sleep_level = level
        engine.sleep()
        engine.wake()
        assert samples(engine, count) == first


HERE = """
import json
import sys
from pathlib import Path
from tests.hopper.test_equal_bits_gpu import SEQUENCES, samples, start

engine = start(Path(sys.argv[1]), prefix_caching=sys.argv[2] == "True")
found = [[[*map(list, (each.tokens, each.logprobs))] for [each] in samples(engine, count)] for count in SEQUENCES]
engine.close()
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["before", "anew"])
def test_another_process_gives_equal_bits(engine, unpadded, tmp_path, compiled):
    """The other process imitates a resumed run. With "before" it loads the kernels that the first process compiled,
    with "anew" it compiles them again."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    if compiled == "anew":
        environment |= {name: str(tmp_path / name) for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")}
    caching = engine._running().llm_engine.vllm_config.cache_config.enable_prefix_caching
    command = [sys.executable, "-c", HERE, str(unpadded), str(caching)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    other = json.loads(output.splitlines()[-1])
    for count, found in zip(SEQUENCES, other, strict=True):
        assert found == [[list(each.tokens), list(each.logprobs)] for [each] in samples(engine, count)]
