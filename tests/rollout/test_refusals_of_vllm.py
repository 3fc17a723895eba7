"""If vLLM fails to start, its error is shown in one line, and the traceback is written to a file."""

from pathlib import Path

from qerl_pl.rollout.vllm.launch import refusal


def test_a_refusal_is_one_line_with_the_message_and_the_file_of_the_traceback():
    try:
        raise AssertionError("first\nsecond")
    except AssertionError as error:
        refused = refusal(error)
    said = str(refused)
    assert "\n" not in said
    assert "AssertionError: first second" in said
    file = Path(said.rpartition(" ")[2].rstrip(")"))
    assert "test_refusals_of_vllm.py" in file.read_text()
    file.unlink()


def test_a_refusal_is_shown_where_there_is_no_folder_for_the_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    said = str(refusal(ValueError("too long")))
    assert said.endswith("ValueError: too long (traceback: there is no folder for it)")
