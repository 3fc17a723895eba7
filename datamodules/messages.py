"""Build chat messages for a problem: from a question and a template, or from the data set's own list of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from datamodules.rows import Row, text
from qerl_pl.common.types import Message, Problem

ROLES = ("system", "user", "assistant")


def read_messages(row: Row, column: str) -> tuple[Message, ...]:
    """Read a row's column that holds a list of messages, ``[{"role": "user", "content": "..."}]``.

    Raises:
        ValueError: the column holds something else, or the last message is not the user's; names file and line.
    """
    value = row.columns[column]
    where = f"{row.where}: column {column!r}"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{where} is {str(value)[:80]!r}; expected text, or a list of messages with role and content")
    messages = []
    for number, entry in enumerate(value):
        if not isinstance(entry, Mapping) or entry.get("role") not in ROLES:
            raise ValueError(
                f"{where}, message {number} is {str(entry)[:80]!r}; expected role ({', '.join(ROLES)}) and content"
            )
        content = text(Row(f"{where}, message {number}", dict(entry)), "content")
        messages.append({"role": str(entry["role"]), "content": content})
    if messages[-1]["role"] != "user":
        raise ValueError(f"{where}: the last message is of role {messages[-1]['role']!r}; expected the user's")
    return tuple(messages)


def question_of(messages: Sequence[Message]) -> str:
    """Join all messages of a problem but the system prompt to one text, by which equal problems are found."""
    return "\n\n".join(message["content"] for message in messages if message["role"] != "system")


def chat_of(
    problem: Problem, *, system_prompt: str | None = None, question_template: str = "{question}"
) -> list[Message]:
    """Build the messages that the policy gets for a problem.

    Args:
        problem: a problem with a question, or with messages of its own.
        system_prompt: text of a system turn for problems whose messages have none; None adds no such turn.
        question_template: text of the last user turn; ``{question}`` is replaced by the problem's last user message.
    """
    messages = [*(problem.messages or ({"role": "user", "content": problem.question},))]
    asked = question_template.replace("{question}", messages[-1]["content"])  # not format, because of other braces
    messages[-1] = {"role": "user", "content": asked}
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def chat_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], arguments: Mapping[str, Any] = {}
) -> str:
    """Render the messages with the chat template, including special tokens and the start of the assistant's turn.

    Args:
        tokenizer: tokenizer with the chat template.
        messages: messages of the chat.
        arguments: further variables of the template.

    Raises:
        ValueError: the template refuses the messages.
    """
    try:
        return str(tokenizer.apply_chat_template([*messages], add_generation_prompt=True, tokenize=False, **arguments))
    except Exception as error:  # a chat template is a program that may raise any error of Jinja or Python
        said = (str(error).splitlines() or [""])[0][:200]
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} refuses the messages ({roles}) of "
            f"{messages[-1]['content'][:60]!r}: {said}"
        ) from error
