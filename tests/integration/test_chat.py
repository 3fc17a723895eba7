"""The command that chats with a run's policy: policy and base answer as in the rollout engine, and the text of a model
cannot control the terminal."""

import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from transformers import AutoTokenizer

from datamodules.messages import chat_of
from qerl_pl.__main__ import main as command
from qerl_pl.common.types import Problem
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.tools.chat import answer, load_run, printable


@pytest.mark.slow
def test_answers_are_the_engines_greedy_completions_with_and_without_the_adapter(
    finished, phases_shown_at_once, capsys
):
    policy, _ = load_run(finished)
    assert "loading the run's policy ..." in capsys.readouterr().err
    learnt = policy.adapter_state()
    policy.load_adapter_state({name: 30 * tensor if "lora_B" in name else tensor for name, tensor in learnt.items()})
    tokenizer = AutoTokenizer.from_pretrained(policy.base)
    chat = [{"role": "user", "content": "7+5=?"}]
    said = {on: answer(policy, tokenizer, chat, adapter=on, temperature=0, max_tokens=8) for on in (True, False)}
    printed = capsys.readouterr().out
    engine = TransformersEngine()
    engine.start(policy, max_model_len=128)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    for on, text in said.items():
        [[completion]] = engine.generate([prompt], Sampling(1, 8, temperature=0.0), seed=0, adapter=on)
        assert text == tokenizer.decode(completion.tokens, skip_special_tokens=True).strip()
        assert printable(text).strip() in printed
    assert said[True] != said[False], "the adapter is on once"


@pytest.mark.slow
def test_the_loop_asks_both_and_forgets_between_questions_or_at_an_empty_line(finished, monkeypatch, capsys):
    def talk(*lines: str, options: tuple[str, ...] = ()) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert command(["chat", str(finished), "--max-tokens", "6", *options]) == 0
        return capsys.readouterr().out.split("> 1+1=?\n")[1:]

    [alone] = talk("1+1=?")
    assert alone.startswith("[base] ")
    assert "[policy] " in alone
    alone = alone.removesuffix("> \n")
    assert [each.removesuffix("> \n") for each in talk("1+1=?", "1+1=?")] == [alone, alone]
    first, second, third = talk("1+1=?", "1+1=?", "", "1+1=?", options=("--conversation",))
    assert first == third.removesuffix("> \n") == alone
    assert second


def test_a_base_is_searched_for_from_the_folder_in_which_the_run_was_started(tmp_path, monkeypatch):
    started, elsewhere = tmp_path / "own", tmp_path / "own" / "other"
    run = started / "runs" / "mine"
    for folder in (elsewhere, run / "checkpoints", tmp_path / "tiny-nvfp4", started / "sub" / "model"):
        folder.mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").touch()

    def said(base: str, base_format: str | None = None, run_dir: str = "runs/mine", run: Path = run) -> str:
        model = {"base": base, "base_format": base_format, "dtype": "float32"}
        (run / "config.yaml").write_text(yaml.safe_dump({"run_dir": run_dir, "model": model, "data": {}}))
        with pytest.raises(ValueError, match="mine") as error:
            load_run(run)
        return str(error.value)

    monkeypatch.chdir(started)
    unreadable = said("../tiny-nvfp4")  # the checkpoint, which is read after the base was found
    assert "last.ckpt" in unreadable
    assert said("../tiny", "nvfp4") == said("sub/model") == said("Owner/Model") == unreadable
    monkeypatch.chdir(elsewhere)
    assert said("Owner/Model") == said(str(tmp_path / "gone")) == unreadable
    for base, base_format in (("../tiny-nvfp4", None), ("../tiny", "nvfp4"), ("sub/model", None)):
        told = said(base, base_format, run=Path("../runs/mine"))
        assert f"(searched in {elsewhere}), which does not exist" in told
        assert told.endswith(f"started: start this command in {started}")
    for base, run_dir in (("../gone", "runs/mine"), ("../tiny-nvfp4", str(run))):
        assert said(base, run_dir=run_dir).endswith("start this command in that folder")


@pytest.mark.parametrize("system", [None, "", "Think."])
def test_the_system_turn_is_that_of_training(system, tmp_path, monkeypatch, capsys):
    chats = []
    config = {"data": {"system_prompt": system}}
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=?\n"))
    monkeypatch.setattr("qerl_pl.tools.chat.load_run", lambda *_, **__: (SimpleNamespace(base="base"), config))
    monkeypatch.setattr("qerl_pl.tools.chat.read_tokenizer", lambda _: None)
    monkeypatch.setattr("qerl_pl.tools.chat.answer", lambda policy, tokenizer, chat, **_: chats.append([*chat]) or "2")
    assert command(["chat", str(tmp_path), "--without-base"]) == 0
    problem = Problem("1+1=?", "2")
    assert chats == [chat_of(problem, system_prompt=system)]


def test_what_cannot_be_talked_to_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command(["chat", str(tmp_path)])
    assert "is no run folder" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    for option in (("--max-tokens", "0"), ("--temperature", "nan"), ("--temperature", "-1")):
        with pytest.raises(SystemExit, match="2"):
            command(["chat", str(tmp_path), *option])
        assert f"{option[0]}: it is {option[1]}; expected" in capsys.readouterr().err


@pytest.mark.slow
def test_a_policy_on_another_base_is_refused(finished, bases, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(bases["nvfp4"]), str(bases["dense"])))
    assert command(["chat", str(run)]) == 2
    assert "base: the run has" in capsys.readouterr().err


def test_control_characters_are_not_printed():
    assert printable("a\x1b[2Jb\x9bc\u202ed\te\nf\u00e9\u4e2d") == "a?[2Jb?c?d\te\nf\u00e9\u4e2d"
