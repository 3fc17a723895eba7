"""Run all benchmarks, or the named ones, each in its own process: python -m tests.bench [NAME ...]

The exit status is 1 if a benchmark failed. Benchmarks compare what they measure with a reference first; one whose
result is wrong prints no timings.
"""

import subprocess
import sys
from pathlib import Path


def main(names: list[str]) -> int:
    """Run the named benchmarks (bench_NAME.py), or all; returns the exit status."""
    there_are = [path.stem.removeprefix("bench_") for path in sorted(Path(__file__).parent.glob("bench_*.py"))]
    if unknown := set(names) - set(there_are):
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(there_are)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or there_are:
        print(f"tests.bench.bench_{name}", file=sys.stderr)
        if subprocess.run([sys.executable, "-m", f"tests.bench.bench_{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print("failed:", ", ".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
