"""Rewards of mine.yaml: functions of two lists, with a score for each completion."""

import re


def accuracy(prompts, completions):
    """Score 1 if the last number of a completion is the answer of its problem, and 0 otherwise.

    A prompt has the attributes text, answer and row (all columns of its problem); a completion has text and finished.
    """
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        numbers = re.findall(r"-?[0-9]+", completion.text)
        scores.append(1.0 if numbers and numbers[-1] == prompt.answer else 0.0)
    return scores


def brevity(prompts, completions):
    """Score up to 1 for a short completion, so that there is something to learn where all answers are equally good."""
    return [1 / (1 + len(completion.text) / 100) for completion in completions]
