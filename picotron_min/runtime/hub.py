"""The Hugging Face hub: files of a model there."""

from pathlib import Path

from picotron_min.runtime.wording import explained


def fetch(name: str, *files: str, remedy: str = "check the spelling, network and access") -> Path:
    """A file or folder on this machine, else the folder with these files of a model on the hub.

    ValueError if it is neither on the hub nor cached. The hub is asked once, and waited for as long
    as HF_HUB_ETAG_TIMEOUT says (10 s): without a network, what an earlier run has fetched is used.
    Readers that get a name would ask for each file on their own, and wait half a minute each time.
    """
    if (path := Path(name)).exists():
        return path
    from huggingface_hub import constants, model_info, snapshot_download, try_to_load_from_cache

    problem = f"{name} is not a folder here, and cannot be fetched from the hub"
    with explained(problem, remedy):
        try:
            model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)  # downloads have no such limit
        except Exception:
            if cached := try_to_load_from_cache(name, "config.json"):
                return Path(cached).parent
            raise
        return Path(snapshot_download(name, allow_patterns=list(files)))
