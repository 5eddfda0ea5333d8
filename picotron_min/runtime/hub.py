"""The Hugging Face hub: can it be reached, and files of a model there."""

import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit


def hub_answers(endpoint: str, seconds: float = 4.0) -> bool:
    """Whether a connection is possible within `seconds`; with a proxy the answer is yes.

    The hub's own library retries for 25 seconds or longer.
    """
    if urllib.request.getproxies():
        return True
    try:
        url = urlsplit(endpoint)
        port = url.port or (80 if url.scheme == "http" else 443)
    except ValueError as error:
        raise ValueError(f"HF_ENDPOINT={endpoint} is no address: {error}") from None
    connect = f"import socket; socket.create_connection({(url.hostname, port)}, {seconds})"
    try:  # in a process, as looking up a name has no time limit; it needs time to start
        command = [sys.executable, "-c", connect]
        return not subprocess.run(command, capture_output=True, timeout=2 * seconds).returncode
    except subprocess.TimeoutExpired:
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
