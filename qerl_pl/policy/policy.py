"""The policy that is trained: a Hugging Face causal language model with a frozen base and a LoRA adapter."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import PretrainedConfig, PreTrainedModel

from qerl_pl.model.family import Family, family_of
from qerl_pl.noise.fp32_norms import output_in_input_dtype
from qerl_pl.policy.attention import use_packed_attention
from qerl_pl.policy.delta_net import use_packed_delta_nets
from qerl_pl.policy.divergence import divergence
from qerl_pl.policy.elementwise import FusedSetting, fused_wanted, liger_elementwise, use_elementwise
from qerl_pl.policy.evidence import alternative_logprobs
from qerl_pl.policy.logprobs import CHUNK_BYTES, Head, fp32_logits, head_of, soft_capped, token_logprobs
from qerl_pl.policy.lora import LoraSettings, check_targets, peft_config
from qerl_pl.policy.lora_experts import adapt_experts
from qerl_pl.policy.margins import is_audited, keyed_noise, margins, row_keys, token_keys
from qerl_pl.policy.packing import predicting, shares_prompts
from qerl_pl.policy.recompute import Recompute, Setting, apply_recompute, ladder, recompute_of
from qerl_pl.quant.experts import Mixture, Routing, mixtures, packed_experts, use_replay
from qerl_pl.quant.formats import Format
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import load_base

ADAPTER = "default"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Compute dtypes by their names in the setting ``model.dtype``."""


class TokenStats(NamedTuple):
    """Results of a forward pass of the policy for B rows of S tokens. They are 0 for tokens that the caller did not
    select by its mask, unless a field says otherwise."""

    logprobs: Tensor
    """[B, S] fp32 in nats, log-probability of each token given the previous tokens."""
    entropy: Tensor
    """[B, S] fp32 in nats, entropy of the distribution of the token given the previous tokens."""
    others: Tensor | None = None
    """[B, S, L] uint8: how many of the experts that the caller prescribed (``routes``) the router would not have
    chosen, in each of L mixture-of-experts layers, or ``UNSEEN`` for tokens that were not computed. None if the routers
    chose."""
    divergence: Tensor | None = None
    """[B, S] fp32 in nats, divergence from the teacher's distribution; None: no teacher was given."""
    agrees: Tensor | None = None
    """[B, S] bool, True where teacher and policy have the same most likely token; None: no teacher was given."""


class TeacherStates(NamedTuple):
    """Results of a teacher at N tokens, from which the divergence of the policy from it is computed."""

    hidden: Tensor
    """[N, H'], last hidden states from which the tokens are predicted, in row-major order of the masked tokens."""
    head: Head
    beta: float
    """Weight of the teacher in the divergence (``policy.divergence``)."""


