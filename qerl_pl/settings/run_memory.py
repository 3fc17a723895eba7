"""Collect the settings that decide a run's GPU memory, both for a run that starts and for the command ``plan``."""

import torch

from qerl_pl.memory.settings import RunMemory, TeacherMemory, state_bytes
from qerl_pl.memory.shape import ModelShape
from qerl_pl.model.family import with_merged
from qerl_pl.policy.elementwise import fused_wanted
from qerl_pl.rollout.base import RolloutEngine
from qerl_pl.settings.model import ModuleSettings


def run_memory(
    settings: ModuleSettings,
    engine: RolloutEngine,
    *,
    num_prompts: int,
    num_ranks: int = 1,
    teacher: ModelShape | None = None,
    trains: bool = True,
) -> RunMemory:
    """Return the settings that decide how much memory a run needs on each of its GPUs.

    Args:
        engine: the rollout engine, which need not have started.
        num_prompts: prompts per rollout, or per batch of an evaluation, over all ``num_ranks`` ranks.
        teacher: dimensions of the teacher; None: there is none.
        trains: False for an evaluation, which uses neither a teacher nor the sampler's choice of experts.
    """
    rank, _, targets, _ = settings.lora.filled_in()
    longest = settings.sampling.max_tokens
    sampling = settings.sampling if trains else settings.evaluation
    optimizer = type(settings.optimizer([torch.nn.Parameter(torch.zeros(1))])).__name__
    taught, by = settings.objective.teacher, settings.teacher
    return RunMemory(
        rows=-(-num_prompts // num_ranks) * sampling.num_completions,
        prompt_tokens=settings.max_prompt_tokens,
        completion_tokens=longest,
        evaluation_tokens=settings.evaluation.max_tokens,
        itemsize=settings.compute_dtype.itemsize,
        rank=rank,
        targets=with_merged(targets),
        expert_rank=settings.lora.expert_rank,
        dropout=settings.lora.dropout > 0,
        train_norms=settings.lora.train_norms,
        state_bytes=state_bytes(optimizer),
        micro_batch_tokens=settings.micro_batch_tokens,
        gradient_checkpointing=settings.gradient_checkpointing,
        fused=fused_wanted(settings.fused_elementwise),
        engine=engine.memory,
        batch_tokens=0 if engine.memory else engine.batch_tokens,
        teacher=teacher and by and taught and TeacherMemory(teacher, by.keep, taught.mixture is not None),
        router_replay=trains and settings.router_replay != "off" and engine.returns_routes,
    )
