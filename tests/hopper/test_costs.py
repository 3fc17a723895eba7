"""The cost model of the Hopper kernels: the script that measures it inverts it, and its choices are known."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from qerl_pl.hopper import costs, lora_hopper, nvfp4_batch, nvfp4_decode
from tests.bench import bench_constants
from tests.bench.harness import RANK
from tests.random_models import FUSED, fused_shape

CHOICES = "a0684cb70ed348cb"
"""Digest of the schedules below. If it changes, engines run other schedules: measure them with bench_decode
and bench_batch."""


def test_predicted_times_give_the_constants_back():
    def gemm_s(
        schedule: nvfp4_batch.Schedule, num_tokens: int, outputs: int, inputs: int, *, fuses_lora: bool = False
    ) -> float:
        adapter = 2e-6 + costs.ADAPTER_S.get(schedule.variant, 0.0) if fuses_lora else 0.0
        return nvfp4_batch.seconds(schedule, num_tokens, outputs, inputs) + adapter

    def shrink_s(slices: int, inputs: int) -> float:
        constant, per_input = costs.SHRINK_TILE_S[slices]
        return constant + per_input * inputs

    found = [*bench_constants.gemm_constants(gemm_s), *bench_constants.shrink_constants(shrink_s)]
    assert len(found) == 4 + 7 + 6
    for name, today, measured in found:
        assert measured == pytest.approx(today), name


def test_the_schedules_of_qwen_models_change_only_on_purpose():
    found = []
    for size in ("3B", "7B", "14B", "32B"):
        for name in FUSED:
            widths, inputs = fused_shape(size, name)
            a = [torch.empty(RANK, inputs, dtype=torch.bfloat16, device="meta") for _ in widths]
            b = [torch.empty(width, RANK, dtype=torch.bfloat16, device="meta") for width in widths]
            for tokens in (1, 8, 16, 32, 33, *nvfp4_batch.FULL_TILES[:9], nvfp4_batch.MOST_TOKENS):
                shape = tokens, sum(widths), inputs
                found.append((nvfp4_decode.choose_schedule(*shape), nvfp4_batch.choose_schedule(*shape)))
                fused = nvfp4_batch.choose_schedule(*shape, fuses_lora=True)
                spare = fused and nvfp4_batch.spare_sms(fused, *shape)
                found.append((fused, spare and lora_hopper.choose_schedule(tokens, a, b, spare)))
    plain = json.dumps(found)  # named tuples become lists
    assert hashlib.sha256(plain.encode()).hexdigest()[:16] == CHOICES


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_nothing_is_printed(capsys):
    bench_constants.main(["--repeats", "1"])
    assert not capsys.readouterr().out
