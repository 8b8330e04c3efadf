"""The explorer in a real JupyterLab, by keyboard and mouse: `make test-browser`, which needs Playwright and Chromium.

Everything waits for what is to be seen, never for time to pass.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from urllib.error import URLError
from urllib.request import urlopen

import papermill
import pytest
import yaml

from lib.config import ROOT, RunConfig, read_arguments
from lib.runs import Run
from lib.sweep import sweep
from lib.train import resolve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[browser]'")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
QUIET = {  # a server's settings: no question about news, and every cell in the page, wherever it is scrolled
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}


@pytest.fixture(scope="module")
def place(stream, tmp_path_factory):
    """A folder with the notebook as papermill parameterizes it, and the runs of two small sweeps beside it."""
    folder = tmp_path_factory.mktemp("lab")
    base = RunConfig(stream=str(stream), runs=str(folder / "runs"), seq_len=32, hidden_size=16, layers=1, heads=2,
                     mlp_size=32, tokens_per_step=256, device_token_capacity=64, token_budget=4096, lr=0.01)
    small = replace(base, tokens_per_step=64)
    grid = [replace(arm, seed=seed) for arm in (base, small) for seed in (0, 1)]
    sweep(grid, "constant comparison")
    sweep([replace(base, schedule="dividers", batch_dividers=(4, 1), stage_length=(0.5,))], "scheduled comparison")
    same = ("stream", "runs", "seq_len", "tokens_per_step", "device_token_capacity", "token_budget", "lr")
    papermill.execute_notebook(ROOT / "notebooks" / "09_explore.ipynb", folder / "09_explore.ipynb",
                               {name: getattr(base, name) for name in same}, prepare_only=True, progress_bar=False)
    return folder, base


@pytest.fixture(scope="module")
def server(place):
    """The address of a JupyterLab over that folder, on a free port, with settings and data of its own."""
    folder, _ = place
    settings = folder / "settings"
    for name, values in QUIET.items():
        file = (settings / name).with_suffix(".jupyterlab-settings")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    own = {name: str(folder / "jupyter") for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
               "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}",
               "--LabApp.expose_app_in_browser=True"]
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, cwd=folder)
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            try:
                urlopen(f"{address}/api/status?token={token}", timeout=5).close()
                break
            except URLError:
                assert process.poll() is None and time.monotonic() < until, (folder / "server.log").read_text()  # noqa: PT018
                time.sleep(0.1)
        yield f"{address}/lab/tree/09_explore.ipynb?token={token}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def page(server):
    """The notebook in JupyterLab, all of its cells run."""
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        page.set_default_timeout(60_000)
        page.goto(server)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        session = "window.jupyterapp.shell.currentWidget?.sessionContext?.session"
        page.wait_for_function(f"{session}?.kernel?.status === 'idle'")
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        last = page.locator(".jp-Notebook .jp-CodeCell").last
        last.locator(".jp-OutputArea-output").first.wait_for()
        assert page.locator(".jp-Notebook [data-mime-type='application/vnd.jupyter.stderr']").count() == 0
        yield page
        browser.close()


def view(page, text):
    """The output of a cell that holds this text in its widgets."""
    return page.locator(".jp-OutputArea-output", has=page.locator(".jupyter-widgets", has_text=text))


def changed(page, view, before=""):
    """The hash of a view's figure, once it differs from the one before."""
    look = """async ([image, before]) => {
        try {
            const bytes = await (await fetch(image.src)).arrayBuffer();
            const hash = [...new Uint8Array(await crypto.subtle.digest('SHA-256', bytes))].join();
            return bytes.byteLength > 1000 && hash !== before && hash;
        } catch { return false; }  // the figure was replaced at this moment
    }"""
    return page.wait_for_function(look, arg=[view.locator("img").element_handle(), before]).json_value()


