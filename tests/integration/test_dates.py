"""Some chat templates write the date into prompts. All starts of a run write the same date, whatever the day, time zone
or locale."""

import locale
import logging
import re
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from transformers.utils import chat_template_utils

from datamodules.arithmetic import Arithmetic
from datamodules.loader import TrainLoader
from datamodules.prompts import PromptDataModule
from qerl_pl.common import clock
from qerl_pl.common.clock import template_clock
from qerl_pl.tools.export import export_adapter
from tests.integration.conftest import UNCHECKED, load_last

# How the templates of supported families write the date.
WRITES = {
    "llama": "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}'
    "{%- endif %}{%- endif %}{{ date_string }}",
    "mistral": "{%- set today = strftime_now('%Y-%m-%d') %}{{ 'The current date is ' + today + '.' }}",
    "granite": "{{- \"Knowledge Cutoff Date: April 2024.\\nToday's Date: \" + strftime_now('%B %d, %Y') + '.' }}",
    "smollm3": '{%- macro today() %}{{ strftime_now("%d %B %Y") }}{% endmacro %}{{ today() }}',
}
CHAT = (
    "\n{%- for message in messages %}{{ '<|im_start|>' + message['role'] + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def day(monkeypatch):
    """Set the clocks that chat templates and this program read to 27 November 2026. Returns a function that sets them
    to the day of November 2026 whose number it is given."""

    def move(number: int) -> None:
        class Moved(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime(2026, 11, number, 15, 30, 1, tzinfo=tz)

        monkeypatch.setattr(chat_template_utils, "datetime", Moved)
        monkeypatch.setattr(clock, "datetime", Moved)

    move(27)
    return move


@pytest.fixture
def dated(bases, tmp_path) -> Path:
    """Folder of a base whose chat template writes the date."""
    base = tmp_path / "dated"
    base.mkdir()
    for file in bases["nvfp4"].iterdir():
        (base / file.name).symlink_to(file)
    (base / "chat_template.jinja").unlink()
    (base / "chat_template.jinja").write_text(WRITES["llama"] + CHAT)
    return base


def prompts(base: Path, **settings) -> list[str]:
    data = PromptDataModule(Arithmetic(num_train=4, num_validation=2), str(base), batch_size=4, **settings)
    data.setup("fit")
    return [prompt.text for prompt in (*data.some_train_prompts(), *next(iter(data.val_dataloader())))]


@pytest.mark.parametrize("family", WRITES)
def test_a_template_writes_the_date_that_is_given_on_every_day(family, dated, day):
    (dated / "chat_template.jinja").write_text(WRITES[family] + CHAT)
    first = prompts(dated)
    day(28)
    assert prompts(dated, date="2026-11-27") == first
    assert prompts(dated) != first, "the template writes no date"
    assert all("2026" in text and "27" in text for text in first)


def test_the_log_says_which_date_prompts_have_and_nothing_of_a_template_without_one(dated, bases, day, caplog):
    with caplog.at_level(logging.INFO):
        prompts(dated)
    assert "the chat template writes the date into prompts; in this run it is 2026-11-27" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        prompts(bases["nvfp4"])
    assert "the date" not in caplog.text


def test_a_date_that_cannot_act_or_be_read_is_refused(dated, bases):
    with pytest.raises(ValueError, match=r"data\.date is '2026-11-27', and the chat template of .* writes no date"):
        prompts(bases["nvfp4"], date="2026-11-27")
    with pytest.raises(ValueError, match=r"data\.date is 'yesterday'; expected a date such as"):
        prompts(dated, date="yesterday")


FORMAT = "%A %a %B %b %h %d %e %Y %H:%M %I %p|%c|%x|%X|%r|%%B|%Z%z|%-d %j"


def test_the_clock_of_templates_does_not_depend_on_locale_and_time_zone(monkeypatch):
    moment, written = datetime(2026, 3, 7, 15, 4, 5), template_clock("2026-03-07T15:04:05")(FORMAT)
    assert locale.setlocale(locale.LC_TIME) == "C"
    assert written == moment.strftime(FORMAT), "the C locale's"
    seconds = template_clock("2026-03-07")("%s")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert template_clock("2026-03-07")("%s") == seconds
        for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "ja_JP.UTF-8", "C.UTF-8"):
            with suppress(locale.Error):  # not every machine has it
                locale.setlocale(locale.LC_TIME, name)
            assert template_clock("2026-03-07T15:04:05")(FORMAT) == written
    finally:
        locale.setlocale(locale.LC_TIME, "C")
        monkeypatch.delenv("TZ")
        time.tzset()
    assert template_clock("2026-03-07")("%H:%M %^a %^B") == "00:00 SAT MARCH"
    rarer = "%P %Ec|%Od|%EY|%^c|%#B|%_d|%-I%p|%Q|%"
    expected = "pm Sat Mar  7 15:04:05 2026|07|2026|SAT MAR  7 15:04:05 2026|MARCH| 7|3PM|%Q|%"
    assert template_clock("2026-03-07T15:04:05")(rarer) == expected


def test_other_prompts_on_another_day_are_explained_where_the_checkpoint_has_no_date(dated, day):
    data = PromptDataModule(Arithmetic(num_train=4, num_validation=2), str(dated), batch_size=4)
    data.setup("fit")
    before = data.train_dataloader().state_dict()
    day(28)
    again = PromptDataModule(Arithmetic(num_train=4, num_validation=2), str(dated), batch_size=4)
    again.setup("fit")
    for saved, said in (({}, "set data.date to the day of the run's first start"), (data.state_dict(), "2026-11-27")):
        again.load_state_dict(saved)
        loader = again.train_dataloader()
        assert isinstance(loader, TrainLoader)
        with pytest.raises(ValueError, match=f"writes the date.*{said}"):
            loader.load_state_dict(before)
    day(27)
    same = PromptDataModule(Arithmetic(num_train=4, num_validation=2), str(dated), batch_size=4)
    same.setup("fit")
    same.train_dataloader().load_state_dict(before)  # equal prompts need no date


@pytest.mark.slow
def test_a_run_and_the_evaluations_of_its_checkpoints_keep_the_date_of_its_first_start(run, dated, day, tmp_path):
    base = (
        "--model.base",
        str(dated),
        "--data.max_prompt_tokens",
        "128",
        "--model.micro_batch_tokens",
        "400",
        *UNCHECKED,
    )
    steps = (*base, "--trainer.max_steps", "4", "--trainer.limit_val_batches", "0")
    run("fit", tmp_path / "straight", *steps)
    run("fit", tmp_path / "stopped", *steps, "--trainer.max_time", "00:00:00:01")  # ends after some step
    day(28)
    run("fit", tmp_path / "stopped", *steps, "--ckpt_path", "last")
    straight, stopped = load_last(tmp_path / "straight"), load_last(tmp_path / "stopped")
    assert stopped["PromptDataModule"]["date"] == "2026-11-27"
    assert all((stopped["state_dict"][name] == value).all() for name, value in straight["state_dict"].items())
    assert str(yaml.safe_load((tmp_path / "stopped" / "config.yaml").read_text())["data"]["date"]) == "2026-11-27"

    run("test", tmp_path / "stopped", *base, "--ckpt_path", "last")
    run("test", tmp_path / "elsewhere", *base, "--ckpt_path", str(tmp_path / "straight" / "checkpoints" / "last.ckpt"))
    run("test", tmp_path / "stopped", *base, "--ckpt_path", "last", "--data.date", "2026-11-28")
    days = {
        str(path.relative_to(tmp_path)): set(re.findall(r"\d\d Nov 2026", path.read_text()))
        for path in sorted(tmp_path.glob("*/test/*/completions/*.jsonl"))
    }
    assert days == {
        "elsewhere/test/arithmetic-last/completions/test-000000.jsonl": {"27 Nov 2026"},
        "stopped/test/arithmetic-last/completions/test-000000.jsonl": {"27 Nov 2026"},
        "stopped/test/arithmetic-last-2/completions/test-000000.jsonl": {"28 Nov 2026"},
    }

    export_adapter(tmp_path / "stopped", tmp_path / "adapter")
    assert "the chat template wrote the date 2026-11-27" in (tmp_path / "adapter" / "README.md").read_text()
