"""MkDocs hooks that give each page of the documentation site the path that its file has in the repository, so that
relative links work.

They add Markdown files from outside docs/, and pages made from other files: an API page for each package, and one page
each of all settings, all commands and all shipped files. A link to a Python file or package becomes a link to the API
page of the package.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.reference import commands, settings

ROOT = Path(__file__).parent.parent
OUTSIDE = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md")
PUBLISHED = (".md", ".png", ".svg", ".js", ".css")
PACKAGES = ("qerl_pl", "callbacks", "datamodules")
API = tuple(f"reference/{name}" for name in PACKAGES)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the packages' API pages and CHANGELOG.md to the navigation."""
    assert config.nav is not None
    config.nav[-1]["API"] = [{name: f"reference/{name}.md"} for name in packages()]
    if (ROOT / "CHANGELOG.md").exists():
        config.nav.insert(-1, {"Changes": "CHANGELOG.md"})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by all pages: Markdown files of the repository, and pages made from the code."""
    inside = [file for file in files if file.src_dir == config.docs_dir]
    pages = Files([file for file in files if file not in inside])
    published = [f"docs/{file.src_uri}" for file in inside if file.src_uri.endswith(PUBLISHED)]
    for path in (*published, *OUTSIDE):
        if (ROOT / path).exists():
            pages.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    made = {"settings": settings(), "commands": commands(), "files": shipped_files()}
    made |= {name: api_page(name) for name in packages()}
    texts = {f"reference/{name}.md": text for name, text in made.items()}
    for name, title in (("LICENSE", "Licence"), ("CITATION.cff", "Citation")):
        texts[f"{name}.md"] = f"# {title}\n\n```text\n{(ROOT / name).read_text()}```\n"
    for path, text in texts.items():
        pages.append(File.generated(config, path, content=text))
    return pages


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to Python files, packages and LICENSE by links to their pages in the site."""
    path = page.file.src_uri
    # the site's search ranks the page of error messages higher, and API pages lower
    page.meta["search"] = {"boost": 0.3 if path.startswith(API) else 4 if path.endswith("troubleshooting.md") else 1}
    return re.sub(r"(\]\()([^)#:]+)(?=[)#])", lambda link: link[1] + _target(link[2], page.file, files), markdown)


def _target(link: str, source: File, files: Files) -> str:
    folder = posixpath.dirname(source.src_uri)
    path = posixpath.normpath(posixpath.join(folder, link))
    page = f"{path}.md"  # the page of a file that is not Markdown, such as LICENSE
    if path.split("/")[0] in PACKAGES and (ROOT / path).exists():
        package = path if (ROOT / path).is_dir() else posixpath.dirname(path)
        page = f"reference/{'.'.join(package.split('/')[:2])}.md"
    return posixpath.relpath(page, folder) if files.get_file_from_path(page) else link


def packages() -> list[str]:
    """List the packages that have an API page of their own."""
    inner = sorted(path.parent.name for path in (ROOT / "qerl_pl").glob("*/__init__.py"))
    return [PACKAGES[0], *(f"{PACKAGES[0]}.{name}" for name in inner), *PACKAGES[1:]]


def api_page(name: str) -> str:
    """Write the API page of a package, or of the modules directly in ``qerl_pl``, for mkdocstrings."""
    if name != PACKAGES[0]:
        return f"# {name}\n\n::: {name}\n"
    files = sorted((ROOT / name).glob("[a-z]*.py"))
    heading = "\n    options:\n      show_root_heading: true\n      show_root_full_path: false\n"
    return f"# {name}\n\n" + "\n".join(f"::: {name}.{path.stem}{heading}" for path in files)


def shipped_files() -> str:
    """Make the page that shows the shipped configurations and launch scripts."""
    text = "# Shipped files\n\nConfigurations, which `-c` finds by name from any folder, and scripts that start runs.\n"
    for path in (*sorted((ROOT / "configs").rglob("*.yaml")), *sorted((ROOT / "docs" / "launch").glob("*.sh"))):
        language = {".yaml": "yaml", ".sh": "bash"}[path.suffix]
        text += f"\n## {path.relative_to(ROOT)}\n\n```{language}\n{path.read_text()}```\n"
    return text
