"""Forks of a preloaded server behave like new interpreters, and none of them outlives its driver."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from roll_opd.base import hardware
from roll_opd.base.torch_imports import lazy_compile
from roll_opd.cluster.forkserver import forkserver_start, forkserver_worker
from roll_opd.cluster.forkserver.forkserver_main import EAGER_ENGINES, ENGINES, GPU_ENGINES, MEGATRON
from roll_opd.cluster.forkserver.forkserver_start import ADDRESS, fork_server

ROLE = SimpleNamespace(env={})
ROLES: Any = {"megatron_roles": lambda: {"student": ROLE}, "inference_roles": dict}
PLAN: Any = SimpleNamespace(rollout=None, env={}, **ROLES)
PROGRAM = """
import json, multiprocessing, os, sys, torch

def child(place):
    with open(place, "w") as file:
        facts = {"BAR": os.environ.get("BAR"), "threads": torch.get_num_threads(), "ray": "ray" in sys.modules}
        json.dump(facts, file)
    sys.exit(3)

if __name__ == "__main__":
    os.environ |= {"BAR": "bar", "OMP_NUM_THREADS": "3"}
    process = multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],))
    process.start()
    process.join()
    facts = {
        "argv": sys.argv, "path": sys.path[0], "threads": torch.get_num_threads(), "FOO": os.environ.get("FOO"),
        "code": process.exitcode, "group": os.getpgid(0) == os.getpid(), "parent": os.getppid(), "main": __name__,
        "ADDRESS": os.environ.get("KEPT"), "vllm": "vllm" in sys.modules, "megatron": "megatron.core" in sys.modules,
        "compiler": "torch._inductor.compile_fx" in sys.modules,
    }
    print(json.dumps(facts), flush=True)
    print("to errors", file=sys.stderr)
    sys.exit(5)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[psutil.Process]:
    """The process of a server; its first child serves forks of Megatron."""
    before = set(psutil.Process().children())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("GONE", "1")
        with fork_server() as opened:
            patch.delenv("GONE")
            opened.serve(PLAN)
            [process] = set(psutil.Process().children()) - before
            yield process


