"""The verifier's worker process: one JSON line in, one out, until its input closes. Started by ``verifier.py``.

It imports neither torch nor anything of ours that does, so it starts in half a second and never touches a GPU.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

MEMORY = 4 * 2**30  # bytes of address space
HEAVY = 2**30  # bytes resident: beyond them a verdict may rest on a MemoryError that sympy swallowed


def main() -> None:
    """Serve until end of input. Dies by SIGPROF when a row takes more processor time than its limit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which closes our input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from qerl_pl.rewards.equivalence import judge, judge_known

    judge("\\frac{1}{2}", "x = \\sqrt{1} / 2")  # loads the grammar and sympy's lazy parts outside of any row's time
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    with open(os.devnull, "w") as nowhere:  # nothing that a library prints may get between the lines
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        gold, answer, limit = json.loads(line)  # without an answer: whether the known one can be read
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            verdict = judge_known(gold) if answer is None else judge(gold, answer)
        except Exception as error:  # sympy raises all kinds on what models write; none may end the process
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
    """Most bytes that this process was resident with. (``getrusage`` counts its parent's too, before exec.)"""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
