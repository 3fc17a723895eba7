"""The command ``report`` with damaged event files of a run, and with paths that are no files."""

import json
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from qerl_pl.__main__ import main as command
from qerl_pl.results.curves import read_curves, summarize


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    with SummaryWriter(str(folder)) as writer:
        for step in range(20):
            writer.add_scalar("val/accuracy", step / 4, step)
            writer.add_scalar("time/step_s", 1.0, step, new_style=True)
    return folder


def events(run: Path) -> Path:
    [path] = run.glob("events.out.tfevents.*")
    return path


def test_whole_files_give_every_value_and_no_warning(run, capsys):
    curves = read_curves(run)
    assert curves["val/accuracy"].values == [step / 4 for step in range(20)]
    assert curves["time/step_s"].steps == list(range(20))
    assert capsys.readouterr().err == ""


def test_a_run_with_a_teacher_is_summarised_by_its_kl(run):
    with SummaryWriter(str(run), filename_suffix=".teacher") as writer:
        for step in range(10):
            writer.add_scalar("teacher/kl", 1.0 - step / 10, step)
    summary = summarize(read_curves(run))
    assert summary["KL to the teacher (nats per token, mean of 5), first"] == pytest.approx(0.8)
    assert summary["KL to the teacher (nats per token, mean of 5), last"] == pytest.approx(0.3)


