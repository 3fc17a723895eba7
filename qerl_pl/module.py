"""The LightningModule that trains the policy: each call of ``training_step`` is one RL iteration.

The method (QeRL, arXiv 2510.11696) is as follows. A language model with a frozen 4-bit base and a LoRA adapter samples
several completions of each prompt, with noise on its norm weights that makes it explore. Rewards score the completions,
and a completion's advantage says how much better it is than the other completions of the same prompt. A clipped policy
gradient (GRPO, DAPO or another objective) makes the tokens of better completions more likely, and importance weights
correct the difference between the probabilities in trainer and sampler. The updated adapter samples the next
completions.
"""

from contextlib import nullcontext
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer

from qerl_pl.checkpoint import (
    adapter_of,
    check_identity,
    check_training_state,
    identity_of,
    run_identity,
    tokens_as_before,
)
from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.phases import phase
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Prompt
from qerl_pl.evaluation.cache import EvaluationCache, evaluation_identity
from qerl_pl.evaluation.evaluation import Evaluation, warn_if_not_counted
from qerl_pl.memory.advice import plan_for
from qerl_pl.memory.device import available_bytes
from qerl_pl.memory.plan import Plan
from qerl_pl.memory.settings import RunMemory
from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.attention import describe_attention
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.policy.teacher import Teacher
from qerl_pl.rewards.base import WeightedReward, check_answers, have_weight, ready_rewards
from qerl_pl.rewards.calling import Progress
from qerl_pl.rewards.format import check_format_can_be_met
from qerl_pl.rollout.base import RolloutEngine
from qerl_pl.rollout.common import end_tokens
from qerl_pl.rollout.decode import as_sampled
from qerl_pl.rollout.loop import RolloutLoop
from qerl_pl.settings.model import ModuleSettings
from qerl_pl.settings.run_memory import run_memory
from qerl_pl.training.optimization import (
    average_and_clip,
    check_groups,
    group_settings,
    lr_scheduler,
    make_optimizer,
    parameter_groups,
    restore_settings,
)
from qerl_pl.training.passes import UpdateSettings
from qerl_pl.update import improve


