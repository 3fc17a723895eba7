"""No setting is silently ignored: every setting reaches the code that uses it, and a setting that has no effect
together with others is refused or causes a warning."""

import ast
import inspect
import logging
import warnings
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace

import train
from callbacks.aqn import AdaptiveQuantizationNoise
from callbacks.matched_temperature import MatchedTemperature
from datamodules.prompts import PromptDataModule
from qerl_pl.cli.checks import check_monitors, usable_callbacks
from qerl_pl.common.checks import EARLY, LARGEST, is_due, require_finite
from qerl_pl.evaluation.evaluation import OF_ROWS
from qerl_pl.model.quantization import Quantization
from qerl_pl.objective import Objective
from qerl_pl.objective.objective import completed
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.settings.model import ModuleSettings
from qerl_pl.training.optimization import make_optimizer

ROOT = Path(__file__).parent.parent
PLACES = ("callbacks", "datamodules", "qerl_pl/rewards", "qerl_pl/rollout", "qerl_pl/objective", "qerl_pl/settings")
NAMED = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
SOURCES = list(dict.fromkeys([*NAMED, *sorted((ROOT / "qerl_pl").rglob("*.py"))]))
CALLBACK = "callbacks.progress.Progress"

MODEL: dict[str, Any] = {
    "sampling": {"num_completions": 3, "max_tokens": 7, "temperature": 0.9},
    "val_sampling": {"num_completions": 2, "max_tokens": 9, "temperature": 0.6, "top_p": 0.8, "top_k": 11},
    "lora": {"rank": 2, "alpha": 6, "dropout": 0.1, "targets": ["q_proj", "up_proj"], "rslora": True}
    | {"train_norms": True},
    "objective": {"preset": "grpo", "clip_low": 0.1, "clip_high": 0.4, "max_ratio": 5.0, "kl_coefficient": 0.01}
    | {"kl": "k2", "correction": "mask", "correction_low": 0.4, "correction_high": 3.0, "filter_truncated": True}
    | {"teacher": {"coefficient": 0.7, "divergence": "jensen_shannon", "beta": 0.3, "rollouts": 9}},
    "teacher": {"base": "dense", "keep": "host"},
    "lr_schedule": "cosine",
    "warmup_steps": 3,
    "max_grad_norm": 0.3,
    "updates_per_rollout": 2,
    "mini_batches": 2,
    "micro_batch_tokens": 321,
    "dtype": "float32",
    "gradient_checkpointing": "offload",
    "router_replay": "off",
    "fused_elementwise": False,
    "gpu_memory": 12.5,
    "dynamic_sampling": {"max_refills": 3, "when_short": "error", "metric": "low_tokens", "oversample": 1.5},
    "max_unscored_share": 0.25,
}
DATA: dict[str, Any] = {
    "batch_size": 6,
    "max_prompt_tokens": 61,
    "max_dropped_share": 0.5,
    "system_prompt": "Think.",
    "question_template": "Q: {question}",
    "stop": ["!!"],
    "show_prompt": 1,
    "held_out": 5,
    "val_limit": 4,
    "val_batch_size": 3,
}
ELSEWHERE = {
    *("base", "base_format", "quantize", "optimizer", "max_prompt_tokens", "stop", "seed"),
    *("source", "tokenizer", "template_arguments", "date"),
}
"""Settings that this test leaves out: they are objects, are set by other settings, or depend on the base's files and
have other tests."""


@pytest.fixture
def built(tmp_path, monkeypatch) -> train.QeRLCLI:
    """Create the objects of a run, without training, from a configuration in which nearly every setting of model and
    data differs from its default."""
    from qerl_pl.tools.tiny import make_tiny

    make_tiny(tmp_path / "dense", seed=0, sft_steps=0)
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"model": MODEL, "data": DATA}))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["train.py"])
    files = ["-c", "tests/integration/toy.yaml", "-c", str(tmp_path / "more.yaml")]
    folders = ["--model.base", str(tmp_path / "dense"), "--run_dir", str(tmp_path / "run"), "--seed_everything", "5"]
    lr = ["--model.optimizer.init_args.lr", "0.125"]
    return train.main(["fit", *files, *folders, *lr], run_now=False)