def setup(program: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start a worker as Ray does: with its arguments, and a role's environment as JSON."""
    context = json.dumps({"env_vars": variables, "py_executable": sys.executable})
    command = [sys.executable, forkserver_worker.__file__, str(program), *arguments, "--language=PYTHON"]
    return subprocess.run(
        [*command, f"--serialized-runtime-env-context={context}"], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("kind", [MEGATRON, ENGINES])
def test_a_fork_runs_a_program_as_the_interpreter_would(
    kind: str, server: psutil.Process, program: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "child.json")
    ended = setup(program, place, "b c", FOO="foo", OMP_NUM_THREADS="2", ROLL_OPD_FORKSERVER_KIND=kind)
    assert (ended.returncode, ended.stderr) == (5, "to errors\n")
    facts = json.loads(ended.stdout)
    assert facts["argv"] == [str(program), place, "b c"] and facts["path"] == str(program.parent)
    assert (facts["FOO"], facts["threads"], facts["main"], facts["code"]) == ("foo", 2, "__main__", 3)
    assert facts["group"] and facts["megatron"] == (kind == MEGATRON) and not facts["vllm"] and not facts["compiler"]
    child = json.loads(Path(place).read_text())
    assert child == {"BAR": "bar", "threads": 3, "ray": False}  # Ray reads the environment as it is imported


def test_a_worker_without_preloading_starts_as_in_ray(server: psutil.Process, tmp_path: Path) -> None:
    said = "import sys; print(sys.argv[1:])"
    (tmp_path / "setup_worker.py").write_text(said)
    ended = setup(tmp_path / "default_worker.py", "a", FOO="foo")
    assert ended.returncode == 0 and "default_worker.py', 'a', '--language" in ended.stdout


def test_workers_start_without_an_ended_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "setup_worker.py").write_text("import os; print('cold', os.environ.get('FOO'))")
    monkeypatch.setenv(ADDRESS, "roll_opd-of-nobody")
    assert setup(tmp_path / "default_worker.py", FOO="foo", ROLL_OPD_FORKSERVER_KIND=MEGATRON).stdout == "cold None\n"


def test_variables_unset_since_are_unset_in_a_fork(server: psutil.Process, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os; print(os.environ.get('GONE'), os.environ.get('VLLM_NO_USAGE_STATS'))")
    assert setup(program, ROLL_OPD_FORKSERVER_KIND=MEGATRON).stdout == "None 1\n"


def test_the_launcher_imports_no_torch_before_it_starts_the_server() -> None:
    code = "import sys, roll_opd.commands.run; print({'torch', 'transformers'} & sys.modules.keys() or 'neither')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "neither\n", done.stderr


SERVER = """
import contextlib, io, json, os, sys
seen = set()
class Recording(type(os.environ)):
    def __getitem__(self, name):
        seen.add(name)
        return super().__getitem__(name)
os.environ.__class__ = Recording
from roll_opd.cluster.forkserver import forkserver_main
forkserver_main.suppress = lambda *errors: contextlib.nullcontext()
forkserver_main._serve = lambda listener, alive: None
settings = io.StringIO(json.dumps({"engines": forkserver_main.EAGER_ENGINES}))
forkserver_main.preload_and_serve(settings, {"megatron": 0, "engines": 0}, 0)
print(json.dumps(sorted(map(str, seen))), flush=True)
if "vllm" not in sys.modules:  # the fork, for Megatron
    sys.exit()
assert 'vllm.v1.worker.cpu_worker' in sys.modules
compiler = [name for name in sys.modules if name.startswith('torch._inductor.lowering')]
assert not compiler, compiler
import torch._inductor.lowering

from vllm.triton_utils import dispatcher
assert dispatcher.sys is sys and dispatcher._registry
replaced = {id(kernel) for kernel, _ in dispatcher._registry.values()}
spaces = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
values = [value for space in spaces for value in list(space.values())]
values += [vars(value).get("kernel") for value in values if hasattr(value, "__dict__")]
assert not any(id(value) in replaced for value in values)
from vllm.platforms import current_platform
current_platform.register_triton_kernel_overrides()
assert {id(kernel) for kernel, _ in dispatcher._registry.values()} == replaced
_, status = os.wait()  # for the fork, which would end with this process
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def preloaded() -> subprocess.CompletedProcess[str]:
    """Both server processes after their imports: each prints the variables that it has read."""
    none = {name: value for name, value in os.environ.items() if not name.startswith(forkserver_start.READ_AT_USE)}
    return subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, env=none, timeout=240)


@pytest.mark.nightly
def test_preloaded_modules_do_not_import_the_compiler_and_have_cpu_kernels(
    preloaded: subprocess.CompletedProcess[str],
) -> None:
    assert preloaded.returncode == 0, preloaded.stderr


def test_a_fork_that_runs_megatron_on_a_cpu_can_compile(server: psutil.Process, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from roll_opd.megatron.cpu_port import install_cpu_port\n"
        "install_cpu_port()\n"
        "print(torch.compile(lambda values: 2 * values, backend='eager')(torch.ones(2)).tolist())\n"
    )
    ended = setup(program, ROLL_OPD_FORKSERVER_KIND=MEGATRON)
    assert (ended.stdout, ended.returncode) == ("[2.0, 2.0]\n", 0), ended.stderr


@pytest.mark.parametrize("off", ["0", "1"])
def test_functions_decorated_during_preloading_are_compiled_when_called(
    off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, graphs = torch.compile, []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with lazy_compile():

        @torch.compile(backend=compiler, fullgraph=True)
        def doubled(values: torch.Tensor) -> torch.Tensor:
            """Twice."""
            return 2 * values

        negated = torch.compile(lambda values: -values, backend=compiler)
    assert torch.compile is at_once and doubled.__doc__ == "Twice."
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", off)
    for _ in range(2):
        assert doubled(torch.ones(2)).tolist() == [2, 2] and negated(torch.ones(1)).tolist() == [-1]
    assert len(graphs) == (0 if off == "1" else 2)


def plan_of(run: dict[str, str], train: dict[str, str], infer: dict[str, str]) -> Any:
    roles = {"student_train": SimpleNamespace(env=train), "teacher": SimpleNamespace(env={})}
    engines = {"student_infer": SimpleNamespace(env=infer, engine_args={})}
    return SimpleNamespace(env=run, megatron_roles=lambda: roles, inference_roles=lambda: engines)


@pytest.mark.parametrize(
    ("run", "train", "infer", "megatron", "engines", "cold"),
    [
        ({"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG": "WARN"}, {}, {}, {}, {}),
        ({"MKL_CBWR": "AVX2"}, {}, {}, {"MKL_CBWR": "AVX2"}, {"MKL_CBWR": "AVX2"}, {}),
        ({"VLLM_X": "1", "A": "1"}, {}, {}, {"A": "1"}, {"A": "1", "VLLM_X": "1"}, {}),
        ({}, {}, {"VLLM_X": "1"}, {}, {"VLLM_X": "1"}, {}),
        ({}, {"OMP_PROC_BIND": "1"}, {}, {}, {}, {"student_train": ["OMP_PROC_BIND"]}),
        ({"A": "1"}, {}, {"A": "2"}, {}, {}, {"student_train": ["A"], "teacher": ["A"], "student_infer": ["A"]}),
    ],
)
def test_a_server_sets_import_time_variables_and_a_differing_role_starts_cold(
    run: dict[str, str],
    train: dict[str, str],
    infer: dict[str, str],
    megatron: dict[str, str],
    engines: dict[str, str],
    cold: dict[str, list[str]],
) -> None:
    plan = plan_of(run, train, infer)
    served = forkserver_start.of_servers(plan)
    assert served == {MEGATRON: megatron, ENGINES: engines}
    assert forkserver_start.cold_roles(plan, served) == cold


@pytest.mark.nightly  # on every push: which variables a server has, above; two servers import for 8 s each
def test_variables_of_a_run_are_in_the_server_as_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter reads the hash seed and PYTHONPATH at its start; a role with another seed is not a fork."""
    (tmp_path / "found.py").write_text("")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(tmp_path), "NCCL_DEBUG": "INFO", "TMPDIR": str(tmp_path)}
    program = tmp_path / "program.py"
    program.write_text(
        "import found, os, tempfile; print(hash('a'), os.environ['NCCL_DEBUG'], tempfile.gettempdir(), os.getppid())"
    )
    said: list[str] = []
    with fork_server() as opened:
        opened.serve(plan_of(run, {"PYTHONHASHSEED": "8"}, {}), said.append)
        assert len(said) == 3 and all("PYTHONHASHSEED" in line for line in said)
        opened.end()
        opened.begin({})
        opened.serve(plan_of(run, {}, {}), said.append)
        assert len(said) == 3
        assert forkserver_start.variables(MEGATRON, run) == {"ROLL_OPD_FORKSERVER_KIND": MEGATRON}
        assert forkserver_start.variables(MEGATRON, run | {"PYTHONHASHSEED": "8"}) == {}
        ended = setup(program, ROLL_OPD_FORKSERVER_KIND=MEGATRON, **run)
    alone = {**os.environ, **run}
    cold = subprocess.run([sys.executable, program], capture_output=True, text=True, env=alone, check=True)
    assert ended.stdout.split()[:3] == cold.stdout.split()[:3], ended.stderr


@pytest.mark.nightly  # as above: imports of the installed packages, which only another release of them changes
def test_variables_read_at_use_are_not_read_by_imports_of_the_server(
    preloaded: subprocess.CompletedProcess[str],
) -> None:
    seen = {name for line in preloaded.stdout.splitlines() for name in json.loads(line)}
    assert len(preloaded.stdout.splitlines()) == 2 and "VLLM_LOGGING_LEVEL" in seen, preloaded.stderr
    assert not [name for name in seen if name.startswith(forkserver_start.READ_AT_USE)]


SWITCHED_OFF = {forkserver_start.PRELOAD: "0"}


@pytest.mark.parametrize("variables", [{"RAY_ADDRESS": "127.0.0.1:6379"}, SWITCHED_OFF], ids=["joined", "off"])
def test_a_joined_cluster_and_a_run_without_preloading_have_no_server(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with fork_server() as opened:
        assert ADDRESS not in os.environ
        opened.serve(PLAN)


@pytest.mark.parametrize(
    ("files", "forks"),
    [((), True), (("/dev/nvidiactl",), True), (("/dev/dxg",), False), (("/dev/kfd",), False)],
    ids=["no GPU", "NVIDIA", "NVIDIA under WSL", "AMD"],
)
def test_workers_fork_with_gpus_whose_use_by_a_process_is_seen(
    files: tuple[str, ...], forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(hardware.os.path, "exists", lambda path: path in files)
    assert forkserver_start.may_fork() == forks
    engines = forkserver_start.wanted_by(plan_of({}, {}, {}))["engines"]
    assert engines == (GPU_ENGINES if files else EAGER_ENGINES)


# the server with an import that opens a device, without the other imports
SERVER_THAT_TOUCHES_A_DEVICE = """
import contextlib, io, os, socket, sys
from roll_opd.cluster.forkserver import forkserver_main, forkserver_worker
forkserver_main.COMMON = forkserver_main.MEGATRON_MODULES = ()
forkserver_main.lazy_compile = contextlib.nullcontext
forkserver_main.CUDA_DEVICE = sys.argv[2]
opened = open(sys.argv[2])
listeners = {}
for kind in (forkserver_main.MEGATRON, forkserver_main.ENGINES):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\\0" + forkserver_worker.address_of(sys.argv[1], kind))
    listener.listen()
    listeners[kind] = listener.detach()
alive, kept_open = os.pipe()
print("listens", flush=True)
forkserver_main.preload_and_serve(io.StringIO(""), listeners, alive)
"""


def test_workers_start_cold_after_an_import_that_initialises_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setup_worker.py").write_text("print('cold')")
    (tmp_path / "device").touch()
    address = f"roll_opd-{tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv(ADDRESS, address)
    command = [sys.executable, "-c", SERVER_THAT_TOUCHES_A_DEVICE, address, str((tmp_path / "device").resolve())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as server:  # type: ignore[call-overload]
        try:
            assert server.stdout.readline() == "listens\n"
            for kind in (MEGATRON, ENGINES):
                ended = setup(tmp_path / "program.py", ROLL_OPD_FORKSERVER_KIND=kind)
                assert ended.stdout == "cold\n", ended.stderr
            assert "initialised CUDA" in server.stderr.readline()
            assert server.poll() is None  # the other server process goes on
        finally:
            server.kill()


@pytest.mark.parametrize(
    "serves",
    [pytest.param(False, marks=pytest.mark.nightly, id="while it imports"), pytest.param(True, id="while it serves")],
)
def test_a_server_ends_with_its_driver_sigkill_included(
    serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, sys, time, types\n"
        "from roll_opd.cluster.forkserver.forkserver_start import ADDRESS, fork_server\n"
        "with fork_server() as server:\n"
        "    plan = types.SimpleNamespace(rollout=None, env={}, megatron_roles=dict, inference_roles=dict)\n"
        "    server.serve(plan)\n"
        "    print(os.environ[ADDRESS], flush=True); time.sleep(600)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout
    monkeypatch.setenv(ADDRESS, driver.stdout.readline().strip())
    if serves:
        program = tmp_path / "program.py"
        program.write_text("import os; print(os.getppid())")
        parents = [setup(program, ROLL_OPD_FORKSERVER_KIND=kind).stdout for kind in (MEGATRON, ENGINES)]
        assert len(set(parents)) == 2
    children = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert 1 <= len(children) <= 2
    deadline = time.monotonic() + 6  # less than it would import
    while any(each.is_running() and each.status() != "zombie" for each in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("kind", [MEGATRON, ENGINES])
def test_other_users_get_nothing(kind: str, server: psutil.Process) -> None:
    """A connection of another user is closed before anything is read from it; the server continues."""
    user = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
    asks = "s.connect('\\0' + sys.argv[1]); print(s.recv(1))"
    asked = [sys.executable, "-I", "-S", "-c", user + asks, forkserver_worker.address_of(os.environ[ADDRESS], kind)]
    if os.getuid():
        pytest.skip("only root can be another user")
    assert subprocess.run(asked, capture_output=True, timeout=60, check=True).stdout == b"b''\n"


def test_workers_start_without_an_ended_server_process(server: psutil.Process, tmp_path: Path) -> None:
    """The last test of this file: the server has no process for Megatron after it."""
    (tmp_path / "setup_worker.py").write_text("print('cold')")
    (tmp_path / "program.py").write_text("print('warm')")

    def printed() -> list[str]:
        return [setup(tmp_path / "program.py", ROLL_OPD_FORKSERVER_KIND=kind).stdout for kind in (MEGATRON, ENGINES)]

    assert printed() == ["warm\n", "warm\n"]
    min(server.children(), key=psutil.Process.create_time).kill()
    assert printed() == ["cold\n", "warm\n"]
