"""LoRA adapters on frozen linear layers, using PEFT; fp32 master weights, and matrix products in the compute dtype."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.common.checks import require_finite
from qerl_pl.model.family import MLP, PROJECTIONS, Family
from qerl_pl.policy.kept import active
from qerl_pl.policy.lora_experts import expert_rank, with_experts
from qerl_pl.policy.lora_product import Adapted, lora_product, lora_products
from qerl_pl.policy.start import StartAdapter, read_start
from qerl_pl.quant.linear import FrozenLinear


@dataclass(frozen=True)
class LoraSettings:
    """Settings of the adapter, y = W x + (alpha / rank) B A x (arXiv 2106.09685).

    Args:
        rank: inner dimension of A and B; null: the rank of ``start``, or 32 without ``start``.
        alpha: numerator of the factor alpha / rank that multiplies B A (alpha / sqrt(rank) with ``rslora``); null: the
            alpha of ``start``, or 32 without ``start``.
        dropout: dropout on the adapter's input while training. Above 0, training takes more memory, and the trainer's
            log-probabilities differ from those that the engine samples with, because the engine has no dropout.
        targets: names of the linear layers that get an adapter, of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj
            and down_proj; null: those of ``start``, or all without ``start``. Phi-3 and Phi-4 store q_proj, k_proj and
            v_proj as one linear layer, qkv_proj; naming all three means qkv_proj, and naming gate_proj and up_proj
            means gate_up_proj. In a mixture-of-experts model, gate_proj, up_proj and down_proj together mean the linear
            layers of all experts; MLPs of blocks without experts stay frozen there.
        rslora: scale by alpha / sqrt(rank) (arXiv 2312.03732); null: the setting of ``start``, or false without
            ``start``.
        train_norms: also train the weights of two norms of every block (as QeRL's published code does, unlike its
            paper).
        expert_rank: rank of the adapters on the experts of a mixture-of-experts model. Their B A is multiplied by the
            same factor as in other linear layers. 0: experts get no adapters; null: that of ``start``, or without
            ``start`` rank / k, at least 1, where k experts compute each token.
        start: folder of an adapter that PEFT wrote, with which the run starts, for example after supervised
            fine-tuning; it is also the reference of the KL penalty. null: B starts at 0, so the run starts at the base.
    """

    rank: int | None = None
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    rslora: bool | None = None
    train_norms: bool = False
    expert_rank: int | None = None
    start: str | None = None

    def __post_init__(self) -> None:
        usual = {"rank": 32, "alpha": 32, "targets": PROJECTIONS, "rslora": False, "expert_rank": None}
        for name, value in usual.items():
            setting = getattr(self, name)
            has = value if self.start is None else getattr(self.starts_at, name)
            if setting is None:
                object.__setattr__(self, name, has)
            elif self.start is not None and _sorted(setting) != _sorted(has):
                raise ValueError(
                    f"model.lora.{name} is {_sorted(setting)} and the adapter {self.start} (model.lora.start) has "
                    f"{_sorted(has)}; set model.lora.{name} to null, which takes the adapter's"
                )
        if self.start is not None and bool(self.starts_at.modules_to_save) != self.train_norms:
            raise ValueError(
                f"model.lora.train_norms is {self.train_norms} and the adapter {self.start} (model.lora.start) has "
                f"modules_to_save = {list(self.starts_at.modules_to_save)}; expected them in both or in neither"
            )
        rank, alpha, targets, _ = self.filled_in()
        require_finite("model.lora", alpha=alpha, dropout=self.dropout)
        if rank < 1:
            raise ValueError(f"model.lora.rank is {rank}; expected at least 1")
        if self.expert_rank is not None and self.expert_rank < 0:
            raise ValueError(f"model.lora.expert_rank is {self.expert_rank}; expected 0 or more")
        if alpha <= 0:
            raise ValueError(f"model.lora.alpha is {alpha}; expected more than 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.lora.dropout is {self.dropout}; expected 0 or more and less than 1")
        if not targets:
            raise ValueError("model.lora.targets is empty; name at least one linear, e.g. q_proj")

    def filled_in(self) -> tuple[int, float, tuple[str, ...], bool]:
        """Return rank, alpha, targets and rslora, which the constructor has filled in, as values that are not None."""
        assert self.rank is not None
        assert self.alpha is not None
        assert self.targets is not None
        assert self.rslora is not None
        return self.rank, self.alpha, self.targets, self.rslora

    def of_base(self, chosen: int) -> Self:
        """Return these settings for a base model in which ``chosen`` experts compute each token (0 for a dense model):
        ``expert_rank``, the rank of the adapters on experts, has its value for this model in place of None. Raises
        ValueError if ``expert_rank`` is set but experts get no adapters, or if experts get adapters and ``dropout`` is
        above 0."""
        rank, _, targets, _ = self.filled_in()
        found = expert_rank(rank, self.expert_rank, targets, chosen)
        if self.expert_rank and not found:
            why = "model.lora.targets lacks gate_proj, up_proj or down_proj" if chosen else "model.base has no experts"
            raise ValueError(f"model.lora.expert_rank is {self.expert_rank} and {why}; set it to null")
        if found and self.dropout:
            raise ValueError(
                f"model.lora.dropout is {self.dropout}, which adapters on experts do not support; set it to 0, or "
                "model.lora.expert_rank to 0"
            )
        return replace(self, expert_rank=found)

    @cached_property
    def starts_at(self) -> StartAdapter:
        """The adapter that ``start`` names."""
        assert self.start is not None
        return read_start(self.start)


def open_settings() -> LoraSettings:
    """Create ``LoraSettings`` without running the constructor, so that all fields which a user may leave open are still
    None. It is the default value of the command line's option. If a user sets only ``start``, the command line applies
    ``dataclasses.replace`` to this object. This runs the constructor, which takes every field that is None from the
    adapter ``start``. If the default had numbers there, they would count as the user's."""
    settings = object.__new__(LoraSettings)
    for field in fields(LoraSettings):
        object.__setattr__(settings, field.name, field.default)
    return settings


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, tuple | list) else value


