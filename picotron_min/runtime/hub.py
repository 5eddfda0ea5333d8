"""Can the Hugging Face hub be reached? Its own libraries retry for 25 seconds or longer."""

import subprocess
import sys
import urllib.request
from urllib.parse import urlsplit


def hub_answers(endpoint: str, seconds: float = 4.0) -> bool:
    """Whether a connection is possible within `seconds`; with a proxy the answer is yes."""
    if urllib.request.getproxies():
        return True
    url = urlsplit(endpoint)
    port = url.port or (80 if url.scheme == "http" else 443)
    connect = f"import socket; socket.create_connection({(url.hostname, port)}, {seconds})"
    try:  # in a process, as looking up a name has no time limit; it needs time to start
        command = [sys.executable, "-c", connect]
        return not subprocess.run(command, capture_output=True, timeout=2 * seconds).returncode
    except subprocess.TimeoutExpired:
        return False
