"""Last columns of a row of benches/results that a script writes, as machine/results.rs writes them for benches."""
import os
import pathlib
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def said(*command):
    """What a command prints, run in the repository's root."""
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def machine():
    """Processor model and cores, without commas."""
    of = {}
    for line in open("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        of.setdefault(name.strip(), value.strip())
    cores = len(os.sched_getaffinity(0))
    return f"{of['model name']} family {of['cpu family']} model {of['model']} x {cores}".replace(",", " ")


def when(command):
    """Day in UTC, commit (with a plus if Rust sources differ from it), and the command."""
    changed = said("git", "status", "--porcelain", "--untracked-files=no", "--", "*.rs")
    commit = said("git", "rev-parse", "--short", "HEAD") + ("+" if changed else "")
    return [time.strftime("%Y-%m-%d", time.gmtime()), commit, command]
