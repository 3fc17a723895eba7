"""The arms of bench_real_runs differ in the base and the noise alone."""

import pytest
import yaml

from tests.bench.bench_real_runs import ARMS, left_open
from tests.integration.conftest import ROOT


@pytest.mark.parametrize("task", ["gsm8k_verl", "gsm8k_boxed"])
def test_arms_change_the_base_and_the_noise_and_nothing_that_the_task_sets(task):
    settings_of_task = yaml.safe_load((ROOT / "configs" / "tasks" / f"{task}.yaml").read_text())
    arms = {arm: yaml.safe_load((ROOT / "configs" / "arms" / f"{arm}.yaml").read_text()) for arm in ARMS}
    assert "optimizer" in arms["bf16"]["model"], "else there is nothing to leave out"
    left = {arm: left_open(settings, settings_of_task) for arm, settings in arms.items()}
    assert [left[arm]["model"] for arm in ARMS] == [{"quantize": None}, {"quantize": "nvfp4"}, {"quantize": "nvfp4"}]
    assert [arm for arm in ARMS if "trainer" in left[arm]] == ["nvfp4_aqn"]
    assert left["nvfp4_aqn"]["trainer"] == arms["nvfp4_aqn"]["trainer"]
