"""The command ``python -m qerl_pl score``, which scores a file of completions: what it writes and refuses, and that it
leaves files unchanged when it fails."""

import contextlib
import json
from pathlib import Path

import pytest

from qerl_pl.__main__ import main

ROWS = [
    {"completion": "The answer is \\boxed{18}.", "answer": "18", "id": 1},
    {"completion": "so \\boxed{17}", "answer": 18, "id": 2},
    {"completion": "so it is 18", "answer": 18.0, "id": 3},
    {"completion": "\\boxed{18}", "answer": "", "id": 4},
    {"completion": "Answer: 18", "answer": "18", "id": 5},
]


@pytest.fixture
def files(tmp_path):
    """Write ``ROWS`` to a file for the command to score. Returns the file's path, and a path for the output, at which
    there is no file yet."""
    source, target = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    source.write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    return source, target


def score(files, *arguments: str) -> int:
    return main(["score", "--input", str(files[0]), "--output", str(files[1]), *arguments])


@pytest.mark.parametrize(
    ("arguments", "scores"),
    [
        (["--reward", "gsm8k"], [1, 0, 1, None, 1]),
        (["--reward=math"], [1, 0, 1, None, 1]),
        (["--reward", "math", "--reward.fallback", "none", "--reward.num_workers", "1"], [1, 0, 0, None, 0]),
        (["--reward", "dapo", "--reward.num_workers", "1"], [0, 0, 0, None, 1]),
        (["--reward", "qerl_pl.rewards.math.NumericAnswer", "--reward.marker=boxed"], [1, 0, 0, None, 0]),
        (["--reward", "qerl_pl.rewards.format.think_answer_format"], [0, 0, 0, 0, 0]),
    ],
)
def test_each_row_comes_back_in_order_with_its_score(files, arguments, scores, capsys):
    assert score(files, *arguments) == 0
    written = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert [row["score"] for row in written] == scores
    assert [{key: row[key] for key in ("completion", "answer", "id")} for row in written] == ROWS
    assert all(isinstance(row["reason"], str) for row in written)
    num_scored = len([each for each in scores if each is not None])
    mean = sum(each or 0 for each in scores) / num_scored
    printed = capsys.readouterr().out
    assert f"5 rows, {num_scored} scored with mean {mean:.4f}, {5 - num_scored} unscored" in printed
    assert f"mean {sum(each or 0 for each in scores) / 5:.4f} with unscored rows as 0" in printed
    assert {path.name for path in files[0].parent.iterdir()} == {"rows.jsonl", "scores.jsonl"}


def no_score(prompts, completions):
    return [None for _ in completions]


def test_rows_of_which_none_is_scored_have_no_mean(files, capsys):
    assert score(files, "--reward", f"{__name__}.no_score") == 0
    assert "5 rows, 0 scored, 5 unscored; mean 0.0000 with unscored rows as 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"completion": "a"}', "there is no 'answer'"),
        ('{"answer": "a"}', "there is no 'completion'"),
        ('{"completion": null, "answer": "1"}', "'completion' is None"),
        ('{"completion": "a", "answer": [1, 2]}', "'answer' is [1, 2]"),
        ('{"completion": "a", "answer": "1", "answer": "2"}', "the key 'answer' is given twice"),
        ('{"completion": "a", "answer": "1", "x": ' + "[" * 900 + "]" * 900 + "}", "brackets are nested too deeply"),
        ('{"completion": "a", "answer": true}', "'answer' is True"),
        ('{"completion": "a"', "not JSON"),
        ('"\udcff"', "is not UTF-8"),
    ],
)
def test_a_malformed_row_is_named_and_the_output_of_before_survives(files, line, message, capsys):
    files[1].write_text("from before")
    with files[0].open("ab") as file:
        file.write(line.encode(errors="surrogateescape"))
    assert score(files, "--reward", "gsm8k") == 2
    error = capsys.readouterr().err
    assert f"{files[0]}:10" in error
    assert message in error
    assert files[1].read_text() == "from before"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_refused(files, content, capsys):
    files[0].write_text(content)
    assert score(files, "--reward", "gsm8k") == 2
    assert "has no rows" in capsys.readouterr().err
    assert not files[1].exists()


