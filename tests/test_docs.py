"""What the documents name exists and is right: files, commands, options, keys of configurations, and numbers."""

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

import train
from docs.make_tables import filled
from qerl_pl.__main__ import COMMANDS, TRAINING
from qerl_pl.__main__ import main as command
from qerl_pl.common.types import Completion, Prompt

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(path for folder in (ROOT, ROOT / "configs", ROOT / "docs") for path in folder.glob("*.md"))
EXAMPLE = "-c configs/tasks/gsm8k.yaml -c configs/models/qwen2.5-7b.yaml -c configs/arms/nvfp4_aqn.yaml"
PLACEHOLDERS: dict[str, str] = {"RECIPE": EXAMPLE, "RUN...": "RUN", "FILE": "last.ckpt"}


@pytest.fixture(autouse=True)
def own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("COLUMNS", "300")


def code(path: Path) -> list[str]:
    """List all code in a Markdown document: each line of the code blocks, without comments, and each text between
    backquotes."""
    text = path.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [piece.replace("\n", " ") for piece in [*lines, *spans] if piece]


def pieces(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the name of the document and the code, for each piece of code in the documents that begins with a match of
    ``pattern``."""
    return ((path.name, piece) for path in DOCUMENTS for piece in code(path) if re.match(pattern, piece))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#]+)", path.read_text())
    assert [target for target in targets if ":" not in target and not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path):
    folders = ("rollout", "quant", "policy", "kernels", "hopper")
    places = (ROOT, path.parent, ROOT / "qerl_pl", *(ROOT / "qerl_pl" / folder for folder in folders))
    named = [piece for piece in code(path) if re.fullmatch(r"[a-z0-9_./-]+\.(py|yaml|md|toml)", piece)]
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = {word for _, piece in pieces(r"(\w+=\S+ )?make [a-z]") for word in re.findall(r"make ([a-z-]+)", piece)}
    assert wanted
    assert wanted <= targets


def test_every_command_and_option_exists(capsys):
    lines = [re.sub(r"^(python -m qerl_pl|qerl) ", "", piece) for _, piece in pieces(r"(python -m qerl_pl|qerl) \w+")]
    found = [words for line in lines if (words := shlex.split(line))[0] not in TRAINING]
    assert {words[0] for words in found} == set(COMMANDS), "the documents name every command, and no other"
    for words in found:
        with pytest.raises(SystemExit):
            command([words[0], "--help"])
        known = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", known), f"{words[0]} has no {option}"


def training_commands() -> list[str]:
    commands = {piece for _, piece in pieces(r"python train\.py \w+ ")}
    named = (
        piece for _, piece in pieces(rf"qerl ({'|'.join(TRAINING)}) ") if not re.search(r"\b(mine|sums)\.yaml", piece)
    )
    commands |= {piece.replace("qerl", "python train.py", 1) for piece in named}
    # The documents also name options without a command; these are tried with a recipe.
    commands |= {f"python train.py fit RECIPE {piece}" for _, piece in pieces(r"--(model|data|trainer)\.\S+ \S+")}
    return sorted(commands)


@pytest.mark.slow
@pytest.mark.parametrize("line", training_commands())
def test_every_training_command_parses(line, capsys):
    words = shlex.split(" ".join(PLACEHOLDERS.get(word, word) for word in str(line).split()))[2:]
    with pytest.raises(SystemExit) as stop:
        train.main([*words, "--print_config"])
    assert not stop.value.code, capsys.readouterr().err


YAML = {
    (path.name, block)
    for path in DOCUMENTS
    for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    if not block.startswith(("# sums.yaml\n", "# mine_callback.yaml\n"))  # test_extending runs these
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), sorted(YAML), ids=sorted(name for name, _ in YAML))
def test_every_piece_of_yaml_is_a_part_of_a_configuration(name, block, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text("def accuracy(completions): ...\ndef brevity(completions): ...\n")
    (tmp_path / "my_reward.py").write_text("def verl_score(prompts, completions): ...\n")
    (tmp_path / "block.yaml").write_text(block)
    with pytest.raises(SystemExit) as stop:
        train.main(["fit", *EXAMPLE.split(), "-c", str(tmp_path / "block.yaml"), "--print_config"])
    assert not stop.value.code, capsys.readouterr().err


def test_those_who_come_from_other_programs_find_names_that_exist():
    page = (ROOT / "docs" / "coming_from.md").read_text()
    rows = [row.split(" | ") for row in re.findall(r"^\| `.*", page, re.MULTILINE)]
    assert {len(row) for row in rows} == {3}
    names = [row[0].strip("| `") for row in rows]
    assert len(names) == len({*names}) > 60
    for name in names:
        kind, _, field = name.partition(".")
        if kind == "qerl_pl":
            assert callable(resolve_name(name))
        elif kind in ("prompt", "completion"):
            known = {"prompt": Prompt._fields, "completion": Completion.__dataclass_fields__}[kind]
            assert field in known, name


def test_every_module_that_is_run_exists():
    named = {match[1] for _, piece in pieces(r".*python -m ") for match in re.finditer(r"python -m ([\w.]*\w)", piece)}
    named -= {"tests.bench.bench_NAME"}
    assert {"qerl_pl", "pytest"} < named
    assert {name for name in named if find_spec(name) is None} == set()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["configs/README.md", "docs/coming_from.md"])
def test_every_key_in_the_tables_is_a_key(page, capsys):
    source = [
        "--data.source",
        "datamodules.table.Table",
        "--data.source.train_path",
        "a",
        "--data.source.question",
        "b",
    ]
    with pytest.raises(SystemExit):
        train.main(["fit", *EXAMPLE.split(), *source, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    document = (ROOT / page).read_text()
    keys = [key for key in re.findall(r"^\| `([a-z_.]+)` \|", document, re.MULTILINE) if key != "seed_everything"]
    keys = [key for key in keys if not key.startswith(("qerl_pl.", "prompt.", "completion."))]
    assert len(keys) > 10
    for key in keys:
        value = config
        for part in key.split("."):
            assert part in value, f"there is no {key}"
            value = value[part]


def test_tables_are_what_their_script_makes_of_the_measurements():
    for name, mark in (("quickstart", "<!-- table:"), ("support", "<!-- support -->")):
        text = (ROOT / "docs" / f"{name}.md").read_text()
        assert mark in text
        assert filled(text) == text


def test_the_readmes_examples_are_those_that_the_tests_run():
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/extending.md"))
    blocks = re.findall(r"^```(?:python|yaml|json)\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    assert all(block in page for block in blocks)


def message(node: ast.AST) -> str:
    """Return the text of a string literal or f-string in Python source, with a line break in place of each inserted
    value; "" for any other node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)  # pyright: ignore
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_the_messages_of_the_troubleshooting_page_are_the_programs():
    sources = [path for name in ("qerl_pl", "callbacks", "datamodules") for path in (ROOT / name).rglob("*.py")]
    printed = {message(node) for path in sources for node in ast.walk(ast.parse(path.read_text()))}
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [text.strip() for _, text in re.findall(r"^#### (`+)(.*)\1$", page, re.MULTILINE)]
    assert len(quoted) > 40
    for text in quoted:
        pieces = [piece.strip() for piece in re.split(r"\.{3}(?!\.)", text)]
        assert len("".join(pieces)) > 12, text
        pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
        assert any(map(pattern.search, printed)), f"no message of the program reads: {text}"
