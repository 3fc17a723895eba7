"""Run a study: its runs are processes, several at a time, which continue where they were interrupted."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

import torch

from qerl_pl.common.run_folder import is_running
from qerl_pl.study import state
from qerl_pl.study.study_file import Command, Run, Study, commands_of, program

POLL_SECONDS = 0.2
STOP_SECONDS = 180.0  # for the running step and its checkpoint, after SIGTERM; then the process is killed
PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
SHARE_OF_GPU = 0.92  # that runs may take together
LOG_LINES = 12  # of a failed command that are shown


@dataclass
class Slot:
    """Place for one of the runs that are executed at the same time."""

    gpu: str | None
    """Number of the GPU, as in CUDA_VISIBLE_DEVICES; None on a machine without a GPU."""
    run: Run | None = None
    lock: IO[str] | None = None
    command: str = ""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    attempts: int = 0


class Outcome(Exception):
    """The work was stopped before its end; ``status`` is the program's exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def slots_for(study: Study, jobs: int | None = None) -> list[Slot]:
    """Create the slots of this machine, ordered so that consecutive slots are on different GPUs.

    A GPU has ``jobs`` or ``study.jobs`` slots; if both are None, as many as its memory and the CPU cores allow.
    """
    jobs, cores = jobs or study.jobs, len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return [Slot(None) for _ in range(jobs or max(1, cores // 2))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
    if jobs is None and study.gpu_memory is not None:
        least = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(len(gpus)))
        fitting = int(SHARE_OF_GPU * least / 2**30 / study.gpu_memory)
        jobs = max(1, min(fitting, cores // len(gpus) // 2))
    return [Slot(gpu) for _ in range(jobs or 1) for gpu in gpus]


class Runner:
    """Executes runs of a study.

    Args:
        study: the study.
        runs: the runs for this process; the jobs of a cluster's array have different ones.
        slots: slots for runs.
        minutes: time limit, after which running processes are asked to stop at their next checkpoint; None: no limit.
        words: function that makes a command line of a command.
    """

    def __init__(
        self,
        study: Study,
        runs: Sequence[Run],
        slots: list[Slot],
        minutes: float | None = None,
        words: Callable[[Command], list[str]] = program,
    ) -> None:
        self.study, self.slots, self.words = study, slots, words
        self.total = len(runs)
        self.waiting = deque(run for run in runs if not state.is_finished(study, run))
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.failed: list[Run] = []
        self._signal = 0

    def work(self) -> None:
        """Run everything; returns when each run has finished or failed.

        Raises:
            Outcome: a signal came or the time is up; every process has been stopped at a checkpoint.
        """
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._say(f"{self.total - len(self.waiting)} of {self.total} runs are finished already")
            while self.waiting or any(slot.run for slot in self.slots):
                if self._signal or (self.deadline is not None and time.monotonic() >= self.deadline):
                    self._stop()
                for slot in self.slots:
                    self._advance(slot)
                time.sleep(POLL_SECONDS)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self._signal = number

    def _advance(self, slot: Slot) -> None:
        """Check whether a slot's process has ended, and if so start the next command of its run or the next run."""
        if slot.process is not None and slot.process.poll() is not None:
            self._ended(slot, slot.process.returncode)
        if slot.run is None:
            self._take(slot)
        if slot.run is not None and slot.process is None:
            done = state.seconds_done(slot.run)
            left = [command for command in commands_of(self.study, slot.run) if command.name not in done]
            if left:
                self._start(slot, slot.run, left[0])
            else:
                name = slot.run.name
                self._free(slot)
                self._say(f"{name} is finished")

    def _take(self, slot: Slot) -> None:
        """Assign to a slot the first waiting run that no other runner or process works on."""
        for _ in range(len(self.waiting)):
            run = self.waiting.popleft()
            lock = state.lock(run)
            if lock is not None and not is_running(run.folder):  # a process whose runner was killed may still end
                slot.run, slot.lock, slot.attempts = run, lock, 0
                state.write_files(self.study, run)
                return
            if lock is not None:
                lock.close()
            self.waiting.append(run)

    def _start(self, slot: Slot, run: Run, command: Command) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) // len(self.slots))
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"} | os.environ
        if slot.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot.gpu
        log = state.log_of(run, command.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            slot.process = subprocess.Popen(
                self.words(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process alone, which asks the others to stop
                preexec_fn=_end_with_parent,
            )
        slot.command, slot.started = command.name, time.monotonic()
        slot.attempts += 1

    def _ended(self, slot: Slot, status: int) -> None:
        """Record how a process ended; a run that failed too often frees its slot."""
        run, name, seconds = slot.run, slot.command, time.monotonic() - slot.started
        assert run is not None
        slot.process = None
        spent = state.seconds_spent(run)
        seconds += spent.pop(name, 0.0)
        if status == 0:
            state.keep(run, done=state.seconds_done(run) | {name: seconds}, spent=spent, failure=None)
            slot.attempts = 0
            return
        state.keep(run, spent=spent | {name: seconds})
        if not self._signal and slot.attempts >= self.study.attempts:
            lines = state.log_of(run, name).read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            text = f"{name} ended with status {status} ({slot.attempts} starts); the end of its log:\n" + "\n".join(
                lines
            )
            state.keep(run, failure=text)
            self.failed.append(run)
            self._free(slot)
            self._say(f"{run.name} FAILED: {text}")

    def _free(self, slot: Slot) -> None:
        if slot.lock is not None:
            slot.lock.close()
        slot.run = slot.lock = slot.process = None

    def _stop(self) -> None:
        """Ask every process to stop at its next checkpoint, wait for it, and raise ``Outcome``."""
        busy = [slot for slot in self.slots if slot.process is not None]
        for slot in busy:
            assert slot.process is not None
            slot.process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + STOP_SECONDS
        for slot in busy:
            assert slot.process is not None
            try:
                status = slot.process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                slot.process.kill()
                status = slot.process.wait()
            slot.attempts = 0  # being stopped is no failure
            self._ended(slot, status)
            self._free(slot)
        reason = signal.Signals(self._signal).name if self._signal else "the time is up"
        raise Outcome(
            f"stopped ({reason}); the same command goes on", 128 + self._signal if self._signal else TIME_IS_UP
        )

    def _say(self, text: str) -> None:
        running = sum(slot.run is not None for slot in self.slots)
        finished = self.total - len(self.waiting) - running - len(self.failed)
        left = self._seconds_left()
        about = f", about {left / 60:.0f} min left" if left else ""
        counts = (
            f"{finished} finished, {running} running, {len(self.waiting)} waiting, {len(self.failed)} failed{about}"
        )
        print(f"{time.strftime('%H:%M:%S')} {text}\n         {counts}", flush=True)

    def _seconds_left(self) -> float | None:
        """Estimate the remaining seconds from the mean duration of each command; None before any command has ended."""
        runs = self.study.runs()
        done = [state.seconds_done(run) for run in runs]
        seconds = {
            name: [each[name] for each in done if name in each] for name in {key for each in done for key in each}
        }
        if not seconds:
            return None
        mean = {name: sum(values) / len(values) for name, values in seconds.items()}
        fallback = sum(mean.values()) / len(mean)
        unfinished = [*self.waiting, *(slot.run for slot in self.slots if slot.run is not None)]
        total = 0.0
        for run in unfinished:
            over = state.seconds_done(run)
            names = [command.name for command in commands_of(self.study, run) if command.name not in over]
            total += sum(mean.get(name, fallback) for name in names)
        total -= sum(time.monotonic() - slot.started for slot in self.slots if slot.process is not None)
        return max(total, 0.0) / min(len(self.slots), max(1, len(unfinished)))


TIME_IS_UP = 3


def _end_with_parent() -> None:
    """Make Linux send SIGTERM to this new process when the runner dies for any reason."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
