"""Every test may use the scripted drafters of `tests/drafters.py`."""

import pytest

from hf_dspark.drafting import DraftSession
from tests.drafters import listening_propose


@pytest.fixture(autouse=True)
def scripts_are_followed(monkeypatch):
    """Makes drafting sessions propose what a scripted drafter's script says; others are untouched."""
    monkeypatch.setattr(DraftSession, "propose", listening_propose(DraftSession.propose))
