"""A tiny stream of generated text, and a tiny model to train on it in a fraction of a second."""

import os
import random

import pytest
import torch

from lib.config import Preparation, RunConfig
from lib.prepare import prepare

# One thread is fastest for models this small, and tests stay quick on a busy machine.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def stream(tmp_path_factory):
    """A folder with about 60,000 tokens of sentences over a few hundred words."""
    chance, folder = random.Random(0), tmp_path_factory.mktemp("corpus")
    words = ["".join(chance.choices("abcdefghijklmnopąęśżź", k=chance.randint(2, 9))) for _ in range(300)]
    for i in range(200):
        text = " ".join(chance.choices(words, weights=range(300, 0, -1), k=150))
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    made = tmp_path_factory.mktemp("streams") / "tiny"
    prepare(Preparation(corpus=str(folder / "*.txt"), vocab_size=400, validation_fraction=0.1, stream=str(made)),
            progress=lambda line: None)
    return made


@pytest.fixture
def tiny(stream, tmp_path):
    """Makes a RunConfig of a two-layer model; keywords override."""

    def make(**changes):
        values = {"stream": str(stream), "runs": str(tmp_path / "runs"), "seq_len": 16, "hidden_size": 16, "layers": 2,
                  "heads": 2, "mlp_size": 32, "tokens_per_step": 384, "device_token_capacity": 32, "lr": 0.01}
        budget = {} if "time_budget" in changes else {"token_budget": 3840}
        return RunConfig(**(values | budget | changes))

    return make
