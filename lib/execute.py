"""Notebooks executed as reports, one scale at a time: `python -m lib.execute SCALE [NOTEBOOK …]`.

`params/SCALE/NAME.yaml` holds what `notebooks/NAME.ipynb` takes at that scale, and `executed/SCALE/` gets the notebook
with its outputs, the same as a page without code, and a page that leads to all of them. They run in order of their
numbers; one without params is no part of the scale. Paths count from the repository, where the kernels run too: none of
this machine's gets into a report.
"""

import contextlib
import datetime
import re
import signal
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path

import nbformat
import papermill
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from traitlets import Float

from lib.check import BadInput, require, require_known
from lib.config import ROOT, command, convert, read_yaml
from lib.index import index

KINDS = {"int": int, "float": float, "str": str, "bool": bool, "list": list}
WIDGET = "application/vnd.jupyter.widget-view+json"
# The page loads no script, so that it opens without a network: MathJax alone, late, and only where there is a formula.
PAGE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_js_mathjax %}{% if '$' in nb.cells | map(attribute='source') | join %}
{{ super() | replace('<script src', '<script async src') }}{% endif %}{% endblock %}
{% block data_png %}{% set alt = output | get_metadata('alt', 'image/png') %}
{{ super() | replace('<img', '<img alt="' ~ (alt | escape_html) ~ '"') if alt else super() }}{% endblock %}"""


def kind_of(annotation: str) -> type | None:
    """The type that a parameters cell names, of int, float, str, bool, list and list[…]; None for any other."""
    if annotation.startswith("list[") and (item := kind_of(annotation[5:-1])):
        return list[item]
    return KINDS.get(annotation)


def read_params(path: Path, notebook: Path) -> dict:
    """A params file, held against the parameters cell of its notebook: names, and types as the cell annotates them.

    null fits where the cell's own default is None: papermill's inspector does not see `int | None`. Raises BadInput.
    """
    values = read_yaml(path)
    declared = papermill.inspect_notebook(notebook)
    for name, value in values.items():
        label = f"{path}: {name}"
        require_known(name, declared, label, value, str(notebook))
        annotation = declared[name]["inferred_type_name"]
        kind = kind_of(annotation)
        require(kind is not None, label, value, f"{notebook} annotates it as {annotation}, not as {', '.join(KINDS)}")
        if value is None and declared[name]["default"] == "None":
            continue
        if kind is list:
            require(isinstance(value, list), label, value, "must be a list")
        else:
            convert(label, value, kind)
    return values


def read_scale(scale: str) -> dict[str, dict]:
    """The notebooks of a scale in order, each with its checked parameters. Raises BadInput; writes nothing."""
    scales = sorted(path.name for path in Path("params").iterdir() if path.is_dir())
    require(scale in scales, "scale", scale, f"must be one of {', '.join(scales)}")
    plan = {}
    for path in sorted(Path("params", scale).glob("*.yaml")):
        notebook = Path("notebooks", f"{path.stem}.ipynb")
        require(notebook.exists(), str(path), path.stem, f"has no notebook {notebook}")
        plan[path.stem] = read_params(path, notebook)
    require(bool(plan), "scale", scale, f"has no params file in {Path('params', scale)}")
    return plan


class OwnKernel(AsyncKernelManager):
    """A kernel of the interpreter that runs this file, whatever the kernelspecs installed for the user say."""

    # Ctrl-C and SIGTERM interrupt the kernel, whose run stops at its next update; a large one takes minutes.
    shutdown_wait_time = Float(600.0)

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict(["--log-level=CRITICAL"]))


class ConsoleClient(PapermillNotebookClient):
    """Papermill's client; printed lines, and the text of displays that have an id, reach the console as they come."""

    def process_message(self, msg, cell, cell_index):
        content = msg["content"]
        if msg["msg_type"] == "stream" and content["name"] == "stdout":
            say(content["text"])
        elif (content.get("transient") or {}).get("display_id"):
            say(content["data"].get("text/plain", ""))
        return super().process_message(msg, cell, cell_index)


class ConsoleEngine(NBClientEngine):
    """Papermill's own engine with the kernel and the client above."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, **_):
        ConsoleClient(nb_man, kernel_name=kernel_name, kernel_manager_class=OwnKernel, record_timing=False,
                      coalesce_streams=True, startup_timeout=120, iopub_timeout=60).execute()


papermill_engines.register("console", ConsoleEngine)


def say(text: str) -> None:
    """Print the lines of a notebook's text, indented under its name."""
    for line in filter(str.strip, text.splitlines()):
        print(f"    {line}", flush=True)


