"""Samples by counter: every token once an epoch, the same text on any mesh and after any stop, bad corpora refused."""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pithtrain import corpus
from pithtrain.data import MAPPED_SHARDS, Dataset, drawn, integers, permute
from pithtrain.errors import DataError
from pithtrain.spec import DataSection, DataSource, Mesh
from test_corpus import EOS_ID, jsonl, word_tokenizer, words

S = 4  # sequence length: a document of three words and its EOS is one sample
VOCAB = 512
FIRST = 10  # sample i of `sequences` is made of id FIRST + i


def make(path: Path, documents: Sequence[Sequence[int]], vocab_size: int = VOCAB, shard_tokens: int = 2**20) -> Path:
    path.mkdir()
    tokenizer = word_tokenizer(path / "tokenizer.json", vocab_size)
    text = jsonl(path / "text.jsonl", [{"text": words(ids)} for ids in documents])
    corpus.tokenize([text], path / "tokens", tokenizer, shard_tokens=shard_tokens)
    return path


def sequences(path: Path, count: int, shard_tokens: int = 2**20) -> Path:
    """A corpus of `count` samples of length S, told apart by their first token (and two tokens left over)."""
    return make(path, [*([FIRST + i] * 3 for i in range(count)), [3]], shard_tokens=shard_tokens)


def dataset(path: Path, length: int = S, seed: int = 0, vocab_size: int = VOCAB, **data: Any) -> Dataset:
    section = DataSection(
        sources=(DataSource(path=path / "tokens"),), **{"repeat": True, "document_mask": False, **data}
    )
    return Dataset(section, length, seed, vocab_size)


def ids(data: Dataset, first: int, count: int) -> list[int]:
    """Which samples these counters are, read from the tokens themselves."""
    return [int(row[0]) - FIRST for row in data.batch(first, count)[0]]


def read(data: Dataset, mesh: Mesh, rank: int) -> Any:
    """The first micro-batch that the engine reads on a rank."""
    from pithtrain.batches import read_batches

    return read_batches(data, *fakes(data, mesh, rank, mesh.dp * mesh.ep), 0)[0]


def fakes(data: Dataset, mesh: Mesh, rank: int, global_batch_size: int, mbs: int = 1) -> tuple[Any, Any]:
    """What `read_batches` looks at of a spec and a world."""
    import torch

    from pithtrain.world import World

    pp, dp, cp, ep = mesh.coords(rank)
    groups: dict[str, Any] = {f.name: None for f in dataclasses.fields(World) if f.name.endswith("_group")}
    world = World(mesh, rank, pp, dp, cp, ep, torch.device("cpu"), **groups)
    training = SimpleNamespace(micro_batch_size=mbs, sequence_length=data.sequence_length)
    n = global_batch_size // (mbs * world.data_size)
    return SimpleNamespace(training=training, num_micro_batches=n), world


def step_ids(data: Dataset, mesh: Mesh, rank: int, samples: int, global_batch_size: int, mbs: int = 1) -> list[int]:
    """What the engine reads on a rank (of the first pipeline stage) for the step that begins after `samples`."""
    pytest.importorskip("torch")
    from pithtrain.batches import read_batches

    batches = read_batches(data, *fakes(data, mesh, rank, global_batch_size, mbs), samples)
    return [int(row[0]) - FIRST for batch in batches if batch.tokens is not None for row in batch.tokens]


# --- samples ---


def test_samples_are_windows_of_one_stream(tmp_path: Path) -> None:
    path = make(tmp_path / "c", [[10, 11, 12], [13, 14], [15, 16]])
    stream = [10, 11, 12, EOS_ID, 13, 14, EOS_ID, 15, 16, EOS_ID]
    data = dataset(path, shuffle=False)
    assert data.streams[0].num_samples == 2
    tokens, labels = data.batch(0, 4)
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.tolist() == [stream[0:4], stream[4:8]] * 2
    assert labels.tolist() == [stream[1:5], stream[5:9]] * 2
    assert data.locate(3) == (0, 1, 1)
    assert dataset(path, length=9, shuffle=False).batch(7, 1)[1].tolist() == [stream[1:]]  # exactly one sample


