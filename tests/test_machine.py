"""What is written beside a result."""

import gc
import platform
import subprocess
import sys
import time

import pytest
import torch

from lib import machine


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a report and a file of code, both committed."""
    (tmp_path / "executed").mkdir()
    for name in ("executed/report", "code"):
        (tmp_path / name).write_text("one")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    return tmp_path


def test_a_commit_is_named_and_marked_where_the_code_differs_from_it(repository):
    head = machine.commit()
    assert len(head) == 40
    (repository / "executed" / "report").write_text("two")
    (repository / "new").write_text("a file that is not tracked")
    assert machine.commit() == head
    (repository / "code").write_text("two")
    assert machine.commit() == f"{head}+changes"


def test_there_is_no_commit_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.commit() is None


FAULTS = """
import resource, torch
from lib.machine import keep_memory
if {keep}:
    keep_memory()
for _ in range(6):  # the heap grows in the first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.empty(12_000_000).fill_(1) for _ in range(4)]  # 48 MB each
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to keep memory")
def test_memory_that_is_kept_costs_no_page_faults():
    faults = {keep: int(subprocess.run([sys.executable, "-c", FAULTS.format(keep=keep)], cwd=machine.ROOT, check=True,
                                       capture_output=True, text=True).stdout) for keep in (False, True)}
    assert faults[True] < faults[False] / 20


PEAK = """
import torch
from lib.machine import peak_memory
print(peak_memory(torch.device("cpu")))
torch.ones(100_000_000)
print(peak_memory(torch.device("cpu")))
"""


def test_the_peak_of_memory_is_that_of_the_process():
    """However large the process is that it was forked from."""
    held = torch.ones(300_000_000)
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=machine.ROOT, check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert 50e6 < before < 4 * len(held)
    assert after - before == pytest.approx(400e6, rel=0.1)


def test_no_product_is_faster_than_the_peak():
    a, peak = torch.randn(1024, 1024), machine.matmul_peak(torch.device("cpu"), "fp32", 0.3)
    begin = time.perf_counter()
    a @ a
    assert 2 * 1024**3 / (time.perf_counter() - begin) < 1.5 * peak


def test_no_garbage_is_collected_within_and_collection_goes_on_after():
    """Counted by the collector itself, with a threshold that any loop reaches."""
    collections, thresholds = [], gc.get_threshold()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    gc.set_threshold(10)
    try:
        with machine.no_garbage_collection():
            collections.clear()
            [[] for _ in range(1000)]
            assert not collections
        [[] for _ in range(1000)]
        assert collections
        assert gc.get_freeze_count() == 0
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*thresholds)
