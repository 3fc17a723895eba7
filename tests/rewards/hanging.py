"""Compare pairs of answers, some of which take forever, while workers are killed: python -m tests.rewards.hanging

A row is a pair of answers to compare; a worker is a process of ``Verifier`` that compares them. For the numbers of
docs/scorers.md, add --rows 10000 --hanging 50 --kills 10 >> docs/results/scorers.jsonl

Prints one JSON line with the times. Prints none, and exits with status 1, if a row is lost or has a wrong score or
none, if a row that takes forever has a score other than 0, or if a process is left behind.
"""

import argparse
import importlib.metadata
import os
import random
import signal
import sys
import time
from pathlib import Path

from qerl_pl.rewards.verifier import Verifier
from tests.bench.harness import emit


def draw(num_rows: int, num_hanging: int, seed: int) -> tuple[list[tuple[str, str]], list[float | None]]:
    """Draw pairs of answers to compare, and the scores that they should get. Half of them are numbers and half algebra,
    and in a third the answers differ (score 0). ``num_hanging`` pairs whose comparison would not end, with score 0, are
    at random places."""
    rng = random.Random(seed)
    rows, scores = [], []
    for index in range(num_rows - num_hanging):
        n, wrong = rng.randrange(2, 10**6), rng.random() < 1 / 3
        if index % 2:
            rows.append((f"{n:,}", f"\\frac{{{2 * n + wrong}}}{{2}}"))
        else:
            rows.append((f"\\frac{{\\sqrt{{{n}}}}}{{3}}+x", f"x+{n + wrong}/(3\\sqrt{{{n}}})"))
        scores.append(float(not wrong))
    for index in sorted(rng.sample(range(num_rows), num_hanging)):
        rows.insert(index, ("5", f"(9999!)^{{{index + 9999}}}"))
        scores.insert(index, 0.0)
    return rows, scores


def resident_bytes(pid: int) -> int:
    """Read the peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def main() -> int:
    """Measure once and print one line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--hanging", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--time_limit", type=float, default=3.0, help="seconds of CPU time per row")
    parser.add_argument("--kills", type=int, default=3, help="workers that are killed with SIGKILL during the run")
    args = parser.parse_args()

    rows, scores = draw(args.rows, args.hanging, seed=0)
    verifier = Verifier(args.workers, args.time_limit)
    seen, killed, done = set(), [], 0

    def watch(count: int) -> None:
        nonlocal done
        done += count
        seen.update(verifier.pids())
        if len(killed) < args.kills and done > (len(killed) + 1) * args.rows // (args.kills + 1):
            killed.append(verifier.pids()[0])
            os.kill(killed[-1], signal.SIGKILL)

    start = time.perf_counter()
    verdicts = verifier.judge(rows, watch)
    seconds = time.perf_counter() - start
    peak = max(map(resident_bytes, verifier.pids()))
    verifier.close()

    unlike = [(row, v) for row, v, score in zip(rows, verdicts, scores, strict=True) if v.score != score]
    left = [pid for pid in seen if Path(f"/proc/{pid}").exists()]
    if unlike or left or done != args.rows:
        print(f"{len(unlike)} rows misjudged, e.g. {unlike[:3]}; {done} rows done; left {left}", file=sys.stderr)
        return 1
    emit(
        "verifier",
        {"rows": args.rows, "hanging": args.hanging},
        "-",
        killed=len(killed),
        workers=args.workers,
        time_limit_s=args.time_limit,
        took_s=seconds,
        unscored=sum(verdict.score is None for verdict in verdicts),
        processes_started=len(seen),
        peak_bytes_a_worker=peak,
        cores=len(os.sched_getaffinity(0)),
        math_verify=importlib.metadata.version("math-verify"),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
