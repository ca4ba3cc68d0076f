"""Token shards to samples, in an order that is arithmetic: position is a number and there is no state to save.

All documents of a corpus are one stream of tokens across its shards. Sample i is the window [i*s, i*s + s + 1) of it: s
tokens, and the same shifted by one as their labels, so neighbouring windows share one token and every token but the
first is predicted once an epoch. The last (total - 1) % s tokens are left out. Each document ends in an EOS.

With `document_mask` documents are kept apart: the label of a document's last token, its EOS, is ignored, as it would be
the first token of another text; `documents` says where they begin, from the recorded offsets. A document that a window
cuts begins anew in the next one. Without the mask a window is one stream and every label counts.

A run reads samples by a global counter 0, 1, 2, ... Several corpora take turns by their weights (`drawn`): how many of
the first n samples each gives is a function of n, its share but for 1 + log(corpora) / 2 at most. Of one corpus
`count = epoch * samples_per_epoch + place`, and the place in the epoch is mapped to a sample by a bijection keyed by
(seed, epoch) and the corpus's number. So every sample is read exactly once an epoch of its corpus, the order depends on
(seed, counter) alone, and any rank finds any sample without the ones before: a resume, another batch size or another
mesh continue at a counter. No tail is dropped: an epoch may end inside a batch, whose first samples are then of one
epoch and the others of the next.

The bijection is a Feistel network on the smallest even number of bits that holds the epoch, walked until it lands
inside (less than 4 times on average). It costs about 20 us a sample and no memory, whatever the size of the corpus; a
stored permutation of 10 billion samples would take 80 GB.

Worked example, 10 tokens, s = 4, not shuffled: 2 samples; sample 1 has tokens 4 5 6 7 and labels 5 6 7 8; counter 3 is
epoch 1, sample 1. If a document begins at token 6, then with the mask sample 1 has labels 5 -100 7 8 and documents 0 2.
Weights 0.75 and 0.25 read corpora 0 0 1 0 0 0 1 0 and so on.
"""

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pithtrain.corpus import Ids, open_corpus, tokenizer_sha256
from pithtrain.errors import DataError
from pithtrain.spec import DataSection, DataSource, RunSpec

ROUNDS = 8  # 4 make a Feistel network look random, more help when its halves are of few bits
MAPPED_SHARDS = 64  # of all corpora; each holds two file descriptors, of which a process may have as few as 256
IGNORE = -100  # the label of no token, as ops/cross_entropy has it


def permute(place: int, size: int, key: bytes) -> int:
    """The image of `place` under the permutation of range(size) that `key` names."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            message = right.to_bytes(8, "little") + bytes([number])
            digest = hashlib.blake2b(message, key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        place = left << half | right
        if place < size:
            return place


class Located(NamedTuple):
    """Where a sample lies: the number of its corpus, which pass over that, and which of its samples."""

    corpus: int
    epoch: int
    sample: int


def integers(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the ratio of the weights as they are written, 0.1 being a tenth."""
    exact = [Fraction(str(weight)) for weight in weights]
    unit = lcm(*(weight.denominator for weight in exact))
    return [int(weight * unit) for weight in exact]


def drawn(samples: int, weights: Sequence[int]) -> list[int]:
    """How many of the first `samples` each corpus gives: its part, rounded, of what those of larger weights leave. They
    sum to `samples`, and one more sample is one more of one corpus."""
    left, rest, counts = samples, sum(weights), [0] * len(weights)
    for number in sorted(range(len(weights)), key=lambda number: -weights[number]):
        counts[number] = (2 * left * weights[number] + rest) // (2 * rest)
        left, rest = left - counts[number], rest - weights[number]
    return counts


