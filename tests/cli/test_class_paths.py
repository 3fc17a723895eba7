"""The object that a ``class_path`` of a configuration names is checked before it is called, and refused if the setting
cannot use it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from jsonargparse import ArgumentParser, Namespace

from qerl_pl.cli.checks import check_class_paths, check_methods


def makes_a_reward(scale: float) -> Callable[..., Any]:
    raise AssertionError("called")


class Scorer:
    class Inside:
        def __init__(self, scale: float = 2.0) -> None:
            raise AssertionError("made")

        def __call__(self, prompts, completions):
            raise AssertionError

    @classmethod
    def of_class(cls, prompts, completions):
        raise AssertionError

    def of_object(self, prompts, completions):
        raise AssertionError


scorer = Scorer()
named = scorer.of_object


class TakesOthers:
    def __init__(self) -> None:
        raise AssertionError("made")

    def __call__(self, one, two):
        raise AssertionError


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("os.system", "a function that does not say what it makes"),
        ("os.popen", "a function that does not say what it makes"),
        ("builtins.exec", "a function that does not say what it makes"),
        ("subprocess.Popen", "does not say which parameters"),
        (f"{__name__}.TakesOthers", "takes .one, two.; expected two parameters named prompts and completions"),
    ],
)
def test_what_is_no_reward_is_refused_without_a_call(path, said):
    spec = Namespace(rewards=[Namespace(name="a", reward=Namespace(class_path=path, init_args=Namespace()))])
    with pytest.raises(ValueError, match=said):
        check_class_paths(spec)


@pytest.mark.parametrize(
    "path", [f"{__name__}.makes_a_reward", f"{__name__}.Scorer.Inside", "qerl_pl.rewards.math.NumericAnswer"]
)
def test_rewards_and_functions_that_say_that_they_make_one_are_taken(path):
    check_class_paths({"model": {"rewards": [{"reward": {"class_path": path, "init_args": {"scale": 1.0}}}]}})


def test_a_class_path_inside_the_settings_of_an_object_is_checked_too():
    inner = {"class_path": "os.system", "init_args": {"command": "true"}}
    with pytest.raises(ValueError, match=r"data.source.init_args.only.a is os.system"):
        check_class_paths(
            {"data": {"source": {"class_path": "datamodules.table.Table", "init_args": {"only": {"a": inner}}}}}
        )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("Scorer.of_class", "is Scorer.of_class, a method"),
        ("scorer.of_object", "is Scorer.of_object, a method"),
        ("named", ""),
    ],
)
def test_a_method_needs_a_name_by_which_config_yaml_can_be_read_again(path, said):
    parser = ArgumentParser()
    parser.add_argument("--reward", type=Callable)
    settings = parser.parse_args([f"--reward={__name__}.{path}"])
    with pytest.raises(ValueError, match=f"reward {said}") if said else nullcontext():
        check_methods(settings)
    assert said or parser.parse_string(parser.dump(settings)) == settings
