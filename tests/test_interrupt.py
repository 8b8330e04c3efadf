"""A stop from outside, where users press it: in a notebook, and at the runner of notebooks."""

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec

from lib.config import ROOT
from lib.runs import Run

LONG = {"seq_len": 16, "hidden_size": 16, "layers": 1, "heads": 2, "mlp_size": 32, "tokens_per_step": 32,
        "device_token_capacity": 32, "epochs": 500, "token_budget": 640_000, "validation_tokens": 160}


class OwnKernel(KernelManager):
    """A kernel of the interpreter that runs the tests."""

    @property
    def kernel_spec(self):
        return KernelSpec(**get_kernel_dict())


def finished(client, message):
    """Wait for the reply to this message; returns the error's name, or None."""
    while True:
        try:
            reply = client.get_shell_msg(timeout=120)
        except queue.Empty:
            raise AssertionError("the kernel gave no answer") from None
        if reply["parent_header"]["msg_id"] == message:
            return reply["content"].get("ename")


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def begun(runs: Path):
    return any(len(file.read_bytes().splitlines()) > 20 for file in runs.glob("*/metrics.jsonl"))


def test_a_notebooks_interrupt_stops_at_the_next_update(stream, tmp_path):
    manager, runs = OwnKernel(), tmp_path / "runs"
    manager.start_kernel(env={**os.environ, "OMP_NUM_THREADS": "1"})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    try:
        values = LONG | {"stream": str(stream), "runs": str(runs)}
        cell = f"from lib.config import RunConfig\nfrom lib.train import train\nrun = train(RunConfig(**{values!r}))"
        message = client.execute(cell, stop_on_error=False)  # else what follows at once may be refused as well
        wait_for(lambda: begun(runs))
        manager.interrupt_kernel()
        assert finished(client, message) == "KeyboardInterrupt"
        path, = runs.iterdir()
        assert Run(path).meta["status"] == "interrupted"
        stopped = Run(path).meta["steps"]
        assert len([*path.glob("checkpoints/*.safetensors")]) == 1
        short = cell.replace("train(RunConfig", f"train(until=32 * {stopped + 10}, config=RunConfig")
        assert finished(client, client.execute(short)) is None  # the kernel lives, and the run goes on
        assert Run(path).meta["attempts"][-1]["after"] == stopped
        assert Run(path).meta["steps"] == stopped + 10
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_runner_stops_its_notebooks_run_when_it_is_terminated(stream, tmp_path):
    house = tmp_path / "house"
    (house / "params" / "slow").mkdir(parents=True)
    (house / "notebooks").symlink_to(ROOT / "notebooks")
    (house / "params" / "slow" / "01_constant.yaml").write_text(yaml.safe_dump(
        {"stream": str(stream), "runs": str(tmp_path / "runs"), "seq_len": 16, "tokens_per_step": 64,
         "constant_dividers": [1], "device_token_capacity": 32, "token_budget": 51_200, "lrs": [0.01],
         "hidden_size": 64, "layers": 4,  # long enough to be stopped on the way on any machine
         "validation_tokens": 160}))
    code = (f"import pathlib, signal; from lib import execute; "
            f"signal.signal(signal.SIGINT, signal.SIG_IGN); "  # as a shell has it for its background jobs
            f"execute.stoppable(); execute.main(['slow'], pathlib.Path({str(house)!r}))")
    runner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: begun(tmp_path / "runs"))
    runner.send_signal(signal.SIGTERM)
    out, err = runner.communicate(timeout=60)
    assert runner.returncode == 1, out + err
    assert "interrupted; the same command goes on from here" in err
    stopped = [Run(path) for path in (tmp_path / "runs").glob("constant-*")]
    assert [run.meta["status"] for run in stopped] == ["interrupted"]
    assert [*stopped[0].path.glob("checkpoints/*.safetensors")]
