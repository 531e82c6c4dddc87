"""Addresses on which a process listens, from Linux's tables of sockets."""

import socket
from pathlib import Path

LISTENS = "0A"


def listening_addresses(pid: int) -> set[str]:
    """Returns IP addresses; `0.0.0.0` and `::` stand for all addresses of the machine."""
    links = [path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _address(text: str) -> str:
    raw = bytes.fromhex(text)
    words = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
