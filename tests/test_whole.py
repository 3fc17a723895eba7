"""A text file is there whole or not at all, and its lines end at line feeds."""

from __future__ import annotations

import json
import os

import pytest

from qerl_pl.common.files import read_lines, write_whole


def test_a_file_has_its_text_and_its_folder_is_made(tmp_path):
    path = tmp_path / "a" / "b" / "c.json"
    for text in ("first\n", "\u221a2\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [each.name for each in path.parent.iterdir()] == ["c.json"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    write_whole(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["c.json"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r", "\n"])
def test_a_separator_within_json_ends_no_line(tmp_path, separator):
    texts = [f"before{separator}after", "", f"{separator}"]
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    assert [json.loads(line) for line in read_lines(path)] == texts


def test_an_empty_file_has_no_lines_and_a_cut_off_line_is_one(tmp_path):
    path = tmp_path / "log"
    for text, lines in (("", []), ("\n", [""]), ("a\n\nb", ["a", "", "b"])):
        path.write_text(text)
        assert read_lines(path) == lines
    path.write_bytes(b"a\xff\n")
    assert read_lines(path, errors="replace") == ["a\ufffd"]
    with pytest.raises(UnicodeDecodeError):
        read_lines(path)
