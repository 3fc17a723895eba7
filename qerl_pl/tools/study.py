"""Train every arm (named configuration) of a study with every seed, and compare the results."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from qerl_pl.cli.yaml_files import KEYS, fault_in_files, mapping_in
from qerl_pl.study.runner import Runner, slots_for
from qerl_pl.study.state import check_unchanged, is_finished, state_of
from qerl_pl.study.study_file import Study, commands_of, read_study
from qerl_pl.tools.options import study_options


def main(argv: Sequence[str]) -> int:
    """Parse the command line and run the study; returns the exit status."""
    options = study_options().parse_args(argv)
    mapping_in(options.study, expected="arms and seeds of a study")
    if wrong := [word for word in options.set if "=" not in word]:
        raise ValueError(f"--set is {wrong[0]!r}; expected NAME=VALUE, with a name of the file's variables")
    study = read_study(options.study, options.output, dict(word.split("=", 1) for word in options.set))
    if options.analyse:
        return _analyse(study)
    _check_seeds(study, options.study.name)
    if not options.dry_run:
        return _run(study, options)
    for command in (command for run in study.runs() for command in commands_of(study, run)):
        print(shlex.join([sys.executable, "-m", "qerl_pl", *command.arguments]))
    if fault := _fault_in_config(study, options.study.name):
        print(f"warning: {fault}", file=sys.stderr)
    return 0


def _check_seeds(study: Study, name: str) -> None:
    """Raise ValueError if a study, which compares configurations by runs with several seeds, has too few seeds for any
    of its comparisons to be significant; only warn if the study's file does not name the comparisons."""
    from qerl_pl.study.statistics import ALPHA, pairs_to_accept  # imports scipy, which nothing else here needs

    count, needed = len(study.comparisons), pairs_to_accept(len(study.comparisons))
    if not count or len(study.seeds) >= needed:
        return
    text = (
        f"{name}: with {len(study.seeds)} seeds and {count} comparisons the analysis can accept nothing, whatever the "
        f"runs show: the sign-flip test's p-value, adjusted over the comparisons, stays above {ALPHA}. It takes "
        f"{needed} seeds; `comparisons: []` compares nothing"
    )
    if study.analysis.comparisons is not None:
        raise ValueError(text)
    print(f"warning: {text}", file=sys.stderr)


def _fault_in_config(study: Study, name: str) -> str | None:
    """Find the first fault because of which runs of a study would fail at their start: a fault in a configuration file
    that all runs read, or an unknown section in settings of the study. Returns an error message; None if there is no
    fault."""
    for entry in study.config:
        if fault := fault_in_files(["-c", entry]):
            return f"{name}: {fault}"
    for settings in (study.settings, *study.arms.values(), *study.evaluations.values()):
        if unknown := [key for key in settings if str(key).removesuffix("+") not in KEYS]:
            return f"{name}: {unknown[0]!r} is no setting; expected one of {', '.join(KEYS)}"
    return None


def _analyse(study: Study) -> int:
    from qerl_pl.study.analysis import gather, write_files
    from qerl_pl.tools.report import CURVES, draw

    folder, groups = study.output / study.analysis.folder, gather(study)
    print(write_files(study, groups, folder))
    titles = {study.analysis.validation if tag == "val/accuracy" else tag: title for tag, title in CURVES.items()}
    print(draw([(group.name, group.mean_curves()) for group in groups], folder / "curves.png", titles))
    return 0


def _run(study: Study, options: argparse.Namespace) -> int:
    check_unchanged(study)
    runs = study.runs()
    if not all(is_finished(study, run) for run in runs) and (fault := _fault_in_config(study, options.study.name)):
        raise ValueError(fault)
    slots = slots_for(study, options.jobs)
    print(f"{len(runs)} runs, {len(slots)} at a time, in {study.output}", flush=True)
    if stopped := Runner(study, slots, options.minutes).work():
        return stopped
    failed = [run for run in runs if not is_finished(study, run)]
    for run in failed:
        print(f"failed: {run.name}: {state_of(run.folder).failure}")
    print(f"{len(runs) - len(failed)} of {len(runs)} runs are finished")
    return 1 if failed else 0
