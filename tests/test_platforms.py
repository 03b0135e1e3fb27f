"""What one platform alone has is not needed to import the package, and a missing dependency is one line."""

from __future__ import annotations

import subprocess
import sys

ELSEWHERE = """
import importlib, os, pkgutil, platform, signal, sys
import faiss, fastapi, filelock, httpx, lmdb, tokenizers, torch, transformers, typer, uvicorn  # as Unix has them
import blendserve
for name in ("ray.serve", "valkey", "matplotlib.pyplot", "scipy.stats"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "syslog"):
    sys.modules[name] = None
unix = [name for name in dir(os) if name.startswith(("fork", "sched_", "posix_", "getuid", "getpgid", "setsid", "kill"))]
for owner, names in ((os, ["register_at_fork", *unix]), (signal, ["SIGHUP", "SIGKILL", "SIGUSR1", "SIGPIPE"])):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)
platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"

def refuse(event, arguments):  # no AVX in /proc/cpuinfo, no compiler, no kernels
    reads_linux = event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/"))
    if reads_linux or event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        raise FileNotFoundError(event, arguments)
    if event == "ctypes.dlopen" and "blendserve" in str(arguments[0]):
        raise OSError(event, arguments)

sys.addaudithook(refuse)
for module in pkgutil.walk_packages(blendserve.__path__, "blendserve."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            optional = isinstance(error, ModuleNotFoundError) and "halted" not in str(error)
            if not optional:
                print(module.name, type(error).__name__, error)
"""

WITHOUT_TORCH = """
import sys
from importlib import metadata
find = metadata.version
def version(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return find(name)
metadata.version, sys.modules["torch"] = version, None
from blendserve.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_every_module_is_imported_without_what_unix_alone_has() -> None:
    done = run(ELSEWHERE)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_missing_dependency_is_one_line() -> None:
    told = run(WITHOUT_TORCH, "--version")
    assert (told.returncode, told.stderr, len(told.stdout.splitlines())) == (0, "", 1)
    refused = run(WITHOUT_TORCH, "ask", "Where?")
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)
