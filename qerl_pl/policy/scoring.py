"""Run a causal language model over packed rows: hidden states at chosen tokens, and the head that reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qerl_pl.model.family import Family
from qerl_pl.policy.logprobs import Head
from qerl_pl.policy.packing import pack_for, packed_hidden_states
from qerl_pl.policy.shared_prompts import attends_to_everything


def head_of(model: PreTrainedModel, family: Family, temperature: float) -> Head:
    """Describe how a model's hidden states become the distribution that is sampled from at a temperature."""
    divisor = 1.0 if family.logit_divisor is None else getattr(model.config, family.logit_divisor)
    cap = None if family.logit_cap is None else getattr(model.config, family.logit_cap)
    embeddings = model.get_output_embeddings()
    assert embeddings is not None
    return Head(embeddings.get_parameter("weight"), temperature * divisor, cap)


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether a pass computes a prompt that several rows share only once: on a GPU in 16 bits, if all layers have full
    attention."""
    return model.device.type == "cuda" and model.dtype != torch.float32 and attends_to_everything(model.config)


def predicting(model: PreTrainedModel, tokens: Tensor, mask: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the indices of the N masked tokens [B, S], and the hidden states [N, H] from which they are predicted."""
    packed, before = pack_for(tokens, mask, share=shares_prompts(model))
    hidden = packed_hidden_states(model.model, packed)  # [T, H]
    return mask.nonzero(as_tuple=True), hidden.index_select(0, before)
