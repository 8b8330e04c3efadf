"""The runner of notebooks: what it refuses, what it keeps when a cell fails, what a reader gets."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lib.check import BadInput
from lib.config import ROOT
from lib.execute import main
from lib.index import index

PARAMETERS = """lr: float = 0.01  # peak learning rate
steps: int = 3  # updates
arm: str = "constant"  # what is compared | and how
seeds: list = [0]  # one run each
lrs: list[float] = [0.01]  # the grid
limit: int = None  # documents; all where None"""
FAST = "params/fast/01_first.yaml"


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository of two tiny notebooks, and another folder as the working directory."""
    root, elsewhere = tmp_path / "house", tmp_path / "elsewhere"
    for folder in (root / "notebooks", root / "params" / "fast", elsewhere):
        folder.mkdir(parents=True)
    add(root, "01_first", "print(lr)", "")
    add(root, "02_second", "print('second')", "")
    monkeypatch.chdir(elsewhere)
    return root


def add(root, name, code, params, text="# Why & how\n\nIn words."):
    parameters = new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    cells = [new_markdown_cell(text), parameters, new_code_cell(code)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), root / "notebooks" / f"{name}.ipynb")
    (root / "params" / "fast" / f"{name}.yaml").write_text(params)


@pytest.mark.parametrize(("params", "message"), [
    ("lrr: 0.1", "lrr = 0.1: is not a parameter of notebooks/01_first.ipynb; did you mean lr"),
    ("lr: 6e-4", "lr = '6e-4': must be a number; YAML reads 6e-4 as text, write 6.0e-4"),
    ("lrs: [6e-4]", "lrs = '6e-4': must be a number; YAML reads 6e-4 as text, write 6.0e-4"),
    ("steps: true", "steps = True: must be a whole number"),
    ("steps: 1.5", "steps = 1.5: must be a whole number"),
    ("arm: [a]", "arm = ['a']: must be text"),
    ("arm: off", "arm = False: must be text"),
    ("seeds: 0", "seeds = 0: must be a list"),
    ("lr: null", "lr = None: must be a number"),
    ("lr: 0.1\nlr: 0.2", "lr = 0.2: is set more than once"),
    ("- lr", "must hold name: value lines"),
])
def test_wrong_params_are_refused_before_anything_is_written(house, params, message):
    (house / FAST).write_text(params)
    with pytest.raises(BadInput) as error:
        main(["fast", "02"], house)
    assert message in str(error.value)
    assert FAST in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not (house / "executed").exists()


def test_wrong_names_are_refused(house):
    for arguments, known in (([], "fast"), (["fats"], "fast"), (["fast", "3"], "01_first, 02_second")):
        with pytest.raises(BadInput, match=f"must be one of {known}"):
            main(arguments, house)
    (house / "params/fast/03_third.yaml").touch()
    with pytest.raises(BadInput, match="has no notebook"):
        main(["fast"], house)
    assert not (house / "executed").exists()


def test_the_command_line_ends_with_one_line_and_status_2():
    done = subprocess.run([sys.executable, "-m", "lib.execute", "nowhere"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: scale = 'nowhere': must be one of ")


def test_a_report_from_any_working_directory(house, monkeypatch, capsys):
    wrong = house.parent / "kernels" / "python3"  # a kernelspec that would win over the installed one
    wrong.mkdir(parents=True)
    (wrong / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "wrong", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(house.parent))
    add(house, "01_first", """import os, sys, time
