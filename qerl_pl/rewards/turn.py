"""Return the assistant's turn as rewards read it: the part that the chat template put at the prompt's end, and the
completion."""

from __future__ import annotations

from qerl_pl.common.types import Completion, Prompt

OPENED = "<think>"


def assistant_turn(prompt: Prompt, completion: Completion) -> str:
    """Return the completion's text, with the ``<think>`` that the chat template wrote at the end of the prompt, if any.

    Templates of reasoning models (DeepSeek-R1, QwQ, Qwen3.5) open the thoughts themselves, so that such a completion
    holds ``</think>`` alone.
    """
    return OPENED + completion.text if prompt.text.rstrip().endswith(OPENED) else completion.text
