"""QeRLModule: one training step is one RL iteration."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer

from qerl_pl.base.folder import BaseFormat, base_folder, check_base
from qerl_pl.checkpoint import check_identity, identity_of, run_identity
from qerl_pl.common import ranks
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.stopwatch import Stopwatch
from qerl_pl.common.types import Prompt
from qerl_pl.evaluation.evaluation import Evaluation
from qerl_pl.evaluation.identity import described, evaluation_identity, open_cache
from qerl_pl.memory.advice import plan_for
from qerl_pl.memory.device import available_bytes
from qerl_pl.memory.fitting import USUAL_MICRO_BATCH
from qerl_pl.memory.plan import Plan
from qerl_pl.memory.settings import RunMemory, state_bytes
from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.objective import Objective
from qerl_pl.policy.elementwise import FusedSetting, fused_wanted
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import DTYPES, Policy, load_policy
from qerl_pl.policy.recompute import Setting
from qerl_pl.quant.families import check_window
from qerl_pl.rewards.base import WeightedReward, check_answers, ready_rewards
from qerl_pl.rollout.base import RolloutEngine, Sampling
from qerl_pl.rollout.dynamic_sampling import DynamicSampling
from qerl_pl.rollout.loop import RolloutLoop
from qerl_pl.settings.model import check_counts, check_micro_batch, check_passes, check_sampling
from qerl_pl.settings.run_length import check_run_length
from qerl_pl.training.optimization import (
    Schedule,
    check_groups,
    group_settings,
    lr_scheduler,
    parameter_groups,
    restore_settings,
)
from qerl_pl.update import improve


def adamw(params: Any) -> torch.optim.Optimizer:
    """The default optimizer; the learning rate is the paper's for a quantised base (arXiv 2510.11696, table 4)."""
    return torch.optim.AdamW(params, lr=1e-5, betas=(0.9, 0.99), weight_decay=0.1)


