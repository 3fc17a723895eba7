"""Generate multi-step arithmetic problems, "7+5-3+8=?", with worked solutions, correct or with careless mistakes.

An expression has 3 or 4 operands from 1 to 9 and a running total that stays in 0..99. A careless mistake is a step with
a carry that is counted twice, or with a borrow that is forgotten; its result is 10 too high. Both kinds of mistakes
have the same sign, so that two of them cannot cancel to a correct answer, which reinforcement learning would reward.
"""

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
    """Return the question, such as "7+5=?", that the policy gets for an expression."""
    return f"{expression}=?"


def value(expression: str) -> int:
    """Compute the value of an expression, which is the right answer."""
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


def solution(expression: str, *, careless: Callable[[], bool] = lambda: False) -> str:
    """Write the worked solution of an arithmetic expression, one line per step, such as that of ``7+5-3+8``:
    ``<think>7+5=12\\n12-3=9\\n9+8=17</think><answer>17</answer>``.

    ``careless()`` is called at each step that has a carry or borrow; if it returns True, the result of the step is 10
    too high, and the next steps go on from it.
    """
    first, *rest = re.findall(r"[+-]?\d+", expression)
    total, steps = int(first), []
    for term in rest:
        result, digit = total + int(term), int(term[1:])
        carries = total % 10 + digit >= 10 if term[0] == "+" else total % 10 < digit
        if carries and careless():
            result += 10
        steps.append(f"{total}{term}={result}")
        total = result
    return "<think>" + "\n".join(steps) + f"</think><answer>{total}</answer>"


def is_validation(expression: str) -> bool:
    """Tell, by a hash of its text, whether an expression is used only for validation, and not for training."""
    return int(hashlib.sha256(expression.encode()).hexdigest(), 16) % VALIDATION_SHARE == 0


def draw_expression(rng: random.Random, *, validation: bool) -> str:
    """Draw a random expression for validation or for training; each number of operands is equally likely."""
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
    """Draw distinct expressions for validation or for training; raises ValueError if there are fewer than ``num``."""
    available = num_expressions(validation=validation)
    if num > available:
        side = "validation" if validation else "training"
        raise ValueError(f"{num} different {side} problems were asked for; {available} exist")
    rng = random.Random(seed)
    drawn: dict[str, None] = {}  # a dict keeps the order in which expressions were first drawn
    while len(drawn) < num:
        drawn[draw_expression(rng, validation=validation)] = None
    return list(drawn)


@functools.cache
def num_expressions(*, validation: bool) -> int:
    """Count the distinct expressions that belong to validation, or those that belong to training."""
    return sum(is_validation(expression) == validation for expression in _every_expression())


def _every_expression() -> Iterator[str]:
    steps = [step for step in range(-9, 10) if step]
    for length in NUM_OPERANDS:
        for first, *rest in itertools.product(range(1, 10), *[steps] * (length - 1)):
            if all(0 <= total <= MAX_TOTAL for total in itertools.accumulate([first, *rest])):
                yield f"{first}" + "".join(f"{step:+d}" for step in rest)
