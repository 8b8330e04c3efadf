"""The explorer in JupyterLab: fields, lists and sliders over plain functions, each drawing into one image."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from math import log10

from ipywidgets import (
    HTML,
    Button,
    Dropdown,
    FloatLogSlider,
    FloatSlider,
    HBox,
    Image,
    SelectMultiple,
    Text,
    Textarea,
    ToggleButtons,
    VBox,
    Widget,
)
from matplotlib.figure import Figure

from lib import browse, design, live
from lib.charts import of_law
from lib.check import BadInput, require
from lib.config import CHOICES, RunConfig
from lib.interrupt import stop
from lib.plots import trajectories
from lib.png import png
from lib.step import calibrate, calibrated
from lib.stream import PackedStream
from lib.theory import Law, in_words, rivals

LABEL = {"description_width": "17em"}  # no name is cut off
LINE, FREE, NATURAL = {"width": "36em"}, {"width": "auto"}, {"align_self": "flex-start"}
# The name of a list stands above it; that of any other widget beside it.
STYLE = ("<style>.name-above { flex-direction: column; align-items: stretch; height: auto; } "
         ".name-above > label { width: auto !important; text-align: left; }</style>")
MOST_RUNS = 150  # in one figure
refreshing: set[asyncio.Task] = set()  # the live view's: one at a time


def warning(words: str) -> str:
    """What is wrong, as HTML that a screen reader announces."""
    return words and f'<span role="alert" style="color: #b00020">{escape(words)}</span>'


def draw(image: Image, message: HTML, make: Callable[[], Figure]) -> None:
    """Put a figure in place of the one before; where the input is bad, say so, and leave that."""
    try:
        image.value, message.value = png(make()), ""
    except BadInput as error:
        message.value = warning(str(error))


class Reaction:
    """Acts on any change of these widgets' values, but for those made while it is `off`."""

    def __init__(self, act: Callable[[], None], widgets: Sequence[Widget]):
        self.act, self.on = act, True
        for widget in widgets:
            widget.observe(self, "value")

    def __call__(self, change: object = None) -> None:
        if self.on:
            self.act()

    @contextmanager
    def off(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True


def designer(base: RunConfig) -> VBox:
    """Fields of a schedule, and what it comes to: trajectories, updates, time, params file. The rest is the base's."""
    stream, config = PackedStream(base.stream, base.seq_len, epochs=base.epochs), base
    fields = {name: field(name, value) for name, value in design.suggested(base).items()}
    messages = {name: HTML() for name in fields}
    rows = {name: HBox([fields[name], messages[name]]) for name in fields}
    unit = ToggleButtons(options=["tokens", "seconds"], description="budget in", style=LABEL, layout=FREE,
                         value="seconds" if base.token_budget is None else "tokens")
    said, image = HTML(), Image(layout=NATURAL)
    speed = Button(description="Measure the speed of this machine", layout=FREE)
    text = Textarea(description="params file", rows=12, style={"description_width": "6em"}, layout=LINE)
    file = Text(f"{base.runs}/designed.yaml", description="file, from the repository", style=LABEL, layout=LINE)
    button, saved = Button(description="Save the params file", layout=FREE), HTML()

    def update() -> None:
        nonlocal config
        timed = unit.value == "seconds"
        found = design.draft(base, {name: widget.value for name, widget in fields.items()}, timed)
        visible = design.shown(fields["schedule"].value, timed)
        for name in fields:
            rows[name].layout.display = "flex" if name in visible else "none"
            messages[name].value = warning(found.problems.get(name, ""))
        config, saved.value, button.disabled = found.config, "", found.config is None
        if config is None:
            said.value = warning(found.problems.get("", "")) or "Below is what the fields came to before."
            return
        costs = calibrated(config, stream.vocab_size)
        speed.layout.display = "none" if costs else "inline-flex"
        image.value, text.value = png(trajectories([config], config.arm)), design.params_text(config)
        said.value = escape(design.in_words(config, costs, stream.tokens))

    def measure(_: Button) -> None:
        speed.disabled = True
        calibrate(config, stream.vocab_size)
        speed.disabled = False
        update()

    def write(_: Button) -> None:
        try:
            design.save(config, file.value, config.arm)
            saved.value = escape(f"Saved; python -m lib.train {file.value} trains it.")
        except BadInput as error:
            saved.value = warning(design.reason(error))

    Reaction(update, [unit, *fields.values()])()
    speed.on_click(measure)
    button.on_click(write)
    schedule, *others = rows.values()
    return VBox([schedule, unit, *others, HBox([said, speed]), image, HBox([text, VBox([file, button, saved])])])


def field(name: str, value: str) -> Widget:
    """A list of what the parameter can be, or a line to type in; its label ends in what it counts in."""
    label = ", ".join(filter(None, [name, design.UNITS[name]]))
    if name in CHOICES:
        return Dropdown(options=[*CHOICES[name]], value=value, description=label, style=LABEL, layout=LINE)
    return Text(value, description=label, style=LABEL, layout=LINE)


def browser(folder: str, titles: Sequence[str] = ()) -> VBox:
    """Lists to choose runs from, at first those of the sweeps with these titles, and their curves."""
    runs = None
    place = Dropdown(options=browse.scales(folder), description="runs in", style=LABEL, layout=LINE)
    lists = {name: SelectMultiple(description=words, rows=8, layout=FREE) for name, words in browse.LISTS.items()}
    for widget in lists.values():
        widget.add_class("name-above")
    sweep, *others = lists.values()
    axis = ToggleButtons(options=[(words, name) for name, words in browse.AXES.items()], description="against",
                         style={"button_width": "7em"}, layout=FREE)
    log_x, log_y = (ToggleButtons(options=[("linear", False), ("logarithmic", True)], description=words, layout=FREE,
                                  style={"button_width": "8em"}) for words in ("x axis", "loss axis"))
    smoothing = FloatSlider(2, min=0, max=20, step=0.5, description="smoothing, % of the longest run",
                            readout_format=".1f", style=LABEL, layout=LINE)
    baseline = Dropdown(description="difference to the baseline", options=[("none", "")], style=LABEL, layout=LINE)
    message, image = HTML(), Image(layout=NATURAL)

    def update() -> None:
        chosen = browse.choose(runs, {name: widget.value for name, widget in lists.items()})
        levels = [("none", ""), *((label, label) for label in browse.options(chosen, "label"))]
        if levels != [*baseline.options]:
            with redraw.off():
                before, baseline.options = baseline.value, levels
                baseline.value = before if (before, before) in levels else ""
        log_y.disabled = bool(baseline.value)

        def make() -> Figure:
            require(0 < len(chosen) <= MOST_RUNS, "runs", len(chosen), f"must be 1 to {MOST_RUNS} in a figure: choose "
                    f"{'fewer' if len(chosen) else 'more'} in the lists")
            return browse.compare_curves(chosen, browse.logs_of(chosen, place.value), axis.value, log_x.value,
                                         log_y.value and not baseline.value, smoothing.value / 100, baseline.value)

        draw(image, message, make)

    def narrow() -> None:
        """Offer what the chosen sweeps hold, and choose all of it, but of budgets those in tokens, if there are."""
        held = browse.choose(runs, {"sweep": sweep.value})
        with redraw.off():
            for name, widget in lists.items():
                if widget is not sweep:
                    widget.options = browse.options(held, name)
                    in_tokens = [value for value in widget.options if name == "limit" and value.endswith("tokens")]
                    widget.value = in_tokens or widget.options
        redraw()

    def move() -> None:
        """Offer the sweeps of another folder."""
        nonlocal runs
        runs = browse.catalogue(place.value)
        with offer.off():
            sweep.options = browse.options(runs, "sweep")
            sweep.value = [title for title in titles if title in sweep.options] or sweep.options[:1]
        offer()

    redraw = Reaction(update, [*others, axis, log_x, log_y, smoothing, baseline])
    offer = Reaction(narrow, [sweep])
    Reaction(move, [place])()
    return VBox([HTML(STYLE), place, HBox([*lists.values()], layout={"flex_flow": "row wrap"}),
                 HTML("Ctrl and a click adds to a choice, Shift and a click a range."), HBox([axis, log_x, log_y]),
                 HBox([smoothing, baseline]), message, image])


def theory_bench(law: Law, budget: int, smallest: int, largest: int) -> VBox:
    """Sliders of the law and the budget, and the best schedule with T between these bounds beside constant T."""
    s = FloatSlider(law.s, min=0.05, max=1.5, step=0.01, description="s, exponent of the signal")
    beta = FloatSlider(law.beta, min=1.05, max=5, step=0.05, description="β, exponent of the spectrum")
    noise = log_slider(law.noise, 1e-2, 1e2, "noise, nat · tokens")
    tokens = log_slider(budget, max(0.1, 2 * largest / budget), 1e3, "budget, tokens")
    sliders = [s, beta, noise, tokens]
    said, image = HTML(), Image(layout=NATURAL)
    for slider in sliders:
        slider.style, slider.layout = LABEL, LINE

    def update() -> None:
        chosen = Law(law.floor, law.amplitude, s.value, beta.value, noise.value, law.rate)
        schedules = rivals(chosen, tokens.value, smallest, largest)
        image.value = png(of_law(chosen, schedules, "The best schedule by the law"))
        said.value = escape(in_words(chosen, schedules))

    Reaction(update, sliders)()
    return VBox([HBox([s, beta]), HBox([noise, tokens]), said, image])


def log_slider(value: float, least: float, most: float, name: str) -> FloatLogSlider:
    """A slider from `least` to `most` times the value, in steps of 5 %."""
    low, high = (float(f"{value * factor:.3g}") for factor in (least, most))
    return FloatLogSlider(value, min=log10(low), max=log10(high), step=0.02, description=name,
                          readout_format=".3s")


def live_view(folder: str, seconds: float = 1.0) -> VBox:
    """A run of the folder as it is trained, by whatever process: looked at so often, with a button that stops it.

    Drawing takes at most a tenth of the kernel's time. A view made later takes the place of this one.
    """
    newest = [("the newest", "")]
    which = Dropdown(options=newest, description="run", style={"description_width": "3em"}, layout={"width": "44em"})
    button = Button(description="Stop the run at its next update", layout=FREE, disabled=True)
    said, asked, wrong = HTML(), HTML(), HTML()
    image = Image(layout=NATURAL)
    log, shown = None, None

    def once() -> None:
        nonlocal log, shown
        there = {run.name: run for run in live.runs_begun(folder)}
        if {*there} != {name for _, name in which.options if name}:
            before = which.value
            which.options = newest + [(name, name) for name in there]
            which.value = before if before in there else ""
        if not there:
            said.value = escape(f"No run in {folder} yet.")
            return
        run = there.get(which.value) or next(iter(there.values()))
        if log is None or log.run.path != run.path:
            log, asked.value = live.Log(run), ""
        view = live.look(log)
        if (view.name, view.status, len(view.updates)) != shown:
            shown = view.name, view.status, len(view.updates)
            button.disabled = view.status != live.TRAINING
            image.value, said.value = png(live.draw(view)), escape(view.line)

    def ask(_: Button) -> None:
        try:
            stop(log.run)
            asked.value = "Asked to stop; it ends at its next update, with a checkpoint."
        except BadInput as error:  # it ended since it was looked at
            asked.value = warning(str(error))

    async def refresh() -> None:
        while True:
            begin = time.monotonic()
            try:
                once()
                wrong.value = ""
            except Exception as error:  # in a task nobody would see it
                wrong.value = warning(f"{type(error).__name__}: {error}")
            await asyncio.sleep(max(seconds, 9 * (time.monotonic() - begin)))

    button.on_click(ask)
    for task in refreshing:
        task.cancel()
    refreshing.clear()
    refreshing.add(asyncio.get_running_loop().create_task(refresh()))
    return VBox([HBox([which, button]), said, asked, wrong, image])
