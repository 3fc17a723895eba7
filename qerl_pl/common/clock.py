"""Clock of chat templates: one date for the whole run, written in the same way in every locale and time zone."""

import re
from collections.abc import Callable
from datetime import UTC, datetime

CLOCK = "strftime_now"
"""Name of the function by which a chat template writes the date, as in ``strftime_now("%d %B %Y")``."""
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WHOLE = {"c": "%a %b %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S", "r": "%I:%M:%S %p", "+": "%c"}


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
    words = {
        "A": _DAYS[moment.weekday()],
        "a": _DAYS[moment.weekday()][:3],
        "B": _MONTHS[moment.month - 1],
        "b": _MONTHS[moment.month - 1][:3],
        "h": _MONTHS[moment.month - 1][:3],
        "p": "AM" if moment.hour < 12 else "PM",
        "P": "am" if moment.hour < 12 else "pm",
        "s": str(int((moment - datetime(1970, 1, 1)).total_seconds())),  # strftime's depends on the time zone
    }

    def directive(match: re.Match[str]) -> str:
        flags, width, letter = match.groups()
        if letter in _WHOLE:
            word = strftime_now(_WHOLE[letter])
        elif letter in words:
            word = words[letter]
        else:
            return moment.strftime(f"%{flags}{width}{letter}")
        return (word.upper() if {*flags} & {*"^#"} else word).rjust(int(width or 0))

    def strftime_now(format: str) -> str:
        # E and O ask for a locale's own numerals and eras
        return re.sub(r"%([-_0^#]*)(\d{0,2})[EO]?([A-Za-z%+])", directive, format)

    return strftime_now