class LoraLinear(nn.Module, LoraLayer):
    """PEFT layer that adds a LoRA adapter to a frozen linear layer, dense or quantised.

    The adapter is never merged into the base, because 4-bit weights could not represent its small B A. PEFT's own
    layer casts the input to the dtype of A and B, so with fp32 master weights it would compute matrix products in fp32.
    This layer casts the fp32 master weights to the input's dtype instead. vLLM holds A and B in this dtype, too.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.keeps_result = True
        """Whether selective gradient checkpointing stores this layer's output, because backward needs it."""
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        # PEFT casts a new adapter to the base's dtype, so it is cast back to fp32: bf16 master weights would lose
        # updates smaller than 2^-8 of a weight.
        self.lora_A.float()
        self.lora_B.float()

    def adapted(self) -> Adapted | None:
        """Return the layer's weight and adapter for ``lora_products``; None if the adapter is disabled or applies
        dropout, which ``lora_products`` does not support."""
        (name,) = self.active_adapters
        if self.disable_adapters or not isinstance(self.lora_dropout[name], nn.Identity):
            return None
        base: Any = self.base_layer
        return Adapted(
            base.dense if isinstance(base, FrozenLinear) else base.weight.to,
            base.bias,
            self.lora_A[name].get_parameter("weight"),
            self.lora_B[name].get_parameter("weight"),
            self.scaling[name],
            active() if self.keeps_result else None,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the frozen linear plus its adapter for x [..., K]; returns [..., N] in x's dtype."""
        if self.disable_adapters:
            return self.base_layer(x)
        if adapted := self.adapted():
            return lora_product(x, adapted)
        (name,) = self.active_adapters
        a, b = self.lora_A[name].get_parameter("weight"), self.lora_B[name].get_parameter("weight")
        inner = F.linear(self.lora_dropout[name](x), a.to(x.dtype))
        return self.base_layer(x) + F.linear(inner, (b * self.scaling[name]).to(x.dtype))


def apply_linears(x: Tensor, linears: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Apply several linear layers with K inputs to the same x [..., K]. If all have adapters, they become one node of
    the autograd graph."""
    adapted = [linear.adapted() if isinstance(linear, LoraLinear) else None for linear in linears]
    whole = [linear_adapted for linear_adapted in adapted if linear_adapted is not None]
    return lora_products(x, whole) if len(whole) == len(linears) else tuple(linear(x) for linear in linears)


def peft_config(settings: LoraSettings, *, base: str, norms: Sequence[str]) -> LoraConfig:
    """Build PEFT's configuration of the adapter, with ``LoraLinear`` as its layer. PEFT writes the name ``base`` to
    adapter_config.json. ``norms`` are the names of a block's norms that are trained if ``train_norms`` is set."""
    rank, alpha, targets, rslora = settings.filled_in()
    experts = settings.expert_rank or 0
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  (PEFT annotates int and divides)
        lora_dropout=settings.dropout,
        target_modules=sorted(name for name in targets if not (experts and name in MLP)),
        use_rslora=rslora,
        modules_to_save=list(norms) if settings.train_norms else None,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    config._register_custom_module({FrozenLinear: LoraLinear, nn.Linear: LoraLinear})
    return with_experts(config, experts, alpha / (rank**0.5 if rslora else rank))


def check_targets(model: nn.Module, targets: tuple[str, ...], family: Family) -> None:
    """Raise ValueError if a name in ``targets`` matches no linear layer of the model, or is not one of the layers of a
    decoder block that the model family lists (``Family.projections``). PEFT raises no error in either case; an adapter
    on another layer, such as the output head, would never be trained."""
    linears = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if hasattr(module, "in_features")}
    unmatched = [target for target in targets if target not in linears]
    if unmatched:
        raise ValueError(
            f"model.lora.targets has {unmatched}, which match no linear of the model; it has {sorted(linears)}"
        )
    outside = [target for target in targets if target not in family.projections]
    if outside:
        raise ValueError(
            f"model.lora.targets has {outside}, which are no projections of the blocks; expected some of "
            f"{', '.join(family.projections)} (the head's weight is read directly: an adapter on it would never "
            "be trained)"
        )
