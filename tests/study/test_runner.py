"""The runner of a study starts its runs as processes, several at a time. It goes on after runs that fail or are killed,
and never repeats a finished command."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from qerl_pl.study import runner as runner_module
from qerl_pl.study import state
from qerl_pl.study.runner import TIME_IS_UP, Runner, Slot, slots_for
from qerl_pl.study.study_file import Command, Study

WORK = """
import json, os, signal, sys, time
from pathlib import Path
from qerl_pl.study.state import succeeded
run, behaviour = Path(sys.argv[1]), sys.argv[2]
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
for name, folder in json.loads(sys.argv[3]):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "steps"  # the checkpoint: steps done, as a run keeps them
    with (folder / "starts").open("a") as file:
        file.write("x")
    began = time.monotonic()
    while (done := len(place.read_text()) if place.exists() else 0) < 5:
        time.sleep(0.02 if behaviour != "slow" else 0.1)
        if behaviour == "fails" and done == 2 and not (folder / "mended").exists():
            sys.exit("it broke")
        place.write_text("x" * (done + 1))
        print(f"{name}: step {done + 1} of 5", flush=True)
        if behaviour == "fails once" and len((folder / "starts").read_text()) == 1:
            sys.exit("it broke")
        if stopped:
            sys.exit(143)
    succeeded(run, name, time.monotonic() - began)
"""
"""Program that does 5 steps per command, each with a checkpoint, and stops after a step on SIGTERM, like a run."""


@pytest.fixture(autouse=True)
def small_processes_that_are_looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "words_of", words)
    monkeypatch.setattr(runner_module, "POLL_SECONDS", 0.02)


def words(run: Path, commands: Sequence[Command]) -> list[str]:
    """Replace the runner's function for the command line of a run by one that starts a small program instead of
    training. The name of the run's arm decides what this program does, e.g. fail once."""
    behaviour = next(part for part in ("fails-once", "fails", "slow", "good") if part in run.parts)
    folders = [(name, arguments[arguments.index("--run_dir") + 1]) for name, arguments in commands]
    return [sys.executable, "-c", WORK, str(run), behaviour.replace("-", " "), json.dumps(folders)]


def study_of(output: Path, *arms: str, seeds: int = 2) -> Study:
    return Study(output, {arm: {} for arm in arms}, list(range(seeds)), evaluations={"reach": {}})


def runner_of(study: Study, jobs: int = 3) -> Runner:
    return Runner(study, [Slot(None) for _ in range(jobs)], 60)


def work(study: Study, *, jobs: int = 3) -> Runner:
    runner = runner_of(study, jobs)
    assert runner.work() == 0
    return runner


def when_it_steps(folder: Path, act: Callable[[], object]) -> None:
    """Call ``act``, in a thread, as soon as the small program that writes to ``folder`` has done its first step."""

    def wait() -> None:
        while not (folder / "steps").exists():
            time.sleep(0.005)
        act()

    threading.Thread(target=wait, daemon=True).start()


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


def test_all_runs_and_their_evaluations_finish_and_are_not_run_again(tmp_path, capsys):
    study = study_of(tmp_path, "good")
    assert not work(study).failed
    printed = capsys.readouterr().out
    assert "2 finished, 0 running, 0 waiting, 0 failed" in printed
    assert "1 finished, 1 running, 0 waiting, 0 failed, about 0 min left" in printed
    for run in study.runs():
        assert state.is_finished(study, run)
        assert set(state.state_of(run.folder).done) == {"fit", "reach"}
        assert starts(run.folder) == starts(run.folder / "evaluations" / "reach") == 1
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert not work(study).failed
    assert "2 of 2 runs are finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    more = study_of(tmp_path, "good", seeds=3)
    work(more)
    assert [starts(run.folder) for run in more.runs()] == [1, 1, 1], "a further seed is all that is run"
    evaluated = replace(more, arms={"good": {}, "slow": {}}, evaluations={"other": {}})
    work(evaluated)
    assert [starts(run.folder) for run in evaluated.runs()] == [1] * 6, "a study that shares runs trains none again"
    assert all(starts(run.folder / "evaluations" / "other") == 1 for run in evaluated.runs())
    assert all(state.is_finished(study, run) for study in (more, evaluated) for run in study.runs())


def test_a_study_tells_when_runs_start_and_what_they_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner_module, "STATUS_SECONDS", 0.05)
    study = study_of(tmp_path, "slow", seeds=1)
    work(study)
    printed = capsys.readouterr().out
    (run,) = study.runs()
    assert f"slow/seed-0 starts; its output: {run.folder / 'study'}" in printed
    assert "slow/seed-0: fit: step 3 of 5" in printed
    assert "slow/seed-0: reach: step 3 of 5" in printed, "the log of the command that is executed now"


