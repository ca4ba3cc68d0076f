"""Text to token shards, and the readers of those shards. `data` makes samples of them. numpy; no torch.

A corpus is a directory: shards, each described by its own header, and `corpus.json`, which names them all.

    my-corpus/
      corpus.json            what every shard shares (see `Corpus`) and, per shard, its file and its two counts
      shard-00000.tokens     documents in the order they were read, none cut in two

It is written aside, in a hidden directory beside its place, `corpus.json` last, and renamed as a whole. So a corpus
that is there is complete; one without `corpus.json` is half of a copy and readers refuse it.

A shard, all numbers little-endian:

    bytes                          content
    0 .. 4095                      JSON, then spaces, then a newline: format, version, token_bytes, num_tokens,
                                   num_documents, vocab_size, eos_id, tokenizer_sha256. `head -1` shows it
    4096 ..                        num_tokens ids of token_bytes (2 or 4) each
    the next multiple of 8 ..      num_documents + 1 offsets of 8 bytes: where each document begins, in tokens of this
                                   shard; the last one is num_tokens

The width follows from the vocabulary: 65,536 ids fit 2 bytes, 65,537 do not. Documents are found by their offsets,
never by looking for the EOS. A document is the tokenizer's ids of its text and exactly one EOS: no post-processor runs,
and text that spells a special token is text.

What it costs: 2 bytes a token up to vocabulary 65,536; the tokenizer's own speed, about 1 M tokens/s and core.

Worked example: "ab" and "c" with ids a=0 b=1 c=2 eos=3 give tokens 0 1 3 2 3 and offsets 0 3 5; the shard has 4096 + 10
bytes, 6 of padding and 24 of offsets.
"""

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import secrets
import shutil
import sysconfig
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import numpy as np
import numpy.typing as npt

from pithtrain.errors import DataError

if TYPE_CHECKING:  # loading it costs 50 ms, which readers of a corpus need not pay
    from tokenizers import Tokenizer

Ids = npt.NDArray[np.integer[Any]]

FORMAT = "pithtrain tokens"
VERSION = 1
HEADER_BYTES = 4096
MANIFEST = "corpus.json"
EOS = "<|endoftext|>"
TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SHARD_TOKENS = 2**27  # 256 MiB at 2 bytes: few files for a large corpus, quick to copy one
BATCH_DOCUMENTS = 1024  # encoded at once, on all cores;
BATCH_CHARACTERS = 2**22  # a batch of long documents stays a few megabytes


# --- reading ---


@dataclass(frozen=True)
class Vocabulary:
    """What the ids of a corpus mean: equal in all its shards, checked against the run's tokenizer and model."""

    vocab_size: int  # largest id of the tokenizer + 1
    eos_id: int
    tokenizer_sha256: str  # of the bytes of tokenizer.json

    @property
    def token_bytes(self) -> int:
        return 2 if self.vocab_size <= 2**16 else 4

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.token_bytes}")


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

    def check(self) -> None:
        """Raises DataError unless the file is there, has the size its counts ask for, and its header agrees."""
        self.check_size()
        if read_shard(self.path) != self:
            raise DataError(f"{self.path}: its header and the {MANIFEST} beside it disagree; they are of two corpora")

    def check_size(self) -> None:
        try:
            found = self.path.stat().st_size
        except OSError as error:
            raise DataError(f"{self.path}: cannot read this shard: {error.strerror}") from error
        if found != self.num_bytes:
            raise DataError(
                f"{self.path}: has {found:,} bytes, but {self.num_tokens:,} tokens of {self.vocabulary.token_bytes} "
                f"bytes in {self.num_documents:,} documents take {self.num_bytes:,}; it was cut short, copy it again"
            )

    def tokens(self) -> Ids:
        """All ids, [num_tokens], uint16 or uint32."""
        return np.memmap(self.path, self.vocabulary.dtype, "r", HEADER_BYTES, (self.num_tokens,))

    def offsets(self) -> Ids:
        """Where documents begin, [num_documents + 1], uint64."""
        return np.memmap(self.path, np.dtype("<u8"), "r", self.offsets_at, (self.num_documents + 1,))

    def documents(self) -> Iterator[Ids]:
        """The ids of each document, EOS included."""
        tokens, offsets = self.tokens(), self.offsets()
        for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            yield tokens[first:last]


