"""Compare the settings of a resumed run with the settings of its previous start."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from qerl_pl.common.checks import shortened
from qerl_pl.common.files import write_whole

NO_SETTING = ("ckpt_path", "config")
"""Keys of a configuration that only name files to read at the start, so they do not change how a run trains."""
WHAT_IS_LEARNED = ("model.objective", "model.sampling.", "model.rewards", "model.dynamic_sampling", "data.")
NOT_LEARNED = ("data.val_limit", "data.val_batch_size", "data.show_prompt")
"""Settings that change neither what is optimised nor the training problems, in spite of their names."""
SCHEDULES = "; schedules of learning rate and noise span trainer.max_steps, so learning rate and noise jump here"
OTHER_GOAL = "ATTENTION, what is optimised changes: "


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings that differ as ``key: before -> now``, those that decide what is optimised (objective,
    sampling, rewards, data) first, after ``OTHER_GOAL``. Objects in a list are identified by their class, as in
    ``trainer.callbacks[callbacks.aqn.AdaptiveQuantizationNoise].init_args.seed``, and rewards by their name, as in
    ``model.rewards[accuracy].weight``; any other list is one value."""
    old, new = dict(_flat(before)), dict(_flat(now))
    absent = "(not set)"
    keys = {key for key in old.keys() | new.keys() if old.get(key, absent) != new.get(key, absent)}
    learned = {key for key in keys if key.startswith(WHAT_IS_LEARNED)} - set(NOT_LEARNED)
    ordered = sorted(keys - set(NO_SETTING), key=lambda key: (key not in learned, key))
    return [
        f"{OTHER_GOAL if key in learned else ''}{key}: "
        f"{shortened(str(old.get(key, absent)), 200)} -> {shortened(str(new.get(key, absent)), 200)}"
        f"{SCHEDULES if key == 'trainer.max_steps' else ''}"
        for key in ordered
    ]


def keep_old_config(config: Path, now: str, *, before: str | None = None) -> tuple[list[str], Path | None]:
    """Copy a run's old settings to unused file names (config.1.yaml, config.2.yaml, ...) before the caller overwrites
    ``config``, the run's config.yaml, with the text ``now``. Old settings are those in config.yaml and those in
    ``before``, the text stored in the run's checkpoint (None if there is none); each of the two is copied if it differs
    from ``now``. Returns the list of changed settings and the path of the first copy; ([], None) if nothing differs."""
    written = config.read_text(encoding="utf-8") if config.exists() else None
    kept: list[tuple[list[str], Path]] = []
    for text in dict.fromkeys(text for text in (before, written) if text is not None):
        if changes := _changes(text, now, config):
            free = next(path for n in itertools.count(1) if not (path := config.with_name(f"config.{n}.yaml")).exists())
            write_whole(free, text)
            kept.append((changes, free))
    return kept[0] if kept else ([], None)


def _changes(text: str, now: str, config: Path) -> list[str]:
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError:
        settings = None
    if not isinstance(settings, dict):
        return [f"{config} cannot be read as YAML, so nothing can be compared"]
    return changed_settings(settings, yaml.safe_load(now))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, list) and value and all(isinstance(one, Mapping) and "class_path" in one for one in value):
            for one in value:
                yield key + f"[{one['class_path']}]", "there"
                yield from _flat({"init_args": one.get("init_args") or {}}, f"{key}[{one['class_path']}].")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) and "name" in one for one in value):
            yield key, ", ".join(one["name"] for one in value)
            for one in value:
                yield from _flat(one, f"{key}[{one['name']}].")
        elif isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
