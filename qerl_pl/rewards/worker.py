"""Run a worker process of ``rewards/verifier.py``: for each JSON line on standard input (known answer, completion's
answer, time limit), print one with the verdict. The process does not import torch, so it starts in half a second and
uses no GPU."""

import json
import os
import resource
import signal
import sys

MEMORY = 4 * 2**30  # bytes of address space
HEAVY = 2**30  # bytes of resident memory; with more, a verdict may be wrong, because sympy catches MemoryError


def main() -> None:
    """Compare answers until standard input ends. At the time limit of a comparison, SIGPROF ends the process."""
    # On Ctrl-C, the trainer closes this process's standard input, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from qerl_pl.rewards.equivalence import judge, judge_known

    # load the parser's grammar and sympy's lazy modules before the first comparison with a time limit
    judge("\\frac{1}{2}", "x = \\sqrt{1} / 2")
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    with open(os.devnull, "w") as nowhere:  # what libraries print is discarded
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        gold, answer, limit = json.loads(line)  # answer null asks whether the known answer alone can be read
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            verdict = judge_known(gold) if answer is None else judge(gold, answer)
        except Exception as error:  # sympy raises many kinds of errors on models' answers; none may end the process
            cause = "memory" if isinstance(error, MemoryError) else "crash"
            verdict = (None, f"the verifier gave up: {type(error).__name__}", cause)
        signal.setitimer(signal.ITIMER_PROF, 0)
        heavy = peak_memory() > HEAVY
        if heavy:
            verdict = (None, f"the comparison took more than {HEAVY // 2**20} MiB", "memory")
        print(json.dumps(verdict), file=answers, flush=True)
        if heavy:
            return


def peak_memory() -> int:
    """Return this process's peak resident memory in bytes. It is read from /proc, because ``getrusage`` also counts the
    memory that the parent process had when it forked this one."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
