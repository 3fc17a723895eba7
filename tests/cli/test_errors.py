"""Error messages about command lines and configurations fit on a screen, and name the setting or option to change."""

import re
from functools import reduce

import pytest
import yaml

from qerl_pl.__main__ import main as command
from qerl_pl.cli.errors import EXAMPLES, in_short
from qerl_pl.cli.other_names import OTHER_NAMES
from qerl_pl.cli.yaml_files import BASE_CONFIG, check_yaml

KEYS = ("model.sampling.temperature", "model.sampling.top_p", "trainer.max_steps")
UNION = """Parser key "trainer.callbacks": Does not validate against any of the Union subtypes
Subtypes: [list[Callback], <class 'Callback'>, <class 'NoneType'>]
Errors:
  - every_n_rollouts is 0; expected at least 1
  - Not a valid subclass of Callback
    Subclass types expect one of:
    - a class path (str)
    - a dict with class_path entry
  - Expected a <class 'NoneType'>
Given value type: <class 'list'>
Given value: [<object>]"""
LINK = "Call to compute_fn of link 'base_folder(model.base) --> data.tokenizer' with args (a(b), None) failed: "


@pytest.mark.parametrize(
    "message",
    [
        "unrecognized arguments: --model.samplng.temperature 0.5",
        "Subcommand 'fit' does not accept option 'model.samplng.temperature'",
        "Group 'model' does not accept option 'samplng.temperature'",
    ],
)
def test_a_misspelt_key_gets_the_nearest_one_and_its_file(tmp_path, message):
    config = tmp_path / "a.yaml"
    config.write_text("model:\n  samplng: {temperature: 1}\n")
    said = in_short(message, keys=KEYS, arguments=["fit", "-c", str(config)])
    assert "there is no setting model.samplng.temperature" in said
    assert "did you mean model.sampling.temperature?" in said
    assert str(config) in said
    assert str(config) not in in_short(message, keys=KEYS, arguments=["fit", "-c", str(tmp_path / "none.yaml")])


@pytest.mark.slow
def test_a_misspelt_key_in_a_file_is_named_in_full_with_its_line(tmp_path, capsys):
    config = tmp_path / "mine.yaml"
    config.write_text("model:\n  objective:\n    preset: dapo\n    clip_hihg: 0.3\n")
    with pytest.raises(SystemExit) as stopped:
        command(["fit", "-c", "quickstart", "-c", str(config), "--print_config"])
    assert stopped.value.code
    wanted = f"no setting model.objective.clip_hihg ({config}, line 4); did you mean model.objective.clip_high?"
    assert wanted in capsys.readouterr().err


@pytest.mark.slow
def test_names_of_other_programs_lead_to_settings_that_exist(capsys):
    said = in_short("unrecognized arguments: --model.learning_rate 1", keys=KEYS, arguments=[])
    assert said == "there is no setting model.learning_rate; did you mean model.optimizer.init_args.lr?"
    with pytest.raises(SystemExit):
        command(["fit", "-c", "quickstart", "--print_config"])
    settings = yaml.safe_load(capsys.readouterr().out)
    for name in OTHER_NAMES.values():
        reduce(lambda section, key: section[key], name.split("."), settings)  # KeyError: there is no such setting


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("data.train_batch_size", "data.batch_size"),  # the most similar setting is data.val_batch_size
        ("data.max_response_length", "model.sampling.max_tokens"),
        ("trainer.n_gpus_per_node", "trainer.devices"),
        ("model.lora_adapter_path", "model.lora.start"),
        ("model.objective.norm_adv_by_std_in_grpo", "model.objective.baseline"),
        ("actor_rollout_ref.rollout.n", "model.sampling.num_completions"),
        ("actor_rollout_ref.model.path", "model.base"),
        ("reward.custom_reward_function.path", "model.rewards"),
    ],
)
def test_names_of_verl_lead_to_settings_that_mean_the_same(name, setting):
    said = in_short(f"unrecognized arguments: --{name}=1", keys=KEYS, arguments=[])
    assert said == f"there is no setting {name}; did you mean {setting}?"


