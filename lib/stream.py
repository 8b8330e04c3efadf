"""The packed stream: a tokenizer trained on the documents, one flat file of tokens, and rows in one global order."""

import fcntl
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, lru_cache
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lib.check import BadInput, require
from lib.config import Preparation, command, read_arguments, under_root
from lib.corpus import describe, documents

EOS = "<|eos|>"
TRAINING_BYTES = 32_000_000  # of training documents, for the tokenizer
BATCH = 1 << 20  # characters encoded at once
PIECE = 1 << 16  # characters after which a document is cut for encoding; small, so that a long one fills all cores
# The pre-tokenizer cuts here anyway, so that the pieces of a text have the tokens of the whole.
SEAM = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")
FACTS = {"tokens", "split", "dtype", "vocab_size", "eos_id", "sha256", "corpus", "preparation"}


def prepare(preparation: Preparation, progress: Callable[[str], object] = print) -> dict:
    """Write the stream folder, all or nothing, and return its stream.json; a finished one is returned at once.

    Raises BadInput for a corpus that cannot be read or split, and for a folder that holds anything else.
    """
    folder = under_root(preparation.stream)
    corpus = describe(preparation.corpus, preparation.text_column)
    request = {name: value for name, value in asdict(preparation).items() if name not in ("corpus", "stream")}
    if folder.exists():
        return _finished(folder, corpus, request)
    begin = time.perf_counter()
    tokenizer, tokenizer_bytes = _train_tokenizer(preparation)  # still in memory: bad input writes nothing
    with _all_or_nothing(folder) as partial:
        if folder.exists():  # another process was faster
            return _finished(folder, corpus, request)
        facts = _encode(preparation, tokenizer, partial, progress)
        facts |= {"tokenizer_bytes": tokenizer_bytes, "corpus": corpus, "preparation": request,
                  "seconds": round(time.perf_counter() - begin, 3)}
        tokenizer.save(str(partial / "tokenizer.json"))
        (partial / "stream.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return read_meta(folder)


def _finished(folder: Path, corpus: dict, request: dict) -> dict:
    meta = read_meta(folder)
    made = meta["corpus"] | meta["preparation"]
    for name, wanted in (corpus | request).items():
        # A hub repository may move on to another revision while the file stays as it is.
        require(name == "revision" or wanted == made.get(name), "stream", str(folder), f"holds a stream with another "
                f"{name}, {str(made.get(name))[:80]}; choose another folder, or remove this one")
    return meta


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """A sibling folder, locked against other processes, that takes the place of `folder` when the block ends well."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise BadInput(f"stream = {str(folder)!r}: must be a folder that can be made ({error})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BadInput(f"stream = {str(folder)!r}: is being written by another process; wait for it") from None
    try:
        for stale in partial.glob("*"):  # of a preparation that was killed
            stale.unlink()
        yield partial
        if not folder.exists():
            for file in (*partial.iterdir(), partial):
                _sync(file)
            partial.rename(folder)
            _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _split(preparation: Preparation) -> Iterator[tuple[str, int, bool]]:
    """Documents as (text, bytes of UTF-8, held out). The text alone decides, so equal documents stay together."""
    for text in documents(preparation.corpus, preparation.text_column, preparation.limit):
        data = text.encode()
        share = int.from_bytes(blake2b(data, digest_size=8).digest(), "big") / 2**64
        yield text, len(data), share < preparation.validation_fraction


def _check_sides(preparation: Preparation, training: int, validation: int) -> None:
    require(training + validation > 0, "corpus", preparation.corpus, "must hold a document that is not empty")
    for side, count in (("training", training), ("validation", validation)):
        require(count > 0, "validation_fraction", preparation.validation_fraction,
                f"must leave documents on both sides; of {training + validation:,} none falls to {side}")


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of about PIECE characters where its seams allow."""
    start = 0
    while len(text) - start > PIECE and (seam := SEAM.search(text, start + PIECE)):
        yield text[start:seam.start()]
        start = seam.start()
    yield text[start:]


def _train_tokenizer(preparation: Preparation) -> tuple[Tokenizer, int]:
    """A byte-level BPE tokenizer of the first TRAINING_BYTES of training documents, and the bytes it saw."""
    seen, sides = 0, Counter()

    def texts() -> Iterator[str]:
        nonlocal seen
        for text, _, held_out in _split(preparation):
            sides[held_out] += 1
            for piece in () if held_out else _pieces(text):
                yield piece
                seen += len(piece.encode())
                if seen >= TRAINING_BYTES:
                    return
        _check_sides(preparation, sides[False], sides[True])

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(
        vocab_size=preparation.vocab_size, special_tokens=[EOS], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.encode_special_tokens = True  # <|eos|> inside a document is text
    return tokenizer, seen


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type of a stream's tokens: uint16, or uint32 past a vocabulary of 65,536."""
    return np.dtype("uint16" if vocab_size <= 2**16 else "uint32").newbyteorder("<")


def _batches(preparation: Preparation) -> Iterator[list[tuple[str, int, bool]]]:
    """Pieces as (text, bytes of the document that ends with it or 0, held out), about BATCH characters at a time."""
    batch, size = [], 0
    for text, count, held_out in _split(preparation):
        left = len(text)
        for piece in _pieces(text):
            left, size = left - len(piece), size + len(piece)
            batch.append((piece, 0 if left else count, held_out))
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    yield batch


def _encode(preparation: Preparation, tokenizer: Tokenizer, folder: Path, progress: Callable[[str], object]) -> dict:
    """Write tokens.bin, training tokens first, and return its facts."""
    vocab_size, eos = tokenizer.get_vocab_size(), tokenizer.token_to_id(EOS)
    dtype, digest = token_dtype(vocab_size), sha256()
    count, tokens = [0, 0], [0, 0]  # documents and tokens of the two sides: training, validation
    lengths, length, read = Counter(), 0, 0
    begin = shown = time.perf_counter()

    def report(now: float) -> None:
        progress(f"{read / 1e6:,.1f} MB read, {sum(tokens):,} tokens, {read / 1e6 / (now - begin):.1f} MB/s")

    held = folder / "validation.bin"
    with (folder / "tokens.bin").open("wb") as training, held.open("w+b") as validation:
        for batch in _batches(preparation):
            encodings = tokenizer.encode_batch_fast([piece for piece, _, _ in batch])
            for (_, ending, held_out), encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids
                length += len(ids)
                if ending:
                    ids.append(eos)
                    lengths[length.bit_length() - 1] += 1
                    count[held_out] += 1
                    read, length = read + ending, 0
                tokens[held_out] += len(ids)
                data = np.array(ids, dtype).tobytes()
                (validation if held_out else training).write(data)
                if not held_out:
                    digest.update(data)
            if (now := time.perf_counter()) - shown > 10:
                report(shown := now)
        _check_sides(preparation, *count)
        validation.seek(0)
        while data := validation.read(BATCH):
            training.write(data)
            digest.update(data)
    held.unlink()
    report(now := time.perf_counter())
    return {
        "documents": sum(count), "training_documents": count[0], "validation_documents": count[1],
        "tokens": sum(tokens), "training_tokens": tokens[0], "validation_tokens": tokens[1],
        "split": {"train": [0, tokens[0]], "validation": [tokens[0], sum(tokens)]},
        "bytes": read, "bytes_per_token": read / sum(tokens), "megabytes_per_second": read / 1e6 / (now - begin),
        "document_lengths": [lengths[power] for power in range(max(lengths) + 1)],  # of 2**k to 2**(k + 1) - 1 tokens
        "dtype": dtype.name, "vocab_size": vocab_size, "eos_id": eos, "sha256": digest.hexdigest(),
    }


def read_meta(folder: str | Path) -> dict:
    """The stream.json of a whole stream folder. Raises BadInput where the folder is none."""
    folder = under_root(folder)

    def check(condition: bool, expected: str) -> None:
        require(condition, "stream", str(folder), expected)

    check(folder.is_dir(), "must be a stream folder; `python -m lib.stream` prepares one")
    try:
        meta = json.loads((folder / "stream.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        meta = None
    check(isinstance(meta, dict) and meta.keys() >= FACTS,
          "must be a stream folder, with a whole stream.json; choose another, or remove it and prepare again")
    check(meta["dtype"] in ("uint16", "uint32"), f"must hold uint16 or uint32 tokens, not {meta['dtype']}")
    itemsize = np.dtype(meta["dtype"]).itemsize
    check(meta["vocab_size"] <= 256**itemsize, f"holds {meta['dtype']} tokens, which a vocabulary of "
          f"{meta['vocab_size']:,} does not fit; prepare it again")
    for name in ("tokens.bin", "tokenizer.json"):
        check((folder / name).is_file(), f"must hold {name}; remove the folder and prepare again")
    size, whole = (folder / "tokens.bin").stat().st_size, meta["tokens"] * itemsize
    check(size == whole, f"tokens.bin must have {whole:,} bytes, not {size:,}; remove the folder and prepare again")
    return meta


@lru_cache(maxsize=4)
def row_order(rows: int, data_seed: int, epoch: int) -> np.ndarray:
    """The order of the training rows in one epoch, a permutation: int64 [rows], read-only."""
    order = np.random.Generator(np.random.PCG64([data_seed, epoch])).permutation(rows)
    order.flags.writeable = False
    return order


class PackedStream:
    """Rows of `seq_len` tokens of a stream folder: training in one global order, validation as it lies.

    Attributes: `tokens` (training tokens to read, over all epochs), `vocab_size`, `sha256`, `meta` (stream.json).
    Raises BadInput, naming `stream`, for a folder that is no whole stream or too short for a row.
    """

    def __init__(self, folder: str | Path, seq_len: int, data_seed: int = 0, epochs: int = 1):
        self.folder, self.seq_len, self.data_seed, self.epochs = under_root(folder), seq_len, data_seed, epochs
        self.meta = read_meta(self.folder)
        self.vocab_size, self.sha256 = self.meta["vocab_size"], self.meta["sha256"]
        dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        flat = np.asarray(np.memmap(self.folder / "tokens.bin", dtype, "r"))
        self._train, self._validation = (self._rows(flat, side) for side in ("train", "validation"))
        self.tokens = self._train.size * epochs

    def _rows(self, flat: np.ndarray, side: str) -> np.ndarray:
        start, end = self.meta["split"][side]
        rows = (end - start) // self.seq_len  # the ragged tail is dropped
        require(rows > 0, "stream", str(self.folder), f"its {side} split of {end - start:,} tokens must hold "
                f"at least one row of seq_len {self.seq_len:,}; prepare more documents or shorten seq_len")
        return flat[start:start + rows * self.seq_len].reshape(rows, self.seq_len)

    def read(self, cursor: int, tokens: int) -> np.ndarray:
        """The `tokens` training tokens at `cursor` in the global order: int64 [tokens / seq_len, seq_len].

        The order is one permutation of the rows an epoch and does not depend on how it is cut into reads.
        """
        require(cursor % self.seq_len == 0 and tokens % self.seq_len == 0, "cursor, tokens", (cursor, tokens),
                f"must be multiples of seq_len {self.seq_len:,}")
        require(0 <= cursor <= cursor + tokens <= self.tokens, "cursor, tokens", (cursor, tokens),
                f"must stay within the {self.tokens:,} tokens of {self.epochs} epochs")
        rows = len(self._train)
        first, last = cursor // self.seq_len, (cursor + tokens) // self.seq_len
        parts = [row_order(rows, self.data_seed, epoch)[max(first - epoch * rows, 0):last - epoch * rows]
                 for epoch in range(first // rows, -(-last // rows))]
        return self._train[np.concatenate(parts or [np.empty(0, np.int64)])].astype(np.int64)

    def validation_rows(self, limit_tokens: int | None = None) -> int:
        """The number of validation rows, or of those within the first `limit_tokens`."""
        rows = len(self._validation)
        return rows if limit_tokens is None else min(rows, limit_tokens // self.seq_len)

    def validation(self, start_row: int, rows: int) -> np.ndarray:
        """Validation rows as they lie in the file: int64 [rows, seq_len]; fewer at the end."""
        return self._validation[start_row:start_row + rows].astype(np.int64)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The stream's tokenizer; <|eos|> inside a text is text to it."""
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokenizer.encode_special_tokens = True
        return tokenizer

    def token_bytes(self) -> np.ndarray:
        """The bytes of UTF-8 each token stands for, 0 for <|eos|>: int64 [vocab_size]."""
        # The byte-level alphabet writes one character a byte.
        sizes = np.array([len(self.tokenizer.id_to_token(token)) for token in range(self.vocab_size)], np.int64)
        sizes[self.meta["eos_id"]] = 0
        return sizes


def main(arguments: Sequence[str]) -> None:
    """`python -m lib.stream [FILE.yaml] [name=value …]`: prepare a stream and print its folder last."""
    preparation = read_arguments(Preparation, arguments)
    prepare(preparation)
    print(under_root(preparation.stream))


if __name__ == "__main__":
    command(main)
