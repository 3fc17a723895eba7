"""Rewards that compare a completion's answer with the known answer of the data set."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from qerl_pl.common.checks import shortened
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.answers import Marker, last_boxed, marked_answer, seen
from qerl_pl.rewards.context import is_denied
from qerl_pl.rewards.numbers import MAX_ANSWER, NOTES, Number, last_number, leading_number, parse_number
from qerl_pl.rewards.quantities import in_one_unit
from qerl_pl.rewards.thoughts import assistant_turn
from qerl_pl.rewards.unmarked import after_thoughts, answer_alone, final_part, last_math, own_turn, stated_answer
from qerl_pl.rewards.verdict import Verdict, no_progress
from qerl_pl.rewards.verifier import Verifier

_HAS_UNIT = re.compile(r"[^\d\s.,/+-]")
_EQUATION = re.compile(r"[A-Za-z][^=]*[-+*/^][^=]*=|[-+*/^][^=]*[A-Za-z][^=]*=")  # has unknowns


@dataclass(frozen=True)
class NumericAnswer:
    """Scores 1 if the last marked answer is exactly the known number, else 0. It is meant for data such as GSM8K.

    Units, currency signs, thousands separators and notation do not matter (``numbers.parse_number`` lists the forms),
    unless the known answer has a unit or currency: other units of its dimension are then converted to it, an answer
    without a unit is taken to be in it, and answers in units of other dimensions or in other currencies are wrong.
    Units that may also be names of variables, as in ``5 m`` and ``5 s``, are ignored if their dimensions differ. A
    missing or added percent sign does not matter if the known number is at least 1. A marked text with other words or
    numbers, such as "at least 5", is no answer. Text that a model writes after the end of its turn, such as a further
    question, is not read. A completion gets no score (None, so it does not count in the loss) if the known answer is
    neither a number nor a GSM8K solution that ends in a line such as ``#### 72``.

    Args:
        marker: what marks the answer: the ``<answer>`` tag, ``\\boxed{}``, ``####``, a line ``Answer: ...``, or any of
            the first three.
        fallback: answer of a completion without a marker: with "none" it has no answer; with "last_number" its answer
            is the one that the text states in words ("the answer is ..."), else the last number in the text. Scores
            with "last_number" agree better with people's labels of free-form solutions than those with "none", but do
            not train the policy to use the marker.
        after_thoughts: true reads only the text after the last ``</think>``, so that an answer inside the thoughts does
            not count; a completion whose thoughts are not closed has no answer. Text without these tags is read whole.

    Raises:
        ValueError: ``marker`` or ``fallback`` is not one of the above.
    """

    marker: Marker = "answer"
    fallback: Literal["none", "last_number"] = "none"
    after_thoughts: bool = True

    def __post_init__(self) -> None:
        _check("marker", self.marker, get_args(Marker))
        _check("fallback", self.fallback, ("none", "last_number"))

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        return _scores(self, prompts, completions)

    def judge(
        self, texts: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = no_progress
    ) -> list[Verdict]:
        """Compare answers in completions with the known ones; ``progress`` gets the number of rows just finished."""
        verdicts = []
        for text, answer in zip(texts, answers, strict=True):
            verdicts.append(self._judge(text, answer))
            progress(1)
        return verdicts

    def _judge(self, text: str, answer: str) -> Verdict:
        known = answer.rpartition("####")[2]
        gold = parse_number(known)
        if gold is None or _EQUATION.search(known):
            return Verdict(None, f"the known answer {shortened(answer)!r} is not a number", "known_answer")
        text = after_thoughts(text) if self.after_thoughts else text
        text = own_turn(seen(text), self.marker, stated=self.fallback != "none")
        span = marked_answer(text, self.marker)
        found = None if span is None else parse_number(_bare(span))
        if span and len(span) <= MAX_ANSWER and (found is None or _HAS_UNIT.search(known)):
            values = in_one_unit(known, _bare(span))
            found = None if values is None else parse_number(values[1])
        if span is None and self.fallback == "last_number":
            found = _unmarked_number(text)
        if found is None:
            return Verdict(
                0.0, "no marked answer" if span is None else f"the answer {shortened(span)!r} is not one number"
            )
        right = found.equals(gold, sign_may_miss=gold.percent or abs(gold.value) >= 1)
        return Verdict(float(right), f"{found} {'equals' if right else 'is not'} {gold}")


@dataclass(eq=False)
class MathAnswer:
    """Scores 1 if the answer is mathematically equal to the known answer, else 0. It is meant for data such as MATH and
    AIME.

    Only the marked answer is compared, and text that a model writes after the end of its turn, such as a further
    question, is not read. With the default marker, the answer is the text in ``<answer>`` tags, else the last box,
    else what follows ``####``. A box is read with the formula and the unit around it, and is no answer if the text
    around it denies it (``context.py``).
    Numbers, expressions, sets, intervals, points, matrices, equations, lists of values, choices and words are compared
    in LaTeX and in plain form. The known answer may be a whole solution that ends in a box or in ``####``.

    Units in the table of ``rewards/units.py`` are converted to the unit of the known answer; if the known answer has no
    unit, the completion's unit is ignored. Each currency is a dimension of its own, and words that multiply, such as
    "pairs" and "dozen", are no units, so "48 pairs" does not equal 48. Values are compared exactly, with one exception:
    a decimal of at least six significant digits equals a value without finite decimals (such as 1/3) if it is that
    value rounded or truncated at the decimal's last digit. ``50%`` equals 0.5, and equals 50 only if the known answer
    has the percent sign. In an answer such as ``1/3 \\approx 0.333``, the right side must be the left side rounded,
    else the answer is wrong.

    The comparison runs in worker processes. A completion whose comparison hangs or kills its worker scores 0 if the
    known answer alone can be parsed. If the known answer cannot be parsed, a completion gets no score, unless its
    answer is the same text.

    Args:
        marker: what marks the answer: the ``<answer>`` tag, ``\\boxed{}``, ``####``, DAPO's line ``Answer: ...``, or
            any of the first three: the tag if there is one, else the box, else ``####``.
        fallback: answer of a completion without a marker: with "none" it has no answer; with "last_math" its answer is
            the one that the text states in words ("the answer is ..."), else the last formula or number in the text.
            Scores with "last_math" agree better with people's judgements than those with "none", but do not train the
            policy to use the marker.
        after_thoughts: true reads only the text after the last ``</think>``, so that an answer inside the thoughts does
            not count; a completion whose thoughts are not closed has no answer. Text without these tags is read whole.
        num_workers: number of worker processes; null starts one per core, but at most 4.
        time_limit: limit on the processor time of one comparison, in seconds.

    Raises:
        ValueError: an argument is not one of the above.
    """

    marker: Marker = "any"
    fallback: Literal["none", "last_math"] = "none"
    after_thoughts: bool = True
    num_workers: int | None = None
    time_limit: float = 1.0

    def __post_init__(self) -> None:
        _check("marker", self.marker, get_args(Marker))
        _check("fallback", self.fallback, ("none", "last_math"))
        self.verifier = Verifier(self.num_workers, self.time_limit)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        return _scores(self, prompts, completions)

    def judge(
        self, texts: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = no_progress
    ) -> list[Verdict]:
        """Compare answers in completions with the known ones; ``progress`` gets the number of rows just finished."""
        verdicts: dict[int, Verdict] = {}
        rows: dict[int, tuple[str, str]] = {}
        for index, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            span, gold = self._span(text), last_boxed(answer) or answer.rpartition("####")[2].strip()
            if not 0 < len(gold) <= MAX_ANSWER:
                reason = f"the known answer {shortened(gold)!r} has {len(gold)} characters"
                verdicts[index] = Verdict(None, reason, "known_answer")
            elif span is None:
                verdicts[index] = Verdict(0.0, "no marked answer")
            elif len(span) > MAX_ANSWER:
                verdicts[index] = Verdict(0.0, f"the answer has {len(span)} characters; at most {MAX_ANSWER} are read")
            else:
                rows[index] = (gold, span)
        progress(len(verdicts))
        verdicts.update(zip(rows, self.verifier.judge(list(rows.values()), progress), strict=True))
        return [verdicts[index] for index in range(len(texts))]

    def close(self) -> None:
        """End the worker processes. The next comparison starts new ones."""
        self.verifier.close()

    def _span(self, text: str) -> str | None:
        text = after_thoughts(text) if self.after_thoughts else text
        text = NOTES.sub("", own_turn(seen(text), self.marker, stated=self.fallback != "none"))
        span = marked_answer(text, self.marker)
        if span is None and self.fallback == "last_math":
            number = last_number(final_part(text))
            formula = last_math(text)
            # in "= $5 ... $", the dollar signs are those of two amounts of money and enclose no formula
            formula = None if formula and formula.endswith("=") else formula
            # a number in a sentence counts without its percent sign, as in "which is a 10% discount"
            span = stated_answer(text) or formula or answer_alone(text) or (str(number.value) if number else None)
        return span


def _scores(
    reward: NumericAnswer | MathAnswer, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> list[float | None]:
    texts = list(map(assistant_turn, prompts, completions))
    return [verdict.score for verdict in reward.judge(texts, [prompt.answer for prompt in prompts])]


def _unmarked_number(text: str) -> Number | None:
    stated = stated_answer(text)
    if stated and re.search(r"\d", stated):
        return parse_number(stated) or leading_number(stated)
    text = final_part(text)
    number = (parse_number(stated) if stated else None) or last_number(text)
    spots = [*re.finditer(r"\d[\d,.]*\d|\d", text)][-1:]
    return None if any(is_denied(text, spot.start(), spot.end(), spot[0]) for spot in spots) else number


def _bare(span: str) -> str:
    """Return the content of the last box within a marked answer, or the answer as it is."""
    box = last_boxed(span)
    return span if box is None else box


def _check(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
