"""Seccomp filter of the sandbox: a classic BPF program for seccomp(2) that denies system calls.

Namespaces isolate the sandbox. The filter reduces the attack surface of the kernel in addition. It denies:

- tracing, mounting, new namespaces, keys, BPF, io_uring, modules and clocks
- sockets, except Unix socket pairs, which event loops need
- memory outside the limits (memfd, System V)
- resources that are counted per user of the machine (inotify)
- control of the scheduling of other processes, such as the supervisor

System calls that are newer than the list in this module return ENOSYS.
"""

import errno
import platform
import struct

# name -> numbers on (x86_64, aarch64); of Linux's unistd_64.h and asm-generic/unistd.h
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "socket": (41, 198),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "lookup_dcookie": (212, 18),
}
CLONE, CLONE3, SOCKETPAIR, PRLIMIT = (56, 220), (435, 435), (53, 199), (302, 261)
FIRST_UNKNOWN = 451
NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
AF_UNIX = 1
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|J*|K, BPF_RET|K
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half of the argument
_ERRNO, _KILL, _ALLOW = 0x00050000, 0x80000000, 0x7FFF0000
_ENDS = {"allow": _ALLOW, "deny": _ERRNO | errno.EPERM, "missing": _ERRNO | errno.ENOSYS, "kill": _KILL}

Step = tuple[int, int, "str | int", "str | int"]  # code, k, jump if true, jump if false (an end, or steps to skip)


def filter_program(machine: str | None = None) -> bytes:
    """Return the filter for a machine type; raise KeyError for an unknown type.

    Args:
        machine: a type such as `x86_64`; None means the type of this machine.
    """
    column, arch = ARCHITECTURES[machine or platform.machine()]
    steps: list[Step] = [
        (_LOAD, _ARCH, 0, 0),
        (_EQUAL, arch, 0, "kill"),
        (_LOAD, _NUMBER, 0, 0),
        (_AT_LEAST, FIRST_UNKNOWN, "missing", 0),  # x32's numbers are above it too
        (
            _EQUAL,
            CLONE3[column],
            "missing",
            0,
        ),  # its flags are in memory, which filters cannot read; libc falls back to clone
    ]
    denied = (numbers[column] for numbers in DENIED.values())
    steps += [(_EQUAL, number, "deny", 0) for number in denied if number is not None]
    # a process may change only its own limits (0)
    for call, jump, value, yes, no in (
        (CLONE, _ANY_BIT, NAMESPACES, "deny", "allow"),
        (SOCKETPAIR, _EQUAL, AF_UNIX, "allow", "deny"),
        (PRLIMIT, _EQUAL, 0, "allow", "deny"),
    ):
        steps += [(_EQUAL, call[column], 0, 2), (_LOAD, _FIRST_ARGUMENT, 0, 0), (jump, value, yes, no)]
    return _assemble(steps)


def _assemble(steps: list[Step]) -> bytes:
    ends = {name: len(steps) + position for position, name in enumerate(_ENDS)}

    def skip(at: int, target: str | int) -> int:
        return target if isinstance(target, int) else ends[target] - at - 1

    code = [struct.pack("HBBI", c, skip(at, yes), skip(at, no), k) for at, (c, k, yes, no) in enumerate(steps)]
    # falling off the last step is "allow", which therefore comes first
    return b"".join(code) + b"".join(struct.pack("HBBI", _RETURN, 0, 0, value) for value in _ENDS.values())
