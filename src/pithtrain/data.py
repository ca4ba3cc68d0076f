"""Token shards to samples, in an order that is arithmetic: position is a number and there is no state to save.

All documents of a corpus are one stream of tokens across its shards. Sample i is the window [i*s, i*s + s + 1) of it: s
tokens, and the same shifted by one as their labels, so neighbouring windows share one token and every token but the
first is predicted once an epoch. The last (total - 1) % s tokens are left out. Each document ends in an EOS.

With `document_mask` documents are kept apart: the label of a document's last token, its EOS, is ignored, as it would be
the first token of another text; `documents` says where they begin, from the recorded offsets. A document that a window
cuts begins anew in the next one. Without the mask a window is one stream and every label counts.

A run reads samples by a global counter 0, 1, 2, ...: `counter = epoch * samples_per_epoch + place`, and the place in
the epoch is mapped to a sample by a bijection keyed by (seed, epoch). So every sample is read exactly once an epoch,
the order depends on (seed, counter) alone, and any rank finds any sample without the ones before: a resume, another
batch size or another mesh continue at a counter. No tail is dropped: an epoch may end inside a batch, whose first
samples are then of one epoch and the others of the next.

The bijection is a Feistel network on the smallest even number of bits that holds the epoch, walked until it lands
inside (less than 4 times on average). It costs about 20 us a sample and no memory, whatever the size of the corpus; a
stored permutation of 10 billion samples would take 80 GB.

Worked example, 10 tokens, s = 4, not shuffled: 2 samples; sample 1 has tokens 4 5 6 7 and labels 5 6 7 8; counter 3 is
epoch 1, sample 1. If a document begins at token 6, then with the mask sample 1 has labels 5 -100 7 8 and documents 0 2.
"""

import functools
import hashlib

import numpy as np
import numpy.typing as npt

from pithtrain.corpus import Ids, open_corpus, tokenizer_sha256
from pithtrain.errors import DataError
from pithtrain.spec import DataSection

ROUNDS = 8  # 4 make a Feistel network look random, more help when its halves are of few bits
MAPPED_SHARDS = 64  # each holds two file descriptors, of which a process may have as few as 256
IGNORE = -100  # the label of no token, as ops/cross_entropy has it


def permute(place: int, size: int, key: bytes) -> int:
    """The image of `place` under the permutation of range(size) that `key` (16 bytes) names."""
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