def execute(name: str, scale: str, values: dict) -> tuple[Path, Path]:
    """Run one notebook; only a finished one replaces the earlier report. Exits with status 1 where a cell fails."""
    source, report = Path("notebooks", f"{name}.ipynb"), Path("executed", scale, f"{name}.ipynb")
    running, failed = report.with_suffix(".running.ipynb"), report.with_suffix(".failed.ipynb")
    report.parent.mkdir(parents=True, exist_ok=True)
    try:
        nb = papermill.execute_notebook(source, running, values, engine_name="console", kernel_name="python3",
                                        progress_bar=False)
    except (PapermillExecutionError, DeadKernelError, KeyboardInterrupt) as error:
        if isinstance(error, PapermillExecutionError) and error.ename == "BadInput":
            running.unlink()
            raise BadInput(f"{Path('params', scale, name)}.yaml: {error.evalue}") from None
        if running.exists():
            running.replace(failed)
        reason = str(error) or "interrupted; the same command goes on from here"
        if isinstance(error, PapermillExecutionError):
            reason = f"cell [{error.exec_count}]: {error.ename}: {error.evalue}"
        sys.exit(f"error: {name}, {reason}\n    what it did until then: {failed}")
    nb.metadata.papermill.output_path = str(report)
    nb.metadata.pop("widgets", None)
    for cell in nb.cells:
        cell.metadata.pop("papermill", None)
        if "outputs" in cell:  # widgets have no kernel any more, and need a script to be seen at all
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    this_machine = rf"{re.escape(str(Path.cwd()))}/|{re.escape(tempfile.gettempdir())}/ipykernel_\d+/"
    running.write_text(re.sub(this_machine, "", nbformat.writes(nb)), encoding="utf-8")
    running.replace(report)
    failed.unlink(missing_ok=True)
    save_figures(nb, report.parent / "figures")
    page = report.with_suffix(".html")
    page.write_text(to_html(report), encoding="utf-8")
    return report, page


def save_figures(nb: nbformat.NotebookNode, folder: Path) -> None:
    """Write each figure of the notebook as FOLDER/NAME-NUMBER.png, for pages that show one of them."""
    name = Path(nb.metadata.papermill.output_path).stem
    for earlier in folder.glob(f"{name}-*.png"):
        earlier.unlink()
    images = [output.data["image/png"] for cell in nb.cells for output in cell.get("outputs", ())
              if "image/png" in output.get("data", {})]
    for number, image in enumerate(images, 1):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}-{number}.png").write_bytes(b64decode(image))


def to_html(report: Path) -> str:
    """A page to read: no code and no prompts; at its end the parameters used."""
    nb = nbformat.read(report, as_version=4)
    nb.cells.append(nbformat.v4.new_markdown_cell(parameters_table(report)))
    title = re.search(r"^# (.+)$", "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown"), re.M)
    exporter = HTMLExporter(raw_template=PAGE, exclude_input=True, exclude_output_prompt=True)
    page, _ = exporter.from_notebook_node(nb, {"metadata": {"name": title[1] if title else report.stem}})
    return page


def parameters_table(report: Path) -> str:
    """The parameters of an executed notebook in Markdown: name, value, and the comment of the parameters cell."""
    given = nbformat.read(report, as_version=4).metadata.papermill.parameters
    rows = [(f"`{name}`", f"`{given.get(name, parameter['default'])}`", parameter["help"])
            for name, parameter in papermill.inspect_notebook(report).items()]
    table = [("name", "value", "meaning"), ("---",) * 3, *rows]
    return "## Parameters\n\n" + "\n".join(" | ".join(text.replace("|", r"\|") for text in row) for row in table)


def main(arguments: Sequence[str], root: Path = ROOT) -> None:
    """Execute a scale's notebooks, or those named after it, and list the reports."""
    with contextlib.chdir(root):
        scale, *asked = arguments or [""]
        plan = read_scale(scale)
        for word in asked:
            require(any(word in (name, name[:2]) for name in plan), "notebook", word,
                    f"must be one of {', '.join(plan)}, or its number")
        names = [name for name in plan if not asked or {name, name[:2]} & set(asked)]
        reports, overview = [], Path("executed", scale, "index.html")
        for number, name in enumerate(names, 1):
            print(f"[{number}/{len(names)}] {name} …", flush=True)
            start = time.monotonic()
            reports += execute(name, scale, plan[name])
            overview.write_text(index(overview.parent), encoding="utf-8")
            seconds = datetime.timedelta(seconds=round(time.monotonic() - start))
            print(f"[{number}/{len(names)}] {name} finished in {seconds}", flush=True)
        print("Reports:", *reports, overview, sep="\n    ")


def stoppable() -> None:
    """Let SIGTERM end this process as Ctrl-C does, which shuts the kernel down; and both in a shell's background job.

    Such a job ignores SIGINT, and so would the kernel, which inherits that.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


if __name__ == "__main__":
    stoppable()
    command(main)
