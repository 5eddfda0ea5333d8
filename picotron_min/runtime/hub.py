"""The Hugging Face hub: can it be reached, and files of a model there."""

import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit


def hub_answers(endpoint: str, seconds: float = 3.0) -> bool:
    """Whether it accepts a connection, each of its addresses within `seconds`; True with a proxy.

    Without this check the hub's own library retries each file for 25 seconds: HF_HUB_ETAG_TIMEOUT
    and HF_HUB_DOWNLOAD_TIMEOUT limit one try. Looking up a name has the system's own time limit.
    """
    if urllib.request.getproxies():
        return True
    try:
        url = urlsplit(endpoint)
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname, port), seconds).close()
        return True
    except ValueError as error:
        raise ValueError(f"HF_ENDPOINT={endpoint} is no address: {error}") from None
    except OSError:
        return False


def fetch(name: str, *files: str) -> Path:
    """The folder with these files of a model on the hub; ValueError if they cannot be had."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # a dozen kinds, from no network to a gated model
        why = str(error).strip().partition("\n")[0]
        problem = f"{name} is not a folder here, and cannot be fetched from the hub ({why})"
        raise ValueError(f"{problem}: check the spelling, network and access") from None
