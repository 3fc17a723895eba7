"""Export a trained policy as one model in bf16 or NVFP4, and measure how far its predictions are from the policy's."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_pl.common.files import allow_reading, read_lines
from qerl_pl.common.phases import phase
from qerl_pl.model.files import CONFIG, read_json
from qerl_pl.policy.lora_experts import expert_update
from qerl_pl.policy.policy import Policy
from qerl_pl.quant.experts import StackedLinear
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import load_base, tied_weights
from qerl_pl.quant.output import carry, new_folder
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.tools.chat import load_run
from qerl_pl.tools.model_card import evidence, prompts, training
from qerl_pl.tools.options import MergedForm

DRIFT_FILE = "drift.json"
_ROWS, _TOKENS = 64, 1024
CARD = """\
---
library_name: transformers
tags: [{tags}, qerl-pl]
---
# {run}

A model that was trained with {method} by qerl-pl, with its LoRA adapter merged into the weights of `{base}` ({form}).

## Drift

{drift}

## Prompts

{prompts}

## Evidence

{evidence}
"""


@dataclass(frozen=True)
class Drift:
    """Difference between the next-token distributions of an exported model and of the trained policy, averaged over
    tokens of completions that the run sampled."""

    kl: float
    """Mean over tokens of KL(policy || export), in nats."""
    same_argmax: float
    """Share of the positions at which policy and export have the same most likely token."""
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"KL(policy || export) is {self.kl:.3g} nats per token, and both hold the same token most likely before "
            f"{self.same_argmax:.2%} of {self.num_tokens} tokens that the run sampled."
        )


@phase("merging the adapter into the base")
def export_merged(run: Path, output: Path, form: MergedForm, *, checkpoint: str = "last") -> Drift | None:
    """Write the policy of a run to a new folder as a model that needs no adapter, and compare its next-token
    distributions with the policy's. Returns how much they differ; None if the run's folder has no completions to
    compare them on.

    The base is dequantised, the adapter is added in fp32, and the sum is rounded to bf16. With the ``form`` "nvfp4",
    the result is then quantised to NVFP4 by rounding to nearest, so small changes by the adapter may be lost. After an
    error, the folder is removed. Raises ValueError if there is no such run or checkpoint, the checkpoint belongs to
    another base, or ``output`` exists.
    """
    with new_folder(output) as temporary:
        policy, _ = load_run(run, checkpoint=checkpoint)
        dense = temporary if form == "bf16" else temporary.with_name("dense")
        write_merged(policy, dense)
        if form == "nvfp4":
            quantize_checkpoint(dense, temporary)
        rows = sampled_rows(run, AutoTokenizer.from_pretrained(policy.base, trust_remote_code=False))
        drift = measure_drift(policy, temporary, rows) if rows else None
        text = "Not measured: the run kept no completions." if drift is None else str(drift)
        if drift is not None:
            (temporary / DRIFT_FILE).write_text(json.dumps(asdict(drift), indent=2) + "\n", encoding="utf-8")
        about = {**training(run), "drift": text, "prompts": prompts(run), "evidence": evidence(run)}
        card = CARD.format(run=run.resolve().name, base=policy.base, form=form, **about)
        (temporary / "README.md").write_text(card, encoding="utf-8")
    return drift


def write_merged(policy: Policy, folder: Path) -> None:
    """Write a policy's model with the adapter merged into its weights, in bf16 except for tensors that the model's
    family keeps in fp32."""
    folder.mkdir(parents=True)
    tied, tensors = tied_weights(policy.causal_lm), dict[str, Tensor]()
    for name, tensor in merged_tensors(policy):
        if name not in tied:
            exact = policy.family.in_fp32(name) or not tensor.is_floating_point()
            tensors[name] = tensor.detach().to(tensor.dtype if exact else torch.bfloat16).cpu()
    save_torch_state_dict(tensors, folder)
    for file in folder.glob("*.safetensors"):
        allow_reading(file)
    config: dict[str, Any] = {**read_json(Path(policy.base) / CONFIG), "dtype": "bfloat16"}
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    carry(Path(policy.base), folder)


@torch.no_grad()
def merged_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor of a policy's model, with the adapter added to the weights that it
    adapts."""
    adapter = policy.adapter_state()
    norms = policy.norm_weights()
    linears: dict[str, nn.Module] = {
        name.removesuffix(".base_layer"): module
        for name, module in policy.causal_lm.named_modules()
        if isinstance(module, FrozenLinear | nn.Linear) and ".lora_" not in name
    }
    for name, module in linears.items():
        weight = module.dense(torch.float32) if isinstance(module, FrozenLinear) else module.get_parameter("weight")
        prefix = f"base_model.model.{name}.lora_"
        if f"{prefix}A.weight" in adapter:
            update = adapter[f"{prefix}B.weight"] @ adapter[f"{prefix}A.weight"]
            weight = weight.float() + policy.lora_scaling * update
        yield f"{name}.weight", weight
        others = {"bias": module.bias, **dict(module.named_parameters(recurse=False))}  # a router may have a correction
        for leaf, tensor in others.items():
            if leaf != "weight" and isinstance(tensor, Tensor):
                yield f"{name}.{leaf}", tensor
    stacks = {name: module for name, module in policy.causal_lm.named_modules() if isinstance(module, StackedLinear)}
    for name, module in stacks.items():
        experts, _, part = name.replace(".base_layer", "").rpartition(".")
        weights = module.dense(torch.float32)
        update = expert_update(adapter, f"base_model.model.{experts}", part, len(weights))
        for expert, weight in enumerate(weights):
            merged = weight if update is None else weight + policy.lora_scaling * update[expert]
            yield f"{experts}.{expert}.{part}.weight", merged
    yield from norms.items()
    peft = (".lora_", ".base_layer.", ".original_module.", ".modules_to_save.")
    for name, tensor in policy.causal_lm.state_dict().items():
        of_linear = name.rpartition(".")[0] in linears.keys() | stacks.keys()
        if name not in norms and not of_linear and not any(part in f".{name}" for part in peft):
            yield name, tensor


