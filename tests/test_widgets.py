"""The views of the explorer as objects: what a change of their fields does to their figure, words and files."""

import asyncio
from dataclasses import replace

import pytest
from ipywidgets import HTML, Image, Textarea

from lib import widgets
from lib.clock import Costs
from lib.config import RunConfig, read_arguments
from lib.runs import Run
from lib.sweep import sweep
from lib.theory import Law
from lib.widgets import browser, designer, live_view, theory_bench


def inside(box):
    """Every widget in a box."""
    for child in box.children:
        yield child
        if hasattr(child, "children"):
            yield from inside(child)


class Parts:
    """A view's widgets: its one figure, what it says, and its fields by the first words of their names."""

    def __init__(self, box):
        self.all = [*inside(box)]
        self.image, = [part for part in self.all if isinstance(part, Image)]

    @property
    def figure(self):
        return bytes(self.image.value)

    def __getitem__(self, name):
        named = [part for part in self.all if getattr(part, "description", "").startswith(name)]
        return named[0]

    def words(self):
        return " | ".join(part.value for part in self.all if isinstance(part, HTML) and part.value)

    def row(self, name):
        return next(part for part in self.all if self[name] in getattr(part, "children", ()))


@pytest.fixture
def designed(tiny, monkeypatch):
    monkeypatch.setattr(widgets, "calibrated", lambda config, vocab_size: Costs(0.01, 0.002))
    return Parts(designer(tiny(schedule="late_switch", small_tokens_per_step=96, switch_at=0.5)))


def test_the_designer_shows_what_its_schedule_uses(designed):
    assert "switch 96 to 384 at 0.5: 25 updates, 3,840 tokens, about" in designed.words()
    before = designed.figure
    assert before.startswith(b"\x89PNG")
    designed["schedule"].value = "dividers"
    assert designed.figure != before
    displayed = {name: designed.row(name).layout.display for name in ("batch_dividers", "switch_at", "token_budget")}
    assert displayed == {"batch_dividers": "flex", "switch_at": "none", "token_budget": "flex"}
    designed["budget in"].value = "seconds"
    displayed = {name: designed.row(name).layout.display for name in ("token_budget", "time_budget", "clock")}
    assert displayed == {"token_budget": "none", "time_budget": "flex", "clock": "flex"}
    assert "about 1 min 0 s on this machine" in designed.words()


def test_a_mistake_stands_beside_its_field_and_the_figure_stays(designed):
    before, field = designed.figure, designed["switch_at"]
    field.value = "<b>late"
    assert "must be a number" in designed.row("switch_at").children[1].value
    assert 'role="alert"' in designed.row("switch_at").children[1].value
    assert designed.figure == before
    assert designed["Save"].disabled
    field.value = "0.75"
    assert designed.row("switch_at").children[1].value == ""
    assert designed.figure != before
    assert not designed["Save"].disabled


def test_a_schedule_is_saved_once(designed, tiny, tmp_path):
    designed["switch_at"].value, designed["file"].value = "0.75", str(tmp_path / "mine.yaml")
    designed["Save"].click()
    wanted = tiny(schedule="late_switch", small_tokens_per_step=96, switch_at=0.75)
    assert read_arguments(RunConfig, [str(tmp_path / "mine.yaml")]) == wanted
    shown, = [part for part in designed.all if isinstance(part, Textarea)]
    assert shown.value in (tmp_path / "mine.yaml").read_text()
    assert f"Saved; python -m lib.train {tmp_path / 'mine.yaml'} trains it." in designed.words()
    designed["Save"].click()
    assert "is there already, and stays; choose another name" in designed.words()


def test_a_machine_that_was_not_measured_is_measured_when_asked(tiny, monkeypatch):
    known = []
    monkeypatch.setattr(widgets, "calibrated", lambda config, vocab_size: known[0] if known else None)
    monkeypatch.setattr(widgets, "calibrate", lambda config, vocab_size: known.append(Costs(1.0, 0.0)))
    parts = Parts(designer(tiny()))
    button = parts["Measure"]
    assert button.layout.display == "inline-flex"
    assert "on this machine" not in parts.words()
    button.click()
    assert "about 1 min 48 s on this machine" in parts.words()
    assert button.layout.display == "none"
    assert not button.disabled


