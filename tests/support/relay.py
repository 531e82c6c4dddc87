"""A link between two network namespaces in user space: packets arrive after a delay, at a rate, or not at all.

    python -m tests.support.relay NAMESPACE NAMESPACE DEVICE DELAY_S BITS_PER_S

Makes a TUN device in each namespace and passes packets between them. Lines on stdin change the link: `cut` drops all
packets, `join` ends that, and the end of stdin ends the link. Needs root. Kernels without `tc ... netem` have no other
way to delay packets of all ports.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

_TUNSETIFF, _TUN_WITHOUT_HEADER, _NEW_NETWORK = 0x400454CA, 0x0001 | 0x1000, 0x40000000
LARGEST_PACKET = 65536


@dataclass(kw_only=True)
class Way:
    """One direction of the link."""

    source: int
    target: int
    delay_s: float
    bits_per_s: float
    free_s: float = 0.0
    """Time from which the sender's wire is free."""
    flying: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(arrival, packet)"""

    def send(self, packet: bytes, now_s: float) -> None:
        self.free_s = max(self.free_s, now_s) + len(packet) * 8 / self.bits_per_s
        self.flying.append((self.free_s + self.delay_s, packet))

    def deliver(self, now_s: float) -> None:
        while self.flying and self.flying[0][0] <= now_s:
            with contextlib.suppress(OSError):  # the device is down, or its queue is full: a wire drops such packets
                os.write(self.target, self.flying.popleft()[1])

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.flying[0][0] - now_s) if self.flying else 1.0


def open_tun(namespace: str, device: str) -> int:
    """Makes the device in a namespace. Returns its file descriptor."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    _enter(os.open(f"/var/run/netns/{namespace}", os.O_RDONLY))
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14s", device.encode(), _TUN_WITHOUT_HEADER, b""))
    finally:
        _enter(own)  # the relay is no process of a host, so that the end of a host does not end it
    return tun


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
    os.close(namespace)


def relay(ends: tuple[int, int], delay_s: float, bits_per_s: float) -> None:
    """Passes packets until stdin ends. delay_s: in each direction."""
    ways = [
        Way(source=ends[number], target=ends[1 - number], delay_s=delay_s, bits_per_s=bits_per_s) for number in (0, 1)
    ]
    is_cut = False
    while True:
        wait_s = min(way.wait_s(time.monotonic()) for way in ways)
        ready, _, _ = select.select([*ends, 0], [], [], wait_s)
        if 0 in ready:
            line = os.read(0, 100)
            if not line:
                return
            is_cut = b"cut" in line
            os.write(1, line)
        for way in ways:
            while way.source in ready:
                try:
                    packet = os.read(way.source, LARGEST_PACKET)
                except BlockingIOError:
                    break
                if not is_cut:
                    way.send(packet, time.monotonic())
            if is_cut:
                way.flying.clear()
            way.deliver(time.monotonic())


if __name__ == "__main__":
    first, second, device, delay, rate = sys.argv[1:]
    both = open_tun(first, device), open_tun(second, device)
    os.write(1, b"open\n")
    relay(both, float(delay), float(rate))
