"""Write the model card (README.md) of an exported adapter, with the front matter that model hubs read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_pl.base.gguf import described
from qerl_pl.common.run_folder import date_in, plain_yaml
from qerl_pl.model.files import CONFIG, read_json
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.results.curves import read_curves, summarize
from qerl_pl.settings.teacher import DENSE
from qerl_pl.tools.page.verdicts import verdicts

CARD = """\
---
library_name: peft
tags: [lora, {tags}, qerl-pl]
---
# {run}

A LoRA adapter that was trained with {method} by qerl-pl.

| | |
|---|---|
| base | `{base}`{precision} |
| digest of the base (config.json and weights) | `{digest}` |
| optimizer steps | {steps} |
| rank, alpha | {rank}, {alpha:g}{rslora} |
| adapted linears | {targets} |
| trained norms | {norms} |
| seed | {seed} |

It belongs to this base and to no other. `base_model_name_or_path` in adapter_config.json is where the base was when the
adapter was exported: give another path if it has moved.

```python
from peft import PeftModel
{loading}
model = PeftModel.from_pretrained(base, {folder!r})
```

## Prompts

{prompts}

## Evidence

{evidence}
"""

LOADING = """\
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({base!r})"""
LOADING_UNPACKED = """\
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

unpacked = CompressedTensorsConfig(run_compressed=False)  # PEFT adapts no 4-bit linears of this format
base = AutoModelForCausalLM.from_pretrained({base!r}, dtype="bfloat16", quantization_config=unpacked)"""


def model_card(checkpoint: Mapping[str, Any], settings: LoraSettings, *, base: str, folder: str, run: Path) -> str:
    """Return the Markdown text of the model card for an adapter in a folder named ``folder``, with results of training
    from the run's event files. ``base`` is the path or hub name of the base."""
    identity = checkpoint["identity"]
    rank, alpha, targets, rslora = settings.filled_in()
    return CARD.format(
        run=run.resolve().name,
        **training(run),
        prompts=prompts(run),
        evidence=evidence(run),
        folder=folder,
        base=base,
        precision=f", {text}" if (text := described(Path(base))) else "",
        loading=_loading(base),
        digest=identity["base"],
        steps=checkpoint["global_step"],
        rank=rank,
        alpha=alpha,
        rslora=", scaled by alpha / sqrt(rank)" if rslora else "",
        targets=", ".join(sorted(targets)),
        norms="yes (modules_to_save)" if settings.train_norms else "no",
        seed=identity["seed"],
    )


def _loading(base: str) -> str:
    """Return Python code that loads the base model so that PEFT can add the adapter to it."""
    config = Path(base) / CONFIG
    quantization = read_json(config).get("quantization_config") or {} if config.is_file() else {}
    packed = quantization.get("quant_method") == "compressed-tensors"
    return (LOADING_UNPACKED if packed else LOADING).format(base=base)


def training(run: Path) -> dict[str, str]:
    """Return the ``method`` by which a run trained its policy, in words, and the ``tags`` of a model card that name
    it."""
    model = plain_yaml(run / "config.yaml").get("model") or {}
    methods = {}
    if any(reward.get("weight", 1.0) for reward in model.get("rewards") or ()) or not model.get("teacher"):
        methods["reinforcement-learning"] = "reinforcement learning"
    if model.get("teacher"):
        teacher = model["teacher"]["base"]
        source = "the base before it was quantised" if teacher == DENSE else f"`{teacher}`"
        methods["distillation"] = f"distillation from {source}"
    return {"method": " and ".join(methods.values()), "tags": ", ".join(methods)}


def prompts(run: Path) -> str:
    """Describe in Markdown how a run made chat messages from a question; users of the policy have to do the same."""
    data = plain_yaml(run / "config.yaml").get("data") or {}
    messages = [{"role": "user", "content": data.get("question_template") or "{question}"}]
    if data.get("system_prompt") is not None:
        messages.insert(0, {"role": "system", "content": data["system_prompt"]})
    lines = [
        "In training, a question was asked by these messages; a system message in the data set replaced the one here.",
        "A server of the policy does not know them, so send them with each question:",
        "",
        "```json",
        json.dumps(messages, indent=2, ensure_ascii=False),
        "```",
    ]
    if arguments := data.get("template_arguments"):
        text = json.dumps(arguments, ensure_ascii=False, default=str)
        lines += ["", f"The chat template was given further variables (`chat_template_kwargs`): `{text}`."]
    if stop := data.get("stop"):
        lines += ["", f"Completions also ended at these texts (`stop`): `{json.dumps(stop, ensure_ascii=False)}`."]
    return "\n".join(lines)


def evidence(run: Path) -> str:
    """Summarise in Markdown what a run logged and what its checks found."""
    try:
        curves = read_curves(run)
    except ValueError as error:
        return f"The run left no curves that can be read ({str(error).removeprefix(f'{run} ')})."
    rows = [f"| {name} | {value:.4g} |" for name, value in summarize(curves).items()]
    table = ["| measured by the run | |", "|---|---|", *rows]
    checks = [f"- {verdict['check']}: {verdict['text']}" for verdict in verdicts(curves)]
    date = date_in(plain_yaml(run / "config.yaml"))
    dated = [f"In all of the run's prompts the chat template wrote the date {date}.", ""] if date else []
    return "\n".join([*table, "", *dated, "Checks while it ran:", "", *checks])
