"""The Hugging Face hub: files of a model there."""

from pathlib import Path

from picotron_min.runtime.wording import explained


def fetch(name: str, *files: str) -> Path:
    """The folder with these files of a model; ValueError if it is neither on the hub nor cached.

    The hub is asked once, for HF_HUB_ETAG_TIMEOUT seconds (10): without a network what an earlier
    run has fetched is used. Readers get the folder, since with a name they would ask for each file
    on their own, and wait for half a minute each time.
    """
    from huggingface_hub import snapshot_download

    problem = f"{name} is not a folder here, and cannot be fetched from the hub"
    with explained(problem, "check the spelling, network and access"):
        return Path(snapshot_download(name, allow_patterns=list(files)))
