"""Text to token shards, and the readers of those shards. `data` makes samples of them. numpy; no torch.

A corpus is a directory: shards, each described by its own header, and `corpus.json`, which names them all.

    my-corpus/
      corpus.json            what every shard shares (see `Corpus`) and, per shard, its file and its two counts
      shard-00000.tokens     documents in the order they were read, none cut in two

It is written in a hidden directory beside its place, then renamed. So a corpus that is there is complete; one without
`corpus.json` is half of a copy and readers refuse it. A shard, all numbers little-endian:

    bytes                        content
    0 .. 4095                    JSON, then spaces, then a newline: format, version, token_bytes, num_tokens,
                                 num_documents, vocab_size, eos_id, tokenizer_sha256. `head -1` shows it
    4096 ..                      num_tokens ids of 2 bytes each, of 4 for a vocabulary above 65,536
    the next multiple of 8 ..    num_documents + 1 offsets of 8 bytes: where each document begins, in tokens of this
                                 shard; the last one is num_tokens

A document is the tokenizer's ids of its text and exactly one EOS: no post-processor runs, and text that spells a
special token is text. Making one costs the tokenizer's own speed, about 1 M tokens/s and core. Worked example: "ab" and
"c" with ids a=0 b=1 c=2 eos=3 give tokens 0 1 3 2 3 and offsets 0 3 5; the shard has 4096 + 10 bytes, 6 of padding and
24 of offsets.
"""

import codecs
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
import shutil
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import zstandard
from pydantic_core import from_json
from tokenizers import Tokenizer

from pithtrain.errors import DataError, me

Ids = npt.NDArray[np.integer[Any]]

FORMAT = "pithtrain tokens"
VERSION = 1
HEADER_BYTES = 4096
MANIFEST = "corpus.json"
EOS = "<|endoftext|>"
SUFFIXES = (".md", ".py", ".rst", ".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")
SHARD_TOKENS = 2**27  # 256 MiB at 2 bytes: few files for a large corpus, quick to copy one
BATCH_CHARACTERS = 2**22  # encoded at once, on all cores


@dataclass(frozen=True)
class Vocabulary:
    """What the ids of a corpus mean: equal in all its shards, checked against the run's tokenizer and model."""

    vocab_size: int  # largest id of the tokenizer + 1
    eos_id: int
    tokenizer_sha256: str  # of the bytes of tokenizer.json

    @property
    def token_bytes(self) -> int:
        return 2 if self.vocab_size <= 2**16 else 4


