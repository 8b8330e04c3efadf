"""Documents of every kind of corpus, against what was written; the hub through its real client."""

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib import corpus
from lib.check import BadInput
from lib.config import ROOT
from lib.corpus import describe, documents

TEXTS = ["pierwszy\ndokument", "", None, "zażółć gęślą jaźń", "🜁 \u2028 \x00 <|eos|>", "pierwszy\ndokument"]
KEPT = [text for text in TEXTS if text]


def write_parquet(path: Path, texts=TEXTS, kind=None, **options) -> Path:
    """A file with the columns of the Polish data set."""
    columns = {"id": "1", "text": "", "source": "test", "added": "2025", "created": "2024", "token_count": 1,
               "license": "CC0", "author": None}
    columns = {name: [value] * len(texts) for name, value in columns.items()}
    pq.write_table(pa.table(columns | {"text": pa.array(texts, kind or pa.string())}), path, **options)
    return path


def write_lines(path: Path, records) -> Path:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(),
                                  pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_parquet_yields_what_was_written(tmp_path, kind):
    path = write_parquet(tmp_path / "a.parquet", kind=kind, row_group_size=4)
    assert list(documents(str(path))) == KEPT
    assert list(documents(str(path), limit=2)) == KEPT[:2]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_json_lines_yield_what_was_written(tmp_path, name):
    path = write_lines(tmp_path / name, [{"n": n, "body": text} for n, text in enumerate(TEXTS)])
    assert list(documents(str(path), "body")) == KEPT


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    assert list(documents(str(tmp_path / "a.jsonl"))) == ["a\ufffdb 😀"]


def test_a_glob_is_read_in_sorted_order(tmp_path):
    for name in ("c.txt", "a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    write_lines(tmp_path / "d.jsonl", [{"text": "d"}])
    assert list(documents(str(tmp_path / "*"))) == ["a.txt", "b.txt", "c.txt", "d"]
    assert [file["name"] for file in describe(str(tmp_path / "*"))["files"]] == ["a.txt", "b.txt", "c.txt", "d.jsonl"]


def test_a_text_file_is_a_document_and_a_long_one_is_cut_at_line_ends(tmp_path):
    short, long, one_line = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"
    short.write_bytes(b"one\r\ntwo \xff\n")
    assert list(documents(str(short))) == ["one\r\ntwo \ufffd\n"]
    text = "".join(f"{n} zażółć\n" for n in range(250_000))
    long.write_text(text)
    parts = list(documents(str(long)))
    assert "".join(parts) == text
    assert len(parts) == 4
    assert all(part.endswith("\n") and len(part) < corpus.CHUNK + 20 for part in parts)
    one_line.write_text("x" * 5 * corpus.CHUNK)
    assert max(map(len, documents(str(one_line)))) <= 2 * corpus.CHUNK


@pytest.mark.parametrize(("name", "content", "column", "message"), [
    ("a.csv", b"text\n", "text", "corpus = .* must end in one of"),
    ("a.parquet", b"not parquet", "text", "corpus = .* must be a readable .parquet file"),
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', "text", "corpus = .*a.jsonl'?: line 2 must be JSON"),
    ("a.jsonl", b"[1]\n", "text", "line 1 must be a JSON object"),
    ("a.jsonl", b'{"body": "a", "id": 1}\n', "text", "text_column = 'text': must be a key of .*: body, id"),
    ("a.jsonl", b'{"text": 1}\n', "text", "text_column = 'text': must be text in"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-20], "text", "must be a readable .jsonl.gz file"),
    ("a.jsonl.gz", b"plain", "text", "must be a readable .jsonl.gz file"),
])
def test_bad_files_are_bad_input(tmp_path, name, content, column, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message) as error:
        list(documents(str(tmp_path / name), column))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("column", "message"), [("body", "must be one column of a.parquet: id, text"),
                                                 ("token_count", "must hold text; in a.parquet it holds int64")])
def test_a_parquet_column_must_be_there_and_hold_text(tmp_path, column, message):
    path = write_parquet(tmp_path / "a.parquet")
    for read in (lambda: list(documents(str(path), column)), lambda: describe(str(path), column)):
        with pytest.raises(BadInput, match=f"text_column = '{column}': {message}"):
            read()


@pytest.mark.parametrize("name", ["", "missing.parquet", "missing/*.txt", "lib", "hub:owner", "hub:owner/name/a.csv"])
def test_what_names_no_file_is_bad_input(name):
    for read in (documents, describe):
        with pytest.raises(BadInput, match="corpus = "):
            read(name)


