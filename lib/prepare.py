"""Data preparation: a tokenizer trained on the documents, and the documents packed into one flat file of tokens."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lib.check import require
from lib.config import Preparation, command, read_arguments, under_root
from lib.corpus import describe, documents
from lib.folder import all_or_nothing
from lib.stream import EOS, read_meta

TRAINING_BYTES = 32_000_000  # of training documents, for the tokenizer
BATCH = 1 << 20  # characters encoded at once
PIECE = 1 << 16  # characters after which a document is cut for encoding; small, so that a long one fills all cores
# The pre-tokenizer cuts here anyway, so that the pieces of a text have the tokens of the whole.
SEAM = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")


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
    with all_or_nothing(folder, "stream") as partial:
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


def main(arguments: Sequence[str]) -> None:
    """`python -m lib.prepare [FILE.yaml] [name=value …]`: prepare a stream and print its folder last."""
    preparation = read_arguments(Preparation, arguments)
    prepare(preparation)
    print(under_root(preparation.stream))


if __name__ == "__main__":
    command(main)
