"""Run a causal language model over packed rows: hidden states at chosen tokens, and the head that reads them."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qerl_pl.model.family import Family
from qerl_pl.policy.logprobs import Head
from qerl_pl.policy.packing import pack_for, packed_hidden_states
from qerl_pl.policy.shared_prompts import attends_to_everything
from qerl_pl.quant.experts import Replay


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


def predicting(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, replay: Replay | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the indices of the N masked tokens [B, S], and the hidden states [N, H] from which they are predicted.

    ``replay`` has experts [B, S, L, k]. Of its ``others`` [B, S, L], only those of tokens that are computed change."""
    packed, before = pack_for(tokens, mask, share=shares_prompts(model))
    if replay is None:
        hidden = packed_hidden_states(model.model, packed)  # [T, H]
    else:
        where = packed.rows, packed.positions
        given = Replay(*(part[where] for part in replay))
        hidden = packed_hidden_states(model.model, packed, given)
        replay.others[where] = given.others
    return mask.nonzero(as_tuple=True), hidden.index_select(0, before)
