"""A run directory, a stream or a params file from a stranger can be opened and plotted: nothing in it is executed, and
nothing outside is written.
"""

import json
import os
import pickle
import shutil
from hashlib import sha256
from pathlib import Path

import psutil
import pytest

from lib import checkpoint, plots, report, stats
from lib.check import BadInput
from lib.config import read_yaml
from lib.runs import Run, load_model, load_runs
from lib.sweep import sweep_record, swept
from lib.train import train


def quiet(line):
    pass


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def bomb(tmp_path):
    data, mark = pickle.dumps(Bomb(tmp_path / "exploded")), tmp_path / "exploded"
    pickle.loads(data)
    mark.rmdir()  # it works
    yield data
    assert not mark.exists()


def test_a_checkpoint_is_never_unpickled(tiny, bomb):
    run = train(tiny(checkpoint_every=1000), progress=quiet)
    (run.path / "run_meta.json").unlink()
    for path in checkpoint.written(run):
        path.unlink()
    folder = run.path / "checkpoints"
    (folder / f"{1000:015d}-{sha256(bomb).hexdigest()[:checkpoint.DIGITS]}.safetensors").write_bytes(bomb)
    with pytest.raises(BadInput, match="damaged"):
        train(tiny(checkpoint_every=1000), progress=quiet)


def test_a_model_is_never_unpickled(tiny, bomb):
    run = train(tiny(), progress=quiet)
    (run.path / "model" / "model.safetensors").write_bytes(bomb)
    with pytest.raises(BadInput, match="holds no whole model"):
        load_model(run)


def test_a_params_file_makes_no_objects(tmp_path):
    file = tmp_path / "arm.yaml"
    file.write_text(f"lr: !!python/object/apply:os.mkdir [{tmp_path / 'made'}]\n")
    with pytest.raises(BadInput, match="not a readable YAML file"):
        read_yaml(file)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("title", ["../out", "a/b", "/etc/x"])
def test_a_sweep_is_recorded_inside_the_runs(title, tmp_path):
    for ask in (sweep_record, swept):
        with pytest.raises(BadInput, match="title = "):
            ask(str(tmp_path), title)


@pytest.mark.parametrize("linked", ["run.log", "checkpoints", "model", "metrics.jsonl"])
def test_links_out_of_a_run_are_not_followed(tiny, tmp_path, linked):
    run = train(tiny(checkpoint_every=1000), progress=quiet)
    (run.path / "run_meta.json").unlink()
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in "abc":
        (outside / f"{name}.safetensors").write_text("mine")
    path = run.path / linked
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(outside if linked in ("checkpoints", "model") else outside / "a.safetensors")
    with pytest.raises(BadInput, match="is a link"):
        train(tiny(checkpoint_every=1000), progress=quiet)
    assert {file.name: file.read_text() for file in outside.iterdir()} == dict.fromkeys(
        ("a.safetensors", "b.safetensors", "c.safetensors"), "mine")


HOSTILE = "<script>alert(1)</script>"


def test_words_of_a_run_reach_no_page_as_code(tiny, capsys):
    runs = [train(tiny(seed=seed), progress=quiet) for seed in (0, 1)]
    for run in runs:
        meta = run.meta
        meta |= {"arm": HOSTILE, "status": HOSTILE, "error": HOSTILE, "environment": {"torch": HOSTILE}}
        (run.path / "run_meta.json").write_text(json.dumps(meta))
    table, updates = load_runs(tiny().runs)
    assert set(table["arm"]) == {"constant 384"}
    page = report.table(stats.summary(table)).to_html()
    assert HOSTILE not in page
    assert "alert(1)" in page  # seen, as text
    assert plots.curves(table, updates)


@pytest.mark.parametrize("damage", [{"budget": 3}, {"stream": None}, {"validation_loss": "low"}])
def test_metadata_that_is_not_whole_is_named(tiny, damage):
    run = train(tiny(), progress=quiet)
    (run.path / "run_meta.json").write_text(json.dumps(run.meta | damage))
    with pytest.raises(BadInput, match=f"run = .*{run.name}.*run_meta.json"):
        load_runs(tiny().runs)


def test_nothing_listens_while_a_run_goes_on(tiny):
    seen = []

    def look(line):
        seen.append([c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN])

    before = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    train(tiny(), progress=look)
    assert seen
    assert all(open_ports == before for open_ports in seen)
    assert Run(Path(tiny().runs))
