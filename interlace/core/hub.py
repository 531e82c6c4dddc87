"""Reachability of the Hugging Face hub."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

REACH_WITHIN_S = 5.0
"""Seconds within which the hub must answer a connection."""


def find_hub_fault() -> OSError | None:
    """Connects to the hub once. Returns the error if it cannot be reached; the hub's client would retry for minutes.

    Returns None in offline mode, in which the client reads its cache, and with a proxy, which has its own routes.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return None
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=REACH_WITHIN_S).close()
    except OSError as error:
        return error
    return None