class QeRLModule(LightningModule):
    """A LoRA policy on a frozen base, trained with GRPO or a related objective on completions that it samples itself.

    Args:
        engine: samples the rollouts, e.g. qerl_pl.rollout.vllm.VLLMEngine.
        rewards: score the completions; each has a name and a weight.
        settings: the fields of ``ModuleSettings``. Only ``base`` has no default.
    """

    def __init__(self, engine: RolloutEngine, rewards: list[WeightedReward], **settings: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        # Lightning's strict loading is off, as checkpoints hold only the adapter; on_load_checkpoint checks their keys
        self.strict_loading = False
        self.settings = ModuleSettings(**settings)
        self.settings.check_with_base()
        self.objective = self.settings.objective.resolve()
        self.engine = engine
        self.sampling = self.settings.rollouts
        dynamic = self.settings.dynamic_sampling
        taught = self.settings.teacher is not None
        self.rewards = ready_rewards(
            rewards, max_tokens=self.sampling.max_tokens, metric=dynamic and dynamic.metric, optional=taught
        )
        if dynamic is not None and not self.is_rewarded:
            raise ValueError(
                "model.dynamic_sampling replaces groups of equal rewards, and no reward has a weight: give one a weight"
            )
        self.micro_batch_tokens = self.settings.first_micro_batch
        self.memory_plan: Plan | None = None
        """Prediction of this run's GPU memory, with the settings that were chosen by it; None on a CPU."""
        self.norm_noise = NormNoise()
        """Noise on the engine's norm weights (AQN) for the next rollout; a callback may set it before each rollout."""
        self.policy: Policy
        self.teacher: Teacher | None = None
        """The teacher model of the loss's distillation term; None without such a term, or outside of training."""
        self._optimizer_settings: list[dict[str, Any]] = []
        self._settings_before: list[dict[str, Any]] | None = None  # those of the start that wrote the checkpoint
        self.grad_norm: Tensor
        """[] gradient norm at the last optimizer step, before clipping."""
        self.evaluated: list[dict[str, Any]] = []
        """Records of the last evaluation, one per completion of all ranks, in the order of the problems."""
        self._engine_runs = False
        self.built: str | None = None
        """Text of the settings of engine and rewards. The program's command line stores it here, so that an interrupted
        evaluation, when it is started again with equal settings, skips the batches that were finished. If it is None,
        as in a user's own script, nothing is skipped."""

    @property
    def is_rewarded(self) -> bool:
        """Whether any reward has a weight other than 0; if none has, only a teacher trains the policy."""
        return have_weight(self.rewards)

    # ---- progress ---------------------------------------------------------------------------------------------------

    @property
    def rollout_index(self) -> int:
        """Number of finished RL iterations. It differs from ``trainer.global_step``, which counts optimizer steps."""
        return self.trainer.global_step // self.settings.steps_per_rollout

    @property
    def num_rollouts(self) -> int:
        """Number of RL iterations of the whole run."""
        return self.trainer.max_steps // self.settings.steps_per_rollout

    @property
    def _data(self) -> Any:  # a PromptDataModule, or one of the user's
        return self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Called by Lightning before training or evaluation: check the settings, and that the rewards can read the
        answers of training problems; plan GPU memory; create the rollout loop. Raises ValueError if settings of
        Lightning's Trainer contradict each other or the settings under ``model``."""
        if self.trainer.precision != "32-true":
            raise ValueError(
                f"trainer.precision is {self.trainer.precision!r}; expected 32-true: other modes cast quantised scales "
                "and rewards. Set the compute dtype by model.dtype"
            )
        if stage == "test" and not self.rewards:
            raise ValueError(
                "model.rewards is empty; expected at least one reward, by which `test` counts right answers"
            )
        if stage == "fit":
            _ = self._replays_routes, self.checked_teacher()  # what cannot be used is refused here
            self.settings.check_length(max_steps=self.trainer.max_steps, batch_size=self._data.batch_size)
            number, taught = self.num_rollouts, self.objective.teacher and self.objective.teacher.rollouts
            if taught is not None and taught < number and not self.is_rewarded:
                rank_zero_warn(
                    "no reward has a weight, and the term of the teacher is 0 after model.objective.teacher.rollouts: "
                    f"nothing trains the policy in the last {number - taught} of {number} rollouts"
                )
            check_answers(self.rewards, self._data.some_train_prompts())
        if self.trainer.strategy.root_device.type == "cuda":
            self._plan_memory(stage)
        elif self.settings.gpu_memory is not None:
            rank_zero_warn(f"model.gpu_memory is {self.settings.gpu_memory} and this run uses no GPU: it has no effect")
        tokenizer = AutoTokenizer.from_pretrained(self.settings.folder, trust_remote_code=False)
        if stage == "fit":
            written = partial(as_sampled, tokenizer, stop=self.sampling.stop)
            check_format_can_be_met(self.rewards, self._data.some_train_prompts(1), written)
        self.loop = RolloutLoop(
            self.engine,
            self.rewards,
            tokenizer,
            baseline=self.objective.baseline,
            filter_truncated=self.objective.filter_truncated,
            dynamic_sampling=self.settings.dynamic_sampling,
            max_unscored_share=self.settings.max_unscored_share,
        )

    def checked_teacher(self) -> str | None:
        """Return the teacher's checkpoint folder; None without a teacher. Raises ValueError if the teacher cannot be
        used, or if it is the policy's own base, which teaches the policy nothing, and neither a reward nor an entropy
        term trains the policy."""
        if self.settings.is_own_teacher and not (self.is_rewarded or self.objective.entropy_coefficient):
            raise ValueError(
                f"model.teacher is the policy's own base, {self.settings.folder}, and no reward has a weight: nothing "
                "would train the policy; set model.quantize, or give another teacher or a reward"
            )
        return self.settings.teacher_folder

    def configure_model(self) -> None:
        """Load the base with the LoRA adapter and, for training, the teacher. A second call does nothing."""
        if hasattr(self, "policy"):
            return
        with phase("loading the base"):
            self.policy = load_policy(
                self.settings.folder,
                seed=derive_seed(self.settings.seed, "adapter"),
                device=self.trainer.strategy.root_device,
                dtype=self.settings.compute_dtype,
                lora=self.settings.lora,
                gradient_checkpointing=self.settings.gradient_checkpointing,
                fused_elementwise=self.settings.fused_elementwise,
            )
            self.policy.replays_routes = self._replays_routes
        folder = self.settings.teacher_folder if self.trainer.state.fn == TrainerFn.FITTING else None
        if folder is not None:
            planned = (self.memory_plan and self.memory_plan.run.teacher) or self.settings.teacher
            device, on_host = self.trainer.strategy.root_device, planned is not None and planned.keep == "host"
            with phase("loading the teacher"):
                self.teacher = Teacher(
                    folder, dtype=self.settings.compute_dtype, device=device, keep="host" if on_host else "gpu"
                )
        if self.memory_plan is not None:
            if how := self.memory_plan.run.recompute(self.policy.num_layers):
                self.policy.set_recompute(how)
            device = self.trainer.strategy.root_device
            rank_zero_info(describe_attention(self.policy.config, device, self.settings.compute_dtype))
        # DDP is not needed: every rank reads the base from disk, and ``qerl_pl.common.ranks`` averages the gradients.
        # DDP still manages one parameter, because it refuses a module without parameters to manage.
        kept = next(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        names = {name for name, _ in chain(self.named_parameters(), self.named_buffers())}
        self._ddp_params_and_buffers_to_ignore = names - {kept}

    def configure_optimizers(self) -> Any:
        """Create the optimizer for the trained parameters and the learning-rate schedule over trainer.max_steps."""
        optimizer = make_optimizer(self.settings.optimizer, self.parameters())
        scheduler = lr_scheduler(
            optimizer,
            schedule=self.settings.lr_schedule,
            warmup_steps=self.settings.warmup_steps,
            total_steps=self.trainer.max_steps,
        )
        self._optimizer_settings = group_settings(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Set the optimizer's settings, such as betas, to those in the configuration again, if loading a checkpoint has
        replaced them."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(scheduler, LambdaLR)
        restore_settings(optimizer.optimizer, scheduler, self._optimizer_settings, self._settings_before)
        if self.trainer.global_step == 0:
            # After Lightning has loaded a checkpoint, it counts the step at whose end the checkpoint was written. A
            # checkpoint of the validation before the first step was not written at the end of a step, so without this
            # line all scalars would be logged one step too late.
            self.trainer.fit_loop.epoch_loop.restarting = False

    def teardown(self, stage: str) -> None:
        """Close the engine and free its memory."""
        with phase(f"closing {type(self.engine).__name__}"):
            self.engine.close()
        self._engine_runs = False

    def cpu(self) -> Self:
        """Move only the trained parameters to the CPU. Lightning calls this method when a run ends. Moving the frozen
        base, too, would take as much host memory per rank as the base takes GPU memory."""
        frozen = {id(tensor) for tensor in chain(self.parameters(), self.buffers()) if not tensor.requires_grad}
        return self._apply(lambda tensor: tensor if id(tensor) in frozen else tensor.cpu())

    # ---- training ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: list[Prompt], batch_idx: int) -> dict[str, Any]:
        """Do one RL iteration: sample completions, score them, and update the policy. Returns, for callbacks, a dict
        with the rollout, its index ("rollout_index"), the report of the update ("update"), and the seconds of each
        phase."""
        index, watch = self.rollout_index, Stopwatch()
        self._forget_scalars()
        self.start_engine()
        self.loop.progress = Progress(self.trainer.global_step, self.trainer.max_steps)
        rollout = self.loop.collect(
            batch,
            more_prompts=self._data.more_prompts(index, batch),
            adapter=self.policy.adapter_state(),
            noise=self.norm_noise,
            sampling=self.sampling,
            seed=derive_seed(self.settings.seed, "rollout", index),
            watch=watch,
        )
        settings = UpdateSettings(
            group_size=self.sampling.num_completions,
            temperature=self.sampling.temperature,
            max_tokens=self.sampling.max_tokens,
            num_updates=self.settings.updates_per_rollout,
            num_mini_batches=self.settings.mini_batches,
            micro_batch_tokens=self.micro_batch_tokens,
            places=rollout.places,
        )
        report = improve(
            self.policy,
            rollout.experience,
            self.objective.at_noise(self.norm_noise.sigma).at_rollout(index),
            settings,
            step=self._optimizer_step,
            watch=watch,
            teacher=self.teacher,
            free_cache=self.engine.free_cache,
        )
        self.log_dict(report.metrics)
        self.micro_batch_tokens = report.micro_batch_tokens
        return {"rollout": rollout, "rollout_index": index, "update": report, "seconds": dict(watch.seconds)}

    def _forget_scalars(self) -> None:
        """Delete from Lightning's results the scalars that the previous training step logged. Lightning would otherwise
        log the previous value of a scalar again if this step does not measure it. The first step after a resume has no
        previous values, so without this deletion the curves of a resumed run would differ from those of an
        uninterrupted one."""
        for logged in self.trainer.fit_loop.epoch_loop._results.values():
            # this step has already called the hooks on_train_batch_start
            if not logged.meta.on_epoch and logged.meta.fx != "on_train_batch_start":
                logged.reset()

    def _optimizer_step(self) -> Tensor:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(scheduler, LambdaLR)
        self.grad_norm = average_and_clip(self.policy.parameters(), max_norm=self.settings.max_grad_norm)
        optimizer.step()  # This calls the hook on_before_optimizer_step, in which callbacks read ``grad_norm``
        scheduler.step()
        optimizer.zero_grad()
        return self.grad_norm

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Start the rollout engine and load the current adapter into it, without noise on its norm weights."""
        self.start_engine()
        self.loop.progress = Progress(self.trainer.global_step, max(0, self.trainer.max_steps))
        self.loop.sync(self.policy.adapter_state(), NormNoise())
        cache = None
        if self.trainer.state.fn != TrainerFn.FITTING and self.built is not None:
            parts = [self.engine, *(term.reward for term in self.rewards)]
            identity = evaluation_identity(
                self.policy, self.settings.evaluation, run=self._identity, built=self.built, parts=parts
            )
            cache = EvaluationCache(Path(self.trainer.default_root_dir) / "evaluation", identity)
        seed = derive_seed(self.settings.seed, "evaluation")
        self._evaluation = Evaluation(self.loop, self.settings.evaluation, seed=seed, cache=cache, device=self.device)

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, batch: list[Prompt], batch_idx: int) -> Any:
        """Sample and score completions of one batch of held-out prompts; returns one record per completion."""
        return self._evaluation.score(batch)

    test_step = predict_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Gather the evaluation's records from all ranks, and log their means (except in ``predict``)."""
        self.evaluated = self._evaluation.records()
        if not self.trainer.predicting:
            stage = "test" if self.trainer.testing else "val"
            self.log_dict({f"{stage}/{name}": value for name, value in self._evaluation.means().items()})
            counts_right = self.trainer.state.fn != TrainerFn.FITTING or self.settings.evaluation.num_completions > 1
            if self.rewards and counts_right:
                warn_if_not_counted(self.evaluated, self.rewards[0].name)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Values that must not change when a run is resumed: digest of the base's files, adapter settings and seed."""
        return run_identity(base=self.settings.folder, lora=self.settings.lora, seed=self.settings.seed)

    @property
    def _rollout_identity(self) -> dict[str, Any]:
        # The number of optimizer steps per rollout must stay the same when a run is resumed, because the rollout index
        # is computed from the number of optimizer steps. End tokens must stay the same too; the digest of the base does
        # not cover all files from which they are read.
        return {"updates_per_rollout": self.settings.steps_per_rollout, "end_tokens": self._end_tokens}

    @cached_property
    def _end_tokens(self) -> list[int]:
        return end_tokens(self.policy.base, self.policy.config)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store in a checkpoint the adapter, the adapter from which the run started, if any, what identifies the run
        (such as base, adapter settings and seed), the optimizer's settings, and the size of micro-batches."""
        checkpoint["state_dict"] = self.policy.adapter_state()
        if self.policy.start is not None:
            checkpoint["start"] = self.policy.start
        checkpoint["identity"] = self._identity | self._rollout_identity
        checkpoint["optimizer_settings"] = self._optimizer_settings
        checkpoint["micro_batch_tokens"] = self.micro_batch_tokens

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the adapter of a checkpoint. Raises ValueError if its base, seed, adapter settings or, in training, end
        tokens or number of optimizer steps per rollout differ from this run's."""
        fits = self.trainer.state.fn == TrainerFn.FITTING
        current = self._identity | (self._rollout_identity if fits else {})
        # checkpoints of earlier versions have no end tokens
        check_identity({"end_tokens": current.get("end_tokens"), **identity_of(checkpoint)}, current)
        if fits:
            check_training_state(checkpoint, max_steps=self.trainer.max_steps)
            check_groups(checkpoint["optimizer_states"], parameter_groups(self.parameters()))
            self._settings_before = checkpoint.get("optimizer_settings")
            before = checkpoint.get("micro_batch_tokens")  # None in checkpoints of earlier versions
            if self.settings.micro_batch_tokens is None and isinstance(before, int):
                self.micro_batch_tokens = tokens_as_before(before, self.micro_batch_tokens)
        checkpoint.get("callbacks", {}).pop(Timer.__qualname__, None)  # trainer.max_time counts from 0 in every start
        self.policy.load_adapter_state(adapter_of(checkpoint))
        self.policy.start = checkpoint.get("start")
        checkpoint["state_dict"] = {}

    def start_engine(self) -> None:
        """Start the rollout engine, if it is not running, and tell the rollout loop the policy's end tokens and, if
        training repeats the engine's choice of experts, the numbers of mixture-of-experts layers and of experts."""
        with nullcontext() if self._engine_runs else phase(f"starting {type(self.engine).__name__}"):
            self.engine.start(self.policy, max_model_len=self.settings.max_model_len)
        self._engine_runs = True
        self.loop.end_tokens = self._end_tokens
        self.loop.routing = self.policy.routing if self.policy.replays_routes else None

    @property
    def _replays_routes(self) -> bool:
        """Whether training uses the experts that the engine chose for each token, in a mixture-of-experts model."""
        fits, returned = self.trainer.state.fn == TrainerFn.FITTING, self.engine.returns_routes
        return fits and self.settings.replays_routes(type(self.engine).__name__, returns_routes=returned)

    def _plan_memory(self, stage: str) -> None:
        """Choose micro-batch size, KV-cache size and recomputation of activations by a prediction of GPU memory, except
        those that the configuration sets."""
        limit = available_bytes(self.trainer.strategy.root_device, self.settings.gpu_memory)
        plan = plan_for(
            checkpoint_shape(self.settings.folder, self.settings.compute_dtype), self._run_memory(stage), limit
        )
        self.memory_plan, self.micro_batch_tokens = plan, plan.micro_batch_tokens
        self.engine.plan_memory(plan.run.engine)
        rank_zero_info(plan.summary())

    def _run_memory(self, stage: str) -> RunMemory:
        """Collect the settings that decide how much GPU memory one rank needs."""
        data = self._data
        if stage != "fit":  # val_batch_size counts the prompts of one rank
            return run_memory(self.settings, self.engine, num_prompts=data.val_batch_size, trains=False)
        folder = self.settings.teacher_folder
        return run_memory(
            self.settings,
            self.engine,
            num_prompts=data.batch_size,
            num_ranks=self.trainer.world_size,
            teacher=None if folder is None else checkpoint_shape(folder, self.settings.compute_dtype),
        )
