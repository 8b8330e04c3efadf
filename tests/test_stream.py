"""The stream against its documents, the library's own answers and invariances; bad input writes nothing."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import asdict
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from lib import prepare as preparing
from lib.check import BadInput
from lib.config import ROOT, Preparation
from lib.prepare import prepare, token_dtype
from lib.stream import PackedStream, read_meta

ODD = ["<|eos|>", "a <|eos|> b<|eos|>", "\r\n\t \n\n", "🜁🇵🇱 e\u0301 \x00\ufffd", "źdźbło 'll it's\u2028\u00a0x", " ",
       "x" * 700]


def make_texts(count=400, seed=0):
    """Random sentences over a small Polish vocabulary, odd documents, and a copy of each twentieth."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijkłmnóprstuwyzżź", k=draw.randint(1, 9))) for _ in range(300)]
    gaps = (" ", " ", "\n", ", ", "  ", "\n\n")
    texts = ["".join(draw.choice(words) + draw.choice(gaps) for _ in range(draw.randint(1, 60)))
             for _ in range(count)] + ODD
    return texts + texts[::20]


TEXTS = make_texts()


def write(path, texts):
    pq.write_table(pa.table({"text": texts}), path)
    return str(path)


def request(folder, **changes):
    values = {"corpus": str(folder / "a.parquet"), "stream": str(folder / "stream"), "vocab_size": 400,
              "validation_fraction": 0.2}
    return Preparation(**values | changes)


def quiet(preparation):
    return prepare(preparation, lambda line: None)


def held_out(text, fraction=0.2):
    return int(blake2b(text.encode(), digest_size=8).hexdigest(), 16) < fraction * 2**64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder / "a.parquet", TEXTS)
    quiet(request(folder))
    return folder / "stream"


@pytest.fixture
def empty(tmp_path):
    write(tmp_path / "a.parquet", TEXTS)
    return tmp_path


