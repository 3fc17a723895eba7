"""Describe a type hint in the words of a YAML file, e.g. ``int or null``, ``list of str``."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any


def words(hint: Any, *, shown: Callable[[Any], str] = lambda each: getattr(each, "__name__", str(each))) -> str:
    """Describe a type.

    Args:
        hint: a type hint.
        shown: function that returns the text of a class, or of a value of a Literal.
    """
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(shown(each) for each in inside)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words(each, shown=shown) for each in inside)
    if inside and isinstance(origin, type) and issubclass(origin, Callable):
        return words(inside[-1], shown=shown)
    if inside:
        name = "list" if origin is tuple else origin.__name__
        return f"{name} of {' to '.join(words(each, shown=shown) for each in inside if each is not ...)}"
    return "null" if hint is type(None) else shown(hint)
