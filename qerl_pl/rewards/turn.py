"""Return the assistant's turn as rewards read it: the part that the chat template put at the prompt's end, and the
completion."""

from __future__ import annotations

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.thoughts import in_one_form, opening_at_the_end


def assistant_turn(prompt: Prompt, completion: Completion) -> str:
    """Return the completion's text, with the mark of thoughts that the chat template wrote at the end of the prompt, if
    any. Tokens that mark thoughts are written as ``<think>`` and ``</think>``, whatever tokens the model's family has.

    Templates of reasoning models (DeepSeek-R1, QwQ, Qwen3.5) open the thoughts themselves, so that such a completion
    holds ``</think>`` alone.
    """
    return in_one_form(opening_at_the_end(prompt.text) + completion.text)