class Stream:
    """The samples of one corpus, by their number: windows of its tokens. Opening it reads `corpus.json` and a stat per
    shard, of which `mapped` are in memory at a time. Raises DataError as `Dataset` does."""

    def __init__(self, path: Path, sequence_length: int, vocab_size: int, mapped: int) -> None:
        self.corpus = open_corpus(path)
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        vocabulary, total = self.corpus.vocabulary, self.corpus.num_tokens
        self.num_samples = (total - 1) // sequence_length
        if vocabulary.vocab_size > vocab_size:
            raise DataError(
                f"{path}: its ids go up to {vocabulary.vocab_size - 1:,}, but model.vocab_size is {vocab_size:,}; "
                f"set model.vocab_size to at least {vocabulary.vocab_size:,} or tokenize with another tokenizer"
            )
        if self.num_samples < 1:
            raise DataError(
                f"{path}: has {total:,} tokens, one sample takes training.sequence_length + 1 = {sequence_length + 1:,}"
            )
        self._starts = np.cumsum([0, *(shard.num_tokens for shard in self.corpus.shards)], dtype=np.int64)
        self._mapped = functools.lru_cache(mapped)(self._map)

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokenizer.json that the corpus was made with."""
        return self.corpus.vocabulary.tokenizer_sha256

    def read(self, sample: int, out: Ids) -> None:
        """Fills `out` [sequence_length + 1] with a sample's tokens and the one behind them, across shards."""
        start, done = sample * self.sequence_length, 0
        i = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < len(out):
            offset = start + done - int(self._starts[i])
            piece = self._mapped(i)[0][offset : offset + len(out) - done]
            if len(piece) and int(piece.max()) >= self.vocab_size:
                bad = int(np.argmax(piece >= self.vocab_size))
                raise DataError(
                    f"{self.corpus.shards[i].path}: token {offset + bad:,} is id {int(piece[bad]):,}, model.vocab_size "
                    f"is {self.vocab_size:,}; the file is damaged, copy it again or tokenize again"
                )
            out[done : done + len(piece)] = piece
            done += len(piece)
            i += 1

    def begins(self, sample: int, first: int, length: int) -> list[int]:
        """At which of the `length` tokens from token `first` of a sample on a document begins, relative to that."""
        found: list[int] = []
        start = sample * self.sequence_length + first
        i = int(np.searchsorted(self._starts, start, side="right")) - 1
        while i < len(self.corpus.shards) and (base := int(self._starts[i])) < start + length:
            ends = np.array([max(start - base, 0), start + length - base], np.uint64)
            offsets = self._mapped(i)[1]
            low, high = np.searchsorted(offsets[:-1], ends)
            found += (base - start + offsets[low:high].astype(np.int64)).tolist()
            i += 1
        return found

    def _map(self, i: int) -> tuple[Ids, Ids]:
        """Tokens and offsets of a shard."""
        shard = self.corpus.shards[i]
        shard.check()
        return shard.tokens(), shard.offsets()


