"""vLLM reads what the quantiser wrote by GPTQ as the trainer does."""

from pathlib import Path

import pytest
import torch

from qerl_pl.quant.calibration import Calibration
from qerl_pl.quant.quantize import quantize_checkpoint
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Setup,
    make_engine,
    make_policy,
    random_adapter,
    some_prompts,
)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_scores_as_the_trainer_does_on_what_gptq_wrote(checkpoints, tmp_path):
    tokens = torch.randint(VOCAB_SIZE, (16, 64), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(
        Path(checkpoints["dense"]), tmp_path / "gptq", method="gptq", calibration=Calibration(tokens, "random tokens")
    )
    policy = make_policy(str(tmp_path / "gptq"))
    adapter = random_adapter(policy, seed=1)
    policy.load_adapter_state(adapter)
    engine = make_engine("vllm")
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    setup = Setup(engine, policy, adapter, adapter, policy.norm_weights())
    assert engine.fingerprint() == setup.expected_fingerprint()
    for with_adapter in (True, False):
        for row in some_prompts(9, 40):
            [scores] = engine.score([row], adapter=with_adapter)
            expected = setup.logprobs(row[:1], row[1:], adapter=with_adapter)
            torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-4)
    engine.close()