def test_the_browser_draws_what_is_chosen(tiny):
    small = tiny(tokens_per_step=96, token_budget=7680, skip_validation=True)
    grid = [replace(arm, seed=seed) for arm in (small, replace(small, tokens_per_step=384)) for seed in (0, 1)]
    sweep(grid, "first")
    sweep([replace(small, lr=0.02), replace(small, token_budget=None, time_budget=0.01)], "second")
    parts = Parts(browser(small.runs, ["first", "never made"]))
    assert parts["sweep"].value == ("first",)
    assert parts["arm"].value == ("constant 96", "constant 384")
    figures = {parts.figure}
    for name, value in (("against", "step"), ("x axis", True), ("loss axis", True), ("smoothing", 10.0),
                        ("difference", "constant 96"), ("arm", ("constant 96",)), ("seed", (1,))):
        parts[name].value = value
        assert parts.figure not in figures, name
        figures.add(parts.figure)
    assert parts["loss axis"].disabled
    parts["seed"].value = ()
    assert "runs = 0: must be 1 to 150 in a figure: choose more in the lists" in parts.words()
    parts["sweep"].value = ("second",)
    assert parts["budget"].value == ("7,680 tokens",)
    assert parts["difference"].value == ""
    assert "role" not in parts.words()
    parts["budget"].value = ("0.01 seconds", "7,680 tokens")
    assert {value for _, value in parts["difference"].options} == {
        "", "constant 96, lr 0.01, 0.01 seconds", "constant 96, lr 0.02, 7,680 tokens"}


def test_the_browser_goes_to_the_runs_of_another_scale(tiny, tmp_path):
    small, other = tiny(skip_validation=True), str(tmp_path / "another")
    sweep([small], "here")
    sweep([replace(small, runs=other, tokens_per_step=96, seed=seed) for seed in (4, 5)], "there")
    (tmp_path / "empty").mkdir()
    parts = Parts(browser(small.runs))
    assert parts["runs in"].options == (small.runs, other)
    before = parts.figure
    parts["runs in"].value = other
    assert (parts["sweep"].value, parts["arm"].value, parts["seed"].value) == (("there",), ("constant 96",), (4, 5))
    assert parts.figure != before
    parts["runs in"].value = small.runs
    assert parts["sweep"].options == ("here",)
    assert parts.figure == before


def test_the_bench_follows_its_sliders():
    parts = Parts(theory_bench(Law(2.5, 3.0, 0.3, 1.5, 400.0, 0.05), 1_105_920, 1024, 12_288))
    seen = {(parts.figure, parts.words())}
    for name, value in (("s,", 0.5), ("β,", 2.0), ("noise,", 1000.0), ("budget,", 1e7)):
        parts[name].value = value
        assert (parts.figure, parts.words()) not in seen
        seen.add((parts.figure, parts.words()))


def update(step):
    return {"step": step, "tokens": 384 * step, "elapsed": float(step), "stage": 0, "tokens_per_step": 384, "lr": 0.01,
            "loss": 5.0 - step / 10, "noise_g2": None, "noise_s": None, "tokens_per_second": 384.0}


async def until(condition):
    """Let the kernel's loop run until this holds; the test fails where that takes a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_live_view_follows_a_run_and_stops_it(tiny):
    async def look():
        parts = Parts(live_view(tiny().runs, seconds=0.01))
        await until(lambda: "No run in" in parts.words())
        run = Run.of(tiny(), {})
        with run.hold(lambda line: None):
            run.open(tiny(), b"")
            await until(lambda: "training · 0%" in parts.words())
            for step in (1, 2):
                before = parts.figure
                run.record(update(step))
                await until(lambda step=step: f"update {step} · {384 * step:,} tokens" in parts.words())
                assert parts.figure != before
            assert not parts["Stop"].disabled
            parts["Stop"].click()
            assert (run.path / "stop").exists()
            assert "Asked to stop" in parts.words()
            run.close({"status": "interrupted"})
        await until(lambda: "interrupted · 20%" in parts.words())
        assert parts["Stop"].disabled

        other = Run.of(tiny(seed=1), {})
        other.path.mkdir()
        (other.path / "config.json").write_text("{")  # as its process begins to write it
        await until(lambda: "must hold a whole config.json" in parts.words())
        parts["run"].value = run.name
        await until(lambda: "config.json" not in parts.words() and "interrupted · 20%" in parts.words())
        assert [value for _, value in parts["run"].options] == ["", other.name, run.name]

    asyncio.run(look())


def test_a_later_live_view_takes_the_place_of_the_one_before(tiny):
    async def look():
        views = [Parts(live_view(tiny().runs, seconds=0.01)) for _ in range(2)]
        await until(lambda: "No run in" in views[1].words())
        assert "No run in" not in views[0].words()
        task, = widgets.refreshing
        task.cancel()

    asyncio.run(look())
