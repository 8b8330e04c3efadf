"""How fast this machine trains, beside a bare loop, a plain one and its own limits: `python -m lib.bench`.

Times here are noisy, so whatever is compared runs in turns, and only ratios within a round count.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import papermill
import torch

import lib.execute  # noqa: F401 - papermill's engine of the reports
from lib.check import require
from lib.config import CHOICES, Preparation, RunConfig, check_types, command, read_arguments
from lib.corpus import INSTALLED, documents
from lib.loops import LOOPS
from lib.machine import environment, matmul_peak, memory_bandwidth, pick_device
from lib.model import MiniGPT
from lib.prepare import prepare
from lib.race import race
from lib.report import listed
from lib.roofline import account
from lib.runs import load_runs
from lib.step import Learner, model_config
from lib.stream import PackedStream, read_meta
from lib.train import train

SHAPES = {  # vocabulary, and a run's settings; the paper's shape by rows in a micro-batch, with updates of 8 or more
    "tiny": (512, {"seq_len": 32, "hidden_size": 32, "layers": 1, "heads": 2, "mlp_size": 64,
                   "device_token_capacity": 64, "tokens_per_step": 128}),
    "laptop": (2_048, {"seq_len": 128, "hidden_size": 96, "layers": 3, "heads": 3, "mlp_size": 384,
                       "device_token_capacity": 2_048, "tokens_per_step": 8_192}),
    "paper-2": (16_384, {"device_token_capacity": 2_048, "tokens_per_step": 8_192}),
    "paper-8": (16_384, {"device_token_capacity": 8_192, "tokens_per_step": 8_192}),
    "paper-20": (16_384, {"device_token_capacity": 20_480, "tokens_per_step": 20_480}),
}


@dataclass(frozen=True)
class Bench:
    """What to measure, and how long."""

    shapes: tuple[str, ...] = ("laptop", "paper-2")
    loops: tuple[str, ...] = ("own", "bare", "plain")
    precisions: tuple[str, ...] = ("fp32", "bf16")
    modes: tuple[str, ...] = ("off", "default")  # of compilation
    rounds: int = 5
    seconds: float = 4.0  # of a turn; at least one update
    device: str = "auto"
    directories: int = 1_000  # of runs, to load
    megabytes: float = 4.0  # of text, to encode

    def __post_init__(self):
        check_types(self)
        known = {"shapes": SHAPES, "loops": LOOPS, "precisions": CHOICES["precision"], "modes": CHOICES["compile"]}
        for name, values in known.items():
            for value in getattr(self, name):
                require(value in values, name, value, f"must be among {', '.join(values)}")
        for name in ("rounds", "seconds", "directories", "megabytes"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        require("own" in self.loops, "loops", [*self.loops], "must have own, which the others stand beside")


# Training, loop against loop


def training(bench: Bench, folder: Path, progress: Callable[[str], object] = print) -> pd.DataFrame:
    """The rows of all races, with shape, precision and compile: every combination, one after another.

    A precision other than float32 is left out where its products are no faster than float32's. `folder` takes the
    streams and runs.
    """
    device, found = pick_device(bench.device), []
    for precision in bench.precisions:
        share = matmul_peak(device, precision, 0.5) / matmul_peak(device, "fp32", 0.5)
        if precision != "fp32" and share <= 1:
            progress(f"{precision} is left out: its products run at {share:.2g} times the speed of float32's here")
            continue
        for shape in bench.shapes:
            for mode in bench.modes:
                config = replace(sized(shape, folder, bench.device, precision), compile=mode)
                rows = race(config, bench.loops, bench.rounds, bench.seconds)
                found.append(rows.assign(shape=shape, precision=precision, compile=mode,
                                         flops_per_token=flops_per_token(config)))
                progress("; ".join(said(found[-1])))
    return pd.concat(found, ignore_index=True)


def quiet(line: str) -> None:
    """Say nothing."""


def sized(shape: str, folder: Path, device: str, precision: str = "fp32") -> RunConfig:
    """A run of this shape that does not end, on a stream with its vocabulary, which is made where it is missing."""
    vocab_size, settings = SHAPES[shape]
    stream = folder / f"stream-{vocab_size}"
    enough = max(40, vocab_size // 40)  # documents, for so many merges
    prepare(Preparation(limit=enough, vocab_size=vocab_size, validation_fraction=0.1, stream=str(stream)), quiet)
    return RunConfig(stream=str(stream), runs=str(folder / "runs"), token_budget=10**12, epochs=10**6, device=device,
                     precision=precision, **settings)


def flops_per_token(config: RunConfig) -> int:
    """Of the model, forward and backward."""
    with torch.device("meta"):
        return MiniGPT(model_config(config, read_meta(config.stream)["vocab_size"])).flops_per_token


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a race, in words: the own loop's speed, its share of the peak, its ratios to the other loops, memory."""
    table = []
    for (shape, precision, mode), group in rows.groupby(["shape", "precision", "compile"], sort=False):
        speeds = group.pivot(index="round", columns="loop", values="tokens_per_second")
        peaks, memory = group.groupby("round").peak.first(), group.groupby("loop").peak_memory.max()
        share = (speeds["own"] * group.flops_per_token.iloc[0] / peaks).median()
        others = [loop for loop in group.loop.unique() if loop != "own"]
        table.append({"shape": shape, "precision": precision, "compile": mode,
                      "tokens/s": f"{speeds['own'].median():,.0f}", "of the peak": f"{share:.0%}"}
                     | {f"times the {loop} loop": spread(speeds["own"] / speeds[loop]) for loop in others}
                     | {"memory, MB": f"{memory['own'] / 1e6:,.0f}"}
                     | {f"of the {loop} loop's": f"{memory['own'] / memory[loop]:.2f}" for loop in others}
                     | {"first update after, s": f"{group[group.loop == 'own']['first'].max():.1f}"})
    return pd.DataFrame(table).fillna("–")


