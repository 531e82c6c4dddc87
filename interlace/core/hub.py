"""Reachability of the Hugging Face hub."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

REACH_WITHIN_S = 5.0
"""Seconds within which the hub must answer a connection."""


def find_hub_fault() -> OSError | None:
    """Connects to the hub once. Returns the error if it cannot be reached; the hub's client would retry for minutes.

    Returns None in offline mode, in which the client reads its cache, and with a proxy, which has its own routes.
    """
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    has_proxy = not getproxies().keys().isdisjoint({hub.scheme, "all"}) and not proxy_bypass(hub.hostname or "")
    if constants.HF_HUB_OFFLINE or has_proxy:
        return None
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=REACH_WITHIN_S).close()
    except OSError as error:
        return error
    return None
