"""Collect the settings that decide a run's GPU memory, both for a run that starts and for the command ``plan``."""

import torch

from qerl_pl.memory.settings import RunMemory, TeacherMemory, state_bytes
from qerl_pl.model.family import with_merged
from qerl_pl.policy.elementwise import FusedSetting, fused_wanted
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.recompute import Setting
from qerl_pl.rollout.base import RolloutEngine, Sampling


def run_memory(
    *,
    num_prompts: int,
    sampling: Sampling,
    evaluation: Sampling,
    max_prompt_tokens: int,
    dtype: torch.dtype,
    lora: LoraSettings,
    optimizer: str,
    micro_batch_tokens: int | None,
    gradient_checkpointing: Setting,
    fused_elementwise: FusedSetting,
    engine: RolloutEngine,
    router_replay: str,
    num_ranks: int = 1,
    teacher: TeacherMemory | None = None,
) -> RunMemory:
    """Return the settings that decide how much memory a run needs on each of its GPUs.

    Arguments with the names of settings in ``settings.model.ModuleSettings`` have their values, except that
    ``optimizer`` is the name of the optimizer's class, ``teacher`` describes the teacher's memory, and ``engine`` is
    the rollout engine, which need not have started. ``num_prompts`` is the number of prompts per rollout, or per batch
    of an evaluation, over all ``num_ranks`` ranks; ``evaluation`` has the sampling settings of evaluations.
    """
    rank, _, targets, _ = lora.filled_in()
    return RunMemory(
        rows=-(-num_prompts // num_ranks) * sampling.num_completions,
        prompt_tokens=max_prompt_tokens,
        completion_tokens=sampling.max_tokens,
        evaluation_tokens=evaluation.max_tokens,
        itemsize=dtype.itemsize,
        rank=rank,
        targets=with_merged(targets),
        expert_rank=lora.expert_rank,
        dropout=lora.dropout > 0,
        train_norms=lora.train_norms,
        state_bytes=state_bytes(optimizer),
        micro_batch_tokens=micro_batch_tokens,
        gradient_checkpointing=gradient_checkpointing,
        fused=fused_wanted(fused_elementwise),
        engine=engine.memory,
        batch_tokens=0 if engine.memory else engine.batch_tokens,
        teacher=teacher,
        router_replay=router_replay != "off" and engine.returns_routes,
    )
