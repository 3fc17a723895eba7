"""Every benchmark, each in a process of its own: python -m tests.bench [NAME ...]

One JSON line a result on stdout; a benchmark whose check is red prints none and makes this exit with 1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(names: list[str]) -> int:
    """Run the named benchmarks (bench_NAME.py), or all. Returns the number of those that failed, 1 at most."""
    found = {path.stem.removeprefix("bench_"): path.stem for path in sorted(Path(__file__).parent.glob("bench_*.py"))}
    if unknown := set(names) - set(found):
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(found)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or found:
        print(f"tests.bench.{found[name]}", file=sys.stderr)
        if subprocess.run([sys.executable, "-m", f"tests.bench.{found[name]}"], check=False).returncode:
            failed.append(name)
    if failed:
        print("failed:", ", ".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
