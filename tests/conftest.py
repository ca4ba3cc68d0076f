"""Fixtures that more than one test file uses."""

from collections.abc import Iterator

import pytest

from harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes for multi-rank tests, started once."""
    started = Pool()
    yield started
    started.close()