def held(value: Any, given: Any) -> Any:
    """Read from an object the settings that are given, in the same structure."""
    if isinstance(given, dict):
        return {name: held(getattr(value, name), own) for name, own in given.items()}
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.slow
def test_every_setting_of_model_and_data_arrives(built):
    parameters = set(inspect.signature(PromptDataModule.__init__).parameters) - {"self"}
    known = MODEL.keys() | DATA.keys() | ELSEWHERE
    assert {field.name for field in fields(ModuleSettings)} | parameters == known, "a new setting needs a value here"
    settings = built.model.settings
    assert held(settings, MODEL) == MODEL
    assert held(built.datamodule, DATA) == DATA
    assert (settings.seed, built.datamodule.seed) == (5, 5)
    assert (settings.max_prompt_tokens, settings.stop) == (61, ("!!",))
    assert (settings.rollouts.stop, settings.evaluation.stop) == (("!!",), ("!!",))
    assert settings.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"] == 0.125


def test_every_setting_of_a_class_that_yaml_can_name_is_read_somewhere():
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    read |= {"clip_low", "clip_high", "max_ratio", "enable_prefix_caching"}  # getattr(self, name) over a tuple of names
    unread = []
    for kind in (node for path in NAMED for node in trees[path].body if isinstance(node, ast.ClassDef)):
        for init in (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
            inside = list(ast.walk(init))
            used = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            kept: dict[str, set[str]] = {}  # attributes that a parameter is assigned to
            for node in inside:
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    if isinstance(target, ast.Attribute):
                        kept.setdefault(node.value.id, set()).add(target.attr)
            for name in (parameter.arg for parameter in (*init.args.args[1:], *init.args.kwonlyargs)):
                if name not in used or (name in kept and not kept[name] & read):
                    unread.append(f"{kind.name}.{name}")
        if any("dataclass" in ast.unparse(decorator) for decorator in kind.decorator_list):
            of_class = [node.target for node in kind.body if isinstance(node, ast.AnnAssign)]
            names = (target.id for target in of_class if isinstance(target, ast.Name) and target.id != "_")
            unread += [f"{kind.name}.{name}" for name in names if name not in read]
    assert unread == []


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kl": "k2"}, "kl"),
        ({"kl_in": "reward"}, "kl_in"),
        ({"correction": "none", "correction_low": 0.5}, "correction_low"),
        ({"correction": "none", "correction_high": 3.0}, "correction_high"),
        ({"correction": "none", "correction_level": "sequence"}, "correction_level"),
        ({"ratio_against": "sampler", "correction_high": 3.0}, "correction_high"),
    ],
)
def test_a_setting_of_the_objective_without_effect_is_refused(settings, name):
    with pytest.raises(ValueError, match=rf"model\.objective\.{name} is .* with which it has no effect"):
        Objective(**settings)


def test_what_an_objective_holds_makes_it_again():
    changes: list[dict[str, Any]] = [
        {},
        {"preset": "gspo"},
        {"correction": "none"},
        {"ratio_against": "sampler"},
        {"surrogate": "cispo"},
    ]
    for own in changes:
        made = Objective(**own).resolve()
        assert Objective(**completed(vars(Objective(**own)))).resolve() == made
        assert made.at_noise(0.1) == made
    uncorrected = Objective(correction_high=3.0, correction_level="sequence", correct_noise=False).resolve()
    assert uncorrected.at_noise(0.1).correction == "none"


