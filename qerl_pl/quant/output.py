"""Write folders that get their final names only when they are complete. A checkpoint is written one file after the
other, and after an interruption, a new call with the same settings writes the missing files. Other folders are written
as a whole."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qerl_pl.common.files import allow_reading, replacing, write_whole
from qerl_pl.model.files import CONFIG, INDEX, MODELOPT_CONFIG, read_json

REPORT = "quantization_report.json"
RECORDS = ("tiny.json", "drift.json")
"""Records of how one checkpoint was made and measured, which copies and exports of it do not include."""
_MANIFEST = "manifest.json"
_CARRIED = {".json", ".jinja", ".md", ".model", ".tiktoken", ".txt"}
_CARRIED_NAMES = re.compile(r"LICEN[CS]E|NOTICE|USE_POLICY|merges|vocab", re.IGNORECASE)


class OutputFolder:
    """Checkpoint folder that is written as ``OUTPUT.partial`` and renamed at the end to ``OUTPUT``, which must not
    exist before, or must be an empty folder. A manifest lists the finished files, so a later run with equal
    ``settings`` (JSON types, all that the files depend on) continues after them; a run with other settings is refused
    (ValueError)."""

    def __init__(self, output: Path, settings: Mapping[str, object]) -> None:
        self.output, self.settings = output, dict(settings)
        self.partial = output.with_name(f"{output.name}.partial")
        self.done: dict[str, dict] = {}
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(f"output {output} exists and is not an empty folder; name another one or remove it")
        self.partial.mkdir(parents=True, exist_ok=True)
        if not (self.partial / _MANIFEST).exists():
            return
        manifest = read_json(self.partial / _MANIFEST)
        if manifest["settings"] != self.settings:
            raise ValueError(
                f"{self.partial} holds an unfinished run with other settings ({manifest['settings']}); "
                "repeat those to continue it, or remove the folder"
            )
        self.done = {file: entry for file, entry in manifest["files"].items() if (self.partial / file).is_file()}

    def add(self, file: str, tensors: Mapping[str, Tensor], layers: Sequence[object] = ()) -> None:
        """Write a safetensors file and record it in the manifest as finished, with reports on its ``layers``."""
        write_tensors(self.partial / file, tensors)
        self.done[file] = {"tensors": {name: tensor.nbytes for name, tensor in tensors.items()}, "layers": layers}
        _write_json(self.partial / _MANIFEST, {"settings": self.settings, "files": self.done})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error, remove ``OUTPUT.partial`` if a later run could not continue from it."""
        # A later run cannot continue if no file is finished, or if the model was refused (ValueError): it would be
        # refused again.
        if kind is not None and (not self.done or issubclass(kind, ValueError)):
            shutil.rmtree(self.partial, ignore_errors=True)

    def read(self, file: str, device: torch.device | str) -> dict[str, Tensor]:
        """Read the tensors of a finished file."""
        return load_file(self.partial / file, device=str(device))

    def reports(self) -> list[dict]:
        return [report for entry in self.done.values() for report in entry["layers"]]

    def finish(self, source: Path, config: Mapping[str, object]) -> None:
        """Complete the folder and rename it to ``OUTPUT``: write the index of tensors, quantization_report.json
        (settings and error reports) and config.json with the content ``config``, and copy the tokenizer, chat
        templates, licence and similar files of the checkpoint ``source``. Raises FileNotFoundError if a finished file
        was removed."""
        for file in self.done:
            (self.partial / file).stat()
        carry(source, self.partial)
        weight_map = {name: file for file, entry in self.done.items() for name in entry["tensors"]}
        size = sum(nbytes for entry in self.done.values() for nbytes in entry["tensors"].values())
        _write_json(self.partial / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        _write_json(self.partial / REPORT, {**self.settings, "layers": self.reports()})
        _write_json(self.partial / CONFIG, config)
        (self.partial / _MANIFEST).unlink()
        os.replace(self.partial, self.output)


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Context manager in which the caller makes a folder that appears at the path ``output`` only when it is complete.
    It yields a path, at which the caller makes the folder, and which is renamed to ``output`` at the end or, after an
    error, removed. Raises ValueError if ``output`` exists."""
    if output.exists():
        raise ValueError(f"{output} exists; give a folder that does not")
    scratch = output.with_name(output.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
    try:
        scratch.mkdir(parents=True)
        yield scratch / "folder"
        os.replace(scratch / "folder", output)
    except SafetensorError as error:
        raise OSError(f"could not write {output}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically; raise OSError if it cannot be written."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            # The metadata have only one key, because safetensors writes several keys in random order, and equal runs
            # should write equal bytes.
            save_file(whole, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{temporary} cannot be written: {error}") from error
        allow_reading(temporary)


def carried_files(source: Path) -> list[Path]:
    """List the files of a checkpoint folder that its quantised, converted or merged copies also get: tokenizer, chat
    templates (also those in a subfolder), licence and similar files, but no code and no config.json."""
    # Stored digests and reports describe this folder alone, and a copy gets a config.json of its own.
    of_one = (CONFIG, REPORT, MODELOPT_CONFIG)
    return [
        file
        for file in (*sorted(source.iterdir()), *sorted(source.glob("*chat_templates/*.jinja")))
        if file.is_file()
        and not file.name.startswith(".")
        and file.name not in of_one
        and file.name not in RECORDS
        and (file.suffix in _CARRIED or (not file.suffix and _CARRIED_NAMES.match(file.name)))
        and not file.name.endswith(".index.json")
    ]


def carry(source: Path, target: Path) -> None:
    """Copy ``carried_files`` to another folder, under the same names."""
    for file in carried_files(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")
