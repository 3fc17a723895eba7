"""The command ``doctor`` checks a configuration without training. It prints what would stop a run with this
configuration, and writes no file."""

import re
import sys

import pytest
import yaml

from qerl_pl.__main__ import main as command
from qerl_pl.tools.doctor import with_advice
from tests.integration.conftest import VLLM, arguments

MINE = "def level(prompts, completions):\n    return [float(prompt.row['level']) for prompt in prompts]\n"
AQN = {"trainer": {"callbacks+": [{"class_path": "callbacks.aqn.AdaptiveQuantizationNoise"}]}}
NUMBERS = {"model": {"rewards": [{"name": "number", "reward": "qerl_pl.rewards.math.NumericAnswer"}]}}
WORDS = {"class_path": "datamodules.table.Table", "init_args": {"train_path": "rows.jsonl", "validation_share": 0.5}}


def diagnosed(base, folder, capsys, changes, *more):
    """Run the command ``doctor`` on the toy configuration with ``changes``. Returns the exit status, and what each
    check of the configuration printed, by the name of the check."""
    (folder / "rows.jsonl").write_text("".join(f'{{"question": "a{n}", "answer": "word"}}\n' for n in range(40)))
    (folder / "level_of_rows.py").write_text(MINE)
    (folder / "changes.yaml").write_text(yaml.safe_dump(changes))
    given = arguments("fit", base, folder / "run", "-c", str(folder / "changes.yaml"), *more)[1:]
    status = command(["doctor", *given])
    lines = capsys.readouterr().out.partition("\nfit ")[2].splitlines()
    assert not (folder / "run").exists(), "nothing is written"
    return status, {line[5:25].strip(): line[:4] + line[25:] for line in lines if line.startswith("[")}


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["pytest"])


def test_a_configuration_that_will_run_is_well_in_every_part(bases, tmp_path, capsys):
    _, said = diagnosed(bases["nvfp4"], tmp_path, capsys, NUMBERS)
    assert list(said) == [
        "configuration",
        "length of the run",
        "data and template",
        "rewards",
        "memory of the run",
        "disk of the run",
        "folder of the run",
    ]
    assert all(line.startswith("[ok]") for line in said.values()), said
    assert "TransformersEngine; rewards number" in said["configuration"]
    assert said["length of the run"].endswith("8 rollouts, 8 optimizer steps")
    assert "number " in said["rewards"]


LENGTH = ("length of the run", "8 rollouts for 10 noise stages")
BATCH = ("data and template", "only 40 training prompts")
PROMPTS = ("data and template", "set data.max_prompt_tokens to")
ANSWERS = ("rewards", "can read none of the first")
COLUMN = ("rewards", "KeyError: 'level'")
TARGET = ("memory of the run", "['query']; expected some")
MODULE = ("configuration", "there is no module rows")
UNKNOWN = {"lora": {"targets": ["query"]}}


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (AQN | {"data": {"max_prompt_tokens": 5}, "model": UNKNOWN}, [LENGTH, PROMPTS, TARGET]),
        (
            {"data": {"batch_size": 4000}, "model": {"rewards": [{"name": "mine", "reward": "level_of_rows.level"}]}},
            [BATCH, COLUMN],
        ),
        ({"data": {"source": WORDS}, **NUMBERS}, [ANSWERS]),
        ({"model": {"rewards": [{"name": "mine", "reward": "rows.level"}]}}, [MODULE]),
    ],
    ids=["noise, length and target", "batch and column", "answers", "module"],
)
def test_everything_that_would_stop_it_is_said_where_it_is(bases, tmp_path, capsys, changes, faults):
    status, said = diagnosed(bases["nvfp4"], tmp_path, capsys, changes)
    assert status == 1
    for where, why in faults:
        assert said[where].startswith("[no]"), said
        assert why in said[where]


def test_a_folder_that_holds_a_run_is_said_together_with_other_faults(bases, tmp_path, capsys):
    last = tmp_path / "full" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    full = ("--run_dir", str(tmp_path / "full"))
    status, said = diagnosed(bases["nvfp4"], tmp_path, capsys, {"data": {"batch_size": 4000}}, *full)
    assert status == 1
    assert "only 40 training prompts" in said["data and template"]
    assert said["folder of the run"].startswith("[no]"), said
    assert f"already holds a run ({last}): resume it with --ckpt_path last" in said["folder of the run"]
    command(["doctor", *arguments("fit", bases["nvfp4"], tmp_path / "full")[1:]])
    *_, end = capsys.readouterr().out.splitlines()
    assert end.startswith(f"1 of the checks above failed: {tmp_path / 'full'} already holds a run"), end
    assert end.endswith("resume it with --ckpt_path last, or choose another folder with --run_dir")
    _, said = diagnosed(bases["nvfp4"], tmp_path, capsys, {}, *full, "--ckpt_path", "last")
    assert said["folder of the run"].startswith("[ok]"), said


@pytest.mark.slow
@pytest.mark.vllm
def test_on_request_the_engine_is_started_as_a_run_starts_it(bases, tmp_path, capsys):
    status, said = diagnosed(bases["nvfp4"], tmp_path, capsys, NUMBERS, *VLLM, "--warm")
    assert status == 0
    assert re.search(r"\d+\.\d s \(imports .*, vLLM .*, adapter .*\)", said["start of the engine"])
    assert sys.argv == ["pytest"]
    _, said = diagnosed(bases["nvfp4"], tmp_path, capsys, NUMBERS, "--model.base", "models/gone", "--warm")
    assert said["start of the engine"].startswith("[--]")


