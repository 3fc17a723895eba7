"""A cache of an evaluation's finished batches, so that an interrupted one can be resumed, and the cache's key."""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from types import BuiltinFunctionType, FunctionType
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from qerl_pl import __version__
from qerl_pl.common.files import read_lines, write_whole
from qerl_pl.common.types import Prompt
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.checksums import checksums
from qerl_pl.rollout.common import end_tokens


class EvaluationCache:
    """Stores the records of finished batches in files named by a digest of everything that the records depend on.

    Args:
        folder: folder of the cache's files.
        identity: everything but the prompts that the records depend on, as JSON; see ``evaluation_identity``.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder / _digest(identity)

    def read(self, prompts: Sequence[Prompt], *, num_rows: int) -> list[dict[str, Any]] | None:
        """Return the ``num_rows`` stored records of a batch, or None if it is not finished or its file is damaged."""
        try:
            rows = [json.loads(line) for line in read_lines(self._path(prompts))]
        except (FileNotFoundError, ValueError):  # not UTF-8, or no JSON
            return None
        return rows if len(rows) == num_rows else None

    def write(self, prompts: Sequence[Prompt], rows: Sequence[Mapping[str, Any]]) -> None:
        """Store the records of a batch atomically."""
        write_whole(self._path(prompts), "".join(json.dumps(row) + "\n" for row in rows))

    def _path(self, prompts: Sequence[Prompt]) -> Path:
        return self.folder / f"{_digest([list(prompt) for prompt in prompts])}.jsonl"


def open_cache(folder: Path, identity: Mapping[str, Any]) -> EvaluationCache | None:
    """Open an evaluation's cache; returns None, with a warning, if engine or rewards cannot be described."""
    built = identity["engine and rewards"]
    if isinstance(built, Indescribable):
        rank_zero_warn(
            "this evaluation starts anew if it is interrupted: the engine or a reward cannot be described, and "
            f"finished batches of other ones must not be taken for theirs ({built})"
        )
        return None
    return EvaluationCache(folder, identity)


def evaluation_identity(
    policy: Policy, sampling: Sampling, *, run: Mapping[str, Any], built: str | Indescribable
) -> dict[str, Any]:
    """Collect what the records of an evaluation depend on, except the prompts, as JSON-serialisable values; ``run`` is
    the identity of the run, and ``built`` the description of engine and rewards from ``described``."""
    base = Path(policy.base)
    tokenizer = chain.from_iterable(base.glob(name) for name in ("*token*", "vocab*", "merges*"))
    return {
        **run,
        "version": __version__,
        "adapter": checksums(policy.adapter_state()),
        "sampling": asdict(sampling),
        "dtype": str(policy.dtype),
        "engine and rewards": built,
        "end_tokens": end_tokens(policy.base, policy.config),
        "tokenizer": _digest_of(sorted(tokenizer)),
    }


class Indescribable(ValueError):
    """Raised for an object that cannot be described in a way that is the same in every process."""


def described(*values: object) -> str | Indescribable:
    """Describe engine and rewards, before the engine starts and holds more than its settings; returns the error if
    they cannot be described."""
    try:
        return describe(values)
    except Indescribable as error:
        return error.with_traceback(None)


def describe(value: object) -> str:
    """Describe an object by import paths, digests of source files and settings, recursively, so that equal descriptions
    mean equal behaviour in every process; ``Indescribable`` if it contains itself, a tensor, or what pickle refuses."""
    try:
        return json.dumps(value, default=_parts)
    except Indescribable:
        raise
    except (TypeError, ValueError) as error:
        raise Indescribable(f"a {type(value).__qualname__} is not plain data: {error}") from error


def _parts(value: Any) -> Any:
    """Return what describes an object that JSON does not have."""
    if isinstance(value, bytes | complex):
        return [type(value).__name__, repr(value)]
    if isinstance(value, set | frozenset):  # whose order differs between processes
        return ["set", sorted(map(describe, value))]
    if isinstance(value, type):
        return [_source(base) for base in inspect.getmro(value) if base is not object]
    if isinstance(value, BuiltinFunctionType):
        return _source(value)
    if isinstance(value, FunctionType):
        return [_source(value), vars(value), [cell.cell_contents for cell in value.__closure__ or ()]]
    if isinstance(value, Tensor):
        raise Indescribable("tensors are not described")
    # what pickle would store, so that no hidden state is missed
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        stored = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception as error:  # whatever a class raises that refuses to be pickled
        raise Indescribable(f"a {type(value).__qualname__} is not plain data: {error}") from error
    if isinstance(stored, str):  # pickle's way to say: import this name
        raise Indescribable(f"a {type(value).__qualname__} is not described")
    return [type(value), *(list(part) if isinstance(part, Iterator) else part for part in stored)]


def _source(owner: type | FunctionType | BuiltinFunctionType) -> str:
    """Return the import path of a class or function, and a digest of its source file; of a module in a package, of all
    files of the package, because they often use one another."""
    name = f"{owner.__module__}:{owner.__qualname__}"
    if owner.__module__ in sys.builtin_module_names:
        return name
    try:
        path = Path(inspect.getfile(owner))
        known = isinstance(owner, FunctionType) or resolve_name(name) is owner  # else it was made while running
    except (TypeError, OSError, AttributeError, ImportError, ValueError) as error:
        raise Indescribable(f"the source of {name} is not known") from error
    if "<" in name or not known or not path.is_file():
        raise Indescribable(f"{name} cannot be imported by name: define it at the top of a module")
    in_package = bool(getattr(sys.modules.get(owner.__module__), "__package__", ""))
    return f"{name}@{_digest_of(sorted({path, *path.parent.glob('*.py')}) if in_package else [path])}"


def _digest_of(paths: Iterable[Path]) -> str:
    """Compute a digest of the names and contents of files, in the given order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
