"""Convert the files in which runs store completions to JSON for the HTML page about the runs."""

import base64
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from qerl_pl.common.files import read_lines
from qerl_pl.common.run_folder import plain_yaml
from qerl_pl.results.curves import Curve

STEP = 1000  # numbers per token are multiplied by this and stored as integers, i.e. in thousandths of a nat
LARGEST = 32.0  # nats; numbers per token are clipped to +- this value


def files_of_run(run: Path, curves: Mapping[str, Curve]) -> list[Path]:
    """List a run's files of completions, one per rollout or evaluation, in the order of their names. ``curves`` are the
    run's logged scalars. Files of later rollouts than these, and of validations after them, are left out: an earlier
    start of the run wrote them, and a later start continued from an older checkpoint and has not come as far yet."""
    files = sorted(run.glob("completions/*.jsonl"))
    logged = max((curve.steps[-1] for tag, curve in curves.items() if tag.startswith("train/")), default=None)
    if logged is None:
        return files
    settings = plain_yaml(run / "config.yaml").get("trainer") or {}
    last = logged + int(settings.get("log_every_n_steps") or 1) - 1
    ends = {"train": last, "validate": last + 1}  # a validation's number counts the rollouts before it
    return [file for file in files if int(file.stem[-6:]) <= ends.get(file.stem[:-7], math.inf)]


def choose_files(runs: Mapping[Path, Mapping[str, Curve]], limit: int) -> tuple[list[tuple[int, Path]], str]:
    """Choose files of completions (one per rollout or evaluation) for an HTML page, evenly spread over each run, that
    together have about ``limit`` completions. ``runs`` maps each run's folder to its logged scalars. Returns pairs
    (index of the run, file), ordered by run, stage and rollout, and a sentence for the page about the completions that
    were left out, empty if none were."""
    every = [(run, path) for run, (folder, of_run) in enumerate(runs.items()) for path in files_of_run(folder, of_run)]
    counts = [path.read_bytes().count(b"\n") for _, path in every]
    if sum(counts) <= limit:
        return every, ""
    if limit == 0:
        return [], f"none of {sum(counts):,} completions are shown; `report --completions N` shows N"
    stride = -(-sum(counts) // limit)
    return every[::stride], (
        f"{sum(counts[::stride]):,} of {sum(counts):,} completions are shown, those of one in {stride} files; "
        "`report --completions N` shows up to N"
    )


def block(path: Path, run: int) -> dict[str, Any]:
    """Convert the completions of one file to a dict that JSON can represent, with the keys ``run``, ``stage`` (such as
    "train" or "validate"), ``step``, ``rows`` (one dict per completion) and ``damaged`` (the number of unreadable
    lines).

    If the run stored numbers per token, each row also has them as little-endian integers in base64, and the key
    ``pieces`` has the texts of tokens. A row's numbers are: the index of each token's text in ``pieces``, as uint32;
    and the trainer's log-probability, the trainer's entropy, the trainer's minus the sampler's log-probability, and the
    teacher's minus the trainer's, as int16 in thousandths of a nat.
    """
    stage, _, step = path.stem.rpartition("-")
    lines, rows = read_lines(path, errors="replace"), []
    for line in lines:
        with suppress(ValueError, AttributeError):  # no JSON, or no mapping
            rows.append(_row(json.loads(line)))
    content = {"run": run, "stage": stage, "step": int(step), "rows": rows, "damaged": len(lines) - len(rows)}
    tokens_path = path.with_suffix(".safetensors")
    if tokens_path.exists() and not content["damaged"]:
        from qerl_pl.rollout.token_file import read_tokens  # imported here, because few pages need torch

        tokens = read_tokens(tokens_path)
        if tokens is not None and len(tokens.offsets) == len(rows) + 1:
            pieces = sorted(tokens.pieces)
            numbers = {"t": np.searchsorted(np.array(pieces), tokens.ids.numpy()).astype("<u4")}
            values = {"l": tokens.logprobs, "e": tokens.entropy, "g": tokens.gap, "q": tokens.teacher}
            for key, value in values.items():
                if value is None:
                    continue
                fixed = value.float().nan_to_num().clamp(-LARGEST, LARGEST) * STEP
                numbers[key] = fixed.round().numpy().astype("<i2")
            bounds = tokens.offsets.tolist()
            for row, start, end, advantage in zip(rows, bounds, bounds[1:], tokens.advantages.tolist(), strict=False):
                row["v"] = float(f"{advantage:.4g}")
                for key, fixed in numbers.items():
                    row[key] = base64.b64encode(fixed[start:end].tobytes()).decode()
            content["pieces"] = [tokens.pieces[token] for token in pieces]
    return content


def _row(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "p": str(line.get("prompt", "")),
        "c": str(line.get("completion", "")),
        "a": str(line.get("answer", "")),
        "w": line.get("reward"),
        "s": line.get("rewards", {}),
        "y": line.get("reasons", {}),
        "n": line.get("num_tokens", 0),
        "f": bool(line.get("finished", True)),
    }
