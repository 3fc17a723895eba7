"""Writing files: a file is written completely or not at all, only regular files are replaced, and messages about errors
of the system say what to do."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from qerl_pl.common.files import in_bytes, in_words, read_lines, replacing, write_whole
from qerl_pl.tools.options import plan_options, report_options


def test_a_file_has_its_text_and_its_folder_is_made(tmp_path):
    path = tmp_path / "a" / "b" / "c.json"
    for text in ("first\n", "\u221a2\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [file.name for file in path.parent.iterdir()] == ["c.json"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    write_whole(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(path, "new")
    assert in_words(raised.value).startswith(f"{path}: the disk is full: free some space")
    assert [file.name for file in tmp_path.iterdir()] == ["c.json"]
    assert path.read_bytes() == b"old"


def test_a_file_is_replaced_when_the_block_ends_and_not_before(tmp_path):
    file = tmp_path / "new" / "file"
    write_whole(file, "old\n")
    with replacing(file) as temporary:
        temporary.write_text("new\n")
        assert file.read_text() == "old\n"
    assert file.read_text() == "new\n"

    def interrupted() -> None:
        with replacing(file) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_text() == "new\n"
    assert list(file.parent.iterdir()) == [file]


def test_a_symbolic_link_stays_and_its_target_gets_the_text(tmp_path):
    target, link, dangling = tmp_path / "target", tmp_path / "folder" / "link", tmp_path / "dangling"
    link.parent.mkdir()
    target.write_text("old")
    link.symlink_to(Path("..", "target"))
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    dangling.symlink_to("later")
    write_whole(dangling, "new")
    assert (tmp_path / "later").read_text() == "new"


def special_files(folder: Path) -> list[Path]:
    """Return paths that are no regular files, so that the program must not replace them: a named pipe, a link to a
    device, a folder, and a device."""
    os.mkfifo(folder / "pipe")
    (folder / "null").symlink_to("/dev/null")
    (folder / "folder").mkdir()
    return [folder / "pipe", folder / "null", folder / "folder", Path("/dev/null")]


def test_what_is_no_regular_file_is_never_replaced(tmp_path):
    for path in special_files(tmp_path):
        mode = path.lstat().st_mode
        with pytest.raises(OSError, match=r"regular file|Is a directory"):
            write_whole(path, "text")
        assert path.lstat().st_mode == mode
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 3, "and no temporary file is left"


@pytest.mark.parametrize(
    ("options", "command"), [(report_options, [".", "--json"]), (plan_options, ["-c", "x", "--json"])]
)
def test_commands_refuse_it_before_they_work(options, command, tmp_path, capsys):
    for path in special_files(tmp_path):
        with pytest.raises(SystemExit):
            options().parse_args([*command, str(path)])
        assert "folder" in (said := capsys.readouterr().err) or "no regular file" in said


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


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (221_184, "221 kB"),
        (999_499, "999 kB"),
        (999_501, "1 MB"),
        (5_450_000_000, "5.45 GB"),
        (1_500_000_000_000, "1.5 TB"),
    ],
)
def test_a_size_has_three_digits_and_a_fitting_unit(count, text):
    assert in_bytes(count) == text


def test_errors_say_what_to_do():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/a.ckpt")
    assert in_words(full).startswith("/runs/a.ckpt: the disk is full: free some space")
    assert in_words(OSError(errno.ENOSPC, "", b"/runs/a.ckpt")) == in_words(full)
    assert "the disk is full" in in_words(OSError(f"could not write the checkpoint: {full}"))
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "rows.jsonl")
    assert in_words(gone) == "rows.jsonl: there is no such file or folder: check the path"
    assert in_words(OSError("no address")) == "no address"
    long = OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "a" * 5000)
    assert in_words(long) == f"{'a' * 300}...: the name is too long: give a shorter path"
