"""Whole runs and memory: a run whose training pass runs out of memory goes on, and a run follows its memory plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from qerl_pl.results.curves import read_curves
from qerl_pl.rollout.vllm import memory as vllm_memory
from qerl_pl.settings.model import ModuleSettings
from qerl_pl.tools.plan import planned_run, read_settings, shape_of
from tests.integration.conftest import SHORT, UNCHECKED, VLLM, arguments, assert_same_run, load_last
from tests.rollout.leaks import held_in_vllms_pool


class SmallDevice(Callback):
    """Imitates a device that runs out of memory in every training pass of more than ``tokens`` tokens. With ``cache``,
    this is because the engine's KV cache has stayed allocated; larger passes fit when it is freed."""

    def __init__(self, tokens: int, cache: bool = False) -> None:
        self.tokens = tokens
        self.cache = cache
        self.is_full = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.cache:
            pl_module.engine.free_cache = self._free_cache
        pl_module.policy.causal_lm.model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _free_cache(self) -> bool:
        was_full, self.is_full = self.is_full, False
        return was_full

    def _check(self, module: Any, args: Any, kwargs: Any) -> None:
        trains = module.training and torch.is_grad_enabled()
        if self.is_full and trains and kwargs["input_ids"].numel() > self.tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.slow
def test_a_run_goes_on_with_smaller_passes_and_learns_the_same(run, short, tmp_path):
    small = ("--trainer.callbacks+=tests.integration.test_memory_of_runs.SmallDevice", "--trainer.callbacks.tokens=120")
    with pytest.warns(RuntimeWarning, match="going on with 100"):
        run("fit", tmp_path / "small", *SHORT, *UNCHECKED, *small)
    assert read_curves(short)["train/micro_batch_tokens"].values == [200] * 4
    assert read_curves(tmp_path / "small")["train/micro_batch_tokens"].values == [100] * 4, "it is remembered"
    large, small = (load_last(run_dir)["state_dict"] for run_dir in (short, tmp_path / "small"))
    assert small.keys() == large.keys()
    for name, tensor in large.items():  # not element by element: Adam makes whole steps of gradients that are rounding
        assert (small[name] - tensor).norm() <= 0.01 * tensor.norm(), name


@pytest.mark.slow
def test_a_resumed_run_keeps_the_size_of_its_passes(run, tmp_path):
    """With an open limit, the size follows from the memory at the start and from passes that ran out of it."""
    free = ("--model.micro_batch_tokens", "null", *SHORT, *UNCHECKED, "--trainer.callbacks+")
    small = ("tests.integration.test_memory_of_runs.SmallDevice", "--trainer.callbacks.tokens=120")
    with pytest.warns(RuntimeWarning, match="out of memory"):
        run("fit", tmp_path / "straight", *free, *small)
    stop = ("--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=1")
    with pytest.warns(RuntimeWarning, match="out of memory"):
        run("fit", tmp_path / "stopped", *free, *small, *stop)
    assert load_last(tmp_path / "stopped")["global_step"] == 2
    run("fit", tmp_path / "stopped", *free[:-1], "--ckpt_path", "last")  # on a device with more memory
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.slow
def test_a_resumed_run_without_memory_for_its_passes_says_that_last_bits_may_differ(run, tmp_path, monkeypatch):
    free = ("--model.micro_batch_tokens", "null", *SHORT, *UNCHECKED)
    run("fit", tmp_path, *free, "--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=2")
    monkeypatch.setattr(ModuleSettings, "first_micro_batch", 150)
    with pytest.warns(UserWarning, match="memory for 150 tokens in a pass, .* had up to 16384"):
        run("fit", tmp_path, *free, "--ckpt_path", "last")
    assert read_curves(tmp_path)["train/micro_batch_tokens"].values == [16384] * 3 + [150]


@pytest.mark.slow
def test_a_run_whose_engine_frees_its_cache_is_the_run_that_never_ran_out_of_memory(run, short, tmp_path):
    """A resumed run, whose engine again keeps its cache at first, therefore equals one that was never killed."""
    small = ("--trainer.callbacks+=tests.integration.test_memory_of_runs.SmallDevice", "--trainer.callbacks.tokens=120")
    with pytest.warns(RuntimeWarning, match="going on with the engine's KV cache freed") as said:
        run("fit", tmp_path / "run", *SHORT, *small, "--trainer.callbacks.cache=true")
    assert sum("out of memory" in str(warning.message) for warning in said) == 1
    assert_same_run(short, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("--model.engine.init_args.batch_tokens", "777", "--model.lora.rank", "2"),
        pytest.param(
            (*VLLM, "--model.engine.init_args.max_num_seqs", "5", "--model.val_sampling.max_tokens", "20"),
            marks=pytest.mark.vllm,
        ),
    ],
    ids=["transformers", "vllm"],
)
def test_the_command_plans_what_a_run_plans(more, bases, run, tmp_path):
    cli = run("fit", tmp_path, *SHORT, *UNCHECKED, *more)
    _, *settings = arguments("fit", bases["nvfp4"], tmp_path, *SHORT, *UNCHECKED, *more)
    config = read_settings(settings)
    planned = planned_run(config)
    experts = planned.rank_of_experts(shape_of(config["model"]))  # which a run that has read its base knows
    assert replace(planned, expert_rank=experts) == cli.model._run_memory("fit")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.vllm
def test_a_run_on_a_gpu_plans_its_memory_and_logs_what_came_of_it(run, tmp_path):
    choose = ("--model.micro_batch_tokens", "null", "--model.gpu_memory", "12")
    cli = run("fit", tmp_path, *SHORT, *choose, "--model.dtype", "bfloat16", *VLLM)
    plan, curves = cli.model.memory_plan, read_curves(tmp_path)
    assert plan is not None
    assert cli.model.engine._planned == plan.run.engine
    assert curves["train/micro_batch_tokens"].values[-1] == plan.micro_batch_tokens
    for phase in ("rollout", "train", "peak"):
        measured, predicted = (curves[f"memory/{name}_gib"].values[-1] for name in (phase, f"predicted_{phase}"))
        assert measured == pytest.approx(predicted, abs=1.0)
    assert not vllm_memory.left(), held_in_vllms_pool()