@pytest.mark.parametrize(("name", "value"), [("clip_high", 0.5), ("clip_low", 0.1), ("max_ratio", 4.0)])
def test_a_bound_of_the_ratio_in_a_run_with_one_step_a_rollout_is_warned_about(name, value, recwarn):
    def check(objective: Objective, *, updates: int = 1) -> None:
        settings = ModuleSettings(base="any", updates_per_rollout=updates, objective=objective)
        settings.check_length(max_steps=4, batch_size=4)

    check(Objective(**{name: value}), updates=2)
    check(Objective(preset="grpo"))
    check(Objective(**{name: value}, ratio_against="sampler"))
    assert not list(recwarn)
    check(Objective(**{name: value}))
    assert f"model.objective.{name} is {value} and a rollout has one optimizer step" in str(recwarn.pop().message)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, r"top_p \(0\.5\) .* no effect"),
        ({"temperature": 0.0, "top_k": 5}, r"top_k \(5\) have no effect"),
        ({"temperature": 1e-3}, r"is 0\.001; expected at least 0\.01"),
        ({"temperature": 1e39}, "finite number"),
    ],
)
def test_sampling_that_an_engine_would_change_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Sampling(1, 8, **settings)


@pytest.mark.parametrize("name", ["samples", "length"])
def test_the_size_of_no_calibration_data_is_refused(name):
    size: dict[str, Any] = {name: 7}
    with pytest.raises(ValueError, match=f"{name} is 7 without calibration data"):
        Quantization(**size)
    assert getattr(Quantization(calibration="text.txt", **size), name) == 7


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 2))]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda groups: torch.optim.AdamW(groups, lr=float("inf")), "changes a weight of 0 by nan"),
        (lambda groups: torch.optim.AdamW(groups, weight_decay=float("inf")), "changes a weight of 0 by nan"),
        (lambda groups: torch.optim.AdamW(groups, maximize=True), "expected a finite number below 0"),
        (lambda groups: torch.optim.SGD(groups, lr=1e39), "overflow"),
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "does not support dense gradients"),
        (lambda groups: torch.optim.AdamW(groups, lr=-1.0), "Invalid learning rate"),
    ],
)
def test_an_optimizer_that_cannot_go_down_a_gradient_is_refused_before_the_first_rollout(build, said):
    with pytest.raises(ValueError, match=f"model.optimizer .*{said}"):
        make_optimizer(build, parameters())


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adam", "RMSprop", "Adadelta", "Rprop", "NAdam", "Adafactor", "Muon"])
def test_other_optimizers_are_taken_and_have_no_state_of_the_trial(kind, recwarn):
    made = make_optimizer(getattr(torch.optim, kind), parameters())
    assert not made.state
    assert not list(recwarn)


