"""The benchmark: loops that train for real, counts against closed forms, ratios against arithmetic."""

import sys
from multiprocessing import active_children

import pandas as pd
import pytest
import torch

from lib.bench import compared, main, payback, said, sized, update_account
from lib.config import command
from lib.loops import LOOPS, make
from lib.race import contender
from lib.roofline import account


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


def test_a_product_and_a_copy_are_counted():
    a, b, big = torch.ones(30, 50), torch.ones(50, 70), torch.ones(1000)
    found = account(lambda: (a @ b, big.clone(), big[10:]), flops=1e6, bandwidth=1e6)
    products, rest = found.loc["matrix products"], found.loc["elementwise and copies"]
    assert products.flops == 2 * 30 * 50 * 70
    assert products.bytes == 4 * (30 * 50 + 50 * 70 + 30 * 70)
    assert products.limit == pytest.approx(products.flops / 1e6)
    assert (rest.calls, rest.flops, rest.bytes) == (1, 0, 8000)  # a view moves nothing
    assert rest.limit == pytest.approx(0.008)


def test_an_update_has_the_models_operations(folder):
    """Against 6 a parameter and 12 · layers · D · S a token, the count that the model states.

    A row's last position has no target; and the backward pass of attention makes the scores again, a seventh product.
    """
    config = sized("tiny", folder, "cpu")
    found, _, _ = update_account(config)
    model = make(config)
    shape = model.config
    attention = 12 * shape.layers * shape.hidden_size * shape.seq_len
    head = 6 * shape.vocab_size * shape.hidden_size
    a_token = model.flops_per_token + attention / 6 - head / shape.seq_len
    assert found.flops.sum() == pytest.approx(a_token * config.tokens_per_step, rel=0.01)
    assert {"matrix products", "attention", "loss on the logits", "optimizer and norms"} <= {*found.index}
    assert (found.seconds > 0).all()


def test_a_loop_trains_in_its_turn_and_is_named_where_it_dies(folder):
    with contender("own", sized("tiny", folder, "cpu")) as turn:
        assert turn.first > 0
        updates, seconds, memory = turn(0.3)
        assert updates >= 1
        assert 0.3 <= seconds < 30
        assert memory > 10**8  # the interpreter and torch alone
        assert turn(0.0)[0] == 1
        for process in active_children():
            process.kill()
        with pytest.raises(RuntimeError, match="the own loop ended with status -9"):
            turn(0.1)


@pytest.mark.parametrize("loop", [*LOOPS][2:])  # the own one's update is the subject of other tests
def test_every_loop_learns_by_the_same_model(folder, loop, monkeypatch):
    """An update from the same weights moves every one of them, by no more than Adam's first step can: lr."""
    class Done(Exception):
        pass

    def turn():
        raise Done

    made = []
    monkeypatch.setattr("lib.loops.make", lambda config: made.append(make(config)) or made[0])
    config = sized("tiny", folder, "cpu")
    with pytest.raises(Done):
        LOOPS[loop](config, turn)
    for before, after in zip(make(config).parameters(), made[0].parameters(), strict=True):
        moved = (after - before).abs()
        assert 0 < moved.max() <= 1.02e-3  # AdamW's own lr, and a little for weight decay


def rows():
    speeds = {("off", "own"): [100, 110], ("off", "plain"): [50, 44], ("default", "own"): [200, 200],
              ("default", "plain"): [100, 100]}
    return pd.DataFrame([
        {"shape": "some", "precision": "fp32", "compile": mode, "loop": loop, "round": number, "flops_per_token": 10,
         "tokens_per_second": speed, "peak_memory": 1e6 if loop == "own" else 2e6, "peak": 4e3,
         "first": 13.0 if mode == "default" else 3.0}
        for (mode, loop), values in speeds.items() for number, speed in enumerate(values)])


def test_ratios_are_those_of_a_round():
    off, on = compared(rows()).to_dict("records")
    assert off["times the plain loop"] == "2.250 (2.000 to 2.500)"
    assert on["times the plain loop"] == "2.000 (2.000 to 2.000)"
    assert (off["of the peak"], on["of the peak"]) == ("26%", "50%")
    assert off["of the plain loop's"] == "0.50"


def test_compiling_pays_from_where_its_seconds_are_saved():
    (row,) = payback(rows()).to_dict("records")
    assert row["costs, s"] == "10"
    assert row["pays from, tokens"] == f"{10 / (1 / 105 - 1 / 200):,.0f}"


def test_it_is_said_beside_plain_float32():
    assert said(rows()) == ["some: fastest in fp32, compiled, its tokens/s 2.00 times the plain loop's and 4.26 times "
                            "the plain loop's in float32, not compiled"]


def test_the_command_prints_every_table(capsys, monkeypatch):
    main(["shapes=[tiny]", "loops=[own]", "precisions=[fp32]", "modes=['off']", "rounds=1", "seconds=0.1",
          "directories=3", "megabytes=0.1"])
    out = capsys.readouterr().out
    for words in ("first update", "matrix products", "encoding", "reading the stream", "loading 3 runs", "notebook"):
        assert words in out


@pytest.mark.parametrize("value", ["shapes=[huge]", "loops=[plain]", "rounds=0", "modes=[fast]", "loop=[own]"])
def test_a_wrong_value_is_refused(value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", value])
    with pytest.raises(SystemExit) as ended:
        command(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
