"""An exported run is a stock GPT-NeoX to transformers: same logits, tokens and text; and nothing is half written."""

import errno
import json
import os
import resource
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from lib import export as exporting
from lib.check import BadInput
from lib.config import ROOT, RunConfig, command
from lib.export import export
from lib.runs import Run
from lib.sample import extend, sample, trained
from lib.stream import PackedStream
from lib.train import train

transformers = pytest.importorskip("transformers")

# Characters and spaces as they come, a combining accent, bytes that no word of the corpus has, and <|eos|> as text.
TEXTS = ["a", " ąbc  d\n\n\te", "don't <|eos|> stop", "<|eos|>", "e\u0301 ﬁ ½", "日本 🎈", "x" * 40, " ."]


@pytest.fixture(scope="module")
def run(stream, tmp_path_factory):
    """A run that has learned enough for its likeliest words to differ from prompt to prompt."""
    return train(RunConfig(
        stream=str(stream), runs=str(tmp_path_factory.mktemp("runs")), seq_len=32, hidden_size=64, layers=2, heads=2,
        mlp_size=96, rope_theta=500.0, tokens_per_step=192, device_token_capacity=192, lr=0.01, token_budget=24_000,
        skip_validation=True), progress=lambda line: None)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    """Where it was exported to."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(run, folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    """The folder as transformers loads it: the model, and its tokenizer."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert told.keys() >= {"missing_keys", "unexpected_keys", "mismatched_keys"}
    assert not any(told.values()), told
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def test_transformers_computes_the_same_logits(run, stream, theirs):
    ours, _ = trained(run)
    model, _ = theirs
    assert type(model) is transformers.GPTNeoXForCausalLM
    assert model.dtype == torch.float32
    tokens = torch.from_numpy(PackedStream(stream, 32).validation(0, 8))
    with torch.no_grad():
        logits = model(tokens).logits
        assert logits.std() > 0.5
        torch.testing.assert_close(logits, ours(tokens), rtol=0, atol=1e-4)
    assert sum(p.numel() for name, p in model.named_parameters() if "bias" not in name) == ours.parameter_count
    assert not any(p.any() for name, p in model.named_parameters() if "bias" in name)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr()


def test_the_weights_are_those_of_the_run(run, folder):
    kept, written = load_file(run.path / "model" / "model.safetensors"), load_file(folder / "model.safetensors")
    trained_ones = {name: value for name, value in written.items() if not name.endswith(".bias")}
    assert len(trained_ones) == len(kept)
    for name, value in kept.items():
        assert torch.equal(written["gpt_neox." + name.replace("dense_h_to", "mlp.dense_h_to").replace(
            "dense_4h_to", "mlp.dense_4h_to")], value)


def test_the_tokenizer_gives_the_same_tokens(run, stream, theirs):
    _, ours = trained(run)
    _, tokenizer = theirs
    packed = PackedStream(stream, 32)
    texts = TEXTS + [packed.tokenizer.decode(document) for document in packed.documents(3)]
    assert len(texts) > len(TEXTS)
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == packed.tokenizer.encode(text).ids == ours.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == packed.meta["eos_id"] not in tokenizer("a <|eos|> b")["input_ids"]
    assert tokenizer.model_max_length == 32
    assert len(tokenizer) == packed.vocab_size


def test_transformers_writes_the_same_text(run, theirs):
    ours, encoder = trained(run)
    model, tokenizer = theirs
    prompts, likely = ["a", "b ", "ą ż", "<|eos|>", "d f g", "ł", "mno", "o p"], []
    for prompt in prompts:
        given = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**given, max_new_tokens=16, do_sample=False)[0, given["input_ids"].shape[1]:].tolist()
        assert ids == extend(ours, encoder.encode(prompt).ids, 16, 0, 0, tokenizer.eos_token_id)
        likely.append(tokenizer.decode(ids))
    assert likely == sample(ours, encoder, prompts, 16, temperature=0)
    assert len({*likely}) > 3, "a model that writes the same after any prompt shows nothing"
    (ids,) = model.generate(max_new_tokens=16, do_sample=False).tolist()
    assert ids[0] == tokenizer.eos_token_id
    assert [tokenizer.decode(ids[1:])] == sample(ours, encoder, [""], 16, temperature=0)


def test_a_text_ends_where_its_document_does(run, theirs):
    """The third likeliest token stands in for <|eos|>."""
    ours, encoder = trained(run)
    model, _ = theirs
    context = encoder.encode("b ").ids
    free = extend(ours, context, 16, 0, 0, -1)
    (ids,) = model.generate(torch.tensor([context]), max_new_tokens=16, do_sample=False, eos_token_id=free[2]).tolist()
    assert ids == context + extend(ours, context, 16, 0, 0, free[2]) + [free[2]]
    assert len(ids) < len(context) + 16


# the command


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs the command line: its exit status, what it prints, and what it says on stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["export", *map(str, arguments)])
        capsys.readouterr()
        try:
            command(exporting.main)
        except SystemExit as ended:
            return ended.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


