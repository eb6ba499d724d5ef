"""What `progress` shows where standard error is no terminal, and on which rank."""

import logging

from ds_trainer.ranks import progress as module
from ds_trainer.ranks.progress import progress


def test_lines_say_how_many_are_done_and_the_seconds_to_go(monkeypatch, caplog):
    """Each item takes 20 seconds here: a line a item, but for the first, which no time has passed before."""
    seconds = iter(range(0, 1000, 20))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    with caplog.at_level(logging.INFO, "ds_trainer"):
        assert list(progress(["a", "b", "c"], "cutting", "layer")) == ["a", "b", "c"]
        assert caplog.messages[0] == "cutting: 1 of 3 layers, about 80 s to go"
        assert len(caplog.messages) == 2


def test_fast_work_and_other_ranks_write_nothing(monkeypatch, caplog):
    """The items come through unchanged on every rank; a line is rank 0's, after ten seconds."""
    with caplog.at_level(logging.INFO, "ds_trainer"):
        assert list(progress(iter("abc"), "reading", "row", total=3)) == list("abc")
        monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
        monkeypatch.setenv("RANK", "1")
        assert list(progress("abc", "reading", "row")) == list("abc")
    assert caplog.messages == []
