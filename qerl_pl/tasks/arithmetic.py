"""Generated multi-step arithmetic, "7+5-3+8=?", with worked solutions by a solver that is right or careless.

An expression has 3 or 4 operands from 1 to 9 and a running total that stays in 0..99. A careless step gets the tens
digit one too high where there is a carry (counted twice) or a borrow (forgotten). Both errors go the same way on
purpose: were they opposite, two of them could cancel to a right answer, and reinforcement learning would reward them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterator

NUM_OPERANDS = (3, 4)
MAX_TOTAL = 99
VALIDATION_SHARE = 10  # one expression in ten


def question(expression: str) -> str:
    """The expression as it is put to the policy."""
    return f"{expression}=?"


def value(expression: str) -> int:
    """The right answer."""
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


def solution(expression: str, *, careless: Callable[[], bool] = lambda: False) -> str:
    """Worked solution, one line a step: ``<think>7+5=12\\n12-3=9\\n9+8=17</think><answer>17</answer>``.

    Args:
        expression: e.g. ``7+5-3+8``.
        careless: asked at each step with a carry or borrow; True gets it wrong, and the work goes on from there.
    """
    first, *rest = re.findall(r"[+-]?\d+", expression)
    total, steps = int(first), []
    for term in rest:
        result = total + int(term)
        if _has_carry(total, term) and careless():
            result += 10
        steps.append(f"{total}{term}={result}")
        total = result
    work = "\n".join(steps)
    return f"<think>{work}</think><answer>{total}</answer>"


def is_validation(expression: str) -> bool:
    """Tell on which side of the split an expression is, as a function of its text, so the two sides never share one."""
    return int(hashlib.sha256(expression.encode()).hexdigest(), 16) % VALIDATION_SHARE == 0


def draw_expression(rng: random.Random, *, validation: bool) -> str:
    """A random expression of one side of the split; the numbers of operands are equally likely."""
    while True:
        total = rng.randint(1, 9)
        expression = str(total)
        for _ in range(rng.choice(NUM_OPERANDS) - 1):
            operand = rng.randint(1, 9)
            signs = [sign for sign in (1, -1) if 0 <= total + sign * operand <= MAX_TOTAL]
            sign = rng.choice(signs)
            total += sign * operand
            expression += f"{'+' if sign > 0 else '-'}{operand}"
        if is_validation(expression) == validation:
            return expression


def distinct_expressions(num: int, *, seed: int, validation: bool) -> list[str]:
    """Draw ``num`` different expressions of one side of the split, the same ones for the same seed.

    Raises:
        ValueError: there are not that many.
    """
    available = num_expressions(validation=validation)
    if num > available:
        side = "validation" if validation else "training"
        raise ValueError(f"{num} different {side} problems were asked for; {available} exist")
    rng = random.Random(seed)
    found: dict[str, None] = {}  # keeps the order of first sight
    while len(found) < num:
        found[draw_expression(rng, validation=validation)] = None
    return list(found)


@functools.cache
def num_expressions(*, validation: bool) -> int:
    """Count the different expressions on one side of the split."""
    return sum(is_validation(expression) == validation for expression in _every_expression())


def _every_expression() -> Iterator[str]:
    steps = [step for step in range(-9, 10) if step]
    for length in NUM_OPERANDS:
        for first, *rest in itertools.product(range(1, 10), *[steps] * (length - 1)):
            if all(0 <= total <= MAX_TOTAL for total in itertools.accumulate([first, *rest])):
                yield f"{first}" + "".join(f"{step:+d}" for step in rest)


def _has_carry(total: int, term: str) -> bool:
    sign, digit = term[0], int(term[1:])
    return total % 10 + digit >= 10 if sign == "+" else total % 10 < digit
