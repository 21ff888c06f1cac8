"""What `peers/run` and `decode/run` share with the scripts that they start: the installation of the peers, and processes that answer a
line with a line."""

import ctypes
import importlib.util
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

from provenance import ROOT

TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
VENV = TARGET / "peers/venv"
# Empty stand-ins for the CUDA libraries that PyTorch's package asks for: see peers/cuda_standins.py.
STANDINS = TARGET / "peers/standins"
PYTHON = str(VENV / "bin/python")
# The structures of `decode/llama.py` are those of this version.
LLAMA = "xllamacpp==2026.10.11549"


class Installation:
    """Runs commands; `missing` gets the reason of each peer that one fails for, under the peer's first word."""

    def __init__(self, missing: dict[str, str]):
        self.missing = missing

    def attempt(self, peer: str, *command, **options) -> None:
        try:
            subprocess.run([str(word) for word in command], check=True, **options)
        except (OSError, subprocess.CalledProcessError) as error:
            self.missing.setdefault(peer, f"not installed: {error}")

    def python(self, peer: str, *packages: str) -> None:
        """Into the virtual environment that all peers share."""
        if not VENV.exists():
            self.attempt(peer, sys.executable, "-m", "venv", VENV)
        self.attempt(peer, PYTHON, "-m", "pip", "install", "-q", "--no-cache-dir", *packages)

    def pytorch(self) -> None:
        """Without its CUDA libraries: a process that loads it has STANDINS in LD_LIBRARY_PATH."""
        self.python("torch", "sympy", "networkx", "jinja2", "fsspec", "filelock", "typing-extensions")
        self.python("torch", "--no-deps", "torch")
        self.attempt("torch", PYTHON, ROOT / "benches/peers/cuda_standins.py", STANDINS)

    def cargo(self, peer: str, folder: pathlib.Path, target: pathlib.Path) -> None:
        """A package of its own, compiled for this processor."""
        native = {**os.environ, "RUSTFLAGS": "-C target-cpu=native", "CARGO_TARGET_DIR": str(target)}
        self.attempt(peer, "cargo", "build", "--release", "--locked", cwd=folder, env=native)


class Process:
    """A process that greets with a line, and then answers each line with a line."""

    def __init__(self, name: str, *command: str, environment: dict[str, str] | None = None):
        self.name = name
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, **pipes)
        self.greeting = self.read()

    def read(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"{self.name} ended with {self.process.wait()}")
        return line.strip()

    def tell(self, *words) -> None:
        print(*words, file=self.process.stdin, flush=True)

    def ask(self, *words) -> str:
        self.tell(*words)
        return self.read()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Missing(Exception):
    """The peer cannot do what was asked; a request is then answered `no REASON`."""


def answer(greeting: str, requests: dict[str, Callable[..., str]]) -> None:
    """The other side of a `Process`: the first word of a line names the function that gets the other words."""
    print(greeting, flush=True)
    for line in sys.stdin:
        name, *words = line.split()
        try:
            print(requests[name](*words), flush=True)
        except Missing as missing:
            print(f"no {missing}", flush=True)


def llama_library(signatures: dict[str, tuple]) -> ctypes.CDLL:
    """The C functions of llama.cpp that the package xllamacpp exports. Found, not imported: the import would load other code as well."""
    package = importlib.util.find_spec("xllamacpp").submodule_search_locations[0]
    library = ctypes.CDLL(str(next(pathlib.Path(package).glob("xllamacpp*.so"))))
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
