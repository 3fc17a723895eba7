"""What the performance page makes of lines by one decoding kernel or the other."""

from __future__ import annotations

from typing import Any

from tests.bench.report import README, results, with_speeds
from tests.bench.report_rollouts import Line, base_of, decoding, decoding_note, rollouts_table, steps_table
from tests.bench.report_summary import adapter_table, headline_table, memory_table, speeds_table


def rollout(base: str, rate: float, commit: str, **shape: Any) -> Line:
    """8 sequences of 7B with an adapter."""
    shape = {"model": "7B", "base": base, "rank": 32, "adapter": "ours", "engine": "ours", "kv": "auto", **shape}
    seconds = {"median_s": 1.0, "tokens_per_s": rate, "decoded_per_s": rate, "roof_per_s": 2 * rate}
    return {"name": "rollout/generate", "shape": {"sequences": 8, **shape}, "commit": commit, **seconds}


def step(base: str, seconds: float, commit: str, **shape: Any) -> Line:
    """A whole step of 7B that took as many GiB as seconds."""
    shape = {
        "model": "7B",
        "base": base,
        "aqn": False,
        "prompts": 1,
        "completion": 64,
        "steps": 3,
        "cap": None,
        **shape,
    }
    logged = {"peak_gib": seconds, "predicted_peak_gib": seconds}
    times = {"median_s": seconds, "spread_s": [seconds, seconds], "phases_s": {}, "gap": 0.1}
    finished = {"finished": shape.pop("finished", True)}
    return {"name": "grpo/step", "shape": shape, "commit": commit, "logged": logged, **times, **finished}


OLD = [rollout("bf16", 100, "a"), rollout("nvfp4", 120, "a"), step("bf16", 20, "a"), step("nvfp4", 16, "a")]
NEW = [
    rollout("bf16", 100, "b", decoding="humming"),
    rollout("nvfp4", 150, "b", decoding="ours"),
    rollout("nvfp4", 130, "b", decoding="humming"),
    step("bf16", 20, "b", decoding_kernel="humming"),
    step("nvfp4", 10, "b", decoding_kernel="ours"),
    step("nvfp4", 12, "b", decoding_kernel="humming"),
]


def test_a_line_that_names_no_kernel_was_measured_with_hummings():
    assert [decoding(line) for line in OLD] == ["", "humming", "", "humming"]
    assert [base_of(line) for line in NEW[:2]] == ["bf16", "nvfp4 (ours)"]


def test_the_summary_is_of_our_kernel_for_a_model_that_ran_with_it():
    assert "| 7B | humming | 1.20 | 1.25 |" in speeds_table(OLD)
    for lines in (OLD + NEW, NEW + OLD):
        assert "| 7B | ours | 1.50 | 2.00 |" in speeds_table(lines)
        assert "humming" not in speeds_table(lines) + memory_table(lines)
        assert "| 7B | nvfp4 (ours) + LoRA | 64 | whole | 10.0 |" in memory_table(lines)
    other = [rollout("bf16", 100, "a", model="3B"), rollout("nvfp4", 110, "a", model="3B")]
    assert "| 3B | humming | 1.10 |" in speeds_table(NEW + other), "another model has what it was measured with"


def test_what_a_run_took_is_what_was_seen_from_outside_where_somebody_looked():
    seen = {**step("nvfp4", 10, "b", cap=16), "peak_bytes": 9.5 * 2**30}
    rows = [row.split(" | ")[3:6] for row in memory_table([step("nvfp4", 12, "b"), seen]).splitlines()[2:]]
    assert rows == [["16", "9.5", "10.0"], ["whole", "12.0", "12.0"]], "smallest cards first"


def test_the_readmes_table_has_what_the_results_say():
    readme = README.read_text()
    assert with_speeds(readme, results()) == readme
    other = with_speeds(readme, [*OLD, step("nvfp4", 9, "c", cap=24), step("nvfp4", 9, "c", cap=16, finished=False)])
    assert "| 7B | 1.20 |  |  | 1.25 | 24 |" in other
    assert with_speeds(other, results()) == readme


def test_an_adapters_share_compares_one_engine_with_itself():
    without = rollout("nvfp4", 150, "b", decoding="ours", adapter="none")
    assert "| 7B | ours | 25 % |" in adapter_table([*NEW[:2], {**without, "median_s": 0.8}])
    assert "25 %" not in adapter_table(NEW)


def test_models_stand_in_the_order_of_their_sizes():
    lines = [rollout(base, 100, "a", model=model) for model in ("32B", "7B", "14B") for base in ("bf16", "nvfp4")]
    for made in (speeds_table, headline_table):
        assert [row.split(" | ")[0] for row in made(lines).splitlines()[2:]] == ["| 7B", "| 14B", "| 32B"]


def test_each_row_names_its_kernel_and_is_compared_with_bf16_of_its_commit():
    table = rollouts_table(OLD + NEW).splitlines()
    ratios = {(row.split(" | ")[5], row.split(" | ")[11]) for row in table if "nvfp4" in row}
    assert ratios == {("humming", "1.20"), ("ours", "1.50"), ("humming", "1.30")}
    assert "nvfp4 (ours) + LoRA | b | 10.0 (10.0 to 10.0) | 2.00" in steps_table(OLD + NEW)


def test_the_page_counts_the_results_of_each_kernel():
    assert "in 2 of" in decoding_note(OLD + NEW)
    assert "4 (`humming`)" in decoding_note(OLD + NEW)