@pytest.fixture
def refused(said, contents, tmp_path):
    """Has the command refuse these arguments in one line, which it returns, with all left as it was."""

    def words(*arguments):
        before = contents(tmp_path)
        status, out, err = said(*arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert contents(tmp_path) == before
        return err

    return words


@pytest.fixture
def own(run, tmp_path):
    """A copy of the run, to spoil."""
    return Run(shutil.copytree(run.path, tmp_path / "runs" / run.name))


@pytest.mark.parametrize("there", [False, True])
def test_the_command_writes_the_same_folder(run, folder, said, tmp_path, there):
    target = tmp_path / "new" / "model"
    if there:
        target.mkdir(parents=True)
    assert said(run.path, target) == (0, f"{target}\n", "")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()}
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_run_is_found_by_its_name(run, said, tmp_path, monkeypatch):
    """Whatever the folder it is called from."""
    monkeypatch.setattr("lib.config.ROOT", run.path.parent.parent)
    run.path.parent.rename(run.path.parent.with_name("runs"))
    monkeypatch.chdir(tmp_path)
    try:
        for name in (run.name, f"runs/{run.name}"):
            assert said(name, tmp_path / name.replace("/", "-"))[0] == 0
    finally:
        (run.path.parent.with_name("runs")).rename(run.path.parent)


@pytest.mark.parametrize("arguments", [(), ("one",), ("a", "b", "c")])
def test_other_than_two_arguments_are_refused(refused, arguments):
    assert "must be a run and the folder to write" in refused(*arguments)


def test_what_is_no_run_is_refused(refused, tmp_path):
    for name in (tmp_path, "no-such-run", "", ROOT / "lib"):
        assert refused(name, tmp_path / "out").startswith("error: run = ")


@pytest.mark.parametrize("fill", [
    lambda path: path.write_text("mine"), lambda path: (path.mkdir(), (path / "thesis.tex").write_text("mine")),
    lambda path: (path.mkdir(), (path / ".hidden").mkdir())], ids=["file", "folder", "hidden"])
def test_a_folder_that_holds_something_is_refused(run, refused, tmp_path, fill):
    fill(tmp_path / "out")
    assert "folder = " in (words := refused(run.path, tmp_path / "out"))
    assert "must not be there yet, or be an empty folder" in words


def test_a_folder_below_a_file_is_refused(run, refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "folder = " in refused(run.path, tmp_path / "file" / "out")


def test_a_run_that_was_interrupted_is_refused(tiny, ctrl_c, refused, tmp_path):
    with ctrl_c(3):
        train(tiny(), progress=lambda line: None)
    (path,) = (tmp_path / "runs").iterdir()
    assert f"{path.name}" in (words := refused(path, tmp_path / "out"))
    assert "must have been trained to its end; it is interrupted" in words


def test_a_run_that_diverged_is_refused(tiny, refused, tmp_path):
    run = train(tiny(lr=1e30, min_lr=1e30, grad_clip=0.0), progress=lambda line: None)
    assert "it is diverged" in refused(run.path, tmp_path / "out")


def test_a_run_that_failed_is_refused(tiny, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("lib.step.Learner.evaluate", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny(), progress=lambda line: None)
    (path,) = (tmp_path / "runs").iterdir()
    assert "it is failed" in refused(path, tmp_path / "out")


def test_a_run_that_never_ended_is_refused(own, refused, tmp_path):
    (own.path / "run_meta.json").unlink()
    assert "it is not ended" in refused(own.path, tmp_path / "out")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("spoil", ["gone", "cut"])
def test_a_model_that_is_not_whole_is_refused(own, refused, tmp_path, name, spoil):
    file = own.path / "model" / name
    if spoil == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    assert refused(own.path, tmp_path / "out").startswith("error: run = ")


def test_a_tokenizer_of_another_model_is_refused(own, refused, tmp_path):
    file = own.path / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"].pop(max(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get))
    tokenizer["model"]["merges"].pop()
    file.write_text(json.dumps(tokenizer))
    assert "must hold the tokenizer of its model: 400 tokens" in refused(own.path, tmp_path / "out")


@pytest.mark.parametrize("size", [0, 300, 10_000])  # config.json has 0.6 kB, the model some 0.3 MB
def test_a_full_disk_leaves_nothing(run, said, tmp_path, size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        status, out, err = said(run.path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (status, out) == (1, "")
    assert err == f"error: {tmp_path / 'out'}: {os.strerror(errno.EFBIG)}; nothing of it is left\n"
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_another_process_fills_meanwhile_stays(run, tmp_path, monkeypatch):
    """It comes in just before this one is put in its place."""
    def write(path, data):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").write_text("theirs")
        path.write_bytes(data)

    monkeypatch.setattr(exporting, "write_whole", write)
    with pytest.raises(BadInput, match="folder = "):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]
