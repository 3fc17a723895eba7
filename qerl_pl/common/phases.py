"""Report on stderr what the program is doing while it prints nothing else. A phase is one piece of work that may take
seconds, such as loading the weights."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

FIRST_S = 3.0
"""Seconds after which a phase that has not ended is shown for the first time."""
LINE_S = 4.0
"""Seconds between two lines about phases if stderr is not a terminal."""
SELDOM_S = 60.0
"""Seconds before the first line of a phase that comes again and again, such as the sampling of each rollout, and
between two of its lines."""
REDRAW_S = 1.0
"""Seconds between two updates of the line that a terminal shows."""
BAR = "{desc}: {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} {unit} {elapsed}, {remaining} left"
BAR_OF_RUN = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}, {remaining} left{postfix}"
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}, {elapsed}, {remaining} left"
ERASE = "\r\x1b[K"

APART_S = 1.0
"""Longest pause in seconds between two phases that count as consecutive. The time until the first line is counted from
the start of the first of consecutive phases."""

T = TypeVar("T")
_running: list[Phase] = []


class _Silence:
    since = 0.0
    """Time at which the last line was written or else the first of the current consecutive phases began."""
    ended = -math.inf
    """Time at which the last phase ended."""


class Phase:
    """Piece of work that is shown to the user while it runs. ``what`` describes it, such as "loading the weights". If
    its progress can be counted, ``total`` is the number of its units, of which ``update`` counts those done, and
    ``unit`` their name, "B" for bytes; otherwise ``total`` is None. If ``seldom``, its lines are ``SELDOM_S`` apart."""

    def __init__(self, what: str, total: int | None = None, unit: str = "", *, seldom: bool = False) -> None:
        self.what, self.total, self.unit, self.seldom = what, total, unit, seldom
        self.done = 0
        self.started = time.monotonic()
        self.ended = threading.Event()
        self.shown = False
        self.stream = sys.stderr

    def update(self, units: int = 1) -> None:
        """Count further units as done."""
        self.done += units

    def text(self, *, bar: bool) -> str:
        """Return a line that describes the state of this phase, with a progress bar if its units are counted and
        ``bar`` is True."""
        seconds = time.monotonic() - self.started
        if self.total is None:
            return f"{self.what} ..." if seconds < 1 else f"{self.what} ... {seconds:.0f} s"
        from tqdm import tqdm  # imported here, because the first phase of a command has to be named before any import

        return tqdm.format_meter(
            min(self.done, self.total),
            self.total,
            seconds,
            prefix=self.what,
            unit=self.unit,
            unit_scale=self.unit == "B",
            bar_format=BAR if bar else LINE,
        )


@contextmanager
def phase(
    what: str, *, total: int | None = None, unit: str = "", at_once: bool = False, seldom: bool = False
) -> Iterator[Phase]:
    """Show on stderr, while the ``with`` block runs, ``what`` the block does. ``total`` and ``unit`` are number and
    name of the units of its progress, if they can be counted. With ``at_once``, the phase is shown before the block
    begins; ``with`` blocks that import modules need this, because imports may keep the printing thread from running.
    With ``seldom``, lines in a job's log are a minute apart, also from the beginning of the block to the first line,
    unless the block runs within another phase.

    A terminal shows one line, which is redrawn every second and erased at the end. If stderr is not a terminal but, for
    example, a job's log, a line is written every ``LINE_S`` seconds, also when many short phases follow each other.
    Apart from that, a phase that ends within ``FIRST_S`` seconds prints nothing. Of nested phases, only the innermost
    is shown. Lines go to the stream that was stderr when the outermost phase began, so redirecting stderr inside does
    not hide them. Only the first rank of a run prints.
    """
    current = Phase(what, total, unit, seldom=seldom and not _running)
    if _running:
        current.stream = _running[0].stream
    elif current.started - _Silence.ended > APART_S:
        _Silence.since = current.started
    _running.append(current)
    terminal = current.stream is not None and current.stream.isatty()
    is_heard = speaks()
    if at_once and is_heard:
        _say(current, terminal)
    thread = threading.Thread(target=_repeat, args=(current, terminal), daemon=True, name="phase")
    if is_heard:
        thread.start()
    try:
        yield current
    finally:
        current.ended.set()
        _running.remove(current)
        _Silence.ended = time.monotonic()
        if is_heard:
            thread.join()
            if terminal and current.shown:
                _write(current, ERASE)


def counted(items: Iterable[T], what: str, *, total: int, unit: str) -> Iterator[T]:
    """Yield items, and show on stderr how many of them are done, as ``phase`` does."""
    with phase(what, total=total, unit=unit) as current:
        for item in items:
            yield item
            current.update()


def bar_on_stdout(description: str, total: float, **options: Any) -> tqdm[Any]:
    """Create a progress bar for a terminal, which tqdm shows together with its other bars on stdout. ``options`` are
    further arguments of tqdm."""
    from tqdm import tqdm

    usual = {"bar_format": BAR_OF_RUN, "dynamic_ncols": True, "smoothing": 0, "mininterval": 0}
    return tqdm(desc=description, total=total, file=sys.stdout, disable=False, **{**usual, **options})


def speaks() -> bool:
    """Return whether this process prints what it does: on several ranks, only the first one does."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID"))


def _repeat(current: Phase, terminal: bool) -> None:
    is_seldom = current.seldom and not terminal
    every = REDRAW_S if terminal else SELDOM_S if is_seldom else LINE_S
    # The first check whether a line is due comes at once, because the short phases before this one may have printed
    # nothing for a long time.
    while True:
        now = time.monotonic()
        silent = now - _Silence.since
        if is_seldom:
            first = now - current.started >= SELDOM_S
        else:
            first = min(now - current.started, silent) >= FIRST_S or silent >= LINE_S
        due = silent >= every if current.shown else first
        if due and _running and _running[-1] is current:
            _say(current, terminal)
        if current.ended.wait(every / 8):
            return


def _say(current: Phase, terminal: bool) -> None:
    current.shown, _Silence.since = True, time.monotonic()
    # On a terminal the cursor stays at the line's start, so that whatever is printed next overwrites the line.
    _write(current, f"{ERASE}{current.text(bar=True)}\r" if terminal else f"{current.text(bar=False)}\n")


def _write(current: Phase, text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed or None, or nobody reads it any more
        current.stream.write(text)
        current.stream.flush()
