"""``Verifier`` compares answers in a pool of processes. It returns a verdict for every row, even if a comparison does
not end or a process is killed."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.math import MathAnswer
from qerl_pl.rewards.verifier import Verifier

HANGING = ("5", "(9999!)^{9999}")


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    """A pool that all tests of this file share, so each test has to leave it in working order."""
    pool = Verifier(num_workers=2, time_limit=0.3)
    yield pool
    pool.close()


def is_running(pid: int) -> bool:
    """Return whether a process exists. A process that has ended still exists until its parent has waited for it."""
    return Path(f"/proc/{pid}").exists()


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> list[int]:
    """Wait until all processes have ended, but at most ``seconds``. Returns the ids of those that still exist."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(is_running, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]


def easy(count: int) -> tuple[list[tuple[str, str]], list[float]]:
    """Make rows and their scores; every third answer is wrong."""
    rows = [(str(n), f"\\frac{{{2 * n}}}{{2}}" if n % 3 else str(n + 1)) for n in range(count)]
    return rows, [float(n % 3 != 0) for n in range(count)]


def test_a_hanging_row_is_wrong_and_the_others_keep_their_order_off_the_main_thread_too(verifier):
    rows, scores = easy(40)
    rows[7] = rows[23] = HANGING
    verdicts, counts = [], []
    thread = threading.Thread(target=lambda: verdicts.extend(verifier.judge(rows, counts.append)))
    thread.start()
    thread.join()
    assert verdicts[7].score == verdicts[23].score == 0.0
    assert "more than 0.3 s" in verdicts[7].reason
    assert verdicts[7].cause is None
    assert [v.score for n, v in enumerate(verdicts) if n not in (7, 23)] == [
        s for n, s in enumerate(scores) if n not in (7, 23)
    ]
    assert sum(counts) == 40, "every row is counted once as progress"
    assert verifier.judge([]) == []


def test_a_worker_that_is_ready_takes_the_place_of_one_that_hangs():
    pool = Verifier(num_workers=2, time_limit=0.3)
    try:
        assert pool.judge([("x+1", "1+x")])[0].score == 1.0
        started = set(pool.pids())
        assert len(started) == 2, "also if there is only one row"
        assert "can be parsed by itself" in pool.judge([("x+1", HANGING[1])])[0].reason
        assert started & set(pool.pids())
    finally:
        pool.close()


def test_a_known_answer_that_hangs_alone_leaves_its_row_unscored(verifier):
    (verdict,) = verifier.judge([HANGING[::-1]])
    assert verdict.score is None
    assert verdict.cause == "hang"


@pytest.mark.parametrize(
    "answer", ["10^{10^{10}}", "(10^9)!", "(" * 300 + "5" + ")" * 300, "{" * 990, "\\sin", "\\frac{1}{0}", "1=[1,2)"]
)
def test_an_answer_that_explodes_is_wrong_where_the_known_one_is_plain(verifier, answer):
    assert verifier.judge([("5", answer)])[0].score == 0.0


def test_equal_rows_are_judged_once_and_counted_each(verifier):
    done = []
    start = time.monotonic()
    verdicts = verifier.judge([HANGING, ("5", "5.0")] * 200, done.append)
    assert time.monotonic() - start < 200 * verifier.time_limit
    assert [verdict.score for verdict in verdicts] == [0.0, 1.0] * 200
    assert sum(done) == 400


def test_a_killed_worker_is_replaced_and_its_row_judged_again(verifier):
    rows, scores = easy(60)
    victims = []

    def kill_one(count: int) -> None:
        if len(victims) < 3:
            victims.append(verifier.pids()[0])
            os.kill(victims[-1], signal.SIGKILL)

    assert [verdict.score for verdict in verifier.judge(rows, kill_one)] == scores
    assert len(victims) == 3
    assert not wait_until_gone(victims)
    assert len(verifier.pids()) == 2


def test_workers_that_die_between_batches_are_replaced(verifier):
    rows, scores = easy(6)
    assert [verdict.score for verdict in verifier.judge(rows)] == scores
    for pid in verifier.pids():
        os.kill(pid, signal.SIGKILL)
    assert [verdict.score for verdict in verifier.judge(rows)] == scores


def test_a_row_whose_worker_dies_twice_is_wrong():
    verifier = Verifier(num_workers=1, time_limit=30.0)
    victims, stop = set(), threading.Event()

    def kill_the_first_two_that_compare() -> None:
        while not stop.wait(0.02):
            for worker in [*verifier._workers]:
                if worker.row == 0 and len(victims) < 2:
                    victims.add(worker.process.pid)
                    worker.process.kill()

    killer = threading.Thread(target=kill_the_first_two_that_compare)
    killer.start()
    verdict, after = verifier.judge([HANGING, ("5", "5.0")])
    stop.set()
    killer.join()
    assert len(victims) == 2
    assert verdict.score == 0.0
    assert f"status {-signal.SIGKILL}" in verdict.reason
    assert after.score == 1.0
    verifier.close()


@pytest.mark.slow
def test_a_fork_starts_workers_of_its_own(verifier):
    rows, scores = easy(6)
    verifier.judge(rows)
    before = verifier.pids()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put([verdict.score for verdict in verifier.judge(rows)]))
    child.start()
    assert queue.get() == scores
    child.join()
    assert verifier.pids() == before
    assert [verdict.score for verdict in verifier.judge(rows)] == scores


