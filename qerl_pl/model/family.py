"""Table of the supported model families, by transformers' ``model_type``. Other modules read the fields of a
``Family``, and never test which family a model belongs to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of the linear layers of a decoder block in most families."""
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Maps a linear layer that some families store as one merged matrix to the separate layers of other families."""
INSTEAD = {"in_proj_qkv": MERGED["qkv_proj"], "in_proj_z": MERGED["qkv_proj"], "out_proj": ("o_proj",)}
"""Maps each linear layer of a gated delta net, which some blocks have in place of attention, to linear layers of
attention. The layer of the gated delta net gets a LoRA adapter if ``model.lora.targets`` names all of those layers of
attention."""
MLP = ("gate_proj", "up_proj", "down_proj")
Elementwise = Literal["norms", "mlp", "attention"]


class Experts(NamedTuple):
    """Keys of config.json under which a family describes its mixtures of experts."""

    number: str = "num_experts"
    """Number of experts of a block, E."""
    chosen: str = "num_experts_per_tok"
    """Number of experts that compute each token, k."""
    inner: str = "moe_intermediate_size"
    """Inner size of an expert."""
    normalised: str = "norm_topk_prob"
    """Whether the weights of the chosen experts are divided by their sum; in families without this key, they always
    are."""
    shared: str | None = None
    """Inner size of a shared expert, which computes every token; None: the family has none, or gives its size by
    ``shared_number``."""
    shared_number: str | None = None
    """Number of experts of size ``inner`` that compute every token, which are stored as one larger expert."""
    correction: str | None = None
    """Name of a learned parameter of the router (not a key of config.json) that is added to the router's scores when
    experts are chosen, but not when the weights of their outputs are computed from the scores. None: the family has
    none. With this parameter, scores are sigmoids of the router's logits, without it a softmax over the experts."""
    scale: str | None = None
    """Number by which the weights of the chosen experts are multiplied; None: they are not multiplied."""
    groups: tuple[str, ...] = ()
    """Keys with numbers of groups of experts, which must be 1: routers that choose groups first are not supported."""
    dense_blocks: str | None = None
    """Number of blocks with a dense MLP before the first block with experts; None: all blocks have experts."""

    def shared_inner(self, config: object) -> int:
        """Return the inner size of the expert that computes every token; 0 if there is none."""
        if self.shared_number is not None:
            return getattr(config, self.shared_number) * getattr(config, self.inner)
        return 0 if self.shared is None else getattr(config, self.shared)


