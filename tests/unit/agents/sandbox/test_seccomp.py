"""The seccomp filter, interpreted as the kernel does, permits the right system calls on each architecture."""

import pytest

from interlace.agents.sandbox.seccomp import assemble_filter

ALLOW, EPERM, ENOSYS, EAFNOSUPPORT, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x50061, 0x80000000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def interpret(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Runs the program on one system call."""
    data = {0: number, 4: architecture or ARCHITECTURE[machine]}
    data |= {16 + 8 * place: value for place, value in enumerate((*arguments, 0, 0, 0, 0))}
    program, place, value = assemble_filter(machine), 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        match code:
            case 0x20:
                value = data[operand]
            case 0x54:
                value &= operand
            case 0x06:
                return operand
            case _:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
                place += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "socket", "socketpair", "clone"), [("x86_64", 41, 53, 56), ("aarch64", 198, 199, 220)]
)
def test_only_sockets_that_a_namespace_confines_pass(machine: str, socket: int, socketpair: int, clone: int) -> None:
    assert interpret(machine, socket, 2, 1 | 0x80000, 6) == ALLOW and interpret(machine, socket, 10, 2, 17) == ALLOW
    assert interpret(machine, socket, 1, 1) == EAFNOSUPPORT and interpret(machine, socket, 40, 1) == EAFNOSUPPORT
    assert interpret(machine, socket, 2, 3, 1) == EPERM and interpret(machine, socket, 2, 1, 262) == EPERM
    assert interpret(machine, socketpair, 1, 1 | 0x800) == ALLOW and interpret(machine, socketpair, 1, 2) == EPERM
    assert interpret(machine, clone, 0x1200011) == ALLOW and interpret(machine, clone, 0x10000011) == EPERM
    assert interpret(machine, 435) == ENOSYS and interpret(machine, 425) == EPERM


def test_unknown_calls_and_other_architectures_are_refused() -> None:
    assert interpret("x86_64", 9999) == ENOSYS and interpret("x86_64", 0x40000000 + 1) == ENOSYS
    assert interpret("x86_64", 1, architecture=0x40000003) == KILL
    assert interpret("x86_64", 1) == ALLOW
    with pytest.raises(OSError, match="no seccomp filter for riscv64"):
        assemble_filter("riscv64")
