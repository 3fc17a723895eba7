"""Write a small configuration, a reward and some problems into a folder, as the start of your own project."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from qerl_pl.common.files import write_whole
from qerl_pl.common.program import CommandParser, called_as

EXAMPLE = Path(__file__).parent / "example"
"""Folder of the files that are copied, with enough problems to split off validation problems and fill a batch."""
BASE = "Qwen/Qwen2.5-0.5B-Instruct"
"""Base model in the example's configuration."""
MORE = """\
  qerl fit -c mine.yaml --smoke    # tries every part in two small rollouts
  qerl fit -c mine.yaml            # trains"""


def main(argv: Sequence[str]) -> int:
    """Parse the command line, write the files and print the next commands; returns the exit status."""
    parser = CommandParser(prog=called_as("init"), description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), help="folder to write to (default: the current one)"
    )
    parser.add_argument(
        "--base",
        default=BASE,
        help=f"model to train: a name on the Hugging Face hub, or a folder (default: {BASE}, a download of 1 GB)",
    )
    options = parser.parse_args(argv)
    written = write_files(options.folder, base=options.base)
    print(f"written: {', '.join(map(str, written))}\n\nnext:")
    if options.folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(options.folder))}")
    print(MORE.replace("qerl fit", called_as("fit")))
    return 0


def write_files(folder: Path, *, base: str) -> list[Path]:
    """Write an example configuration, reward and problems into a new or existing folder; returns the paths of the
    files. If an error occurs, the files already written are removed. ``base`` becomes the value of ``model.base``; the
    path of a folder is made absolute. Raises ValueError if one of the files exists, or ``folder`` is a file."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder, new or existing")
    local = Path(base).expanduser()
    named = str(local.resolve()) if local.is_dir() else base
    texts = {
        folder / file.name: file.read_text(encoding="utf-8").replace(json.dumps(BASE), json.dumps(named))
        for file in (EXAMPLE / name for name in ("mine.yaml", "my_reward.py", "problems.jsonl"))
    }
    if existing := [str(path) for path in texts if path.exists()]:
        raise ValueError(f"{', '.join(existing)} exists already and is not overwritten; give another folder")
    try:
        for path, text in texts.items():
            write_whole(path, text)
    except OSError:
        for path in texts:
            with suppress(OSError):
                path.unlink()
        raise
    return list(texts)