def test_an_answer_has_the_digits_of_the_file_as_in_training(files, tmp_path, monkeypatch):
    (tmp_path / "own_digits.py").write_text(
        "def digits(prompts, completions):\n    return [len(prompt.answer) for prompt in prompts]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    files[0].write_text("".join(f'{{"completion": "a", "answer": {answer}}}\n' for answer in ("27.10", "[7.0]", '"x"')))
    assert score(files, "--reward", "own_digits.digits") == 0
    assert [json.loads(line)["score"] for line in files[1].read_text().splitlines()] == [5, 3, 1]


def test_numbers_of_a_row_come_back_with_the_digits_of_the_file(files):
    kept = '"answer": 27.10, "large": 1234567890123456789.10, "x": 1e400, "y": [{"z": -0.50}, true, null, "\\u00e9"]'
    files[0].write_text(f'{{"completion": "a", {kept}}}\n', encoding="utf-8")
    assert score(files, "--reward", "gsm8k") == 0
    assert files[1].read_text(encoding="utf-8").startswith(f'{{"completion": "a", {kept}, "score": ')
    written = json.loads(files[1].read_text(encoding="utf-8"), parse_float=str)
    assert (written["answer"], written["x"], written["score"]) == ("27.10", "1e400", "0.0")


def test_a_reward_gets_the_question_and_is_refused_if_it_needs_tokens(files, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_asked.py").write_text(
        "def text(prompts, completions):\n    return [len(prompt.text) for prompt in prompts]\n\n\n"
        "def trl(prompts, completions, answer):\n    return [len(prompt) for prompt in prompts]\n\n\n"
        "def rest(completions, **columns):\n    return [len(prompt) for prompt in columns['prompts']]\n\n\n"
        "def tokens(prompts, completions):\n    return [len(completion.tokens) for completion in completions]\n\n\n"
        "def first(prompts, completions):\n    return [prompt.tokens[0] for prompt in prompts]\n\n\n"
        "def ids(completion_ids, **columns):\n    return [len(tokens) for tokens in completion_ids]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    asked = [
        {"question": "12345", "prompt": "1"},
        {"question": None, "prompt": "123"},
        {},
        {"prompt": [{"role": "user", "content": "12"}]},
    ]

    def write(rows: list[dict]) -> None:
        files[0].write_text("".join(json.dumps({"completion": "a", "answer": "1", **row}) + "\n" for row in rows))

    for name, rows, scores in (
        ("text", asked, [5, 3, 0, 2]),
        ("trl", asked[:3], [5, 3, 0]),
        ("rest", asked[:3], [5, 3, 0]),
        ("rest", asked[3:], [1]),  # one message
    ):
        write(rows)
        assert score(files, "--reward", f"own_asked.{name}") == 0
        assert [json.loads(line)["score"] for line in files[1].read_text().splitlines()] == scores
    overlong = ["qerl_pl.rewards.length.SoftOverlong", "--reward.buffer", "3"]
    for arguments, said in (
        (["own_asked.tokens"], "needs tokens, which a file of completions does not have"),
        (["own_asked.first"], "needs tokens"),
        (["own_asked.ids"], "takes 'completion_ids', which the data does not have"),
        (overlong, "needs tokens"),
        ([*overlong, "--reward.max_tokens", "9"], "needs tokens"),
    ):
        capsys.readouterr()
        assert score(files, "--reward", *arguments) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert said in line


def test_missing_files_and_unknown_rewards_are_errors(files, tmp_path, capsys):
    assert score((tmp_path / "none.jsonl", files[1]), "--reward", "gsm8k") == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert score((files[0], tmp_path / "new" / "scores.jsonl"), "--reward", "gsm8k") == 0
    assert (tmp_path / "new" / "scores.jsonl").exists(), "its folder is made, as for every output"
    for output in (tmp_path, Path("/dev/null")):
        with pytest.raises(SystemExit):
            score((files[0], output), "--reward", "gsm8k")
        assert "is a folder" in (said := capsys.readouterr().err) or "is no regular file" in said
    for arguments, message in (
        (["--reward", "gsm9k"], "gsm9k"),
        (["--reward", "math", "--reward.fallback", "non"], "expected 'none', 'last_math'; did you mean none?"),
    ):
        with pytest.raises(SystemExit):
            score(files, *arguments)
        assert message in capsys.readouterr().err
    assert not files[1].exists()


def test_an_own_function_scores_and_its_mistakes_are_words(files, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_score.py").write_text(
        "def by_id(prompts, completions):\n    return [prompt.row['id'] for prompt in prompts]\n\n\n"
        "def by_level(prompts, completions):\n    return [prompt.row['level'] for prompt in prompts]\n\n\n"
        "def alone(question):\n    return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert score(files, "--reward", "own_score.by_id") == 0
    assert [json.loads(line)["score"] for line in files[1].read_text().splitlines()] == [1, 2, 3, 4, 5]
    capsys.readouterr()
    for name, said in (
        ("own_score.by_level", "KeyError: 'level' (own_score.py, line 6"),
        ("own_score.alone", "takes (question); expected two parameters named prompts and completions"),
        ("own_score.by_lever", "there is no 'by_lever' in own_score; did you mean by_level?"),
        ("numeric", "in short: gsm8k, math, dapo"),
    ):
        with contextlib.suppress(SystemExit):
            assert score(files, "--reward", name) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert said in line, line
