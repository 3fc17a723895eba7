"""Download models from the Hugging Face hub by name: config.json first, and weights only when a run needs them."""

import functools
import re
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TypeVar

from huggingface_hub import constants, get_session, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import logging

from qerl_pl.common.files import searched
from qerl_pl.common.phases import phase
from qerl_pl.model.files import CONFIG, MODELOPT_CONFIG

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*"]
LOCAL = "models"
"""Local folder of the models in the documentation, so ``models/NAME`` never names a model on the hub."""
ANSWER_S = 5.0
"""Seconds for the hub to answer a first request; huggingface_hub itself would retry for half a minute."""

T = TypeVar("T")


def is_hub_name(base: str) -> bool:
    """Return whether ``base``, of the form OWNER/MODEL, names a model on the hub. It is a local path instead if OWNER
    is ``models``, or a file or folder in the working directory, or if MODEL ends in ``.gguf``."""
    owner = base.partition("/")[0]
    return bool(NAME.fullmatch(base)) and not (owner == LOCAL or base.endswith(".gguf") or Path(owner).exists())


def hub_config(name: str) -> Path:
    """Download config.json of a model on the hub, and ModelOpt's quantisation configuration if the model has one;
    returns the model's folder in the local cache. Raises ValueError, with a message of one line, if the download
    failed."""
    file = _fetched(name, lambda: hf_hub_download(name, CONFIG, local_files_only=not hub_answers()))
    with suppress(ValueError):
        _fetched(name, lambda: hf_hub_download(name, MODELOPT_CONFIG, local_files_only=not hub_answers()))
    return Path(file).parent


def hub_folder(name: str) -> Path:
    """Download a whole model with a progress bar, except files that are in huggingface_hub's local cache already, and
    return its folder in that cache. Raises ValueError, with a message of one line, if the download failed."""
    local = not hub_answers()
    bars = sys.stderr.isatty()  # huggingface_hub shows bars of its own there
    with nullcontext() if bars or local else phase(f"downloading {name}, where the cache here does not have it"):
        return Path(_fetched(name, lambda: snapshot_download(name, allow_patterns=FILES, local_files_only=local)))


def hub_answers() -> bool:
    """Return whether the hub answers within ``ANSWER_S`` seconds (asked once per process); if not, only models in the
    local cache can be used. With ``HF_HUB_OFFLINE=1``, the hub is not asked and the result is False."""
    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


@functools.cache
def _answers(endpoint: str) -> bool:
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # whatever error the HTTP library raises, there is no answer
            get_session().head(endpoint, timeout=ANSWER_S)
            answered.set()

    with phase(f"asking {endpoint}, for at most {ANSWER_S:.0f} s", at_once=True):
        asking = threading.Thread(target=ask, daemon=True)  # looking up the host's name may take longer
        asking.start()
        asking.join(ANSWER_S)
    if not answered.is_set():
        print(f"{endpoint} does not answer; only models in the cache here can be used", file=sys.stderr)
    return answered.is_set()


_FAULTS = {  # a class comes before the class that it is derived from
    GatedRepoError: "model.base: {0} asks for its licence to be accepted: do so at https://huggingface.co/{0}, then "
    "`hf auth login`",
    RepositoryNotFoundError: "model.base: there is no folder {1}, and the hub has no model of this name (for a private "
    "one: `hf auth login`)",
    LocalEntryNotFoundError: "model.base: there is no folder {1}, and the hub cannot be reached for a model of this "
    "name, which its cache here does not have; download it where there is a network (hf download NAME --local-dir "
    "FOLDER)",
    EntryNotFoundError: f"model.base: {{0}} has no {CONFIG}, so it is not a model in Hugging Face layout",
}


def _fetched(name: str, fetch: Callable[[], T]) -> T:
    """Return the result of ``fetch``, which downloads files of the model ``name``, without the hub client's warnings
    about retries. If a known error occurs, such as an unknown model, a ValueError is raised that says what to do."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return fetch()
    except tuple(_FAULTS) as error:
        fault = next(text for kind, text in _FAULTS.items() if isinstance(error, kind))
        raise ValueError(fault.format(name, searched(name))) from error
    finally:
        logging.set_verbosity(before)
