"""The HTML page that shows a run: what it contains, that the text of completions cannot act as HTML, and that the page
needs no network."""

import base64
import hashlib
import html.parser
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from qerl_pl.__main__ import main as command
from qerl_pl.rollout.token_file import RowTokens, read_tokens, write_tokens

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \u2028"
PIECES = {3: " three", 70: "</script>", 100_000: "\u00e9"}


def write_completions(run: Path, name: str, texts: list[str]) -> None:
    rows = [
        {
            "prompt": "1+1?",
            "completion": text,
            "answer": "2",
            "reward": None if at == 1 else float(at),
            "rewards": {"accuracy": None if at == 1 else float(at)},
            "reasons": {"accuracy": HOSTILE},
            "num_tokens": at + 1,
            "finished": True,
        }
        for at, text in enumerate(texts)
    ]
    (run / "completions").mkdir(exist_ok=True)
    (run / "completions" / f"{name}.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / HOSTILE.replace("/", "").strip()[:40]
    with SummaryWriter(str(folder)) as writer:
        for step in (0, 1, 2, 3, 20):
            for tag, value in (("train/reward", step / 4), ("gap/mean_abs", 1e-4), ("canary/tensors_checked", 32.0)):
                writer.add_scalar(tag, value, step)
            writer.add_scalar("val/reward", float("nan"), step)
    (folder / "config.yaml").write_text("seed_everything: 1\nmodel:\n  base: there # </style>\n")
    (folder / "config.1.yaml").write_text("seed_everything: 1\nmodel:\n  base: here\n")
    write_completions(folder, "train-000000", [HOSTILE, "two", "three"])
    write_completions(folder, "validate-000002", ["of validation"])
    return folder


class Scripts(html.parser.HTMLParser):
    """Parses an HTML page: collects its scripts, the names of all its tags, and its content security policy."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: set[str] = set()
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)


def page_of(run: Path, *more: str) -> tuple[Scripts, dict, list[dict]]:
    target = run.parent / "page.html"
    assert command(["report", str(run), "--html", str(target), *more]) == 0
    page = Scripts(target.read_text(encoding="utf-8"))
    summary, blocks = None, []
    for attributes, text in page.scripts:
        if attributes.get("id") == "summary":
            summary = json.loads(text)
        elif attributes.get("class") == "completions":
            blocks.append(json.loads(text))
    assert summary is not None
    return page, summary, blocks


def test_a_page_holds_settings_changes_and_completions(run):
    _, summary, blocks = page_of(run)
    [one] = summary["runs"]
    assert one["curves"]["train/reward"] == [[0, 1, 2, 3, 20], [0.0, 0.25, 0.5, 0.75, 5.0]]
    assert one["changes"] == [{"file": "config.1.yaml", "settings": ["model.base: here -> there"]}]
    assert not one["running"]
    canary, gap, ledger, *_ = one["verdicts"]
    assert canary["good"] is True
    assert "5 rollouts 32 tensors" in canary["text"]
    assert "0.0001 nats" in gap["text"]
    assert ledger["good"] is None
    assert [(block["stage"], block["step"]) for block in blocks] == [("train", 0), ("validate", 2)]
    assert [row["c"] for row in blocks[0]["rows"]] == [HOSTILE, "two", "three"]
    assert [row["w"] for row in blocks[0]["rows"]] == [0.0, None, 2.0]


def test_a_page_has_counts_of_drafts_only_if_the_run_drafted(run):
    def curves() -> dict:
        of_run = page_of(run)[1]["runs"][0]["curves"]
        return {tag: curve for tag, curve in of_run.items() if tag.startswith("speculation/")}

    assert curves() == {}
    with SummaryWriter(str(run)) as writer:
        writer.add_scalar("speculation/tokens_4", 2.5, 3)
    assert curves() == {"speculation/tokens_4": [[3], [2.5]]}


def test_what_a_model_wrote_is_text_and_nothing_leaves_the_page(run):
    page, _, _ = page_of(run)
    assert "img" not in page.tags
    code = [text for attributes, text in page.scripts if not attributes]
    assert len(code) == 1, "one script runs"
    digest = base64.b64encode(hashlib.sha256(code[0].encode()).digest()).decode()
    assert page.policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}';")
    assert "connect-src" not in page.policy
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way_in not in code[0]


def test_tokens_come_back_as_they_were_written(run):
    rows = [
        RowTokens(torch.tensor([3]), torch.tensor([-0.5]), torch.tensor([0.25]), torch.tensor([1.5]), 0.75),
        RowTokens(torch.tensor([70, 3]), torch.tensor([-50.0, -0.125]), torch.zeros(2), torch.ones(2), -1.0),
        RowTokens(torch.tensor([], dtype=torch.int64), torch.empty(0), torch.empty(0), torch.empty(0), 0.0),
    ]
    path = run / "completions" / "train-000000.safetensors"
    write_tokens(path, rows, PIECES)
    found = read_tokens(path)
    assert found is not None
    assert found.offsets.tolist() == [0, 1, 3, 3]
    assert found.ids.tolist() == [3, 70, 3]
    assert found.logprobs.tolist() == [-0.5, -50.0, -0.125]
    assert found.advantages.tolist() == [0.75, -1.0, 0.0]
    assert found.pieces == PIECES
    assert path.stat().st_mode & 0o044 == (run / "config.yaml").stat().st_mode & 0o044

    [block, _] = page_of(run)[2]
    texts = [[block["pieces"][place] for place in decoded(row["t"], "<u4")] for row in block["rows"]]
    assert texts == [[" three"], ["</script>", " three"], []]
    assert decoded(block["rows"][0]["g"], "<i2") == [250]
    assert decoded(block["rows"][1]["l"], "<i2") == [-32000, -125], "thousandths of a nat, cut off at 32"
    assert [row["v"] for row in block["rows"]] == [0.75, -1.0, 0.0]


def test_a_policy_and_its_teacher_are_compared_by_position_and_by_token(run):
    def written(step: int, teacher: list[torch.Tensor] | None) -> None:
        ids = [torch.tensor([3] * 15 + [70] * 3), torch.tensor([70, 3])]
        zeros = [torch.zeros(len(each)) for each in ids]
        rows = [RowTokens(each, zero, zero, zero, 0.0) for each, zero in zip(ids, zeros, strict=True)]
        if teacher is not None:
            rows = [replace(row, teacher=values) for row, values in zip(rows, teacher, strict=True)]
        write_tokens(run / "completions" / f"train-{step:06d}.safetensors", rows, PIECES)
        write_completions(run, f"train-{step:06d}", ["one", "two"])

    written(0, None)
    assert page_of(run)[1]["runs"][0]["teacher"] is None
    written(0, [torch.full((18,), -2.0), torch.full((2,), -2.0)])
    written(10, [torch.tensor([-0.5] * 15 + [-1.0] * 3), torch.tensor([-1.0, 0.25])])
    written(20, None)  # the teacher's coefficient had fallen to 0
    _, summary, blocks = page_of(run)
    assert summary["runs"][0]["teacher"] == {
        "rollouts": [0, 10],
        "positions": [["tokens 1 to 16", 2.0, (15 * 0.5 + 1 + 1 - 0.25) / 18], ["tokens 17 to 64", 2.0, 1.0]],
        "tokens": [[" three", 16, (15 * 0.5 - 0.25) / 16], ["</script>", 4, 1.0]],
    }
    assert [decoded(row["q"], "<i2") for row in blocks[0]["rows"]] == [[-2000] * 18, [-2000] * 2]


def test_a_damaged_file_of_tokens_is_left_out(run, capsys):
    path = run / "completions" / "train-000000.safetensors"
    path.write_bytes(b"no tensors")
    assert "t" not in page_of(run)[2][0]["rows"][0]
    assert f"warning: {path} is damaged" in capsys.readouterr().err


def decoded(text: str, kind: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), kind).tolist()


def test_of_too_many_completions_whole_files_are_left_out_and_the_page_says_so(run):
    for step in range(1, 10):
        write_completions(run, f"train-{step:06d}", ["a", "b", "c"])
    _, summary, blocks = page_of(run, "--completions", "10")
    kept = sum(len(block["rows"]) for block in blocks)
    assert 1 <= kept <= 12
    assert summary["note"].startswith(f"{kept} of 31 completions are shown")
    assert page_of(run)[1]["note"] == ""
    assert page_of(run, "--completions", "0")[2] == []


def test_a_damaged_line_is_counted_and_left_out(run):
    path = run / "completions" / "train-000000.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    [block, _] = page_of(run)[2]
    assert (len(block["rows"]), block["damaged"]) == (2, 1)


def test_completions_of_a_start_that_was_given_up_are_left_out(run):
    for step in (20, 21, 25):
        write_completions(run, f"train-{step:06d}", ["a"])
    for step in (21, 22):
        write_completions(run, f"validate-{step:06d}", ["b"])
    assert [(block["stage"], block["step"]) for block in page_of(run)[2]] == [
        ("train", 0),
        ("train", 20),
        ("validate", 2),
        ("validate", 21),
    ]
    (run / "config.yaml").write_text("trainer: {log_every_n_steps: 4}\n")  # rollouts 21 to 23 may not be logged yet
    assert [block["step"] for block in page_of(run)[2]] == [0, 20, 21, 2, 21, 22]