class QeRLModule(LightningModule):
    """A LoRA policy on a frozen base, trained on rollouts of its own (GRPO and its relatives).

    Args:
        base: checkpoint folder of the base, dense or quantised.
        base_format: take the copy of the base in this format, which ``python -m qerl_pl quantize`` wrote to the folder
            BASE-FORMAT (``models/qwen2.5-7b-nvfp4``); null: the base as it is.
        engine: what samples, e.g. qerl_pl.rollout.vllm.VLLMEngine.
        rewards: what completions are worth, each with a name and a weight.
        sampling: of training rollouts.
        val_sampling: of validation; null: greedy, one completion, as long as in training.
        lora: the adapter.
        objective: the loss.
        optimizer: over the adapter's parameters; trained norms are without weight decay.
        lr_schedule: of the learning rate over trainer.max_steps.
        warmup_steps: optimizer steps of linear warm-up before it; the first has lr / warmup_steps.
        max_grad_norm: gradients are clipped to this norm; 0: not.
        updates_per_rollout: passes over each rollout; each is one optimizer step on all of it, or ``mini_batches``.
        mini_batches: optimizer steps of a pass, each on its share of the prompts (PPO's mini-batches). More than 1
            costs a forward pass before the first. trainer.max_steps counts all of them.
        micro_batch_tokens: most tokens in one forward and backward pass. null: 16384, or as many as fit the GPU. When
            memory runs out the run goes on with half of them.
        dtype: compute dtype of trainer and engine; the adapter's master weights are fp32 in either.
        gradient_checkpointing: what backward recomputes: none, selective (element-wise work), so many blocks, blocks
            (all), offload (all, from host memory); auto: what trains fastest on this GPU, and on a CPU none.
        offload_checkpoints: true means offload.
        fused_elementwise: norms, rotary embeddings and SwiGLU by liger-kernel; auto: on a GPU, where it is installed.
        gpu_memory: GiB of the GPU that the run plans with; null: what other processes leave.
        dynamic_sampling: replace groups that teach nothing; null: keep them (they give no gradient).
        max_unscored_share: above this share of completions that no reward could score the run stops.
        max_prompt_tokens: longest prompt (linked from the data module).
        seed: of everything that is drawn (linked from seed_everything).

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        base: str,
        engine: RolloutEngine,
        rewards: list[WeightedReward],
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen, and jsonargparse shows its fields)
        val_sampling: Sampling | None = None,
        lora: LoraSettings = LoraSettings(),  # noqa: B008
        objective: Objective = Objective(),  # noqa: B008
        optimizer: OptimizerCallable = adamw,
        lr_schedule: Schedule = "constant_with_warmup",
        warmup_steps: int = 0,
        max_grad_norm: float = 1.0,
        updates_per_rollout: int = 1,
        mini_batches: int = 1,
        micro_batch_tokens: int | None = None,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        gradient_checkpointing: Setting = "auto",
        offload_checkpoints: bool = False,
        fused_elementwise: FusedSetting = "auto",
        gpu_memory: float | None = None,
        dynamic_sampling: DynamicSampling | None = None,
        max_unscored_share: float = 0.05,
        max_prompt_tokens: int = 256,
        seed: int = 0,
        base_format: BaseFormat | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # checkpoints hold the adapter alone; on_load_checkpoint checks its keys
        base = base_folder(base, base_format)
        base_config = check_base(base)  # before anything is built
        check_counts(
            updates_per_rollout=updates_per_rollout,
            mini_batches=mini_batches,
            warmup_steps=warmup_steps,
            max_grad_norm=max_grad_norm,
            max_unscored_share=max_unscored_share,
            gpu_memory=gpu_memory,
        )
        check_passes(base_config, gradient_checkpointing, offload_checkpoints, fused_elementwise)
        check_sampling(sampling)
        check_micro_batch(micro_batch_tokens, prompt_tokens=max_prompt_tokens, completion_tokens=sampling.max_tokens)
        self.base = base
        self.engine = engine
        self.rewards = ready_rewards(
            rewards, max_tokens=sampling.max_tokens, metric=dynamic_sampling and dynamic_sampling.metric
        )
        self.sampling = sampling
        self.val_sampling = val_sampling or Sampling(1, sampling.max_tokens, temperature=0.0)
        self.lora = lora
        self.objective = objective
        self.optimizer = optimizer
        self.lr_schedule: Schedule = lr_schedule
        self.warmup_steps = warmup_steps
        self.max_grad_norm = max_grad_norm
        self.updates_per_rollout = updates_per_rollout
        self.mini_batches = mini_batches
        self.compute_dtype = DTYPES[dtype]
        self.gradient_checkpointing: Setting = gradient_checkpointing
        self.offload_checkpoints = offload_checkpoints
        self.fused_elementwise: FusedSetting = fused_elementwise
        self.gpu_memory = gpu_memory
        self.dynamic_sampling = dynamic_sampling
        self.max_unscored_share = max_unscored_share
        self.seed = seed
        self.max_prompt_tokens = max_prompt_tokens
        self.max_model_len = max_prompt_tokens + max(sampling.max_tokens, self.val_sampling.max_tokens)
        check_window(base, base_config, longest=self.max_model_len)
        self.longest_row = max_prompt_tokens + sampling.max_tokens
        """Tokens of the longest row that may be trained on."""
        self.micro_batch_tokens = micro_batch_tokens or max(USUAL_MICRO_BATCH, self.longest_row)
        self._choose_micro_batch = micro_batch_tokens is None
        self.memory_plan: Plan | None = None
        """Of this run on its GPU; None without one."""
        self.entropy_coefficient = 0.0
        """Of the next rollout, where the objective controls it."""
        self.norm_noise = NormNoise()
        """Noise of the next rollout; a callback may set it before each."""
        self.policy: Policy
        self.grad_norm: Tensor
        """[] of the last optimizer step, before clipping."""
        self.evaluated: list[dict[str, Any]] = []
        """A record a completion of the last evaluation, over all ranks, in the order of the problems."""
        self._built = described(engine, self.rewards)

    # ---- what a step is a function of -------------------------------------------------------------------------------

    @property
    def rollout_index(self) -> int:
        """RL iterations done. Not global_step, which counts optimizer steps."""
        return self.trainer.global_step // self.steps_per_rollout

    @property
    def num_rollouts(self) -> int:
        """RL iterations of the whole run."""
        return self.trainer.max_steps // self.steps_per_rollout

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of an RL iteration."""
        return self.updates_per_rollout * self.mini_batches

    # ---- set-up and tear-down ---------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check what only the trainer knows.

        Raises:
            ValueError: trainer settings that do not fit one another.
        """
        if self.trainer.precision != "32-true":
            raise ValueError(
                f"trainer.precision is {self.trainer.precision!r}; expected 32-true: other modes cast quantised scales "
                "and rewards. Set the compute dtype by model.dtype"
            )
        if stage == "fit":
            check_run_length(
                max_steps=self.trainer.max_steps,
                updates_per_rollout=self.updates_per_rollout,
                mini_batches=self.mini_batches,
                warmup_steps=self.warmup_steps,
                objective=self.objective,
                batch_size=self.trainer.datamodule.batch_size,  # pyright: ignore[reportAttributeAccessIssue]
            )
            check_answers(self.rewards, self.trainer.datamodule.some_train_prompts())  # pyright: ignore[reportAttributeAccessIssue]
        if self.trainer.strategy.root_device.type == "cuda":
            self._plan_memory(stage, self.trainer.strategy.root_device)
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.loop = RolloutLoop(
            self.engine,
            self.rewards,
            tokenizer,
            baseline=self.objective.comparison,
            filter_truncated=self.objective.filter_truncated,
            dynamic_sampling=self.dynamic_sampling,
            max_unscored_share=self.max_unscored_share,
        )

    def configure_model(self) -> None:
        """Load the base and put the adapter on it, on this rank's device; once."""
        if hasattr(self, "policy"):
            return
        self.policy = load_policy(
            self.base,
            dtype=self.compute_dtype,
            lora=self.lora,
            seed=derive_seed(self.seed, "adapter"),
            device=self.trainer.strategy.root_device,
            gradient_checkpointing=self.gradient_checkpointing,
            offload_checkpoints=self.offload_checkpoints,
            fused_elementwise=self.fused_elementwise,
        )
        if self.memory_plan is not None and (how := self.memory_plan.run.recompute(self.policy.num_layers)):
            self.policy.set_recompute(how)
        limit = self.policy.config.max_position_embeddings
        if self.max_model_len > limit:
            raise ValueError(
                f"prompts and completions may reach {self.max_model_len} tokens and the model has {limit} positions; "
                "lower data.max_prompt_tokens or model.sampling.max_tokens"
            )
        # DDP has nothing to do: every rank reads the base itself, and ``ranks`` averages the gradients. It is left one
        # parameter, because it takes no module without.
        kept = next(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        names = {name for name, _ in chain(self.named_parameters(), self.named_buffers())}
        self._ddp_params_and_buffers_to_ignore = names - {kept}

    def configure_optimizers(self) -> Any:
        """The optimizer over what is trained, and the schedule over trainer.max_steps."""
        optimizer = self.optimizer(parameter_groups(self.parameters()))
        scheduler = lr_scheduler(
            optimizer,
            schedule=self.lr_schedule,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.max_steps,
        )
        self._optimizer_settings = group_settings(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Go on with the optimizer's settings of this start: those of a checkpoint come with its moments."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(scheduler, LambdaLR)
        changed = restore_settings(optimizer.optimizer, scheduler, self._optimizer_settings)
        for name, (before, now) in changed.items():
            name = "lr" if name == "initial_lr" else name
            rank_zero_info(f"model.optimizer: {name} is {now} from here on; the checkpoint had {before}")

    def teardown(self, stage: str) -> None:
        """Give the engine's memory back."""
        self.engine.close()

    def cpu(self) -> Self:
        """Move all but what is frozen, for which Lightning asks when a run ends: a copy of the base is of no use.

        It would take as much of the host's memory as of the GPU's, on every rank.
        """
        frozen = {id(tensor) for tensor in chain(self.parameters(), self.buffers()) if not tensor.requires_grad}
        return self._apply(lambda tensor: tensor if id(tensor) in frozen else tensor.cpu())

    # ---- one RL iteration -------------------------------------------------------------------------------------------

    def training_step(self, batch: list[Prompt], batch_idx: int) -> dict[str, Any]:
        """Sample, score, update; returns what callbacks report on."""
        index, watch = self.rollout_index, Stopwatch()
        self._start_engine()
        rollout = self.loop.collect(
            batch,
            more_prompts=self.trainer.datamodule.more_prompts(index, batch),  # pyright: ignore[reportAttributeAccessIssue]
            adapter=self.policy.adapter_state(),
            noise=self.norm_noise,
            sampling=self.sampling,
            seed=derive_seed(self.seed, "rollout", index),
            watch=watch,
        )
        report = improve(
            self.policy,
            rollout.experience,
            self.objective.at_noise(self.norm_noise.sigma),
            group_size=self.sampling.num_completions,
            temperature=self.sampling.temperature,
            max_tokens=self.sampling.max_tokens,
            num_updates=self.updates_per_rollout,
            num_mini_batches=self.mini_batches,
            entropy_coefficient=self.entropy_coefficient,
            seed=derive_seed(self.seed, "update", index),
            micro_batch_tokens=self.micro_batch_tokens,
            backward=Tensor.backward,  # manual_backward would have DDP reduce, and ranks differ in micro-batches
            step=self._optimizer_step,
            watch=watch,
        )
        self.log_dict(report.metrics)
        self.micro_batch_tokens, self.entropy_coefficient = report.micro_batch_tokens, report.entropy_coefficient
        return {"rollout": rollout, "rollout_index": index, "update": report, "seconds": dict(watch.seconds)}

    def _optimizer_step(self) -> Tensor:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(scheduler, LambdaLR)
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        ranks.average_gradients(trained)
        parameters = [parameter for parameter in trained if parameter.grad is not None]
        limit = self.max_grad_norm or float("inf")
        none = torch.zeros((), device=self.device)
        self.grad_norm = torch.nn.utils.clip_grad_norm_(parameters, limit) if parameters else none
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return self.grad_norm

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Sample from the clean policy: the current adapter, no noise."""
        self._start_engine()
        self.loop.sync(self.policy.adapter_state(), NormNoise())
        cache = None
        if self.trainer.state.fn != TrainerFn.FITTING:
            cache = open_cache(Path(self.trainer.default_root_dir) / "evaluation", self._evaluation_identity())
        seed = derive_seed(self.seed, "evaluation")
        self._evaluation = Evaluation(self.loop, self.val_sampling, seed=seed, cache=cache, device=self.device)

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, batch: list[Prompt], batch_idx: int) -> list[dict[str, Any]]:
        """Score one batch of held-out prompts; returns a record a completion."""
        return self._evaluation.score(batch)

    def test_step(self, batch: list[Prompt], batch_idx: int) -> list[dict[str, Any]]:
        """As in validation."""
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch: list[Prompt], batch_idx: int) -> list[dict[str, Any]]:
        """As in validation."""
        return self.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Log means over the completions of all ranks."""
        self._finish_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """As in validation."""
        self._finish_evaluation("test")

    def on_predict_epoch_end(self) -> None:
        """The records alone, nothing logged."""
        self.evaluated = self._evaluation.records()

    def _finish_evaluation(self, stage: str) -> None:
        self.evaluated = self._evaluation.records()
        self.log_dict({f"{stage}/{name}": value for name, value in self._evaluation.means().items()})

    def _evaluation_identity(self) -> dict[str, Any]:
        return evaluation_identity(self.policy, self.val_sampling, run=self._identity, built=self._built)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must stay the same over a run; reads the base's files."""
        return run_identity(base=self.base, lora=self.lora, seed=self.seed)

    @property
    def _rollout_identity(self) -> dict[str, Any]:
        """What must stay the same for training to go on: steps are counted in updates."""
        return {"updates_per_rollout": self.steps_per_rollout}

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the adapter alone, and what the run must not change."""
        checkpoint["state_dict"] = self.policy.adapter_state()
        checkpoint["entropy_coefficient"] = self.entropy_coefficient
        checkpoint["identity"] = self._identity | self._rollout_identity

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the adapter in.

        Raises:
            ValueError: the checkpoint is of another base, adapter or seed.
        """
        current = self._identity
        if self.trainer.state.fn == TrainerFn.FITTING:
            current = current | self._rollout_identity
        check_identity(identity_of(checkpoint), current)
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_groups(checkpoint["optimizer_states"], parameter_groups(self.parameters()))
        self.policy.load_adapter_state(checkpoint["state_dict"])
        checkpoint["state_dict"] = {}
        self.entropy_coefficient = checkpoint.get("entropy_coefficient", 0.0)

    def _start_engine(self) -> None:
        self.engine.start(self.policy, max_model_len=self.max_model_len)

    def _plan_memory(self, stage: str, device: torch.device) -> None:
        """Choose micro-batches, the engine's cache and what is recomputed, where the YAML leaves them open."""
        limit = available_bytes(device, self.gpu_memory)
        plan = plan_for(checkpoint_shape(self.base, self.compute_dtype), self.run_memory(stage), limit)
        self.memory_plan, self.micro_batch_tokens = plan, plan.micro_batch_tokens
        self.engine.plan_cache(plan.kv_cache_bytes)
        rank_zero_info(plan.summary())

    def run_memory(self, stage: str) -> RunMemory:
        """What decides how much memory a rank takes."""
        engine, data = self.engine, self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        training = -(-data.batch_size // self.trainer.world_size) * self.sampling.num_completions
        return RunMemory(
            rows=training if stage == "fit" else data.val_batch_size * self.val_sampling.num_completions,
            prompt_tokens=self.max_prompt_tokens,
            completion_tokens=self.sampling.max_tokens,
            evaluation_tokens=self.val_sampling.max_tokens,
            itemsize=self.compute_dtype.itemsize,
            rank=self.lora.rank,
            targets=self.lora.targets,
            train_norms=self.lora.train_norms,
            state_bytes=state_bytes(type(self.optimizer([torch.nn.Parameter(torch.zeros(1))])).__name__),
            micro_batch_tokens=None if self._choose_micro_batch else self.micro_batch_tokens,
            gradient_checkpointing=self.gradient_checkpointing,
            offload_checkpoints=self.offload_checkpoints,
            fused=fused_wanted(self.fused_elementwise),
            engine=engine.memory,
            batch_tokens=0 if engine.memory else engine.batch_tokens,
        )
