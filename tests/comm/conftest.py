"""What tests of the watch share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from watches import Watches


@pytest.fixture
def watches() -> Iterator[Watches]:
    watches = Watches()
    yield watches
    watches.close()
    assert not watches.last_words, "a rank in this process was lost while it waited, and would have ended the process"
