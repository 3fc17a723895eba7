"""Replace an attribute of another package at run time, after checking that it has the expected signature."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from qerl_pl.common.packages import TESTED, installed_vllm


def replace(owner: Any, name: str, new: object, *, takes: Sequence[str]) -> None:
    """Replace the function ``owner.name`` of another package by ``new``. Raises RuntimeError if it does not exist or
    has other parameters than ``takes`` (``expect``)."""
    expect(owner, name, takes)
    setattr(owner, name, new)


def replace_once(owner: Any, name: str, make: Callable[[Any], Any], *, takes: Sequence[str]) -> None:
    """Replace the function ``owner.name`` by ``make(owner.name)``, as ``replace`` does, unless ``owner.name`` is a
    function of this project already. So a second call has no effect."""
    present = getattr(owner, name, None)
    if not str(getattr(present, "__module__", "")).startswith("qerl_pl."):
        replace(owner, name, make(present), takes=takes)


def replace_module(name: str, other: str, *, has: Mapping[str, Sequence[str]]) -> None:
    """Register an empty module under the name ``name``, unless a module of this name has been imported already. It
    stands in for a module that cannot be imported: its attributes are those of the module ``other``, which is imported
    at the first use of one. The functions of ``other`` that are keys of ``has`` must take the parameters listed there
    (``expect``)."""

    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        module = import_module(other)
        for function, takes in has.items():
            expect(module, function, takes)
        return getattr(module, wanted)

    if name not in sys.modules:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name])["__getattr__"] = attribute


@contextmanager
def replaced(owner: Any, name: str, new: object, *, takes: Sequence[str]) -> Iterator[None]:
    """Replace the function ``owner.name`` by ``new``, after the check of ``replace``, until the context ends."""
    before = getattr(owner, name, None)
    replace(owner, name, new, takes=takes)
    try:
        yield
    finally:
        setattr(owner, name, before)


def expect(owner: Any, name: str, takes: Sequence[str]) -> None:
    """Raise RuntimeError unless the function ``owner.name`` of another package exists and has the parameters ``takes``,
    in this order, and further ones only with defaults."""
    where = f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', type(owner).__qualname__)}.{name}"
    about = f"{' '.join(installed_vllm())}, which this project patches (python -m qerl_pl doctor lists the patches)"
    tested = ", ".join(TESTED["vllm"])
    if (present := getattr(owner, name, None)) is None:
        raise RuntimeError(f"{where} is gone from {about}: install a tested version ({tested})")
    parameters = list(inspect.signature(present).parameters.values())
    extra = [one.name for one in parameters[len(takes) :] if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
    if [one.name for one in parameters[: len(takes)]] != list(takes) or extra:
        listed = ", ".join(one.name for one in parameters)
        raise RuntimeError(
            f"{where} takes ({listed}) and not ({', '.join(takes)}) in {about}: install a tested version ({tested})"
        )
