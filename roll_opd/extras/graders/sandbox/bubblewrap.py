"""Limits of a sandbox, and the bubblewrap command that starts its supervisor in new namespaces.

The root directory of the sandbox contains the files of the interpreter and the libraries of the system. Of
site-packages, it contains only the allowed packages. All these files are read-only. The work directory is in memory. No
other files of the machine are visible (https://github.com/containers/bubblewrap).
"""

import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from roll_opd.rewards.interface import RewardError

MEBI = 1 << 20


class SandboxError(RewardError):
    """A sandbox could not be started, or it has broken down.

    The message states a remedy.
    """


@dataclass(frozen=True)
class CaseLimits:
    """Limits of one test case.

    They are enforced inside the sandbox. `wall_seconds` is enforced from outside as well.
    """

    cpu_seconds: int = 5  # limit for all processes together
    wall_seconds: float = 10.0  # waiting for a CPU does not count
    memory_mb: int = 512  # address space per process, and resident memory of all processes together
    processes: int = 16  # concurrent processes and threads
    open_files: int = 64
    disk_mb: int = 32  # size of the work directory (in memory), and of shared memory
    files: int = 4096  # maximum files and directories in the work directory, and in shared memory
    output_mb: int = 4  # standard output

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            kinds = (int, float) if item.name == "wall_seconds" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1_000_000:
                what = "a number" if len(kinds) == 2 else "an integer"
                raise RewardError(f"code_sandbox: {item.name} is {value!r}; it must be {what} above 0 and below 10^6")


INSIDE = Path(__file__).with_name("inside")
HOW_TO_GET_IT = (
    "install it (`apt-get install bubblewrap`, 0.6 or newer), or write `unsafe: true` to run programs without"
    " isolation, with your rights"
)
HOW_TO_ALLOW_IT = (
    "user namespaces may be forbidden here: allow them (`sysctl kernel.unprivileged_userns_clone=1`; on Ubuntu `sysctl"
    " kernel.apparmor_restrict_unprivileged_userns=0`; in a container a seccomp profile that lets unshare and"
    " mount through, such as `--security-opt seccomp=unconfined`, and an unmasked /proc), install a newer"
    " bubblewrap, or write `unsafe: true` to run programs without isolation, with your rights"
)
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PATH": "/python/bin",
    "HOME": "/work",
    "TMPDIR": "/work",
    "PYTHONHASHSEED": "0",  # deterministic set order
    "OMP_NUM_THREADS": "1",
}
# no user or site packages, no bytecode, UTF-8
FLAGS = ("-s", "-S", "-B", "-X", "utf8")
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.supervisor import main; main(*sys.argv[1:])"
PACKAGES = "/python/packages"
PRIVATE = ("cmdline", "config.gz", "key-users", "keys", "locks", "sched_debug", "timer_list")  # masked files of /proc


def isolated_command(limits: CaseLimits, packages: Sequence[Path], seccomp_fd: int) -> list[str]:
    """Return the command that starts a supervisor in a sandbox.

    Raises `SandboxError` if bubblewrap is not installed.

    Args:
        packages: files and directories that programs may import in addition to the standard library.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(f"code_sandbox: bubblewrap (bwrap) is not installed; {HOW_TO_GET_IT}")
    size = ("--size", str(limits.disk_mb * MEBI))
    variables = [part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)]
    return [
        bwrap,
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        *("--clearenv", *variables, "--setenv", "LD_LIBRARY_PATH", "/python/lib"),
        *_root(),
        *(part for path in packages for part in ("--ro-bind", str(path), f"{PACKAGES}/{path.name}")),
        *("--proc", "/proc", *_masked_proc(), "--remount-ro", "/proc"),
        *("--dev", "/dev", *size, "--tmpfs", "/dev/shm"),
        *(
            "--tmpfs",
            "/dev/pts",
            "--remount-ro",
            "/dev/pts",
            "--remount-ro",
            "/dev",
        ),  # terminals of the machine are a scarce resource
        *(*size, "--tmpfs", "/work", "--symlink", "work", "/tmp", "--remount-ro", "/"),
        *("--seccomp", str(seccomp_fd), "--chdir", "/work"),
        *("/python/bin/python3", *FLAGS, "-c", START, "/python", "/work", *([PACKAGES] if packages else [])),
    ]


def bare_command(directory: str, packages: Sequence[Path]) -> list[str]:
    """Return the command that starts a supervisor without isolation.

    Args:
        directory: the work directory.
    """
    folders = dict.fromkeys(str(path.parent) for path in packages)
    return [sys.executable, *FLAGS, "-c", START, str(INSIDE.parent), directory, *folders]


def _masked_proc() -> Iterator[str]:
    """Yield bubblewrap options that hide the files of /proc about the whole machine.

    If the worker runs as root, /proc treats the user of the sandbox as root too, although this user has no
    capabilities. Therefore the files that only root may read are masked.
    """
    for entry in sorted(os.scandir("/proc"), key=lambda entry: entry.name):
        if entry.name.isdigit() or entry.is_symlink() or entry.name == "sys":
            continue
        is_for_root = not entry.stat().st_mode & stat.S_IROTH
        if entry.is_dir():
            yield from ("--tmpfs", f"/proc/{entry.name}", "--remount-ro", f"/proc/{entry.name}")
        elif is_for_root or entry.name in PRIVATE:
            yield from ("--ro-bind", "/dev/null", f"/proc/{entry.name}")


def _root() -> Iterator[str]:
    """Yield bubblewrap options that bind the files of the interpreter below /python."""
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    yield from ("--ro-bind", "/usr/lib", "/usr/lib")
    for name in ("lib", "lib64", "lib32", "usr/lib64"):
        path = Path("/") / name
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    yield from ("--ro-bind", str(executable), "/python/bin/python3")
    inside = f"/python/lib/{library.name}"
    if library.parent.parent == Path("/usr"):  # system interpreter: its shared libraries are bound already
        yield from ("--ro-bind", str(library), inside)
    else:
        yield from ("--ro-bind", str(library.parent), "/python/lib")
    for packages in ("site-packages", "dist-packages"):
        if (library / packages).is_dir():
            yield from ("--tmpfs", f"{inside}/{packages}", "--remount-ro", f"{inside}/{packages}")
    yield from ("--ro-bind", str(INSIDE), "/python/inside")


def files_of_packages(names: Sequence[str]) -> tuple[Path, ...]:
    """Return the files and directories in site-packages of packages and of their requirements.

    Raises `RewardError` if a package is not installed.

    Args:
        names: pip names of the packages.
    """
    found: dict[str, Path] = {}
    seen: set[str] = set()
    waiting = [(name, True) for name in names]
    while waiting:
        name, is_requested = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if is_requested:
                raise RewardError(
                    f"code_sandbox: packages: {name} is not installed here; install the package, or remove it from"
                    " packages"
                ) from None
            continue
        for file in package.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__", "/") and not top.endswith((".dist-info", ".pth")):
                found[top] = Path(str(package.locate_file(top)))
        for requirement in map(Requirement, package.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append((requirement.name, False))
    return tuple(found[top] for top in sorted(found))
