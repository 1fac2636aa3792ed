# ruff: noqa: E501 - programs are easier to read on one line
"""Programs that attack the sandbox: (name, program, expected result).

The case has "21" on standard input and expects "42". A program that ends in `deny(...)` prints 42 only if its attack is
refused, so "passed" means that it was refused.
"""

DENY = """
def deny(*attempts):
    for attempt in attempts:
        try:
            found = attempt()
        except (OSError, ValueError, ImportError):
            continue
        if found:
            print("got in:", found); raise SystemExit(0)
    print(42)
import ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(number, *arguments) != -1
"""

HOSTILE = [
    ("fork bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "limit"),
    ("fork bomb that sleeps", "import os, time\nfor _ in range(9): os.fork()\ntime.sleep(60)", "process limit|runtime"),
    ("10 GB", "x = bytearray(10 << 30); print(42)", "memory limit"),
    ("10 GB in pieces", "x = []\nwhile True: x.append(bytearray(1 << 20))", "memory limit"),
    (
        "memory in children",
        "import os, time\nfor _ in range(4): os.fork()\nx = bytearray(b'x') * (90 << 20)\ntime.sleep(60)",
        "process limit|memory limit|runtime",
    ),
    ("endless output", "while True: print('42' * 1000)", "output limit"),
    ("endless output after the answer", "print(42, flush=True)\nwhile True: print('42')", "output limit"),
    ("deep recursion", "def f(): return f() + 1\nf()", "limit|runtime"),
    (
        "deep recursion in C",
        "class A:\n    def __getattr__(self, k): return getattr(self, k + 'x')\nA().b",
        "runtime|memory",
    ),
    ("endless loop", "while True: pass", "time limit"),
    ("sleep", "import time; time.sleep(1000)", "time limit"),
    (
        "ignores signals",
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        "time limit",
    ),
    (
        "threads",
        "import threading, time\nfor _ in range(99): threading.Thread(target=time.sleep, args=(60,)).start()",
        "limit|runtime",
    ),
    (
        "/etc/passwd",
        DENY + "deny(lambda: open('/etc/passwd').read(), lambda: os.listdir('/etc') != ['ld.so.cache'])",
        "passed",
    ),
    (
        "files of the machine",
        DENY + "deny(*[lambda p=p: os.listdir(p) for p in "
        "('/root', '/home', '/var', '/mnt', '/opt', '/run', '/sys', '/usr/local', '/usr/bin', REPOSITORY)])",
        "passed",
    ),
    (
        "its siblings' environment",
        DENY + "deny(lambda: open('/proc/1/environ').read(), lambda: 'SECRET' in os.environ)",
        "passed",
    ),
    (
        "the supervisor's memory",
        DENY + "deny(lambda: open('/proc/1/mem', 'r+b').fileno(), lambda: os.readlink('/proc/1/fd/0'))",
        "passed",
    ),
    (
        "other processes",
        DENY + "deny(lambda: [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())])",
        "passed",
    ),
    (
        "sockets",
        DENY
        + "deny(lambda: socket.socket(), lambda: socket.socket(socket.AF_UNIX), lambda: socket.socket(socket.AF_NETLINK,"
        " socket.SOCK_RAW), lambda: socket.create_connection(('1.1.1.1', 80)), lambda: socket.getaddrinfo('example.org', 80))",
        "passed",
    ),
    ("ptrace", DENY + "deny(lambda: libc.ptrace(16, 1, 0, 0) != -1, lambda: libc.ptrace(0, 0, 0, 0) != -1)", "passed"),
    (
        "new namespaces and mounts",
        DENY
        + "deny(lambda: libc.unshare(0x10000000) != -1, lambda: libc.mount(b'none', b'/work', b'tmpfs', 0, 0) != -1,"
        " lambda: libc.chroot(b'/work') != -1, lambda: libc.setns(3, 0) != -1, lambda: libc.memfd_create(b'x', 0) != -1)",
        "passed",
    ),
    (
        "system calls by number",
        DENY + "deny(*[lambda n=n: call(n, 0, 0, 0, 0) for n in (425, 435, 441 + 100, 0x40000000 + 101)])",
        "passed",
    ),
    (
        "kills everything",
        DENY + "for pid in (1, os.getppid()):\n    for s in (9, 15, 19, 2):\n        os.kill(pid, s)\nprint(42)",
        "passed",
    ),
    (
        "kills itself and all others",
        "import os\nprint(42, flush=True)\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)",
        "time limit|runtime",
    ),
    (
        "limits of the supervisor",
        DENY + "import resource\ndeny(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)))",
        "passed",
    ),
    (
        "its own limits",
        DENY + "import resource\ndeny(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)) is None)",
        "passed",
    ),
    (
        "a symlink out",
        DENY
        + "for i, p in enumerate(('/etc/passwd', '/proc/1/root/etc/passwd', '/proc/1/cwd', REPOSITORY)): os.symlink(p, str(i))\n"
        "deny(*[lambda i=i: open(str(i)).read() for i in range(4)], lambda: os.listdir('3'))",
        "passed",
    ),
    ("fills the disk", "f = open('x', 'wb')\nwhile True: f.write(b'x' * 65536)", "runtime"),
    (
        "fills the disk with many files",
        DENY + "import errno\ntry:\n    for i in range(10000): open(f'x{i}', 'wb').write(b'x' * 65536)\n"
        "except OSError as error: print(42 if error.errno == errno.ENOSPC else error)",
        "passed",
    ),
    (
        "writes elsewhere",
        DENY
        + "deny(*[lambda p=p: open(p + '/x', 'w').write('x') for p in ('/', '/dev', '/python', '/usr/lib', '/proc/sys/kernel')])",
        "passed",
    ),
    ("a prefix, then _exit(0)", "import os\nprint(4, end='', flush=True)\nos._exit(0)", "wrong answer"),
    ("nothing, then SystemExit(0)", "raise SystemExit(0)", "wrong answer"),
    ("the answer, then an error", "print(42)\nraise SystemExit(3)", "runtime"),
    ("closes stdout", "import os, sys\nprint(42)\nos.close(1)", "runtime|wrong"),
    ("replaces stdout", "import io, sys\nsys.stdout = io.StringIO()\nprint(42)", "wrong answer"),
    (
        "overwrites the checker",
        "import builtins, sys\nfor m in list(sys.modules.values()):\n    for n in ('judge', 'same_output', 'drain', 'watch'):\n"
        "        if hasattr(m, n): setattr(m, n, lambda *a: True)\nclass Same(str):\n    __eq__ = lambda *a: True\nprint(Same('7'))",
        "wrong answer",
    ),
    (
        "writes to every descriptor",
        "import os, struct\nreply = b'[0, \"ended\"]'\nfor fd in range(3, 1024):\n    try: os.write(fd, struct.pack('>I', len(reply)) + reply)\n"
        "    except OSError: pass\nos._exit(0)",
        "wrong answer",
    ),
    (
        "a daemon",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True:\n            print(1, flush=True); time.sleep(.01)\n"
        "    os._exit(0)\nprint(42)",
        "passed|wrong",
    ),
    (
        "a quiet daemon",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n    os._exit(0)\nprint(42)",
        "passed",
    ),
    (
        "a shell",
        DENY
        + "deny(lambda: os.system('echo x') == 0, lambda: subprocess.run(['/bin/sh', '-c', 'id']), lambda: os.execv('/bin/sh', ['sh']))",
        "passed",
    ),
    ("NUL and invalid UTF-8", "import sys\nsys.stdout.buffer.write(b'42\\x00\\xff\\xfe')", "wrong answer"),
    ("NUL in the program", "print(42)\x00", "runtime"),
    ("no Python", "this is no program", "runtime"),
    ("stops itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "time limit"),
    (
        "removes its directory's rights",
        "import os\nos.mkdir('a'); os.chmod('a', 0); os.chmod('.', 0)\nprint(42)",
        "passed",
    ),
    ("a deep tree", "import os\nfor _ in range(3000): os.mkdir('a'); os.chdir('a')\nprint(42)", "passed"),
    (
        "the machine's settings",
        DENY
        + "def writable(top):\n    for entry in os.scandir(top):\n        if entry.is_symlink() or entry.name.isdigit(): continue\n"
        "        if entry.is_dir(): yield from writable(entry.path)\n        elif attempt(entry.path): yield entry.path\n"
        "def attempt(path):\n    try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))\n    except OSError: return False\n    return True\n"
        "deny(lambda: list(writable('/proc')), lambda: attempt('/proc/1/oom_score_adj'))",
        "passed",
    ),
    (
        "what only root may read of the machine",
        DENY
        + "deny(*[lambda p=p: open('/proc/' + p, 'rb').read(1) for p in ('kpageflags', 'slabinfo', 'kcore', 'keys', 'cmdline', 'kmsg')])",
        "passed",
    ),
    (
        "threads with small stacks",
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True:\n    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n    except RuntimeError: time.sleep(.01)",
        "process limit",
    ),
    ("processes that share the CPU time", "import os\nfor _ in range(2): os.fork()\nwhile True: pass", "time limit"),
    (
        "threads that share the CPU time",
        "import threading\ndef spin():\n    while True: pass\nfor _ in range(4): threading.Thread(target=spin).start()",
        "time limit",
    ),
    ("a fork bomb in C", DENY + "while True: libc.fork()", "limit"),
    (
        "a fork bomb that ignores signals, in sessions of its own",
        "import os, signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass",
        "limit",
    ),
    ("empty files without end", "n = 0\nwhile True:\n    open(f'{n}', 'w').close(); n += 1", "disk limit"),
    (
        "links in shared memory without end",
        "import os\nn = 0\nwhile True:\n    os.symlink('x', f'/dev/shm/{n}'); n += 1",
        "disk limit|runtime",
    ),
    ("a sparse file", "open('x', 'wb').truncate(1 << 40)\nprint(42)", "runtime"),
    (
        "scheduling of the supervisor",
        DENY
        + "deny(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19) is None, lambda: os.sched_setaffinity(1, {0}) is None,"
        " lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)) is None, lambda: call(251, 1, 1, 0))",
        "passed",
    ),
    (
        "what the machine's user has few of",
        DENY + "deny(os.openpty, lambda: open('/dev/ptmx'), lambda: libc.inotify_init() != -1)",
        "passed",
    ),
    ("closes everything", "import os\nos.closerange(0, 1024)\nos._exit(0)", "wrong answer"),
    ("floods the report", "import os\nwhile True: os.write(3, b'x' * 65536)", "output limit|runtime"),
    (
        "an exit code that lies",
        "class X(int):\n    __and__ = lambda *a: 0\nraise SystemExit(X(7))",
        "runtime|wrong answer",
    ),
    ("a regular expression without end", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", "time limit"),
    ("a constant that folds to gigabytes", "x = 9 ** 9 ** 9 ** 9\nprint(42)", "limit|runtime"),
    ("brackets without end", "x = " + "[" * 100_000 + "]" * 100_000, "runtime|memory"),
    (
        "an interpreter anew",
        "import os\nos.execv('/python/bin/python3', ['/python/bin/python3', '-c', 'print(42)'])",
        "passed",
    ),
    ("a program with half a character", "print(42)\nx = '\ud800'", "runtime"),
]
