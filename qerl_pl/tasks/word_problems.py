"""Generated English word problems of 2 to 14 operations, with worked solutions.

    Tom has 5 more marbles than Mia has stamps. Ada has 4 coins. Mia has 7 stamps. How many marbles does Tom have?
    <think>Tom's marbles: 7 + 5 = 12</think><answer>12</answer>

The quantity that is asked for is computed through a graph of quantities (``quantities.py``). The sentences that state
them come in nearly the order in which they can be computed, mixed with distractors: quantities that the answer does not
need. The difficulty of a problem is the number of operations that its answer needs. Problems of different sets differ
in the structure of the graph and not only in names and numbers.

The problems are a function of the seed. ``VERSION`` is raised when a change of this file changes the problem of a seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence, Set
from typing import NamedTuple

from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.words import runs_of_words
from qerl_pl.tasks.quantities import (
    OF_ONE,
    Kind,
    Quantity,
    Split,
    check_split,
    draw_number,
    draw_numbers,
    draw_structure,
    split_of,
    structure_hash,
)

VERSION = 1
MIN_OPERATIONS, MAX_OPERATIONS = 2, 14
MAX_DISTRACTORS = 3
DISORDER = 3.0  # largest number of places by which a sentence may come later than in the computed order
RUN_OF_WORDS = 13  # words in a row that problems of two sets must not share, as in GPT-3 (arXiv 2005.14165, appendix C)

NAMES = tuple(
    """
    Ada Amir Ben Bella Carl Chen Dana Diego Elif Emma Finn Fatou Gus Grace Hana Hugo Ines Ivan Jack Juno Kai Kira
    Leo Lena Mia Milo Nils Nora Omar Olga Paul Priya Quinn Rosa Raj Sara Sven Tom Tara Uma Vera Viktor Wes Wanda
    Yara Yusuf Zoe Zack
    """.split()  # noqa: SIM905 (a list of strings is four times as long)
)
ITEMS = tuple(
    """
    apples badges balloons beads books bottles boxes buttons candles cards coins cookies crayons cups flowers keys
    lemons marbles mugs nuts pears pencils plums ribbons ropes seeds shells spoons stamps stickers tickets toys
    """.split()  # noqa: SIM905
)
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter"}
SIGNS: dict[Kind, str] = {"plus": "+", "minus": "-", "times": "x", "divided": "/", "sum": "+", "difference": "-"}


class WordProblem(NamedTuple):
    """A problem and its solution."""

    question: str
    answer: int
    solution: str
    """``<think>``, one line per operation, ``</think><answer>``, the answer, ``</answer>``."""
    num_operations: int
    structure: str
    """Hash of the graph of operations that the answer needs (``quantities.structure_hash``)."""

    @property
    def identity(self) -> str:
        """Hash of the question, sixteen hex digits, that identifies the problem."""
        return hashlib.sha256(self.question.encode()).hexdigest()[:16]


def draw_problem(rng: random.Random, *, num_operations: int, split: Split) -> WordProblem:
    """Draw a random problem whose structure belongs to the set ``split``."""
    while True:
        structure = draw_structure(rng, num_operations)
        fingerprint = structure_hash(structure)
        if split_of(fingerprint) != split:
            continue
        drawn = draw_numbers(rng, structure)
        if drawn is None:
            continue
        quantities, values = drawn
        asked = len(quantities) - 1
        _add_distractors(rng, quantities, values)
        owners = _draw_owners(rng, len(quantities))
        order = _draw_order(rng, quantities)
        statements = [_statement(quantities[place], owners[place], owners) for place in order]
        name, item = owners[asked]
        question = " ".join([*statements, f"How many {item} does {name} have?"])
        work = _work(quantities, values, owners, order, asked)
        solution = f"<think>{work}</think><answer>{values[asked]}</answer>"
        return WordProblem(question, values[asked], solution, num_operations, fingerprint)


def leave_out_lines(rng: random.Random, problem: WordProblem, probability: float) -> WordProblem:
    """Leave out each line of a problem's solution, except the last one, with the same probability.

    Where a later line uses the result of a line that is left out, this result has to be computed without being written
    down.
    """
    *lines, last = problem.solution.removeprefix("<think>").split("\n")
    left = [*(line for line in lines if rng.random() >= probability), last]
    return problem._replace(solution="<think>" + "\n".join(left))


def draw_problems(
    num: int,
    *,
    seed: int,
    split: Split,
    operations: tuple[int, int] = (MIN_OPERATIONS, MAX_OPERATIONS),
    avoid: Set[tuple[str, ...]] = frozenset(),
) -> list[WordProblem]:
    """Draw distinct problems, equally many (to within one) of each number of operations; the seed determines them.

    Args:
        num: number of problems.
        seed: seed of the draws.
        split: "train", "validation" or "reach"; problems have only structures (graphs without numbers) of this set.
        operations: fewest and most operations of a problem.
        avoid: runs of RUN_OF_WORDS words that no question may contain.

    Raises:
        ValueError: there is no such split, or the operations are out of range.
    """
    check_split(split)
    check_operations(operations)
    rng = random.Random(seed)
    low, high = operations
    found: dict[str, WordProblem] = {}  # keeps the order
    while len(found) < num:
        wanted = low + len(found) % (high - low + 1)
        problem = draw_problem(rng, num_operations=wanted, split=split)
        if not avoid or avoid.isdisjoint(runs_of_words(problem.question, RUN_OF_WORDS)):
            found.setdefault(problem.question, problem)
    return list(found.values())


def draw_sets(
    *, seed: int, sizes: dict[Split, int], operations: dict[Split, tuple[int, int]]
) -> dict[Split, list[WordProblem]]:
    """Draw the training, validation and reach sets, which share no structure and no long run of words.

    The sets are drawn in the order validation, reach, training. A problem is left out if its question has
    ``RUN_OF_WORDS`` words in a row that occur in the validation or reach set drawn before its own.

    Args:
        seed: seed of the draws.
        sizes: number of problems of each set.
        operations: fewest and most operations of a problem, for each set.

    Returns: The problems of each set that ``sizes`` names.
    """
    found: dict[Split, list[WordProblem]] = {}
    avoid: set[tuple[str, ...]] = set()
    for split in sorted(sizes, key=("validation", "reach", "train").index):
        found[split] = draw_problems(
            sizes[split],
            seed=derive_seed(seed, f"word problems/{split}"),
            split=split,
            operations=operations[split],
            avoid=avoid,
        )
        if split != "train":
            avoid |= {run for problem in found[split] for run in runs_of_words(problem.question, RUN_OF_WORDS)}
    return found


def check_operations(operations: Sequence[int]) -> None:
    """Refuse a range of numbers of operations that is not within MIN_OPERATIONS to MAX_OPERATIONS.

    Raises:
        ValueError: names the range.
    """
    if len(operations) != 2 or not MIN_OPERATIONS <= operations[0] <= operations[1] <= MAX_OPERATIONS:
        raise ValueError(
            f"operations are {list(operations)}; expected the fewest and the most, from {MIN_OPERATIONS} to "
            f"{MAX_OPERATIONS}, e.g. [8, 12]"
        )


def _add_distractors(rng: random.Random, quantities: list[Quantity], values: list[int]) -> None:
    """Append up to MAX_DISTRACTORS quantities on which the answer does not depend, and their values."""
    for _ in range(rng.randint(0, MAX_DISTRACTORS)):
        kind = rng.choice(("given", *OF_ONE))
        operands = (rng.randrange(len(quantities)),) if kind in OF_ONE else ()
        drawn = draw_number(rng, kind, [values[operand] for operand in operands])
        if drawn is not None:
            quantities.append(Quantity(kind, operands, drawn[0]))
            values.append(drawn[1])


def _draw_owners(rng: random.Random, num: int) -> list[tuple[str, str]]:
    """Draw a distinct pair (person, item) for each quantity; persons and items occur in several pairs, so that a reader
    has to look at both."""
    names, items = rng.sample(NAMES, num // 2 + 2), rng.sample(ITEMS, 4)
    return rng.sample([(name, item) for name in names for item in items], num)


def _draw_order(rng: random.Random, quantities: Sequence[Quantity]) -> list[int]:
    """Draw the order of the sentences; returns the indices of the quantities that they state."""
    left, order = set(range(len(quantities))), list[int]()
    while left:
        ready = [place for place in sorted(left) if not left & set(quantities[place].operands)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    keys = {place: number + rng.uniform(0, DISORDER) for number, place in enumerate(order)}
    return sorted(order, key=keys.__getitem__)


def _statement(quantity: Quantity, owner: tuple[str, str], owners: Sequence[tuple[str, str]]) -> str:
    (name, item), (kind, operands, constant) = owner, quantity
    others = [owners[operand] for operand in operands]
    has = [f"{other} has {its}" for other, its in others]
    match kind:
        case "given":
            return f"{name} has {constant} {item}."
        case "plus":
            return f"{name} has {constant} more {item} than {has[0]}."
        case "minus":
            return f"{name} has {constant} fewer {item} than {has[0]}."
        case "times":
            return f"{name} has {constant} times as many {item} as {has[0]}."
        case "divided":
            return f"{name} has {FRACTIONS[constant]} as many {item} as {has[0]}."
        case "sum":
            return f"{name} has as many {item} as {has[0]} and {has[1]} together."
        case "difference":
            (first, its), (second, seconds) = others
            return f"{name}'s {item} are as many as {first}'s {its} minus {second}'s {seconds}."


def _work(
    quantities: Sequence[Quantity],
    values: Sequence[int],
    owners: Sequence[tuple[str, str]],
    order: Sequence[int],
    asked: int,
) -> str:
    """Write one line per operation that the answer needs: each time the first stated quantity whose operands are all
    known."""
    known = {place for place in range(asked + 1) if quantities[place].kind == "given"}
    waiting, lines = [place for place in order if place <= asked and place not in known], []
    while waiting:
        place = next(place for place in waiting if known.issuperset(quantities[place].operands))
        waiting.remove(place)
        known.add(place)
        kind, operands, constant = quantities[place]
        numbers = [*(values[operand] for operand in operands), *([constant] if kind in OF_ONE else [])]
        (name, item), sign = owners[place], SIGNS[kind]
        lines.append(f"{name}'s {item}: {numbers[0]} {sign} {numbers[1]} = {values[place]}")
    return "\n".join(lines)