@pytest.fixture
def copy(folder, tmp_path):
    """A stream that a test may spoil."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def sides(folder):
    meta = read_meta(folder)
    flat = np.fromfile(folder / "tokens.bin", meta["dtype"])
    return [flat[slice(*meta["split"][side])] for side in ("train", "validation")]


def decode(folder, flat):
    """The documents of a flat array, by a tokenizer that knows nothing of ours but its file."""
    tokenizer, eos = Tokenizer.from_file(str(folder / "tokenizer.json")), read_meta(folder)["eos_id"]
    assert flat[-1] == eos
    ends = np.flatnonzero(flat == eos)
    return [tokenizer.decode(part.tolist(), skip_special_tokens=False).removesuffix("<|eos|>")
            for part in np.split(flat, ends[:-1] + 1)]


# preparing

def test_the_stream_decodes_to_its_documents_each_on_its_side(folder):
    training, validation = (decode(folder, flat) for flat in sides(folder))
    assert training == [text for text in TEXTS if not held_out(text)]
    assert validation == [text for text in TEXTS if held_out(text)]
    assert not set(training) & set(validation)
    assert set(ODD) & set(training)


def test_the_facts_are_those_of_the_file(folder):
    meta, (training, validation) = json.loads((folder / "stream.json").read_text()), sides(folder)
    data = (folder / "tokens.bin").read_bytes()
    assert meta["sha256"] == sha256(data).hexdigest()
    assert len(data) == 2 * meta["tokens"] == 2 * (len(training) + len(validation))
    assert meta["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert meta["documents"] == len(TEXTS) == sum(meta["document_lengths"])
    assert meta["validation_documents"] == sum(map(held_out, TEXTS)) == np.sum(validation == meta["eos_id"])
    assert meta["dtype"] == "uint16"
    assert meta["bytes_per_token"] == meta["bytes"] / meta["tokens"]
    assert sorted(file.name for file in folder.iterdir()) == ["stream.json", "tokenizer.json", "tokens.bin"]
    assert str(folder.parent) not in (folder / "stream.json").read_text()
    ends = np.flatnonzero(np.concatenate(sides(folder)) == meta["eos_id"])
    lengths = np.diff(ends, prepend=-1) - 1
    edges = 2 ** np.arange(len(meta["document_lengths"]) + 1)
    assert np.histogram(lengths, edges)[0].tolist() == meta["document_lengths"]


def test_the_tokenizer_is_that_of_the_library_trained_on_training_documents_only(folder):
    reference = ByteLevelBPETokenizer()
    reference.train_from_iterator([text for text in TEXTS if not held_out(text)], vocab_size=400, min_frequency=0,
                                  show_progress=False, special_tokens=["<|eos|>"])
    ours = PackedStream(folder, 8).tokenizer
    assert ours.get_vocab() == reference.get_vocab()
    for text in TEXTS:
        if "<|eos|>" not in text:
            assert ours.encode(text).ids == reference.encode(text).ids


@given(st.text())
def test_any_text_survives_the_round_trip(folder, text):
    opened = PackedStream(folder, 8)
    ids = opened.tokenizer.encode(text).ids
    assert opened.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert opened.meta["eos_id"] not in ids
    assert opened.token_bytes()[ids].sum() == len(text.encode())


@settings(max_examples=300)
@given(st.one_of(st.text(), st.text("ab1 \n\r\t\x1c\x1f\x85\u00a0\u2028.'sż<|eo>", max_size=60)))
def test_pieces_have_the_tokens_of_the_whole(folder, text):
    tokenizer = PackedStream(folder, 8).tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "PIECE", 3)
        pieces = list(preparing._pieces(text))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in tokenizer.encode(piece).ids] == tokenizer.encode(text).ids
    words = tokenizer.pre_tokenizer.pre_tokenize_str  # no merge crosses them, whatever the vocabulary
    assert [word for piece in pieces for word, _ in words(piece)] == [word for word, _ in words(text)]


def test_a_long_document_is_encoded_in_pieces_and_has_the_tokens_of_the_whole(tmp_path):
    texts = [*TEXTS, "\n".join(make_texts(10_000))]
    write(tmp_path / "a.parquet", texts)
    meta = quiet(request(tmp_path))
    assert len(texts[-1]) > 20 * preparing.PIECE
    assert max(map(len, preparing._pieces(texts[-1]))) < preparing.PIECE + 1000
    flat = sides(tmp_path / "stream")[held_out(texts[-1])]
    whole = PackedStream(tmp_path / "stream", 8).tokenizer.encode(texts[-1]).ids
    assert flat[-len(whole) - 1:].tolist() == [*whole, meta["eos_id"]]


def test_another_process_prepares_the_same_bytes(folder, tmp_path):
    write(tmp_path / "a.parquet", TEXTS)
    values = asdict(request(tmp_path))
    done = subprocess.run([sys.executable, "-m", "lib.prepare", *(f"{name}={value}" for name, value in values.items()
                           if value is not None)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == values["stream"]
    for name in ("tokens.bin", "tokenizer.json"):
        assert (tmp_path / "stream" / name).read_bytes() == (folder / name).read_bytes()
    ours, theirs = ({name: value for name, value in read_meta(path).items()
                     if name not in ("seconds", "megabytes_per_second")} for path in (folder, tmp_path / "stream"))
    assert ours == theirs


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_the_dtype_fits_the_vocabulary(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


def test_a_vocabulary_past_65_536_is_written_as_uint32(tmp_path):
    draw = np.random.default_rng(0)
    texts = [" ".join(map("".join, draw.choice(list("abcdefghijklmnop"), (400, 8)))) for _ in range(150)]
    write(tmp_path / "a.parquet", texts)
    meta = quiet(request(tmp_path, vocab_size=70_000))
    assert (meta["dtype"], meta["vocab_size"]) == ("uint32", 70_000)
    training, _ = sides(tmp_path / "stream")
    assert training.max() > 65_535
    assert decode(tmp_path / "stream", training) == [text for text in texts if not held_out(text)]
    assert PackedStream(tmp_path / "stream", 16).read(0, 32).shape == (2, 16)


# asking again

def files_of(folder):
    return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.rglob("*") if file.is_file()}


def test_asking_again_returns_at_once_and_another_preparation_overwrites_nothing(empty, monkeypatch):
    first, before = quiet(request(empty)), files_of(empty)
    monkeypatch.setattr(preparing, "_train_tokenizer", None)
    assert quiet(request(empty)) == first
    for change in ({"vocab_size": 500}, {"limit": 100}, {"validation_fraction": 0.3}):
        with pytest.raises(BadInput, match=rf"stream = .* another {next(iter(change))}, .*choose another folder"):
            quiet(request(empty, **change))
    assert files_of(empty) == before
    write(empty / "a.parquet", TEXTS[1:])
    with pytest.raises(BadInput, match=r"stream = .* another files.*choose another folder, or remove this one"):
        quiet(request(empty))


def test_a_hub_revision_may_move_on_while_the_file_stays(empty, monkeypatch):
    plain = preparing.describe
    monkeypatch.setattr(preparing, "describe", lambda *corpus: plain(*corpus) | {"revision": "one"})
    first = quiet(request(empty))
    monkeypatch.setattr(preparing, "describe", lambda *corpus: plain(*corpus) | {"revision": "two"})
    assert quiet(request(empty)) == first


@pytest.mark.parametrize("spoil", [
    lambda path: path.write_text("a file"), lambda path: path.mkdir(),
    lambda path: (path.mkdir(), (path / "thesis.tex").write_text("years of work"))], ids=["file", "empty", "other"])
def test_a_folder_that_is_no_stream_is_left_alone(empty, spoil):
    spoil(empty / "stream")
    before = files_of(empty)
    with pytest.raises(BadInput, match="stream = "):
        quiet(request(empty))
    assert files_of(empty) == before


def test_a_killed_preparation_leaves_nothing_in_the_way(empty, folder):
    code = f"""