def test_the_steps_of_a_run_that_logs_every_fourth_of_them_are_all_counted(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (3, 7, 11):
            writer.add_scalar("time/step_s", 2.0, step)
    summary = summarize(read_curves(tmp_path))
    assert (summary["RL steps"], summary["seconds in RL steps"]) == (12, 24)


def test_the_validation_before_the_first_rollout_is_not_lost_if_there_is_one_after_each(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for step, value in ((0, 0.1), (0, 0.2), (1, 0.3)):  # Lightning's step for both is 0
            writer.add_scalar("val/accuracy", value, step)
            writer.add_scalar("train/reward", value, step)
    curves = read_curves(tmp_path)
    assert curves["val/accuracy"].steps == [-1, 0, 1]
    assert curves["val/accuracy"].values == pytest.approx([0.1, 0.2, 0.3])
    assert curves["train/reward"].steps == [0, 1]


@pytest.mark.parametrize("kept", [0.3, 0.5, 0.99])
def test_of_a_file_that_was_cut_the_rest_is_read_and_the_gap_said(run, capsys, kept):
    data = events(run).read_bytes()
    events(run).write_bytes(data[: int(len(data) * kept)])
    steps = read_curves(run)["val/accuracy"].steps
    assert steps == list(range(len(steps)))
    assert 0 < len(steps) <= 20
    assert "is damaged or cut off" in capsys.readouterr().err


def test_every_flipped_byte_is_said_and_no_value_is_wrong(run, capsys):
    data = events(run).read_bytes()
    for place in range(400, len(data), 37):
        changed = bytearray(data)
        changed[place] ^= 16
        events(run).write_bytes(changed)
        curve = read_curves(run)["val/accuracy"]
        assert curve.values == [step / 4 for step in curve.steps]
        assert "is damaged or cut off" in capsys.readouterr().err, place


def test_a_start_from_an_older_checkpoint_replaces_the_steps_that_come_after_it(run):
    with SummaryWriter(str(run), filename_suffix=".again") as writer:
        for step in (10, 11):
            writer.add_scalar("time/step_s", 2.0, step)
        writer.add_scalar("val/accuracy", 7.0, 11)
    curves = read_curves(run)
    assert curves["time/step_s"].steps == list(range(12))
    assert curves["time/step_s"].values[9:] == [1.0, 2.0, 2.0]
    assert curves["val/accuracy"].values[-2:] == [10 / 4, 7.0]


def test_a_later_start_counts_where_both_logged_a_step(run):
    with SummaryWriter(str(run), filename_suffix=".again") as writer:
        writer.add_scalar("val/accuracy", 7.0, 19)
    assert read_curves(run)["val/accuracy"].values[-2:] == [18 / 4, 7.0]


@pytest.mark.parametrize("content", [b"", b"no events", bytes(100)])
def test_files_of_which_nothing_can_be_read_are_an_error(run, capsys, content):
    events(run).write_bytes(content)
    assert command(["report", str(run)]) == 2
    assert "hold no scalars" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--picture", ".", "'.' is a folder; expected a file"),
        ("--picture", "curves.foo", "does not end in one of .png, .pdf, .svg"),
        ("--json", "pyproject.toml/a", "pyproject.toml is a file and not a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(run, capsys, monkeypatch, option, value, message):
    monkeypatch.chdir(Path(__file__).parent.parent)
    with pytest.raises(SystemExit, match="2"):
        command(["report", str(run), option, value])
    assert message in capsys.readouterr().err


def test_a_table_is_written_beside_the_picture(run, tmp_path):
    picture = tmp_path / "a" / "curves.png"
    assert command(["report", str(run), "--json", str(tmp_path / "a" / "t.jsonl"), "--picture", str(picture)]) == 0
    assert json.loads((tmp_path / "a" / "t.jsonl").read_text())["RL steps"] == 20
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_panel_for_every_curve_that_a_run_logged_and_no_empty_one(tmp_path, capsys, monkeypatch):
    """A run whose rewards are the user's own has no scalar with the name of the quickstart's reward."""
    drawn: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda axis, title, **_: drawn.append(title))
    monkeypatch.setattr("matplotlib.axes.Axes.set_axis_off", lambda axis: drawn.append("unused"))
    for name, tags in (("a", ("val/reward", "policy/entropy")), ("b", ("val/reward", "gap/mean_abs"))):
        with SummaryWriter(str(tmp_path / name)) as writer:
            for tag in tags:
                writer.add_scalar(tag, 0.5, 0)
    runs = [str(tmp_path / name) for name in ("a", "b")]
    picture = tmp_path / "curves.png"
    assert command(["report", *runs, "--picture", str(picture)]) == 0
    assert drawn == [
        "unused",
        "reward on held-out problems",
        "entropy (nats per token)",
        "sampler-trainer gap (nats)",
    ]
    assert f"curves: {picture}" in capsys.readouterr().out


def test_without_any_curve_of_the_picture_none_is_drawn_and_this_is_said(tmp_path, capsys):
    with SummaryWriter(str(tmp_path / "test")) as writer:
        writer.add_scalar("test/reward", 1.0, 0)
    assert command(["report", str(tmp_path / "test"), "--picture", str(tmp_path / "curves.png")]) == 0
    assert "no picture: no run logged any of val/accuracy, val/reward," in capsys.readouterr().out
    assert not (tmp_path / "curves.png").exists()


def test_nothing_is_written_into_the_folder_of_a_run(run, tmp_path):
    def state() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in (run, *run.rglob("*"))}

    before = state()
    assert command(["report", str(run)]) == 0
    assert command(["report", str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert state() == before


def test_a_folder_without_a_run_is_refused_with_advice(run, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command(["report", str(tmp_path / "nowhere")])
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert command(["report", str(run.parent)]) == 2
    assert f"has runs in it; give one or several of them: {run}" in capsys.readouterr().err
    (tmp_path / "new").mkdir()
    assert command(["report", str(tmp_path / "new")]) == 2
    assert "holds no TensorBoard event files, which a run writes once it trains" in capsys.readouterr().err


def test_an_evaluation_is_told_where_its_results_are(tmp_path, capsys):
    with SummaryWriter(str(tmp_path / "test")) as writer:
        writer.add_scalar("test/reward", 1.0, 0)
    assert command(["report", str(tmp_path / "test")]) == 0
    printed = capsys.readouterr().out
    assert f"its results are in {tmp_path / 'test' / 'evaluation'}" in printed
    assert len(printed.splitlines()) == 1