@pytest.mark.parametrize("shard_tokens", [1, 7, 50])
def test_samples_cross_shards(tmp_path: Path, shard_tokens: int) -> None:
    documents = [list(range(10, 10 + 1 + i % 9)) for i in range(40)]
    path = make(tmp_path / "c", documents, shard_tokens=shard_tokens)
    stream = [i for document in documents for i in [*document, EOS_ID]]
    for length in (1, 3, 64):
        data = dataset(path, length, shuffle=False)
        tokens, labels = data.batch(0, data.streams[0].num_samples)
        assert tokens.ravel().tolist() == stream[: tokens.size]
        assert labels.ravel().tolist() == stream[1 : tokens.size + 1]
        assert len(stream) - tokens.size <= length


def test_case_037_offsets_are_64_bit(tmp_path: Path) -> None:
    vocabulary, gib = corpus.Vocabulary(65_536, EOS_ID, "ab"), 2**30
    (tmp_path / "tokens").mkdir()
    shard = corpus.Shard(tmp_path / "tokens" / "big.tokens", vocabulary, num_tokens=9 * gib // 2, num_documents=3)
    last = 17 * gib // 4  # tokens: 8.5 GiB of 2 bytes
    with shard.path.open("xb") as file:  # with holes
        file.truncate(shard.num_bytes)
        file.write(shard.header())
        file.seek(corpus.HEADER_BYTES + 2 * last)
        file.write(np.array([7, 8, 65_535], "<u2").tobytes())
        file.seek(shard.offsets_at)
        file.write(np.array([0, 5, last, shard.num_tokens], "<u8").tobytes())
    counts = {"num_tokens": shard.num_tokens, "num_documents": 3}
    manifest = json.loads(shard.header()) | {"empty_documents": 0, "shards": [{"file": "big.tokens", **counts}]}
    (shard.path.parent / corpus.MANIFEST).write_text(json.dumps(manifest))
    data = dataset(tmp_path, length=1024, vocab_size=65_536, shuffle=False)
    assert data.batch(last // 1024, 1)[0][0, :4].tolist() == [7, 8, 65_535, 0]
    assert shard.offsets().tolist() == [0, 5, last, shard.num_tokens]
    *_, document = shard.documents()
    assert len(document) == shard.num_tokens - last
    assert document[:4].tolist() == [7, 8, 65_535, 0]


def test_case_038_three_hundred_shards(tmp_path: Path) -> None:
    data = dataset(sequences(tmp_path / "c", 300, shard_tokens=1))
    assert len(data.streams[0].corpus.shards) == 301
    for epoch in range(2):
        assert sorted(ids(data, 300 * epoch, 300)) == list(range(300))


# --- order ---


def test_permute_is_a_bijection_that_looks_random() -> None:
    for size in [*range(1, 70), 255, 256, 257, 1000]:
        assert sorted(permute(i, size, b"k" * 16) for i in range(size)) == list(range(size))
    orders = [[permute(i, 1000, epoch.to_bytes(16, "little")) for i in range(1000)] for epoch in range(20)]
    fixed = sum(a == b for order in orders for a, b in enumerate(order))
    neighbours = sum(b == a + 1 for order in orders for a, b in itertools.pairwise(order))
    assert fixed < 45  # 20 expected, +- 4.5
    assert neighbours < 45
    means = [np.mean(order[:100]) for order in orders]
    assert abs(np.mean(means) - 499.5) < 4 * 289 / 2000**0.5  # the first tenth is a fair sample of all
    assert 0 <= permute(10**12, 10**13, b"k" * 16) < 10**13


def test_the_order_is_the_same_for_good(tmp_path: Path) -> None:
    """Frozen values: a change here changes what every run reads after a resume."""
    data = dataset(sequences(tmp_path / "c", 10), seed=2**63 - 1)
    assert [data.locate(i)[1:] for i in (0, 9, 10, 25)] == [(0, 2), (0, 9), (1, 2), (2, 0)]
    assert [permute(i, 10, bytes(16)) for i in range(10)] == [5, 1, 4, 9, 7, 3, 0, 2, 6, 8]


def test_seed_and_epoch_change_the_order(tmp_path: Path) -> None:
    path = sequences(tmp_path / "c", 64)
    orders = [ids(dataset(path, seed=seed), 64 * epoch, 64) for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    assert ids(dataset(path, shuffle=False), 64, 64) == list(range(64))


def test_case_040_a_resume_inside_an_epoch_repeats_nothing(tmp_path: Path) -> None:
    path = sequences(tmp_path / "c", 64)
    straight = [i for step in range(16) for i in ids(dataset(path), 4 * step, 4)]
    resumed = dataset(path)  # a new process: nothing but the counter comes along
    assert [*straight[:20], *(i for step in range(5, 16) for i in ids(resumed, 4 * step, 4))] == straight
    assert sorted(straight) == list(range(64))


def test_case_041_042_later_epochs_after_a_resume(tmp_path: Path) -> None:
    path = sequences(tmp_path / "c", 64)
    straight = ids(dataset(path), 0, 4 * 64)
    for resume_at in (20, 64, 2 * 64 + 12):
        assert straight[:resume_at] + ids(dataset(path), resume_at, 4 * 64 - resume_at) == straight
    epochs = [straight[64 * e : 64 * (e + 1)] for e in range(4)]
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_case_044_batch_and_mesh_may_change_at_a_resume(tmp_path: Path) -> None:
    data = dataset(sequences(tmp_path / "c", 64))
    seen: list[int] = []

    def train(steps: int, global_batch_size: int, mesh: Mesh) -> None:
        for _ in range(steps):
            samples = len(seen)  # the position is in samples
            ranks = range(mesh.size)
            seen.extend(i for rank in ranks for i in step_ids(data, mesh, rank, samples, global_batch_size))

    train(5, 8, Mesh(1, 1, 1, 1))
    train(2, 4, Mesh(1, 1, 1, 1))
    train(4, 4, Mesh(1, 2, 1, 1))
    assert sorted(seen) == list(range(64))


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 1, 1), Mesh(1, 1, 1, 2), Mesh(1, 3, 1, 2)], ids=str)
def test_case_045_data_ranks_read_distinct_samples(tmp_path: Path, mesh: Mesh) -> None:
    data = dataset(sequences(tmp_path / "c", 12))
    for mbs in (1, 2):
        per_rank = [step_ids(data, mesh, rank, 0, 12, mbs) for rank in range(mesh.size)]
        assert sorted(i for one in per_rank for i in one) == list(range(12))
        whole = step_ids(data, Mesh(1, 1, 1, 1), 0, 0, 12, mbs)
        together = {tuple(sorted(whole[i : i + mbs])) for i in range(0, 12, mbs)}  # which share a micro-batch
        assert together == {tuple(sorted(one[i : i + mbs])) for one in per_rank for i in range(0, len(one), mbs)}


