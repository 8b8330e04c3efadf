"""Damage, full disks and other processes are seen and told in a line, and nothing that was written is lost."""

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib import checkpoint
from lib.check import BadInput
from lib.config import ROOT
from lib.runs import Run, load_runs
from lib.train import resolve, train

HEADER = 3000  # bytes of a checkpoint before its tensors, about


def quiet(line):
    pass


@pytest.fixture
def small(tiny):
    """Makes a configuration of ten quick updates, with a checkpoint after each."""
    return lambda **changes: tiny(**{"device_token_capacity": 384, "validation_tokens": 160,
                                     "checkpoint_every": 384} | changes)


@pytest.fixture(scope="module")
def made():
    """What several tests need, made once."""
    return {}


@pytest.fixture
def undisturbed(small, tmp_path, made):
    """The sha256 of its weights where nothing goes wrong."""
    if "undisturbed" not in made:
        made["undisturbed"] = train(small(runs=str(tmp_path / "undisturbed")), progress=quiet).meta["sha256"]
    return made["undisturbed"]


@pytest.fixture
def stopped(small, ctrl_c, made, tmp_path_factory):
    """Its run, stopped in update 7."""
    if "stopped" not in made:
        made["stopped"] = tmp_path_factory.mktemp("stopped") / "runs"
        with ctrl_c(7):
            train(small(runs=str(made["stopped"])), progress=quiet)
    shutil.copytree(made["stopped"], small().runs)
    run = resolve(small()).run
    assert [checkpoint.tokens_of(path) for path in checkpoint.written(run)] == [7 * 384, 6 * 384]
    return run


def ends_as(run, config, sha256, after):
    """The run is continued after this update and ends with these weights; returns what it said."""
    lines = []
    assert train(config, progress=lines.append).path == run.path
    assert any(f"continued after update {after}" in line for line in lines)
    assert run.meta["status"] == "finished"
    assert run.meta["sha256"] == sha256
    assert run.metrics().step.tolist() == [*range(1, 11)]
    return lines


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


