"""Execute the runs of a study, several at a time, each in its own process. A run that was interrupted is resumed."""

import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import IO

from qerl_pl.common.program import SIGNALS
from qerl_pl.common.run_folder import is_running
from qerl_pl.study import state
from qerl_pl.study.process import words_of
from qerl_pl.study.study_file import Command, Run, Study, commands_of

POLL_SECONDS = 0.2
STOP_SECONDS = 180.0  # time from SIGTERM until a process is killed, to finish its step and write a checkpoint
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
SHARE_OF_GPU = 0.92  # share of a GPU's memory that its runs may take together
STATUS_SECONDS = 60.0  # time between two messages about what the running runs do
LOG_LINES = 12  # number of lines that are shown of the log of a failed command
TIME_IS_UP = 3  # exit status if the time limit ended the work


@dataclass
class Slot:
    """Place for one run on a machine, which executes one run at a time."""

    gpu: str | None
    """Number of the GPU, as in CUDA_VISIBLE_DEVICES; None on a machine without a GPU."""
    run: Run | None = None
    lock: IO[str] | None = None
    process: subprocess.Popen[bytes] | None = None
    commands: tuple[str, ...] = ()
    """Names of the commands that the process executes, in order."""
    started: float = 0.0
    attempts: int = 0
    """Number of times that the command that is being executed has been started."""


