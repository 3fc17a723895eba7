"""Worker process of the verifier: answers each JSON line of input with one line of output.

It imports no module that imports torch, so it starts in half a second and does not use a GPU.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

MEMORY = 4 * 2**30  # bytes of address space
HEAVY = 2**30  # bytes of resident memory; with more, a verdict may be wrong, because sympy catches MemoryError


def main() -> None:
    """Compare answers until the end of input. SIGPROF ends the process when a comparison takes too long."""
    # Ctrl-C is left to the trainer, which then closes this process's input and so ends it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from qerl_pl.rewards.equivalence import judge, judge_known

    # loads the parser's grammar and sympy's lazy modules before the first timed comparison
    judge("\\frac{1}{2}", "x = \\sqrt{1} / 2")
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    with open(os.devnull, "w") as nowhere:  # what libraries print is discarded
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        gold, answer, limit = json.loads(line)  # a line whose answer is null asks whether the known answer can be read
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
    """Return this process's peak resident memory in bytes, from /proc, because ``getrusage`` also counts the memory
    that the forked parent had before the exec."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