DAMAGE = {
    "emptied": lambda path: cut(path, 0),
    "cut inside its length": lambda path: cut(path, 5),
    "cut inside its header": lambda path: cut(path, HEADER // 2),
    "cut by a byte": lambda path: cut(path, -1),
    "a byte longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a bit in its length": lambda path: flip(path, 0),
    "a bit in its header": lambda path: flip(path, HEADER // 2),
    "the last bit": lambda path: flip(path, -1, 7),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "renamed to another hash": lambda path: path.rename(path.with_name(f"{path.name[:15]}-{'0' * 16}.safetensors")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(small, stopped, undisturbed, damage):
    newest = checkpoint.written(stopped)[0]
    DAMAGE[damage](newest)
    bad = checkpoint.written(stopped)[0]
    data = bad.read_bytes()
    lines = ends_as(stopped, small(), undisturbed, after=6)
    assert bad.name in lines[0]
    assert "is damaged, its hash is not the one in its name; falling back to the one before it" in lines[0]
    assert sum("is damaged" in line for line in lines) == 1
    assert bad.with_suffix(".damaged").read_bytes() == data  # kept, out of the way


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_seen(small, stopped, undisturbed, tmp_path_factory, data):
    config = small(runs=str(tmp_path_factory.mktemp("copy")))
    run = Run(Path(config.runs) / stopped.name)
    shutil.copytree(stopped.path, run.path)
    newest = checkpoint.written(run)[0]
    position = st.one_of(st.integers(0, HEADER), st.integers(HEADER, newest.stat().st_size - 1))
    flip(newest, data.draw(position), data.draw(st.integers(0, 7)))
    assert newest.name in ends_as(run, config, undisturbed, after=6)[0]


@pytest.mark.parametrize("damage", ["emptied", "cut by a byte", "the last bit", "renamed to another hash"])
def test_where_all_checkpoints_are_damaged_nothing_is_touched(small, stopped, launch, contents, damage):
    for path in checkpoint.written(stopped):
        DAMAGE[damage](path)
    before = contents(stopped.path)
    lines = []
    with pytest.raises(BadInput) as told:
        train(small(), progress=lines.append)
    for path in checkpoint.written(stopped):
        assert path.name in str(told.value)
        assert any(path.name in line for line in lines)
    assert stopped.name in str(told.value)
    status, words = launch(small())
    assert (status, words) == (2, f"error: {told.value}\n")
    assert contents(stopped.path) == before


def test_checkpoints_that_changed_places_are_damaged(small, stopped, contents):
    newest, older = checkpoint.written(stopped)
    both = newest.read_bytes(), older.read_bytes()
    newest.write_bytes(both[1])
    older.write_bytes(both[0])
    before = contents(stopped.path)
    with pytest.raises(BadInput, match="damaged"):
        train(small(), progress=quiet)
    assert contents(stopped.path) == before


def test_a_checkpoint_of_another_run_is_not_continued_from(small, stopped, undisturbed):
    stranger = checkpoint.written(train(small(seed=1), progress=quiet))[0]
    placed = shutil.copy(stranger, stopped.path / "checkpoints")
    lines = ends_as(stopped, small(), undisturbed, after=7)
    assert Path(placed).name in lines[0]


def test_a_stream_changed_in_place_is_seen_before_anything_is_written(stream, small, tmp_path, ctrl_c, contents):
    mine = tmp_path / "stream"
    shutil.copytree(stream, mine)
    config = small(stream=str(mine))
    with ctrl_c(3):
        train(config, progress=quiet)
    before = contents(Path(config.runs))
    flip(mine / "tokens.bin", 1000)
    for again in (config, replace(config, seed=1), replace(config, runs=str(tmp_path / "elsewhere"))):
        with pytest.raises(BadInput, match=r"^stream = .*tokens\.bin must have the sha256 of its stream\.json"):
            train(again, progress=quiet)
    assert contents(Path(config.runs)) == before
    assert not (tmp_path / "elsewhere").exists()


EDITED = {
    "another rate": (lambda text: text.replace(b'"lr": 0.01', b'"lr": 0.02'), "another configuration, lr = 0.02"),
    "an unknown name": (lambda text: text.replace(b'"lr"', b'"rl"'), "rl = 0.01: is not a parameter"),
    "a bad value": (lambda text: text.replace(b'"lr": 0.01', b'"lr": -1'), "lr = -1.0: must be positive"),
    "half of it": (lambda text: text[:300], "must hold a whole config.json"),
    "emptied": (lambda text: b"", "must hold a whole config.json"),
    "no text": (lambda text: b"\xff" + text[1:], "must hold a whole config.json"),
}


@pytest.mark.parametrize("newest", ["whole", "damaged"])
@pytest.mark.parametrize("edit", EDITED)
def test_another_configuration_in_the_folder_is_refused_and_left_alone(small, stopped, launch, contents, edit, newest):
    file, (change, said) = stopped.path / "config.json", EDITED[edit]
    changed = change(file.read_bytes())
    assert changed != file.read_bytes()
    file.write_bytes(changed)
    if newest == "damaged":
        cut(checkpoint.written(stopped)[0], 100)
    before = contents(stopped.path)
    status, words = launch(small())
    assert status == 2
    assert said in words
    assert words.count("\n") == 1
    assert contents(stopped.path) == before


@pytest.mark.parametrize("text", [b"", b"{", b'{"status": "fin\xff"}', b"[]", b"null", b"{}"])
def test_a_broken_run_meta_is_no_outcome(small, stopped, undisturbed, text):
    (stopped.path / "run_meta.json").write_bytes(text)
    with pytest.raises(BadInput, match=f"run = .*{stopped.name}.*run_meta.json"):
        load_runs(stopped.path.parent)
    ends_as(stopped, small(), undisturbed, after=7)


@pytest.mark.parametrize("left", [1, 100, -1])
def test_a_torn_last_row_is_no_row(small, stopped, undisturbed, left):
    file = stopped.path / "metrics.jsonl"
    rows = file.read_bytes().splitlines(True)
    file.write_bytes(b"".join(rows) + rows[-1][:left])
    assert stopped.metrics().step.tolist() == [*range(1, 8)]
    runs, updates = load_runs(stopped.path.parent)
    assert runs.steps.tolist() == [7]
    assert runs.status.tolist() == ["interrupted"]
    assert updates.step.tolist() == [*range(1, 8)]
    ends_as(stopped, small(), undisturbed, after=7)


@pytest.mark.parametrize("left", [0, 1, 150])
def test_rows_that_were_lost_are_those_of_the_checkpoint(small, stopped, undisturbed, left):
    cut(stopped.path / "metrics.jsonl", left)
    assert len(stopped.metrics()) == 0
    runs, updates = load_runs(stopped.path.parent)
    assert (len(runs), len(updates)) == (1, 0)
    ends_as(stopped, small(), undisturbed, after=7)


@contextmanager
def files_up_to(size):
    """No file of this process can grow past so many bytes: a write stops there, in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def told(words, name, number):
    """Exactly one line, which names the run and the reason."""
    return words.count("\n") == 1 and words.startswith("error: ") and name in words and os.strerror(number) in words


def whole(run):
    """All that is there can be read; no temporary file is left."""
    for path in checkpoint.written(run):
        checkpoint.read(path)
    run.metrics()
    return not [*run.path.rglob(".*.partial")]


# config.json has 1 kB, the rows 2 kB, run_meta.json 3 kB, the tokenizer 14 kB, the model 44 kB, a checkpoint 140 kB.
@pytest.mark.parametrize("checkpoints", [0, 384])
@pytest.mark.parametrize("limit", [0, 1500, 2600, 10_000, 30_000])
def test_a_full_disk_is_told_in_a_line(small, launch, undisturbed, limit, checkpoints):
    config = small(checkpoint_every=checkpoints)
    run = resolve(config).run
    with files_up_to(limit):
        status, words = launch(config)
    assert status == 1
    assert told(words, run.name, errno.EFBIG), words
    assert not run.ended
    assert whole(run)
    assert launch(config) == (0, "")
    assert run.meta["sha256"] == undisturbed


@pytest.mark.parametrize("limit", [0, 1500, 2300, 10_000, 100_000])
def test_a_full_disk_costs_a_stopped_run_nothing(small, stopped, launch, undisturbed, limit):
    before = {path: path.read_bytes() for path in checkpoint.written(stopped)}
    with files_up_to(limit):
        status, words = launch(small())
    assert status == 1
    assert told(words, stopped.name, errno.EFBIG), words
    assert whole(stopped)
    assert len(stopped.metrics()) >= 7
    assert stopped.config.lr == 0.01
    assert stopped.meta["status"] == ("failed" if limit > 3000 else "interrupted")  # the old one where none fits
    assert {path: path.read_bytes() for path in checkpoint.written(stopped)} == before
    ends_as(stopped, small(), undisturbed, after=7)


def test_rows_that_do_not_fit_are_a_failure_that_is_recorded(small, launch):
    """run_meta.json still fits."""
    config = small(token_budget=60 * 32, tokens_per_step=32, device_token_capacity=32, skip_validation=True,
                   checkpoint_every=0)
    straight = train(replace(config, runs=config.runs + "-straight"), progress=quiet)
    run = resolve(config).run
    with files_up_to(10_000):
        status, words = launch(config)
    assert status == 1
    assert told(words, run.name, errno.EFBIG), words
    assert (run.path / "metrics.jsonl").stat().st_size == 10_000  # torn
    runs, updates = load_runs(config.runs)
    assert runs.status.tolist() == ["failed"]
    assert updates.step.tolist() == [*range(1, len(updates) + 1)]
    assert os.strerror(errno.EFBIG) in run.meta["error"]
    assert launch(config) == (0, "")
    assert run.meta["sha256"] == straight.meta["sha256"]


def test_a_full_disk_where_a_run_has_no_model_and_little_to_say(small, launch):
    """Only run_meta.json does not fit."""
    config = small(hidden_size=2 * 10**12, heads=10**12)
    run = resolve(config).run
    with files_up_to(1500):
        status, words = launch(config)
    assert status == 1
    assert told(words, run.name, errno.EFBIG), words
    assert (run.path / "config.json").exists()
    assert run.meta is None
    assert launch(config) == (0, "")
    assert run.meta["status"] == "out_of_memory"


def run_command(config, tmp_path, **options):
    """`python -m lib.train` in a process of its own."""
    file = tmp_path / "arm.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))))
    return subprocess.run([sys.executable, "-m", "lib.train", str(file)], capture_output=True, text=True, check=False,
                          cwd=ROOT, **options)


def test_a_command_that_cannot_write_a_checkpoint_ends_with_a_line(small, stopped, undisturbed, tmp_path):
    before = {path: path.read_bytes() for path in checkpoint.written(stopped)}
    half = 70_000
    ended = run_command(small(), tmp_path,
                        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (half, half)))
    assert ended.returncode == 1
    assert told(ended.stderr, stopped.name, errno.EFBIG), ended.stderr
    assert "Traceback" not in ended.stdout
    assert stopped.meta["steps"] == 8  # the update was made, and its row written
    assert whole(stopped)
    assert {path: path.read_bytes() for path in checkpoint.written(stopped)} == before
    ends_as(stopped, small(), undisturbed, after=7)


def test_a_full_disk_while_the_machine_is_calibrated(small, launch, monkeypatch):
    monkeypatch.setattr("lib.step.measure_step", lambda config, vocab_size: (0.01, 0.002))
    config = small(token_budget=None, time_budget=0.1, clock="modelled")
    with files_up_to(100):
        status, words = launch(config)
    assert status == 1
    assert words.count("\n") == 1
    assert os.strerror(errno.EFBIG) in words
    assert launch(config) == (0, "")


class Disk:
    """A small file system of its own."""

    def __init__(self, folder):
        self.folder = folder

    def mount(self, options):
        tool = shutil.which("mount")
        made = tool and subprocess.run([tool, "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)],
                                       capture_output=True, check=False)
        if not made or made.returncode:
            pytest.skip("no file system can be mounted here")

    def change(self, options):
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True)

    @property
    def used(self):
        """Bytes."""
        sizes = os.statvfs(self.folder)
        return (sizes.f_blocks - sizes.f_bfree) * sizes.f_frsize


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = Disk(folder)
    disk.mount("size=1m")
    yield disk
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(("checkpoints", "step"), [(0, 2), (384, 12)])
def test_on_a_disk_that_grows_a_run_ends_at_last_as_undisturbed(small, launch, undisturbed, disk, checkpoints, step):
    """Whatever it is that does not fit, the same command goes on."""
    config = small(runs=str(disk.folder / "runs"), checkpoint_every=checkpoints)
    run, seen, done = resolve(config).run, set(), 0
    for pages in range(step, 300, step):
        disk.change(f"size={pages * resource.getpagesize()}")
        status, words = launch(config)
        assert whole(run)
        if status == 0:
            break
        assert status == 1
        assert told(words, run.name, errno.ENOSPC), words
        seen |= {path.name for path in run.path.iterdir()}
        done = max(done, *map(checkpoint.tokens_of, checkpoint.written(run)), 0, 0)
    assert pages > 4 * step
    assert seen >= {"config.json", "metrics.jsonl"}
    assert (done > 384) == bool(checkpoints)
    assert run.meta["sha256"] == undisturbed


def test_a_checkpoint_that_stops_in_the_middle_on_a_full_disk(small, stopped, launch, undisturbed, disk):
    config = small(runs=str(disk.folder / "runs"))
    run = resolve(config).run
    shutil.copytree(stopped.path, run.path)
    disk.change(f"size={disk.used + 100_000}")
    before = {path: path.read_bytes() for path in checkpoint.written(run)}
    status, words = launch(config)
    assert status == 1
    assert told(words, run.name, errno.ENOSPC), words
    assert run.meta["steps"] == 8
    assert {path: path.read_bytes() for path in checkpoint.written(run)} == before
    assert whole(run)
    disk.change("size=2m")
    ends_as(run, config, undisturbed, after=7)


def test_a_command_that_cannot_write_its_first_row_ends_with_a_line(small, undisturbed, disk, tmp_path):
    """There is room for config.json and a line of run.log."""
    config = small(runs=str(disk.folder / "runs"))
    run = resolve(config).run
    disk.change(f"size={2 * resource.getpagesize()}")
    ended = run_command(config, tmp_path)
    assert ended.returncode == 1
    assert told(ended.stderr, run.name, errno.ENOSPC), ended.stderr
    assert "Traceback" not in ended.stdout
    assert (run.path / "config.json").exists()
    assert len(run.metrics()) == 0
    disk.change("size=2m")
    assert train(config, progress=quiet).meta["sha256"] == undisturbed


@pytest.fixture
def read_only(tmp_path, request):
    """A folder, and a function after which nothing can be written to it."""
    if os.geteuid() == 0:
        disk = request.getfixturevalue("disk")
        yield disk.folder, lambda: disk.change("ro")
        return
    folder = tmp_path / "closed"
    folder.mkdir()

    def close(mode=0o555):
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir():
                path.chmod(mode)

    yield folder, close
    close(0o755)


@pytest.mark.parametrize("newest", ["whole", "damaged"])
def test_a_stopped_run_in_a_read_only_folder(small, stopped, launch, contents, read_only, newest):
    folder, close = read_only
    shutil.copytree(stopped.path, folder / stopped.name)
    if newest == "damaged":
        cut(checkpoint.written(Run(folder / stopped.name))[0], 100)
    close()
    before = contents(folder)
    status, words = launch(small(runs=str(folder)))
    assert status == 1
    assert told(words, stopped.name, errno.EROFS if os.geteuid() == 0 else errno.EACCES), words
    assert contents(folder) == before


def test_an_ended_run_in_a_read_only_folder_is_reused(small, launch, contents, read_only):
    folder, close = read_only
    train(small(runs=str(folder)), progress=quiet)
    close()
    before = contents(folder)
    assert launch(small(runs=str(folder))) == (0, "")
    assert contents(folder) == before


def test_a_new_run_in_a_read_only_folder_is_refused(small, launch, contents, read_only):
    folder, close = read_only
    close()
    before = contents(folder)
    status, words = launch(small(runs=str(folder)))
    assert status == 2
    assert words.startswith(f"error: runs = {str(folder)!r}: must be a folder to write to")
    assert words.count("\n") == 1
    assert contents(folder) == before


HOLDER = """
import json, sys, time
from pathlib import Path
from lib.config import RunConfig
from lib.step import Learner
from lib.train import train

folder = Path(sys.argv[1])
apply, calls = Learner.apply, []

def held_up(*arguments):
    calls.append(1)
    if len(calls) % 10 == 5:
        (folder / f"here-{len(calls)}").touch()
        while not (folder / f"go-{len(calls)}").exists():
            time.sleep(0.01)
    return apply(*arguments)

Learner.apply = held_up
for values in sys.argv[2:]:
    train(RunConfig(**json.loads(values)))
"""


def test_a_second_process_waits_for_the_first_or_for_its_death(small, undisturbed, tmp_path):
    """Another process trains two runs, and stays in update 5 of each."""
    first, second = small(), small(seed=1)
    values = [json.dumps(asdict(config)) for config in (first, second)]
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), *values], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def wait_for(file):
        deadline = time.monotonic() + 60
        while not file.exists():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ask(config, then):
        lines = []

        def listen(line):
            lines.append(line)
            then()

        return train(config, progress=listen), lines

    try:
        wait_for(tmp_path / "here-5")
        run, lines = ask(first, (tmp_path / "go-5").touch)
        assert lines == [f"{run}: is being trained by another process, waiting for it", f"{run}: ended before, reused"]
        assert run.meta["sha256"] == undisturbed
        assert len(run.meta["attempts"]) == 1
        wait_for(tmp_path / "here-15")
        run, lines = ask(second, process.kill)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert "waiting for it" in lines[0]
    assert "continued after update 4" in lines[1]
    assert [attempt["after"] for attempt in run.meta["attempts"]] == [0, 4]
    assert run.meta["sha256"] == train(replace(second, runs=str(tmp_path / "straight")), quiet).meta["sha256"]


def test_ctrl_c_while_waiting_leaves_all_as_it_was(small, stopped, undisturbed, contents):
    lock = os.open(stopped.path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before, lines = contents(stopped.path), []
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def listen(line):
        lines.append(line)
        threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        train(small(), progress=listen)
    assert len(lines) == 1
    assert "waiting for it" in lines[0]
    assert contents(stopped.path) == before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    os.close(lock)
    ends_as(stopped, small(), undisturbed, after=7)
