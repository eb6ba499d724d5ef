"""The files about hosts: which lines of a hostfile and of `.deepspeed_env` are taken, and which are mistakes."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.launching import ROOT

from ds_trainer.hosts.doctor import environment_rows
from ds_trainer.hosts.hostfile import Host, export_commands, exports, parse_environment, parse_hostfile, read_hostfile

ONE, TWO = Host("one", 2), Host("ann@two", 2)


def test_a_good_hostfile():
    """Comments, blank lines, users, addresses and Windows line ends; the order is kept."""
    text = "# ours\r\n\r\none slots=2\r\n  ann@two\tslots=2  # the old one\n10.0.0.3 slots=16"
    assert parse_hostfile(text) == ([ONE, TWO, Host("10.0.0.3", 16)], [])
    assert TWO.address == "two"


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("three", "is not of the form 'worker-1 slots=8'"),
        ("three slots=4x", "is not of the form"),
        ("three slots=4 gpus=2", "is not of the form"),
        ("three slots = 4", "is not of the form"),
        ("three slots=0", "is not of the form"),
        ("one slots=2", "one is in line 1 already"),
        ("fe80::1 slots=2", "'fe80::1' is no host name or IPv4 address"),
        ("-oProxyCommand=true slots=2", "is no host name"),
        ("\ufeffthree slots=2", "is no host name"),
        ("a..b slots=2", "is no host name"),
        ("a" * 64 + " slots=2", "is no host name"),
        ("b\u00e4r slots=2", "is no host name"),
    ],
)
def test_a_bad_line_of_a_hostfile_is_reported_with_its_number(line, mistake):
    """DeepSpeed refuses it or misreads it; the lines around it are still read."""
    hosts, mistakes = parse_hostfile(f"one slots=2\n\n{line}\nann@two slots=2\n")
    assert len(mistakes) == 1
    assert mistakes[0].startswith("line 3: ")
    assert mistake in mistakes[0]
    assert {ONE, TWO} <= set(hosts)


def test_all_mistakes_of_a_hostfile_are_reported_at_once(tmp_path):
    """One a line; none is lost behind the first."""
    path = tmp_path / "hosts"
    path.write_text("one\ntwo slots=0\nthree slots=2\nthree slots=2\n")
    with pytest.raises(ValueError) as caught:
        read_hostfile(path)
    assert [line.split(":")[0] for line in str(caught.value).split("\n")] == ["line 1", "line 2", "line 4"]


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe\x00 slots=1\n"])
def test_a_hostfile_that_names_no_host_is_a_mistake(tmp_path, content):
    """Missing, empty, only comments, not text: never an empty list, with which DeepSpeed would train locally."""
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"does not exist|no host|as plain text"):
        read_hostfile(path)


@settings(deadline=None, derandomize=True)
@given(st.text())
def test_any_text_is_a_hostfile_or_has_mistakes(text):
    """No other error, and no host of the result could be taken for a flag of a command."""
    hosts, mistakes = parse_hostfile(text)
    assert all(mistake.startswith("line ") for mistake in mistakes)
    assert all(host.slots > 0 and not host.name.startswith("-") and " " not in host.name for host in hosts)


def test_the_example_hostfile_is_a_good_one():
    """launch/hostfile.example can be copied and changed."""
    assert len(read_hostfile(ROOT / "launch" / "hostfile.example")) == 2


def test_a_good_environment_file():
    """NAME=VALUE, blanks around the equals sign, more of them in the value."""
    assert parse_environment("PATH=/a/b:$PATH\nA = b=c d\n") == ({"PATH": "/a/b:$PATH", "A": "b=c d"}, [])


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("  ", "blank lines and comments are not allowed"),
        ("# B=1", "blank lines and comments are not allowed"),
        ("export B=1", "is not NAME=VALUE"),
        ('B="1"', "the quote, backslash or $("),
        ("B=$(id)", "the quote, backslash or $("),
    ],
)
def test_a_bad_line_of_an_environment_file_is_reported_with_its_number(line, mistake):
    """The lines that DeepSpeed stops at, and those that it sends to the hosts' shells to be misread."""
    values, mistakes = parse_environment(f"A=1\n{line}\nC=3\n")
    assert values == {"A": "1", "C": "3"}
    assert len(mistakes) == 1
    assert mistake in mistakes[0]
    assert mistakes[0].startswith("line 2 ") or mistakes[0].startswith("line 2:")


@pytest.mark.parametrize("line", ["hunter2", "export MY_KEY=hunter2", 'MY_KEY="hunter2"', "MY_KEY=hunter2$(id)"])
def test_a_mistake_in_an_environment_file_shows_nothing_of_the_line(line):
    """It may hold a secret; the line's number is enough."""
    _, (mistake,) = parse_environment(line + "\n")
    assert "hunter2" not in mistake
    assert mistake.startswith("line 1")


def test_an_environment_file_that_cannot_be_read_is_reported(monkeypatch, tmp_path):
    """DeepSpeed would end with a traceback; here it is a row."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    monkeypatch.setattr(Path, "read_bytes", _refuse)
    rows, exported = environment_rows()
    assert rows[0].result == "FAILED"
    assert rows[0].found == f"{tmp_path}/.deepspeed_env cannot be read: Permission denied"
    assert "A" not in exported


def _refuse(path: Path) -> bytes:
    raise PermissionError(13, "Permission denied", str(path))


def test_what_deepspeed_exports_is_exported():
    """Some of the shell's variables, the project first on PYTHONPATH, the file's; $PATH there is the remote one."""
    shell = {"PYTHONPATH": "/x", "UCX_TLS": "tcp", "SECRET": "s", "PYTHONUNBUFFERED": "1"}
    values = exports(shell, {"PATH": "/v/bin:$PATH", "A": "b c"}, Path("/project"))
    assert values == {
        "UCX_TLS": "tcp",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": "/project:/x",
        "PATH": "/v/bin:$PATH",
        "A": "b c",
    }
    script = " ".join(export_commands(values)) + ' echo "$PATH|$A|$PYTHONPATH"'
    done = subprocess.run(["bash", "-c", script], env={"PATH": "/bin"}, capture_output=True, text=True)
    assert done.stdout == "/v/bin:/bin|b c|/project:/x\n"
