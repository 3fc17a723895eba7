"""The YAML file that describes a study, and the runs and commands that follow from it."""

from pathlib import Path

import pytest
import yaml

import train
from qerl_pl.__main__ import main as command
from qerl_pl.study.state import state_of, succeeded, write_files
from qerl_pl.study.study_file import Study, commands_of, files_of, read_study
from tests.program import ROOT

CONTENT = {
    "output": "out",
    "config": ["configs/quickstart.yaml"],
    "settings": {"trainer": {"max_steps": 4}},
    "arms": {"bf16": None, "nvfp4": {"model": {"base_format": "nvfp4"}}},
    "grid": {"model.optimizer.init_args.lr": [0.001, 0.002]},
    "seeds": [3, 5],
    "evaluations": {"reach": {"data": {"val_limit": 4}}},
    "gpu_memory": 8,
}


def written(path: Path, **changes: object) -> Path:
    path.write_text(yaml.safe_dump({**CONTENT, **changes}))
    return path


def test_every_arm_runs_at_every_point_with_every_seed_and_the_first_seeds_come_first(tmp_path):
    study = read_study(written(tmp_path / "study.yaml"))
    runs = study.runs()
    assert len({run.folder for run in runs}) == len(runs) == 2 * 2 * 2
    assert [run.seed for run in runs] == [3] * 4 + [5] * 4
    assert runs[0].folder == Path("out/runs/bf16/lr=0.001/seed-3")
    assert runs[0].name == "bf16/lr=0.001/seed-3"
    assert read_study(written(tmp_path / "s.yaml", grid={})).runs()[1].name == "nvfp4/seed-3"
    assert read_study(tmp_path / "study.yaml", Path("else/where")).runs()[0].folder.parts[:2] == ("else", "where")
    assert Study(Path("out"), {name: {} for name in "abc"}, [0]).comparisons == [("b", "a"), ("c", "a")]


def test_a_run_is_an_ordinary_fit_and_its_evaluations_are_tests_of_its_last_policy(tmp_path):
    study = read_study(written(tmp_path / "study.yaml"))
    run = study.runs()[1]
    fit, reach = commands_of(study, run)
    assert (fit.name, reach.name) == ("fit", "reach")
    folder = "out/runs/nvfp4/lr=0.001/seed-3"
    files = ("configs/quickstart.yaml", f"{folder}/study/settings.yaml", f"{folder}/study/arm.yaml")
    common = [word for file in files for word in ("-c", file)]
    options = ["--seed_everything", "3", "--model.optimizer.init_args.lr", "0.001", "--model.gpu_memory", "8"]
    assert fit.arguments == ["fit", *common, *options, "--run_dir", folder, "--ckpt_path", "last"]
    end = ["--run_dir", f"{folder}/evaluations/reach", "--ckpt_path", f"{folder}/checkpoints/last.ckpt"]
    assert reach.arguments == ["test", *common, "-c", f"{folder}/study/evaluate-reach.yaml", *options, *end]
    assert {path.name: yaml.safe_load(text) for path, text in files_of(study, run).items()} == {
        "settings.yaml": CONTENT["settings"],
        "arm.yaml": {"model": {"base_format": "nvfp4"}},
        "evaluate-reach.yaml": {"data": {"val_limit": 4}},
    }


