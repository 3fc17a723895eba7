"""Execute the runs of a study, a process each and several at a time; an interrupted run continues from its
checkpoint."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from qerl_pl.common.run_folder import is_running
from qerl_pl.study import state
from qerl_pl.study.process import words_of
from qerl_pl.study.progress import Training, described, rollouts_of, seconds_of_commands
from qerl_pl.study.study_file import FIT, Command, Run, Study, commands_of

POLL_SECONDS = 0.2
REPORT_SECONDS = 60.0  # without a message, after which one says how far the trainings are
# after SIGTERM, a process has this time to finish its step and write a checkpoint; then it is killed
STOP_SECONDS = 180.0
PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
SHARE_OF_GPU = 0.92  # that runs may take together
LOG_LINES = 12  # of a failed command that are shown


@dataclass
class Slot:
    """One of the places for runs that are executed at the same time; it has at most one run and one process."""

    gpu: str | None
    """Number of the GPU, as in CUDA_VISIBLE_DEVICES; None on a machine without a GPU."""
    run: Run | None = None
    lock: IO[str] | None = None
    process: subprocess.Popen[bytes] | None = None
    commands: tuple[str, ...] = ()
    """Names of the commands that the process executes, in order."""
    started: float = 0.0
    attempts: int = 0
    """Starts of the command that is executed."""

    def running(self) -> tuple[str, float]:
        """Return the name of the command that the slot's process executes, and its seconds so far."""
        assert self.run is not None
        done = state.seconds_done(self.run)
        earlier = sum(done[name] for name in self.commands if name in done)
        name = next((name for name in self.commands if name not in done), self.commands[-1])
        return name, max(0.0, time.monotonic() - self.started - earlier)


