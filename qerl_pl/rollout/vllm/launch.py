"""Create ``vllm.LLM`` for a policy. If vLLM does not start, the changes made to the process, such as environment
variables and process groups, are undone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import distributed as dist

from qerl_pl import native
from qerl_pl.common.files import traceback_file
from qerl_pl.common.isolation import any_algorithm, preserved_rng, preserved_torch_settings
from qerl_pl.common.metrics import Stopwatch
from qerl_pl.memory.settings import EngineMemory
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.vllm import memory, patches, plugin, setup
from qerl_pl.rollout.vllm.arguments import llm_arguments, recurrent_arguments

if TYPE_CHECKING:
    from vllm import LLM

    from qerl_pl.rollout.vllm.routes import RouteRecorder


class Launched(NamedTuple):
    """A running ``vllm.LLM``, with its platform and the owner of its process group."""

    llm: LLM
    on_cpu: bool
    owns_group: bool  # whether vLLM created torch's default process group, because the trainer had none
    recorder: RouteRecorder | None  # of the experts that the model chooses, if training replays them


def launch(
    policy: Policy,
    sizes: EngineMemory,
    settings: Mapping[str, Any],
    *,
    dtype: Literal["auto", "float32", "bfloat16"],
    max_model_len: int,
    decoding_kernel: Literal["auto", "native", "humming"],
    watch: Stopwatch,
) -> Launched:
    """Start ``vllm.LLM`` with the policy's base model. ``settings`` are arguments that the user set; they override
    those that follow from the policy and from ``sizes`` (``llm_arguments``). ``watch`` measures the seconds of
    importing vLLM ("imports") and of starting it ("vLLM"). Raises ValueError if vLLM does not start, or if
    ``decoding_kernel`` is "native" and this project's CUDA kernels cannot run."""
    # vLLM uses deprecated names of torch. The warnings are hidden, because users can do nothing about them.
    quietly = warnings.catch_warnings(action="ignore", category=FutureWarning)
    with preserved_rng(), preserved_torch_settings(), any_algorithm(), quietly:
        with watch.phase("imports"):
            from vllm import LLM, distributed
            from vllm.platforms import current_platform

            from qerl_pl.rollout.vllm import base_weights, loader, routes

        plugin.register()
        setup.inspect_here(policy.config.architectures or ())
        compute = policy.dtype if dtype == "auto" else getattr(torch, dtype)
        kernel = setup.decoding_kernel(decoding_kernel, policy.packed_format, compute)
        setup.check_kernel(kernel, policy.packed_format, compute)
        faster, on_cpu = native.for_vllm() if kernel == "native" else None, current_platform.is_cpu()
        recorder = routes.RouteRecorder(policy.routing) if policy.replays_routes and policy.routing else None
        arguments = llm_arguments(
            policy,
            sizes,
            dtype=compute,
            max_model_len=max_model_len,
            kernel=kernel,
            hooks=faster and faster.loader_hooks(),
            recorder=recorder,
            on_cpu=on_cpu,
        )
        if on_cpu:
            setup.check_head_dims(policy.config)
        else:
            setup.prepare_gpu(policy, compute, kernel)
        owns_group = not dist.is_initialized()
        try:
            uncounted, apart = memory.ignoring_what_is_left(), patches.decoder_classes_apart()
            linears = faster.loading(policy) if faster else nullcontext()
            with uncounted, linears, apart, setup.among_ranks() as ranks, watch.phase("vLLM"):
                llm = LLM(**{**arguments, **ranks, **settings, **recurrent_arguments(policy.config)})
            llm.collective_rpc(base_weights.log_copies, args=(policy.packed_linears(),))
            return Launched(llm, on_cpu, owns_group, recorder)
        except BaseException as error:
            with setup.trainers_group(engines_own=owns_group):
                # so that the next start does not find the groups of this start
                distributed.destroy_model_parallel()
                distributed.destroy_distributed_environment()
            if isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError):
                raise refusal(error) from error
            raise
        finally:
            loader.forget()


def refusal(error: Exception) -> ValueError:
    """Return a ValueError of one line for an error with which vLLM failed to start. The traceback is written to a file,
    which the message names."""
    text = " ".join(str(error).split())[:500]
    return ValueError(
        f"vLLM does not start with this model and these settings: {type(error).__name__}: {text} (traceback: "
        f"{traceback_file(error)})"
    )
