"""The doctor of hostfiles without hosts: its parsing, its rows, its table, and an ssh that is a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT, environment

from ds_trainer import doctor_probe
from ds_trainer.doctor import doctor_command, read_job, table
from ds_trainer.doctor_checks import Row, Setting, check_facts, check_names, common_interface, ssh_row
from ds_trainer.hostfile import Host, export_commands, exports, parse_environment, parse_hostfile, read_hostfile

ONE, TWO = Host("one", 2), Host("ann@two", 2)


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_good_hostfile():
    """Comments, blank lines, users, addresses and Windows line ends; the order is kept."""
    text = "# ours\r\n\r\none slots=2\r\n  ann@two\tslots=2  # the old one\n10.0.0.3 slots=16"
    assert parse_hostfile(text) == ([ONE, TWO, Host("10.0.0.3", 16)], [])
    assert TWO.address == "two"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("three", "is not of the form 'worker-1 slots=8'"),
        ("three slots=4x", "is not of the form"),
        ("three slots=4 gpus=2", "is not of the form"),
        ("three slots = 4", "is not of the form"),
        ("three slots=0", "has slots=0"),
        ("one slots=2", "one is in line 1 already"),
        ("fe80::1 slots=2", "'fe80::1' is no host name or IPv4 address"),
        ("-oProxyCommand=true slots=2", "is no host name"),
        ("\ufeffthree slots=2", "is no host name"),
    ],
)
def test_a_bad_line_of_a_hostfile_is_told_with_its_number(line, told):
    """What DeepSpeed refuses, and what it takes for something else; lines around it are still read."""
    hosts, mistakes = parse_hostfile(f"one slots=2\n\n{line}\nann@two slots=2\n")
    assert len(mistakes) == 1
    assert mistakes[0].startswith("line 3: ")
    assert told in mistakes[0]
    assert {ONE, TWO} <= set(hosts)


def test_all_mistakes_of_a_hostfile_are_told_at_once(tmp_path):
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
    with pytest.raises(ValueError, match=r"no file|no host|as text"):
        read_hostfile(path)


@given(st.text())
def test_any_text_is_a_hostfile_or_has_mistakes(text):
    """No other error, and every host that is found can stand in a command without being taken for a flag."""
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
    ("line", "told"),
    [
        ("", "line 2 is blank"),
        ("  ", "line 2 is blank"),
        ("# B=1", "line 2 is a comment"),
        ("B", "is not of the form NAME=VALUE"),
        ("export B=1", "is not of the form NAME=VALUE"),
        ('B="1"', "holds a quote"),
        ("B=`id`", "holds a quote"),
    ],
)
def test_a_bad_line_of_an_environment_file_is_told_with_its_number(line, told):
    """The lines that DeepSpeed stops at, and those that it sends to the hosts' shells to be misread."""
    values, mistakes = parse_environment(f"A=1\n{line}\nC=3\n")
    assert values == {"A": "1", "C": "3"}
    assert len(mistakes) == 1
    assert told in mistakes[0]


def test_what_deepspeed_exports_is_exported():
    """Some of the shell's variables, the project first on PYTHONPATH, the file's; $PATH there is the remote one."""
    shell = {"PYTHONPATH": "/x", "UCX_TLS": "tcp", "SECRET": "s", "PYTHONUNBUFFERED": "1"}
    values = exports(shell, {"PATH": "/v/bin:$PATH", "A": "b c"}, "/project")
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


# --- rows -----------------------------------------------------------------------------------------------------------


def facts(**changes) -> dict:
    """What a good host tells."""
    told = {
        "time": 100.0,
        "asked": 99.0,
        "answered": 101.0,
        "python": "3.11.7",
        "source": "abc",
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
        "tools": {"ninja": "/v/bin/ninja", "c++": "/usr/bin/c++"},
        "name": "two",
        "own_address": "10.0.0.2",
        "addresses": ["10.0.0.2"],
        "token": {"text": "t", "writable": True},
        "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.2"},
    }
    return told | changes