RATE_OF_ARM = {"a": {"model": {"optimizer": {"init_args": {"lr": 1.0}}}}}
MISTAKES = [
    ({"arms": {}}, "at least one arm and one seed"),
    ({"arms": {"a/b": {}}}, "'a/b' becomes the name of a folder"),
    ({"arms": {"bf16": 3}}, "arms.bf16 is 3; expected settings by their names"),
    ({"arms": {True: {}}}, "arms has True; expected a name: put"),
    ({"arms": {"a": {"run_dir": "x"}}}, "arms.a has run_dir, which the study sets for every run"),
    ({"arms": RATE_OF_ARM}, "arms.a has model.optimizer.init_args.lr"),
    ({"seeds": [1, 1]}, "each may be there once"),
    ({"seeds": 3}, "seeds is 3; expected a list"),
    ({"sedes": [1]}, "unknown keys sedes; expected some of output, arms, seeds"),
    ({"seeds": ["x"]}, "seeds has 'x'; expected whole numbers from 0"),
    ({"seeds": [1, -1]}, "seeds has -1; expected whole numbers from 0"),
    ({"seeds": [True]}, "seeds has True; expected whole numbers from 0"),
    ({"jobs": 0}, "jobs is 0; expected a whole number above 0"),
    ({"jobs": 1.5}, "jobs is 1.5; expected a whole number above 0"),
    ({"attempts": True}, "attempts is True; expected a whole number above 0"),
    ({"gpu_memory": float("nan")}, "gpu_memory is nan; expected a number above 0"),
    ({"gpu_memory": "8"}, "gpu_memory is '8'; expected a number above 0"),
    ({"output": "runs/$name"}, "'runs/.name' names a variable that the file does not define"),
    ({"output": ["a"]}, r"output is \['a'\]; expected a folder, as text"),
    ({"output": ""}, "output is ''; expected a folder, as text"),
    ({"config": ["$task/task.yaml"]}, "names a variable that the file does not define"),
    ({"config": [3]}, "config has 3; expected -c files or shipped names"),
    ({"config": [["a"]]}, "config has .*expected -c files"),
    ({"evaluations": {"fit": {}}}, "may not be called 'fit'"),
    ({"evaluations": {"x": [1]}}, r"evaluations.x is \[1\]; expected settings"),
    ({"evaluations": {"x": {"ckpt_path": "best"}}}, "evaluations.x has ckpt_path, which the study sets"),
    ({"settings": {"seed_everything": 3}}, "settings has seed_everything, which the study sets"),
    ({"after": {"bf16": ["nvfp4"]}}, r"after has \['nvfp4'\]; expected a name"),
    ({"after": {"bf16": "c"}}, "expected two of the arms bf16, nvfp4"),
    ({"after": {"bf16": "bf16"}}, "expected two of the arms bf16, nvfp4"),
    ({"after": {"bf16": "nvfp4", "nvfp4": "bf16"}}, "expected two of the arms bf16, nvfp4"),
    ({"analysis": {"metrics": []}}, "analysis has the unknown keys metrics"),
    ({"analysis": {"folder": "../a"}}, "'../a' becomes the name of a folder"),
    ({"analysis": {"folder": 3}}, "3 becomes the name of a folder"),
    ({"analysis": {"metric": ["a"]}}, "analysis.metric is .*expected the name of a measured quantity"),
    ({"analysis": {"comparisons": 3}}, "analysis.comparisons is 3; expected a list of pairs"),
    ({"analysis": {"comparisons": ["bf16"]}}, "comparison bf16 is not of two of the arms"),
    ({"analysis": {"comparisons": [["bf16", "fp8"]]}}, r"comparison \['bf16', 'fp8'\] is not of two of the arms"),
    ({"analysis": {"comparisons": [["bf16", ["nvfp4"]]]}}, "is not of two of the arms"),
    ({"grid": 0}, "grid is 0; expected a mapping"),
    ({"grid": {"model.rank": 3}}, "grid.model.rank is 3; expected a list of values"),
    ({"grid": {3: [1]}}, "grid has 3; expected the name of a setting"),
    ({"grid": {"run_dir": ["a", "b"]}}, "grid has 'run_dir'; expected the name of a setting that the study does not"),
    ({"grid": {"model.gpu_memory": [3]}}, "grid has 'model.gpu_memory'"),
    ({"grid": {"model.lora.rank": [4, "4"]}}, "grid.model.lora.rank has 4 more than once"),
    ({"variables": {"x": [1]}}, r"variables has 'x': \[1\]; expected text or numbers by name"),
    ({"variables": {"seed": "1"}}, "choose another name"),
    ({"variables": {"x": "a", "y": "a"}, "arms": {"$x": {}, "$y": {}}}, r"keys \$x, \$y two are equal"),
    ({"variables": {"x": "a"}, "settings": {"model": {"base": "$y"}}}, r"'\$y' names a variable that is not in"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_what_cannot_be_is_refused_by_name(tmp_path, capsys, changes, message):
    with pytest.raises(ValueError, match=message):
        read_study(written(tmp_path / "study.yaml", **changes))
    out = [] if "output" in changes else ["--output", str(tmp_path / "out")]
    assert command(["study", str(tmp_path / "study.yaml"), *out]) == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_or_broken_file_or_an_arm_that_is_named_twice_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="there is no study"):
        read_study(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("arms: [")
    with pytest.raises(ValueError, match="is no YAML"):
        read_study(tmp_path / "bad.yaml")
    path = written(tmp_path / "study.yaml")
    path.write_text(path.read_text().replace("arms:\n", "arms:\n  nvfp4: {}\n"))
    assert command(["study", str(path)]) == 2
    assert "'nvfp4' is given a second time (first in line" in capsys.readouterr().err


def test_values_that_are_paths_name_runs_by_their_last_part(tmp_path):
    def folders(*values: object) -> list[str]:
        study = read_study(written(tmp_path / "study.yaml", arms={"a": {}}, seeds=[1], grid={"model.base": [*values]}))
        runs = study.runs()
        assert all(run.folder.parts[:-3] == ("out", "runs") for run in runs), "a folder per arm, point and seed"
        assert [commands_of(study, run)[0].arguments[-7] for run in runs] == list(map(str, values))
        return [run.name.split("/")[1] for run in runs]

    assert folders("/models/small.gguf", "Qwen/Qwen3-8B/") == ["base=small.gguf", "base=Qwen3-8B"]
    assert folders("plain", "..") == ["base=plain", "base=.."]
    one, other, third = folders("/a/x.gguf", "/b/x.gguf", "/b/y.gguf")
    assert (one[:12], other[:12], third) == ("base=x.gguf-", "base=x.gguf-", "base=y.gguf")
    assert one != other
    assert [one, other, third] == folders("/a/x.gguf", "/b/x.gguf", "/b/y.gguf"), "the same in every start"
    assert all(len(name) < 200 for name in folders("a" * 999, "b" * 999))


def test_numbers_with_an_exponent_are_the_numbers_that_a_configuration_file_has(tmp_path):
    path = written(tmp_path / "s.yaml", variables={"rate": "2E-4"})
    path.write_text(path.read_text().replace("- 0.001\n", "- 1e-4\n").replace("- 0.002\n", "- $rate\n"))
    study = read_study(path)
    assert study.grid == {"model.optimizer.init_args.lr": [0.0001, 0.0002]}
    assert study.runs()[0].name == "bf16/lr=0.0001/seed-3"
    path.write_text(path.read_text().replace("- $rate", "- 0.0001"))
    with pytest.raises(ValueError, match=r"lr has 0.0001 more than once"):
        read_study(path)
    names = ["1.10", "12e4-base", "0.1e"]
    assert read_study(written(path, grid={"model.base": names})).grid["model.base"] == names, "text stays text"


def test_the_seed_stands_for_its_name_alone_in_arms_and_grid(tmp_path):
    arm = {"data": {"question_template": "{question} $seeds ${seed} $seed!"}}
    study = read_study(written(tmp_path / "s.yaml", arms={"a": arm}, grid={"data.date": ["$seed", "$seeds"]}))
    run = study.runs()[0]
    written_arm = yaml.safe_load(files_of(study, run)[run.folder / "study" / "arm.yaml"])
    assert written_arm == {"data": {"question_template": "{question} $seeds 3 3!"}}
    words = [commands_of(study, run)[0].arguments for run in study.runs()[:2]]
    assert [arguments[arguments.index("--data.date") + 1] for arguments in words] == ["3", "$seeds"]


def test_variables_are_replaced_in_every_text_and_can_be_set_by_the_command(tmp_path, capsys):
    values = {
        "output": "out-$policy",
        "config": ["models/${policy}/task.yaml"],
        "settings": {"model": {"base": "$policy/seed-$seed"}},
    }
    path = written(tmp_path / "study.yaml", variables={"policy": "a", "other": 3}, **values)
    for study, name in ((read_study(path), "a"), (read_study(path, variables={"policy": "b"}), "b")):
        assert study.output == Path(f"out-{name}")
        assert study.config == [f"models/{name}/task.yaml"]
        assert study.grid == CONTENT["grid"], "numbers stay numbers"
        texts = [text for path, text in files_of(study, study.runs()[-1]).items() if path.stem == "settings"]
        assert list(map(yaml.safe_load, texts)) == [{"model": {"base": f"{name}/seed-5"}}]
    assert command(["study", str(path), "--set", "policy=b", "--dry-run"]) == 0
    assert "out-b/runs/bf16" in capsys.readouterr().out
    for word, message in (("size=1", "no variable size; it has: other, policy"), ("b", "--set is 'b'; expected NAME=")):
        assert command(["study", str(path), "--set", word]) == 2
        assert message in capsys.readouterr().err
    settings = {"data": {"question_template": "{question} Costs are in $US."}}
    assert read_study(written(tmp_path / "none.yaml", settings=settings)).settings == settings


def test_what_is_null_has_its_default_and_a_damaged_state_is_named(tmp_path):
    study = read_study(written(tmp_path / "study.yaml", attempts=None, jobs=None, grid=None, evaluations=None))
    assert (study.attempts, study.jobs, study.grid) == (2, None, {})
    run = study.runs()[0]._replace(folder=tmp_path / "run")
    run.folder.mkdir()
    for text in ("{", "[]"):
        (run.folder / "study.json").write_text(text)
        with pytest.raises(ValueError, match=r"study\.json .*remove it"):
            state_of(run.folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": ["quickstart", "mine.yaml"]}, "there is no file mine.yaml\n"),
        ({"config": ["gsm8"]}, "'gsm8' is neither a file nor a shipped configuration; did you mean gsm8k? "),
        ({"config": ["broken.yaml"]}, "broken.yaml, line 1: this is not YAML: "),
        ({"config": [], "arms": {"a": {"modell": {}}}}, "'modell' is no setting; expected one of run_dir, model"),
    ],
)
def test_a_study_for_which_runs_would_be_refused_starts_none(tmp_path, capsys, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("model: [")
    path = written(tmp_path / "study.yaml", **changes, analysis={"comparisons": []})
    assert command(["study", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: study.yaml: {message}")
    assert command(["study", str(path), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count(" fit ") == len(read_study(path).runs())
    assert printed.err.startswith(f"warning: study.yaml: {message}")
    assert not Path("out").exists()


def test_a_finished_study_no_longer_needs_its_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "study.yaml", config=["mine.yaml"])
    study = read_study(path)
    for run in study.runs():
        write_files(study, run)
        for name in ("fit", "reach"):
            succeeded(run.folder, name, 1.0)
    assert command(["study", str(path)]) == 0
    assert "8 of 8 runs are finished" in capsys.readouterr().out


SHIPPED = sorted((ROOT / "configs" / "studies").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_command_of_a_shipped_study_parses(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["train.py"])
    study = read_study(path, tmp_path)
    for run in study.runs()[: len(study.arms)]:
        write_files(study, run)
        parts = commands_of(study, run)
        for part in parts if run == study.runs()[0] else parts[:1]:  # evaluations are the same for all arms
            with pytest.raises(SystemExit) as stop:
                train.main([*part.arguments, "--print_config"])
            assert not stop.value.code, capsys.readouterr().err
            assert str(run.folder) in capsys.readouterr().out
