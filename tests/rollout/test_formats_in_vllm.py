"""vLLM samples with the trainer's weights on a base that GPTQ has written, and on bases in 4-bit formats that it cannot
run, of which it gets the dequantised weights."""

import logging
import re
from pathlib import Path

import pytest
import torch

from qerl_pl.quant.calibration import Calibration
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.rollout.base import Sampling
from tests.rollout.conftest import VOCAB_SIZE, make_policy, some_prompts, started_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    ("form", "method", "dtype", "tolerance"),
    [
        pytest.param("nf4", "rtn", torch.bfloat16, 0.05, marks=pytest.mark.long),
        ("mxfp4", "rtn", torch.float32, 1e-5),
        ("nvfp4", "gptq", torch.float32, 1e-5),
    ],
    ids=str,
)
def test_vllm_samples_from_the_policy_on_a_base_of_any_format_and_method(
    checkpoints, tmp_path, caplog, form, method, dtype, tolerance
):
    base, calibration = tmp_path / form, None
    if method == "gptq":
        tokens = torch.randint(VOCAB_SIZE, (16, 64), generator=torch.Generator().manual_seed(0))
        calibration = Calibration(tokens, "random tokens")
    quantize_checkpoint(Path(checkpoints["dense"]), base, format=form, method=method, calibration=calibration)
    with caplog.at_level(logging.INFO), started_engine(make_policy(str(base), dtype=dtype)) as setup:
        assert (f"no kernels for {form} here" in caplog.text) == (form != "nvfp4")
        assert re.search(r"vLLM computes linear layers with the classes \w+ \(\d+ layers\)", caplog.text)
        assert re.search(r"vLLM started in [\d.]+ s: imports [\d.]+, vLLM [\d.]+, adapter slots [\d.]+", caplog.text)
        assert setup.engine.fingerprint() == setup.expected_fingerprint()
        prompts = some_prompts(9, 40)
        for with_adapter in (True, False):
            groups = setup.engine.generate(prompts, Sampling(2, 12), seed=0, adapter=with_adapter)
            gaps = [
                setup.logprobs(prompt, completion.tokens, adapter=with_adapter) - torch.tensor(completion.logprobs)
                for prompt, group in zip(prompts, groups, strict=True)
                for completion in group
            ]
            assert torch.cat(gaps).abs().mean() < tolerance
