"""vLLM cannot run bases in some 4-bit formats. It gets their dequantised weights, so that it samples with the same
weights as the trainer."""

import logging
import re
from pathlib import Path

import pytest
import torch

from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.rollout.base import Sampling
from tests.rollout.conftest import make_policy, some_prompts, started_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    ("form", "dtype", "tolerance"),
    [pytest.param("nf4", torch.bfloat16, 0.05, marks=pytest.mark.long), ("mxfp4", torch.float32, 1e-5)],
    ids=str,
)
def test_vllm_samples_from_the_policy_on_a_base_that_it_cannot_read(
    checkpoints, tmp_path, caplog, form, dtype, tolerance
):
    base = tmp_path / form
    quantize_checkpoint(Path(checkpoints["dense"]), base, format=form)
    with caplog.at_level(logging.INFO), started_engine(make_policy(str(base), dtype=dtype)) as setup:
        assert f"no kernels for {form} here" in caplog.text
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