def test_a_description_names_no_machine_path_and_notices_a_change(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    before = describe(str(path))
    assert json.loads(json.dumps(before)) == before
    assert str(tmp_path) not in json.dumps(before)
    assert before["files"][0]["bytes"] == path.stat().st_size
    write_parquet(path, [*TEXTS[:-1], "inny---\ndokument"])
    assert describe(str(path)) != before
    assert describe("constraints.txt") == describe(str(ROOT / "constraints.txt"))
    assert describe("constraints.txt")["files"][0]["name"] == "constraints.txt"


def test_installed_python_is_described_by_its_versions(monkeypatch):
    packages = describe("installed-python")["packages"]
    assert packages["torch"] == metadata.version("torch")
    assert packages["python"] == sys.version.split()[0]
    monkeypatch.setattr(corpus, "PACKAGES", ("numpy", "no-such-package"))
    with pytest.raises(BadInput, match="needs the package no-such-package"):
        describe("installed-python")


def test_installed_python_holds_sources_in_random_order():
    sources = corpus._sources()
    names = [str(file) for file in sources]
    assert len(set(names)) == len(names) > 5_000
    assert {Path(json.__file__), Path(pa.__file__), Path(random.__file__)} <= set(sources)
    assert not any("transformers" in file.parts or "pip" in file.parts for file in sources)
    shares = ["sympy" in file.parts for file in sources]  # a prefix is a sample: within five standard errors
    whole, sample = sum(shares) / len(shares), sum(shares[:1000]) / 1000
    assert abs(sample - whole) < 5 * (whole * (1 - whole) / 1000) ** 0.5
    head = list(documents("installed-python", limit=50))
    assert head == [text for file in sources[:80] if (text := file.read_bytes().decode("utf-8", "replace"))][:50]


def test_the_order_does_not_depend_on_where_python_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PACKAGES", ("mpmath",))
    here = [file.read_bytes() for file in corpus._sources()]
    stdlib, site = tmp_path / "stdlib", tmp_path / "site"
    shutil.copytree(corpus.sysconfig.get_path("stdlib"), stdlib, ignore=shutil.ignore_patterns(
        "site-packages", "__pycache__", "lib-dynload", "*.so", "*.a"))
    distribution = metadata.distribution("mpmath")
    for folder in (Path(distribution.locate_file("mpmath")), Path(distribution.locate_file(distribution._path.name))):
        shutil.copytree(folder, site / folder.name)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(stdlib))
    monkeypatch.setattr(corpus, "_distribution", lambda name: metadata.Distribution.at(site / distribution._path.name))
    there = corpus._sources()
    assert all(file.is_relative_to(tmp_path) for file in there)
    assert [file.read_bytes() for file in there] == here


# the hub

COMMIT = sha1(b"commit").hexdigest()
HUB_FILE = "data/european_hplt_v3_pl/european_hplt_v3_pl.parquet"
SCRIPT = """
import json, sys
from hashlib import sha256
from lib.corpus import describe, documents
digest = sha256()
for text in documents(sys.argv[1]):
    digest.update(text.encode() + b"\\0")
print(json.dumps({"description": describe(sys.argv[1]), "sha256": digest.hexdigest()}))
"""


@pytest.fixture
def hub(tmp_path):
    """A stand-in for the hub: `files` maps a path in the repository SlayerLab/polish-dynaword to a local file."""
    files = {}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            data = files.get(self.path.removeprefix("/datasets/SlayerLab/polish-dynaword/resolve/main/"))
            self.send_response(200 if data else 404)
            self.send_header("X-Repo-Commit", COMMIT)
            if data:
                self.send_header("ETag", f'"{sha1(data.read_bytes()).hexdigest()}"')
            else:
                self.send_header("X-Error-Code", "EntryNotFound")
            body = data.read_bytes() if data else b""
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            return body

        def do_GET(self):
            self.wfile.write(self.do_HEAD())

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = files
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    server.environment = environment | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "*",
                                        "HF_HOME": str(tmp_path / "hf_home")}
    yield server
    server.shutdown()
    server.server_close()


def run(hub, *arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=hub.environment, cwd=ROOT)


def digest_of(texts) -> str:
    return sha256(b"".join(text.encode() + b"\0" for text in texts)).hexdigest()


def test_a_hub_file_is_read_through_the_real_client(hub, tmp_path):
    name = f"hub:SlayerLab/polish-dynaword/{HUB_FILE}"
    hub.files[HUB_FILE] = write_parquet(tmp_path / "generated.parquet")
    online = run(hub, "-c", SCRIPT, name)
    assert online.returncode == 0, online.stderr
    found = json.loads(online.stdout)
    assert found["sha256"] == digest_of(KEPT)
    description = found["description"]
    assert (description["repository"], description["revision"]) == ("SlayerLab/polish-dynaword", COMMIT)
    assert description["files"][0]["name"] == HUB_FILE
    assert description["files"][0]["bytes"] == hub.files[HUB_FILE].stat().st_size
    assert "license" in description["licence"]
    hub.shutdown()
    hub.server_close()
    offline = run(hub, "-c", SCRIPT, name)  # from the client's cache
    assert offline.stdout == online.stdout, offline.stderr


def test_the_polish_sample_is_read_from_the_hub(hub):
    sample = ROOT.parent / "shared" / "corpus" / "polish.parquet"
    if not sample.exists():
        pytest.skip("the sample of the Polish data set is not beside the repository")
    hub.files[HUB_FILE] = sample
    found = run(hub, "-c", SCRIPT, f"hub:SlayerLab/polish-dynaword/{HUB_FILE}")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["sha256"] == digest_of(filter(None, pq.read_table(sample)["text"].to_pylist()))


@pytest.mark.parametrize("offline", [False, True])
def test_an_unreachable_hub_file_is_one_line_of_bad_input(hub, tmp_path, offline):
    if offline:
        hub.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    impatient = "import time; time.sleep = lambda seconds: None; from lib.prepare import command, main; command(main)"
    done = run(hub, "-c", impatient, f"corpus=hub:SlayerLab/polish-dynaword/{HUB_FILE}", f"stream={tmp_path / 's'}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: corpus = 'hub:SlayerLab/polish-dynaword/")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "s").exists()
