"""The demo's corpus and tokenizer: text that is on every machine, the Python standard library's own. No download.

.venv/bin/python demo/stdlib.py data/stdlib        (what `make setup` runs; about 20 s on two cores)

data/stdlib/tokenizer.json     a byte-level BPE of 4096 tokens trained on the text
data/stdlib/tokens/            the corpus, for `data.sources`
data/stdlib/held-out/          every 20th document, which is not in the other, for `validation.sources`
"""

import contextlib
import dataclasses
import itertools
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import ByteLevelBPETokenizer

from pithtrain.corpus import EOS, Report, open_corpus, tokenizer_sha256, write_corpus, written_aside
from pithtrain.errors import DataError

PARTS = ("tokenizer.json", "tokens", "held-out")
HELD_OUT = 20  # one document of so many is not trained on


def documents(max_characters: int = 12_000_000) -> Iterator[str]:
    """Python's help topics, then the standard library's modules but for tests, sorted by path. Ends with the document
    that reaches `max_characters`."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    modules = sorted(p for p in root.rglob("*.py") if p.is_file() and not left_out & set(p.relative_to(root).parts))
    sources = (p.read_text(encoding="utf-8", errors="ignore") for p in modules)  # a few are in another encoding
    characters = 0
    for text in itertools.chain((topics[name] for name in sorted(topics)), sources):
        yield text
        characters += len(text)
        if characters >= max_characters:
            return


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE with one special token, EOS = 0, and writes its `tokenizer.json`. Any text round-trips.
    `vocab_size` counts EOS and the 256 bytes."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[EOS])
    tokenizer.save(str(path))


def build(output: Path, vocab_size: int = 4096) -> Report | None:
    """Makes `output`/tokenizer.json and the corpora `output`/tokens and `output`/held-out; None when all are there
    already. It may be killed at any time: the directory appears whole, and of two processes at once each makes its own
    and the first one stays. The report is that of `tokens`."""
    with contextlib.suppress(DataError):
        made_with = {open_corpus(output / name).vocabulary.tokenizer_sha256 for name in ("tokens", "held-out")}
        if made_with == {tokenizer_sha256(output / "tokenizer.json")}:
            return None
    damaged = output.exists()
    try:
        with written_aside(output, damaged, PARTS) as aside:
            texts, tokenizer = list(documents()), aside / "tokenizer.json"
            train_tokenizer(texts, vocab_size, tokenizer)
            write_corpus(texts[::HELD_OUT], aside / "held-out", tokenizer)
            del texts[::HELD_OUT]
            report = write_corpus(texts, aside / "tokens", tokenizer)
    except DataError:
        if damaged or not output.exists():
            raise
        return None  # another process was faster
    return dataclasses.replace(report, corpus=open_corpus(output / "tokens"))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    try:
        print(build(place) or f"{place} is there already")
    except DataError as error:
        sys.exit(f"error: {error}")
