"""The seccomp filter, executed by an interpreter of classic BPF: its result for each call, also on other machines."""

import errno
import struct

import pytest

from roll_opd.extras.graders.sandbox.seccomp import ARCHITECTURES, DENIED, filter_program

ALLOW, DENY, MISSING, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
# (x86_64, aarch64) of calls that an interpreter lives from
USUAL = {
    "read": (0, 63),
    "mmap": (9, 222),
    "execve": (59, 221),
    "openat": (257, 56),
    "exit_group": (231, 94),
    "futex": (202, 98),
}


def answer(program: bytes, call: int, argument: int = 0, arch: int = 0) -> int:
    data = struct.pack("IIQQ5Q", call, arch, 0, argument, 0, 0, 0, 0, 0)
    steps = list(struct.iter_unpack("HBBI", program))
    at = value = 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        if code == 0x20:
            value = struct.unpack_from("I", data, k)[0]
        elif code == 0x06:
            return k
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += yes if holds else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_the_filter_says(machine: str) -> None:
    column, arch = ARCHITECTURES[machine]
    program = filter_program(machine)

    def says(call: int, argument: int = 0) -> int:
        return answer(program, call, argument, arch)

    assert {says(numbers[column]) for numbers in DENIED.values() if numbers[column] is not None} == {DENY}
    assert {says(numbers[column]) for numbers in USUAL.values()} == {ALLOW}
    clone, clone3, socketpair, prlimit = ((56, 220), (435, 435), (53, 199), (302, 261))
    assert says(clone[column], 17) == ALLOW  # SIGCHLD: a fork
    assert {says(clone[column], flag | 17) for flag in (1 << 17, *(1 << bit for bit in range(25, 31)))} == {DENY}
    assert says(clone3[column]) == MISSING
    assert [says(socketpair[column], family) for family in (1, 2, 16)] == [ALLOW, DENY, DENY]
    assert [says(prlimit[column], pid) for pid in (0, 1)] == [ALLOW, DENY]
    assert {says(call) for call in (451, 1000, 0x40000000 + 101)} == {MISSING}
    assert answer(program, 0, arch=0x40000003) == KILL  # 32-bit calls have other numbers


def test_numbers_are_those_of_this_machines_kernel_headers() -> None:
    import re
    from pathlib import Path

    files = (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h"))
    if not all(file.is_file() for file in files):
        pytest.skip("needs the kernel's headers (apt-get install linux-libc-dev)")
    for column, file in enumerate(files):
        known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read_text()))
        wrong = {
            name: numbers[column] for name, numbers in DENIED.items() if str(numbers[column]) != known.get(name, "None")
        }
        assert not wrong
