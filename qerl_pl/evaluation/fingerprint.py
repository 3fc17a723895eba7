"""Describe an object by its class's source code and its state, so that equal descriptions mean equal behaviour."""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

from torch import Tensor

PLAIN = str, bytes, int, float, complex, bool, NoneType


class Indescribable(ValueError):
    """Raised for an object that cannot be described in a way that is the same in every process."""


def describe(value: object) -> str:
    """Describe an object by import paths, digests of their source, and settings, recursively.

    Equal objects have equal descriptions in every process. The settings of an object are what pickle would store, so
    ``__reduce__`` and ``__getstate__`` are respected. The digest of a module inside a package covers all files of the
    package, because modules of a package often use one another.

    Args:
        value: an instance of a class, a function, or plain data.

    Raises:
        Indescribable: it contains something that cannot be imported by name (a lambda, a local class), that pickle
            refuses (a lock, a file), a tensor, or itself.
    """
    return _describe(value, ())


def digest_of(paths: Iterable[Path]) -> str:
    """Compute a digest of sixteen hex digits from the names and contents of files, in the given order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _describe(value: Any, above: tuple[int, ...]) -> str:
    if type(value) in PLAIN:
        return repr(value)
    if id(value) in above:
        raise Indescribable(f"a {type(value).__qualname__} holds itself")
    above = (*above, id(value))
    if isinstance(value, type):
        _check_name(value)
        return " ".join(_named(each) for each in inspect.getmro(value) if each is not object) or "object"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return f"{_named(value)} {_describe((vars(value), cells), above)}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(_describe(each, above) for each in value)})"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}({', '.join(sorted(_describe(each, above) for each in value))})"
    if type(value) is dict:
        return f"{{{', '.join(f'{_describe(key, above)}: {_describe(own, above)}' for key, own in value.items())}}}"
    return _describe_object(value, above)


def _describe_object(value: Any, above: tuple[int, ...]) -> str:
    made = _reduced(value)
    if isinstance(made, str):  # pickle's way to say: import this name
        parts = [type(value), getattr(value, "__module__", None), made, getattr(value, "__wrapped__", None)]
    else:
        make, arguments, state, items, pairs = (*made, None, None, None)[:5]
        parts = [type(value), make, arguments, state, list(items or ()), list(pairs or ())]
    return f"({' '.join(_describe(part, above) for part in parts)})"


def _reduced(value: Any) -> Any:
    """Return what pickle would store of an object."""
    if isinstance(value, Tensor):
        raise Indescribable("tensors are not described")
    if isinstance(value, BuiltinFunctionType) and inspect.ismodule(value.__self__):
        return value.__qualname__
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        return reduce(value) if reduce else value.__reduce_ex__(4)
    except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError, pickle.PicklingError) as error:
        raise Indescribable(f"a {type(value).__qualname__} is not plain data: {error}") from error


def _check_name(owner: type) -> None:
    """Refuse a class that was created dynamically: its name and file do not determine its behaviour."""
    found: Any = sys.modules.get(owner.__module__)
    for part in owner.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not owner and owner.__module__ not in sys.builtin_module_names:
        raise Indescribable(f"{owner.__module__}.{owner.__qualname__} is not the class of that name")


def _named(owner: type | FunctionType) -> str:
    """Return the import path of a class or function, and a digest of its source."""
    name = f"{owner.__module__}.{owner.__qualname__}"
    if "<" in name:
        raise Indescribable(f"{name} cannot be imported by name: define it at the top of a module")
    if owner.__module__ in sys.builtin_module_names:
        return name
    try:
        path = Path(inspect.getfile(owner))
    except (TypeError, OSError) as error:
        raise Indescribable(f"the source of {name} is not known") from error
    if not path.is_file():
        raise Indescribable(f"the source of {name}, {path}, is not there")
    in_package = bool(getattr(sys.modules.get(owner.__module__), "__package__", ""))
    return f"{name}@{digest_of(sorted({path, *path.parent.glob('*.py')}) if in_package else [path])}"