def said(rows: pd.DataFrame) -> list[str]:
    """How fast the own loop is at its fastest, beside each other loop in the same setting, and plain float32."""
    sentences = []
    medians = rows.groupby(["shape", "precision", "compile", "loop"], sort=False).tokens_per_second.median()
    for shape, group in rows.groupby("shape", sort=False):
        by = medians[shape].unstack("loop")
        best = by["own"].idxmax()
        words = [f"{by['own'][best] / by[loop][best]:.2f} times the {loop} loop's" for loop in group.loop.unique()
                 if loop != "own"]
        if "plain" in by and ("fp32", "off") in by.index.drop([best]):
            words.append(f"{by['own'][best] / by['plain']['fp32', 'off']:.2f} times the plain loop's in float32, not "
                         "compiled")
        setting = best[0] + ("" if best[1] == "off" else ", compiled")
        sentences.append(f"{shape}: fastest in {setting}" + (f", its tokens/s {listed(words)}" if words else ""))
    return sentences


def payback(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a shape and precision: what compiling costs the own loop, what it saves, and from how many tokens on."""
    table, own = [], rows[rows.loop == "own"]
    for (shape, precision), group in own.groupby(["shape", "precision"], sort=False):
        modes = group.groupby("compile").agg(speed=("tokens_per_second", "median"), first=("first", "max"))
        for mode in modes.index.drop("off", errors="ignore") if "off" in modes.index else []:
            cost = modes["first"][mode] - modes["first"]["off"]
            saved = 1 / modes.speed["off"] - 1 / modes.speed[mode]  # seconds a token
            table.append({"shape": shape, "precision": precision, "compile": mode, "costs, s": f"{cost:.0f}",
                          "times the speed": f"{modes.speed[mode] / modes.speed['off']:.3f}",
                          "pays from, tokens": f"{max(cost, 0) / saved:,.0f}" if saved > 0 else "never"})
    return pd.DataFrame(table)


def spread(ratios: pd.Series) -> str:
    """The median, and the lowest and highest round."""
    return f"{ratios.median():.3f} ({ratios.min():.3f} to {ratios.max():.3f})"


# Where an update's time goes


def update_account(config: RunConfig) -> tuple[pd.DataFrame, float, float]:
    """What an update of this run spends on each kind of operation, eagerly; and the limits: FLOP/s and bytes/s."""
    device = pick_device(config.device)
    flops, bandwidth = matmul_peak(device, config.precision), memory_bandwidth(device)
    learner = Learner(config, read_meta(config.stream)["vocab_size"])
    rows = PackedStream(config.stream, config.seq_len, config.data_seed or 0).read(0, config.tokens_per_step)

    def work() -> None:
        learner.accumulate(rows)
        learner.clip()
        learner.apply(config.lr, config.hyperparameters(config.resolved()[0]))

    work()  # touches fresh memory
    return account(work, flops, bandwidth, learner.synchronize), flops, bandwidth


def shares(table: pd.DataFrame) -> pd.DataFrame:
    """The account in words: share of the time, and how near each kind comes to the machine's limit."""
    total = table.sum()
    table = pd.concat([table, total.to_frame("all").T])
    return pd.DataFrame({
        "calls": table.calls.map("{:,.0f}".format), "ms": (1e3 * table.seconds).map("{:,.1f}".format),
        "share of the time": (table.seconds / total.seconds).map("{:.0%}".format),
        "GFLOP": (table.flops / 1e9).map("{:,.1f}".format), "GB": (table.bytes / 1e9).map("{:,.2f}".format),
        "at the limit, ms": (1e3 * table.limit).map("{:,.1f}".format),
        "of the limit": (table.limit / table.seconds).map("{:.0%}".format)})


# Around the training


def timed(work: Callable[[], object]) -> float:
    """Seconds it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def around(bench: Bench, folder: Path) -> pd.DataFrame:
    """What is done beside training, each against its measure: a row with what, here, against, ratio."""
    rows = [preparing(bench, folder), reading(bench, folder), loading(bench, folder), notebook(folder)]
    return pd.DataFrame(rows).fillna("–")


def preparing(bench: Bench, folder: Path) -> dict:
    """Encoding a file of JSON lines into a stream, against encode_batch of the same documents in memory, in turns."""
    ratios, speeds, texts, size = [], [], [], 0
    for text in documents(INSTALLED):
        texts.append(text)
        size += len(text.encode())
        if size > bench.megabytes * 1e6:
            break
    corpus = folder / "documents.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    for number in range(3):
        stream = folder / f"prepared-{number}"
        meta = prepare(Preparation(corpus=str(corpus), vocab_size=2_048, validation_fraction=0.1, stream=str(stream)),
                       quiet)
        bare = size / 1e6 / timed(partial(PackedStream(stream, 128).tokenizer.encode_batch, texts))
        ratios.append(meta["megabytes_per_second"] / bare)
        speeds.append(meta["megabytes_per_second"])
    speed = np.median(speeds)
    return {"what": f"encoding {size / 1e6:.1f} MB into a stream",
            "here": f"{speed:.1f} MB/s, {1e6 * speed / meta['bytes_per_token']:,.0f} tokens/s",
            "against": "encode_batch alone", "ratio": spread(pd.Series(ratios))}


def reading(bench: Bench, folder: Path) -> dict:
    """Rows in the global order as int64, against a copy of as many bytes, in turns."""
    config = sized(bench.shapes[0], folder, bench.device)
    stream = PackedStream(config.stream, config.seq_len)
    tokens = min(stream.meta["training_tokens"], 10**6) // config.seq_len * config.seq_len
    ratios, speeds = [], []
    for _ in range(10):
        rows = stream.read(0, tokens)
        took = timed(lambda: stream.read(0, tokens))
        ratios.append(timed(rows.copy) / took)
        speeds.append(tokens / took)
    return {"what": "reading the stream", "here": f"{np.median(speeds) / 1e6:,.0f}M tokens/s",
            "against": "copying as many bytes", "ratio": spread(pd.Series(ratios))}


def loading(bench: Bench, folder: Path) -> dict:
    """Many run directories as data frames."""
    runs, config = folder / "many", sized("tiny", folder, bench.device)
    run = train(replace(config, runs=str(runs), token_budget=50 * config.tokens_per_step), quiet)
    shutil.rmtree(run.path / "model")
    for number in range(1, bench.directories):
        shutil.copytree(run.path, run.path.with_name(f"{run.name}-{number}"))
    took = timed(lambda: load_runs(runs))
    return {"what": f"loading {bench.directories:,} runs of 50 updates", "here": f"{took:.1f} s"}


def notebook(folder: Path) -> dict:
    """An empty notebook, executed by papermill."""
    path = folder / "empty.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("pass")]), path)
    took = timed(lambda: papermill.execute_notebook(str(path), str(path), engine_name="console", kernel_name="python3",
                                                    progress_bar=False))
    return {"what": "executing an empty notebook", "here": f"{took:.1f} s"}


def main(arguments: Sequence[str]) -> None:
    """`python -m lib.bench [FILE.yaml] [name=value …]`: print the tables."""
    bench = read_arguments(Bench, arguments)
    print("  ".join(f"{name} {value}" for name, value in environment(pick_device(bench.device)).items()))
    with tempfile.TemporaryDirectory() as folder:
        rows = training(bench, Path(folder))
        print(compared(rows).to_string(index=False))
        print(payback(rows).to_string(index=False))
        for shape in bench.shapes:
            table, flops, bandwidth = update_account(sized(shape, Path(folder), bench.device))
            print(f"{shape}: {flops / 1e9:,.0f} GFLOP/s in products, {bandwidth / 1e9:,.1f} GB/s in copies")
            print(shares(table).to_string())
        print(around(bench, Path(folder)).to_string(index=False))


if __name__ == "__main__":
    command(main)
