"""Settings of the YAML section ``model``, except engine and rewards, and their checks before a model is loaded."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from qerl_pl.base.folder import BaseFormat, check_base
from qerl_pl.base.prepared import prepared_base
from qerl_pl.common.checks import require_at_least
from qerl_pl.memory.device import check_gpu_memory
from qerl_pl.memory.fitting import USUAL_MICRO_BATCH
from qerl_pl.model.family import FAMILIES
from qerl_pl.model.quantization import Quantize, quantization_of
from qerl_pl.objective import Objective
from qerl_pl.policy.elementwise import FusedSetting, fused_wanted
from qerl_pl.policy.lora import LoraSettings, open_settings
from qerl_pl.policy.policy import DTYPES
from qerl_pl.policy.recompute import Setting, recompute_of
from qerl_pl.policy.start import check_fits, is_of_other_base
from qerl_pl.quant.families import check_length
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.dynamic_sampling import DynamicSampling
from qerl_pl.settings.teacher import TeacherSettings
from qerl_pl.training.optimization import Schedule


def adamw(params: Any) -> torch.optim.Optimizer:
    """Create the default optimizer, AdamW with the learning rate that the QeRL paper uses for a quantised base (arXiv
    2510.11696, table 4)."""
    return torch.optim.AdamW(params, lr=1e-5, betas=(0.9, 0.99), weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class ModuleSettings:
    """Settings of how the policy is loaded, sampled from and trained.

    Args:
        base: folder of a checkpoint, or a model's name on the Hugging Face hub (Qwen/Qwen3-8B), dense or quantised.
        base_format: nvfp4, mxfp4 or nf4: load the base from the folder BASE-FORMAT (``models/qwen2.5-7b-nvfp4`` for
            ``base: models/qwen2.5-7b``), which ``python -m qerl_pl quantize`` has written; null: load ``base`` itself.
        quantize: quantise a dense base at the first start and cache the result: nvfp4, mxfp4 or nf4, or a mapping of
            the quantiser's settings (format, method, calibration, samples, length, ignore); null: do not quantise.
        sampling: settings for sampling training rollouts.
        val_sampling: settings for sampling in validations; null: greedy, one completion per prompt, with the max_tokens
            of training.
        lora: settings of the adapter.
        objective: settings of the loss.
        teacher: frozen model that ``objective.teacher`` draws the policy towards; null: none.
        optimizer: optimizer of the adapter's parameters; trained norms have no weight decay.
        lr_schedule: learning-rate schedule over trainer.max_steps.
        warmup_steps: optimizer steps of linear warm-up at the start of the schedule; the first step has lr /
            warmup_steps.
        max_grad_norm: clip gradients to this norm; 0: do not clip.
        updates_per_rollout: passes over the completions of each rollout. A pass consists of ``mini_batches`` optimizer
            steps.
        mini_batches: optimizer steps per pass over a rollout, each on an equal part of the rollout's prompts (PPO's
            mini-batches). With more than 1, old log-probabilities take one more forward pass per rollout.
            trainer.max_steps counts all optimizer steps.
        micro_batch_tokens: limit on the tokens in one forward and backward pass; null: 16384, or as many as fit on the
            GPU; for dense models below 3B up to 32768 if vLLM samples and memory is ample. If memory runs out, the run
            continues with half as many. On a GPU, a prompt that several completions of a micro-batch share is computed
            and counted once.
        dtype: compute dtype of trainer and engine; the adapter's master weights are always fp32.
        gradient_checkpointing: activations that backward recomputes instead of keeping them. none: keep all; selective:
            results of element-wise operations (with lora.dropout, of linear layers too); a number n: all activations of
            n blocks, and selective in the other blocks; blocks: all activations of all blocks; offload: as blocks, with
            the blocks' inputs kept in host memory; auto: the fastest of these that fits into the GPU's memory, and none
            on a CPU.
        router_replay: for a mixture-of-experts base, train with the experts that the sampler chose for each token,
            instead of those that the trainer's routers would choose; auto: on if the rollout engine returns the chosen
            experts, as vLLM does; off otherwise.
        fused_elementwise: compute norms, rotary embeddings and SwiGLU by liger-kernel; auto: on a GPU, if it is
            installed.
        gpu_memory: GiB of GPU memory that the run may use; null: all memory that other processes leave free.
        dynamic_sampling: replace groups (completions of one prompt) whose advantages are all 0, from which nothing can
            be learned, by groups of further prompts; null: keep them.
        max_unscored_share: stop the run if a larger share (0 to 1) of a rollout's completions has no score, because a
            reward with a weight other than 0 returned None for them.
        max_prompt_tokens: limit on the tokens of a prompt (set by data.max_prompt_tokens).
        stop: strings that end a completion (set by data.stop).
        seed: seed of all random numbers (set by seed_everything).
    """

    base: str
    base_format: BaseFormat | None = None
    quantize: Quantize | None = None
    sampling: Sampling = field(default_factory=Sampling)
    val_sampling: Sampling | None = None
    lora: LoraSettings = field(default_factory=open_settings)
    objective: Objective = field(default_factory=Objective)
    teacher: TeacherSettings | None = None
    optimizer: OptimizerCallable = adamw
    lr_schedule: Schedule = "constant_with_warmup"
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    updates_per_rollout: int = 1
    mini_batches: int = 1
    micro_batch_tokens: int | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    gradient_checkpointing: Setting = "auto"
    router_replay: Literal["auto", "on", "off"] = "auto"
    fused_elementwise: FusedSetting = "auto"
    gpu_memory: float | None = None
    dynamic_sampling: DynamicSampling | None = None
    max_unscored_share: float = 0.05
    max_prompt_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora", replace(self.lora))
        self._check_numbers()
        check_sampling(self.sampling)
        if (self.teacher is None) != (self.objective.teacher is None):
            given, missing, example = ("teacher", "objective.teacher", "{coefficient: 1.0}")
            if self.teacher is None:
                given, missing, example = ("objective.teacher", "teacher", "{base: dense}")
            raise ValueError(f"model.{given} is given and model.{missing} is not; give both, e.g. {missing}: {example}")
        for name, sampling in (("sampling", self.sampling), ("val_sampling", self.val_sampling)):
            if sampling is not None and sampling.stop not in ((), self.stop):
                raise ValueError(f"model.{name}.stop is {list(sampling.stop)}: set data.stop, which holds for both")
        if self.micro_batch_tokens is not None and self.longest_row > self.micro_batch_tokens:
            raise ValueError(
                f"a prompt of {self.max_prompt_tokens} and a completion of {self.sampling.max_tokens} tokens are "
                f"{self.longest_row}, more than model.micro_batch_tokens ({self.micro_batch_tokens}); raise it, or "
                "shorten prompts or completions"
            )
        fused_wanted(self.fused_elementwise)

    def check_with_base(self) -> None:
        """Check the settings against the base, which is downloaded or quantised first if need be, and fill in the rank
        of adapters on experts. Raises ValueError if there is no such base, or a setting does not fit it."""
        config = check_base(self.folder)
        if self.lora.start is not None:
            start = self.lora.starts_at
            check_fits(start, num_layers=config["num_hidden_layers"], hidden=config["hidden_size"])
            if is_of_other_base(start, self.base, self.folder):
                rank_zero_warn(
                    f"model.lora.start is an adapter of {start.base}, and model.base is {self.base}; the shapes agree, "
                    "but an adapter has its trained effect only on the base that it was trained on"
                )
        names = FAMILIES[config["model_type"]].experts
        object.__setattr__(self, "lora", self.lora.of_base(config[names.chosen] if names else 0))
        if self.lora.rank > config["hidden_size"]:
            raise ValueError(
                f"model.lora.rank is {self.lora.rank}; expected at most the model's hidden_size "
                f"({config['hidden_size']}), the largest rank that its linears can have"
            )
        recompute_of(self.gradient_checkpointing, config["num_hidden_layers"])
        check_length(config, longest=self.max_model_len)

    def replays_routes(self, engine: str, *, returns_routes: bool) -> bool:
        """Return whether training uses the experts that the rollout engine chose for each token, by the setting
        ``model.router_replay``. ``engine`` is the engine's name for messages, and ``returns_routes`` says whether it
        returns the chosen experts. Raises ValueError if the setting is "on", and the base has no experts or the engine
        does not return them."""
        has_experts = FAMILIES[check_base(self.folder)["model_type"]].experts is not None
        which = {"has_experts": has_experts, "returns_routes": returns_routes}
        return replays_routes(self.router_replay, **which, engine=engine)

    def check_length(self, *, max_steps: int, batch_size: int) -> None:
        """Check the length of a run, ``trainer.max_steps`` (-1: not set), with ``data.batch_size`` prompts per rollout.
        Raises ValueError if the run does not end with a complete rollout, the prompts of a rollout cannot be divided
        equally among its mini-batches, or the warm-up is longer than the run."""
        if max_steps < 1:
            raise ValueError("trainer.max_steps is not set; schedules need the length of the run in optimizer steps")
        if max_steps % self.steps_per_rollout:
            factors = f"model.updates_per_rollout ({self.updates_per_rollout})"
            if self.mini_batches > 1:
                factors += f" x model.mini_batches ({self.mini_batches})"
            raise ValueError(
                f"trainer.max_steps ({max_steps}) is no multiple of {factors}, the optimizer steps of a rollout"
            )
        if batch_size % self.mini_batches:
            raise ValueError(
                f"data.batch_size ({batch_size} prompts) is no multiple of model.mini_batches ({self.mini_batches}): "
                "every optimizer step takes equally many prompts"
            )
        objective = self.objective
        if self.steps_per_rollout == 1 and objective.ratio_against == "trainer":
            resolved = objective.resolve()
            usual = Objective(preset=objective.preset, surrogate=objective.surrogate).resolve()
            for name in ("clip_low", "clip_high", "max_ratio"):
                if (value := getattr(resolved, name)) != getattr(usual, name):
                    rank_zero_warn(
                        f"model.objective.{name} is {value} and a rollout has one optimizer step, in which the ratio "
                        "is 1: it has no effect, unless model.updates_per_rollout or model.mini_batches is more than 1"
                    )
        if self.warmup_steps > max_steps:
            raise ValueError(
                f"model.warmup_steps is {self.warmup_steps}; expected at most trainer.max_steps ({max_steps}), or the "
                "learning rate never reaches its full value"
            )
        if self.warmup_steps == max_steps:
            rank_zero_warn(
                f"model.warmup_steps ({self.warmup_steps}) is no less than trainer.max_steps ({max_steps}): the "
                "learning rate never reaches its full value"
            )

    def _check_numbers(self) -> None:
        updates, parts = self.updates_per_rollout, self.mini_batches
        require_at_least(1, section="model.", updates_per_rollout=updates, mini_batches=parts)
        require_at_least(1, section="model.", micro_batch_tokens=self.micro_batch_tokens)
        if not self.max_grad_norm >= 0:
            norm = self.max_grad_norm
            raise ValueError(f"model.max_grad_norm is {norm}; expected a norm above 0, or 0 for no clipping")
        if self.warmup_steps < 0:
            raise ValueError(f"model.warmup_steps is {self.warmup_steps}; expected 0 optimizer steps or more")
        if not 0 <= self.max_unscored_share <= 1:
            raise ValueError(f"model.max_unscored_share is {self.max_unscored_share}; expected 0 to 1")
        check_gpu_memory(self.gpu_memory, "model.gpu_memory")

    @cached_property
    def folder(self) -> str:
        """Checkpoint folder that trainer and engine load: the base, or its copy by ``base_format`` or ``quantize``."""
        return prepared_base(self.base, self.base_format, quantization_of(self.quantize))

    @cached_property
    def teacher_folder(self) -> str | None:
        """Checkpoint folder of the teacher; None without a teacher."""
        return self.teacher and self.teacher.folder(self.base, self.folder, longest=self.longest_row)

    @property
    def is_own_teacher(self) -> bool:
        """Whether the teacher is the same model as the policy before its first update."""
        folder = self.teacher_folder
        return folder is not None and self.lora.start is None and Path(folder).samefile(self.folder)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The torch dtype that ``dtype`` names."""
        return DTYPES[self.dtype]

    @property
    def rollouts(self) -> Sampling:
        """Sampling settings of training rollouts."""
        return replace(self.sampling, stop=self.stop)

    @property
    def evaluation(self) -> Sampling:
        """Sampling settings of evaluations."""
        sampling = self.val_sampling or Sampling(1, self.sampling.max_tokens, temperature=0.0)
        return replace(sampling, stop=self.stop)

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens that a prompt and its completion have together, in training or evaluation."""
        return self.max_prompt_tokens + max(self.sampling.max_tokens, self.evaluation.max_tokens)

    @property
    def longest_row(self) -> int:
        """Largest number of tokens that a prompt and its completion have together, in training."""
        return self.max_prompt_tokens + self.sampling.max_tokens

    @property
    def first_micro_batch(self) -> int:
        """Limit on the tokens of one pass in a run without a memory plan; a run with a plan uses the plan's limit."""
        return self.micro_batch_tokens or max(USUAL_MICRO_BATCH, self.longest_row)

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per RL iteration."""
        return self.updates_per_rollout * self.mini_batches


def replays_routes(setting: str, *, has_experts: bool, returns_routes: bool, engine: str) -> bool:
    """Return whether training uses the experts that the rollout engine chose for each token, instead of those of the
    trainer's routers. ``setting`` is the value of ``model.router_replay``; "auto" means yes if the base has experts and
    the engine returns the chosen ones. Raises ValueError if the setting is "on" and one of these two conditions does
    not hold."""
    can = has_experts and returns_routes
    if setting == "on" and not can:
        lacks = f"{engine} returns no experts" if has_experts else "the base has no mixtures of experts"
        raise ValueError(f"model.router_replay is on and {lacks}: set it to auto")
    return can and setting != "off"


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for sampling settings that training cannot use: greedy sampling, top_p or top_k, or only one
    completion per prompt."""
    if sampling.temperature == 0:
        raise ValueError("model.sampling.temperature is 0; training explores by sampling: set it above 0, e.g. 1.0")
    if sampling.num_completions < 2:
        raise ValueError(
            f"model.sampling.num_completions is {sampling.num_completions}; advantages compare the completions of "
            "one prompt, so expected at least 2"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ValueError(
            f"model.sampling has top_p {sampling.top_p} and top_k {sampling.top_k}; training samples from all "
            "tokens, top_p 1 and top_k 0: otherwise the sampler's log-probabilities would be normalised over the kept "
            "tokens, and the trainer's over all tokens. Evaluation may truncate: model.val_sampling"
        )
