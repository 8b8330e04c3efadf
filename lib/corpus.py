"""Documents, one string at a time: from the Hugging Face hub, local files, or the installed Python sources."""

import gzip
import json
import logging
import os
import platform
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from glob import glob
from hashlib import blake2b
from importlib import metadata
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download

from lib.check import BadInput, require
from lib.config import ROOT, under_root

INSTALLED = "installed-python"
# Pinned by constraints.txt, so that the corpus is the same wherever the repository is installed.
PACKAGES = ("torch", "sympy", "pandas", "scipy", "numpy", "matplotlib", "networkx", "fonttools", "Pygments",
            "huggingface-hub", "pyarrow", "ipython", "tornado", "mpmath", "jupyter-server", "jupyterlab")
ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".txt")
HUB = re.compile(r"hub:(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")
CHUNK = 1 << 20  # characters of text file in one document; bytes of each end in a fingerprint


def documents(corpus: str, text_column: str = "text", limit: int = 0) -> Iterator[str]:
    """The non-empty documents of a corpus in a fixed order: the first `limit`, or all for 0. Raises BadInput.

    `corpus` is `installed-python`, `hub:OWNER/NAME/path/in/repo.parquet` (`OWNER/NAME@REVISION` pins a commit), or a
    path or glob of .parquet, .jsonl, .jsonl.gz and .txt files, in sorted order. Memory holds about one document.
    """
    if corpus == INSTALLED:
        texts = (file.read_bytes().decode("utf-8", "replace") for file in _sources())
    else:
        texts = (text for file in _files(corpus) for text in _texts(file, text_column))
    return islice(filter(None, texts), limit or None)


def describe(corpus: str, text_column: str = "text") -> dict:
    """What identifies a corpus, and a note on its licence, as JSON values without machine paths.

    Raises BadInput for all that is wrong with the corpus and can be known without reading it whole.
    """
    if corpus == INSTALLED:
        packages = {"python": platform.python_version()} | {name: _distribution(name).version for name in PACKAGES}
        return {"corpus": corpus, "packages": packages, "licence": "each package under its own licence"}
    files = _files(corpus)
    columns = [_columns(file, text_column) for file in files]
    hub = HUB.fullmatch(corpus)
    path = Path(corpus).expanduser()
    inside = all(file.is_relative_to(ROOT) for file in files)
    base = ROOT if inside else Path(os.path.commonpath([file.parent for file in files]))
    names = [hub["file"]] if hub else [file.relative_to(base).as_posix() for file in files]
    if not hub and path.is_absolute():
        corpus = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    licence = f"see the card of the data set {hub['repo']}" if hub else "the files' own"
    if any("license" in names for names in columns):
        licence += "; each row names its licence in the column `license`"
    return ({"corpus": corpus}
            | ({"repository": hub["repo"], "revision": _commit(files[0], hub["file"])} if hub else {})
            | {"files": [{"name": name} | _fingerprint(file) for name, file in zip(names, files, strict=True)],
               "licence": licence})


# installed-python

def _sources() -> list[Path]:
    """The Python files of the standard library and of PACKAGES; every prefix is a random sample of them."""
    library = Path(sysconfig.get_path("stdlib"))
    # The names Python lists hold on every platform; others hold site-packages, tests and this machine's build.
    roots = (library / name for name in sys.stdlib_module_names)
    stdlib = [file for root in roots for file in (*root.rglob("*.py"), root.with_suffix(".py")) if file.is_file()]
    found = [("python", file.relative_to(library).as_posix(), file) for file in stdlib]
    for name in PACKAGES:
        found += [(name, file.as_posix(), Path(file.locate())) for file in _distribution(name).files
                  if file.suffix == ".py" and file.parts[0] != ".."]
    return [file for *name, file in sorted(found, key=lambda entry: blake2b("/".join(entry[:2]).encode()).digest())]


def _distribution(name: str) -> metadata.Distribution:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        found = None
    require(found is not None and found.files is not None, "corpus", INSTALLED,
            f"needs the package {name} with its list of files; install with pip, or name another corpus")
    return found


# files

def _files(corpus: str) -> list[Path]:
    if corpus.startswith("hub:"):
        return [_download(corpus)]
    path = Path(os.path.normpath(under_root(corpus, "corpus")))
    files = [path] if path.is_file() else sorted(f for f in map(Path, glob(str(path), recursive=True)) if f.is_file())
    require(files, "corpus", corpus, f"must be {INSTALLED}, hub:OWNER/NAME/path.parquet, or a path or glob that "
            f"matches files ending in {', '.join(ENDINGS)}; a relative one counts from the repository")
    for file in files:
        require(file.name.endswith(ENDINGS), "corpus", str(file), f"must end in one of {', '.join(ENDINGS)}")
    return files