def test_checks_that_could_not_be_made_are_not_counted_as_failures(tmp_path, capsys):
    assert command(["doctor", "-c", "quickstart", "--model.base", "models/gone"]) == 1
    said = capsys.readouterr().out
    assert said.count("[--]") >= 2, said
    [fault] = re.findall(r"^\[no\] configuration +(.*)$", said, re.MULTILINE)
    assert said.endswith(f"\n\n1 of the checks above failed: {fault}\n")
    assert re.search(r"\d+ for correct results, for speed alone", said)
    assert "adapters_in_fixed_order" not in said, "the list comes without a configuration"


def test_without_the_base_all_that_needs_none_is_checked(bases, tmp_path, capsys):
    status, said = diagnosed(bases["nvfp4"], tmp_path, capsys, NUMBERS, "--model.base", "models/gone")
    assert status == 1
    assert said["configuration"].startswith("[no]")
    assert "models/gone" in said["configuration"]
    assert "dimensions are not known" in said["memory of the run"]
    of_base = {"memory of the run", "disk of the run"}
    assert {name for name, line in said.items() if line.startswith("[--]")} == of_base
    assert {name for name, line in said.items() if line.startswith("[ok]")} == said.keys() - of_base - {"configuration"}
    whole = diagnosed(bases["nvfp4"], tmp_path, capsys, NUMBERS)[1]
    assert {name: said[name] for name in ("length of the run", "rewards")} == {
        name: whole[name] for name in ("length of the run", "rewards")
    }
    assert re.search(r"\d+ training problems; the first ends with \.\.\.", said["data and template"])


def test_without_the_base_wrong_data_and_rewards_are_still_found(bases, tmp_path, capsys):
    gone = ("--model.base", "models/gone")
    constant = {"model": {"rewards": [{"name": "mine", "reward": "level_of_constant.level"}]}}
    (tmp_path / "level_of_constant.py").write_text(
        "def level(prompts, completions):\n    return [0.5] * len(prompts)\n"
    )
    assert "no signal" in diagnosed(bases["nvfp4"], tmp_path, capsys, constant, *gone)[1]["rewards"]
    column = {"data": {"source": {**WORDS, "init_args": {**WORDS["init_args"], "answer": "no_such_column"}}}}
    said = diagnosed(bases["nvfp4"], tmp_path, capsys, NUMBERS | column, *gone)[1]
    assert said["data and template"].startswith("[no]")
    assert "no_such_column" in said["data and template"]
    called = [
        {"name": "x", "reward": {"class_path": "os.system", "init_args": {"command": f"touch {tmp_path}/called"}}}
    ]
    said = diagnosed(bases["nvfp4"], tmp_path, capsys, {"model": {"rewards": called}}, *gone)[1]
    assert said["rewards"].startswith("[--]")
    assert not (tmp_path / "called").exists()


def test_with_a_wrong_setting_of_the_model_data_and_rewards_are_checked(bases, tmp_path, capsys):
    wrong = {"model": {"max_grad_norm": -1.0, **NUMBERS["model"]}}
    _, said = diagnosed(bases["nvfp4"], tmp_path, capsys, wrong)
    assert "model.max_grad_norm is -1.0" in said["configuration"]
    assert said["data and template"].startswith("[ok]"), said
    assert said["rewards"].startswith("[ok]"), said


def test_a_reward_that_cannot_tell_answers_apart_is_said_to_have_no_signal(bases, tmp_path, capsys):
    constant = {"model": {"rewards": [{"name": "mine", "reward": "level_of_constant.level"}]}}
    (tmp_path / "level_of_constant.py").write_text(
        "def level(prompts, completions):\n    return [0.5] * len(prompts)\n"
    )
    _, said = diagnosed(bases["nvfp4"], tmp_path, capsys, constant)
    assert "mine 0.50; of ones without any: the same, so a group of such completions would have no signal" in str(said)


def test_every_part_of_the_machine_is_checked_and_outside_of_a_clone_the_quickstart_is_three_commands(tmp_path, capsys):
    assert command(["doctor"]) == 0
    checks, _, ready = capsys.readouterr().out.partition("ready: ")
    for name in ("Python", "vLLM rollouts", "NVFP4 rollouts", "disk"):
        assert f"[ok] {name} " in checks
    for name in ("GPU", "hub data sets", "8-bit AdamW", "fused training"):  # not needed for the quickstart
        assert re.search(rf"^\[(ok|--)\] {name} ", checks, re.MULTILINE)
    assert "make" not in ready
    assert [line.split()[3] for line in ready.splitlines()[1:]] == ["tiny", "quantize", "fit"]


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("torch", "2.13.0+cpu", "2.13.0+cpu"),
        ("torch", "2.12.1", "2.12.1, never tested with this release (tested: 2.11.x, 2.13.x)"),
        ("torch", "2.110.0", "2.110.0, never tested with this release (tested: 2.11.x, 2.13.x)"),
        ("vllm", "0.32.0+cpu", "0.32.0+cpu"),
        ("vllm", "0.32.1", "0.32.1, never tested with this release (tested: 0.32.0)"),
        ("vllm", "0.33.0", "0.33.0, never tested with this release (tested: 0.32.0)"),
        ("safetensors", "9.9", "9.9"),
    ],
)
def test_the_doctor_says_which_versions_were_never_tested(name, version, said):
    assert with_advice(name, version) == said