def test_a_schedule_is_designed_and_saved(page, place):
    folder, base = place
    designer = view(page, "params file")
    figure = changed(page, designer)
    page.get_by_label("schedule", exact=True).select_option("dividers")
    figure = changed(page, designer, figure)
    api.expect(page.get_by_label("switch_at, share of budget")).to_be_hidden()
    words = "dividers 4,2,1 of 256 at 0, 0.25, 0.5: 32 updates, 4,096 tokens, about"  # 16, 8 and 8 updates
    api.expect(designer).to_contain_text(words)

    dividers = page.get_by_label("batch_dividers, list")
    dividers.fill("4, 1")
    row = page.locator(".widget-hbox", has=page.get_by_label("stage_length, shares of budget"))
    api.expect(row.get_by_role("alert")).to_contain_text("must give 1 lengths for 2 batch_dividers")
    api.expect(page.get_by_role("button", name="Save the params file")).to_be_disabled()
    page.get_by_label("stage_length, shares of budget").fill("0.5")
    api.expect(designer.get_by_role("alert")).to_have_count(0)
    figure = changed(page, designer, figure)
    page.get_by_label("lr, peak").fill("fast")
    row = page.locator(".widget-hbox", has=page.get_by_label("lr, peak"))
    api.expect(row.get_by_role("alert")).to_have_text("must be a number")
    page.get_by_label("lr, peak").fill("6e-3")
    changed(page, designer, figure)

    page.get_by_role("button", name="Save the params file").click()
    api.expect(designer).to_contain_text("Saved; python -m lib.train")
    file = folder / "runs" / "designed.yaml"
    wanted = replace(base, schedule="dividers", batch_dividers=(4, 1), stage_length=(0.5,), lr=6e-3,
                     validation_tokens=2048, warmup_fraction=0.05)
    assert read_arguments(RunConfig, [str(file)]) == wanted
    saved = file.read_bytes()
    assert designer.locator("textarea").input_value() in saved.decode()
    page.get_by_role("button", name="Save the params file").click()
    api.expect(designer.get_by_role("alert")).to_have_text("is there already, and stays; choose another name")
    assert file.read_bytes() == saved


def test_runs_are_chosen_and_compared(page):
    browser = view(page, "Ctrl and a click")
    figure = changed(page, browser)
    browser.get_by_role("button", name="updates").click()
    figure = changed(page, browser, figure)
    browser.get_by_role("button", name="logarithmic").first.click()
    figure = changed(page, browser, figure)
    browser.get_by_label("difference to the baseline").select_option("constant 64")
    figure = changed(page, browser, figure)
    browser.get_by_label("arm", exact=True).select_option(["constant 256", "constant 64"])
    changed(page, browser, figure)
    browser.get_by_label("seed", exact=True).select_option([])
    api.expect(browser.get_by_role("alert")).to_contain_text("runs = 0: must be 1 to 150 in a figure: choose more")


def test_the_law_follows_its_sliders(page):
    bench = view(page, "exponent of the signal")
    figure = changed(page, bench)
    for name in ("s, exponent", "β, exponent", "noise, nat", "budget, tokens"):
        words = bench.inner_text()
        handle = bench.locator(".widget-slider", has_text=name).get_by_role("slider")
        handle.press("ArrowRight")
        figure = changed(page, bench, figure)
        api.expect(bench).not_to_have_text(words)


def test_a_run_of_another_process_is_watched_and_stopped(page, place, tmp_path):
    _, base = place
    config = replace(base, token_budget=60_000_000, epochs=2000, tokens_per_step=128, seed=7, skip_validation=True)
    values = {name: value for name, value in json.loads(json.dumps(asdict(config))).items() if value is not None}
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(values))
    watched, run = view(page, "Stop the run"), resolve(config).run
    stop = page.get_by_role("button", name="Stop the run at its next update")
    api.expect(stop).to_be_disabled()
    before = changed(page, watched)
    process = subprocess.Popen([sys.executable, "-m", "lib.train", tmp_path / "long.yaml"], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        api.expect(watched).to_contain_text("training · ")
        api.expect(watched).to_contain_text("left")
        for _ in range(2):
            before = changed(page, watched, before)
        stop.click()
        api.expect(watched).to_contain_text("interrupted · ")
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert Run(run.path).meta["status"] == "interrupted"
    assert Run(run.path).meta["steps"] == len(run.metrics())
    api.expect(stop).to_be_disabled()
