"""Chat in the terminal with the trained policy of a run and with its base model."""

import sys
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteriaList, TextStreamer

from qerl_pl.base.prepared import prepared_base
from qerl_pl.checkpoint import SafeCheckpointIO, adapter_of, check_identity, identity_of, lora_settings, run_identity
from qerl_pl.common.files import searched
from qerl_pl.common.phases import phase
from qerl_pl.common.run_folder import date_in, read_run_config, run_files
from qerl_pl.model.hub import is_hub_name
from qerl_pl.model.quantization import quantization_of
from qerl_pl.model.stop import StopStrings
from qerl_pl.model.tokenizer import read_tokenizer, render
from qerl_pl.policy.policy import DTYPES, Policy, load_policy
from qerl_pl.rollout.common import end_tokens
from qerl_pl.tools.options import chat_options

Chat = list[dict[str, str]]
TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Unicode control characters that change the direction of text (bidirectional marks); they are printed as ``?``."""


def main(argv: list[str]) -> int:
    """Read questions from standard input until its end and print the answers; returns the exit status."""
    options = chat_options().parse_args(argv)
    policy, config = load_run(options.run, checkpoint=options.checkpoint)
    tokenizer, date, data = read_tokenizer(policy.base), date_in(config), config["data"]
    system, template = data.get("system_prompt"), data.get("question_template") or "{question}"
    voices = {"policy": True} if options.without_base else {"base": False, "policy": True}
    chats: dict[str, Chat] = {}
    print("> ", end="", flush=True)
    for line in sys.stdin:
        question = line.strip()
        if not sys.stdin.isatty():
            print(printable(question))  # not on a terminal, which shows what is typed
        if not (question and chats and options.conversation):
            chats = {voice: [] if system is None else [{"role": "system", "content": system}] for voice in voices}
        for voice, adapter in voices.items() if question else ():
            print(f"[{voice}] ", end="", flush=True)
            chats[voice].append({"role": "user", "content": template.replace("{question}", question)})
            text = answer(
                policy,
                tokenizer,
                chats[voice],
                adapter=adapter,
                temperature=options.temperature,
                max_tokens=options.max_tokens,
                arguments=data.get("template_arguments") or {},
                date=date,
                stop=data.get("stop") or (),
            )
            chats[voice].append({"role": "assistant", "content": text})
        print("> ", end="", flush=True)
    print()
    return 0


@phase("loading the run's policy")
def load_run(run: Path, *, checkpoint: str = "last") -> tuple[Policy, dict[str, Any]]:
    """Load the trained policy of a run in evaluation mode, onto a GPU if there is one; returns the policy and the run's
    configuration. ``checkpoint`` is "last", "best" or a path. Raises ValueError if there is no such run or checkpoint,
    the base is not found, or the checkpoint belongs to another base model."""
    config_file, path = run_files(run, checkpoint)
    config: dict[str, Any] = read_run_config(config_file, "data")
    model = config["model"]
    if model.get("dtype") not in DTYPES:
        raise ValueError(f"{config_file}: model.dtype is {model.get('dtype')!r}; expected one of {', '.join(DTYPES)}")
    _check_base_is_here(config, run)
    saved = SafeCheckpointIO().load_checkpoint(path)
    identity = identity_of(saved)
    lora = lora_settings(identity)  # taken from the checkpoint, because a later start may have changed config.yaml
    base = prepared_base(model["base"], model.get("base_format"), quantization_of(model.get("quantize")))
    check_identity(identity, run_identity(base=base, lora=lora, seed=identity["seed"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = load_policy(base, dtype=DTYPES[model["dtype"]], lora=lora, seed=0, device=device)
    policy.load_adapter_state({name: tensor.to(device) for name, tensor in adapter_of(saved).items()})
    policy.eval()
    policy.causal_lm.generation_config = GenerationConfig()  # none of the base's sampling settings
    return policy, config


def _check_base_is_here(config: Mapping[str, Any], run: Path) -> None:
    """Raise ValueError if the base of a run is a relative path that does not exist from the working directory; the
    message says in which folder the run was started, from which it may exist."""
    model, run_dir = config["model"], Path(config.get("run_dir") or "/")
    base = Path("-".join(filter(None, [model["base"].rstrip("/"), model.get("base_format")]))).expanduser()
    parts = run.resolve().parts
    started = Path(*parts[: -len(run_dir.parts)]) if parts[-len(run_dir.parts) :] == run_dir.parts else None
    there = started is not None and (started / base).exists()
    if base.is_absolute() or base.exists() or (is_hub_name(model["base"]) and not there):
        return
    raise ValueError(
        f"{run}: model.base is {searched(base)}, which does not exist; a relative path starts at the folder in which "
        f"the run was started: start this command in {started if there else 'that folder'}"
    )


@torch.no_grad()
def answer(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    *,
    adapter: bool,
    temperature: float,
    max_tokens: int,
    arguments: Mapping[str, Any] = {},
    date: str | None = None,
    stop: Sequence[str] = (),
) -> str:
    """Sample an answer to a chat, whose last message is the user's, and print it token by token. Returns the text, with
    special tokens such as ``<think>`` but without end tokens.

    Args:
        adapter: True: the trained policy answers; False: the base model without the adapter.
        temperature: sampling temperature; 0 takes the most likely token.
        max_tokens: limit on the length of the answer, in tokens.
        arguments: further variables of the chat template.
        date: date, in ISO form, that the chat template writes if it reads the clock; None: today's.
        stop: strings that end the answer.
    """
    text = render(tokenizer, chat, date=date, add_generation_prompt=True, **arguments)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(policy.causal_lm.device)
    ends = end_tokens(policy.base, policy.config)
    config = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 0} if temperature > 0 else {}),
        eos_token_id=ends or None,
        pad_token_id=0,
    )
    rows = inputs.input_ids.tolist()
    at_stop = StoppingCriteriaList([StopStrings(stop, tokenizer, rows)]) if stop else None
    with nullcontext() if adapter else policy.model.disable_adapter():
        tokens = policy.causal_lm.generate(
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            generation_config=config,
            stopping_criteria=at_stop,
            streamer=SafeStreamer(tokenizer, ends, skip_prompt=True, skip_special_tokens=False),
        )
    sampled = [token for token in tokens[0, inputs.input_ids.shape[1] :].tolist() if token not in ends]
    return str(tokenizer.decode(sampled, skip_special_tokens=False)).strip()


class SafeStreamer(TextStreamer):
    """Prints a generated text token by token, without end tokens. Control characters are printed as ``?``, so that a
    model's output cannot control the terminal."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int], **settings: Any) -> None:
        super().__init__(tokenizer, **settings)  # pyright: ignore[reportArgumentType] (its annotation is too narrow)
        self._ends = ends

    def put(self, value: torch.Tensor) -> None:
        """Print the text that becomes complete with one sampled token; the prompt's tokens are not printed."""
        if value.numel() > 1 or value.item() not in self._ends:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of text in which control characters are replaced."""
        print(printable(text), end="\n" if stream_end else "", flush=True)


def printable(text: str) -> str:
    """Replace control characters other than line feed and tab, and characters that change the direction of text, by
    ``?``."""
    controls = {letter for letter in text if unicodedata.category(letter) == "Cc" and letter not in "\n\t"}
    return "".join("?" if letter in TURNS or letter in controls else letter for letter in text)
