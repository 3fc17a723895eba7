"""Compare answers in worker processes, so that an answer at which sympy hangs or crashes does not end the run.

This can be called from any thread, and uses neither signal handlers nor further threads. Workers are new interpreters
(``worker.py``) and not forks, so the CUDA context and vLLM's state in this process do not affect them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from qerl_pl.common.checks import require_at_least
from qerl_pl.rewards.numbers import exact_number
from qerl_pl.rewards.verdict import Verdict

START_LIMIT = 120.0  # seconds that a worker process may take to start, i.e. to import math-verify, on a busy machine
MAX_FAILED_STARTS = 3
# The limit on the wall-clock time of a comparison, as a multiple of that on its processor time; it is above 1 because
# other processes may use the same cores.
WALL_FACTOR = 10.0
_ROOT = Path(__file__).parents[2]


class Verifier:
    """Worker processes that compare answers. They start at the first comparison, and end with this process or at
    ``close``.

    Args:
        num_workers: number of worker processes; None: one per core that this process may use, but at most 4.
        time_limit: limit on the processor time of one comparison, in seconds.
    """

    def __init__(self, num_workers: int | None = None, time_limit: float = 1.0) -> None:
        require_at_least(1, num_workers=num_workers, hint=", or null for one per core")
        if time_limit <= 0:
            raise ValueError(f"time_limit is {time_limit}; expected a positive number of seconds")
        self.num_workers = num_workers or min(4, len(os.sched_getaffinity(0)))
        self.time_limit = time_limit
        self._lock = threading.Lock()
        self._begin()

    def __reduce__(self) -> tuple[type[Verifier], tuple[int, float]]:
        return Verifier, (self.num_workers, self.time_limit)

    def judge(
        self, rows: Sequence[tuple[str, str]], progress: Callable[[int], object] = lambda count: None
    ) -> list[Verdict]:
        """Compare the two answers of each row, the known one and the completion's; returns a verdict (score and reason)
        per row. Of equal rows, only one is compared. ``progress`` is called with the number of rows finished since its
        last call.

        A row whose worker dies is tried once more. If a row exceeds the time or memory limit, or ends its worker twice,
        it scores 0 if the known answer alone can be parsed, and otherwise has no score. It scores 0 because a policy
        could otherwise avoid negative advantages by writing answers that no worker survives.
        """
        with self._lock:
            if os.getpid() != self._owner:
                self._begin()  # forked: the listed workers belong to the parent process
            try:
                distinct = list(dict.fromkeys(rows))
                verdicts = dict(zip(distinct, self._run(distinct, progress), strict=True))
                self._blame(verdicts, progress)
                progress(len(rows) - len(distinct))
                return [verdicts[row] for row in rows]
            finally:
                # after an error, some workers may still compare answers, and their results would never be read
                if any(worker.row is not None for worker in self._workers):
                    _stop_all(self._workers, self._owner)

    def pids(self) -> list[int]:
        """List the process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End the worker processes. The next comparison starts new ones."""
        with self._lock:
            _stop_all(self._workers, self._owner)

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._workers: list[_Worker] = []
        weakref.finalize(self, _stop_all, self._workers, self._owner)  # also at the interpreter's exit

    def _blame(self, verdicts: dict[tuple[str, str], Verdict], progress: Callable[[int], object]) -> None:
        # If the known answer alone can be parsed, the completion's answer caused the failure.
        failed = [row for row, verdict in verdicts.items() if verdict.cause in ("hang", "crash", "memory")]
        golds = [gold for gold in dict.fromkeys(gold for gold, _ in failed) if exact_number(gold) is None]
        known = dict(zip(golds, self._run([(gold, None) for gold in golds], lambda count: progress(0)), strict=True))
        for row in failed:
            if row[0] not in known or known[row[0]].score is not None:
                verdicts[row] = Verdict(0.0, f"{verdicts[row].reason}; the known answer can be parsed by itself")

    def _run(self, rows: Sequence[tuple[str, str | None]], progress: Callable[[int], object]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        waiting, retried = deque(range(len(rows))), set[int]()
        failed_starts = 0
        while len(verdicts) < len(rows):
            # One worker more than rows, so that when a comparison does not end, another worker is ready to say whether
            # the known answer alone can be parsed.
            while len(self._workers) < min(self.num_workers, len(rows) - len(verdicts) + 1):
                self._workers.append(_Worker())
            for worker in self._workers:
                if worker.ready and worker.row is None and waiting:
                    row = waiting.popleft()
                    worker.send(row, *rows[row], self.time_limit)
            num_before = len(verdicts)
            for worker in _due(self._workers):
                row, verdict = worker.row, worker.receive()
                if verdict is not None and row is not None:
                    verdicts[row], worker.row = verdict, None
                if worker.failure is None:
                    continue
                self._workers.remove(worker)
                if row is None:
                    failed_starts += not worker.ready
                elif row in retried or worker.failure.cause == "hang":
                    verdicts[row] = worker.failure
                else:  # after a crash the row is tried again, because the machine may have caused it
                    retried.add(row)
                    waiting.appendleft(row)
            if failed_starts > MAX_FAILED_STARTS:
                raise RuntimeError(
                    f"{failed_starts} verifier processes died at their start; "
                    f"run `{sys.executable} -m qerl_pl.rewards.worker` to see why"
                )
            progress(len(verdicts) - num_before)
        return [verdicts[index] for index in range(len(rows))]


class _Worker:
    """One worker process, and the row (known answer and completion's answer) that it is judging."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # sympy's orderings, and with them verdicts, depend on the hash seed; a fixed seed makes them the same in every
        # run.
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "qerl_pl.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.ready = False
        self.row: int | None = None
        self.failure: Verdict | None = None
        self.limit = START_LIMIT
        self.deadline = time.monotonic() + START_LIMIT

    def send(self, row: int, gold: str, answer: str | None, limit: float) -> None:
        self.row, self.limit = row, limit
        self.deadline = time.monotonic() + WALL_FACTOR * limit
        with suppress(BrokenPipeError):  # if the process has died, the next ``receive`` reports this
            self.stdin.write(json.dumps([gold, answer, limit]).encode() + b"\n")
            self.stdin.flush()

    def receive(self) -> Verdict | None:
        """Read from the worker process and return its verdict. Returns None if there is none yet or, if ``failure`` is
        then set, the process exceeded its time limit or died."""
        late = Verdict(None, f"took more than {self.limit:g} s", "hang")
        if not wait([self.stdout.fileno()], 0):
            self.stop()
            self.failure = late
            return None
        line = self.stdout.readline()  # the process writes one line for each row, so nothing else is buffered
        if not line.endswith(b"\n"):
            status = self.stop(patience=1.0)  # its output is closed, so the process is ending
            died = Verdict(None, f"its process died twice (exit status {status})", "crash")
            self.failure = late if status == -signal.SIGPROF else died
            return None
        was_ready, self.ready, self.deadline = self.ready, True, float("inf")
        return Verdict(*json.loads(line)) if was_ready else None  # the first line says that it has started

    def stop(self, patience: float = 0.0) -> int:
        """Wait up to ``patience`` seconds for the process to end, then kill it; returns its exit status, which is -N if
        signal N ended it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.process.kill()
        status = self.process.wait()
        self.stdout.close()
        with suppress(BrokenPipeError):  # the process ended before it read its row
            self.stdin.close()
        return status


def _due(workers: list[_Worker]) -> list[_Worker]:
    """Wait until workers have sent a verdict, have died or have exceeded their limit; returns all such workers."""
    patience = max(0.0, min(worker.deadline for worker in workers) - time.monotonic())
    readable = wait([worker.stdout.fileno() for worker in workers], min(patience, START_LIMIT))
    now = time.monotonic()
    return [worker for worker in workers if worker.stdout.fileno() in readable or worker.deadline <= now]


def _stop_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:
        for worker in workers:
            worker.stop()
        workers.clear()
