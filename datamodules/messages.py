"""Chat messages of a problem: a question in a template, or the list of messages that the data set has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from datamodules.rows import Row, text
from qerl_pl.common.types import Message, Problem

ROLES = ("system", "user", "assistant")


def read_messages(row: Row, column: str) -> tuple[Message, ...]:
    """Read a column that holds a list of messages, ``[{"role": "user", "content": "..."}]``.

    Raises:
        ValueError: it is something else, or the last message is not the user's; names file and line.
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
    """All that is said in the messages but the system prompt, as the text by which equal problems are found."""
    return "\n\n".join(message["content"] for message in messages if message["role"] != "system")


def chat_of(
    problem: Problem, *, system_prompt: str | None = None, question_template: str = "{question}"
) -> list[Message]:
    """Messages that the policy is given for a problem.

    Args:
        problem: a question, or messages of its own.
        system_prompt: text of a system turn where the problem has none of its own; None: no such turn.
        question_template: text of the last user turn; ``{question}`` stands for what the problem says there.
    """
    messages = [*(problem.messages or ({"role": "user", "content": problem.question},))]
    asked = question_template.replace("{question}", messages[-1]["content"])  # not format: it may hold other braces
    messages[-1] = {"role": "user", "content": asked}
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """The prompt as the chat template writes it, special tokens included, ready for the assistant's answer.

    Raises:
        ValueError: the template refuses the messages.
    """
    try:
        return str(tokenizer.apply_chat_template([*messages], add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template is a program of its own, and any of Jinja's and Python's errors is its
        said = (str(error).splitlines() or [""])[0][:200]
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} refuses the messages ({roles}) of "
            f"{messages[-1]['content'][:60]!r}: {said}"
        ) from error
