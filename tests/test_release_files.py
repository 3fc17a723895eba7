"""Change log, citation file and Dockerfile agree with the package."""

import json
import re
import tomllib
from pathlib import Path

import yaml

from qerl_pl.__main__ import COMMANDS, TRAINING

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_change_log_has_the_version_and_what_is_not_released():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert PROJECT["version"] in versions
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds


def test_the_citation_has_what_the_format_asks_for():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert (citation["title"], citation["version"], citation["license"]) == tuple(
        PROJECT[name] for name in ("name", "version", "license")
    )
    [paper] = citation["references"]
    assert "2510.11696" in paper["url"]


def test_the_dockerfile_installs_an_extra_that_exists_and_runs_commands_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    [extras] = re.findall(r"pip install .*'\.\[(.+)\]'", text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    entry, default = (
        json.loads(re.findall(rf"^{name} (.+)$", text, re.MULTILINE)[0]) for name in ("ENTRYPOINT", "CMD")
    )
    assert entry[0] in PROJECT["scripts"]
    shown = re.findall(r"(?:qerl-pl|\\\n#) +([a-z]+)(?: -c|\n)", text)
    assert {*default, *shown} <= {*COMMANDS, *TRAINING}
    assert set(shown) == {"doctor", "fit"}
    last_user = re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1]
    assert last_user not in ("root", "0")