class Dataset:
    """The samples of `data`'s corpus for one run. Opening it reads `corpus.json` and a stat per shard.

    Raises DataError, naming path and numbers, when the corpus is missing, incomplete or cut short, was made with
    another tokenizer than `data.tokenizer`, has a larger vocabulary than the model, or is shorter than one sample.
    """

    def __init__(self, data: DataSection, sequence_length: int, seed: int, vocab_size: int) -> None:
        assert len(data.sources) == 1, "the spec refuses more than one source"
        self.corpus = open_corpus(data.sources[0].path)
        self.sequence_length = sequence_length
        self.seed = seed
        self.vocab_size = vocab_size
        self.shuffle = data.shuffle
        self.document_mask = data.document_mask
        self.epochs = None if data.repeat else data.epochs  # None: as many as are asked for
        path, vocabulary, total = self.corpus.path, self.corpus.vocabulary, self.corpus.num_tokens
        self.samples_per_epoch = (total - 1) // sequence_length
        if data.tokenizer and (theirs := tokenizer_sha256(data.tokenizer)) != self.fingerprint:
            raise DataError(
                f"{path}: was made with a tokenizer of sha256 {self.fingerprint[:12]}, data.tokenizer "
                f"{data.tokenizer} is {theirs[:12]}; tokenize again, or leave data.tokenizer out to train on it anyway"
            )
        if vocabulary.vocab_size > vocab_size:
            raise DataError(
                f"{path}: its ids go up to {vocabulary.vocab_size - 1:,}, but model.vocab_size is {vocab_size:,}; "
                f"set model.vocab_size to at least {vocabulary.vocab_size:,} or tokenize with another tokenizer"
            )
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{path}: has {total:,} tokens, one sample takes training.sequence_length + 1 = {sequence_length + 1:,}"
            )
        self._starts = np.cumsum([0, *(shard.num_tokens for shard in self.corpus.shards)], dtype=np.int64)
        self._mapped = functools.lru_cache(MAPPED_SHARDS)(self._map)

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokenizer.json that the corpus was made with."""
        return self.corpus.vocabulary.tokenizer_sha256

    def require(self, samples: int) -> None:
        """Raises DataError when a run of `samples` = max_steps x global_batch_size would need more epochs than allowed:
        at its start, or before it is submitted."""
        if self.epochs is None or samples <= self.epochs * self.samples_per_epoch:
            return
        have, per_epoch = self.epochs * self.samples_per_epoch, self.samples_per_epoch
        raise DataError(
            f"{self.corpus.path}: the run needs {samples:,} samples (max_steps x global_batch_size) and data.epochs = "
            f"{self.epochs} gives {self.epochs} x {per_epoch:,} = {have:,}, of {self.sequence_length:,} tokens each; "
            f"set data.epochs to {-(-samples // per_epoch)} or data.repeat to true"
        )

    def locate(self, counter: int) -> tuple[int, int]:
        """(epoch, sample) of a global sample counter >= 0; sample i begins at token i * sequence_length."""
        epoch, place = divmod(counter, self.samples_per_epoch)
        if not self.shuffle:
            return epoch, place
        key = self.seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
        return epoch, permute(place, self.samples_per_epoch, key)

    def batch(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and labels of the samples `first` .. `first + count - 1`: int64 [count, sequence_length] each. With
        `document_mask` labels across the end of a document are IGNORE. Raises DataError beyond the last allowed epoch,
        when a shard cannot be read, and for an id beyond the model's."""
        self.require(first + count)
        s = self.sequence_length
        windows = np.empty((count, s + 1), np.int64)
        for row in range(count):
            _, sample = self.locate(first + row)
            self._read(sample * s, windows[row])
        tokens, labels = windows[:, :-1].copy(), windows[:, 1:].copy()  # of one row both would be the same memory
        if self.document_mask:
            for row in range(count):
                labels[row, self._begins(self.locate(first + row)[1] * s + 1, s)] = IGNORE
        return tokens, labels

    def documents(self, first: int, count: int) -> list[list[int]]:
        """Where the documents of these samples begin, as far as they lie in them: 0 first; one without a token where
        its neighbour does. Reads offsets, no token. Raises DataError beyond the last allowed epoch."""
        self.require(first + count)
        s = self.sequence_length
        starts = (self.locate(counter)[1] * s for counter in range(first, first + count))
        return [[0, *(1 + place for place in self._begins(start + 1, s - 1))] for start in starts]

    def _begins(self, start: int, length: int) -> list[int]:
        """At which of the `length` tokens from `start` of the whole stream on a document begins, relative to it."""
        found: list[int] = []
        i = int(np.searchsorted(self._starts, start, side="right")) - 1
        while i < len(self.corpus.shards) and (base := int(self._starts[i])) < start + length:
            ends = np.array([max(start - base, 0), start + length - base], np.uint64)
            offsets = self._mapped(i)[1]
            first, last = np.searchsorted(offsets[:-1], ends)
            found += (base - start + offsets[first:last].astype(np.int64)).tolist()
            i += 1
        return found

    def _read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fills `out` with the tokens from `start` of the whole stream on, across shards."""
        done = 0
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

    def _map(self, i: int) -> tuple[Ids, Ids]:
        """Tokens and offsets of a shard."""
        shard = self.corpus.shards[i]
        shard.check()
        return shard.tokens(), shard.offsets()
