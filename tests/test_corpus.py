"""Text in, token shards out: nothing lost, nothing doubled, and every bad input named with its file and line."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

import stdlib
from pithtrain import corpus
from pithtrain.errors import DataError

EOS_ID = 1


def word_tokenizer(path: Path, vocab_size: int, template: str | None = None, first_word: int = 0) -> Path:
    """ids: 0 <s>, 1 <|endoftext|>, 2 <unk>, then w3, w4, ... (`first_word` shifts the words: other ids, same size)."""
    words = {f"w{first_word + i}": i for i in range(3, vocab_size)}
    tokenizer = Tokenizer(WordLevel({"<s>": 0, corpus.EOS: EOS_ID, "<unk>": 2, **words}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken(corpus.EOS, special=True)])
    if template:
        tokenizer.post_processor = TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), (corpus.EOS, EOS_ID)]
        )
    tokenizer.save(str(path))
    return path


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def jsonl(path: Path, documents: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def read(c: corpus.Corpus) -> list[list[int]]:
    return [document.tolist() for shard in c.shards for document in shard.documents()]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "tokenizer.json", 100)


def test_case_026_ids_above_16_bits(tmp_path: Path) -> None:
    wide = word_tokenizer(tmp_path / "wide.json", 70_000)
    ids = [65_535, 65_536, 69_999]
    c = corpus.tokenize([jsonl(tmp_path / "a.jsonl", [{"text": words(ids)}])], tmp_path / "wide", wide).corpus
    assert c.vocabulary.token_bytes == 4
    assert read(c) == [[*ids, EOS_ID]]
    assert (corpus.Vocabulary(65_536, 0, "").token_bytes, corpus.Vocabulary(65_537, 0, "").token_bytes) == (2, 4)
    for size, bad in ((65_536, 65_536), (100, 100), (100, -1)):
        vocabulary = corpus.Vocabulary(size, EOS_ID, "")
        fits = corpus.write_shard(tmp_path / f"fits{bad}", vocabulary, [[3, size - 1, EOS_ID]])
        assert fits.tokens().tolist() == [3, size - 1, EOS_ID]
        with pytest.raises(DataError, match=f"id {bad:,} does not fit a vocabulary of {size:,} ids"):
            corpus.write_shard(tmp_path / f"{size}{bad}", vocabulary, [[3, EOS_ID], [3, bad, EOS_ID]])


def test_case_028_empty_documents_are_skipped_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    documents = [{"text": ""}, {"text": " \n\t"}, {"text": "w3 w4"}, {"text": "w5", "id": 7}]
    report = corpus.tokenize([jsonl(tmp_path / "a.jsonl", documents)], tmp_path / "out", tokenizer)
    assert read(report.corpus) == [[3, 4, EOS_ID], [5, EOS_ID]]
    assert report.corpus.empty_documents == 2
    assert "2 empty documents skipped" in str(report)
    with pytest.raises(DataError, match=r"hold no text \(2 empty documents\)"):
        corpus.tokenize([jsonl(tmp_path / "b.jsonl", documents[:2])], tmp_path / "none", tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "w3"}', r"bad.jsonl:2: must be an object with a string 'text', it has body: str; --text-key"),
        ('{"text": null}', r"bad.jsonl:2: must be an object with a string 'text', it has text: NoneType"),
        ('{"text": ["w3"]}', r"bad.jsonl:2: must be an object with a string 'text', it has text: list"),
        ('["w3"]', r"bad.jsonl:2: must be an object with a string 'text', it has b'\[\"w3\"\]'"),
        ('{"text": "w3"', r"bad.jsonl:2: is not JSON in UTF-8: EOF while parsing an object"),
        ('{"text": "\\ud800"}', r"bad.jsonl:2: is not JSON in UTF-8: unexpected end of hex escape"),
        ("\udcff", r"bad.jsonl:2: is not JSON in UTF-8"),
        ('{"text": "w3 \udcff"}', r"bad.jsonl:2: is not JSON in UTF-8: invalid unicode code point"),
    ],
)
def test_case_028_wrong_documents_fail_with_file_and_line(
    tmp_path: Path, tokenizer: Path, line: str, message: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(f'{{"text": "w3"}}\n{line}\n'.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        corpus.tokenize([bad], tmp_path / "out", tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "tokenizer.json"]  # nothing is left behind


def test_case_029_each_document_ends_in_one_eos(tmp_path: Path, tokenizer: Path) -> None:
    documents = [[3], [4, 5], [6, 7, 8]]
    path = jsonl(tmp_path / "a.jsonl", [{"text": words(ids)} for ids in documents])
    c = corpus.tokenize([path], tmp_path / "out", tokenizer).corpus
    assert read(c) == [[*ids, EOS_ID] for ids in documents]
    (shard,) = c.shards
    assert shard.offsets().tolist() == [0, 2, 5, 9]
    assert c.num_tokens == shard.num_tokens == len(shard.tokens()) == 9


def test_case_030_no_document_is_cut_and_none_merges_with_the_next(tmp_path: Path, tokenizer: Path) -> None:
    documents = [list(range(10, 10 + (40 if i % 2 == 0 else 5))) for i in range(20)]
    path = jsonl(tmp_path / "a.jsonl", [{"text": words(ids)} for ids in documents])
    c = corpus.tokenize([path], tmp_path / "out", tokenizer, shard_tokens=64).corpus
    assert read(c) == [[*ids, EOS_ID] for ids in documents]
    assert (c.num_documents, c.num_tokens) == (20, 10 * 41 + 10 * 6)
    assert len(c.shards) > 1


@pytest.mark.parametrize("template", [None, "<s> $A", f"$A {corpus.EOS}", f"<s> $A {corpus.EOS}"])
def test_case_031_special_tokens_exactly_once(tmp_path: Path, template: str | None) -> None:
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json", 100, template)
    path = jsonl(tmp_path / "a.jsonl", [{"text": "w3"}, {"text": "w4"}])
    report = corpus.tokenize([path], tmp_path / "out", tokenizer)
    assert read(report.corpus) == [[3, EOS_ID], [4, EOS_ID]]
    assert "the first document: 3 'w3' ... 1 '<|endoftext|>'" in str(report)


def test_shard_layout_is_the_page_in_the_docstring(tmp_path: Path) -> None:
    corpus.write_shard(tmp_path / "s.tokens", corpus.Vocabulary(4, 3, "ab"), [[0, 1, 3], [2, 3]])
    data = (tmp_path / "s.tokens").read_bytes()
    assert len(data) == 4096 + 10 + 6 + 24
    assert data[4095:4096] == b"\n"
    assert json.loads(data[:4096]) == {
        "format": "pithtrain tokens",
        "version": 1,
        "token_bytes": 2,
        "num_tokens": 5,
        "num_documents": 2,
        "vocab_size": 4,
        "eos_id": 3,
        "tokenizer_sha256": "ab",
    }
    assert np.frombuffer(data[4096:4106], "<u2").tolist() == [0, 1, 3, 2, 3]
    assert np.frombuffer(data[4112:], "<u8").tolist() == [0, 3, 5]


def test_inputs_of_every_kind_in_order(tmp_path: Path, tokenizer: Path) -> None:
    d = tmp_path / "in"
    (d / "sub").mkdir(parents=True)
    (d / ".hidden").mkdir()
    (d / "a.txt").write_text("w3\nw4\n")
    (d / "b.jsonl.gz").write_bytes(
        gzip.compress(b'{"body": "w5"}\n') + gzip.compress(b'\n{"body": "w6"}')  # two members, no last newline
    )
    (d / "c.jsonl.zst").write_bytes(zstandard.compress(b'{"body": "w7"}\n') * 2)  # two frames
    (d / "sub" / "d.md").write_bytes(b"\xef\xbb\xbfw8")  # with a byte order mark
    (d / ".hidden" / "e.txt").write_text("w9")
    (d / "f.parquet").write_bytes(b"\xff\xff")
    (tmp_path / "named.log").write_text("w10")
    seen: list[tuple[int, int, int]] = []
    report = corpus.tokenize(
        [tmp_path / "named.log", d],
        tmp_path / "out",
        tokenizer,
        text_key="body",
        progress=lambda *now: seen.append(now),
    )
    assert read(report.corpus) == [[*ids, EOS_ID] for ids in ([10], [3, 4], [5], [6], [7], [7], [8])]
    assert seen[-1][0] == seen[-1][1]
    assert seen[-1][2] == report.corpus.num_tokens


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstandard.compress)])
def test_compressed_input_that_is_cut_short_or_damaged(
    tmp_path: Path, tokenizer: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    whole = compress(b'{"text": "w3 w4 w5"}\n' * 2000)
    for name, data in {"short": whole[: len(whole) // 2], "not": b"plain text, not compressed"}.items():
        path = tmp_path / f"{name}.jsonl.{suffix}"
        path.write_bytes(data)
        with pytest.raises(DataError, match=f"{name}.jsonl.{suffix}: cannot decompress it"):
            corpus.tokenize([path], tmp_path / "out", tokenizer)


def test_bad_calls_are_refused_with_what_would_work(tmp_path: Path, tokenizer: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("w3")
    with pytest.raises(DataError, match=r"gone.txt: there is no such file or directory"):
        corpus.tokenize([tmp_path / "gone.txt"], out, tokenizer)
    with pytest.raises(DataError, match=r"gone.json: cannot read this tokenizer: No such file"):
        corpus.tokenize([text], out, tmp_path / "gone.json")
    with pytest.raises(DataError, match=r"a.txt: is not a tokenizer.json"):
        corpus.tokenize([text], out, text)
    with pytest.raises(DataError, match=r"no token '</s>' .* its special tokens: \['<s>', '<\|endoftext\|>'\]"):
        corpus.tokenize([text], out, tokenizer, eos="</s>")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt: is not UTF-8 text: .* at byte 0"):
        corpus.tokenize([tmp_path / "latin.txt"], out, tokenizer)
    assert not out.exists()


def test_an_existing_output_is_kept_unless_overwritten(tmp_path: Path, tokenizer: Path) -> None:
    out = tmp_path / "out"
    corpus.tokenize([jsonl(tmp_path / "a.jsonl", [{"text": "w3"}])], out, tokenizer)
    text = jsonl(tmp_path / "b.jsonl", [{"text": "w4"}])
    with pytest.raises(DataError, match=r"out: exists already.*--overwrite"):
        corpus.tokenize([text], out, tokenizer)
    with pytest.raises(DataError, match="with a string 'text'"):  # a failure keeps the old one
        corpus.tokenize([jsonl(tmp_path / "c.jsonl", [{"text": 1}])], out, tokenizer, overwrite=True)
    assert read(corpus.open_corpus(out)) == [[3, EOS_ID]]
    corpus.tokenize([text], out, tokenizer, overwrite=True)
    assert read(corpus.open_corpus(out)) == [[4, EOS_ID]]
    (out / "thesis.tex").write_text("the only copy")
    with pytest.raises(DataError, match=r"out/thesis.tex is no part of a corpus"):
        corpus.tokenize([text], out, tokenizer, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["corpus.json", "shard-00000.tokens", "thesis.tex"]
    assert not list(tmp_path.glob(".*"))


def test_a_corpus_that_is_not_whole_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    out = tmp_path / "out"
    documents = [{"text": words(range(3, 90))} for _ in range(4)]
    shards = corpus.tokenize([jsonl(tmp_path / "a.jsonl", documents)], out, tokenizer, shard_tokens=100).corpus.shards
    assert [s.num_tokens for s in shards] == [176, 176]
    manifest, second = out / corpus.MANIFEST, shards[1].path
    kept = {path: path.read_bytes() for path in (manifest, second)}

    def check() -> None:
        for shard in corpus.open_corpus(out).shards:
            shard.check()

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            check()
        for path, data in kept.items():
            path.write_bytes(data)

    manifest.unlink()
    refused(r"out: this corpus is incomplete: 2 shards and no corpus.json")
    manifest.write_bytes(kept[manifest][:40])
    refused("corpus.json: is not JSON")
    manifest.write_bytes(kept[manifest].replace(b'"version": 1', b'"version": 2'))
    refused(r"is in format \('pithtrain tokens', 2\), this version reads \('pithtrain tokens', 1\)")
    second.write_bytes(kept[second][:-30])
    refused("shard-00001.tokens: has 4,442 bytes, but 176 tokens of 2 bytes in 2 documents take 4,472; it was cut")
    second.unlink()
    refused("shard-00001.tokens: cannot read this shard: No such file")
    second.write_bytes(kept[second].replace(b'"eos_id": 1', b'"eos_id": 0'))
    refused("shard-00001.tokens: its header and the corpus.json beside it disagree")
    second.write_bytes(b"x" * len(kept[second]))
    refused("shard-00001.tokens: its header and the corpus.json beside it disagree")
    assert len(read(corpus.open_corpus(out))) == 4


def test_trained_tokenizer_gives_back_any_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    stdlib.train_tokenizer(["the quick brown fox\n"] * 20, 300, path)
    tokenizer, vocabulary = corpus.load_tokenizer(path)
    assert vocabulary.eos_id == 0
    assert 257 < vocabulary.vocab_size <= 300
    for text in ("the quick brown fox\n", "  Éclair 🦊\r\n\tx\x00", f"text that spells {corpus.EOS} is text"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.eos_id not in ids
        assert tokenizer.decode(ids) == text


BUILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import stdlib
from pithtrain import corpus
def die(*now):
    os.kill(os.getpid(), signal.SIGKILL)
write_corpus = stdlib.write_corpus
if sys.argv[2] == "die":  # in the middle of the tokens
    corpus.BATCH_CHARACTERS = 1000
    stdlib.write_corpus = lambda *files: write_corpus(*files, shard_tokens=10, progress=die)
stdlib.documents = lambda: (f"document {i} of the library" for i in range(2000))
stdlib.build(Path(sys.argv[1]), 300)
"""


