"""Run checks and print one line for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from qerl_pl.common.phases import phase


class NotChecked(Exception):
    """A check was left out, because an earlier check failed whose result it needs."""


def print_checks(checks: Iterable[tuple[str, Callable[[], str]]], optional: Collection[str] = ()) -> int:
    """Run checks and print one line per check, with [no] if a required check failed, and [--] if an optional one failed
    or the check was left out.

    Returns:
        The number of required checks that failed.
    """
    failed = 0
    for name, check in checks:
        try:
            with phase(f"checking: {name}"):
                mark, said = "ok", check()
        except NotChecked as error:
            mark, said = "--", str(error)
        except Exception as error:
            kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
            mark, said = "--" if name in optional else "no", f"{kind}{error}".splitlines()[0]
            failed += name not in optional
        print(f"[{mark}] {name:20} {said}")
    return failed
