"""State on disk of a run of a study: the commands that succeeded, and a lock that keeps two processes that execute the
same study from executing the same run."""

import fcntl
import json
from pathlib import Path
from typing import IO, Any

from qerl_pl.common.files import write_whole
from qerl_pl.study.study_file import Run, Study, commands_of, files_of

STATE = "study.json"
LOCK = ".study.lock"


def seconds_done(run: Run) -> dict[str, float]:
    """Return the duration in seconds of each successful command of a run, by the command's name, added up over all its
    attempts, failed and stopped ones too."""
    return _read(run.folder).get("done", {})


def seconds_spent(run: Run) -> dict[str, float]:
    """Return, for each command of a run by its name, the total duration in seconds of its attempts that failed or were
    stopped; commands that have succeeded since then are left out."""
    return _read(run.folder).get("spent", {})


def failure(run: Run) -> str | None:
    """Return the reason why the last attempt of a run failed; None if it did not fail."""
    return _read(run.folder).get("failure")


def is_finished(study: Study, run: Run) -> bool:
    """Return True if every command of the run succeeded."""
    return set(seconds_done(run)) >= {command.name for command in commands_of(study, run)}


def keep(folder: Path, **changes: Any) -> None:
    """Change some fields of the state of the run in a folder."""
    write_whole(folder / STATE, json.dumps(_read(folder) | changes, indent=2) + "\n")


def succeeded(folder: Path, name: str, seconds: float) -> None:
    """Record that a command of a run succeeded in ``seconds``, and remove the record of an earlier failure."""
    state = _read(folder)
    spent = state.get("spent", {})
    done = state.get("done", {}) | {name: seconds + spent.pop(name, 0.0)}
    keep(folder, done=done, spent=spent, failure=None)


def write_files(study: Study, run: Run) -> None:
    """Write the configuration files of a run, which its commands read (``-c``). The caller must hold the run's lock
    (see ``lock``). ValueError: the study's file now gives the run other settings than those with which the run
    began."""
    check_unchanged(study, run)
    for path, text in files_of(study, run).items():
        write_whole(path, text)


def check_unchanged(study: Study, *runs: Run) -> None:
    """Raise ValueError if the study's file has changed such that a run which has begun would now have other settings;
    the message names the run's configuration file that differs. Without ``runs``, all runs of the study are checked."""
    for run in runs or study.runs():
        if seconds_done(run) or (run.folder / "checkpoints").exists():
            for path, text in files_of(study, run).items():
                if path.exists() and path.read_text(encoding="utf-8") != text:
                    raise ValueError(
                        f"{path} differs from the study's file: the run began with other settings, and results are "
                        "never overwritten; give the arm another name, or the study another output"
                    )


def lock(run: Run) -> IO[str] | None:
    """Lock a run until the returned file is closed or this process ends; None if another process has locked it."""
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


def _read(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove it; the run's commands are then executed again"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds no mapping; remove it; the run's commands are then executed again")
    return state
