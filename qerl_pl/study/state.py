"""State on disk of a run of a study: the commands that succeeded, and a lock that keeps two processes that execute the
same study from executing the same run."""

import fcntl
import json
from pathlib import Path
from typing import IO, Any, NamedTuple

from qerl_pl.common.files import write_whole
from qerl_pl.study.study_file import Run, Study, commands_of, files_of

STATE = "study.json"
LOCK = ".study.lock"


class State(NamedTuple):
    """Record of the commands of a run that have been executed."""

    done: dict[str, float] = {}  # noqa: RUF012 (nobody writes to it)
    """Duration in seconds of each successful command, by its name, added up over all its attempts, failed and stopped
    ones too."""
    spent: dict[str, float] = {}  # noqa: RUF012 (nobody writes to it)
    """Seconds that failed or stopped attempts took, by the name of the command; one that has succeeded has no entry."""
    failure: str | None = None
    """Reason why the last attempt failed; None if it did not fail."""


def state_of(folder: Path) -> State:
    """Read the state of the run in a folder."""
    path = folder / STATE
    try:
        return State(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else State()
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove it; the run's commands are then executed again"
        ) from error


def is_finished(study: Study, run: Run) -> bool:
    """Return True if every command of the run succeeded."""
    return set(state_of(run.folder).done) >= {command.name for command in commands_of(study, run)}


def keep(folder: Path, **changes: Any) -> None:
    """Change some fields of the state of the run in a folder."""
    write_whole(folder / STATE, json.dumps(state_of(folder)._replace(**changes)._asdict(), indent=2) + "\n")


def succeeded(folder: Path, name: str, seconds: float) -> None:
    """Record that a command of a run succeeded in ``seconds``, and remove the record of an earlier failure."""
    done, spent, _ = state_of(folder)
    others = {other: value for other, value in spent.items() if other != name}
    keep(folder, done=done | {name: seconds + spent.get(name, 0.0)}, spent=others, failure=None)


def write_files(study: Study, run: Run) -> None:
    """Write the configuration files of a run, which its commands read (``-c``). The caller must hold the run's lock.
    Raises ValueError if the run began with other settings than those that the study's file now gives it."""
    check_unchanged(study, run)
    for path, text in files_of(study, run).items():
        write_whole(path, text)


def check_unchanged(study: Study, *runs: Run) -> None:
    """Raise ValueError if the study's file has changed such that a run which has begun would now have other settings;
    the message names the run's configuration file that differs. Without ``runs``, all runs of the study are checked."""
    for run in runs or study.runs():
        if state_of(run.folder).done or (run.folder / "checkpoints").exists():
            for path, text in files_of(study, run).items():
                if path.exists() and path.read_text(encoding="utf-8") != text:
                    raise ValueError(
                        f"{path} differs from the study's file: the run began with other settings, and results are "
                        "never overwritten; give the arm another name, or the study another output"
                    )


def lock(run: Run) -> IO[str] | None:
    """Lock a run, and return a file; the run stays locked until this file is closed or this process ends. Returns None
    if another process has locked the run."""
    run.folder.mkdir(parents=True, exist_ok=True)
    file = (run.folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def log_of(folder: Path, command: str) -> Path:
    """Return the path of a command's log file, to which every start of the command appends."""
    return folder / "study" / f"{command}.log"