class Dataset:
    """The samples of `data`'s corpora for one run, in its order.

    Raises DataError, naming path and numbers, when a corpus is missing, incomplete or cut short, was made with another
    tokenizer than `data.tokenizer` or than the others, has a larger vocabulary than the model, or is shorter than one
    sample.
    """

    def __init__(
        self, data: DataSection, sequence_length: int, seed: int, vocab_size: int, corpora: int | None = None
    ) -> None:
        """`corpora`: how many this process opens in all, if more than `data` has."""
        mapped = max(1, MAPPED_SHARDS // (corpora or len(data.sources)))
        self.streams = [Stream(source.path, sequence_length, vocab_size, mapped) for source in data.sources]
        self.weights = integers([source.weight for source in data.sources])
        self.sequence_length, self.seed = sequence_length, seed
        self.shuffle, self.document_mask = data.shuffle, data.document_mask
        self.epochs = None if data.repeat else data.epochs  # None: as many as are asked for
        for number, source in enumerate(data.sources):
            if twice := _same(source.path, data.sources[:number]):
                raise DataError(f"{source.path}: is {twice} by another path; give it once, with the sum of the weights")
        self.fingerprint = self.streams[0].fingerprint
        wanted = tokenizer_sha256(data.tokenizer) if data.tokenizer else self.fingerprint
        named = f"data.tokenizer {data.tokenizer}" if data.tokenizer else f"that of {self.streams[0].corpus.path}"
        alike = all(stream.fingerprint == self.fingerprint for stream in self.streams)
        override = ", or leave data.tokenizer out to train on it anyway" if alike else " with one of them for all"
        for stream in self.streams:
            if stream.fingerprint != wanted:
                raise DataError(
                    f"{stream.corpus.path}: was made with a tokenizer of sha256 {stream.fingerprint[:12]}, {named} is "
                    f"{wanted[:12]}; tokenize again{override}"
                )

    def passes(self, first: int, last: int) -> list[dict[str, Any]]:
        """What the samples from counter `first` up to `last` are of each corpus: {corpus, samples, epochs}."""
        told: list[dict[str, Any]] = []
        counts = zip(self.streams, drawn(first, self.weights), drawn(last, self.weights), strict=True)
        for stream, before, after in counts:
            passes = round((after - before) / stream.num_samples, 4)
            told.append({"corpus": str(stream.corpus.path), "samples": after - before, "epochs": passes})
        return told

    def require(self, samples: int) -> None:
        """Raises DataError when a run of `samples` = max_steps x global_batch_size would need more epochs of a corpus
        than allowed: at its start, or before it is submitted."""
        if self.epochs is None:
            return
        for stream, count in zip(self.streams, drawn(samples, self.weights), strict=True):
            per_epoch = stream.num_samples
            if count > self.epochs * per_epoch:
                part = "" if len(self.streams) == 1 else f", {count:,} of them of this corpus,"
                have = f"{self.epochs} x {per_epoch:,} = {self.epochs * per_epoch:,}"
                raise DataError(
                    f"{stream.corpus.path}: the run needs {samples:,} samples (max_steps x global_batch_size){part} "
                    f"and data.epochs = {self.epochs} gives {have}, of {self.sequence_length:,} tokens each; "
                    f"set data.epochs to {-(-count // per_epoch)} or data.repeat to true"
                )

    def locate(self, counter: int) -> Located:
        """Of a global sample counter >= 0; sample i of a corpus begins at its token i * sequence_length."""
        before, after = drawn(counter, self.weights), drawn(counter + 1, self.weights)
        number = next(i for i, count in enumerate(before) if after[i] > count)
        size = self.streams[number].num_samples
        epoch, place = divmod(before[number], size)
        if not self.shuffle:
            return Located(number, epoch, place)
        words = (self.seed, epoch, number) if number else (self.seed, epoch)
        return Located(number, epoch, permute(place, size, b"".join(word.to_bytes(8, "little") for word in words)))

    def batch(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and labels of the samples `first` .. `first + count - 1`: int64 [count, sequence_length] each. With
        `document_mask` labels across the end of a document are IGNORE. Raises DataError beyond the last allowed epoch,
        when a shard cannot be read, and for an id beyond the model's."""
        self.require(first + count)
        windows = np.empty((count, self.sequence_length + 1), np.int64)
        places = [self.locate(counter) for counter in range(first, first + count)]
        for row, (number, _, sample) in enumerate(places):
            self.streams[number].read(sample, windows[row])
        tokens, labels = windows[:, :-1].copy(), windows[:, 1:].copy()  # of one row both would be the same memory
        if self.document_mask:
            for row, (number, _, sample) in enumerate(places):
                labels[row, self.streams[number].begins(sample, 1, self.sequence_length)] = IGNORE
        return tokens, labels

    def documents(self, first: int, count: int) -> list[list[int]]:
        """Where the documents of these samples begin, as far as they lie in them: 0 first; one without a token where
        its neighbour does. Reads offsets, no token. Raises DataError beyond the last allowed epoch."""
        self.require(first + count)
        found: list[list[int]] = []
        for counter in range(first, first + count):
            number, _, sample = self.locate(counter)
            begins = self.streams[number].begins(sample, 1, self.sequence_length - 1)
            found.append([0, *(1 + place for place in begins)])
        return found


def _same(path: Path, sources: Sequence[DataSource]) -> Path | None:
    """The path by which `sources` have this folder, whatever links lead there: the spec alone compares spellings."""
    for source in sources:
        with contextlib.suppress(OSError):  # of a rank that does not train on it, it need not be there
            if source.path.samefile(path):
                return source.path
    return None


class HeldOut(NamedTuple):
    """A corpus of `validation`: the name of its loss, its samples in one order for all runs, how many are read."""

    name: str
    dataset: Dataset
    samples: int


def open_dataset(spec: RunSpec) -> Dataset:
    """What a run trains on. Raises DataError."""
    return _open(spec, spec.data, spec.training.seed)


def _open(spec: RunSpec, data: DataSection, seed: int) -> Dataset:
    corpora = len(spec.data.sources) + len(spec.validation.sources)
    return Dataset(data, spec.training.sequence_length, seed, spec.model.config.vocab_size, corpora)


def held_out(spec: RunSpec, fingerprint: str | None) -> list[HeldOut]:
    """What a run validates on: nothing where no router decides. `fingerprint`: that of what it trains on, where this is
    known. Raises DataError, also where a corpus was made with another tokenizer or holds fewer samples than are to be
    read."""
    training, steps, found = spec.training, spec.validation.steps, list[HeldOut]()
    if spec.moe.force_load_balance:
        return found
    for source in spec.validation.sources:
        alone = {"sources": (DataSource(path=source.path),), "tokenizer": None, "shuffle": True, "repeat": True}
        dataset = _open(spec, spec.data.model_copy(update=alone), 0)
        if trained := _same(source.path, spec.data.sources):
            raise DataError(
                f"{source.path}: is {trained} by another path, which is trained on: its loss tells nothing of other "
                "text; tokenize text that is left out there"
            )
        if fingerprint not in (None, dataset.fingerprint):
            raise DataError(
                f"{source.path}: was made with another tokenizer (sha256 {dataset.fingerprint[:12]}) than the corpus "
                f"that is trained on ({fingerprint[:12]}); tokenize it again with that one"
            )
        have, wanted = dataset.streams[0].num_samples, (steps or 0) * training.global_batch_size
        if wanted > have:
            raise DataError(
                f"{source.path}: holds {have:,} samples of {training.sequence_length:,} tokens, and validation.steps "
                f"{steps} x global_batch_size {training.global_batch_size} wants {wanted:,}; give at most "
                f"{have // training.global_batch_size}, or leave it out to read all"
            )
        found.append(HeldOut(source.label, dataset, wanted or have))
    return found


def check(spec: RunSpec, resumed: bool) -> None:
    """What a run would find out when it starts. Raises DataError."""
    dataset = open_dataset(spec)
    if not resumed:  # else its position is the checkpoint's
        dataset.require(spec.training.max_steps * spec.training.global_batch_size)
    held_out(spec, dataset.fingerprint)