@dataclass(frozen=True)
class Shard:
    """One file of tokens. Nothing is read before it is asked for; the arrays are memory-mapped."""

    path: Path
    vocabulary: Vocabulary
    num_tokens: int
    num_documents: int

    @property
    def offsets_at(self) -> int:
        """Byte where the document offsets begin."""
        return HEADER_BYTES + -(-self.num_tokens * self.vocabulary.token_bytes // 8) * 8

    @property
    def num_bytes(self) -> int:
        return self.offsets_at + 8 * (self.num_documents + 1)

    def header(self) -> bytes:
        """The first HEADER_BYTES of the file."""
        fields = _header(self.vocabulary, num_tokens=self.num_tokens, num_documents=self.num_documents)
        return json.dumps(fields).encode().ljust(HEADER_BYTES - 1) + b"\n"

    def check(self) -> None:
        """Raises DataError unless the file has its size, its header agrees, and its documents lie behind each other."""
        self.check_size()
        with self.path.open("rb") as file:
            if file.read(HEADER_BYTES) != self.header():
                raise DataError(f"{self.path}: its header and the {MANIFEST} beside it disagree; copy the corpus again")
        offsets = self.offsets()
        if offsets[0] != 0 or offsets[-1] != self.num_tokens or (offsets[1:] < offsets[:-1]).any():
            rule = f"its document offsets do not rise from 0 to {self.num_tokens:,}"
            raise DataError(f"{self.path}: {rule}; the file is damaged, copy it again or tokenize again")

    def check_size(self) -> None:
        """The same without reading: costs a stat."""
        with _refuse(f"{self.path}: cannot read this shard", OSError):
            found = self.path.stat().st_size
        if found != self.num_bytes:
            raise DataError(
                f"{self.path}: has {found:,} bytes, but {self.num_tokens:,} tokens of {self.vocabulary.token_bytes} "
                f"bytes in {self.num_documents:,} documents take {self.num_bytes:,}; it was cut short, copy it again"
            )

    def tokens(self) -> Ids:
        """All ids, [num_tokens], uint16 or uint32."""
        return np.memmap(self.path, f"<u{self.vocabulary.token_bytes}", "r", HEADER_BYTES, (self.num_tokens,))

    def offsets(self) -> Ids:
        """Where documents begin, [num_documents + 1], uint64."""
        return np.memmap(self.path, "<u8", "r", self.offsets_at, (self.num_documents + 1,))

    def documents(self) -> Iterator[Ids]:
        """The ids of each document, EOS included."""
        tokens = self.tokens()
        for first, last in itertools.pairwise(self.offsets().tolist()):
            yield tokens[first:last]


@dataclass(frozen=True)
class Corpus:
    """A complete corpus, as its `corpus.json` describes it."""

    path: Path
    vocabulary: Vocabulary
    num_tokens: int
    num_documents: int
    empty_documents: int  # skipped when it was made
    shards: tuple[Shard, ...]


def open_corpus(path: Path) -> Corpus:
    """The corpus in directory `path`. Raises DataError when it is missing, incomplete or a shard was cut short. Costs
    one small file and a stat per shard; the shards' headers are read when they are mapped."""
    if not path.is_dir():
        raise DataError(f"{path}: there is no corpus here; `{me()} tokenize` makes one")
    manifest = path / MANIFEST
    if not manifest.exists():
        found = f"{len(list(path.glob('*.tokens')))} shards and no {MANIFEST}"
        raise DataError(f"{path}: this corpus is incomplete: {found}; copy it whole or make it again")
    with _refuse(f"{manifest}: is not JSON, copy it again", ValueError):
        fields: dict[str, Any] = json.loads(manifest.read_bytes())
    with _refuse(f"{manifest}: is no description of a corpus, copy it again", KeyError, TypeError, AttributeError):
        found = fields.get("format"), fields.get("version")
        if found != (FORMAT, VERSION):
            raise DataError(f"{manifest}: is in format {found}, this version reads {(FORMAT, VERSION)}")
        vocabulary = Vocabulary(fields["vocab_size"], fields["eos_id"], fields["tokenizer_sha256"])
        shards = [Shard(path / s["file"], vocabulary, s["num_tokens"], s["num_documents"]) for s in fields["shards"]]
        counts = fields["num_tokens"], fields["num_documents"], fields["empty_documents"]
        for shard in shards:
            shard.check_size()
    return Corpus(path, vocabulary, *counts, tuple(shards))


@contextlib.contextmanager
def _refuse(rule: str, *kinds: type[Exception]) -> Generator[None]:
    """An exception of these kinds is a DataError: the rule, then what the exception says."""
    try:
        yield
    except kinds as error:
        raise DataError(f"{rule}: {getattr(error, 'strerror', None) or error}") from error


def _header(vocabulary: Vocabulary, **counts: int) -> dict[str, Any]:
    fields = dataclasses.asdict(vocabulary)
    return {"format": FORMAT, "version": VERSION, "token_bytes": vocabulary.token_bytes, **counts, **fields}


def write_shard(
    path: Path, vocabulary: Vocabulary, documents: Iterable[Sequence[int]], shard_tokens: int = SHARD_TOKENS
) -> Shard:
    """Writes documents, each with its EOS, until the shard has `shard_tokens` or there are no more; the header last."""
    size, offsets = vocabulary.vocab_size, array("Q", [0])
    with path.open("xb") as file:
        file.seek(HEADER_BYTES)
        for document in documents:
            ids = np.asarray(document, np.int64)
            if len(bad := ids[(ids < 0) | (ids >= size)]):
                raise DataError(f"{path}: id {bad[0]:,} does not fit a vocabulary of {size:,} ids")
            file.write(ids.astype(f"<u{vocabulary.token_bytes}").tobytes())
            offsets.append(offsets[-1] + len(ids))
            if offsets[-1] >= shard_tokens:
                break
        shard = Shard(path, vocabulary, offsets[-1], len(offsets) - 1)
        file.seek(shard.offsets_at)
        file.write(np.asarray(offsets, "<u8").tobytes())
        file.seek(0)
        file.write(shard.header())
        file.flush()
        os.fsync(file.fileno())
    return shard


@dataclass(frozen=True)
class Report:
    """What `tokenize` did; `str(report)` is for people."""

    corpus: Corpus
    eos: str
    first: tuple[str, ...]  # of the first document: the first few ids and tokens, and its last

    def __str__(self) -> str:
        c, v = self.corpus, self.corpus.vocabulary
        return (
            f"{c.path}: {c.num_documents:,} documents, {c.num_tokens:,} tokens of {v.token_bytes} bytes in "
            f"{len(c.shards)} shards; {c.empty_documents:,} empty documents skipped\n"
            f"vocabulary {v.vocab_size:,}, end of document {self.eos} = {v.eos_id}, sha256 {v.tokenizer_sha256[:12]}\n"
            f"the first document: {', '.join(self.first[:-1])} ... {self.first[-1]}"
        )


def tokenize(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: Path,
    *,
    text_key: str = "text",
    eos: str = EOS,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Callable[[int, int, int], None] = lambda done, size, tokens: None,
) -> Report:
    """Makes the corpus `output` from files and directories of text.

    A plain text file is one document. `.jsonl`, `.jsonl.gz` and `.jsonl.zst` hold one a line, its text under
    `text_key`. A directory stands for the files below it with a known suffix, sorted by path, hidden ones left out.
    `progress` is told bytes read, bytes in all and tokens written.

    Raises DataError, naming file and line, and leaves nothing behind, when an input is missing, cut short or not what
    it should be, and as `write_corpus` does.
    """
    files = list(_expand(inputs))
    starts = [0, *itertools.accumulate(file.stat().st_size for file in files)]  # the last: bytes in all
    read = 0

    def documents() -> Iterator[str]:
        nonlocal read
        for file, before in zip(files, starts, strict=False):
            for text, position in read_documents(file, text_key):
                read = before + position
                yield text

    def report(tokens: int) -> None:
        progress(read, starts[-1], tokens)

    return write_corpus(documents(), output, tokenizer, eos, shard_tokens, overwrite, report)


def write_corpus(
    documents: Iterable[str],
    output: Path,
    tokenizer: Path,
    eos: str = EOS,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Report:
    """Makes the corpus `output` from texts; those of whitespace alone are skipped and counted. `eos` ends each
    document; a new shard begins after `shard_tokens`. `progress` is told the tokens after each batch of them. Raises
    DataError when `eos` is not in the tokenizer, or when `output` exists and `overwrite` is not set."""
    encoder, vocabulary = load_tokenizer(tokenizer, eos)
    seen = written = 0

    def encoded() -> Iterator[list[int]]:
        nonlocal seen, written
        for batch in _batches(documents):
            seen += len(batch)
            texts = [text for text in batch if text.strip()]
            for encoding in encoder.encode_batch(texts, add_special_tokens=False):
                if encoding.ids:  # a normalizer may leave nothing of a text
                    written += len(encoding.ids) + 1
                    yield [*encoding.ids, vocabulary.eos_id]
            progress(written)

    with written_aside(output, overwrite) as aside:
        shards: list[Shard] = []
        rest = encoded()
        for first in rest:
            path = aside / f"shard-{len(shards):05d}.tokens"
            shards.append(write_shard(path, vocabulary, itertools.chain([first], rest), shard_tokens))
        if not shards:
            raise DataError(f"{output}: the inputs hold no text ({seen:,} empty documents)")
        count = sum(shard.num_documents for shard in shards)
        fields = _header(vocabulary, num_tokens=written, num_documents=count, empty_documents=seen - count)
        fields["shards"] = [
            {"file": s.path.name, "num_tokens": s.num_tokens, "num_documents": s.num_documents} for s in shards
        ]
        (aside / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n")
    corpus = open_corpus(output)
    *first, last = next(corpus.shards[0].documents()).tolist()
    return Report(corpus, eos, tuple(f"{i} {encoder.id_to_token(i)!r}" for i in (*first[:8], last)))


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch, characters = list[str](), 0
    for text in documents:
        batch.append(text)
        characters += len(text) + 1
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


@contextlib.contextmanager
def written_aside(place: Path, overwrite: bool, parts: Sequence[str] = ()) -> Generator[Path]:
    """A hidden directory beside `place` to fill, which becomes `place` by a rename; after an error nothing is left.
    Raises DataError when `place` exists and may not be overwritten, or when that would remove a file that no corpus has
    and `parts` does not name."""
    if place.exists() and not overwrite:
        raise DataError(f"{place}: exists already; name another output or allow it to be overwritten (--overwrite)")
    for file in place.iterdir() if place.is_dir() else [place] if place.exists() else []:
        if file.name not in (MANIFEST, *parts) and (file.suffix != ".tokens" or file.is_dir()):
            raise DataError(f"{file} is no part of a corpus, and overwriting would remove it; name another output")
    new, old = (place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial") for _ in range(2))
    new.mkdir(parents=True)
    try:
        yield new
        if overwrite and place.exists():
            place.rename(old)
        with _refuse(f"{place}: another process made it in the meantime", OSError):
            new.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # gone already when it was renamed


def _expand(inputs: Sequence[Path]) -> Iterator[Path]:
    for path in inputs:
        if path.is_file():
            yield path
            continue
        if not path.is_dir():
            raise DataError(f"{path}: there is no such file or directory to tokenize")
        below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = sorted(p for p in below if p.name.endswith(SUFFIXES) and p.is_file())
        if not files:
            raise DataError(f"{path}: no file below ends in {' '.join(SUFFIXES)}")
        yield from files


def read_documents(path: Path, text_key: str = "text") -> Iterator[tuple[str, int]]:
    """Each document of a file, with the bytes of the file read so far. Raises DataError naming file and line."""
    with path.open("rb") as raw:
        if ".jsonl" in path.suffixes[-2:]:
            for number, line in enumerate(_lines(raw, path), start=1):
                if line.strip():
                    yield _text_of(line, text_key, f"{path}:{number}"), raw.tell()
            return
        try:
            yield raw.read().decode("utf-8-sig"), raw.tell()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start:,}") from error


def _text_of(line: bytes, text_key: str, where: str) -> str:
    with _refuse(f"{where}: is not JSON in UTF-8", ValueError):  # nor bytes and escapes that are no characters
        document = from_json(line.removeprefix(codecs.BOM_UTF8))
    fields = cast(dict[str, Any], document if isinstance(document, dict) else {})
    text = fields.get(text_key)
    if not isinstance(text, str):
        found = ", ".join(f"{key}: {type(value).__name__}" for key, value in fields.items()) or repr(line[:40])
        raise DataError(
            f"{where}: must be an object with a string {text_key!r}, it has {found}; --text-key names another key"
        )
    return text


def _lines(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of a file, decompressed by its suffix. That it ends inside a compressed stream is looked at here:
    zstandard's own reader of files takes it for the end of the text."""
    stream: Any = None  # between two streams, where a file may end
    unused = rest = b""
    while data := unused or raw.read(2**20):
        if path.suffix in (".gz", ".zst"):
            if stream is None:  # 31 = 16 + 15: a gzip header, any window
                zst = path.suffix == ".zst"
                stream = zstandard.ZstdDecompressor().decompressobj() if zst else zlib.decompressobj(wbits=31)
            with _refuse(f"{path}: cannot decompress it", zlib.error, zstandard.ZstdError):
                data = stream.decompress(data)
            unused = stream.unused_data
            stream = None if stream.eof else stream
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    if stream is not None:
        raise DataError(f"{path}: cannot decompress it: it was cut short")
    if rest:
        yield rest


def tokenizer_sha256(path: Path) -> str:
    """The fingerprint that ties a corpus to its tokenizer. Raises DataError when there is no such file."""
    with _refuse(f"{path}: cannot read this tokenizer", OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()


def load_tokenizer(path: Path, eos: str = EOS) -> tuple[Tokenizer, Vocabulary]:
    """A `tokenizer.json`, set so that a text becomes its own ids and nothing else, and what its ids mean."""
    fingerprint = tokenizer_sha256(path)
    with _refuse(f"{path}: is not a tokenizer.json", Exception):  # the library raises the bare class
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # text that spells a special token is text
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if eos not in ids:
        special = sorted(t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special)
        raise DataError(f"{path}: has no token {eos!r} to end documents with (--eos); its special tokens: {special}")
    return tokenizer, Vocabulary(max(ids.values()) + 1, ids[eos], fingerprint)