def test_interrupting_a_batch_leaves_no_answer_for_the_next(verifier):
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    rows, scores = easy(20)
    with pytest.raises(KeyboardInterrupt):
        verifier.judge(rows, interrupt)
    assert [verdict.score for verdict in verifier.judge(rows)] == scores


def test_close_ends_the_processes_and_the_next_row_starts_new_ones(verifier):
    verifier.judge([("1", "1")])
    pids = verifier.pids()
    verifier.close()
    assert verifier.pids() == []
    assert not any(map(is_running, pids))
    assert verifier.judge([("1", "1")])[0].score == 1.0


@pytest.mark.slow
def test_a_pool_that_is_forgotten_ends_its_processes():
    verifier = Verifier(num_workers=1)
    verifier.judge([("1", "1")])
    pids = verifier.pids()
    del verifier
    assert not wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [
        "raise OSError",
        "os.kill(os.getpid(), signal.SIGKILL)",
        *(pytest.param(ending, marks=pytest.mark.long) for ending in ("pass", "sys.exit(3)")),
    ],
)
def test_no_worker_outlives_its_parent(ending):
    script = f"""
        import os, signal, sys
        from qerl_pl.rewards.verifier import Verifier
        verifier = Verifier(num_workers=1)
        assert [verdict.score for verdict in verifier.judge([("1", "1"), ("1", "2")])] == [1.0, 0.0]
        print(*verifier.pids(), flush=True)
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 1
    assert not wait_until_gone(pids)


def test_a_row_that_eats_memory_is_unscored_and_ends_its_worker_which_has_no_torch():
    # The limit of memory, 1 MiB, is less than the Python interpreter takes, so every row exceeds it.
    script = "import sys, qerl_pl.rewards.worker as worker; worker.HEAVY = 2**20; worker.main()"
    script += "; sys.exit('torch' in sys.modules)"
    row = '["5", "5", 1.0]\n'
    done = subprocess.run([sys.executable, "-c", script], input=2 * row, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, "a worker has imported torch"
    assert done.stdout.splitlines() == ['"ready"', '[null, "the comparison took more than 1 MiB", "memory"]']


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_an_error_and_not_a_hang(tmp_path, monkeypatch):
    verifier = Verifier(num_workers=1)
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("qerl_pl.rewards.verifier.MAX_FAILED_STARTS", 1)
    with pytest.raises(RuntimeError, match=r"qerl_pl\.rewards\.worker"):
        verifier.judge([("1", "1")])
    monkeypatch.delenv("PYTHONPATH")
    assert verifier.judge([("1", "1")])[0].score == 1.0
    verifier.close()


@pytest.mark.parametrize(("settings", "message"), [({"num_workers": 0}, "is 0"), ({"time_limit": 0.0}, "is 0.0")])
def test_settings_that_are_not_positive_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Verifier(**settings)


def test_a_reward_survives_a_pickle_with_its_settings():
    reward = pickle.loads(pickle.dumps(MathAnswer(marker="boxed", num_workers=1, time_limit=2.5)))
    assert (reward.marker, reward.verifier.num_workers, reward.verifier.time_limit) == ("boxed", 1, 2.5)
    completions = [Completion((), (), True, text) for text in ("\\boxed{\\frac12}", "<answer>1/2</answer>")]
    assert reward([Prompt((), "0.5")] * 2, completions) == [1.0, 0.0]
    reward.close()


def test_spans_too_long_to_be_answers_never_reach_a_worker():
    reward = MathAnswer("boxed")
    verdicts = reward.judge([f"\\boxed{{{'1' * 100_000}}}", "5", "\\boxed{5}"], ["5", "5", "\\sqrt{" * 300])
    assert [verdict.score for verdict in verdicts] == [0.0, 0.0, None]
    assert reward.verifier.pids() == []


SCRIPT = """
held = bytearray(b"1") * (1200 * 2**20)  # resident: more than a worker may use itself
from qerl_pl.rewards.math import MathAnswer
from qerl_pl.common.types import Completion, Prompt
completion = Completion((1,), (0.0,), True, text=r"<answer>\\frac{2}{4}</answer>")
reward = MathAnswer(num_workers=1)
print("SCORE", reward([Prompt((1,), r"\\frac{1}{2}")], [completion]))
"""


@pytest.mark.slow
def test_memory_of_the_parent_is_not_held_against_a_row():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert "SCORE [1.0]" in done.stdout


@pytest.mark.parametrize("tower", [r"((3!)!)!", r"(((3!)!)!)!", r"((3!)!\cdot 1000)!", r"(10^6-1)!", r"\pi^{(8!)!}"])
def test_towers_of_factorials_are_measured_before_they_are_computed(tower):
    verifier = Verifier(num_workers=1, time_limit=0.9)
    verdicts = verifier.judge([("5", tower), (tower, "5"), ("((3!)!)!", "720!")])
    verifier.close()
    assert [verdict.score for verdict in verdicts[::2]] == [0.0, 1.0]
    assert not [verdict for verdict in verdicts if "took more than" in verdict.reason]