def sampled_rows(run: Path, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], int]]:
    """Read the newest completions of a run, at most ``_ROWS``. Returns for each of them the tokens of the prompt
    followed by the first ``_TOKENS`` tokens of the completion, and the number of tokens of the prompt. The list is
    empty if the run has stored no completions."""
    rows = []
    for file in sorted((run / "completions").glob("*.jsonl"), key=lambda file: file.stat().st_mtime, reverse=True):
        for line in read_lines(file):
            row = json.loads(line)
            prompt, completion = (
                tokenizer(row[name], add_special_tokens=False).input_ids for name in ("prompt", "completion")
            )
            if prompt and completion:
                rows.append(([*prompt, *completion][: len(prompt) + _TOKENS], len(prompt)))
            if len(rows) == _ROWS:
                return rows
    return rows


@phase("comparing the merged model with the policy")
@torch.no_grad()
def measure_drift(policy: Policy, folder: Path, rows: Sequence[tuple[list[int], int]]) -> Drift:
    """Compare the next-token distributions of a policy, in evaluation mode, with those of its exported model in
    ``folder``, at the completion tokens of ``rows`` (from ``sampled_rows``)."""
    lm = policy.causal_lm
    exported = load_base(folder, dtype=policy.dtype, device=lm.device)
    kl = same = num_tokens = 0
    for tokens, start in rows:
        row = torch.tensor([tokens], device=lm.device)
        trained, other = (model(input_ids=row).logits[0, start - 1 : -1].float() for model in (lm, exported))
        p, q = trained.log_softmax(-1), other.log_softmax(-1)
        kl += (p.exp() * (p - q)).sum().item()
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
        num_tokens += len(p)
    return Drift(kl / num_tokens, same / num_tokens, num_tokens)
