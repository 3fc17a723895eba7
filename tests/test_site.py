"""The documentation site is built without warnings, its pages load nothing from the network, and what they say agrees
with the program."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import Abort

from docs.hooks import PACKAGES, packages
from qerl_pl.tools.init import EXAMPLE

ROOT = Path(__file__).parent.parent


def configuration(**changed: Any) -> MkDocsConfig:
    return load_config(str(ROOT / "mkdocs.yml"), **changed)


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        folder = tmp_path_factory.mktemp("site")
        config = configuration(site_dir=str(folder))
        assert config.strict, "a warning ends the build"
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    return folder


@pytest.mark.long
def test_every_module_is_on_its_packages_page(site):
    found = "".join((site / "reference" / f"{name}.html").read_text() for name in packages())
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("[a-z]*.py"))
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if path.parent != EXAMPLE}
    assert len(modules) > 100
    assert {name for name in modules if f'id="{name}"' not in found} == set()


@pytest.mark.long
def test_every_setting_and_class_of_the_shipped_configurations_is_explained(site):
    text = text_of(site / "reference" / "settings.html")
    keys, classes = set(), set()

    def note(value: object, key: str) -> None:
        if isinstance(value, list):
            for each in value:
                note(each, "")
        elif isinstance(value, dict):
            classes.update({value["class_path"]} if "class_path" in value else ())
            for name, each in value.items():
                if name not in ("class_path", "init_args"):
                    keys.add(key + name.rstrip("+"))
                note(each, f"{key}{name}." if key or name in ("model", "data", "trainer") else "")

    for path in (ROOT / "configs").rglob("*.yaml"):
        if path.parent.name not in ("studies", "rewards"):
            note(yaml.safe_load(path.read_text()), "")
    own = {name for name in classes if name.startswith(("qerl_pl.", *(f"{package}." for package in PACKAGES)))}
    assert len(own) > 20
    assert {name for name in own if f"class_path: {name}" not in text} == set()
    settings = {key for key in keys if key.startswith(("model.", "data.", "trainer.")) and "init_args" not in key}
    assert len(settings) > 40
    nested = {key for key in settings if key not in text}  # of a mapping that has a table of its own
    assert {key for key in nested if not all(part in text for part in key.rsplit(".", 1))} == set()
    assert len(nested) < 10


@pytest.mark.long
def test_nothing_is_loaded_from_the_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loaded = r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:[^\"\s>]*)|<link[^>]+href=\"?(https?:[^\"\s>]*)"
    assert {found for page in pages for found in re.findall(loaded, page.read_text())} == set()


def test_every_document_is_in_the_navigation():
    named = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - set(named) == set(), "add it to mkdocs.yml"


@pytest.mark.parametrize("link", ["absent.md", "other.md#absent", "../qerl_pl/absent.py", "/other.md"])
def test_a_dead_link_ends_the_build(link, tmp_path):
    source = tmp_path / "docs"
    source.mkdir()
    (source / "other.md").write_text("# Other\n\n## Part\n")
    plain = {"hooks": [], "plugins": [], "nav": ["index.md", "other.md"], "extra_css": [], "theme": "mkdocs"}
    for target, ends in (("other.md#part", False), (link, True)):
        (source / "index.md").write_text(f"# Page\n\n[link]({target})\n")
        config = configuration(docs_dir=str(source), site_dir=str(tmp_path / "site"), **plain)
        if ends:
            with pytest.raises(Abort):
                build(config)
        else:
            build(config)
