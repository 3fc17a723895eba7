"""Load the tokenizer of a base, and check that it fits the model and that its chat template works."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
RESERVED = ("messages", "add_generation_prompt", "tokenize", "tools", "documents")
"""Variables of a chat template that are set by this program, so the user's template arguments cannot have these
names."""
PROBE = "What is 17 + 25? Reply: x = 42, {y: [3.5]}"
"""Text that encoding and decoding must not change; it has the characters of typical problems and answers."""


def load_tokenizer(path: str | Path, config: Mapping) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder, and refuse a folder without tokenizer files, for which transformers
    would silently build another tokenizer.

    Args:
        path: the folder.
        config: the folder's config.json.

    Raises:
        ValueError: files are missing or cannot be read, or the tokenizer has tokens without an embedding.
    """
    folder = Path(path)
    if not any(all((folder / name).is_file() for name in names) for names in FILES):
        raise ValueError(
            f"{path} has no tokenizer ({' or '.join(' with '.join(names) for names in FILES)}); copy it from the "
            "model's original folder"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception for malformed files
        raise ValueError(f"{path}: the tokenizer cannot be read: {_first_line(error)}") from error
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= config["vocab_size"]:
        raise ValueError(
            f"{path}: the tokenizer has token {highest} and config.json says vocab_size {config['vocab_size']}; they "
            "are not of one model"
        )
    return tokenizer


def check_text_survives(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Check that encoding and decoding a text with the tokenizer gives the same text, so that prompts are not
    corrupted.

    Raises:
        ValueError: encoding and decoding changes more than white space in the sentence ``PROBE``.
    """
    tokens = tokenizer(PROBE, add_special_tokens=False).input_ids
    back = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    if "".join(str(back).split()) != "".join(PROBE.split()):
        raise ValueError(
            f"{path}: the tokenizer ({len(tokenizer)} tokens) loses text: {PROBE!r} comes back as {str(back)[:80]!r}; "
            "copy the tokenizer's files from the model's original folder"
        )


def check_chat_template(
    tokenizer: PreTrainedTokenizerBase, *, system_prompt: str | None = None, arguments: Mapping[str, Any] = {}
) -> None:
    """Check the tokenizer's chat template by applying it to one user message.

    Args:
        tokenizer: the tokenizer, with or without a template.
        system_prompt: text of the system message; None means no system message.
        arguments: further variables that the user sets for the template, e.g. enable_thinking.

    Raises:
        ValueError: there is no template; the template fails, does not read one of the arguments, or leaves out the
            question or the system prompt; or it adds no generation prompt, so the policy would continue the user's
            message.
    """
    name = tokenizer.name_or_path
    template = tokenizer.chat_template
    if not template:
        raise ValueError(f"the tokenizer {name} has no chat template; use an instruction-tuned model's")
    unknown = [key for key in arguments if key in RESERVED or not re.search(rf"\b{re.escape(key)}\b", str(template))]
    if unknown:
        raise ValueError(
            f"data.template_arguments has {unknown}, which the chat template of {name} does not read; leave them out"
        )
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    messages = [*system, {"role": "user", "content": PROBE}]
    texts = []
    for generation_prompt in (True, False):
        options = {"add_generation_prompt": generation_prompt, "tokenize": False, **arguments}
        try:
            text = tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a chat template is a program, which may raise any error of Jinja or Python
            with_system = "" if system_prompt is None else " with a system turn (data.system_prompt)"
            raise ValueError(
                f"the chat template of {name} fails{with_system}: {type(error).__name__}: {_first_line(error)}"
            ) from error
        texts.append(str(text))
    asked, told = texts
    if PROBE not in asked:
        raise ValueError(f"the chat template of {name} leaves out the question; it makes {asked[:80]!r} of {PROBE!r}")
    if system_prompt is not None and system_prompt.strip() not in asked:
        raise ValueError(f"the chat template of {name} leaves out the system turn (data.system_prompt)")
    if asked == told:
        raise ValueError(
            f"the chat template of {name} has no generation prompt: add_generation_prompt changes nothing, so the "
            "policy would go on with the user's turn"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