from IPython.display import Markdown, display
line = display({"text/plain": "update 1"}, raw=True, display_id=True)
line.update({"text/plain": "update 2"}, raw=True)
print("first", lr, limit, sys.executable)
time.sleep(0.5)
print("then", os.getcwd())
display(Markdown("a figure"))
display({"image/png": "aGk=", "text/plain": "drawn"}, raw=True)
import ipywidgets
display(ipywidgets.IntSlider(description="slider"))""", "lr: 6.0e-4\nlimit: null")
    stale = house / "executed/fast/figures/01_first-2.png"
    stale.parent.mkdir(parents=True)
    stale.touch()
    main(["fast", "01_first"], house)

    printed = capsys.readouterr().out.splitlines()
    report, page = house / "executed/fast/01_first.ipynb", house / "executed/fast/01_first.html"
    assert printed[0] == "[1/1] 01_first …"
    assert printed[1:3] == ["    update 1", "    update 2"]
    assert printed[3:5] == [f"    first 0.0006 None {sys.executable}", f"    then {house}"]
    assert printed[5].startswith("[1/1] 01_first finished in 0:00:")
    assert printed[6:] == ["Reports:", "    executed/fast/01_first.ipynb", "    executed/fast/01_first.html",
                           "    executed/fast/index.html"]
    assert sorted(path.name for path in report.parent.iterdir()) == [page.name, report.name, "figures", "index.html"]
    figure, = stale.parent.iterdir()
    assert (figure.name, figure.read_bytes()) == ("01_first-1.png", b"hi")

    nb = nbformat.read(report, as_version=4)
    nbformat.validate(nb)
    assert nb.metadata.papermill.input_path == "notebooks/01_first.ipynb"
    assert nb.metadata.papermill.output_path == "executed/fast/01_first.ipynb"
    assert str(house.parent) not in json.dumps([nb.metadata, *(cell.metadata for cell in nb.cells)])
    assert "widgets" not in nb.metadata
    assert "widget-view" not in report.read_text(encoding="utf-8")
    update, stream, *_ = nb.cells[-1].outputs
    assert update.data["text/plain"] == "update 2"
    assert stream.text.startswith("first 0.0006 None")
    assert "then" in stream.text

    html = page.read_text(encoding="utf-8")
    assert "<title>Why &amp; how</title>" in html
    assert "a figure" in html
    for unwanted in ("import os", "In&nbsp;[", "<script", "cdnjs", "IntSlider"):
        assert unwanted not in html
    for row in (("lr", "0.0006", "peak learning rate"), ("steps", "3", "updates"),
                ("arm", '"constant"', "what is compared | and how")):
        assert f"<td><code>{row[0]}</code></td>\n<td><code>{row[1]}</code></td>\n<td>{row[2]}</td>" in html


def test_a_failing_cell_keeps_the_earlier_report_and_stops_the_rest(house, capsys):
    add(house, "01_first", "print('on the way')\nraise ValueError('too small')", "steps: 4")
    good = house / "executed/fast/01_first.ipynb"
    good.parent.mkdir(parents=True)
    good.write_text("an earlier report")
    with pytest.raises(SystemExit) as stop:
        main(["fast"], house)
    # a text as the code of SystemExit is printed on stderr, and the exit status is 1
    assert "01_first, cell [3]: ValueError: too small\n" in stop.value.code
    assert stop.value.code.endswith("executed/fast/01_first.failed.ipynb")
    assert good.read_text() == "an earlier report"
    failed = good.with_suffix(".failed.ipynb")
    assert "on the way" in failed.read_text()
    assert {path.name for path in good.parent.iterdir()} == {good.name, failed.name}
    assert capsys.readouterr().out.splitlines() == ["[1/2] 01_first …", "    on the way"]
    assert not Path("executed").exists()


# The page that leads to the reports


def read(page, folder):
    """The page's articles, as a browser has them, once it is sure that it needs no network and leads somewhere."""
    soup = BeautifulSoup(page, "html.parser")
    assert soup.html["lang"] == "en"
    assert not soup.find_all(["script", "link", "iframe", "object"])
    assert "url(" not in page
    assert "@import" not in page
    names = [tag[kind] for tag in soup.find_all(True) for kind in ("href", "src") if tag.has_attr(kind)]
    assert all((folder / unquote(name)).is_file() for name in names), names
    assert all(image["alt"].strip() for image in soup.find_all("img"))
    return soup.find_all("article")


def words(tag):
    return " ".join(tag.get_text().split())


def links(article):
    return [unquote(link["href"]) for link in article.find_all("a")]


RESULTS = r"""from IPython.display import Markdown, display
display(Markdown("no **Result:** yet"))
display({"image/png": "aGk="}, metadata={"image/png": {"alt": "a \"curve\" <up> & on"}}, raw=True)
display({"image/png": "aGk="}, metadata={"image/png": {"alt": "another"}}, raw=True)
display(Markdown("**Result:** 2 * 3 * 4 < 5 & *T* is <script>alert(1)</script> `x`."))
display(Markdown("**Result:** the second."))"""


def test_a_page_leads_to_the_reports(house, capsys):
    """Markup of a notebook is shown, not obeyed; one that failed is no report, and its earlier one stays."""
    add(house, "01_first", RESULTS, "", "# <b>One</b> & *all*\n\n**Question.** Is *T* < 2,\nor `\"not\"`?\n\nMore.")
    main(["fast"], house)
    folder = house / "executed" / "fast"
    page = (folder / "index.html").read_text(encoding="utf-8")
    first, second = read(page, folder)
    assert words(first.h2) == "<b>One</b> & all"
    question, result, aside = first.find_all("p")
    assert words(question) == 'Is T < 2, or "not"?'
    assert words(result) == "Result: 2 * 3 * 4 < 5 & T is <script>alert(1)</script> x."
    assert words(aside) == "The first of 2 results. 01_first.html · 01_first.ipynb"
    assert links(first) == ["01_first.html", "01_first.html", "01_first.ipynb", "figures/01_first-1.png"]
    assert (first.img["src"], first.img["alt"]) == ("figures/01_first-1.png", 'a "curve" <up> & on')
    assert words(second) == "Why & how 02_second.html · 02_second.ipynb"

    add(house, "02_second", "raise ValueError", "")
    (folder / "01_first.html").unlink()
    with pytest.raises(SystemExit):
        main(["fast", "02"], house)
    assert (folder / "02_second.failed.ipynb").exists()
    first, second = read(index(folder), folder)
    assert links(first) == ["01_first.ipynb", "01_first.ipynb", "figures/01_first-1.png"]
    assert links(second) == ["02_second.html", "02_second.html", "02_second.ipynb"]


def test_the_page_over_the_published_reports():
    folder = ROOT / "executed" / "laptop"
    names = sorted(path.stem for path in folder.glob("[0-9]*.ipynb") if "." not in path.stem)
    articles = read(index(folder), folder)
    assert [links(article)[-1] for article in articles] == [f"figures/{name}-1.png" for name in names]
    for name, article in zip(names, articles, strict=True):
        report = (folder / f"{name}.ipynb").read_text(encoding="utf-8")
        assert json.dumps(article.img["alt"], ensure_ascii=False) in report
        question, result = map(words, article.find_all("p")[:2])
        assert question.endswith("?")
        first = report.partition('"text/markdown": [')[2].partition("]")[0]  # the first output in Markdown is a result
        assert json.dumps(result.replace("Result:", "**Result:**"), ensure_ascii=False) == first.strip()
