"""What holds for the tree as a whole: notebooks, params, dependencies, floors of lib."""

import ast
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from itertools import groupby
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml
from bs4 import BeautifulSoup
from IPython.core.inputtransformer2 import TransformerManager
from nbformat.v4 import new_code_cell, new_notebook, new_output
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from lib.config import ROOT, Preparation, RunConfig
from lib.execute import kind_of, read_scale

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCALES = sorted(path.name for path in (ROOT / "params").iterdir() if path.is_dir())

# What tells one arm from another; every other parameter describes model, data and machine, and agrees within a scale.
OF_AN_ARM = {"lr", "min_lr", "schedule", "batch_dividers", "stage_length", "scaling_rule", "wd_rule", "seed",
             "data_seed"}
SHARED = {field.name for kind in (Preparation, RunConfig) for field in fields(kind)} - OF_AN_ARM | {"lrs"}

# A file of lib imports only from floors below its own. The two lowest are pure: no torch, no files.
FLOORS = {
    0: ["__init__", "check"],
    1: ["fleet", "noise", "rules", "schedule", "stats", "theory"],
    2: ["board", "clock", "config", "folder", "model", "png", "ranks", "roofline"],
    3: ["corpus", "critical", "gates", "index", "machine", "plan", "runs", "state", "stream"],
    4: ["branch", "design", "interrupt", "pairs", "prepare", "sample", "step"],
    5: ["checkpoint", "export"],
    6: ["begin"],
    7: ["train"],
    8: ["execute", "plots", "report", "study", "sweep"],
    9: ["advice", "browse", "charts", "live", "loops", "trial"],
    10: ["capacity", "race", "widgets"],
    11: ["bench"],
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}
IMPURE = {"io", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile", "torch"}

by_stem = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


# Params


def test_there_is_something_to_hold():
    assert NOTEBOOKS
    assert SCALES
    assert all(names(scale) for scale in SCALES)


def names(scale):
    return sorted(path.stem for path in (ROOT / "params" / scale).glob("*.yaml"))


def defaults(path):
    """The parameters cell of a notebook as values, read without papermill."""
    (cell,) = [cell for cell in nbformat.read(path, 4).cells if "parameters" in cell.metadata.get("tags", [])]
    return {line.target.id: eval(compile(ast.Expression(line.value), str(path), "eval"), {"__builtins__": {}})
            for line in ast.parse(cell.source).body}


@pytest.mark.parametrize("scale", SCALES)
def test_params_fit_their_notebooks(scale, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert list(read_scale(scale)) == names(scale)


@pytest.mark.parametrize("scale", [None, *SCALES])
def test_notebooks_agree_on_model_data_and_machine(scale, monkeypatch):
    """In the smoke run (no scale) and in every scale, be a value set in a params file or left at its default."""
    monkeypatch.chdir(ROOT)
    given = read_scale(scale) if scale else {path.stem: {} for path in NOTEBOOKS}
    first = {}
    for name, values in given.items():
        for key, value in (defaults(ROOT / "notebooks" / f"{name}.ipynb") | values).items():
            if key in SHARED:
                other, known = first.setdefault(key, (name, value))
                assert value == known, f"{key} is {value!r} in {name} and {known!r} in {other}"


# Notebooks


@by_stem
def test_notebooks_are_clean_sources(path):
    nb = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(nb)
    assert set(nb.metadata) == {"kernelspec", "language_info"}
    assert nb.metadata.kernelspec.name == "python3"
    assert nb.metadata.language_info == {"name": "python"}
    checked = [cell for cell in nb.cells if cell.source.startswith("# NBVAL_CHECK_OUTPUT")]
    assert checked, "no cell whose output is checked"
    for cell in nb.cells:
        assert set(cell.metadata) <= {"tags"}, cell.source
        if cell in checked:  # nbval compares nothing where one of the two is missing
            assert cell.outputs, cell.source
            assert cell.execution_count, cell.source
        elif cell.cell_type == "code":
            assert not cell.outputs, cell.source
            assert cell.execution_count is None, cell.source


@by_stem
def test_papermill_sees_every_parameter(path):
    """Its inspector is a regular expression: `int | None`, and `=` inside a value or comment, are lost to it."""
    (cell,) = [cell for cell in nbformat.read(path, 4).cells if "parameters" in cell.metadata.get("tags", [])]
    lines = ast.parse(cell.source).body
    assert all(isinstance(line, ast.AnnAssign) for line in lines)
    derived = [node for line in lines for node in ast.walk(line.value) if isinstance(node, ast.Name | ast.Call)]
    assert not derived, "the injected cell comes after this one: nothing may be computed from a parameter here"
    inspected = papermill.inspect_notebook(path)
    assert [line.target.id for line in lines] == list(inspected)
    for name, parameter in inspected.items():
        assert kind_of(parameter["inferred_type_name"]), name
        assert parameter["help"], f"{name} has no comment"


@by_stem
def test_notebooks_tell_a_story(path):
    cells = nbformat.read(path, 4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    for section in ("Takeaways", "Next"):
        assert re.search(rf"^##+ {section}\b", text, re.MULTILINE), f"no section {section}"
    runs = [len([*group]) for kind, group in groupby(cells, lambda cell: cell.cell_type) if kind == "code"]
    assert max(runs) <= 3, "more than three code cells without a word between them"


@by_stem
def test_notebooks_are_thin(path):
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "code":
            flat = "parameters" in cell.metadata.get("tags", [])  # a list of names, as long as it has to be
            assert flat or len(cell.source.splitlines()) <= 20, cell.source
            nodes = ast.walk(ast.parse(TransformerManager().transform_cell(cell.source)))
            banned = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.While
            assert not [node for node in nodes if isinstance(node, banned)], cell.source


@pytest.mark.parametrize(("stored", "status"), [("2\n", 0), ("3\n", 1)])
def test_a_changed_output_fails(tmp_path, stored, status):
    """nbval with this project's options, on a notebook of one checked cell."""
    output = new_output("stream", text=stored)
    cell = new_code_cell("# NBVAL_CHECK_OUTPUT\nprint(1 + 1)", outputs=[output], execution_count=1)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    nbformat.write(new_notebook(cells=[cell], metadata=kernel), tmp_path / "one.ipynb")
    options = pyproject()["tool"]["pytest"]["ini_options"]["addopts"].split()
    done = subprocess.run([sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "one.ipynb"],
                          cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr


# Dependencies


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_conda_installs_this_project_and_its_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python, pip, installed = environment["dependencies"]
    assert pip == "pip"
    assert installed == {"pip": ["-c constraints.txt", "-e .[test]"]}
    name, version = python.split("=")
    assert name == "python"
    assert SpecifierSet(pyproject()["project"]["requires-python"]).contains(version)


def test_direct_dependencies_are_pinned_as_locked():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    project = pyproject()["project"]
    for text in sum(project["optional-dependencies"].values(), project["dependencies"]):
        requirement = Requirement(text)
        assert str(requirement.specifier) == f"=={locked[canonicalize_name(requirement.name)]}", text


def test_what_the_notebooks_are_promised_is_a_direct_dependency():
    direct = {canonicalize_name(Requirement(text).name) for text in pyproject()["project"]["dependencies"]}
    assert direct >= {"ipywidgets", "jupyterlab", "matplotlib", "nbconvert", "nbval", "pandas", "papermill", "pyarrow",
                      "pytest", "tokenizers", "torch"}


# Code


def imports(path):
    """Modules a file imports, anywhere in it; `from lib import x` counts as lib.x."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relative to itself"
            yield from [f"lib.{alias.name}" for alias in node.names] if node.module == "lib" else [node.module]


@pytest.mark.parametrize("path", sorted((ROOT / "lib").glob("*.py")), ids=lambda path: path.stem)
def test_imports_point_down(path):
    assert path.stem in FLOOR, "has no floor"
    floor = FLOOR[path.stem]
    for module in imports(path):
        package, _, rest = module.partition(".")
        if package == "lib":
            assert FLOOR[rest] < floor, f"{path.name} on floor {floor} imports {rest} on floor {FLOOR[rest]}"
        assert floor > 1 or package not in IMPURE, f"{path.name} is pure and imports {module}"
    names = {node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)}
    assert floor > 1 or not {"open", "print", "input"} & names, f"{path.name} is pure"


def test_no_path_of_a_machine():
    done = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                          capture_output=True, text=True, check=True)
    folders = ["/home", "/Users", "/root", "/tmp", "/mnt", str(Path.home()), str(ROOT)]
    machine = re.compile(rf"(?<![\w.~+/=:-])({'|'.join(map(re.escape, folders))})/")
    texts = {}
    for path in filter(Path.is_file, (ROOT / name for name in done.stdout.splitlines())):
        try:
            texts[path] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # no text
            continue
    assert ROOT / "pyproject.toml" in texts
    assert not [(path.name, found[0]) for path, text in texts.items() if (found := machine.search(text))]


def test_readme_shows_what_the_published_report_holds():
    """Its figures are committed, and each row of its result table stands in a table of the executed analysis."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    figures = re.findall(r"!\[([^]]+)\]\((\S+)\)", readme)
    assert figures
    assert {path for _, path in figures} <= set(tracked)
    report = nbformat.read(ROOT / "executed/laptop/08_analysis.ipynb", 4)
    pages = [output.data["text/html"] for cell in report.cells for output in cell.get("outputs", ())
             if "text/html" in output.get("data", {})]
    rows = [{cell.get_text().strip() for cell in row.select("th, td")}
            for page in pages for row in BeautifulSoup(page, "html.parser").select("tr")]
    shown = readme.partition("<!-- result -->")[2].partition("<!-- end -->")[0]
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(table) > 4
    for cells in table[2:]:
        assert any(set(cells[1:]) <= row for row in rows), cells


def test_readme_quotes_the_published_reports():
    """Each finding stands, word for word, in a result that a report computed."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    reports = [nbformat.read(path, 4) for path in (ROOT / "executed" / "laptop").glob("*.ipynb")]
    results = [output.data["text/markdown"] for report in reports for cell in report.cells
               for output in cell.get("outputs", ()) if "text/markdown" in output.get("data", {})]
    parts = re.findall(r"<!-- findings -->\n(.*?)\n<!-- end of findings -->", readme, re.DOTALL)
    findings = [line.removeprefix("- ") for part in parts for line in part.splitlines()]
    assert len(findings) > 3
    assert not [finding for finding in findings if not any(finding in result for result in results)]