@pytest.mark.parametrize("mesh", [Mesh(2, 1, 2, 1), Mesh(2, 2, 2, 2)], ids=str)
def test_case_046_one_replica_reads_one_text(tmp_path: Path, mesh: Mesh) -> None:
    data = dataset(sequences(tmp_path / "c", 64))
    replicas: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for rank in range(mesh.size):
        pp, dp, _, ep = mesh.coords(rank)
        if pp == 0:  # no other stage reads a token
            replicas.setdefault((dp, ep), set()).add(tuple(step_ids(data, mesh, rank, 16, 16)))
    assert all(len(read) == 1 for read in replicas.values())
    distinct = {i for read in replicas.values() for i in next(iter(read))}
    assert distinct == set(ids(data, 16, 16))
    assert len(distinct) == 16  # the global batch


# --- several corpora ---


def mixed(*parts: tuple[Path, float], **data: Any) -> Dataset:
    sources = tuple(DataSource(path=path / "tokens", weight=weight) for path, weight in parts)
    section = DataSection(sources=sources, **{"repeat": True, "document_mask": False, **data})
    return Dataset(section, S, 0, VOCAB)


def test_turns_follow_the_weights_and_every_count_is_known_beforehand() -> None:
    assert integers([0.1, 0.2, 0.7]) == [1, 2, 7] and integers([1.0]) == [1] and integers([1e-3, 0.999]) == [1, 999]
    rng = np.random.default_rng(3)
    for weights in (
        [1],
        [3, 1],
        [1, 999],
        [1, 1, 1],
        [5, 1, 3, 1],
        [1] * 10 + [1000],
        [1] * 40 + [40],
        rng.integers(1, 1000, 12).tolist(),
    ):
        before = drawn(0, weights)
        assert before == [0] * len(weights)
        for samples in range(1, 3000):
            now = drawn(samples, weights)
            assert sum(now) == samples and sorted(b - a for a, b in zip(before, now, strict=True))[-2:] in ([0, 1], [1])
            shares = [samples * weight / sum(weights) for weight in weights]
            most = 1 + math.log(len(weights)) / 2
            assert all(abs(count - share) <= most for count, share in zip(now, shares, strict=True)), (weights, samples)
            before = now
        far = 10**15  # exact where floats are not
        assert sum(drawn(far, weights)) == far
        assert sorted(b - a for a, b in zip(drawn(far, weights), drawn(far + 1, weights), strict=True))[-1] == 1
    assert [drawn(n + 1, [3, 1])[1] - drawn(n, [3, 1])[1] for n in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]