def setting(exports=None, hosts=(ONE, TWO), token="t") -> Setting:
    return Setting(hosts, facts(), exports or {}, "/project", "/v/bin/python", token, "/out", "eth0")


def test_a_good_host_has_no_fault():
    assert {row.result for row in check_facts(TWO, facts(), setting())} == {"ok"}


@pytest.mark.parametrize(
    ("check", "changes", "result", "found", "cure"),
    [
        ("python", {"python": "3.12.1"}, "FAILED", "is 3.12.1, here 3.11.7", "same version"),
        (
            "versions",
            {"versions": {"torch": "2.12.0", "deepspeed": None}},
            "FAILED",
            "deepspeed is absent",
            "pip install",
        ),
        ("project", {"source": None}, "FAILED", "there is no /project", "copy it"),
        ("project", {"source": "abd"}, "FAILED", "differs", "copy it"),
        ("own name", {"own_address": "127.0.1.1"}, "FAILED", "two is 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0"),
        ("own name", {"own_address": None}, "FAILED", "two has no address", "GLOO_SOCKET_IFNAME=eth0"),
        ("build tools", {"tools": {"ninja": None, "c++": "/c++"}}, "FAILED", "no ninja", "PATH=/v/bin:$PATH"),
        ("build tools", {"tools": {"ninja": None, "c++": None}}, "FAILED", "no ninja and no c++", "apt install g++"),
        ("build tools", {"tools": {"ninja": "/n", "c++": "/c++"}}, "warning", "builds anew", "PATH=/v/bin:$PATH"),
        ("output folder", {"token": {"text": "u", "writable": True}}, "FAILED", "is not there", "NFS"),
        ("output folder", {"token": {"error": "No", "folder": True}}, "FAILED", "is another folder", "NFS"),
        ("output folder", {"token": {"text": "t", "writable": False}}, "FAILED", "cannot be written", "right to write"),
        ("clock", {"time": 110.0}, "warning", "9 s from this one", "NTP"),
        ("clock", {"time": 60.0}, "warning", "39 s from this one", "NTP"),
    ],
)
def test_a_fault_is_found_with_its_cure(check, changes, result, found, cure):
    """In its own row, and in no other."""
    rows = [row for row in check_facts(TWO, facts(**changes), setting()) if row.result != "ok"]
    assert [(row.check, row.host, row.result) for row in rows] == [(check, "ann@two", result)]
    assert found in rows[0].found
    assert cure in rows[0].cure


def test_an_interface_cures_the_own_name_where_it_exists():
    """GLOO_SOCKET_IFNAME in .deepspeed_env: ok where the host has it, FAILED with the host's interfaces where not."""
    for interface, result in (("eth0", "ok"), ("eth1", "FAILED")):
        given = setting({"GLOO_SOCKET_IFNAME": interface})
        row = next(r for r in check_facts(TWO, facts(own_address="127.0.1.1"), given) if r.check == "own name")
        assert row.result == result
    assert "eth0" in row.found


def test_one_host_may_call_itself_as_it_likes():
    """127.0.1.1 harms nobody where there is no other host."""
    rows = check_facts(ONE, facts(own_address="127.0.1.1"), setting(hosts=(ONE,)))
    assert {row.result for row in rows} == {"ok"}


def test_names_without_an_address_of_their_own_are_found():
    """Unknown names, two of one host, localhost among others; this machine's own name on 127.0.1.1 is no such fault."""
    hosts = [Host(name, 1) for name in ("here", "unknown", "a", "b", "localhost")]
    addresses = dict(zip(hosts, ["127.0.1.1", None, "10.0.0.1", "10.0.0.1", "127.0.0.1"], strict=True))
    rows = check_names(hosts, addresses, "here")
    assert [row.result for row in rows] == ["ok", "FAILED", "ok", "FAILED", "FAILED"]
    assert rows[3].found == "10.0.0.1 is the address of a"


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        ("ann@two: Permission denied (publickey).", "ssh-copy-id ann@two"),
        ("Host key verification failed.", "ssh-keyscan two"),
        ("ssh: connect to host two port 22: Connection refused", "start sshd"),
        ("ssh: Could not resolve hostname two: Name or service not known", "/etc/hosts"),
        ("no answer within 5 s", "ssh ann@two true"),
    ],
)
def test_sshs_own_reason_has_its_cure(error, cure):
    row = ssh_row(TWO, error)
    assert (row.result, row.found) == ("FAILED", error)
    assert cure in row.cure