def test_a_word_in_place_of_a_list_is_told_that_a_list_is_expected():
    errors = "Errors:\n    - Expected a <class 'tuple'>\n    - Expected a <class 'NoneType'>\n  "
    message = (
        f"Parser key \"model.lora.targets\":\n  {errors}Given value type: <class 'str'>\n  Given value: all-linear"
    )
    said = in_short(message, keys=KEYS, arguments=[])
    assert said == "model.lora.targets is 'all-linear'; expected a list or null"


@pytest.mark.parametrize("given", ["NestedArg(key='lr', val='2e-3')", "{'init_args': {'lr': 0.002}}"])
def test_settings_of_a_class_that_is_not_named_ask_for_the_class(given):
    kind = "typing.Callable[[collections.abc.Iterable], torch.optim.optimizer.Optimizer]"
    cause = f"Type {kind} expects a function or a callable class: Dict must include a class_path and optionally "
    message = f'Parser key "model.optimizer":\n  {cause}init_args, but got {given}. Got value: Namespace(lr=1)'
    said = in_short(message, keys=KEYS, arguments=[])
    wanted = "give it first, as in --model.optimizer torch.optim.AdamW"
    assert said == f"model.optimizer has settings and no class_path; {wanted}"


@pytest.mark.parametrize("name", ["num_generations", "num_generations+", "num-generations"])
def test_names_of_other_programs_at_the_top_of_a_file_lead_to_settings(tmp_path, name):
    config = tmp_path / "mine.yaml"
    config.write_text(f"{name}: 8\n")
    wanted = rf"line 1: '{re.escape(name)}' .* did you mean model.sampling.num_completions\?"
    with pytest.raises(ValueError, match=wanted):
        check_yaml(config)