def slots_for(study: Study, jobs: int | None = None) -> list[Slot]:
    """Create the slots of this machine. Each GPU (or the machine, if it has none) gets ``jobs`` slots or, if that is
    None, ``study.jobs``. If both are None, the number is as large as CPU cores and, on GPUs, memory allow
    (``study.gpu_memory`` GiB per run), but one per GPU if ``study.gpu_memory`` is None too. Consecutive slots are on
    different GPUs."""
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
    """Executes the runs of a study, one at a time in each slot, except runs that another process with the same study
    works on. After ``minutes``, if given, runs that are not finished are asked to stop at their next checkpoint."""

    def __init__(self, study: Study, slots: list[Slot], minutes: float | None) -> None:
        self.study, self.slots = study, slots
        runs = study.runs()
        self.total = len(runs)
        self.waiting = deque(run for run in runs if not state.is_finished(study, run))
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.failed: list[Run] = []
        self._status_time = time.monotonic()
        self._signal = 0

    def work(self) -> int:
        """Execute all runs of the study until each has finished or failed; returns exit status 0. If a signal is
        received or the time limit is reached earlier, this stops all processes at their next checkpoint, and returns
        128 plus the number of the signal, or ``TIME_IS_UP``."""
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            self._say(f"{self.total - len(self.waiting)} of {self.total} runs are finished already")
            while self.waiting or any(slot.run for slot in self.slots):
                if self._signal or (self.deadline is not None and time.monotonic() >= self.deadline):
                    return self._stop()
                for slot in self.slots:
                    self._advance(slot)
                if time.monotonic() - self._status_time >= STATUS_SECONDS:
                    self._print_status()
                time.sleep(POLL_SECONDS)
            return 0
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self._signal = number

    def _advance(self, slot: Slot) -> None:
        """Start a process in a slot that has none. It executes the remaining commands of the slot's run or, if the slot
        has no run, those of the next waiting run."""
        if slot.process is not None and slot.process.poll() is not None:
            self._ended(slot, slot.process.returncode)
        if slot.run is None:
            self._take(slot)
        if slot.run is not None and slot.process is None:
            done = state.state_of(slot.run.folder).done
            left = [command for command in commands_of(self.study, slot.run) if command.name not in done]
            if left:
                self._start(slot, slot.run, left)
            else:
                name = slot.run.name
                self._free(slot)
                self._say(f"{name} is finished")

    def _take(self, slot: Slot) -> None:
        """Give a slot the first waiting run that no other process works on and that needs no unfinished run."""
        for _ in range(len(self.waiting)):
            run = self.waiting.popleft()
            before = self.study.run_before(run)
            if before is not None and before in self.failed:
                self._give_up(run, f"{before.name} failed, whose files it needs")
                continue
            if before is None or state.is_finished(self.study, before):
                lock = state.lock(run)
                # After a runner was killed, the process that it started may still train in the folder for a while.
                if lock is not None and not is_running(run.folder):
                    slot.run, slot.lock, slot.attempts = run, lock, 0
                    state.write_files(self.study, run)
                    return
                if lock is not None:
                    lock.close()
            self.waiting.append(run)

    def _start(self, slot: Slot, run: Run, commands: Sequence[Command]) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) // len(self.slots))
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        environment |= os.environ
        if slot.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot.gpu
        log = state.log_of(run.folder, commands[0].name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            slot.process = subprocess.Popen(
                words_of(run.folder, commands),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                # in a separate process group, so that Ctrl-C reaches only the runner, which then stops this process
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        slot.commands, slot.started = tuple(command.name for command in commands), time.monotonic()
        slot.attempts += 1
        self._say(f"{run.name} {'starts' if slot.attempts == 1 else 'starts again'}; its output: {log.parent}")

    def _ended(self, slot: Slot, status: int, *, stopped: bool = False) -> None:
        """Record that a slot's process has ended. If a command has now failed ``study.attempts`` times, the run is
        given up. A process that the runner itself has stopped does not count as a failure."""
        run = slot.run
        assert run is not None
        slot.process = None
        if status == 0:
            slot.attempts = 0
            return
        done, spent, _ = state.state_of(run.folder)
        name = next((name for name in slot.commands if name not in done), slot.commands[-1])
        if name != slot.commands[0]:
            slot.attempts = 1  # commands before it succeeded, so this was its first start
        seconds = time.monotonic() - slot.started - sum(done.get(name, 0.0) for name in slot.commands)
        state.keep(run.folder, spent=spent | {name: spent.get(name, 0.0) + max(0.0, seconds)})
        if not (stopped or self._signal) and slot.attempts >= self.study.attempts:
            end = "\n".join(_lines(state.log_of(run.folder, name))[-LOG_LINES:])
            text = f"{name} ended with status {status} ({slot.attempts} starts); the end of its log:\n{end}"
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

    def _stop(self) -> int:
        """Ask the processes of all runs to stop at their next checkpoint, wait for them, and kill those that still run
        after ``STOP_SECONDS``. Returns the exit status of ``work``."""
        busy = [(slot, slot.process) for slot in self.slots if slot.process is not None]
        for _, process in busy:
            process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + STOP_SECONDS
        for slot, process in busy:
            try:
                status = process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            self._ended(slot, status, stopped=True)
            self._free(slot)
        reason = signal.Signals(self._signal).name if self._signal else "the time is up"
        print(f"stopped ({reason}); the same command goes on")
        return 128 + self._signal if self._signal else TIME_IS_UP

    def _print_status(self) -> None:
        """Print, for each run that is being executed, the last line of the log of its current command."""
        self._status_time = time.monotonic()
        for slot in self.slots:
            if slot.run is not None and slot.process is not None:
                logs = [log for name in slot.commands if (log := state.log_of(slot.run.folder, name)).is_file()]
                newest = max(logs, key=lambda log: log.stat().st_mtime)  # _start has made one
                if lines := [line for line in _lines(newest) if line.strip()]:
                    print(f"{time.strftime('%H:%M:%S')} {slot.run.name}: {lines[-1].strip()}", flush=True)

    def _say(self, text: str) -> None:
        running = sum(slot.run is not None for slot in self.slots)
        finished = self.total - len(self.waiting) - running - len(self.failed)
        counts = f"{finished} finished, {running} running, {len(self.waiting)} waiting, {len(self.failed)} failed"
        print(f"{time.strftime('%H:%M:%S')} {text}\n         {counts}{self._time_left()}", flush=True)

    def _time_left(self) -> str:
        """Estimate the remaining time of the study, as text, from the mean duration of finished runs; the empty string
        if there are none."""
        runs = self.study.runs()
        seconds = [sum(state.state_of(run.folder).done.values()) for run in runs if state.is_finished(self.study, run)]
        running = [time.monotonic() - slot.started for slot in self.slots if slot.process is not None]
        unfinished = len(self.waiting) + len(running)
        if not seconds or not unfinished:
            return ""
        left = max(0.0, fmean(seconds) * unfinished - sum(running)) / min(len(self.slots), unfinished)
        return f", about {left / 60:.0f} min left"


def _lines(log: Path) -> list[str]:
    """Read the end of a log file, at most 16 KiB; returns its lines."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**14))
        return file.read().decode(errors="replace").splitlines()


def _end_with_parent() -> None:
    """Ask Linux to send this new process SIGTERM when its parent process, the runner, dies."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