def test_the_common_interface_is_named_only_where_it_is_one():
    """By the address that a host's name has, or `hostname -I` where that is the loopback."""
    told = {ONE: facts(interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"}, addresses=["10.0.0.1"]), TWO: facts()}
    assert common_interface(told, {ONE: "127.0.1.1", TWO: "10.0.0.2"}) == "eth0"
    told[TWO] = facts(interfaces={"ens3": "10.0.0.2"})
    assert common_interface(told, {ONE: "10.0.0.1", TWO: "10.0.0.2"}) == "INTERFACE"


# --- the table and the command --------------------------------------------------------------------------------------


def test_the_table_has_every_word_and_keeps_its_width():
    """Equal rows of all hosts are one; long cells are wrapped, not cut; no line is longer than the width."""
    long = " ".join(f"word{number}" for number in range(40))
    rows = [Row("ssh", name, "ok", "answers") for name in "abc"]
    rows += [
        Row("clock", "a", "warning", long, long),
        Row("clock", "b", "ok", "agrees"),
        Row("clock", "c", "ok", "agrees"),
    ]
    lines = table(rows, 120).split("\n")
    assert max(map(len, lines)) <= 120
    assert lines[0].split() == ["check", "host", "result", "found", "cure"]
    assert lines[1].split() == ["ssh", "all", "3", "ok", "answers"]
    assert all(
        " ".join(lines).count(f"word{number} ") + " ".join(lines).endswith(f"word{number}") for number in range(40)
    )
    assert lines[-1].split() == ["clock", "b,", "c", "ok", "agrees"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--master_port", "70000"], "--master_port is 70000"),
        (["--ssh_port", "0"], "--ssh_port is 0"),
        (["--timeout", "1"], "--timeout is 1"),
        (["--ssh_args", "'"], "--ssh_args"),
        (["--hosts", "x"], "--hosts"),
    ],
)
def test_a_wrong_flag_ends_with_2(flags, told, capsys):
    """Told before anything is asked."""
    with pytest.raises(SystemExit) as caught:
        doctor_command(["--hostfile", "none", *flags])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_ssh_asks_no_question_and_takes_pdshs_flags(monkeypatch):
    """BatchMode, the port, and PDSH_SSH_ARGS_APPEND unless other flags are given."""
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-F config")
    ssh = read_job(["--hostfile", "h", "--ssh_port", "2222"]).ssh
    assert {"BatchMode=yes", "-F", "config", "2222"} <= set(ssh)
    assert "-F" not in read_job(["--hostfile", "h", "--ssh_args=-v"]).ssh


FAKE_SSH = """\
    #!/bin/bash
    # ssh of a fake: the host before the command picks what it does
    host=${@: -2:1} command=${@: -1}
    case $host in
      denied) echo "Permission denied (publickey)." >&2; exit 255 ;;
      silent) exec sleep 600 ;;
      nopython) echo 'bash: line 1: python: No such file or directory' >&2; exit 127 ;;
      noisy) echo 'Welcome to noisy!'; exec bash -c "$command" ;;
    esac
    exec bash -c "$command"
"""


@pytest.fixture
def ask(tmp_path):
    """Run launch/doctor.py with the fake ssh; names of hosts are in a resolver of the test's own."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("ssh", FAKE_SSH), ("pdsh", "#!/bin/bash\n")):
        (programs / name).write_text(textwrap.dedent(text))
        (programs / name).chmod(0o755)
    site = tmp_path / "site"
    site.mkdir()
    # the fake hosts' names: 10.9.0.N, and this machine is at the first of them
    (site / "sitecustomize.py").write_text(
        "import socket\n"
        "names = ['denied', 'silent', 'nopython', 'noisy', 'plain']\n"
        "socket.gethostbyname = lambda name, real=socket.gethostbyname: "
        "f'10.9.0.{names.index(name) + 1}' if name in names else real(name)\n"
    )

    def run(hostfile: str, *flags: str) -> tuple[int, list[dict]]:
        path = tmp_path / "hostfile"
        path.write_text(hostfile)
        own = environment()
        own |= {"PATH": f"{programs}:{own['PATH']}", "PYTHONPATH": str(site), "HOME": str(tmp_path)}
        command = [sys.executable, "launch/doctor.py", "--hostfile", str(path), "--json", *flags]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=120)
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)

    return run


def test_every_kind_of_ssh_failure_is_told_and_what_needs_it_is_skipped(ask, tmp_path):
    """Refused, silent, without python: each its own row and cure; a login that prints things does no harm."""
    output = tmp_path / "out"
    output.mkdir()
    names = ("denied", "silent", "nopython", "noisy")
    flags = ("--output_dir", str(output), "--timeout", "5")
    code, found = ask("".join(f"{name} slots=1\n" for name in names), *flags)
    rows = {(row["check"], row["host"]): row for row in found}
    assert code == 1
    assert {key for key, row in rows.items() if row["result"] == "FAILED" and key[0] != "own name"} == {
        *{("ssh", "denied"), ("ssh", "silent"), ("python", "nopython")},
    }
    assert "ssh-copy-id denied" in rows["ssh", "denied"]["cure"]
    assert rows["ssh", "silent"]["found"] == "no answer within 5 s"
    assert "cannot be started" in rows["python", "nopython"]["found"]
    assert rows["versions", "nopython"]["found"] == "python failed"
    assert rows["versions", "silent"]["found"] == "ssh failed"
    assert rows["output folder", "noisy"]["result"] == "ok"
    assert rows["all-reduce", "noisy"]["result"] == "skipped"
    assert list(output.iterdir()) == []


def test_one_host_needs_no_ssh(ask):
    """localhost alone: every check up to an all-reduce of one, through no ssh; that DeepSpeed wants it is a warning."""
    port = str(_free_port())
    code, found = ask("localhost slots=2\n", "--master_port", port)
    assert [row for row in found if row["result"] == "FAILED"] == []
    assert code == 0
    assert found[-1]["check"] == "all-reduce"
    assert "gloo" in found[-1]["found"] or "nccl" in found[-1]["found"]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def test_the_doctor_loads_no_torch():
    """So that it starts fast, and tells of a torch that is broken."""
    loaded = "import sys, ds_trainer.doctor, ds_trainer.doctor_rank"
    code = f"{loaded}; print({{'torch', 'deepspeed', 'pydantic'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_source_hash_sees_a_changed_file(tmp_path):
    """One byte, or one name, of the library or a command; not what is compiled of it."""
    for name in ("ds_trainer/a.py", "launch/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    hashes = [doctor_probe.source_hash(str(tmp_path))]
    (tmp_path / "ds_trainer" / "a.pyc").write_text("compiled")
    assert doctor_probe.source_hash(str(tmp_path)) == hashes[0]
    (tmp_path / "launch" / "b.py").write_text("x = 2\n")
    hashes.append(doctor_probe.source_hash(str(tmp_path)))
    os.rename(tmp_path / "ds_trainer" / "a.py", tmp_path / "ds_trainer" / "c.py")
    hashes.append(doctor_probe.source_hash(str(tmp_path)))
    assert len(set(hashes)) == 3
    assert doctor_probe.source_hash(str(Path(tmp_path) / "none")) is None
