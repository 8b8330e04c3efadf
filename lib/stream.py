"""The packed stream: one flat file of tokens, read in rows along one global order."""

import hashlib
import json
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lib.check import BadInput, require
from lib.config import under_root

EOS = "<|eos|>"  # ends a document
FACTS = {"tokens", "training_tokens", "validation_tokens", "split", "dtype", "vocab_size", "eos_id", "sha256", "corpus",
         "preparation"}


def read_meta(folder: str | Path) -> dict:
    """The stream.json of a whole stream folder. Raises BadInput where the folder is none."""
    folder = under_root(folder)

    def check(condition: bool, expected: str) -> None:
        require(condition, "stream", str(folder), expected)

    check(folder.is_dir(), "must be a stream folder; `python -m lib.prepare` prepares one")
    try:
        meta = json.loads((folder / "stream.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        meta = None
    check(isinstance(meta, dict) and meta.keys() >= FACTS,
          "must be a stream folder, with a whole stream.json; choose another, or remove it and prepare again")
    counts = [meta[name] for name in ("tokens", "training_tokens", "validation_tokens", "vocab_size", "eos_id")]
    split = {"train": [0, meta["training_tokens"]], "validation": [meta["training_tokens"], meta["tokens"]]}
    check(all(type(count) is int and count >= 0 for count in counts) and meta["split"] == split,
          "must have a stream.json whose counts and split agree; remove the folder and prepare again")
    check(meta["dtype"] in ("uint16", "uint32"), f"must hold uint16 or uint32 tokens, not {meta['dtype']}")
    itemsize = np.dtype(meta["dtype"]).itemsize
    check(meta["vocab_size"] <= 256**itemsize, f"holds {meta['dtype']} tokens, which a vocabulary of "
          f"{meta['vocab_size']:,} does not fit; prepare it again")
    for name in ("tokens.bin", "tokenizer.json"):
        check((folder / name).is_file(), f"must hold {name}; remove the folder and prepare again")
    size, whole = (folder / "tokens.bin").stat().st_size, meta["tokens"] * itemsize
    check(size == whole, f"tokens.bin must have {whole:,} bytes, not {size:,}; remove the folder and prepare again")
    digest = file_sha256(folder / "tokens.bin", size, (folder / "tokens.bin").stat().st_mtime_ns)
    check(digest == meta["sha256"], "tokens.bin must have the sha256 of its stream.json; it was changed since it was "
          "prepared: remove the folder and prepare again")
    return meta


@lru_cache(maxsize=16)
def file_sha256(path: Path, size: int, changed: int) -> str:
    """Hash of the file; `size` and the time it was `changed` (ns) are there to read it again where it did."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=4)
def row_order(rows: int, data_seed: int, epoch: int) -> np.ndarray:
    """The order of the training rows in one epoch, a permutation: int64 [rows], read-only."""
    order = np.random.Generator(np.random.PCG64([data_seed, epoch])).permutation(rows)
    order.flags.writeable = False
    return order


def read_tokenizer(folder: Path, name: str) -> Tokenizer:
    """The tokenizer in a folder; <|eos|> inside a text is text to it. Raises BadInput, naming the parameter."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise BadInput(f"{name} = {str(folder)!r}: must hold a whole tokenizer.json ({error})") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


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
        require(self.tokenizer.get_vocab_size() == self.vocab_size, "stream", str(self.folder),
                "tokenizer.json must be the one the stream was made with; prepare again")

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

    def documents(self, count: int) -> list[np.ndarray]:
        """The first whole documents of the validation split, without <|eos|>: at most `count`, those of its first rows.

        They show what the model is tested on.
        """
        flat = self._validation[:1000].reshape(-1)
        ends = np.flatnonzero(flat == self.meta["eos_id"])[:count]
        return [part[part != self.meta["eos_id"]] for part in np.split(flat, ends)[:len(ends)]]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The stream's tokenizer; <|eos|> inside a text is text to it."""
        return read_tokenizer(self.folder, "stream")

    def token_bytes(self) -> np.ndarray:
        """The bytes of UTF-8 each token stands for, 0 for <|eos|>: int64 [vocab_size]."""
        # The byte-level alphabet writes one character a byte.
        sizes = np.array([len(self.tokenizer.id_to_token(token)) for token in range(self.vocab_size)], np.int64)
        sizes[self.meta["eos_id"]] = 0
        return sizes
