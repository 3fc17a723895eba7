"""Make docs/real_completions.md, completions of a pretrained model before and after training."""

from __future__ import annotations

import textwrap

from docs.real_lines import NOTHING, TASK, Line, model_of, named, wrapped

COMPLETIONS = """\
# Completions before and after training

Written by `python docs/real_models.py`; [real_models.md](real_models.md) has the numbers.

{about}

The completions are quoted as the model wrote them, and many of them contain errors, in the reasoning or the answer. The
parentheses before a completion have its scores: 1 for a right and 0 for a wrong answer. "Strict" scoring requires the
answer at the place that the prompt asks for; "lenient" scoring accepts it anywhere in the text.

{completions}
"""


def completions_page(lines: list[Line]) -> str:
    """Make docs/real_completions.md, of one run that has kept completions: preferably with NVFP4, with verl's settings,
    and of the last model by name."""
    kept = named(lines, "real_completions")
    if not kept:
        return COMPLETIONS.format(about=NOTHING, completions="").rstrip() + "\n"
    line = max(kept, key=lambda line: (line["shape"]["arm"] == "nvfp4", line["shape"]["task"] == TASK, line["name"]))
    about = (
        "The run is of {model}, arm {arm}, task {task}, seed {seed}. The completions are of {number} evenly spaced "
        "test problems, sampled greedily before the first rollout and after rollout {last}."
    ).format(model=model_of(line), number=len(line["completions"]), last=line["rollouts"][1], **line["shape"])
    return COMPLETIONS.format(about=wrapped(about), completions="\n\n".join(map(_completion, line["completions"])))


def _completion(row: Line) -> str:
    """Format one problem; what the model wrote is indented, so that nothing in it is Markdown."""
    parts = [f"## Problem {row['problem']}", quoted(row["question"]), f"The answer is {row['answer']}."]
    for when in ("before", "after"):
        side = row[when]
        scores = ", ".join(f"{name} {score:g}" for name, score in side["rewards"].items() if score is not None)
        cut = "" if side["finished"] else ", cut"
        parts += [f"**{when.capitalize()}** ({scores}; {side['num_tokens']} tokens{cut}):", quoted(side["completion"])]
    return "\n\n".join(parts)


def quoted(text: str) -> str:
    """Write text as an indented block of code of ASCII characters and lines of at most 120."""
    ascii_text = text.encode("ascii", "backslashreplace").decode()
    lines = [part for line in ascii_text.splitlines() or [""] for part in textwrap.wrap(line, 112) or [""]]
    return "\n".join(f"    {line}".rstrip() for line in lines)
