"""Rules for the words of docstrings, comments, messages and documents: how docstrings start, and which terms are not
used.

Each pattern in ``DIALECT`` matches a term that once had a meaning of its own in this repository, or an abbreviated
sentence, which readers from outside did not understand; next to it is what to write instead.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKED = [
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "README.md",
    "callbacks",
    "configs",
    "datamodules",
    "docs",
    "pyproject.toml",
    "qerl_pl",
    "train.py",
]
"""Folders and files that the rules below hold for."""
BY_A_MODEL = ("real_completions.md",)
"""Files in them with text that a language model wrote."""

FORBIDDEN_OPENINGS = re.findall(
    r"\w+",
    "Also And As At But By For From He How In Into It Its Likewise Nor Not Of On Or She So Such Than That Their Them "
    "Then These They This Those To What Where Which Who Whose Why With Without",
)
"""A docstring starts with what the thing does (a verb) or is (a noun), so that its first words can be read alone."""

UNIT = "batch|completion|device|file|group|layer|phase|problem|prompt|rank|rollout|row|second|step|token|weight"
COUNTED = "bits|blocks|bytes|completions|groups|nats|once|prompts|rounds|rows|samples|scores|seconds|times|tokens|twice"
DIALECT = {
    r"\bbeside\b": "next to, together with, or concurrently",
    r"\bmeanwhile\b": "concurrently, or while ... happens",
    r"\bslabs?\b": "k-block, or tile",
    r"\bmultiprocessors?\b": "SM",
    r"(?<!model )(?<!dataset )\bcards?\b": "GPU",
    r"\bheads of\b[\w' ]*\bfiles\b": "headers of files",
    r"\bstrange adapter": "probe adapter",
    r"\bcopy engines?\b": "TMA",
    r"\bdecoding_kernel: ours\b": "native, or fused",
    r"\bhalvings?\b": "value/2, value/4, ...",
    r"\blikewise\b": "the thing again, by its name",
    r"\b(?:other|every|each|own|this|that) rooms?\b|\brooms\b": "package",
    rf"\b(?:{COUNTED}) an? (?:{UNIT})\b": "per step, per token, ...",
    r"\. \w*(?:Error|CheckFailed)(?:, [^:.]*)?: (?=[a-z`])": "Raises ... if ...",
}
ALLOWED = {}
"""(File, match) of uses in which a pattern's words have their ordinary meaning."""


def files(*suffixes: str) -> list[Path]:
    found: list[Path] = []
    for name in CHECKED:
        path = ROOT / name
        assert path.exists(), f"{name} is gone; take it off the list"
        found += sorted(path.rglob("*")) if path.is_dir() else [path]
    return [path for path in found if path.suffix in suffixes and path.name not in BY_A_MODEL]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def docstrings(tree: ast.AST, public: bool = True) -> Iterator[tuple[int, str, bool]]:
    """Yield line and text of every docstring, including the strings below attributes that describe them, and whether it
    is the docstring of a public module, class or function."""
    for node in ast.iter_child_nodes(tree):
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        visible = public and not (is_definition and node.name.startswith("_"))
        yield from docstrings(node, visible)
    body = getattr(tree, "body", None)
    for index, node in enumerate(body if isinstance(body, list) else []):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            owns = index == 0 and not isinstance(tree, ast.If | ast.For | ast.With | ast.Try)
            yield node.lineno, node.value.value, owns and public


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and text of every comment and string literal of a Python file. For any other file, yield the
    whole text, with line 1."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, source
        return
    comment, last = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:  # those of consecutive lines are one text
            comment = f"{comment} {token.string.lstrip('# ')}" if token.start[0] == last + 1 else token.string
            last = token.start[0]
            yield last, comment
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def opening_faults(path: Path) -> Iterator[str]:
    for line, text, is_public in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
        first = re.split(r"[\s,;:.]", text.strip(), maxsplit=1)[0]
        if first in FORBIDDEN_OPENINGS:
            yield f"{name_of(path)}:{line} starts with {first!r}: {text[:60]!r}"
        elif is_public and not re.match(r"[A-Z]", text):
            yield f"{name_of(path)}:{line} starts with no capital letter: {text[:60]!r}"


def word_faults(path: Path) -> Iterator[str]:
    for line, text in texts(path):
        words = re.sub(r"\s*\n(?:\s*//)?\s*", " ", text)  # a term may be broken over two lines
        for pattern, plain in DIALECT.items():
            for match in re.finditer(pattern, words, re.IGNORECASE):
                around = words[max(0, match.start() - 40) : match.end() + 40]
                if (name_of(path), match[0]) not in ALLOWED:
                    yield f"{name_of(path)}:{line} says {match[0]!r} in {around!r}; write: {plain}"


@pytest.mark.parametrize("path", files(".py"), ids=name_of)
def test_a_docstring_starts_with_what_the_thing_does_or_is(path):
    faults = list(opening_faults(path))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("path", files(".py", ".md", ".cu", ".cuh", ".yaml", ".toml"), ids=name_of)
def test_no_word_has_a_private_meaning(path):
    faults = list(word_faults(path))
    assert not faults, "\n".join(faults)
