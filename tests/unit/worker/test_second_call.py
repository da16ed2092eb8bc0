"""An elastic function that is called after one has returned in the same process."""

from __future__ import annotations

import pytest

import edl_hvd
from edl_hvd.errors import UsageError
from edl_hvd.worker import process
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous


class Launched(SoloRendezvous):
    """A launcher whose worlds change."""

    elastic = True

    def __init__(self) -> None:
        super().__init__()
        self.told = []

    def ended(self, step, error):
        self.told.append(error)


@edl_hvd.elastic
def train(state, fails=False):
    if fails:
        raise KeyError("ordered by the test")
    return list(state.epochs(2))


@pytest.fixture
def begin():
    def begun(rendezvous):
        process.shutdown()
        process.init(rendezvous)
        return rendezvous

    yield begun
    process.shutdown()


def test_under_a_launcher_it_is_refused_and_the_launcher_is_told(begin):
    launched = begin(Launched())
    train(edl_hvd.State())
    with pytest.raises(UsageError, match="after one had returned in the same job") as caught:
        train(edl_hvd.State())
    assert launched.told == [None, caught.value]


def test_it_may_be_called_again_when_the_first_call_has_failed(begin):
    begin(Launched())
    with pytest.raises(KeyError):
        train(edl_hvd.State(), fails=True)
    assert train(edl_hvd.State()) == [0, 1]


def test_without_a_launcher_it_works(begin):
    begin(SoloRendezvous())
    assert [train(edl_hvd.State()) for _ in range(2)] == [[0, 1], [0, 1]]
