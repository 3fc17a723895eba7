"""Show, while vLLM samples, how many completions are finished."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qerl_pl.common import phases

WHAT = "sampling"


class Counter:
    """Object with those attributes of a tqdm bar that vLLM uses. It passes the numbers of newly finished completions to
    the function ``count``."""

    def __init__(self, count: Callable[[int], object]) -> None:
        self.count = count
        self.n = 0
        self.postfix = ""  # vLLM writes speeds here
        self.format_dict = {"elapsed": 1.0}  # vLLM divides by it

    def update(self, number: int) -> None:
        self.n += number
        self.count(number)

    def refresh(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def sampling_bar(number: int) -> Iterator[Callable[..., Any]]:
    """Show how many of ``number`` completions are finished while the ``with`` block runs. Yields vLLM's argument
    ``use_tqdm``, a function that makes the bar which vLLM updates.

    If stdout is a terminal, where a run shows its bars (``callbacks.progress``), a further bar appears there after some
    seconds. Otherwise stderr shows the progress. If that is a log, it gets a line once a minute, or every few seconds
    if the block runs within another phase, such as a validation.
    """
    if sys.stdout.isatty() and phases.speaks():
        shown: Any = phases.bar_on_stdout(WHAT, number, leave=False, delay=phases.FIRST_S, mininterval=0.1)
    else:
        shown = phases.phase(WHAT, total=number, unit="completions", seldom=True)
    with shown as current:
        counter = Counter(current.update)
        # vLLM also calls this function with the prompts, to show how many of them it has read, which takes no time.
        yield lambda prompts=None, **_: counter if prompts is None else prompts
