"""Settings of all tests: eight CPU devices, no hub, no telemetry; set before JAX is imported."""

import gc
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

# Its import configures logging anew and closes every handler's stream: imported later, it would
# close the captured stderr that absl, imported by JAX's libraries, still holds.
import submitit  # noqa: F401
from hypothesis import settings

pytest.register_assert_rewrite("tiny_stages.contract")

# How long an example takes depends on the machine and on what else it does.
settings.register_profile("redco_flow", deadline=None)
settings.load_profile("redco_flow")

# A caller's workspace, home and settings of ours are no part of a test.
_OF_TESTS = ("REDCO_FLOW_TEST_", "REDCO_FLOW_FORBID_SKIPS")
for _name in [name for name in os.environ if name.startswith("REDCO_FLOW_")]:
    if not _name.startswith(_OF_TESTS):
        del os.environ[_name]

# What a shell runs in the background ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test-gpu` asks for a GPU, too, of which each test's process takes what it needs.
os.environ["JAX_PLATFORMS"] = os.environ.get("REDCO_FLOW_TEST_PLATFORMS", "cpu")
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
# Tests compile much and compute little: the cheap compiler passes halve their time.
_CHEAP_COMPILING = "--xla_backend_optimization_level=0"
# Compile small programs in one piece: to cut each in 32 took 15% of CPU time with jaxlib 0.10.
_CHEAP_COMPILING += " --xla_cpu_parallel_codegen_split_count=1"
# XLA ends the process for a flag that it does not know: jaxlib after 0.10 has this one no more.
if tuple(map(int, version("jaxlib").split(".")[:2])) <= (0, 10):
    _CHEAP_COMPILING += " --xla_cpu_use_fusion_emitters=false"
if os.environ["JAX_PLATFORMS"] != "cpu":
    # What a training needs there to repeat to the last bit; see docs/limits.md.
    _CHEAP_COMPILING += " --xla_gpu_autotune_level=0 --xla_gpu_exclude_nondeterministic_ops=true"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {_CHEAP_COMPILING}"
# What is traced makes millions of objects that live on: to look for garbage at every 700 new ones,
# and to note the stack of each operation, took 3 to 16% of the tests' CPU time.
gc.set_threshold(100_000, 50, 100)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# There is none, and to look for one reads the list of every installed package, in each process.
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
# Of torch's models, which are as small, a second thread only waits, and busily: seven times the CPU
# time of a generation.
os.environ["OMP_NUM_THREADS"] = "1"

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """Compile `tests/shims/NAME.c`; return the library's path, for LD_PRELOAD."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) here, which builds the faulty file systems of tests/shims")
    folder = tmp_path_factory.mktemp("shims")

    def build(name):
        source, library = PROJECT / "tests/shims" / f"{name}.c", folder / f"{name}.so"
        if not library.exists():
            options = ("-shared", "-fPIC", "-O1", "-Wall", "-Werror")
            subprocess.run([compiler, *options, "-o", library, source, "-ldl"], check=True)
        return str(library)

    return build


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """Equal programs are compiled once: in this process, in those that it starts, and in the other
    workers of pytest.
    """
    settings = {
        "jax_compilation_cache_dir": str(_shared_folder(tmp_path_factory) / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name.upper(), str(value))
        # JAX reads the variables when it is imported, perhaps by one of the module's tests.
        before = _use_jax_settings(settings) if "jax" in sys.modules else _OF_JAX
        yield
    if "jax" in sys.modules:
        _use_jax_settings(before)


@pytest.fixture(scope="session")
def _kernels(tmp_path_factory):
    """A file with the kernels that this worker of pytest has compiled for GPUs."""
    return tmp_path_factory.mktemp("kernels") / "kernels"


@pytest.fixture
def kernel_cache(_kernels, monkeypatch):
    """Processes that compile for GPUs take equal kernels from those before them: to start an
    assembler for each of a hundred kernels takes half of a compilation's CPU time.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_gpu_kernel_cache_file={_kernels}"
    monkeypatch.setenv("XLA_FLAGS", flags)


_OF_JAX = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


def _use_jax_settings(settings):
    """Apply settings of JAX's compilation cache; return the previous ones."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    return before


def _shared_folder(tmp_path_factory):
    """Return the folder of all of pytest's workers."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory):
    """REDCO_FLOW_HOME of tests without a Prefect server: never the one of who runs the tests."""
    home = os.environ["REDCO_FLOW_HOME"] = str(tmp_path_factory.mktemp("home"))
    os.environ.pop("PREFECT_API_URL", None)
    yield
    if Path(home, "prefect").is_dir():  # a command that was tried has started a server
        from redco_flow.orchestrate.prefect.server import stop_server

        os.environ["REDCO_FLOW_HOME"] = home
        stop_server(grace_seconds=5.0)


