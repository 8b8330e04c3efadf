"""The machine: device, memory, and what to write beside a result of where it was made."""

import ctypes
import gc
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from lib.check import BadInput, require
from lib.config import ROOT


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a CUDA GPU where there is one. Raises BadInput where it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require(bool(re.fullmatch(r"cpu|mps|cuda(:\d+)?", name)), "device", name, "must be auto, cpu, cuda, cuda:1 or mps")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise BadInput(f"device = {name!r}: is not available here; auto takes what there is") from None
    return torch.device(name)


def keep_memory() -> None:
    """Let this process keep the memory that it frees, where glibc manages it.

    By default glibc returns large tensors to the system, and the next update pays a page fault for every 4 KiB again.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the end of the heap is not returned


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage once, and then no more within; what there is by then is set apart from all later collections."""
    was = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


def peak_memory(device: torch.device) -> int | None:
    """Bytes: on a GPU the most that was allocated, elsewhere the most that this process has held in memory so far.

    None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")  # getrusage would count what the process was forked from, too
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(found[1]) if found else None


def matmul_peak(device: torch.device, precision: str, seconds: float = 1.0) -> float:
    """FLOP/s of a product of two large matrices, which no model exceeds: the best of what fits into so many seconds."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size, best, deadline = (8192 if device.type == "cuda" else 1024), 0.0, time.perf_counter() + seconds
    a, b = torch.randn(2, size, size, device=device).to(kind)
    while not best or time.perf_counter() < deadline:
        begin = time.perf_counter()
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best


def memory_bandwidth(device: torch.device, seconds: float = 1.0) -> float:
    """Bytes/s of a copy of a large tensor, read and written: the best of what fits into so many seconds."""
    source = torch.ones((2**30 if device.type == "cuda" else 2**27) // 4, device=device)
    target, best, deadline = torch.empty_like(source), 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < deadline:
        begin = time.perf_counter()
        target.copy_(source)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - begin))
    return best


def device_name(device: torch.device) -> str:
    """The device's model in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """The repository's commit, with "+changes" where tracked files differ from it; None outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        # The reports do not count: each one would mark the next.
        changes = subprocess.run([*git, "status", "--porcelain", "-uno", ".", ":!executed"], capture_output=True,
                                 text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changes.stdout else "")


def environment(device: torch.device) -> dict:
    """What to write beside a result."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "tokenizers")},
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }
