"""The page that leads to a scale's reports, complete without a script or a network: executed/SCALE/index.html."""

import re
from pathlib import Path

import nbformat
from jinja2 import Environment

RESULT = "**Result:** "
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<title>Reports: {{ scale }}</title>
<style>
body { max-width: 68rem; margin: 2rem auto; padding: 0 1.5rem; background: #fff; color: #1a1a1a;
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1, h2 { line-height: 1.25; }
h2 { margin: 0 0 .5rem; font-size: 1.2rem; }
a { color: #0b4f8a; }
article { display: grid; grid-template-columns: minmax(0, 1fr) 18rem; gap: 0 2rem; padding: 1.5rem 0;
  border-top: 1px solid #bbb; break-inside: avoid; }
p { margin: 0 0 .6rem; }
img { width: 100%; height: auto; }
.aside { color: #555; font-size: .9rem; }
@media (max-width: 44rem) { article { grid-template-columns: minmax(0, 1fr); } img { max-width: 24rem; } }
@media print { html { font-size: 10pt; } body { max-width: none; margin: 0; padding: 0; } }
</style>
</head>
<body>
<main>
<h1>Reports: {{ scale }}</h1>
<p>What each notebook asked at this scale, and the first of the results that it computed.</p>
{% for report in reports %}
<article>
<div>
<h2><a href="{{ (report.page or report.notebook) | urlencode }}">{{ report.title }}</a></h2>
{% if report.question %}<p>{{ report.question }}</p>{% endif %}
{% if report.results %}<p><strong>Result:</strong> {{ report.results[0] }}</p>{% endif %}
<p class="aside">{% if report.results | length > 1 %}The first of {{ report.results | length }} results. {% endif %}
{% if report.page %}<a href="{{ report.page | urlencode }}">{{ report.page }}</a> · {% endif %}
<a href="{{ report.notebook | urlencode }}">{{ report.notebook }}</a></p>
</div>
{% if report.figure %}
<a href="{{ report.figure | urlencode }}"><img src="{{ report.figure | urlencode }}" alt="{{ report.alt }}"></a>
{% endif %}
</article>
{% endfor %}
</main>
</body>
</html>
"""


def index(folder: Path) -> str:
    """The page over the reports in this folder, in order of their names; what is not there is not linked."""
    paths = [path for path in sorted(folder.glob("*.ipynb")) if "." not in path.stem]  # a failed one is no report
    page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return page.render(scale=folder.name, reports=[facts(path) for path in paths])


def facts(path: Path) -> dict:
    """What the page says of a report: title, question, results, and the first figure with its alternative text."""
    nb = nbformat.read(path, as_version=4)
    text = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    title = re.search(r"^# (.+)$", text, re.M)
    question = re.search(r"^\*\*Question\.\*\* (.+?)(?:\n\n|\Z)", text, re.M | re.S)
    outputs = [output for cell in nb.cells for output in cell.get("outputs", ()) if "data" in output]
    shown = [output.data.get("text/markdown", "") for output in outputs]
    figures = [output.metadata.get("image/png", {}) for output in outputs if "image/png" in output.data]
    page, figure = path.with_suffix(".html"), path.parent / "figures" / f"{path.stem}-1.png"
    return {
        "title": plain(title[1]) if title else path.stem,
        "question": plain(question[1]) if question else "",
        "results": [plain(words.removeprefix(RESULT)) for words in shown if words.startswith(RESULT)],
        "notebook": path.name,
        "page": page.name if page.exists() else "",
        "figure": f"figures/{figure.name}" if figures and figure.exists() else "",
        "alt": figures[0].get("alt", "The first figure of the report.") if figures else "",
    }


def plain(markdown: str) -> str:
    """The words of a paragraph, without the marks of emphasis and code."""
    return " ".join(re.sub(r"(\*\*|\*|`)(?=\S)(.+?)(?<=\S)\1", r"\2", markdown, flags=re.S).split())
