"""A text file is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from qerl_pl.common.files import write_whole


def test_a_file_has_its_text_and_its_folder_is_made(tmp_path):
    path = tmp_path / "a" / "b" / "c.json"
    for text in ("first\n", "\u221a2\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [each.name for each in path.parent.iterdir()] == ["c.json"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    write_whole(path, "old")

    def full(self, text, **more):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["c.json"]
    assert path.read_bytes() == b"old"
