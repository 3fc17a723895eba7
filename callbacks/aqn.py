"""Adaptive Quantization Noise (AQN): scheduled Gaussian noise on the norm weights of the model that samples
rollouts."""

from typing import Any, Literal

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.seeding import derive_seed
from qerl_pl.module import QeRLModule
from qerl_pl.noise.norm_noise import NormNoise, realized_sigma
from qerl_pl.noise.schedule import Decay, check_schedule, stage_of, stage_sigma


class AdaptiveQuantizationNoise(Callback):
    """Sets adaptive quantization noise (AQN, arXiv 2510.11696, section 3.3): Gaussian noise on the sampler's norm
    weights, with which each rollout is sampled. Leave the callback out to train without noise.

    The noise is added to the weights of two norms of every decoder block, one at attention and one at the MLP, only in
    the rollout engine's model, and drawn anew for each rollout. It depends only on the run's seed and the rollout
    index, so the callback has no state and a resumed run repeats the noise. The schedule spans all rollouts of the run,
    whose number is max_steps divided by the optimizer steps per rollout. Validation samples without noise.

    Args:
        sigma_start: standard deviation in the second stage, the first one with noise; not scaled by the size of the
            norm weights.
        sigma_end: standard deviation in the last stage.
        num_stages: number of equally long stages, including the first one, which has no noise; at least 3.
        decay: how the standard deviation falls from sigma_start to sigma_end over the stages: "exponential", "linear",
            "cosine" or "logarithmic"; "constant" keeps sigma_start.
        per_rank: true draws different noise on every rank, so that a gradient averages over more draws; false draws the
            same noise on all ranks, so that the gradient does not depend on the number of ranks.
        noise_precision: "float32" keeps noisy norm weights in fp32, so that all of the noise acts. "compute" rounds
            them to the compute dtype, as other implementations do, and is only for comparisons with these: rounding to
            bf16 removes a part of the noise if sigma is below about 2e-3 (``aqn/sigma_realized`` logs the root mean
            square of the noise that remains).

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.aqn.AdaptiveQuantizationNoise
              init_args: {sigma_start: 1.0e-2, sigma_end: 5.0e-4, num_stages: 10}
    """

    def __init__(
        self,
        sigma_start: float = 1e-2,
        sigma_end: float = 5e-4,
        num_stages: int = 10,
        decay: Decay = "exponential",
        per_rank: bool = False,
        noise_precision: Literal["float32", "compute"] = "float32",
    ) -> None:
        if noise_precision not in ("float32", "compute"):
            raise ValueError(f"noise_precision is {noise_precision!r}; expected 'float32' or 'compute'")
        check_schedule(num_stages=num_stages, sigma_start=sigma_start, sigma_end=sigma_end)
        if decay == "constant" and sigma_end not in (5e-4, sigma_start):
            raise ValueError(
                f"sigma_end is {sigma_end} and decay is 'constant', which keeps sigma_start ({sigma_start}): leave "
                "sigma_end out, or choose another decay"
            )
        self.sigma_start, self.sigma_end, self.num_stages = sigma_start, sigma_end, num_stages
        self.decay: Decay = decay
        self.per_rank = per_rank
        self.noise_precision: Literal["float32", "compute"] = noise_precision
        self._warned = False

    @override
    def setup(self, trainer: Trainer, pl_module: QeRLModule, stage: str) -> None:
        if stage == "fit" and pl_module.num_rollouts < self.num_stages:
            raise ValueError(
                f"the run has {pl_module.num_rollouts} rollouts for {self.num_stages} noise stages; lower num_stages "
                "or raise trainer.max_steps"
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: QeRLModule, *_: Any) -> None:
        index, num_rollouts = pl_module.rollout_index, pl_module.num_rollouts
        sigma = stage_sigma(
            index,
            num_rollouts=num_rollouts,
            num_stages=self.num_stages,
            sigma_start=self.sigma_start,
            sigma_end=self.sigma_end,
            decay=self.decay,
        )
        purpose = f"aqn/rank {trainer.global_rank}" if self.per_rank else "aqn"
        rounded = self.noise_precision == "compute"
        noise = pl_module.norm_noise = NormNoise(sigma, derive_seed(pl_module.settings.seed, purpose, index), rounded)
        pl_module.log("aqn/sigma", sigma)
        kept_in = noise.kept_in(pl_module.settings.compute_dtype)
        realized = realized_sigma(pl_module.policy.norm_weights(), noise, dtype=kept_in)
        pl_module.log("aqn/sigma_realized", realized)
        if realized < sigma / 2 and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"rounding norm weights to {kept_in} lowers the sigma of their noise from {sigma:.2e} to "
                f"{realized:.2e}, and as much or more in later stages; noise_precision: float32 keeps it"
            )
        pl_module.log("aqn/stage", float(stage_of(index, num_rollouts=num_rollouts, num_stages=self.num_stages)))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        touched = outputs["rollout"].num_noisy_norms
        expected = 2 * pl_module.policy.num_layers if pl_module.norm_noise.sigma > 0 else 0
        if touched != expected:
            raise CheckFailed(
                f"{expected} norms of the rollout engine should have noise and {touched} have it: the engine does not "
                "sample from the policy that the schedule asks for"
            )
        pl_module.log("aqn/noisy_norms", float(touched))
