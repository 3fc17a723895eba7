"""The command python -m qerl_pl plan."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from qerl_pl.__main__ import main as command
from qerl_pl.memory.plan import MOMENTS
from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.tools.plan import on_hopper, planned_run, read_settings
from tests.memory.conftest import recurrent_config

ROOT = Path(__file__).parents[2]
TOY = str(ROOT / "tests" / "integration" / "toy.yaml")
VLLM = ("--model.engine", "qerl_pl.rollout.vllm.VLLMEngine")


@pytest.fixture(autouse=True)
def own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setenv("COLUMNS", "300")


def test_a_table_and_a_file(bases, tmp_path, capsys):
    files = ("--json", str(tmp_path / "plan.json"))
    assert command(["plan", "-c", TOY, "--gpu-memory", "8", *files, "--model.base", str(bases["nvfp4"]), *VLLM]) == 0
    said = capsys.readouterr().out
    moments = [moment for moment in MOMENTS if moment != "teacher"]
    assert all(moment in said for moment in moments)
    assert "teacher" not in said
    assert "fits" in said
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["peak_bytes"] == max(written["phases"].values()) <= written["usable_bytes"]
    assert written["moments"] == {
        moment: sum(part.get(moment, 0) for part in written["parts"].values()) for moment in moments
    }


def test_a_peak_close_to_the_limit_is_explained_if_the_run_would_also_fit_with_less(capsys):
    settings = ["plan", "-c", "gsm8k", "-c", "qwen2.5-7b", "-c", "nvfp4", "--hopper", "--gpu-memory"]
    spare = "spare memory was given to larger micro-batches"
    assert command([*settings, "80"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"fits: the peak is 7\d\.\d GiB of 76\.8 GiB, what may be used of 80\.0\n", said)
    smallest = re.search(r"the smallest GPU for these settings has (\d+) GiB\n.*" + spare, said)
    assert smallest
    assert command([*settings, smallest[1]]) == 0
    assert spare not in capsys.readouterr().out
    assert command([*settings, "8"]) == 1
    assert spare not in capsys.readouterr().out


def test_a_teacher_is_counted_on_the_gpu_or_in_host_memory(bases, tmp_path):
    taught = ("--model.objective", "{teacher: {divergence: reverse}}", "--model.base", str(bases["nvfp4"]), *VLLM)
    peaks = {}
    for keep in ("gpu", "host"):
        teacher = ("--model.teacher", f"{{base: {bases['dense']}, keep: {keep}}}")
        file = tmp_path / f"{keep}.json"
        assert command(["plan", "-c", TOY, "--gpu-memory", "8", "--json", str(file), *teacher, *taught]) == 0
        peaks[keep] = json.loads(file.read_text())["moments"]
    weights = checkpoint_shape(bases["dense"], torch.float32).base_bytes
    assert peaks["gpu"]["rollout"] - peaks["host"]["rollout"] == weights
    assert max(peaks["host"].values()) <= max(peaks["gpu"].values())


def test_what_backward_recomputes_is_chosen_and_said_with_what_it_costs(bases, capsys):
    arguments = ["plan", "-c", TOY, "--gpu-memory", "9.8", "--model.base", str(bases["dense"])]
    plain = ("--model.fused_elementwise", "false")
    large = ("--model.micro_batch_tokens", "400000", "--data.batch_size", "2000", *plain)
    assert command([*arguments, *large]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"gradient_checkpointing: selective, which costs about 9 % .*: keeping all activations would take", said
    )
    assert re.search(r"selective .* 400000", said)
    assert command([*arguments, *large, "--model.gradient_checkpointing", "offload"]) == 0
    assert "gradient_checkpointing: as given" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["data.batch_size", "model.sampling", "model.sampling.max_tokens", "model.optimizer"])
def test_a_setting_without_a_value_is_named(tmp_path, capsys, name):
    *sections, last = name.split(".")
    (tmp_path / "empty.yaml").write_text(
        "".join(f"{section}: {{" for section in sections) + f"{last}: null" + "}" * len(sections)
    )
    with pytest.raises(SystemExit) as stop:
        sys.exit(command(["plan", "-c", TOY, "-c", str(tmp_path / "empty.yaml"), "--gpu-memory", "8"]))
    assert f"error: {name} is null" in f"{stop.value.code}{capsys.readouterr().err}"


def test_what_is_no_optimizer_is_refused_without_a_call(bases, tmp_path, capsys):
    settings = f"{{class_path: os.system, init_args: {{command: touch {tmp_path}/called}}}}"
    wrong = ["--model.base", str(bases["dense"]), "--model.optimizer", settings]
    assert command(["plan", "-c", TOY, "--gpu-memory", "8", *wrong]) == 2
    assert "model.optimizer is os.system, a function that does not say what it makes" in capsys.readouterr().err
    assert not (tmp_path / "called").exists()


def test_settings_are_those_of_the_files_and_the_command_line(bases, tmp_path):
    changed = tmp_path / "changed.yaml"
    changed.write_text("model: {sampling: {max_tokens: 77}, lora: {rank: 3}}\n")
    files = ("--json", str(tmp_path / "plan.json"))
    arguments = [
        "plan",
        "-c",
        TOY,
        "-c",
        str(changed),
        "--gpu-memory",
        "8",
        *files,
        "--model.base",
        str(bases["dense"]),
    ]
    assert command([*arguments, "--model.lora.rank", "5", "--model.lora.dropout", "0.1", "--data.batch_size", "6"]) == 0
    run, toy = json.loads((tmp_path / "plan.json").read_text())["run"], yaml.safe_load(Path(TOY).read_text())
    assert (run["completion_tokens"], run["rank"], run["dropout"]) == (77, 5, True)
    assert run["rows"] == 6 * toy["model"]["sampling"]["num_completions"]
    assert run["micro_batch_tokens"] == toy["model"]["micro_batch_tokens"]
    assert run["engine"] is None, "the toy samples with transformers"


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_an_engine_in_the_settings_has_the_memory_of_the_engine_that_they_make(bases, dtype):
    options = ("--model.engine.init_args.dtype", dtype, "--model.engine.init_args.max_num_seqs", "5")
    result = planned_run(read_settings(["-c", TOY, "--model.base", str(bases["dense"]), *VLLM, *options]))
    assert result.engine == VLLMEngine(dtype, max_num_seqs=5).memory


def test_a_wider_engine_takes_more_and_the_trainer_as_much(bases, tmp_path):
    def parts(dtype: str) -> dict[str, int]:
        options = ("--model.dtype", "bfloat16", "--model.engine.init_args.dtype", dtype)
        files = ("-c", TOY, "--json", str(tmp_path / "plan.json"))
        assert command(["plan", *files, "--gpu-memory", "8", "--model.base", str(bases["dense"]), *VLLM, *options]) == 0
        written = json.loads((tmp_path / "plan.json").read_text())["parts"]
        return {name: max(part.values()) for name, part in written.items() if name != "fragmentation"}

    usual, wide = parts("auto"), parts("float32")
    assert parts("bfloat16") == usual
    wider = {"engine's base", "engine's adapter", "KV cache", "engine's passes"}
    assert {name for name in usual if wide[name] > usual[name]} == wider
    assert {name for name in usual if wide[name] == usual[name]} == usual.keys() - wider


def test_the_default_optimizer_can_be_planned(bases, tmp_path):
    settings = yaml.safe_load(Path(TOY).read_text())
    del settings["model"]["optimizer"]
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(settings))
    files = ("-c", str(tmp_path / "toy.yaml"), "--json", str(tmp_path / "plan.json"))
    assert command(["plan", *files, "--gpu-memory", "8", "--model.base", str(bases["dense"])]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["run"]["state_bytes"] == 8, "AdamW's in fp32"


def test_what_does_not_fit_is_told_by_the_name_of_its_key(bases, capsys):
    arguments = ["plan", "-c", TOY, "--model.base", str(bases["nvfp4"]), *VLLM]
    assert command([*arguments, "--gpu-memory", "1.2", "--model.engine.init_args.kv_cache_bytes", str(2**30)]) == 1
    assert "model.engine.init_args.kv_cache_bytes: null" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--model.base", "nowhere"), "nowhere"),
        (("--model.lora.rnk", "3"), "rnk"),
        (("--model.engine", "tests.memory.test_plan_command.OwnEngine"), "OwnEngine"),
        (("--data.batch_size", "0"), "data.batch_size is 0"),
        (("--model.lora.rank", "-1"), "model.lora.rank is -1; expected at least 1"),
        (("--model.lora.targets", "[]"), "model.lora.targets is empty; name at least one"),
        (("--model.lora.targets", "[query]"), "model.lora.targets has ['query']"),
        (("--trainer.devices", "0"), "trainer.devices is 0"),
        (("--trainer.num_nodes", "0"), "trainer.num_nodes is 0"),
        (("--model.sampling.max_tokens", "-3"), "max_tokens"),
        (("--model.micro_batch_tokens", "0"), "model.micro_batch_tokens is 0"),
        (
            ("--model.micro_batch_tokens", "69"),
            "a prompt of 64 and a completion of 6 tokens are 70, more than model.micro_batch_tokens (69); raise it",
        ),
        (("--model.gradient_checkpointing", "99"), "gradient_checkpointing is 99"),
        (
            ("--model.micro_batch_tokens", "null", "--model.sampling.max_tokens", "99999"),
            "and the model has 2048 positions; lower",
        ),
    ],
    ids=lambda value: "=".join(value[-2:]).removeprefix("--") if isinstance(value, tuple) else "",
)
def test_what_no_run_may_have_is_refused_with_its_reason(bases, capsys, wrong, said):
    arguments = ["plan", "-c", TOY, "--gpu-memory", "8", "--model.base", str(bases["dense"]), *VLLM, *wrong]
    try:
        status = command(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    output = capsys.readouterr()
    [error] = [line for line in output.err.splitlines() if not line.endswith(" s")]  # a slow machine names phases
    assert said in error
    assert "fits" not in output.out


@pytest.mark.parametrize("option", ["--gpu-memory", "--longest"])
@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_sizes_of_gpus_that_cannot_be_are_refused_by_name(capsys, option, value):
    with pytest.raises(SystemExit) as ended:
        command(["plan", "-c", TOY, option, value])
    assert ended.value.code == 2
    assert f"argument {option}: it is {value}; expected more than 0" in capsys.readouterr().err


def test_rows_for_which_a_run_refuses_longrope_are_not_planned(bases, tmp_path, capsys):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    config = {**json.loads((bases["dense"] / "config.json").read_text()), "rope_parameters": rope}
    arguments = ["plan", "-c", TOY, "--gpu-memory", "8", "--model.base", str(tmp_path)]

    def planned(tokens: int, **more: int) -> int:
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        return command([*arguments, "--model.sampling.max_tokens", str(tokens)])

    original = {"original_max_position_embeddings": 128}
    assert planned(64, **original) == 0
    assert planned(65) == 0, "without this number the long factors are never used"
    assert planned(65, **original) == 2
    assert "may reach 129 tokens; expected at most 128 (original_max_position" in capsys.readouterr().err
    assert command([*arguments, "--longest", "8"]) == 0
    assert "the model takes 128 tokens; a run with longer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parts", "missing"), [(("gsm8k",), "base"), (("qwen2.5-7b",), "engine"), (("gsm8k", "nvfp4"), "base")], ids=str
)
def test_a_configuration_without_a_model_or_a_task_is_refused(capsys, parts, missing):
    given = [argument for part in parts for argument in ("-c", part)]
    assert command(["plan", *given, "--gpu-memory", "80"]) == 2
    error = f"error: model.{missing} is not given; give a task and a model, e.g. -c gsm8k -c qwen2.5-7b\n"
    assert capsys.readouterr().err.endswith(error)  # a slow machine names phases before


def test_a_folder_of_config_json_alone_is_planned_and_another_family_is_refused(bases, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text((bases["dense"] / "config.json").read_text())
    assert command(["plan", "-c", TOY, "--gpu-memory", "8", "--model.base", str(tmp_path), *VLLM]) == 0
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "llava"}))
    capsys.readouterr()
    assert command(["plan", "-c", TOY, "--gpu-memory", "8", "--model.base", str(tmp_path), *VLLM]) == 2
    assert "expected one of qwen2, qwen3, llama" in capsys.readouterr().err


def test_the_layers_of_gated_delta_nets_are_targets_for_plan_as_they_are_for_fit(tmp_path):
    recurrent_config(1).save_pretrained(tmp_path / "qwen3.5")
    common = ["plan", "-c", TOY, "--gpu-memory", "24", "--model.base", str(tmp_path / "qwen3.5")]
    peaks = []
    for number, targets in enumerate(("[in_proj_qkv]", "[in_proj_qkv, in_proj_z, out_proj]")):
        file = tmp_path / f"{number}.json"
        assert command([*common, "--model.lora.targets", targets, "--json", str(file)]) == 0
        peaks.append(json.loads(file.read_text())["parts"]["adapter, fp32"]["step"])
    assert 0 < peaks[0] < peaks[1]


def test_the_longest_completion_is_told_for_each_size_of_gpu(bases, capsys):
    arguments = ["plan", "-c", TOY, "--model.base", str(bases["nvfp4"]), *VLLM, "--model.micro_batch_tokens", "null"]
    assert command([*arguments, "--longest", "0.1", "4", "8"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("the model takes 2048 tokens; a run with longer prompts and completions is refused\n")
    none, *sizes = [line.split("│") for line in said.splitlines() if line.startswith("│")]
    assert none[2].strip() == "does not fit"
    assert 0 < int(sizes[0][2]) < int(sizes[1][2])


def test_a_run_on_hopper_is_planned_on_any_machine(bases):
    config = read_settings(["-c", TOY, "--model.base", str(bases["nvfp4"]), *VLLM])
    run, model = planned_run(config), config["model"]
    result = on_hopper(run, model)
    assert result.engine == replace(VLLMEngine().memory, one_copy=True, dequantises=True)
    assert result.fused
    assert replace(result, fused=run.fused, engine=run.engine) == run
    other = model | {"engine": {"init_args": {"decoding_kernel": "humming"}}, "fused_elementwise": False}
    assert on_hopper(run, other) == replace(run, fused=False)
    speculating = on_hopper(run, model | {"engine": {"init_args": {"speculation": "auto"}}}).engine
    assert result.engine is not None
    assert speculating == replace(result.engine, speculates=True)
