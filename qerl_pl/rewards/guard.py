"""Call a reward function with a time limit, name it in errors, and restore global settings of the process."""

import numbers
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from qerl_pl.common.checks import LARGEST, shortened
from qerl_pl.common.isolation import loaded, preserved_rng, preserved_torch_settings
from qerl_pl.common.program import Stopped

_RING = signal.SIGVTALRM  # the signal is not SIGALRM, because rewards may use that for time limits of their own


class RewardError(ValueError):
    """Raised if a reward failed, took too long, or did not return scores; the message names the reward."""


@contextmanager
def guarded(name: str, *, num_rows: int, time_limit: float | None, seed: int) -> Iterator[Callable[[int], object]]:
    """Run one call of a reward, the body of the ``with`` statement, under a time limit, and restore the process's
    global settings afterwards. Yields a function that restarts the time limit, to be called with the number of
    completions scored since its last call.

    The limit ``time_limit`` (in seconds; None: no limit) is enforced by a thread that sends a signal to the main
    thread. The signal ends Python code that sleeps, waits or computes, but not a call into C that never returns. A
    reward that is not called in the main thread has no limit. ``os._exit`` raises an error in this process; in child
    processes it works as usual.

    The following are restored: current folder, gradient mode, default dtype, number of threads, matmul precision,
    recursion limit, signal handlers, timers, and the global random streams. During the call, the random streams are
    seeded by ``seed``, so a reward's draws do not depend on the code that ran before. NumPy and torch are handled only
    if they are already imported, because the command `score` runs without them.

    Raises RewardError, with ``name`` and ``num_rows`` in the message, if the reward raised an exception, asked the
    process to exit, or took too long.
    """
    with _settings_kept(), preserved_rng(), _exit_refused(), _clock(time_limit) as restart:
        random.seed(seed)
        if (numpy := loaded("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        if (torch := loaded("torch")) is not None:
            torch.random.default_generator.manual_seed(seed)
        try:
            yield restart
        except (RewardError, KeyboardInterrupt, Stopped):
            raise
        except _Late:
            raise RewardError(
                f"reward {name!r} took more than {time_limit:g} seconds on a batch of {num_rows} rows; make it faster, "
                "or raise its time_limit, which is set next to its name and weight (null: none)"
            ) from None
        except (Exception, SystemExit) as error:
            what = "asked the program to exit" if isinstance(error, SystemExit) else "failed"
            frames = traceback.extract_tb(error.__traceback__)
            last = (
                f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
            )
            raise RewardError(
                f"reward {name!r} {what} on a batch of {num_rows} rows: {type(error).__name__}: {error}{last}"
            ) from error


def checked_scores(name: str, scores: Any, num_rows: int) -> list[float | None]:
    """Convert the return value of a reward (a sequence, iterator, tensor or array with a number or None per completion)
    to a list. Raises RewardError, which names the reward and the index of a wrong score, if the value does not consist
    of ``num_rows`` finite numbers or None."""
    if hasattr(scores, "tolist"):
        scores = scores.tolist()
    elif isinstance(scores, Iterable) and not isinstance(scores, str | bytes | Mapping | Set):
        scores = list(scores)  # e.g. a generator, or a column of pandas
    if not isinstance(scores, list | tuple):
        raise RewardError(
            f"reward {name!r} returned {shortened(repr(scores))}; expected a list with a number, or None for unscored, "
            f"for each of {num_rows} rows"
        )
    if len(scores) != num_rows:
        raise RewardError(f"reward {name!r} returned {len(scores)} scores for {num_rows} rows; expected one per row")
    return [_checked(name, row, score) for row, score in enumerate(scores)]


def _checked(name: str, row: int, score: Any) -> float | None:
    if getattr(score, "ndim", None) == 0:  # a tensor, or a number of NumPy
        score = score.item()
    if score is None:
        return None
    if not isinstance(score, numbers.Real | Decimal) or not abs(float(score)) <= LARGEST:  # also refuses nan
        raise RewardError(
            f"reward {name!r} scored row {row} as {shortened(repr(score))}; "
            "expected a finite number (of 32 bits) or None"
        )
    return float(score)


class _Late(BaseException):
    """Raised inside a reward when its time limit is over. It is no subclass of Exception, so an ``except Exception`` in
    the reward does not catch it."""


@contextmanager
def _clock(limit: float | None) -> Iterator[Callable[[int], object]]:
    if limit is None or threading.current_thread() is not threading.main_thread():
        yield lambda count: None
        return
    over, main = threading.Event(), threading.get_ident()
    deadline = time.monotonic() + limit

    def restart(count: int) -> None:
        nonlocal deadline
        deadline = time.monotonic() + limit

    def ring(*_: object) -> None:
        if not over.is_set():
            raise _Late

    def watch() -> None:
        while not over.wait(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                signal.pthread_kill(main, _RING)
                over.wait(1.0)  # after this time the signal is sent again, in case the reward caught the error

    before = signal.signal(_RING, ring)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield restart
    finally:
        over.set()
        thread.join()
        signal.signal(_RING, before)


@contextmanager
def _exit_refused() -> Iterator[None]:
    leave, owner = os._exit, os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != owner:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def _settings_kept() -> Iterator[None]:
    folder, depth, torch = os.getcwd(), sys.getrecursionlimit(), loaded("torch")
    gradients = torch is not None and torch.is_grad_enabled()
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if in_main else {}
    timer = signal.getitimer(signal.ITIMER_REAL)
    try:
        with preserved_torch_settings():
            yield
    finally:
        os.chdir(folder)
        if torch is not None:
            torch.set_grad_enabled(gradients)
        sys.setrecursionlimit(depth)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
