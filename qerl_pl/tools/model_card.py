"""Write the model card (README.md) of an exported adapter, with the front matter that model hubs read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_pl.base.gguf import described
from qerl_pl.common.run_folder import date_in, plain_yaml
from qerl_pl.model.files import CONFIG, read_json
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.results.curves import read_curves, summarize
from qerl_pl.tools.page.verdicts import verdicts

CARD = """\
---
library_name: peft
tags: [lora, reinforcement-learning, qerl-pl]
---
# {run}

A LoRA adapter that was trained with reinforcement learning by qerl-pl.

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
