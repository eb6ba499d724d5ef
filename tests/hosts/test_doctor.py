"""The doctor of hostfiles without hosts: its rows, its table, and an ssh that is a script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.launching import ROOT, environment, free_port

from ds_trainer.cli.doctor import doctor_command, read_doctor_job
from ds_trainer.hosts import probe as doctor_probe
from ds_trainer.hosts.checks import Row, Setting, check_facts, check_names, common_interface, path_row, shown, ssh_row
from ds_trainer.hosts.doctor import table
from ds_trainer.hosts.hostfile import Host
from ds_trainer.hosts.remote import Remote

ONE, TWO = Host("one", 2), Host("ann@two", 2)


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
def test_a_wrong_flag_ends_with_2(flags, told):
    """Told before anything is asked."""
    with pytest.raises(ValueError) as caught:
        doctor_command(["--hostfile", "none", *flags])
    assert told in str(caught.value)


def test_ssh_asks_no_question_and_takes_pdshs_flags(monkeypatch):
    """BatchMode, the port, and PDSH_SSH_ARGS_APPEND unless other flags are given."""
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-F config")
    ssh = read_doctor_job(["--hostfile", "h", "--ssh_port", "2222"]).ssh
    assert {"BatchMode=yes", "-F", "config", "2222"} <= set(ssh)
    assert "-F" not in read_doctor_job(["--hostfile", "h", "--ssh_args=-v"]).ssh


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
    code, found = ask("localhost slots=2\n", "--master_port", str(free_port()))
    assert [row for row in found if row["result"] == "FAILED"] == []
    assert code == 0
    assert found[-1]["check"] == "all-reduce"
    assert "gloo" in found[-1]["found"] or "nccl" in found[-1]["found"]


@pytest.mark.parametrize("hostfile", [None, "three slots=x\n"])
def test_a_wrong_hostfile_is_a_users_mistake(tmp_path, capsys, hostfile):
    """Exit code 2, as for all that the user wrote, and a row that tells it."""
    path = tmp_path / "hosts"
    if hostfile:
        path.write_text(hostfile)
    assert doctor_command(["--hostfile", str(path), "--json"]) == 2
    assert [row["check"] for row in json.loads(capsys.readouterr().out) if row["result"] == "FAILED"] == ["hostfile"]


@pytest.mark.parametrize("place", ["a" * 300, "file/out"])
def test_an_output_folder_that_cannot_be_is_told(ask, tmp_path, place):
    """A name too long for a file system, or a path through a file: a row, no traceback."""
    (tmp_path / "file").write_text("")
    code, found = ask("localhost slots=1\n", "--output_dir", str(tmp_path / place), "--master_port", str(free_port()))
    assert code == 1
    told = [row["found"] for row in found if row["check"] == "output folder" and row["result"] == "FAILED"]
    assert any(re.search("cannot be written here: (File name too long|Not a directory)", text) for text in told)


@pytest.mark.parametrize("name", ["a..b", "a" * 70, "\udcff"])
def test_what_is_no_name_has_no_address(name):
    """Python refuses to look it up at all."""
    assert doctor_probe.resolve(name) is None


def remote(*ssh: str) -> Remote:
    """Hosts behind a command in place of ssh."""
    return Remote(str(ROOT), sys.executable, {}, ssh, 20)


@pytest.mark.parametrize(
    ("ssh", "told"),
    [
        (("bash", "-c", "exec <&-; echo early >&2; echo 'the last word' >&2; exit 255"), "the last word"),
        (("/no/such/ssh",), "No such file"),
    ],
)
def test_an_ssh_that_ends_at_once_while_a_port_is_tried_is_told(ssh, told):
    """Its own last line; the callers are not started."""
    reply, calls = remote(*ssh).while_listening(ONE, free_port(), 1, lambda: pytest.fail("called"))
    assert told in reply.error
    assert calls is None


def test_a_login_may_print_what_is_no_utf_8():
    """Before the answer, in its place, or as an error: it is read all the same."""
    noisy = remote("bash", "-c", 'printf "gr\\xfc\\xdf\\n"; printf "\\xfc\\n" >&2; exec bash -c "$1"')
    assert noisy.probe(ONE, "facts", project=str(ROOT)).value["python"]
    silent = remote("bash", "-c", 'printf "no \\xfc\\n" >&2; exit 255')
    assert silent.probe(ONE, "facts").error == "no \ufffd"
    assert silent.ready(ONE) == "no \ufffd"


def test_a_path_that_needs_quotes_is_a_fault():
    """DeepSpeed writes it without."""
    assert path_row(["/a/b-c_d", "/v/bin/python3.11"]).result == "ok"
    row = path_row(["/a/b c", "/v/bin/python"])
    assert row.result == "FAILED"
    assert "'/a/b c'" in row.found
    assert "without blanks" in row.cure


def test_a_row_shows_no_secret_and_steers_no_terminal():
    """Whatever a host says."""
    row = shown(Row("ssh", "one", "FAILED", "\x1b[31mred\r api_key=hunter2\nnext", "https://ann:hunter2@two/"))
    assert "hunter2" not in row.found + row.cure
    assert row.found.startswith("?[31mred? api_key=")
    assert row.found.endswith("\nnext")


def test_the_doctor_loads_no_torch():
    """So that it starts fast, and tells of a torch that is broken."""
    loaded = "import sys, ds_trainer.hosts.doctor, ds_trainer.hosts.rank"
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