@dataclass(frozen=True)
class Family:
    """Description of a model family's decoder blocks for quantisation, LoRA adapters, adaptive quantization noise and
    memory planning. Linear layers and norms are given by their attribute names within a block, e.g. ``q_proj``."""

    projections: tuple[str, ...] = PROJECTIONS
    """Linear layers that LoRA may adapt."""
    fused: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    """Groups of linear layers that inference engines fuse into one matrix, which in NVFP4 has a single tensor scale."""
    last_linear: str = "down_proj"
    """Last linear layer of a block, whose output is only added to the residual stream."""
    noise_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms of a block to whose weights adaptive quantization noise (AQN) is added in rollouts, and which are trained
    if ``train_norms`` is set."""
    elementwise: frozenset[Elementwise] = frozenset({"norms", "mlp", "attention"})
    """Operations of a block that ``policy/elementwise.py`` may replace by liger-kernel's fused kernels, because the
    kernels compute the same function as this family does. The names are "norms", "mlp" (for its SwiGLU) and "attention"
    (for its rotary embeddings)."""
    logit_divisor: str | None = None
    """Key in config.json of the number by which the model divides its logits; None: it does not divide them."""
    logit_cap: str | None = None
    """Key in config.json of the soft cap c of the logits, c tanh(logits / c); None, or a null value: no soft cap."""
    keys_as_values: bool = False
    """Whether blocks that have no v_proj use the output of k_proj, its LoRA adapter included, as values of attention;
    keys and values are then normalised by different norms."""
    dense: tuple[str, ...] = ()
    """Linears that stay in 16 bits and get no adapter: they are small, and errors in them would have large effects,
    because the model takes an exponential of their output, or chooses experts by it."""
    fp32: tuple[str, ...] = ()
    """Parameters that trainer and vLLM both hold in fp32, by the last components of their names, such as
    ``gate.weight``."""
    needed: tuple[str, ...] = ()
    """Keys of config.json without which vLLM does not start, although transformers has default values for them."""
    refused: tuple[tuple[str, str], ...] = ()
    """Keys of config.json whose values must be null, false or 0, because the feature that they enable is not supported;
    each with a description of this feature for the error message."""
    partial_rotary: bool = False
    """Whether transformers can apply rotary embeddings of the usual kind to only a part of each head. vLLM can do so in
    all families."""
    one_window: bool = False
    """Whether vLLM supports this family only if all blocks have a sliding attention window, or none has."""
    experts: Experts | None = None
    """Keys of config.json that describe mixtures of experts; None: the family has none. Dense MLPs of a family with
    mixtures get no adapters."""

    def stays_dense(self, linear: str) -> bool:
        """Return whether a linear layer, given by its full name, is one of ``dense``."""
        return linear.rpartition(".")[2] in self.dense

    def in_fp32(self, parameter: str) -> bool:
        """Return whether a parameter, given by its full name, is one of ``fp32``."""
        return f".{parameter}".endswith(tuple(f".{name}" for name in self.fp32))

    def targets(self, names: Collection[str]) -> tuple[str, ...]:
        """Translate the layer names given as LoRA targets to the linear layers of this family.

        If the family stores several layers as one merged matrix, such as q_proj, k_proj and v_proj as qkv_proj, their
        names are replaced by that of the matrix. In families with mixture-of-experts layers, gate_proj, up_proj and
        down_proj together mean the experts; they are left out of the result, which lists linear layers only. Raises
        ValueError if only some of the layers of a merged matrix are named, or, in families with mixture-of-experts
        layers, only some of gate_proj, up_proj and down_proj, or nothing else than these three.
        """
        targets = list(names)
        if self.experts is not None and set(MLP) & set(names):
            targets = [name for name in names if name not in MLP]
            if not targets or not set(MLP) <= set(names):
                raise ValueError(
                    f"model.lora.targets is {sorted(names)}; in a mixture of experts, gate_proj, up_proj and down_proj "
                    "together mean the experts: name all three or none, and at least one linear of attention"
                )
        targets += [name for name, parts in INSTEAD.items() if name in self.projections and set(parts) <= set(names)]
        for merged, parts in MERGED.items():
            named = [part for part in parts if part in targets]
            if merged not in self.projections or not named:
                continue
            if len(named) < len(parts):
                raise ValueError(
                    f"model.lora.targets has {named}, which are a part of {merged} in this model; name {merged}, or "
                    f"none of {', '.join(parts)}"
                )
            targets = [merged, *(name for name in targets if name not in parts and name != merged)]
        return tuple(targets)


_NORMS_AFTER = Family(
    noise_norms=("post_attention_layernorm", "post_feedforward_layernorm"), elementwise=frozenset({"mlp"})
)
# Gemma has norms both before and after attention and MLP.
_GEMMA = Family(
    noise_norms=("input_layernorm", "pre_feedforward_layernorm"),
    elementwise=frozenset(),
    logit_cap="final_logit_softcapping",
)
_GEMMA4 = replace(
    _GEMMA,
    keys_as_values=True,
    refused=(
        ("hidden_size_per_layer_input", "embeddings per layer (E2B, E4B)"),
        ("num_kv_shared_layers", "layers that share keys and values (E2B, E4B)"),
    ),
)
_MERGED = Family(
    projections=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    elementwise=frozenset({"norms"}),
    partial_rotary=True,
)
# In Qwen3.5 three of four layers are gated delta nets instead of attention.
_QWEN35 = Family(
    projections=(*PROJECTIONS, *INSTEAD),
    fused=(*Family.fused, ("in_proj_qkv", "in_proj_z")),
    elementwise=frozenset({"mlp"}),
    dense=("in_proj_b", "in_proj_a"),
    fp32=("A_log",),
    partial_rotary=True,
)
# Mixtures of experts of Qwen3.5 add the output of an expert that computes every token, multiplied by the sigmoid of a
# gate.
_QWEN35_MOE = replace(
    _QWEN35,
    projections=(*PROJECTIONS[:4], *INSTEAD),
    elementwise=frozenset(),
    dense=(*_QWEN35.dense, "gate", "shared_expert_gate"),
    experts=Experts(shared="shared_expert_intermediate_size"),
)
# In GLM-4.5, rotary embeddings turn a part of each head only.
_GLM4_MOE = Family(
    projections=PROJECTIONS[:4],
    elementwise=frozenset({"norms"}),
    dense=("gate",),
    fp32=("gate.weight", "gate.e_score_correction_bias"),
    needed=("head_dim",),
    partial_rotary=True,
    experts=Experts(
        number="n_routed_experts",
        shared_number="n_shared_experts",
        correction="e_score_correction_bias",
        scale="routed_scaling_factor",
        groups=("n_group", "topk_group"),
        dense_blocks="first_k_dense_replace",
    ),
)
# The fused kernel for rotary embeddings cannot compute these families: Ministral 3 also scales queries by a function of
# their position, and SmolLM3 has rotary embeddings in some of its layers only.
_OWN_ATTENTION = Family(elementwise=frozenset({"norms", "mlp"}))

_CHUNKS = ("dual_chunk_attention_config", "attention in chunks (the models of a million tokens)")
_BIASES = ("attention_bias", "biases in attention, which vLLM does not have in this family,")
_QWEN = Family(refused=(_CHUNKS,), one_window=True)

FAMILIES: Mapping[str, Family] = {
    "qwen2": _QWEN,
    "qwen3": replace(_QWEN, refused=(_CHUNKS, _BIASES)),
    "llama": Family(),
    "mistral": Family(),
    "ministral3": _OWN_ATTENTION,
    "granite": replace(Family(), logit_divisor="logits_scaling"),
    "smollm3": _OWN_ATTENTION,
    "olmo3": _NORMS_AFTER,
    "phi3": _MERGED,  # the model_type of Phi-3, Phi-3.5 and Phi-4
    "gemma3_text": replace(_GEMMA, refused=(("attn_logit_softcapping", "a soft cap of attention scores"),)),
    "gemma4_text": _GEMMA4,
    "qwen3_5_text": replace(_QWEN35, refused=(_BIASES,)),  # the model_type of Qwen3.5 and Qwen3.6
    "qwen3_5_moe_text": replace(_QWEN35_MOE, refused=(_BIASES,)),
    "qwen3_moe": replace(
        _QWEN,
        projections=PROJECTIONS[:4],
        elementwise=frozenset({"norms", "attention"}),
        dense=("gate",),
        refused=(_CHUNKS, _BIASES),
        experts=Experts(),
    ),
    "glm4_moe": _GLM4_MOE,  # the model_type of GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7
}


def family_of(model_type: object, *, path: object) -> Family:
    """Return a model family by config.json's ``model_type``. Raises ValueError, which names ``path``, if the family is
    not supported."""
    if model_type not in FAMILIES:
        raise ValueError(f"{path} is a {model_type!r} model; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[str(model_type)]


def with_merged(names: Collection[str]) -> tuple[str, ...]:
    """Extend LoRA targets, given by the layer names that most model families use, by the names of the corresponding
    layers in other families: merged matrices, such as qkv_proj if q_proj, k_proj and v_proj are all given, and layers
    of gated delta nets. Returns the given names, then the additional ones."""
    return (*names, *(other for other, parts in {**MERGED, **INSTEAD}.items() if set(parts) <= set(names)))
