"""A notebook under papermill itself, from another working directory; nbval runs them all on their defaults."""

import subprocess
import sys
from pathlib import Path

import nbformat
import yaml

from lib.config import ROOT


def test_papermill_with_a_params_file_from_anywhere(stream, tmp_path):
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump({"stream": str(stream), "runs": str(tmp_path / "runs"), "seeds": [0, 1, 2],
                                      "schedules": [[12, 1]], "stage_lengths": [[0.5]],
                                      "token_budget": 4608, "time_budget": 0.05}))
    out = tmp_path / "out.ipynb"
    papermill = Path(sys.executable).with_name("papermill")
    done = subprocess.run([papermill, ROOT / "notebooks" / "02_scheduled.ipynb", out, "-f", params], check=False,
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    text = "\n".join(output.get("data", {}).get("text/markdown", "") for cell in nbformat.read(out, 4).cells
                     for output in cell.get("outputs", []))
    results = [line for line in text.splitlines() if line.startswith("**Result:** At a fixed")]
    assert len(results) >= 2
    assert all("n = 3" in line for line in results)
    assert {path.name.split("-seed")[0] for path in (tmp_path / "runs").glob("*-seed*")} >= {
        "dividers-12_1-of-768", "constant-768", "constant-64"}
    assert not (tmp_path / "data").exists()