def test_stdlib_is_built_once_by_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "data" / "stdlib"
    build, demo = [sys.executable, "-c", BUILD, str(out)], str(Path(stdlib.__file__).parent)
    assert subprocess.run([*build, "die", demo], timeout=60).returncode == -signal.SIGKILL
    assert not out.exists()  # killed in the middle: nothing there yet, only what the next line removes
    shutil.rmtree(out.parent)
    builders = [subprocess.Popen([*build, "live", demo]) for _ in range(3)]
    assert [builder.wait(60) for builder in builders] == [0, 0, 0]
    c = corpus.open_corpus(out / "tokens")
    assert c.num_documents == 1900 and corpus.open_corpus(out / "held-out").num_documents == 100
    assert c.vocabulary.tokenizer_sha256 == corpus.tokenizer_sha256(out / "tokenizer.json")
    assert [p.name for p in out.parent.iterdir()] == ["stdlib"]

    def few() -> Iterator[str]:
        return iter(["one document"] * 3)

    monkeypatch.setattr(stdlib, "documents", few)
    assert stdlib.build(out, 300) is None  # complete: nothing is done
    (out / "tokenizer.json").write_text("{}")  # another tokenizer than the corpus names: made again, both
    report = stdlib.build(out, 300)
    assert report is not None
    assert report.corpus.num_documents == 2
    assert report.corpus.path == out / "tokens"
    for name in ("tokens", "held-out"):
        (out / name / corpus.MANIFEST).unlink()
        assert stdlib.build(out, 300) is not None


def test_stdlib_documents_are_real_text_and_repeat() -> None:
    documents = list(stdlib.documents(600_000))
    assert documents == list(stdlib.documents(600_000))
    assert "assert" in documents[0]
    assert 600_000 <= sum(map(len, documents)) < 900_000
    assert any("import" in text for text in documents[80:])
