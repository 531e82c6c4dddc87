"""The seccomp filter of a run of code: a BPF program over the number and the arguments of each system call.

The program is assembled here instead of by libseccomp: the list is short, the fork server imports the standard library
only, and libseccomp's Python binding needs a shared library that not every machine has.
"""

import ctypes
import os
import struct
from collections.abc import Iterable

from interlace.agents.sandbox import kernel

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of a machine in the tables below, and its AUDIT_ARCH value."""
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Keys of the kernel: they outlive a run.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Namespaces and mounts: a new user namespace grants capabilities.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Interfaces that exploits of the kernel use most.
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    # Memory that RLIMIT_AS does not count.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mbind": (237, 235),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    # Administration of the machine.
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
}
"""Numbers on x86_64 and aarch64 of the system calls that always fail with EPERM."""
_CLONE, _CLONE3, _IOCTL, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (16, 29), (41, 198), (53, 199)
_NEWEST = 456
"""Highest reviewed number. Newer calls fail with ENOSYS, and so do the calls of the x32 interface."""
_NAMESPACE_FLAGS = 0x7E020000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_STREAM, _DATAGRAM, _SEQUENCED = 1, 2, 5
_SOCKET_PROTOCOLS = (0, 6, 17)
"""Default protocol, TCP and UDP."""
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

_Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, operand)."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter() -> None:
    """Applies the filter to this process and its children for good. Raises OSError if the kernel has no seccomp.

    The process must have set no_new_privs.
    """
    program = assemble_filter(os.uname().machine)
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    filter_ = _Program(length=len(program), instructions=packed)
    result = kernel.libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter_), 0, 0)
    kernel.check(result, "prctl(PR_SET_SECCOMP)")


def assemble_filter(machine: str) -> list[_Instruction]:
    """Returns the filter for a machine, as `uname -m` names it. Raises OSError for an unknown one."""
    if machine not in _ARCHITECTURES:
        raise OSError(_ENOSYS, f"no seccomp filter for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_IF_AT_LEAST, 0, 1, _NEWEST + 1),
        (_RETURN, 0, 0, _FAIL | _ENOSYS),
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | _EPERM)]
    program += [(_IF_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _FAIL | _ENOSYS)]  # libc falls back to clone
    for call, rule in ((_CLONE, _clone_rule()), (_IOCTL, _ioctl_rule()), (_SOCKET, _socket_rule())):
        program += [(_IF_EQUAL, 0, len(rule), call[column]), *rule]
    rule = [*_require(0, (_AF_UNIX,), _EAFNOSUPPORT), *_require(1, (_STREAM, _SEQUENCED), _EPERM, mask=0xF)]
    program += [(_IF_EQUAL, 0, len(rule), _SOCKETPAIR[column]), *rule]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _clone_rule() -> list[_Instruction]:
    return [
        (_LOAD, 0, 0, _ARGUMENTS_OFFSET),
        (_IF_ANY_BIT, 0, 1, _NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _FAIL | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _ioctl_rule() -> list[_Instruction]:
    """Refuses the two requests that type into a terminal."""
    return [
        (_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8),
        (_IF_EQUAL, 1, 0, _TIOCSTI),
        (_IF_EQUAL, 0, 1, _TIOCLINUX),
        (_RETURN, 0, 0, _FAIL | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _socket_rule() -> list[_Instruction]:
    """Allows TCP and UDP sockets, which reach nothing in an empty network namespace.

    Unix sockets are allowed by socketpair() only, of types that cannot be connected to another address.
    """
    return [
        *_require(0, (_AF_INET, _AF_INET6), _EAFNOSUPPORT),
        *_require(1, (_STREAM, _DATAGRAM), _EPERM, mask=0xF),
        *_require(2, _SOCKET_PROTOCOLS, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _require(argument: int, values: Iterable[int], error: int, mask: int | None = None) -> list[_Instruction]:
    """Fails with `error` unless an argument, after the mask, is one of the values."""
    values = list(values)
    compare = [(_IF_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    masked = [] if mask is None else [(_AND, 0, 0, mask)]
    return [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * argument), *masked, *compare, (_RETURN, 0, 0, _FAIL | error)]
