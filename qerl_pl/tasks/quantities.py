"""Draw the graph of quantities that a generated word problem describes: which is computed from which others, and how.

A quantity is a given number, or computed by one operation from one or two other quantities. A quantity may be used more
than once, so the graph is a chain, a tree or a general DAG. Similar graphs are those of iGSM (arXiv 2407.20311) and
GSM-Infinite (arXiv 2502.05252). A graph without its numbers is called a structure.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Kind = Literal["given", "plus", "minus", "times", "divided", "sum", "difference"]
Split = Literal["train", "validation", "reach"]

OF_ONE: tuple[Kind, ...] = ("plus", "minus", "times", "divided")  # of a quantity and a constant
WEIGHTS: dict[Kind, int] = {"plus": 3, "minus": 3, "times": 2, "divided": 1, "sum": 3, "difference": 2}
MAX_VALUE = 999
GIVEN = range(2, 31)
TERMS = range(2, 21)  # constants that are added or subtracted
FACTORS = range(2, 5)
TRIES = 20  # draws of random constants for a structure before it is given up


class Quantity(NamedTuple):
    """One node of a graph; ``operands`` are list indices of earlier nodes, ``constant`` is 0 where the kind has
    none."""

    kind: Kind
    operands: tuple[int, ...] = ()
    constant: int = 0


def draw_structure(rng: random.Random, num_operations: int) -> list[Quantity]:
    """Draw a random graph without numbers, with ``num_operations`` operations, all of them needed for the last
    quantity."""
    kinds: dict[int, tuple[Kind, tuple[int, ...]]] = {}
    # node 0 is the one that the problem asks for; operands are drawn after the nodes that use them
    undefined, num = [0], 1
    for left in range(num_operations, 0, -1):
        # With probability 1/2 the newest node is expanded next; otherwise long chains would be rare.
        place = undefined.pop(-1 if rng.random() < 0.5 else rng.randrange(len(undefined)))
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        operands: list[int] = []
        for _ in range(1 if kind in OF_ONE else 2):
            shared = [other for other in undefined if other not in operands]
            # A node whose operation is not drawn yet has no operands, so using it as an operand makes no cycle. One
            # such node must remain for each further operation.
            if shared and rng.random() < 0.25:
                operands.append(rng.choice(shared))
            else:
                operands.append(num)
                undefined.append(num)
                num += 1
        kinds[place] = kind, tuple(operands)
        assert undefined or left == 1
    order = _operands_first(kinds, num)
    places = {node: place for place, node in enumerate(order)}
    found = []
    for node in order:
        kind, operands_of = kinds.get(node, ("given", ()))
        found.append(Quantity(kind, tuple(places[operand] for operand in operands_of)))
    return found


def _operands_first(kinds: dict[int, tuple[Kind, tuple[int, ...]]], num: int) -> list[int]:
    order: dict[int, None] = {}

    def visit(node: int) -> None:
        for operand in kinds.get(node, ("given", ()))[1]:
            visit(operand)
        order.setdefault(node)

    visit(0)
    assert len(order) == num
    return list(order)


def structure_hash(quantities: Sequence[Quantity]) -> str:
    """Hash the operations that the last quantity needs and how they depend on one another: 16 hexadecimal digits.

    The hash does not depend on constants, on the order of the quantities or of a sum's operands, or on whether an
    operand that occurs twice is one quantity or two equal ones. So problems with different hashes differ in more than
    wording.

    Args:
        quantities: nodes of the graph, operands before the nodes that use them; the last one is the one asked for.
    """
    hashes: list[str] = []
    for kind, operands, _ in quantities:
        below = [hashes[operand] for operand in operands]
        text = f"{kind}({','.join(sorted(below) if kind == 'sum' else below)})"
        hashes.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return hashes[-1]


def split_of(structure: str) -> Split:
    """Assign a structure to a set by its hash: of 10 structures, 8 go to training, 1 to validation and 1 to the reach
    set."""
    share = int(hashlib.sha256(f"split/{structure}".encode()).hexdigest(), 16) % 10
    return "validation" if share == 8 else "reach" if share == 9 else "train"


def check_split(split: str) -> None:
    """Refuse a name that is not "train", "validation" or "reach".

    Raises:
        ValueError: lists the known names.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; expected one of {', '.join(get_args(Split))}")


def draw_numbers(rng: random.Random, structure: Sequence[Quantity]) -> tuple[list[Quantity], list[int]] | None:
    """Draw the constants of a structure, which is a graph of quantities without numbers.

    Returns: the graph with constants, and the value of each quantity; None if in each of ``TRIES`` draws some value was
    no integer in 1..MAX_VALUE.
    """
    for _ in range(TRIES):
        quantities: list[Quantity] = []
        values: list[int] = []
        for kind, operands, _ in structure:
            drawn = draw_number(rng, kind, [values[operand] for operand in operands])
            if drawn is None:
                break
            constant, value = drawn
            quantities.append(Quantity(kind, operands, constant))
            values.append(value)
        else:
            return quantities, values
    return None


def draw_number(rng: random.Random, kind: Kind, operands: Sequence[int]) -> tuple[int, int] | None:
    """Draw a quantity's constant; returns it with the quantity's value, or None if that is no integer in
    1..MAX_VALUE."""
    if kind == "given":
        value = rng.choice(GIVEN)
        return value, value
    choices: Sequence[int] = (0,)
    if kind == "plus":
        choices = TERMS
    elif kind == "minus":
        choices = range(TERMS.start, min(TERMS.stop, operands[0]))
    elif kind == "times":
        choices = FACTORS
    elif kind == "divided":
        choices = [factor for factor in FACTORS if operands[0] % factor == 0]
    if not choices:
        return None
    constant = rng.choice(choices)
    value = apply(kind, operands, constant)
    return (constant, value) if 1 <= value <= MAX_VALUE else None


def apply(kind: Kind, operands: Sequence[int], constant: int) -> int:
    """Compute the value of one quantity from the values of its operands and its constant."""
    match kind:
        case "given":
            return constant
        case "plus":
            return operands[0] + constant
        case "minus":
            return operands[0] - constant
        case "times":
            return operands[0] * constant
        case "divided":
            return operands[0] // constant
        case "sum":
            return operands[0] + operands[1]
        case "difference":
            return operands[0] - operands[1]