class Outcome(Exception):
    """Raised when a study is stopped before its end; ``status`` is the exit status for the program."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def slots_for(study: Study, jobs: int | None = None) -> list[Slot]:
    """Create the slots of this machine, ordered so that consecutive slots are on different GPUs.

    Each GPU has ``jobs`` slots, else ``study.jobs``; if both are None, as many as GPU memory and CPU cores allow.
    """
    import torch  # imported here, because `study --analyse` needs none

    jobs, cores = jobs or study.jobs, len(os.sched_getaffinity(0))
    jobs = None if jobs is None else min(jobs, len(study.runs()))
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
        runs: runs that this process executes; those that another process works on are left to it.
        slots: slots for runs, which execute at the same time.
        minutes: time limit, after which running processes are asked to stop at their next checkpoint; None: no limit.
        variables: environment variables of the processes.
        words: function that makes the words of the command line of a process which executes commands of a run, given
            the run's folder and the commands. The process records each command that succeeds (``state.succeeded``).
    """

    def __init__(
        self,
        study: Study,
        runs: Sequence[Run],
        slots: list[Slot],
        minutes: float | None = None,
        variables: Mapping[str, str] | None = None,
        words: Callable[[Path, Sequence[Command]], list[str]] = words_of,
    ) -> None:
        self.study, self.slots, self.words = study, slots, words
        self.variables = dict(variables or {})
        self.total = len(runs)
        self.waiting = deque(run for run in runs if not state.is_finished(study, run))
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.failed: list[Run] = []
        self._signal = 0
        self._report_at = time.monotonic() + REPORT_SECONDS

    def work(self) -> None:
        """Execute all runs; returns when each has finished or failed.

        Raises:
            Outcome: a signal was received, or the time is up; all processes have been stopped at a checkpoint.
        """
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._say(f"{self.total - len(self.waiting)} of {self.total} runs are finished already")
            while self.waiting or any(slot.run for slot in self.slots):
                if self._signal or (self.deadline is not None and time.monotonic() >= self.deadline):
                    self._stop()
                for slot in self.slots:
                    self._advance(slot)
                if time.monotonic() >= self._report_at:
                    self._say(described(self._trainings()) or "processes are starting or evaluating")
                time.sleep(POLL_SECONDS)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self._signal = number

    def _advance(self, slot: Slot) -> None:
        """If a slot's process has ended, start another for what is left of its run, or take the next run."""
        if slot.process is not None and slot.process.poll() is not None:
            self._ended(slot, slot.process.returncode)
        if slot.run is None:
            self._take(slot)
        if slot.run is not None and slot.process is None:
            done = state.seconds_done(slot.run)
            left = [command for command in commands_of(self.study, slot.run) if command.name not in done]
            if left:
                self._start(slot, slot.run, left)
            else:
                name = slot.run.name
                self._free(slot)
                self._say(f"{name} is finished")

    def _take(self, slot: Slot) -> None:
        """Assign to a slot the first waiting run that is not locked or being trained by another process, and that no
        other run has to precede."""
        for _ in range(len(self.waiting)):
            run = self.waiting.popleft()
            before = self.study.run_before(run)
            if before is not None and not state.is_finished(self.study, before):
                if before in self.failed:
                    self._give_up(run, f"{before.name} failed, whose files it needs")
                else:
                    self.waiting.append(run)
                continue
            lock = state.lock(run)
            if lock is not None and not is_running(run.folder):  # a process whose runner was killed may still end
                slot.run, slot.lock, slot.attempts = run, lock, 0
                state.write_files(self.study, run)
                return
            if lock is not None:
                lock.close()
            self.waiting.append(run)

    def _start(self, slot: Slot, run: Run, commands: Sequence[Command]) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) // len(self.slots))
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        environment |= os.environ | self.variables
        if slot.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot.gpu
        log = state.log_of(run.folder, commands[0].name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            slot.process = subprocess.Popen(
                self.words(run.folder, commands),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                # a process group of its own, so that Ctrl-C reaches only the runner, which then stops this process
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        slot.commands, slot.started = tuple(command.name for command in commands), time.monotonic()
        slot.attempts += 1

    def _ended(self, slot: Slot, status: int) -> None:
        """Record the exit status of a slot's process; a run of which a command failed ``study.attempts`` times is given
        up."""
        run = slot.run
        assert run is not None
        slot.process = None
        if status == 0:
            slot.attempts = 0
            return
        name, seconds = slot.running()
        if name != slot.commands[0]:
            slot.attempts = 1  # commands before it succeeded, so this was its first start
        spent = state.seconds_spent(run)
        state.keep(run.folder, spent=spent | {name: spent.get(name, 0.0) + seconds})
        if not self._signal and slot.attempts >= self.study.attempts:
            log = state.log_of(run.folder, name)
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            text = f"{name} ended with status {status} ({slot.attempts} starts); the end of its log:\n" + "\n".join(
                lines
            )
            self._free(slot)
            self._give_up(run, text)

    def _give_up(self, run: Run, text: str) -> None:
        state.keep(run.folder, failure=text)
        self.failed.append(run)
        self._say(f"{run.name} FAILED: {text}")

    def _free(self, slot: Slot) -> None:
        if slot.lock is not None:
            slot.lock.close()
        slot.run = slot.lock = slot.process = None

    def _stop(self) -> None:
        """Ask the processes of all runs to stop at their next checkpoint, wait for them, and raise ``Outcome``."""
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
        self._report_at = time.monotonic() + REPORT_SECONDS

    def _trainings(self) -> list[Training]:
        """List the running trainings that have done a rollout."""
        found = []
        for slot in self.slots:
            if slot.run is None or slot.process is None:
                continue
            name, seconds = slot.running()
            done = rollouts_of(state.log_of(slot.run.folder, FIT)) if name == FIT else None
            if done is not None:
                found.append(Training(*done, seconds + state.seconds_spent(slot.run).get(FIT, 0.0)))
        return found

    def _seconds_left(self) -> float | None:
        """Estimate the study's remaining seconds from the duration of each command; None if no command has ended and no
        rollout is done yet."""
        mean = seconds_of_commands(map(state.seconds_done, self.study.runs()), self._trainings())
        if not mean:
            return None
        fallback = sum(mean.values()) / len(mean)
        unfinished = [*self.waiting, *(slot.run for slot in self.slots if slot.run is not None)]
        total = 0.0
        for run in unfinished:
            over = state.seconds_done(run)
            names = [command.name for command in commands_of(self.study, run) if command.name not in over]
            total += sum(mean.get(name, fallback) for name in names)
        total -= sum(slot.running()[1] for slot in self.slots if slot.run is not None and slot.process is not None)
        return max(total, 0.0) / min(len(self.slots), max(1, len(unfinished)))


TIME_IS_UP = 3


def _end_with_parent() -> None:
    """Called in a new process: have Linux send it SIGTERM when the runner, its parent, dies for any reason."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