class Policy(nn.Module):
    """Policy that is trained: a frozen base with an adapter. ``load_policy`` builds it."""

    def __init__(self, model: PeftModel, *, base: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.base = base
        self.dtype = dtype
        self.recompute = Recompute()
        self.recompute_is_open = False
        """Whether ``recompute_more`` may change the level of gradient checkpointing."""
        self.start: dict[str, Tensor] | None = None
        """Tensors of the adapter with which the run started, fp32 on the CPU; None if it started at the base."""
        self.replays_routes = False
        """Whether rollout engines must return the experts that their routers chose, because training uses them."""
        use_packed_attention(self.causal_lm)
        use_replay(self.causal_lm)
        use_packed_delta_nets(self.causal_lm)

    @property
    def causal_lm(self) -> Any:  # a PreTrainedModel; torch's type for a module's attributes is Tensor | Module
        """The Hugging Face model, including its adapter layers, without PEFT's wrapper."""
        return self.model.get_base_model()

    @property
    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration of the base."""
        return self.causal_lm.config

    @property
    def family(self) -> Family:
        """The description of the base's family."""
        return family_of(self.config.model_type, path=self.base)

    @property
    def peft_config(self) -> LoraConfig:
        """PEFT's configuration of the adapter."""
        config = self.model.peft_config[ADAPTER]
        assert isinstance(config, LoraConfig)
        return config

    @property
    def num_layers(self) -> int:
        """Number of decoder blocks."""
        return self.config.num_hidden_layers

    @property
    def lora_scaling(self) -> float:
        """Factor of B A: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        config = self.peft_config
        return config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)

    @property
    def expert_rank(self) -> int:
        """Rank of the adapters on experts; 0 without any."""
        return max((self.peft_config.rank_pattern or {}).values(), default=0)

    def set_recompute(self, how: Recompute) -> None:
        """Set the level of gradient checkpointing for the next forward passes."""
        self.recompute = how
        apply_recompute(self.causal_lm, how)

    def recompute_more(self) -> Setting | None:
        """Switch to the next level of gradient checkpointing, which needs less memory; it is called after a forward or
        backward pass ran out of memory. Returns the value of the setting ``model.gradient_checkpointing`` that means
        the new level. If there is no further level, or the user's setting is not "auto", this changes nothing and
        returns None."""
        less = next((how for how in ladder(self.num_layers) if how > self.recompute), None)
        if less is None or not self.recompute_is_open:
            return None
        self.set_recompute(less)
        return less.setting(self.num_layers)

    def adapter_state(self) -> dict[str, Tensor]:
        """Return the trained tensors by PEFT's names: fp32, detached, and sharing memory with the parameters."""
        return {name: module.get_parameter(leaf).detach() for name, (module, leaf) in self._trained.items()}

    @cached_property
    def _trained(self) -> dict[str, tuple[nn.Module, str]]:
        """Map PEFT's names of the trained tensors to the module and attribute that hold each; cached, because PEFT's
        lookup walks the whole model."""
        live = self.model.state_dict(keep_vars=True)
        state = get_peft_model_state_dict(self.model, live, adapter_name=ADAPTER, save_embedding_layers=False)
        places = {id(own): (module, leaf) for module in self.modules() for leaf, own in module._parameters.items()}
        return {name: places[id(parameter)] for name, parameter in state.items()}

    def load_adapter_state(self, adapter: Mapping[str, Tensor]) -> None:
        """Copy the values of an adapter into the policy's adapter. Raises ValueError if names or shapes of the two
        differ."""
        live = self.adapter_state()
        check_same_tensors(adapter, live)
        for name, tensor in adapter.items():
            live[name].copy_(tensor)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Make the model compute, inside the context, what it computed when the run began: with the adapter ``start``
        or, if there is none, with the base alone."""
        if self.start is None:
            with self.model.disable_adapter():
                yield
            return
        with self.with_adapter(self.start):
            yield

    @contextmanager
    def with_adapter(self, adapter: Mapping[str, Tensor]) -> Iterator[None]:
        """Make the model compute, inside the context, with the values of another adapter, whose names and shapes must
        be those of ``adapter_state``."""
        parameters = {name: module.get_parameter(leaf) for name, (module, leaf) in self._trained.items()}
        current = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = adapter[name].to(parameter.device)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = current[name]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set evaluation mode inside the context; afterwards every module has the mode that it had before."""
        modes = [(module, module.training) for module in self.modules()]
        try:
            self.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training

    def norm_modules(self) -> dict[str, nn.Module]:
        """Return the norms of all decoder blocks that get noise during rollouts (``Family.noise_norms``), by the names
        of their weights, such as ``model.layers.0.input_layernorm.weight``: the base's modules or, if they are trained,
        PEFT's copies."""
        modules = {}
        for index, block in enumerate(self.causal_lm.model.layers):
            for attribute in self.family.noise_norms:
                module = getattr(block, attribute)
                if hasattr(module, "modules_to_save"):  # PEFT's wrapper around a module that is trained in full
                    module = module.modules_to_save[ADAPTER]
                modules[f"model.layers.{index}.{attribute}.weight"] = module
        return modules

    def norm_weights(self) -> dict[str, Tensor]:
        """Return by name the weights of ``norm_modules`` without noise, [H] each for hidden size H."""
        return {name: module.get_parameter("weight").detach() for name, module in self.norm_modules().items()}

    def embedding_weights(self) -> dict[str, Tensor]:
        """Return by name the weights of the input embedding [V, H] and, unless it is the same tensor, of the output
        head [V, H], which vLLM shares with the trainer."""
        names = "model.embed_tokens.weight", "lm_head.weight"
        return {name: weight.detach() for name, weight in self.causal_lm.named_parameters() if name in names}

    def router_weights(self) -> dict[str, Tensor]:
        """Return the parameters of the routers of all MoE layers by name; empty for a dense model."""
        modules = self.causal_lm.named_modules()
        routers = {f"{name}.gate": module.gate for name, module in modules if isinstance(module, Mixture)}
        return {f"{name}.{leaf}": tensor for name, gate in routers.items() for leaf, tensor in gate.named_parameters()}

    @property
    def routing(self) -> Routing | None:
        """Numbers of MoE layers, of experts per layer, and of experts per token; None for a dense model."""
        found = mixtures(self.causal_lm)
        return Routing(len(found), *found[0].sizes[:2]) if found else None

    def packed_linears(self) -> dict[str, FrozenLinear]:
        """Return the linear layers with 4-bit weights, those of experts included, by their names in the base's
        checkpoint; empty if the base is dense."""
        modules = self.causal_lm.named_modules()
        linears = {
            name.removesuffix(".base_layer"): module for name, module in modules if isinstance(module, FrozenLinear)
        }
        return linears | dict(packed_experts(self.causal_lm))

    @property
    def packed_format(self) -> Format | None:
        """Format of the linear layers with 4-bit weights; None for a dense base."""
        return next((linear.fmt for linear in self.packed_linears().values()), None)

    def token_stats(
        self,
        tokens: Tensor,
        mask: Tensor,
        *,
        temperature: float,
        targets: Tensor | None = None,
        teacher: TeacherStates | None = None,
        routes: Tensor | None = None,
    ) -> TokenStats:
        """Compute log-probabilities and entropies of the tokens that a mask selects, differentiable with respect to the
        adapter. Padding and tokens after a row's last masked token are not processed.

        Args:
            tokens: [B, S] int64, right-padded with any valid token.
            mask: [B, S] bool, True for the N tokens to select. Column 0 must be False: no token precedes it.
            temperature: sampling temperature, by which logits are divided.
            targets: [N] int64, tokens whose log-probabilities are computed in place of those of the N masked tokens, in
                row-major order; the model's input does not change.
            teacher: results of a teacher at the masked tokens, to compute the divergence from it.
            routes: [B, S, L, k] integers, the k experts to use for each token in each of the model's L
                mixture-of-experts layers, also when backward recomputes a block; None: the routers choose.
        """
        wanted, hidden, others = self._predicting(tokens, mask, routes)
        targets = tokens[wanted] if targets is None else targets
        head = self.head(temperature)
        logprobs, entropy = token_logprobs(
            hidden, head.weight, targets, temperature=head.temperature, logit_cap=head.logit_cap
        )
        zeros = logprobs.new_zeros(mask.shape)
        stats = TokenStats(zeros.index_put(wanted, logprobs), zeros.index_put(wanted, entropy), others)
        if teacher is None:
            return stats
        distance, agrees = divergence(hidden, head, teacher.hidden, teacher.head, beta=teacher.beta)
        return stats._replace(
            divergence=zeros.index_put(wanted, distance), agrees=torch.zeros_like(mask).index_put(wanted, agrees)
        )

    @torch.no_grad()
    def sampled_as(
        self,
        tokens: Tensor,
        mask: Tensor,
        *,
        temperature: float,
        end_tokens: Sequence[int],
        routes: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute, for each of the N masked tokens in row-major order, what the tests of rollouts need.

        ``tokens``, ``mask``, ``temperature`` and ``routes`` (rows, tokens to select, sampling temperature, experts to
        use) are arguments of ``token_stats`` too; ``end_tokens`` are the tokens that end a completion. ``seeds`` [B]
        int64 are the seeds of the requests with which vLLM sampled the rows on a GPU, from which the Gumbel noise of
        its sampler is computed (``margins.keyed_noise``); None for other engines.

        Returns:
            Log-probabilities under the policy and under K faulty ways to sample, such as another temperature,
            [N, 1 + K] in nats (``evidence.alternative_logprobs``); and margins, [N] fp32 in nats: by how much the sum
            of logit and noise of the token that wins under the trainer's logits exceeds that of the sampled token
            (``margins.margins``), 0 without seeds and for tokens that ``margins.is_audited`` excludes.
        """
        ends = torch.tensor(end_tokens, dtype=torch.int64, device=tokens.device)
        (row, column), hidden, _ = self._predicting(tokens, mask, routes)
        head = self.head(temperature)
        size = max(1, CHUNK_BYTES // (10 * 4 * len(head.weight)))  # ten fp32 tensors of [size, V] at a time
        # Each chunk needs many small kernels, so what does not depend on its logits is computed once for all of them.
        of_tokens = None if seeds is None else token_keys(len(head.weight), tokens.device)
        of_rows = torch.zeros_like(row) if seeds is None else row_keys(seeds[row], column - 1)
        chunks = (hidden.split(size), tokens[row, column].split(size), of_rows.split(size))
        alternatives, audited = [], []
        for inputs, targets, keys in zip(*chunks, strict=True):
            logits = soft_capped(fp32_logits(inputs, head.weight), head.logit_cap) / head.temperature
            alternatives.append(alternative_logprobs(logits, targets, ends))
            audited.append(logits.new_zeros(len(targets)))
            if of_tokens is not None:
                some = is_audited(alternatives[-1][:, 0]).nonzero()[:, 0]  # as a mask, each use would wait for the GPU
                audited[-1][some] = margins(logits[some], keyed_noise(keys[some], of_tokens), targets[some])
        return torch.cat(alternatives), torch.cat(audited)

    @property
    def shares_prompts(self) -> bool:
        """Whether a forward pass computes a prompt only once for all rows that have it (``packing.shares_prompts``)."""
        return shares_prompts(self.causal_lm)

    def head(self, temperature: float) -> Head:
        """Return the output head, the divisor of its logits (the sampling temperature ``temperature`` times the model's
        own divisor), and the model's soft cap of logits, None if it has none."""
        return head_of(self.causal_lm, self.family, temperature)

    def _predicting(
        self, tokens: Tensor, mask: Tensor, routes: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        with save_on_cpu(pin_memory=tokens.is_cuda) if self.recompute.offload else nullcontext():
            return predicting(self.causal_lm, tokens, mask, routes)


def check_same_tensors(adapter: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless an ``adapter`` has tensors of exactly the names and shapes of ``expected``, all of
    floating-point numbers."""
    missing, unknown = sorted(expected.keys() - adapter.keys()), sorted(adapter.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"the adapter does not fit the policy: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unknown)} are unknown {unknown[:3]}"
        )
    for name, tensor in adapter.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"adapter tensor {name} is of {kind}; expected floating-point numbers")
        if tensor.shape != expected[name].shape:
            raise ValueError(f"adapter tensor {name} is {list(tensor.shape)}; expected {list(expected[name].shape)}")


def load_policy(base: str, *, dtype: torch.dtype, device: torch.device | str = "cpu", **settings: Any) -> Policy:
    """Load the base model in the checkpoint folder ``base``, dense or 4-bit, and add a new LoRA adapter. The other
    arguments are those of ``make_policy``. Raises ValueError if the folder holds no supported model, or if
    ``make_policy`` raises it."""
    return make_policy(load_base(base, dtype=dtype, device=device), base=base, dtype=dtype, **settings)


def make_policy(
    model: PreTrainedModel,
    *,
    base: str,
    dtype: torch.dtype,
    lora: LoraSettings,
    seed: int,
    gradient_checkpointing: Setting = "none",
    fused_elementwise: FusedSetting = False,
) -> Policy:
    """Build a policy by adding a new LoRA adapter to a loaded base model.

    Args:
        model: the base.
        base: its checkpoint folder.
        dtype: compute dtype; the adapter's master weights are always fp32.
        lora: settings of the adapter. LoRA's B starts at 0, so a new policy equals the base, unless the setting
            ``start`` names the folder of an adapter to begin with.
        seed: seed of the adapter's initial values; torch's global random state is not changed.
        gradient_checkpointing: what backward recomputes, see ``policy.recompute``; "auto" begins without recomputation.
        fused_elementwise: whether liger-kernel computes norms, rotary embeddings and SwiGLU; "auto": yes on a GPU, if
            it is installed.

    Raises:
        ValueError: a setting does not fit the base, another setting or this machine.
    """
    family = family_of(model.config.model_type, path=base)
    how = recompute_of(gradient_checkpointing, model.config.num_hidden_layers)
    assert lora.targets is not None
    targets = family.targets(lora.targets)
    check_targets(model, targets, family)
    found = mixtures(model)
    lora = lora.of_base(found[0].chosen if found else 0)
    fresh = replace(lora, targets=targets, start=None)
    on_gpu = model.device.type == "cuda"
    fused = fused_wanted(fused_elementwise)
    if fused_elementwise is True and not on_gpu:
        raise ValueError("model.fused_elementwise is true and there is no GPU, which its kernels need: say auto")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT knows neither FrozenLinear, which ``peft_config`` registers, nor stacked experts.
        warnings.filterwarnings(
            "ignore", message="Unsupported layer type|target_parameters=|The following (rank|alpha)_pattern keys"
        )
        torch.manual_seed(seed)
        config = peft_config(fresh, base=base, norms=family.noise_norms)
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=True)
        assert isinstance(peft_model, PeftModel)
        policy = Policy(peft_model, base=base, dtype=dtype)
        if lora.expert_rank:
            adapt_experts(model, config, ADAPTER, rank=lora.expert_rank, scale=policy.lora_scaling)
    if lora.train_norms:
        for module in policy.norm_modules().values():
            module.float()
            module.register_forward_hook(output_in_input_dtype)
    if lora.start is not None:
        policy.start = lora.starts_at.tensors
        try:
            policy.load_adapter_state(policy.start)
        except ValueError as error:
            raise ValueError(f"model.lora.start is {lora.start}: {error}") from error
    if fused and on_gpu:
        use_elementwise(policy.causal_lm, liger_elementwise())
    policy.set_recompute(how or Recompute())
    policy.recompute_is_open = how is None
    return policy.train()