def test_a_section_to_which_nothing_can_be_appended_is_refused_with_its_line(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("model+:\n  dtype: float32\n")
    with pytest.raises(ValueError, match=r"line 1: 'model\+' is no setting; did you mean model\?"):
        check_yaml(config)


@pytest.mark.parametrize(
    "message",
    [
        "unrecognized arguments: --model.objective.epsilon-high=0.3",
        "Group 'model' does not accept option 'objective.epsilon-high'",
    ],
)
def test_a_key_with_a_hyphen_is_named_whole(tmp_path, message):
    config = tmp_path / "mine.yaml"
    config.write_text("model:\n  objective:\n    epsilon-high: 0.3\n")
    said = in_short(message, keys=KEYS, arguments=["-c", str(config)])
    assert said == (
        f"there is no setting model.objective.epsilon-high ({config}, line 3); did you mean model.objective.clip_high?"
    )


def test_a_class_that_lacks_methods_of_a_protocol_is_told_which(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "class Mine:\n    def train(self): ...\n    def validation(self) -> 'list[Problem]': ...\n"
    (tmp_path / "half_a_source.py").write_text(text)
    cause = "Import path half_a_source.Mine does not implement protocol PromptSource"
    said = in_short(f'Parser key "data.source":\n  - {cause}', keys=KEYS, arguments=[])
    methods = "train(self) -> list[Problem]"
    assert said == (
        f"data.source is half_a_source.Mine; expected a class with these methods, annotated like this: {methods}"
    )


class Outer:
    class Inner:
        def __init__(self, scale: float = 1.0) -> None: ...


def test_an_unknown_setting_of_a_class_inside_of_a_class_gets_the_nearest_one():
    cause = f"Problem with given class_path '{__name__}.Outer.Inner': Option 'scal' is not accepted"
    said = in_short(f'Parser key "reward":\n  - {cause}', keys=KEYS, arguments=[])
    assert said.endswith("Outer.Inner has no setting scal; did you mean scale?")


def test_a_class_that_is_not_given_has_an_example():
    no_class = (
        "Type typing.Callable[[X], Y] expects a function or a callable class: Expected an import path, but got None."
    )
    no_engine = "Does not implement protocol RolloutEngine. Got value: None Subclass types expect one of"
    for name, cause in (("optimizer", f"{no_class} Got value: None"), ("engine", no_engine)):
        message = in_short(f'Parser key "model.{name}":\n  - {cause}', keys=KEYS, arguments=["-c", "mine.yaml"])
        assert message == (
            f"model.{name} is null, or not given; expected a class by its path, such as {EXAMPLES[f'model.{name}']}"
        )


def test_the_line_to_blame_has_the_whole_name(tmp_path):
    right, wrong = tmp_path / "right.yaml", tmp_path / "wrong.yaml"
    right.write_text("- callbacks.aqn.AdaptiveQuantizationNoise\n")
    wrong.write_text("- callbacks.aqn.AdaptiveQuantizationNois\n")
    message = "Parser key \"a\":\n  - module 'callbacks.aqn' has no attribute 'AdaptiveQuantizationNois'"
    said = in_short(message, keys=KEYS, arguments=["fit", "-c", str(right), "-c", str(wrong)])
    assert "wrong.yaml, line 1); did you mean AdaptiveQuantizationNoise?" in said


def test_the_line_of_a_value_has_the_whole_value(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("- {reward: my.accuracy}\n- {reward: accuracy_of}\n- {reward: accuracy}\n")
    message = (
        'Parser key "model.rewards":\n  Does not validate\n  Errors:\n'
        '    - Parser key "reward": Expected a dot import path string: accuracy'
    )
    assert f"({config}, line 3)" in in_short(message, keys=KEYS, arguments=["fit", "-c", str(config)])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "unrecognized arguments: --model.top_p 0.5",
            "there is no setting model.top_p; did you mean model.sampling.top_p?",
        ),
        (
            "unrecognized arguments: quickstart --trainer.max_steps 20",
            "'quickstart' is no option; a configuration is given by -c, such as -c quickstart, "
            "a setting by --KEY VALUE",
        ),
        (f"{LINK}model.base: a is cut", "model.base: a is cut"),
        (UNION, "trainer.callbacks: every_n_rollouts is 0; expected at least 1"),
        (
            "Parser key \"a\":\n  - Requirement 'wandb>=0.12.10' not met. HINT: Try running `pip install`",
            "a: wandb is not installed; install it: pip install 'wandb>=0.19'",
        ),
        (
            "Parser key \"model.base\":\n  Expected a <class 'str'>. Got value: None",
            "model.base is null, or not given; expected text; give configurations by -c, such as -c quickstart",
        ),
        (
            'Parser key "between":\n  Does not validate against any of the Union subtypes\n'
            "  Subtypes: [dict[str, tuple[float, float]], <class 'NoneType'>]\n  Errors:\n"
            "    - Expected a <class 'float'>. Got value: None\n    - Expected a <class 'NoneType'>\n"
            "  Given value type: <class 'dict'>\n  Given value: {'rate': [0.2, None]}",
            "between has null in {'rate': [0.2, None]}; expected a number there",
        ),
        ("the run has 2 rollouts", "the run has 2 rollouts"),
        ("a\nb\nc\nd\ne\nf\ng", "a\nb\nc\nd\ne"),
    ],
)
def test_a_message_is_reduced_to_its_cause(message, said):
    assert in_short(message, keys=KEYS, arguments=["fit", "--config", str(BASE_CONFIG)]) == said


@pytest.mark.parametrize(
    ("given", "hint"),
    [("trian", "did you mean fit?"), ("reprot", "did you mean report?"), ("zzz", "expected one of (")],
)
def test_an_unknown_command_gets_the_one_that_is_meant(given, hint, capsys):
    assert command([given]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: unknown command '{given}'; {hint}")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["tiny", "fit"])
def test_ctrl_c_ends_a_command_in_one_line_also_while_it_imports(name, monkeypatch, capsys):
    def interrupted(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert command([name, "--output", "x"]) == 130
    assert capsys.readouterr().err == "\nstopped by Ctrl-C\n"
