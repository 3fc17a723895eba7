"""Clock of chat templates: one date for the whole run, written in the same way in every locale and time zone."""

import locale
import re
from collections.abc import Callable
from datetime import UTC, datetime

CLOCK = "strftime_now"
"""Name of the function by which a chat template writes the date, as in ``strftime_now("%d %B %Y")``."""


def today() -> str:
    """Return the current date in UTC, e.g. ``2026-11-27``."""
    return datetime.now(UTC).date().isoformat()


def template_clock(date: str) -> Callable[[str], str]:
    """Return a function ``strftime_now(format)`` for chat templates that formats ``date`` instead of the current time.
    ``date`` is in ISO form, with or without a time of day; without one, it means midnight.

    The directives of ``strftime`` that depend on the process's locale (names of days and months, ``%p``, ``%c``) are
    written as in the C locale, and the moment has no time zone (``%Z`` is empty).
    """
    try:
        moment = datetime.fromisoformat(date).replace(tzinfo=None)
    except ValueError as error:
        raise ValueError(
            f"data.date is {date!r}; expected a date such as 2026-11-27, or with a time, 2026-11-27T15:30"
        ) from error
    seconds = str(int((moment - datetime(1970, 1, 1)).total_seconds()))  # strftime's depend on the time zone

    def strftime_now(format: str) -> str:
        format = re.sub(r"%([-_0^#]*\d*)(.)", lambda part: seconds if part[2] == "s" else part[0], format)
        before = locale.setlocale(locale.LC_TIME)
        locale.setlocale(locale.LC_TIME, "C")
        try:
            return moment.strftime(format)
        finally:
            locale.setlocale(locale.LC_TIME, before)

    return strftime_now
