"""PyTorch's package is linked with about 3 GB of CUDA libraries that attention on the CPU never calls. This makes empty ones
in their place, so that it loads: every function returns 100, CUDA's code for "no device".

`cuda_standins.py FOLDER` writes them, for the torch of the interpreter that runs it; FOLDER goes into LD_LIBRARY_PATH.
"""

import importlib.util
import pathlib
import re
import subprocess
import sys


def lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


torch = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0], "lib")
there = [lib for lib in torch.iterdir() if lib.name.startswith("lib") and ".so" in lib.name]
names: set[str] = set()  # of libraries
wanted: set[tuple[str, str]] = set()  # function and version
versions: dict[str, set[str]] = {}  # of each library
defined: set[str] = set()
for lib in there:
    needed = (re.search(r"\(NEEDED\).*\[(.*)\]", line) for line in lines("readelf", "-dW", str(lib)))
    names |= {match[1] for match in needed if match and re.match(r"lib(cu|nv|nccl)", match[1])}
    file = ""
    for line in lines("readelf", "-VW", str(lib)):
        if match := re.search(r"File: (\S+)", line):
            file = match[1]
        elif file and (match := re.search(r"Name: (\S+) +Flags:", line)):
            versions.setdefault(file, set()).add(match[1])
    for line in lines("nm", "-D", str(lib)):
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        if kind == "U" and re.match(r"_*(cu|nv|nccl)", name):
            wanted.add((name, version.lstrip("@")))
        elif kind not in "Uwv":
            defined.add(name)
names -= {lib.name for lib in there}
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
made: set[str] = set()
for name in sorted(names):
    nodes = versions.get(name, set())
    mine = {(f, v) for f, v in wanted if v in nodes or (not v and f not in defined | made)}
    made |= {f for f, v in mine if not v}
    aliases = "".join(f'int {f}(void) __attribute__((alias("standin")));\n' for f in sorted({f for f, _ in mine}))
    source, script = folder / f"{name}.c", folder / f"{name}.map"
    source.write_text(f"static int standin(void) {{ return 100; }}\n{aliases}")
    script.write_text("".join(f"{v} {{ {' '.join(f + ';' for f, w in sorted(mine) if v == w)} }};\n" for v in sorted(nodes)))
    options = [f"-Wl,-soname,{name}"] + ([f"-Wl,--version-script={script}"] if nodes else [])
    subprocess.run(["cc", "-shared", "-fPIC", "-w", *options, "-o", folder / name, source], check=True)
print(f"{len(wanted)} functions in {len(names)} libraries")