def test_each_corpus_has_its_own_epochs_and_any_sample_is_found_by_its_number(tmp_path: Path) -> None:
    """Each in the order that it has alone, but for a second one of the same size, which is shuffled by itself."""
    large, small = sequences(tmp_path / "large", 40), sequences(tmp_path / "small", 10)
    data = mixed((large, 0.8), (small, 0.2))
    places = [data.locate(counter) for counter in range(100)]
    assert [place.corpus for place in places].count(0) == 80
    for number, size in ((0, 40), (1, 10)):
        own = [place for place in places if place.corpus == number]
        for epoch in (0, 1):
            assert sorted(place.sample for place in own if place.epoch == epoch) == [*range(size)]
    alone = dataset(large)
    assert [place[1:] for place in places if place.corpus == 0] == [alone.locate(i)[1:] for i in range(80)]
    again = mixed((large, 0.8), (small, 0.2))  # a new process, in any order
    assert [again.locate(counter) for counter in reversed(range(100))] == places[::-1]
    twins = mixed((large, 0.5), (sequences(tmp_path / "twin", 40), 0.5))
    orders = [[p.sample for p in map(twins.locate, range(80)) if p.corpus == number] for number in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_a_batch_of_several_corpora_holds_their_tokens_and_documents(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one", [range(10, 30)]), make(tmp_path / "two", [range(40, 42), range(50, 68)])
    data = mixed((one, 0.5), (two, 0.5), shuffle=False, document_mask=True)
    tokens, labels = data.batch(0, 4)
    assert tokens.tolist() == [[10, 11, 12, 13], [40, 41, EOS_ID, 50], [14, 15, 16, 17], [51, 52, 53, 54]]
    assert labels[1].tolist() == [41, EOS_ID, -100, 51]
    assert data.documents(0, 4) == [[0], [0, 3], [0], [0]]


def test_case_036_passes_over_each_corpus_are_known_and_no_more_are_read(tmp_path: Path) -> None:
    """0.001 and 0.999 of one size; without `repeat` the run is refused for the one that would not do."""
    rare, common = sequences(tmp_path / "rare", 10), sequences(tmp_path / "common", 10)
    data = mixed((rare, 0.001), (common, 0.999))
    assert [(one["samples"], one["epochs"]) for one in data.passes(0, 10_000)] == [(10, 1.0), (9990, 999.0)]
    assert [one["samples"] for one in data.passes(10_000, 10_001)] in ([0, 1], [1, 0])
    assert [one["corpus"] for one in data.passes(0, 1)] == [str(rare / "tokens"), str(common / "tokens")]
    once = mixed((rare, 0.001), (common, 0.999), repeat=False)
    once.require(10)
    with pytest.raises(DataError, match=r"common/tokens: the run needs 11 samples .*, 11 of them of this corpus, and"):
        once.require(11)
    assert ids(once, 0, 10) and sorted(ids(once, 0, 10)) == [*range(10)]


def test_mapped_shards_are_few_however_many_the_corpora(tmp_path: Path) -> None:
    """Each holds two file descriptors."""
    parts = [sequences(tmp_path / f"c{i}", 40, shard_tokens=1) for i in range(3)]
    data = mixed(*((path, weight) for path, weight in zip(parts, (0.25, 0.25, 0.5), strict=True)))
    before = len(list(Path("/proc/self/fd").iterdir()))
    data.batch(0, 120)
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 2 * MAPPED_SHARDS
    assert sum(len(stream.corpus.shards) for stream in data.streams) > MAPPED_SHARDS


def test_corpora_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    one = sequences(tmp_path / "one", 8)
    (tmp_path / "two").mkdir()
    other = word_tokenizer(tmp_path / "two" / "tokenizer.json", VOCAB, first_word=5)
    text = jsonl(tmp_path / "two" / "text.jsonl", [{"text": words(range(10, 60))}])
    corpus.tokenize([text], tmp_path / "two" / "tokens", other)
    with pytest.raises(DataError, match=r"two/tokens: was made with .*, that of .*one/tokens is .*with one of them"):
        mixed((one, 0.5), (tmp_path / "two", 0.5))


# --- documents ---


@pytest.mark.parametrize("shard_tokens", [1, 7, 2**20])
def test_documents_and_their_labels(tmp_path: Path, shard_tokens: int) -> None:
    """Every document, its label across the end ignored, a cut one anew in the next window; across shards alike."""
    lengths = [3, 2, 1, 9, 5, 1, 1, 2]  # words; an EOS comes on top
    path = make(tmp_path / "c", [range(10, 10 + n) for n in lengths], shard_tokens=shard_tokens)
    stream = [i for n in lengths for i in [*range(10, 10 + n), EOS_ID]]
    begins = np.cumsum([0, *(n + 1 for n in lengths)]).tolist()
    for s in (1, 4, 7, 31):
        data = dataset(path, s, shuffle=False, document_mask=True)
        tokens, labels = data.batch(0, data.streams[0].num_samples)
        for i, starts in enumerate(data.documents(0, data.streams[0].num_samples)):
            assert starts == [0, *(b - i * s for b in begins if i * s < b < (i + 1) * s)]
            assert tokens[i].tolist() == stream[i * s : (i + 1) * s]
            want = [-100 if t + 1 in begins else stream[t + 1] for t in range(i * s, (i + 1) * s)]
            assert labels[i].tolist() == want
    assert dataset(path, 4, shuffle=False).batch(0, 1)[1].tolist() == [stream[1:5]], "one stream without the mask"
    once = dataset(path, 4, shuffle=False, document_mask=True, repeat=False, epochs=1)
    for read in (once.batch, once.documents):
        with pytest.raises(DataError, match=r"data\.epochs = 1"):
            read(once.streams[0].num_samples, 1)


def test_the_label_to_ignore_is_that_of_the_loss() -> None:
    pytest.importorskip("torch")
    from pithtrain import data
    from pithtrain.ops import cross_entropy

    assert data.IGNORE == cross_entropy.IGNORE


def test_case_146_labels_are_shifted_before_a_sequence_is_cut(tmp_path: Path) -> None:
    """Tokens 0 .. 8 (from 10 on), cp = 2: rank 0 holds 0 1 6 7, and after 1 it predicts 2. Every rank of the pipeline
    knows the documents, the first stage alone the tokens."""
    pytest.importorskip("torch")
    data = dataset(make(tmp_path / "c", [range(10, 16), range(16, 23)]), 8, document_mask=True)
    ours = [read(data, Mesh(2, 1, 2, 1), rank) for rank in range(4)]
    assert [(x.tokens.tolist(), x.labels.tolist()) for x in ours[:2]] == [
        ([[10, 11, EOS_ID, 16]], [[11, 12, -100, 17]]),
        ([[12, 13, 14, 15]], [[13, 14, 15, EOS_ID]]),
    ]
    assert [x.part.documents for x in ours] == [[[0, 7]]] * 4
    assert [x.part.positions_BS.tolist() for x in ours] == [[[0, 1, 6, 0]], [[2, 3, 4, 5]]] * 2
    assert ours[2].tokens is None and ours[3].labels is None


# --- refusals ---


def refused(message: str, path: Path, **kwargs: Any) -> None:
    with pytest.raises(DataError, match=message):
        dataset(path, **kwargs)


def test_case_033_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = sequences(tmp_path / "c", 8)
    same = dataset(path, tokenizer=path / "tokenizer.json")
    assert same.fingerprint == corpus.tokenizer_sha256(path / "tokenizer.json")
    for name, size, first_word in (("wider", 600, 0), ("other ids", VOCAB, 5)):
        other = word_tokenizer(tmp_path / f"{name}.json", size, first_word=first_word)
        refused(
            rf"c/tokens: was made with a tokenizer of sha256 {same.fingerprint[:12]}, data.tokenizer .*{name}.json is "
            rf"{corpus.tokenizer_sha256(other)[:12]}; tokenize again, or leave data.tokenizer out",
            path,
            tokenizer=other,
            vocab_size=600,
        )
    dataset(path, vocab_size=600)  # data.tokenizer left out is the override, and the stored spec says so
    refused(r"gone.json: cannot read this tokenizer", path, tokenizer=tmp_path / "gone.json")


def test_a_corpus_that_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    refused("gone/tokens: there is no corpus here; `pithtrain tokenize` makes one", tmp_path / "gone")
    path = sequences(tmp_path / "c", 8)
    refused(
        r"its ids go up to 511, but model.vocab_size is 300; set model.vocab_size to at least 512", path, vocab_size=300
    )
    refused(r"c/tokens: has 34 tokens, one sample takes training.sequence_length \+ 1 = 35", path, length=34)
    assert dataset(path, length=33).streams[0].num_samples == 1
    shard = path / "tokens" / "shard-00000.tokens"
    shard.write_bytes(shard.read_bytes()[:-8])
    refused(r"shard-00000.tokens: has 4,240 bytes, but 34 tokens .* take 4,248; it was cut short", path)
    (path / "tokens" / corpus.MANIFEST).unlink()
    refused(r"c/tokens: this corpus is incomplete: 1 shards and no corpus.json", path)


def test_an_id_beyond_the_vocabulary_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = sequences(tmp_path / "c", 8)
    data = dataset(path, shuffle=False)
    shard = path / "tokens" / "shard-00000.tokens"
    damaged = bytearray(shard.read_bytes())
    damaged[4096 + 2 * 21 : 4096 + 2 * 22] = (60_000).to_bytes(2, "little")
    shard.write_bytes(damaged)
    data.batch(0, 5)
    with pytest.raises(DataError, match=r"shard-00000.tokens: token 21 is id 60,000, model.vocab_size is 512"):
        data.batch(5, 1)


@pytest.mark.parametrize("wrong", ["behind", "beyond", "first"])
def test_documents_that_do_not_lie_behind_each_other_are_found_when_a_shard_is_mapped(
    tmp_path: Path, wrong: str
) -> None:
    path = sequences(tmp_path / "c", 8)
    shard = corpus.open_corpus(path / "tokens").shards[0]
    assert shard.num_documents > 2
    at = {"first": 0, "behind": 1, "beyond": shard.num_documents}[wrong]
    damaged = bytearray(shard.path.read_bytes())
    damaged[shard.offsets_at + 8 * at : shard.offsets_at + 8 * at + 8] = (10**6).to_bytes(8, "little")
    shard.path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"shard-00000.tokens: its document offsets do not rise from 0 to \d+"):
        dataset(path, shuffle=False).batch(0, 1)


def test_a_shard_that_vanishes_is_named(tmp_path: Path) -> None:
    path = sequences(tmp_path / "c", 8, shard_tokens=16)
    data = dataset(path, shuffle=False)
    (path / "tokens" / "shard-00001.tokens").unlink()
    data.batch(0, 3)
    with pytest.raises(DataError, match=r"shard-00001.tokens: cannot read this shard: No such file"):
        data.batch(4, 1)


def test_no_more_epochs_than_allowed(tmp_path: Path) -> None:
    data = dataset(sequences(tmp_path / "c", 10), repeat=False, epochs=2)
    data.require(20)
    message = r"needs 21 samples .* data.epochs = 2 gives 2 x 10 = 20, of 4 tokens each; set data.epochs to 3 or"
    with pytest.raises(DataError, match=message):
        data.require(21)
    data.batch(16, 4)
    with pytest.raises(DataError, match=message):
        data.batch(17, 4)
