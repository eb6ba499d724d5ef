"""Files and folders are written as a whole or not at all."""

import json
from pathlib import Path

import pytest

from ds_trainer.files.writing import file_aside, folder_aside, is_aside, write_json, write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """An error in the midst leaves the old content, and nothing beside it."""
    path = tmp_path / "a.txt"
    write_whole(path, "old")

    def fail() -> None:
        with file_aside(path) as aside:
            aside.write_text("half")
            assert is_aside(aside)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "old"}
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_folder_appears_as_a_whole(tmp_path: Path) -> None:
    """Everybody can read it; after an error it does not exist."""
    with folder_aside(tmp_path / "deep" / "a") as aside:
        (aside / "file").write_text("x")
        assert is_aside(aside)
        assert not (tmp_path / "deep" / "a").exists()
    assert (tmp_path / "deep" / "a").stat().st_mode & 0o777 == 0o755
    with pytest.raises(KeyError), folder_aside(tmp_path / "deep" / "b") as aside:
        raise KeyError
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a"]


def test_json_of_any_path_can_be_read_back(tmp_path: Path) -> None:
    """Also of one that is not UTF-8."""
    value = {"path": b"/caf\xe9/\xc3\xa9".decode(errors="surrogateescape")}
    write_json(tmp_path / "new" / "a.json", value)
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == value


@pytest.mark.parametrize("name", ["a.tmp", ".a.tmp", ".a.b.tmp", ".a.12.txt"])
def test_a_users_own_file_is_not_taken_for_an_unfinished_one(name: str) -> None:
    """Unfinished files of killed runs are deleted."""
    assert not is_aside(Path(name))
