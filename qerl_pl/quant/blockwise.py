"""Run calibration sequences through a model one decoder block at a time, with only this block on the device.

Letters: S sequences, L tokens per sequence, H hidden size, K inputs of a linear layer.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_pl.model.family import FAMILIES
from qerl_pl.model.files import Checkpoint
from qerl_pl.quant.experts import OF_EXPERT
from qerl_pl.quant.loading import fill_computed_buffers

_TOKENS = 8192  # tokens per forward pass
PRIOR_ROWS = 256
"""Weight, as a number of tokens, with which the second moment over all experts of a block (the mean of x x^T over the
inputs x of a linear layer) is mixed into that of a single expert, which few calibration tokens may reach."""


class BlockStream:
    """Hidden states of the calibration sequences ``tokens`` [S, L] int64 at the input of a model's next decoder block,
    in host memory. ``skeleton``, the whole model on the meta device, is modified: to run one block on ``device``,
    this block's weights are filled in and all other blocks are replaced by the identity. So transformers' own code
    computes masks, rotary embeddings and attention."""

    def __init__(
        self, skeleton: PreTrainedModel, checkpoint: Checkpoint, tokens: Tensor, device: torch.device | str
    ) -> None:
        self.decoder, self.device, self.dtype = cast(PreTrainedModel, skeleton.base_model), device, skeleton.dtype
        self.family = FAMILIES[skeleton.config.model_type]
        names = {module: name for name, module in skeleton.named_modules()}
        blocks = cast(nn.ModuleList, self.decoder.layers)
        self.blocks = {names[block]: (index, block) for index, block in enumerate(blocks)}
        self.running = nn.ModuleList(_PassOver() for _ in blocks)
        self.decoder.layers, self.decoder.norm = self.running, nn.Identity()
        fill_computed_buffers(self.decoder, device)
        embed = cast(nn.Embedding, skeleton.get_input_embeddings())  # in some families it multiplies by a constant
        embed.weight = nn.Parameter(checkpoint.read(f"{names[embed]}.weight"), requires_grad=False)
        self.hidden = embed.to("cpu")(tokens).to(self.dtype)  # [S, L, H]
        embed.to("meta")
        self.hidden = self._run()  # in some families the decoder multiplies by a constant

    def second_moments(
        self, name: str, tensors: Mapping[str, Tensor], linears: Sequence[str], *, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """Run the decoder block ``name`` with the weights ``tensors`` (by full name). Returns, for each of the linear
        layers ``linears``, the mean [K, K] of x x^T over all tokens that enter it, where x [K] is the layer's input, on
        the device in ``dtype`` (fp32 or fp64). For an expert, which few tokens may reach, this mean is mixed with the
        mean over all experts, as if ``PRIOR_ROWS`` further tokens had that mean."""
        block = self._place(name, tensors)
        sums: dict[str, Tensor] = {}
        counts: Counter[str] = Counter()

        def add_to(linear: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                x = inputs[0].flatten(0, -2).to(dtype)  # [T, K]
                sums[linear] = torch.addmm(sums[linear], x.T, x) if linear in sums else x.T @ x
                counts[linear] += len(x)

            return hook

        modules = {linear: block.get_submodule(linear.removeprefix(f"{name}.")) for linear in linears}
        hooks = [module.register_forward_pre_hook(add_to(linear)) for linear, module in modules.items()]
        self._run(block)
        for hook in hooks:
            hook.remove()
        self._remove(name)
        _shrink(sums, counts)
        return {linear: sums[linear].div_(counts[linear]) for linear in linears}

    def advance(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Run the block ``name`` with the weights ``tensors`` (by full name), so that ``hidden`` are the inputs of the
        next block."""
        self.hidden = self._run(self._place(name, tensors))
        self._remove(name)

    def _place(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        index, block = self.blocks[name]
        prefix = f"{name}."
        state = {
            key.removeprefix(prefix): tensor.to(self.device, torch.float32 if self.family.in_fp32(key) else self.dtype)
            for key, tensor in tensors.items()
        }
        block.load_state_dict(state, assign=True)
        self.running[index] = block
        return block

    def _remove(self, name: str) -> None:
        index, block = self.blocks[name]
        self.running[index] = _PassOver()
        block.to("meta")

    @torch.no_grad()
    def _run(self, block: nn.Module | None = None) -> Tensor:
        """Run the decoder on the hidden states of the S calibration sequences (``hidden``); returns its outputs, [S, L,
        H] in host memory. Only the decoder block ``block`` computes, or none if it is None; the other blocks return
        their inputs."""
        rows = max(1, _TOKENS // self.hidden.shape[1])
        out = torch.empty_like(self.hidden)
        for i in range(0, len(out), rows):
            inputs = self.hidden[i : i + rows].to(self.device)
            hook = block and block.register_forward_pre_hook(lambda _, others, inputs=inputs: (inputs, *others[1:]))
            out[i : i + rows] = self.decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state
            if hook is not None:
                hook.remove()
        return out


def _shrink(sums: dict[str, Tensor], counts: Counter[str]) -> None:
    """Mix the second moment of each expert's inputs with that of all inputs of the experts of its mixture-of-experts
    layer, as if the expert had ``PRIOR_ROWS`` further inputs with the latter. ``sums`` has, for each linear layer, the
    sum of x x^T over its inputs x, and ``counts`` the number of these inputs; both are changed in place."""
    parts: dict[tuple[str, ...], list[str]] = {}
    for linear in sums:
        if match := OF_EXPERT.fullmatch(linear):
            parts.setdefault(match.groups(), []).append(linear)
    for names in parts.values():
        mean = sum(sums[name] for name in names) / sum(counts[name] for name in names)
        for name in names:
            sums[name].add_(mean, alpha=PRIOR_ROWS)
            counts[name] += PRIOR_ROWS


class _PassOver(nn.Module):
    def forward(self, hidden: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return hidden