def test_a_learning_rate_of_zero_is_warned_about(recwarn):
    make_optimizer(lambda groups: torch.optim.AdamW(groups, lr=0.0), parameters())
    assert "would learn nothing" in str(recwarn.pop().message)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MatchedTemperature("a", gain=float("nan")), "gain is nan"),
        (lambda: MatchedTemperature("a", limits=(0.5, float("inf"))), "limits are"),
        (lambda: AdaptiveQuantizationNoise(decay="constant", sigma_end=1e-3), "keeps sigma_start"),
        (lambda: AdaptiveQuantizationNoise(sigma_start=1e300), "finite noise level"),
        (lambda: VLLMEngine(kv_cache_bytes=-1), "kv_cache_bytes is -1"),
        (lambda: VLLMEngine(block_size=0), "block_size is 0"),
        (lambda: VLLMEngine(max_num_batched_tokens=0), "max_num_batched_tokens is 0"),
        (lambda: PromptDataModule(None, "a", val_batch_size=0), "data.val_batch_size is 0"),  # pyright: ignore
        (lambda: WeightedReward("a\nb", len), "a reward's name is"),
        (lambda: WeightedReward("a", len, weight=1e39), "finite number"),
    ],
)
def test_an_impossible_setting_is_refused_where_it_is_given(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_number_that_is_infinite_in_32_bits_is_infinite():
    require_finite("a", b=LARGEST, c=-LARGEST, d=None)
    assert torch.finfo(torch.float32).max == LARGEST
    with pytest.raises(ValueError, match=r"a\.b is 1e\+39; expected a finite number"):
        require_finite("a", b=1e39)


@pytest.mark.parametrize("every", [1, 3, 8])
def test_the_first_rollouts_and_then_every_so_many_get_the_long_checks(every):
    due = [index for index in range(40) if is_due(index, every)]
    assert due == sorted({*range(EARLY), *range(0, 40, every)})


MONITORS = {
    "val/reward": True,
    "val/accuracy": True,
    "val/pass@8": True,
    "policy/entropy": True,
    "matched/temperature": True,
    "canary/tensors_checked": True,
    "step": True,
    None: True,
}
MONITORS |= {"val/acuracy": False, "val_loss": False, "no/such": False, "train": False, "": False}


@pytest.mark.parametrize(("monitor", "is_logged"), MONITORS.items())
def test_a_callback_that_watches_a_value_which_no_run_logs_is_refused(monitor, is_logged):
    name = "lightning.pytorch.callbacks.EarlyStopping"
    callbacks = [Namespace(class_path=CALLBACK), Namespace(class_path=name, init_args=Namespace(monitor=monitor))]
    expected = (
        nullcontext() if is_logged else pytest.raises(ValueError, match=f"{name} has monitor '{monitor}'.*reward")
    )
    with expected:
        check_monitors(callbacks, [*OF_ROWS, "accuracy"])
    check_monitors([*callbacks, Namespace(class_path="mine.Logs")], [])  # which may log the value


@pytest.mark.parametrize("monitor", ["val/reward", "val/accuracy", "val/pass@4", "train/accuracy"])
@pytest.mark.parametrize("name", ["EarlyStopping", "ModelCheckpoint"])
def test_a_callback_of_lightning_that_prefers_low_scores_warns(monitor, name):
    path = f"lightning.pytorch.callbacks.{name}"

    def check(**settings):
        check_monitors([Namespace(class_path=path, init_args=Namespace(**settings))], [*OF_ROWS, "accuracy"])

    with pytest.warns(UserWarning, match=f"{path} has mode 'min', so it takes the lowest {monitor} for the best"):
        check(monitor=monitor, mode="min")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(monitor=monitor, mode="max")
        check(monitor="val/completion_tokens", mode="min")


@pytest.mark.parametrize(
    ("monitor", "strict", "stops"), [("val/reward", 1, 0), ("train/reward", 1, 1), ("train/reward", 0, 0)]
)
def test_early_stopping_by_a_value_of_rollouts_waits_for_the_first_one(monitor, strict, stops):
    settings = Namespace(monitor=monitor, strict=bool(strict))
    callbacks = [
        Namespace(class_path="lightning.pytorch.callbacks.EarlyStopping", init_args=settings),
        Namespace(class_path="mine.Logs"),
    ]
    check_monitors(callbacks, OF_ROWS)
    callbacks.append(Namespace(class_path="callbacks.validate_first.ValidateFirst"))
    with (
        pytest.raises(ValueError, match=f"{monitor}', which .* not have yet.*`strict: false`")
        if stops
        else nullcontext()
    ):
        check_monitors(callbacks, OF_ROWS)


def test_of_a_callback_that_is_given_again_the_later_settings_count(caplog):
    one, other = (Namespace(class_path=CALLBACK, init_args=Namespace(every=every)) for every in (1, 5))
    foreign = [Namespace(class_path="lightning.pytorch.callbacks.ModelCheckpoint") for _ in range(2)]
    with caplog.at_level(logging.INFO):
        assert usable_callbacks([one, *foreign, other], always=()) == [other, *foreign]
    assert f"{CALLBACK} more than once" in caplog.text
    assert usable_callbacks(None, always=()) == []
    with pytest.raises(ValueError, match="part of every run"):
        usable_callbacks([one], always=(CALLBACK,))
    with pytest.raises(ValueError, match="does not work here"):
        usable_callbacks([Namespace(class_path="lightning.pytorch.callbacks.BatchSizeFinder")], always=())
