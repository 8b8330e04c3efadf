"""Sampled text: what the odds are, what decides them, and the arms of a frame side by side."""

from dataclasses import replace

import pytest
import torch
from bs4 import BeautifulSoup
from scipy.stats import chisquare

from lib import report
from lib.check import BadInput
from lib.model import MiniGPT, ModelConfig
from lib.runs import frame
from lib.sample import extend, sample, samples, trained
from lib.stream import PackedStream
from lib.train import train

NONE = -1  # no token ends the text


@pytest.fixture(scope="module")
def model():
    """Far from the initial weights, so that what it writes depends on what it reads."""
    torch.manual_seed(0)
    model = MiniGPT(ModelConfig(vocab_size=400, seq_len=16, hidden_size=32, layers=2, heads=2, mlp_size=48))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def tokenizer(stream):
    return PackedStream(stream, 16).tokenizer


def test_the_likeliest_token_follows_at_temperature_0(model):
    ids = [1, 2, 3, *extend(model, [1, 2, 3], 13, 0, 0, NONE)]
    with torch.no_grad():
        likeliest = model(torch.tensor([ids]))[0].argmax(-1)
    assert ids[3:] == likeliest[2:-1].tolist()
    assert len({*ids}) > 8


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(model, temperature):
    """Chi-square over the tokens that are expected five times or more, and the rest as one."""
    draws, context = 1000, [5, 6, 7]
    with torch.no_grad():
        odds = (model(torch.tensor([context]))[0, -1].double() / temperature).softmax(-1)
    drawn = [extend(model, context, 1, temperature, seed, NONE)[0] for seed in range(draws)]
    counts = torch.bincount(torch.tensor(drawn), minlength=400)
    often = odds * draws >= 5
    assert often.sum() >= 2
    seen = [*counts[often].tolist(), counts[~often].sum().item()]
    expected = [*(odds[often] * draws).tolist(), (odds[~often] * draws).sum().item()]
    assert chisquare(seen, expected).pvalue > 1e-3


def test_a_low_temperature_comes_to_the_likeliest(model):
    assert extend(model, [9], 12, 1e-30, 3, NONE) == extend(model, [9], 12, 0, 0, NONE)


def test_the_window_slides(model):
    """What follows depends on the last `seq_len` tokens alone, however many there were."""
    ids = [4, *extend(model, [4], 60, 0, 0, NONE)]
    assert len(ids) == 61
    for start in (0, 7, 30):
        assert extend(model, ids[start:start + 16], 20, 0, 0, NONE)[:len(ids) - start - 16] == ids[start + 16:][:20]
    other = [*range(50, 90), *ids[:16]]
    assert extend(model, other, 20, 1.0, 5, NONE) == extend(model, ids[:16], 20, 1.0, 5, NONE)


def test_the_end_of_a_document_ends_the_text(model):
    free = extend(model, [4], 40, 1.0, 2, NONE)
    for end in (free[0], free[9]):
        assert extend(model, [4], 40, 1.0, 2, end) == free[:free.index(end)]


def test_a_seed_and_a_prompt_decide_the_text(model, tokenizer):
    def write(*prompts, seed=0):
        return sample(model, tokenizer, prompts, 20, 1.0, seed)

    first, second = write("abc", "de")
    assert [first, second] == write("abc", "de")
    assert [second, first] == write("de", "abc")
    assert [first] == write("abc")
    assert len({*(write("abc", seed=seed)[0] for seed in range(5))}) == 5
    assert sample(model, tokenizer, [], 20) == []


def test_nothing_else_is_drawn_from(model, tokenizer):
    state = torch.get_rng_state()
    sample(model, tokenizer, ["abc"], 5)
    assert torch.equal(state, torch.get_rng_state())


def test_an_empty_prompt_begins_a_document(model, tokenizer):
    end = tokenizer.token_to_id("<|eos|>")
    text = tokenizer.decode(extend(model, [end], 20, 1.0, 7, end))
    assert sample(model, tokenizer, [""], 20, 1.0, 7) == [text]


@pytest.mark.parametrize(("changes", "message"), [
    ({"prompts": "abc"}, "prompts = 'abc': must be a list of texts"),
    ({"tokens": 0}, "tokens = 0: must be positive"),
    ({"temperature": -0.1}, "temperature = -0.1: must be 0 or positive"),
    ({"temperature": float("nan")}, "temperature = nan: must be 0 or positive"),
    ({"temperature": float("inf")}, "temperature = inf: must be 0 or positive"),
    ({"seed": -1}, "seed = -1: must be 0 or positive"),
])
def test_what_cannot_be_sampled_is_refused(model, tokenizer, changes, message):
    with pytest.raises(BadInput, match=message):
        sample(**{"model": model, "tokenizer": tokenizer, "prompts": ["abc"], "tokens": 5} | changes)


# the arms of a frame


def test_one_run_speaks_for_its_arm(tiny, tmp_path):
    """The lowest seed with a model, then the lowest loss; an arm without a model is left out."""
    small = replace(tiny(), tokens_per_step=192)
    configs = [tiny(seed=2), tiny(seed=1), tiny(seed=1, lr=1e-4), tiny(seed=0, lr=1e30, min_lr=1e30, grad_clip=0.0),
               replace(small, seed=3), replace(small, seed=0), replace(small, tokens_per_step=96, lr=1e30, min_lr=1e30,
                                                                     grad_clip=0.0)]
    runs = [train(config, progress=lambda line: None) for config in configs]
    for path in (runs[5].path / "model").iterdir():
        path.unlink()
    (runs[5].path / "model").rmdir()
    table = frame(runs)
    assert table.status.tolist().count("diverged") == 2
    losses = table.set_index("run").validation_loss
    assert losses[runs[1].name] < losses[runs[2].name]
    prompts = ["ab", "", "c d"]
    shown = samples(table, tiny().runs, prompts, 12, 1.0, seed=4)
    speakers = sorted([runs[1], runs[4]], key=lambda run: losses[run.name])
    assert shown.index.tolist() == [(prompt, run.config.arm) for prompt in prompts for run in speakers]
    for run in speakers:
        assert shown.xs(run.config.arm, level="arm").continuation.tolist() == sample(*trained(run), prompts, 12, 1.0, 4)
    assert shown.equals(samples(table[::-1], tiny().runs, prompts, 12, 1.0, seed=4))
    assert samples(table[table.status == "diverged"], tiny().runs, prompts, 12).empty


def test_texts_reach_a_page_as_they_are(tiny):
    prompt = "<script>alert(1)</script> $x$\n    & more"
    shown = samples(frame([train(tiny(), progress=lambda line: None)]), tiny().runs, [prompt], 200)
    shown["continuation"] = "<b>bold</b>\n  " + shown["continuation"]
    page = BeautifulSoup(report.texts(shown).to_html(), "html.parser")
    assert not page.select("script, b")
    (cell,) = page.select("td")
    assert cell.get_text() == shown.continuation.item().replace("\r\n", "\n").replace("\r", "\n")
    assert page.select("th.level0.row0")[0].get_text() == prompt
    assert "white-space: pre-wrap" in page.style.get_text()
    assert {"tex2jax_ignore", "mathjax_ignore"} <= {*page.table["class"]}
