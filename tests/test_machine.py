"""What is written beside a result."""

import subprocess

import pytest

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