import os, signal
from lib import prepare as preparing
from lib.config import Preparation
preparing.BATCH, batches = 2000, preparing._batches
def killed(preparation):
    for number, batch in enumerate(batches(preparation)):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
preparing._batches = killed
preparing.prepare(Preparation(**{asdict(request(empty))}))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGKILL
    assert not (empty / "stream").exists()
    assert (empty / ".stream.partial" / "validation.bin").exists()
    assert quiet(request(empty))["sha256"] == read_meta(folder)["sha256"]
    assert sorted(path.name for path in empty.iterdir()) == ["a.parquet", "stream"]


def test_two_processes_do_not_write_one_stream(empty):
    (empty / ".stream.partial").mkdir()
    other = os.open(empty / ".stream.partial", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(BadInput, match=r"stream = .* is being written by another process"):
        quiet(request(empty))
    os.close(other)
    assert quiet(request(empty))["documents"] == len(TEXTS)


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Peak memory over 32 and over 73 MB: the corpus itself would add 40 MB, its tokens as Python numbers more."""
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux tells the peak memory of a process apart from its parent's")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=80)) for _ in range(500)]
    code = ("import sys; from pathlib import Path\n"
            "from lib import prepare as preparing; from lib.config import Preparation\n"
            "preparing.TRAINING_BYTES = 2_000_000\n"
            "preparing.prepare(Preparation(corpus=sys.argv[1], stream=sys.argv[2], vocab_size=1000), str)\n"
            "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])")
    peaks = []
    for count in (8_000, 18_000):
        corpus = write(tmp_path / f"{count}.parquet", [" ".join(draw.choices(words, k=50)) for _ in range(count)])
        done = subprocess.run([sys.executable, "-c", code, corpus, str(tmp_path / str(count))], capture_output=True,
                              text=True, cwd=ROOT, check=True)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] < 500, peaks
    assert peaks[1] - peaks[0] < 25, peaks


# bad input

@pytest.mark.parametrize(("texts", "changes", "message"), [
    ([], {}, "corpus = .* must hold a document"),
    (["", None], {}, "corpus = .* must hold a document"),
    (["only one"], {}, "validation_fraction = 0.2: must leave documents on both sides"),
    (["one", "two"], {"validation_fraction": 1e-9}, "none falls to validation"),
    (["one", "two"], {"validation_fraction": 1 - 1e-9}, "none falls to training"),
    (TEXTS, {"text_column": "body"}, "text_column = 'body': must be one column of a.parquet: text"),
    (TEXTS, {"corpus": "missing.jsonl"}, "corpus = 'missing.jsonl': must be"),
    (TEXTS, {"stream": "/proc/none/stream"}, "stream = "),
    (TEXTS, {"stream": str(ROOT / "pyproject.toml" / "stream")}, "stream = "),
])
def test_bad_input_writes_nothing(tmp_path, texts, changes, message):
    write(tmp_path / "a.parquet", pa.array(texts, pa.string()))
    with pytest.raises(BadInput, match=message):
        quiet(request(tmp_path, **changes))
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_bad_input_found_late_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "TRAINING_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "{")
    with pytest.raises(BadInput, match=f"line {len(TEXTS) + 1} must be JSON"):
        quiet(request(tmp_path, corpus=str(tmp_path / "*.jsonl")))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["corpus=missing.parquet"], "error: corpus = 'missing.parquet': must be"),
    (["vocab_siz=300"], "error: vocab_siz = 300: is not a parameter of Preparation; did you mean vocab_size?"),
    (["vocab_size=5"], "error: vocab_size = 5: must be at least 257"),
])
def test_the_command_line_ends_bad_input_with_one_line(tmp_path, arguments, message):
    done = subprocess.run([sys.executable, "-m", "lib.prepare", *arguments, f"stream={tmp_path / 's'}"],
                          capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(message)
    assert not list(tmp_path.iterdir())


def spoil_json(**changes):
    def spoil(folder):
        (folder / "stream.json").write_text(json.dumps(json.loads((folder / "stream.json").read_text()) | changes))
    return spoil


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda f: (f / "stream.json").unlink(), "must be a stream folder, with a whole stream.json"),
    (lambda f: (f / "stream.json").write_text('{"tokens": 1'), "must be a stream folder, with a whole stream.json"),
    (lambda f: (f / "stream.json").write_text("[]"), "must be a stream folder, with a whole stream.json"),
    (lambda f: (f / "tokens.bin").unlink(), "must hold tokens.bin"),
    (lambda f: (f / "tokenizer.json").unlink(), "must hold tokenizer.json"),
    (lambda f: os.truncate(f / "tokens.bin", 1001), "tokens.bin must have .* bytes, not 1,001"),
    (spoil_json(vocab_size=65_537), "uint16 tokens, which a vocabulary of 65,537 does not fit"),
    (spoil_json(dtype="int8"), "must hold uint16 or uint32 tokens, not int8"),
])
def test_a_spoilt_stream_is_bad_input(copy, spoil, message):
    spoil(copy)
    with pytest.raises(BadInput, match=f"stream = .*{message}") as error:
        PackedStream(copy, 8)
    assert "\n" not in str(error.value)


def test_a_stream_must_be_there_and_hold_a_row(folder):
    meta = read_meta(folder)
    with pytest.raises(BadInput, match=r"stream = .*must be a stream folder"):
        PackedStream(folder / "missing", 8)
    with pytest.raises(BadInput, match=r"stream = .*its train split of"):
        PackedStream(folder, meta["training_tokens"] + 1)
    with pytest.raises(BadInput, match=r"stream = .*its validation split of"):
        PackedStream(folder, meta["validation_tokens"] + 1)
    assert PackedStream(folder, meta["validation_tokens"]).validation_rows() == 1


# reading

def test_an_epoch_reads_every_row_once_in_a_random_order(folder):
    opened, (flat, _) = PackedStream(folder, 16, epochs=2), sides(folder)
    rows = flat[:len(flat) // 16 * 16].reshape(-1, 16)
    assert opened.tokens == 2 * rows.size
    both = opened.read(0, opened.tokens)
    assert both.dtype == np.int64
    for epoch in np.split(both, 2):
        assert sorted(map(tuple, epoch)) == sorted(map(tuple, rows))
        assert not np.array_equal(epoch, rows)
    assert not np.array_equal(*np.split(both, 2))
    assert not np.array_equal(PackedStream(folder, 16, data_seed=1).read(0, rows.size), both[:len(rows)])
    assert np.array_equal(PackedStream(folder, 16).read(0, rows.size), both[:len(rows)])


@settings(max_examples=50)
@given(st.lists(st.integers(0, 200), max_size=60))
def test_the_order_does_not_depend_on_how_it_is_cut(folder, sizes):
    opened, cursor, parts = PackedStream(folder, 16, data_seed=3, epochs=3), 0, []
    for size in [*sizes, 10**9]:
        tokens = min(size * 16, opened.tokens - cursor)
        parts.append(opened.read(cursor, tokens))
        assert parts[-1].shape == (tokens // 16, 16)
        cursor += tokens
    assert np.array_equal(np.concatenate(parts), opened.read(0, opened.tokens))


def test_reads_are_whole_rows_within_the_stream(folder):
    opened = PackedStream(folder, 16)
    for cursor, tokens in ((8, 16), (0, 8), (-16, 16), (0, -16), (opened.tokens, 16)):
        with pytest.raises(BadInput, match="cursor, tokens = "):
            opened.read(cursor, tokens)


def test_validation_rows_lie_as_in_the_file(folder):
    opened, (_, flat) = PackedStream(folder, 16), sides(folder)
    count = opened.validation_rows()
    assert count == len(flat) // 16
    assert np.array_equal(opened.validation(0, count).ravel(), flat[:count * 16])
    assert np.array_equal(opened.validation(2, 3).ravel(), flat[32:80])
    assert opened.validation(0, 1).dtype == np.int64
    assert (opened.validation_rows(100), opened.validation_rows(10**9)) == (6, count)