def test_a_run_that_fails_is_tried_again_then_reported_and_the_others_go_on(tmp_path, capsys):
    study = study_of(tmp_path, "fails", "fails-once", "good", seeds=1)
    runner = work(study)
    fails, once, good = study.runs()
    assert [run.name for run in runner.failed] == ["fails/seed-0"]
    assert state.is_finished(study, once)
    assert state.is_finished(study, good)
    assert (starts(fails.folder), starts(once.folder), starts(good.folder)) == (2, 2, 1)
    assert "it broke" in str(state.state_of(fails.folder).failure)
    assert "fails/seed-0 FAILED: fit ended with status 1 (2 starts)" in capsys.readouterr().out
    for folder in (fails.folder, fails.folder / "evaluations" / "reach"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mended").touch()
    work(study)
    assert starts(fails.folder) == 3, "given again, it goes on from its checkpoint"
    assert state.state_of(fails.folder).failure is None


@pytest.mark.parametrize("name", ["fit", "reach"])
def test_when_the_time_is_up_runs_stop_at_a_checkpoint_and_go_on_later(tmp_path, capsys, name):
    study = replace(study_of(tmp_path, "slow", seeds=2), attempts=1)
    first = study.runs()[0]
    folder = first.folder if name == "fit" else first.folder / "evaluations" / name
    runner = runner_of(study)
    when_it_steps(folder, lambda: setattr(runner, "deadline", 0.0))
    assert runner.work() == TIME_IS_UP
    assert "stopped (the time is up)" in capsys.readouterr().out
    assert 1 <= len((folder / "steps").read_text()) < 5
    assert state.state_of(first.folder).spent[name] > 0
    assert state.state_of(first.folder).failure is None, "being stopped is no failure"
    assert not work(study).failed
    assert starts(folder) == 2
    assert state.state_of(first.folder).done[name] > 0.5, "the time of both starts"


def test_a_signal_stops_the_runs_too(tmp_path):
    study = study_of(tmp_path, "slow", seeds=1)
    when_it_steps(study.runs()[0].folder, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert runner_of(study).work() == 128 + signal.SIGTERM
    work(study)
    assert state.is_finished(study, study.runs()[0])


def test_processes_of_a_runner_that_was_killed_end_and_a_new_one_goes_on(tmp_path):
    study = study_of(tmp_path, "slow", seeds=3)
    process = get_context("fork").Process(target=work, args=(study,))
    process.start()
    steps = study.runs()[0].folder / "steps"
    while not steps.exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    work(study)
    for run in study.runs():
        assert state.is_finished(study, run)
        assert 1 <= starts(run.folder) <= 2
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == "", "no process is left behind"


def test_two_runners_at_once_never_work_on_the_same_run(tmp_path):
    study = study_of(tmp_path, "good", seeds=6)
    processes = [get_context("fork").Process(target=work, args=(study,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [starts(run.folder) for run in study.runs()] == [1] * 6


def test_settings_that_changed_since_a_run_began_are_refused_before_anything_starts(tmp_path):
    study = study_of(tmp_path, "good", seeds=1)
    work(study)
    changed = replace(study, settings={"trainer": {"max_steps": 9}})
    with pytest.raises(ValueError, match=r"settings\.yaml differs from the study's file"):
        state.check_unchanged(changed)
    state.check_unchanged(study)
    assert json.loads((study.runs()[0].folder / "study.json").read_text())["done"]


def test_slots_follow_the_cores_where_there_is_no_gpu(tmp_path):
    study = study_of(tmp_path, "good", seeds=500)
    assert len(slots_for(study, 5)) == 5
    assert len(slots_for(study_of(tmp_path, "good", seeds=2), 5)) == 2, "no more than runs"
    assert len(slots_for(replace(study, jobs=3))) == 3
    assert len(slots_for(study)) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_a_run_that_reads_another_runs_files_begins_when_that_is_finished(tmp_path):
    study = replace(study_of(tmp_path, "slow", "good"), after={"good": "slow"})
    assert not work(study, jobs=4).failed
    for run in study.runs()[1::2]:
        before = study.run_before(run)
        assert before is not None
        assert (before.arm, before.seed) == ("slow", run.seed)
        ended = (before.folder / state.STATE).stat().st_mtime
        assert (run.folder / "starts").stat().st_mtime >= ended
    assert study.run_before(study.runs()[0]) is None


def test_a_run_whose_predecessor_failed_is_given_up_with_that_reason(tmp_path):
    study = replace(study_of(tmp_path, "fails", "good", seeds=1), after={"good": "fails"})
    assert [run.arm for run in work(study, jobs=2).failed] == ["fails", "good"]
    assert state.state_of(study.runs()[1].folder).failure == "fails/seed-0 failed, whose files it needs"
    assert not (study.runs()[1].folder / "starts").exists()
