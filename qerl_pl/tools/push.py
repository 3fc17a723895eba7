"""Upload an exported folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

from qerl_pl.model.hub import NAME

NOT_ALLOWED = (401, 403)


def check_push_name(name: str) -> None:
    """Refuse a repository name that the hub does not allow, before anything is exported.

    Raises:
        ValueError: the name is not of the form OWNER/NAME.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"--push is {name!r}; expected OWNER/NAME of a model on the Hugging Face hub")


def push(folder: Path, name: str) -> str:
    """Upload a folder to a model repository on the hub; a new repository is created private.

    Args:
        folder: a finished export, with its model card.
        name: OWNER/NAME.

    Returns:
        The repository's address.

    Raises:
        OSError: the hub cannot be reached, or does not let this user write there; the folder is left as it is, and the
            message has the command that uploads it.
    """
    try:
        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export by qerl-pl")
    except (HTTPError, OfflineModeIsEnabled) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in NOT_ALLOWED:
            why = "the hub refuses it: log in by `hf auth login`, with a token that may write there"
        elif isinstance(error, HfHubHTTPError):
            why = f"the hub answers {' '.join(str(error).split())[:200]}"
        else:
            why = f"the hub cannot be reached ({' '.join(str(error).split())[:200]})"
        raise OSError(f"{folder} is complete and was not pushed: {why}; then: hf upload {name} {folder}") from error
    return str(address)
