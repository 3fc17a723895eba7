"""Cache the finished batches of an evaluation on disk, so that an interrupted evaluation can be resumed."""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from qerl_pl import __version__
from qerl_pl.common.files import read_lines, write_whole
from qerl_pl.common.types import Prompt
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.checksums import checksums
from qerl_pl.rollout.common import end_tokens


class EvaluationCache:
    """Stores the records of an evaluation (one per completion) in files of ``folder``, one per batch of prompts. A
    file's name is a digest of the prompts and of ``identity``, which is everything else that the records depend on (see
    ``evaluation_identity``), so a file is used only by an evaluation that would give the same records."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder / _digest(identity)

    def read(self, prompts: Sequence[Prompt], *, num_rows: int) -> list[dict[str, Any]] | None:
        """Return the ``num_rows`` stored records of a batch of prompts; None if their file is missing or damaged."""
        try:
            rows = [json.loads(line) for line in read_lines(self._path(prompts))]
        except (FileNotFoundError, ValueError):  # not UTF-8, or no JSON
            return None
        return rows if len(rows) == num_rows else None

    def write(self, prompts: Sequence[Prompt], rows: Sequence[Mapping[str, Any]]) -> None:
        """Store the records of a batch of prompts in a file, which is written completely or not at all."""
        write_whole(self._path(prompts), "".join(json.dumps(row) + "\n" for row in rows))

    def _path(self, prompts: Sequence[Prompt]) -> Path:
        return self.folder / f"{_digest([list(prompt) for prompt in prompts])}.jsonl"


def evaluation_identity(
    policy: Policy, sampling: Sampling, *, run: Mapping[str, Any], built: str, parts: Iterable[object]
) -> dict[str, Any]:
    """Collect everything that the records of an evaluation depend on, except the prompts, as values that JSON can
    represent. ``run`` is the identity of the run (base, adapter settings, seed), ``built`` has the settings of engine
    and rewards, and ``parts`` are engine and rewards themselves: digests of their source files are included, so that
    records that were cached before a reward was edited are not used afterwards."""
    base = Path(policy.base)
    tokenizer = chain.from_iterable(base.glob(name) for name in ("*token*", "vocab*", "merges*"))
    return {
        **run,
        "version": __version__,
        "adapter": checksums(policy.adapter_state()),
        "sampling": asdict(sampling),
        "dtype": str(policy.dtype),
        "engine and rewards": built,
        "sources": list(map(_source, parts)),
        "end_tokens": end_tokens(policy.base, policy.config),
        "tokenizer": _digest_of(sorted(tokenizer)),
    }


def _source(value: object) -> str:
    """Return the import path of a class or function, or of an object's class, with a digest of the files that define
    it. A partial function or bound method also has the values that it holds."""
    if isinstance(value, partial):
        held = [_source(each) if callable(each) else each for each in (*value.args, *value.keywords.values())]
        return f"{_source(value.func)} with {held} {[*value.keywords]}"
    if isinstance(value, MethodType):
        return f"{_source(value.__func__)} of {_source(value.__self__)}"
    value = inspect.unwrap(value) if callable(value) else value  # a decorator may be of another file
    owner: Any = value if isinstance(value, type | FunctionType) else type(value)
    path = Path(inspect.getfile(owner))
    in_package = bool(getattr(sys.modules.get(owner.__module__), "__package__", ""))
    digest = _digest_of(sorted({path, *path.parent.glob("*.py")}) if in_package else [path])
    return f"{owner.__module__}.{owner.__qualname__}@{digest}"


def _digest_of(paths: Iterable[Path]) -> str:
    """Compute a digest of the names and contents of files, in the given order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
