"""Build the chat messages of a problem, and find problems whose text contains special tokens of the tokenizer."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from datamodules.rows import Row
from qerl_pl.common.json_lines import is_null
from qerl_pl.common.types import Message, Problem
from qerl_pl.model.tokenizer import render
from qerl_pl.rewards.thoughts import is_mark

ROLES = ("system", "developer", "user", "assistant")
# Matches braces in a template, except those of arguments of LaTeX commands, as in \frac{1}{2}, x^{2} and \boxed{}.
_BRACES = re.compile(r"(?<![\w{}^_\\])(?:(?P<question>\{\{question\}\})|(?P<place>\{\d*\})|(?P<name>\{[A-Za-z_]\w*\}))")
_LIST = re.compile(r"\s*(?:\[\s*)?\{")
_CHAT = re.compile(
    r"""\s*(?:\[\s*)?\{\s*["'](?:(?:role|content)["']\s*:|from["']\s*:\s*["'](?:system|human|user|gpt|assistant)["'])"""
)
# Keys of a message, in two forms. The second form (ShareGPT) is known only so that it can be refused with a clear
# error: its chats contain the assistant's answer, so they are no prompts.
_KEYS = ({"role", "content"}, {"from", "value"})


def read_messages(value: Sequence[object], where: str) -> tuple[Message, ...]:
    """Convert a data set's list ``[{"role": "user", "content": "..."}]`` to ``Message`` objects. ``developer`` is
    another name of ``system``. A content may be a list of texts, ``[{"type": "text", "text": "..."}]``, which are
    joined by line breaks. A system message without content is left out, because in some tables every row has the same
    number of messages. Raises ValueError, with the row's location ``where``, if an entry is no message of text, or the
    last is not the user's."""
    if not value:
        raise ValueError(f"{where} is an empty list; expected text, or a list of messages with role and content")
    messages = []
    for number, entry in enumerate(value):
        if not isinstance(entry, Mapping) or entry.get("role") not in ROLES:
            raise ValueError(
                f"{where}, message {number} is {str(entry)[:80]!r}; expected role ({', '.join(ROLES)}) and content"
            )
        role = "system" if entry["role"] == "developer" else str(entry["role"])
        stored = entry.get("content")
        if role == "system" and (is_null(stored) or stored == [] or (isinstance(stored, str) and not stored.strip())):
            continue
        messages.append({"role": role, "content": _content(entry, f"{where}, message {number}")})
    last = messages[-1]["role"] if messages else "system"
    if last != "user":
        raise ValueError(f"{where}: the last message is of role {last!r}; expected the user's")
    return tuple(messages)


def chat_of_value(value: object, where: str) -> list[object] | None:
    """Return the list of messages that a value of a data set contains: the value is a list, one message, or the JSON
    text of either. Returns None if it is something else, such as a plain question. Raises ValueError if a text begins
    like a list of messages but is not valid JSON."""
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping) and value.keys() >= {"role", "content"}:
        return [value]
    if not isinstance(value, str) or not _LIST.match(value):
        return None
    try:
        chat = json.loads(value)
    except (ValueError, RecursionError) as error:
        if not _CHAT.match(value):
            return None
        raise ValueError(
            f"{where} is a list of messages as text that is not JSON ({error}): {value.strip()[:60]!r}; store "
            "the list, or its JSON text"
        ) from None
    entries = chat if isinstance(chat, list) else [chat]
    are_messages = any(all(isinstance(entry, Mapping) and keys <= entry.keys() for entry in entries) for keys in _KEYS)
    return entries if are_messages else None


def _content(entry: Mapping[str, object], where: str) -> str:
    parts = entry.get("content")
    if not isinstance(parts, list) or not parts:
        return Row(where, dict(entry)).text("content")
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError(
                f'{where}, part {number} is {str(part)[:80]!r}; expected text, {{"type": "text", "text": "..."}}'
            )
        texts.append(Row(f"{where}, part {number}", dict(part)).text("text"))
    return "\n".join(texts)


def question_of(messages: Sequence[Message]) -> str:
    """Join all messages but the system prompt to one text, the problem's question. Problems with equal questions count
    as the same problem."""
    return "\n\n".join(message["content"] for message in messages if message["role"] != "system")


def chat_of(
    problem: Problem, *, system_prompt: str | None = None, question_template: str = "{question}"
) -> list[Message]:
    """Build the messages that the policy gets for a problem: the messages of the problem, or its question as a user
    message. The system prompt is added if the messages have none. The text of the last message is put into
    ``question_template``, in the place of ``{question}``."""
    messages = [*(problem.messages or ({"role": "user", "content": problem.question},))]
    asked = question_template.replace("{question}", messages[-1]["content"])  # not format, because of other braces
    messages[-1] = {"role": "user", "content": asked}
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    arguments: Mapping[str, Any] = {},
    *,
    date: str | None = None,
) -> str:
    """Render messages as text by the tokenizer's chat template, with special tokens and the start of the assistant's
    turn.

    ``arguments`` are further variables of the template. ``date``, in ISO form, is the date that a template gets if it
    reads the clock; None: today's. Raises ValueError if the template refuses the messages.
    """
    try:
        return render(tokenizer, messages, date=date, add_generation_prompt=True, **arguments)
    except Exception as error:  # a chat template is a program, which may raise any error of Jinja or Python
        reason = (str(error).splitlines() or [""])[0][:200]
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} refuses the messages ({roles}) of "
            f"{messages[-1]['content'][:60]!r}: {reason}"
        ) from error


def check_template(question_template: str) -> None:
    """Check a template of the user's turn, in which only ``{question}`` is replaced. Raises ValueError if it lacks
    ``{question}``, or has ``{{question}}``, ``{}`` or ``{0}``. Other names in braces cause a warning."""
    template = f"data.question_template {question_template!r}"
    if "{question}" not in question_template:
        raise ValueError(f"{template} has no {{question}}")
    names = set()
    for braces in _BRACES.finditer(question_template):
        if braces["question"]:
            raise ValueError(f"{template} has {{{{question}}}}, whose outer braces would stay; write {{question}}")
        if braces["place"]:
            raise ValueError(f"{template} has {braces[0]}, which would stay as it is; only {{question}} is replaced")
        names.add(braces["name"])
    if others := sorted(names - {"{question}"}):
        rank_zero_warn(f"data.question_template has {', '.join(others)}, left as it is; only {{question}} is replaced")


def find_special_tokens(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> dict[int, str]:
    """Find the problems whose text contains special tokens of the tokenizer, such as the end of the user's turn, which
    could add turns to the prompt. Returns a dict from the index of each such problem to the first special token in it.
    Tags around reasoning and answers count as ordinary text, because they begin no turns, and problems that ask for
    this format contain them. The question template and other settings, which may have special tokens, are not
    searched."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    if tokenizer.unk_token_id not in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        special.discard(tokenizer.unk_token_id)  # stands for a character that the vocabulary lacks
    names = {index: str(tokenizer.convert_ids_to_tokens(index)) for index in special}
    names = {index: name for index, name in names.items() if not is_mark(name) and not re.fullmatch("</?answer>", name)}
    contents = [[message["content"] for message in problem.messages] or [problem.question] for problem in problems]
    unique = list(dict.fromkeys(content for texts in contents for content in texts))
    rows = tokenizer(unique, add_special_tokens=False).input_ids if unique else []
    first = {
        content: next((names[token] for token in row if token in names), None)
        for content, row in zip(unique, rows, strict=True)
    }
    firsts = {index: next(filter(None, map(first.get, texts)), None) for index, texts in enumerate(contents)}
    return {index: token for index, token in firsts.items() if token is not None}
