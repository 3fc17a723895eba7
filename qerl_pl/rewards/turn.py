"""The assistant's turn as rewards read it: what the chat template opened in the prompt, then the completion."""

from __future__ import annotations

from qerl_pl.common.types import Completion, Prompt

OPENED = "<think>"


def assistant_turn(prompt: Prompt, completion: Completion) -> str:
    """Return the completion's text, with the ``<think>`` that the chat template wrote at the end of the prompt, if any.

    Templates of reasoning models (DeepSeek-R1, QwQ, Qwen3.5) open the thoughts themselves, so that such a completion
    holds ``</think>`` alone.
    """
    return OPENED + completion.text if prompt.text.rstrip().endswith(OPENED) else completion.text