@lru_cache  # one revision a process, however often its documents are read
def _download(corpus: str) -> Path:
    hub = HUB.fullmatch(corpus)
    require(hub is not None, "corpus", corpus, "must have the form hub:OWNER/NAME/path/in/repo.parquet")
    require(hub["file"].endswith(ENDINGS), "corpus", corpus, f"must end in one of {', '.join(ENDINGS)}")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns at every retry; the end is told below
    try:
        return Path(hf_hub_download(hub["repo"], hub["file"], repo_type="dataset", revision=hub["revision"]))
    except Exception as error:  # the client passes on whatever its HTTP library raises
        reason = " ".join(str(error).split())
        raise BadInput(f"corpus = {corpus!r}: must be a file of a data set on the hub that can be reached "
                       f"({type(error).__name__}: {reason[:300]})") from None


def _commit(file: Path, name: str) -> str:
    """The resolved commit: the client's cache is snapshots/COMMIT/path/in/repo."""
    return file.parents[name.count("/")].name


def _fingerprint(file: Path) -> dict:
    """Size and a hash of both ends: enough to notice a changed file at once, whatever its size."""
    with _readable(file), file.open("rb") as data:
        size, head = file.stat().st_size, data.read(CHUNK)
        data.seek(max(size - CHUNK, 0))
        return {"bytes": size, "fingerprint": blake2b(head + data.read(CHUNK), digest_size=16).hexdigest()}


@contextmanager
def _readable(file: Path):
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"corpus = {str(file)!r}: must be a readable {_ending(file)} file ({reason[:300]})") from None


def _ending(file: Path) -> str:
    return next(ending for ending in ENDINGS if file.name.endswith(ending))


def _columns(file: Path, text_column: str) -> list[str]:
    """The names of a file's columns, none for plain text. Raises BadInput where `text_column` is not text."""
    if _ending(file) == ".txt":
        return []
    if _ending(file) == ".parquet":
        with _readable(file):
            schema = pq.read_schema(file)
        require(schema.names.count(text_column) == 1, "text_column", text_column,
                f"must be one column of {file.name}: {', '.join(schema.names)}")
        kind = schema.field(text_column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        require(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind),
                "text_column", text_column, f"must hold text; in {file.name} it holds {kind}")
        return schema.names
    return [name for record in islice(_records(file, text_column), 1) for name in record]


def _texts(file: Path, text_column: str) -> Iterator[str | None]:
    match _ending(file):
        case ".parquet":
            return _parquet(file, text_column)
        case ".txt":
            return _plain(file)
        case _:
            return _lines(file, text_column)


def _parquet(file: Path, text_column: str) -> Iterator[str | None]:
    _columns(file, text_column)
    # A buffer makes the reader decode page by page; without one it holds a whole column chunk.
    with _readable(file), pq.ParquetFile(file, buffer_size=CHUNK, pre_buffer=False) as table:
        for batch in table.iter_batches(batch_size=4, columns=[text_column], use_threads=False):
            for data in batch.column(0).cast(pa.large_binary()):
                yield data.as_py().decode("utf-8", "replace") if data.is_valid else None


def _lines(file: Path, text_column: str) -> Iterator[str | None]:
    for record in _records(file, text_column):
        if (text := record[text_column]) is not None:
            # JSON may hold half a surrogate pair, which is no text and which UTF-8 cannot say.
            yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _records(file: Path, text_column: str) -> Iterator[dict]:
    opener = gzip.open if _ending(file) == ".jsonl.gz" else open
    with _readable(file), opener(file, "rt", encoding="utf-8-sig", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file.name}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"corpus = {str(file)!r}: line {number} must be JSON ({error})") from None
            require(isinstance(record, dict), "corpus", str(file), f"line {number} must be a JSON object")
            require(text_column in record, "text_column", text_column, f"must be a key of {where}: {', '.join(record)}")
            require(isinstance(record[text_column], str | None), "text_column", text_column, f"must be text in {where}")
            yield record


def _plain(file: Path) -> Iterator[str]:
    """A text file as one document; a longer one as documents of about a megabyte that end where a line does."""
    with _readable(file), file.open(encoding="utf-8-sig", errors="replace", newline="\n") as lines:
        while text := lines.read(CHUNK):
            yield text + lines.readline(CHUNK)  # bounded, for files without lines