def read_shard(path: Path) -> Shard:
    """The shard at `path` as its own header describes it. Raises DataError for anything that is not a whole shard."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(HEADER_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot read this shard: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: is not a token shard, its first {HEADER_BYTES:,} bytes are not a header") from error
    shard = Shard(path, _vocabulary(header, path), header["num_tokens"], header["num_documents"])
    shard.check_size()
    return shard


def _vocabulary(fields: dict[str, Any], path: Path) -> Vocabulary:
    found = fields.get("format"), fields.get("version")
    if found != (FORMAT, VERSION):
        raise DataError(f"{path}: is in format {found}, this version reads {(FORMAT, VERSION)}")
    return Vocabulary(fields["vocab_size"], fields["eos_id"], fields["tokenizer_sha256"])


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
    """The corpus in directory `path`. Raises DataError when it is missing, incomplete or a shard was cut short.

    Costs one small file and a stat per shard; the shards' headers are read when they are mapped.
    """
    if not path.is_dir():
        raise DataError(f"{path}: there is no corpus here; `pithtrain tokenize` makes one")
    manifest = path / MANIFEST
    try:
        fields = json.loads(manifest.read_bytes())
    except FileNotFoundError as error:
        found = len(list(path.glob("*.tokens")))
        raise DataError(
            f"{path}: this corpus is incomplete: {found} shards and no {MANIFEST}; copy it whole or make it again"
        ) from error
    except ValueError as error:
        raise DataError(f"{manifest}: is not JSON ({error}); copy it again") from error
    vocabulary = _vocabulary(fields, manifest)
    shards = tuple(Shard(path / s["file"], vocabulary, s["num_tokens"], s["num_documents"]) for s in fields["shards"])
    for shard in shards:
        shard.check_size()
    counts = (fields["num_tokens"], fields["num_documents"], fields["empty_documents"])
    corpus = Corpus(path, vocabulary, *counts, shards)
    if corpus.num_tokens != sum(shard.num_tokens for shard in shards):
        raise DataError(f"{manifest}: says {corpus.num_tokens:,} tokens, which is not the sum over its shards")
    return corpus


# --- writing ---


def _header(vocabulary: Vocabulary, **counts: int) -> dict[str, Any]:
    fields = dataclasses.asdict(vocabulary)
    return {"format": FORMAT, "version": VERSION, "token_bytes": vocabulary.token_bytes, **counts, **fields}


class ShardWriter:
    """Writes one shard document by document. Until `close` it has no header and no reader takes it for a shard."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self.path = path
        self.vocabulary = vocabulary
        self.offsets = array("Q", [0])
        self.file = path.open("xb")
        self.file.seek(HEADER_BYTES)

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    def add(self, ids: Sequence[int]) -> None:
        """One document, its EOS included. Raises DataError for an id outside the vocabulary: nothing is cut to fit."""
        size = self.vocabulary.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            bad = next(i for i in ids if not 0 <= i < size)
            raise DataError(f"{self.path}: id {bad:,} does not fit a vocabulary of {size:,} ids")
        self.file.write(np.asarray(ids, self.vocabulary.dtype).tobytes())
        self.offsets.append(self.num_tokens + len(ids))

    def close(self) -> Shard:
        shard = Shard(self.path, self.vocabulary, self.num_tokens, len(self.offsets) - 1)
        self.file.seek(shard.offsets_at)
        self.file.write(np.asarray(self.offsets, "<u8").tobytes())
        fields = _header(self.vocabulary, num_tokens=shard.num_tokens, num_documents=shard.num_documents)
        self.file.seek(0)
        self.file.write(json.dumps(fields).encode().ljust(HEADER_BYTES - 1) + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return shard


@dataclass(frozen=True)
class Report:
    """What `tokenize` did; `str(report)` is for people."""

    corpus: Corpus
    eos: str
    first_ids: tuple[int, ...]  # of the first document: the first few, and its last
    first_tokens: tuple[str, ...]

    def __str__(self) -> str:
        c, v = self.corpus, self.corpus.vocabulary
        begin = [f"{i} {t!r}" for i, t in zip(self.first_ids, self.first_tokens, strict=True)]
        return (
            f"{c.path}: {c.num_documents:,} documents, {c.num_tokens:,} tokens of {v.token_bytes} bytes in "
            f"{len(c.shards)} shards; {c.empty_documents:,} empty documents skipped\n"
            f"vocabulary {v.vocab_size:,}, end of document {self.eos} = {v.eos_id}, sha256 {v.tokenizer_sha256[:12]}\n"
            f"the first document: {', '.join(begin[:-1])} ... {begin[-1]}"
        )


Progress = Callable[[int, int, int], None]  # bytes read so far, bytes in all, tokens written


def tokenize(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: Path,
    *,
    text_key: str = "text",
    eos: str = EOS,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Makes the corpus `output` from files and directories of text.

    A plain text file is one document. `.jsonl`, `.jsonl.gz` and `.jsonl.zst` hold one a line, its text under
    `text_key`. A directory stands for the files below it with a known suffix, sorted by path, hidden ones left out.
    Documents of whitespace alone are skipped and counted. `eos` is the token that ends each document; `shard_tokens`
    the size at which a new shard begins.

    Raises DataError, and leaves nothing behind, when an input is missing, is not UTF-8 or is cut short, when a text is
    missing or not a string (naming file and line), when `eos` is not in the tokenizer, or when `output` exists and
    `overwrite` is not set.
    """
    files = list(_expand(inputs))
    sizes = [file.stat().st_size for file in files]

    read = 0

    def documents() -> Iterator[str]:
        nonlocal read
        for i, file in enumerate(files):
            for text, position in read_documents(file, text_key):
                read = sum(sizes[:i]) + position
                yield text

    def report(tokens: int) -> None:
        if progress:
            progress(read, sum(sizes), tokens)

    return write_corpus(documents(), output, tokenizer, eos, shard_tokens, overwrite, report)


def write_corpus(
    documents: Iterable[str],
    output: Path,
    tokenizer: Path,
    eos: str = EOS,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Makes the corpus `output` from texts; see `tokenize`. `progress` is told the tokens written after each batch."""
    if output.exists() and not overwrite:
        raise DataError(f"{output}: exists already; name another output or allow it to be overwritten (--overwrite)")
    _refuse_strangers(output, lambda name: name == MANIFEST or name.endswith(".tokens"))
    encoder, vocabulary = load_tokenizer(tokenizer, eos)
    aside = _aside(output)
    aside.mkdir(parents=True)
    try:
        first, shards, empty = _write_shards(documents, aside, encoder, vocabulary, shard_tokens, progress)
        if not shards:
            raise DataError(f"{output}: the inputs hold no text ({empty:,} empty documents)")
        tokens, count = sum(s.num_tokens for s in shards), sum(s.num_documents for s in shards)
        fields = _header(vocabulary, num_tokens=tokens, num_documents=count, empty_documents=empty)
        fields["shards"] = [
            {"file": s.path.name, "num_tokens": s.num_tokens, "num_documents": s.num_documents} for s in shards
        ]
        (aside / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n")
        if not _publish(aside, output, overwrite):
            raise DataError(f"{output}: another process made it in the meantime; this one is thrown away")
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already when it was renamed
    names = tuple(str(encoder.id_to_token(i)) for i in first)
    return Report(open_corpus(output), eos, first, names)


def _write_shards(
    documents: Iterable[str],
    directory: Path,
    encoder: "Tokenizer",
    vocabulary: Vocabulary,
    shard_tokens: int,
    progress: Callable[[int], None] | None,
) -> tuple[tuple[int, ...], list[Shard], int]:
    """-> (first and last ids of the first document, shards, documents skipped as empty)."""
    shards: list[Shard] = []
    writer: ShardWriter | None = None
    first: tuple[int, ...] = ()
    empty = written = 0
    try:
        for batch in _batches(documents):
            texts = [text for text in batch if text.strip()]
            for encoding in encoder.encode_batch(texts, add_special_tokens=False):
                if not encoding.ids:  # a normalizer may leave nothing of a text
                    empty += 1
                    continue
                ids = [*encoding.ids, vocabulary.eos_id]
                first = first or (*ids[: min(8, len(ids) - 1)], ids[-1])
                if writer is None:
                    writer = ShardWriter(directory / f"shard-{len(shards):05d}.tokens", vocabulary)
                writer.add(ids)
                written += len(ids)
                if writer.num_tokens >= shard_tokens:
                    shards.append(writer.close())
                    writer = None
            empty += len(batch) - len(texts)
            if progress:
                progress(written)
        if writer is not None:
            shards.append(writer.close())
    finally:
        if writer is not None:
            writer.file.close()
    return first, shards, empty


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _aside(place: Path) -> Path:
    """A new hidden name beside `place`: a rename from there to `place` is atomic."""
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")


def _publish(new: Path, place: Path, replace: bool) -> bool:
    """Renames directory `new` to `place`; a reader meets all of it or none. False: another stands there already."""
    old = _aside(place)
    if replace and place.exists():
        place.rename(old)
    try:
        new.rename(place)
        published = True
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise  # and `old` stays, hidden, for a person to rename back
        published = False
    shutil.rmtree(old, ignore_errors=True)
    return published


def _refuse_strangers(place: Path, is_ours: Callable[[str], bool]) -> None:
    """Raises DataError when overwriting directory `place` would remove a file that no corpus has."""
    if place.exists() and not place.is_dir():
        raise DataError(f"{place}: is a file, not a directory; name another output")
    strangers = sorted(p.name for p in place.iterdir() if not is_ours(p.name)) if place.exists() else []
    if strangers:
        raise DataError(f"{place}: holds {strangers[0]}, which is no part of a corpus; name another output")


# --- reading text ---


def _expand(inputs: Sequence[Path]) -> Iterator[Path]:
    for path in inputs:
        if path.is_file():
            yield path
        elif path.is_dir():
            below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
            files = sorted(p for p in below if p.name.endswith(TEXT_SUFFIXES + JSONL_SUFFIXES) and p.is_file())
            if not files:
                raise DataError(f"{path}: no file below ends in {' '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)}")
            yield from files
        else:
            raise DataError(f"{path}: there is no such file or directory to tokenize")


def read_documents(path: Path, text_key: str = "text") -> Iterator[tuple[str, int]]:
    """Each document of a file, with the bytes of the file read so far. Raises DataError naming file and line."""
    with path.open("rb") as raw:
        if not path.name.endswith(JSONL_SUFFIXES):
            yield _decode(raw.read(), str(path)), raw.tell()
            return
        try:
            for number, line in enumerate(_lines(_chunks(raw, path.suffix)), start=1):
                if line.strip():
                    yield _text_of(line, text_key, f"{path}:{number}"), raw.tell()
        except (EOFError, ValueError) as error:
            raise DataError(f"{path}: cannot decompress it: {error}") from error


def _text_of(line: bytes, text_key: str, where: str) -> str:
    try:
        document: Any = json.loads(_decode(line, where))
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{where}: must be an object with a {text_key!r}, it is {line[:40]!r}")
    fields = cast(dict[str, Any], document)
    if text_key not in fields:
        keys = ", ".join(sorted(fields)) or "none"
        raise DataError(f"{where}: has no {text_key!r}, its keys: {keys}; --text-key names the one that holds the text")
    text = fields[text_key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_key!r} must be a string, it is {json.dumps(text)[:40]}")
    if not text.isascii():  # JSON can spell half a surrogate pair, which is no character
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: {text_key!r} is not valid Unicode: {error.reason}") from error
    return text


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 text: {error.reason} at byte {error.start:,}") from error


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _chunks(raw: BinaryIO, suffix: str) -> Iterator[bytes]:
    """The decompressed bytes. Raises EOFError when the file ends inside a compressed stream, ValueError when it is not
    one."""
    if suffix == ".gz":
        new: Callable[[], _Decompressor] = _gzip
        corrupt: type[Exception] = zlib.error
    elif suffix == ".zst":
        import zstandard

        new, corrupt = zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
    else:
        yield from iter(lambda: raw.read(2**20), b"")
        return
    stream: _Decompressor | None = None  # None: between two streams, where a file may end
    while chunk := raw.read(2**20):
        while chunk:
            stream = stream or new()
            try:
                yield stream.decompress(chunk)
            except corrupt as error:
                raise ValueError(str(error)) from error
            chunk = stream.unused_data if stream.eof else b""
            stream = None if stream.eof else stream
    if stream is not None:
        raise EOFError("it was cut short")


def _gzip() -> _Decompressor:
    return zlib.decompressobj(wbits=31)  # 16 + 15: a gzip header, any window


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


# --- tokenizers ---


def tokenizer_sha256(path: Path) -> str:
    """The fingerprint that ties a corpus to its tokenizer. Raises DataError when there is no such file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot read this tokenizer: {error.strerror}") from error


def load_tokenizer(path: Path, eos: str = EOS) -> tuple["Tokenizer", Vocabulary]:
    """A `tokenizer.json`, set so that a text becomes its own ids and nothing else, and what its ids mean."""
    from tokenizers import Tokenizer

    fingerprint = tokenizer_sha256(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise DataError(f"{path}: is not a tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # text that spells a special token is text
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if eos not in ids:
        special = sorted(t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special)
        raise DataError(f"{path}: has no token {eos!r} to end documents with (--eos); its special tokens: {special}")
    return tokenizer, Vocabulary(max(ids.values()) + 1, ids[eos], fingerprint)


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE with one special token, EOS = 0, and writes its `tokenizer.json`. Any text round-trips.

    `vocab_size` counts EOS and the 256 bytes.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


# --- the demo's corpus ---


def stdlib_documents(max_characters: int = 12_000_000) -> Iterator[str]:
    """Real text that is on every machine: Python's help topics, then the standard library's modules, sorted by path.

    Tests are left out, and what cannot be read. Ends with the document that reaches `max_characters`.
    """
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    modules = sorted(p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts))
    characters = 0
    for text in itertools.chain((topics[name] for name in sorted(topics)), _readable(modules)):
        yield text
        characters += len(text)
        if characters >= max_characters:
            return


def _readable(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # a few modules are in another encoding on purpose
            continue


def build_stdlib(output: Path, vocab_size: int = 4096, progress: Callable[[int], None] | None = None) -> Report | None:
    """Makes `output`/tokenizer.json and the corpus `output`/tokens from the standard library; about 20 s on two cores.

    Returns None when both are there already. The directory appears whole, so it may be killed at any time, and of two
    processes at once each makes its own and one stays.
    """
    if _stdlib_is_complete(output):
        return None
    _refuse_strangers(output, lambda name: name in ("tokenizer.json", "tokens"))
    aside = _aside(output)
    aside.mkdir(parents=True)
    try:
        train_tokenizer(stdlib_documents(), vocab_size, aside / "tokenizer.json")
        report = write_corpus(stdlib_documents(), aside / "tokens", aside / "tokenizer.json", progress=progress)
        if not _stdlib_is_complete(output):  # else another process was faster
            _publish(aside, output, replace=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return dataclasses.replace(report, corpus=open_corpus(output / "tokens"))


def _stdlib_is_complete(output: Path) -> bool:
    try:
        corpus = open_corpus(output / "tokens")
        return corpus.vocabulary.tokenizer_sha256 == tokenizer_sha256(output / "tokenizer.json")
    except DataError:
        return False