@pytest.fixture(scope="session")
def _home_with_server(tmp_path_factory):
    """The home of the Prefect server that tests share; the server ends with the session."""
    from redco_flow.orchestrate.prefect.server import stop_server

    home = tmp_path_factory.mktemp("redco-flow-home")
    yield home
    os.environ["REDCO_FLOW_HOME"] = str(home)
    _signal_server(home, signal.SIGCONT)
    stop_server(grace_seconds=5.0)


@pytest.fixture(scope="module")
def prefect_home(_home_with_server):
    """REDCO_FLOW_HOME with a Prefect server, for the tests of one file.

    The server stands still where no test needs it: its services look into its database for ever.
    """
    before = os.environ["REDCO_FLOW_HOME"]
    os.environ["REDCO_FLOW_HOME"] = str(_home_with_server)
    _signal_server(_home_with_server, signal.SIGCONT)
    yield _home_with_server
    _signal_server(_home_with_server, signal.SIGSTOP)
    os.environ["REDCO_FLOW_HOME"] = before


def _signal_server(home, number):
    from redco_flow.tracking.process_identity import ProcessIdentity

    record = home / "prefect" / os.uname().nodename / "server.json"
    if record.exists():
        process = ProcessIdentity.from_json(json.loads(record.read_text())["process"])
        if process.host == os.uname().nodename and process.is_alive():
            os.kill(process.pid, number)


@pytest.fixture(scope="module")
def prefect_server(prefect_home, tmp_path_factory):
    """A real Prefect server, to which all runs of the file's further tests report; its address.

    The first one of all of pytest's workers makes the tables of its database, and others copy them:
    to make them takes longer than to start a server.
    """
    from redco_flow.orchestrate.prefect.server import ensure_server

    kept, database, is_new = _copy_tables(tmp_path_factory)
    address = ensure_server(timeout_seconds=500)
    if is_new and not kept.exists():
        draft = kept.with_name(f"prefect-{os.getpid()}.db")
        with closing(sqlite3.connect(database)) as made, closing(sqlite3.connect(draft)) as copy:
            made.backup(copy)
        shutil.copymode(database, draft)
        draft.replace(kept)
    return address


@pytest.fixture(scope="module")
def prefect_tables(tmp_path_factory):
    """A server that a command of the file's tests starts has its tables, if they are made."""
    _copy_tables(tmp_path_factory)


def _copy_tables(tmp_path_factory):
    """Return where tables are kept, this home's database, and whether that was absent."""
    from redco_flow.orchestrate.prefect.server import prefect_directory

    kept = _shared_folder(tmp_path_factory) / "prefect.db"
    database = prefect_directory() / "prefect.db"
    is_new = not database.exists()
    if is_new and kept.exists():
        shutil.copy(kept, database)
    return kept, database, is_new


@pytest.fixture(scope="module")
def chromium():
    """A real browser; pages are opened in contexts of their own.

    Of one module: while it is there, this thread can run no event loop of its own.
    """
    from playwright.sync_api import sync_playwright

    program = shutil.which("/usr/bin/chromium") or shutil.which("chromium")
    if not program:
        pytest.skip("no chromium here: install Debian's package chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Where skips are forbidden, one for want of a package or a program is a failure."""
    outcome = yield
    report = outcome.get_result()
    forbidden = os.environ.get("REDCO_FLOW_FORBID_SKIPS") == "1"
    # A skip for want of a package or a program says what to install.
    if forbidden and report.skipped and "install" in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skips for want of a package are forbidden here: {report.longrepr}"


@pytest.fixture(scope="session")
def run_ranks():
    """Run a script as the ranks of one job; give what each printed last, read as JSON.

    (script, number of processes, CPU devices of each, *words): the script's arguments are its rank,
    the number of processes, the port to meet at, and the words.
    """

    def run(script, num_processes, num_devices, *words):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "JAX_PLATFORMS": "cpu",
            "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices} {_CHEAP_COMPILING}",
        }
        arguments = [str(word) for word in (num_processes, port, *words)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(rank), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(num_processes)
        ]
        try:
            outputs = [process.communicate(timeout=500) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors[-3000:]
        return [json.loads(output.splitlines()[-1]) for output, _ in outputs]

    return run
