"""The doctor of hostfiles without hosts: its rows, its table, and an ssh that is a script."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.launching import ROOT, environment, free_port

from ds_trainer.cli.doctor import doctor_command, read_doctor_job
from ds_trainer.hosts import doctor, probe
from ds_trainer.hosts.checks import Row, fact_rows, name_rows, shown, ssh_row
from ds_trainer.hosts.doctor import network_rows, table
from ds_trainer.hosts.hostfile import Host
from ds_trainer.hosts.remote import Remote

ONE, TWO = Host("one", 2), Host("ann@two", 2)


# --- rows -----------------------------------------------------------------------------------------------------------


def facts(**changes) -> dict:
    """The answer of a good host."""
    answer = {
        "python": "3.11.7",
        "clock": 0.3,
        "source": "abc",
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
        "tools": {"ninja": "/v/bin/ninja", "c++": "/usr/bin/c++"},
        "name": "two",
        "own_address": "10.0.0.2",
        "known_address": "10.0.0.2",
        "addresses": ["10.0.0.2"],
        "gloo_interface": "",
        "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.2"},
        "output_folder": "",
    }
    return answer | changes


def faults(**changes) -> list[Row]:
    return [row for row in fact_rows(TWO, facts(**changes), facts(), Path("/out")) if row.result != "ok"]


def test_a_good_host_has_no_fault():
    assert faults() == []


@pytest.mark.parametrize(
    ("check", "changes", "found", "cure"),
    [
        ("python", {"python": "3.12.1"}, "3.12.1, here 3.11.7", "same version"),
        ("versions", {"versions": {"torch": "2.12.0", "deepspeed": None}}, "deepspeed is missing", "pip install"),
        ("project", {"source": None}, "is missing", "copy it"),
        ("project", {"source": "abd"}, "abd, here abc", "copy it"),
        ("own name", {"own_address": "127.0.1.1"}, "two is 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0"),
        ("own name", {"own_address": None}, "two has no address", "GLOO_SOCKET_IFNAME=eth0"),
        ("own name", {"gloo_interface": "eth1"}, "the interfaces are lo, eth0", "GLOO_SOCKET_IFNAME=eth0"),
        ("build tools", {"tools": {"ninja": None, "c++": "/c++"}}, "no ninja", "PATH=/v/bin:$PATH"),
        ("build tools", {"tools": {"ninja": None, "c++": None}}, "no ninja and no c++", "apt install g++"),
        ("output folder", {"output_folder": "does not exist"}, "/out does not exist", "NFS"),
    ],
)
def test_a_fault_is_in_its_own_row_with_its_cure(check, changes, found, cure):
    """No other row reports it."""
    (row,) = faults(**changes)
    assert (row.check, row.host, row.result) == (check, "ann@two", "FAILED")
    assert found in row.found
    assert cure in row.cure


@pytest.mark.parametrize(
    ("check", "changes", "found", "cure"),
    [
        ("build tools", {"tools": {"ninja": "/bin/ninja", "c++": "/c++"}}, "here /v/bin/ninja", "PATH=/v/bin:$PATH"),
        ("clock", {"clock": -7200}, "-7,200 s from this one", "chrony"),
    ],
)
def test_hosts_that_would_compile_again_and_again_are_a_warning(check, changes, found, cure):
    """In a shared folder of kernels: another ninja, or a clock that is ahead."""
    (row,) = faults(**changes)
    assert (row.check, row.result) == (check, "warning")
    assert found in row.found
    assert cure in row.cure


def test_a_variable_of_the_shell_that_the_hosts_would_misread_is_a_fault(monkeypatch, tmp_path):
    """DeepSpeed exports it between double quotes; its value, which may be a secret, is not shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "$(hunter2)")
    rows, exported = doctor.environment_rows()
    (row,) = [row for row in rows if row.result == "FAILED"]
    assert row.check == "exports"
    assert "MLFLOW_TRACKING_PASSWORD: the hosts' shells would read" in row.found
    assert "hunter2" not in str(rows)
    assert "MLFLOW_TRACKING_PASSWORD" not in exported


def test_an_interface_cures_the_own_name():
    """With GLOO_SOCKET_IFNAME gloo does not look up the host's name."""
    assert faults(own_address="127.0.1.1", gloo_interface="eth0") == []


def test_the_output_folder_is_seen_by_its_token(tmp_path, monkeypatch):
    """A file of another content, or none, means another folder."""
    monkeypatch.setattr(probe.time, "sleep", lambda seconds: None)
    path = tmp_path / "token"
    path.write_text("mine")
    assert probe.find_token(str(path), "mine") == ""
    assert probe.find_token(str(path), "yours") == "is another folder than here"
    assert probe.find_token(str(tmp_path / "none" / "token"), "mine") == "does not exist"


def test_names_without_an_address_of_their_own_are_found():
    """Unknown names, two of one host, localhost among others; this machine's own name on 127.0.1.1 is no such fault."""
    hosts = [Host(name, 1) for name in ("here", "unknown", "a", "b", "localhost")]
    addresses = dict(zip(hosts, ["127.0.1.1", None, "10.0.0.1", "10.0.0.1", "127.0.0.1"], strict=True))
    rows = name_rows(hosts, addresses, "here")
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


# --- the table and the command --------------------------------------------------------------------------------------


def test_the_table_has_one_line_for_hosts_with_the_same_result():
    """In the order of the checks; a result of several lines is one line."""
    rows = [Row("ssh", name, "ok", "answers") for name in "abc"]
    rows += [
        Row("own name", "a", "FAILED", "one\ntwo", "three"),
        *(Row("own name", name, "ok", "is 1") for name in "bc"),
    ]
    assert [line.split() for line in table(rows).split("\n")] == [
        ["check", "host", "result", "found", "cure"],
        ["ssh", "all", "3", "ok", "answers"],
        ["own", "name", "a", "FAILED", "one;", "two", "three"],
        ["own", "name", "b,", "c", "ok", "is", "1"],
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--master_port", "70000"], "--master_port is 70000"),
        (["--timeout", "1"], "--timeout is 1"),
        (["--hosts", "x"], "--hosts"),
    ],
)
def test_a_wrong_flag_is_a_users_mistake(flags, message, capsys):
    """It is reported before any command runs on a host."""
    with pytest.raises((SystemExit, ValueError)) as caught:
        doctor_command(["--hostfile", "none", *flags])
    assert message in f"{caught.value}{capsys.readouterr().err}"


def test_ssh_asks_no_question_and_takes_pdshs_flags(monkeypatch):
    """BatchMode, the port, and PDSH_SSH_ARGS_APPEND unless other flags are given."""
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-F config")
    ssh = read_doctor_job(["--hostfile", "h", "--ssh_port", "2222"]).ssh
    assert {"BatchMode=yes", "-F", "config", "2222"} <= set(ssh)
    assert "-F" not in read_doctor_job(["--hostfile", "h", "--ssh_args=-v"]).ssh


FAKE_SSH = """\
    #!/bin/bash
    # a fake ssh, which acts by the name of the host
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
    """Run launch/doctor.py with a fake ssh, and a fake resolver that knows the hosts' names."""
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
        own |= {"PATH": f"{programs}:{own['PATH']}", "PYTHONPATH": f"{site}:{ROOT}", "HOME": str(tmp_path)}
        command = [sys.executable, "launch/doctor.py", "--hostfile", str(path), "--json", *flags]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=120)
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)

    return run


def test_every_kind_of_ssh_failure_is_reported_and_the_checks_that_need_ssh_are_skipped(ask, tmp_path):
    """Refused, silent, without python: each has another row and cure; a login that prints things does no harm."""
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
    """Every check passes up to an all-reduce of one; ssh is skipped, and a name at the loopback is no fault."""
    code, found = ask("localhost slots=2\n", "--master_port", str(free_port()))
    assert {row["check"] for row in found if row["result"] != "ok"} == {"ssh", "output folder"}
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


def test_an_output_folder_that_cannot_be_made_is_a_fault(monkeypatch, tmp_path, capsys):
    """The row has the message of the training command."""
    (tmp_path / "file").write_text("")
    (tmp_path / "hostfile").write_text("localhost slots=1\n")
    monkeypatch.setattr(doctor, "network_rows", lambda *_: [])
    flags = ["--hostfile", str(tmp_path / "hostfile"), "--output_dir", str(tmp_path / "file/out"), "--json"]
    assert doctor_command(flags) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["found"] for row in rows if row["result"] == "FAILED"] == [
        f"the output folder {tmp_path / 'file/out'} cannot be made: {tmp_path / 'file'} is a file, or read-only"
    ]


def test_what_is_no_name_has_no_address():
    """Python raises other errors than OSError for some of them."""
    assert [probe.resolve(name) for name in ("a..b", "a" * 70, "\udcff")] == [None] * 3


def remote(*ssh: str) -> Remote:
    """Hosts behind a command in place of ssh."""
    return Remote({}, ssh, 5)


def test_a_port_that_is_taken_or_out_of_reach_is_a_fault():
    """The other hosts are skipped where the first one cannot listen; one that cannot connect is named."""
    port = free_port()
    here = remote("bash", "-c", 'exec bash -c "$1"')
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        rows = network_rows(here, [ONE, TWO], "127.0.0.1", port)
    assert [row.result for row in rows] == ["FAILED", "skipped", "skipped", "skipped"]
    assert "Address already in use" in rows[0].found
    rows = network_rows(here, [ONE, TWO], "127.1.2.3.invalid", port)
    assert [row.result for row in rows] == ["ok", "FAILED", "skipped", "skipped"]


def test_a_login_may_print_what_is_no_utf_8():
    """Before the answer, in its place, or as an error: it is read all the same."""
    noisy = remote("bash", "-c", 'printf "gr\\xfc\\xdf\\n"; printf "\\xfc\\n" >&2; exec bash -c "$1"')
    assert noisy.ask(ONE, "facts").value["python"]
    silent = remote("bash", "-c", 'printf "no \\xfc\\n" >&2; exit 255')
    assert silent.ask(ONE, "facts").error == "no \ufffd"
    assert "No such file" in remote("/no/such/ssh").ask(ONE, "facts").error


def test_a_path_that_needs_quotes_is_a_fault(monkeypatch):
    """DeepSpeed writes paths into the hosts' shells without quotes."""
    monkeypatch.setattr(doctor, "PROJECT", Path("/a/b c"))
    (row,) = [row for row in doctor._launcher_rows() if row.check == "paths"]
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
    code = f"{loaded}; print({{'torch', 'deepspeed'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_source_hash_sees_a_changed_file(tmp_path):
    """A changed byte, or name, of the library changes it; a compiled file does not."""
    for name in ("ds_trainer/a.py", "ds_trainer/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    hashes = [probe.source_hash(str(tmp_path))]
    (tmp_path / "ds_trainer" / "a.pyc").write_text("compiled")
    assert probe.source_hash(str(tmp_path)) == hashes[0]
    (tmp_path / "ds_trainer" / "b.py").write_text("x = 2\n")
    hashes.append(probe.source_hash(str(tmp_path)))
    os.rename(tmp_path / "ds_trainer" / "a.py", tmp_path / "ds_trainer" / "c.py")
    hashes.append(probe.source_hash(str(tmp_path)))
    assert len(set(hashes)) == 3
    assert probe.source_hash(str(Path(tmp_path) / "none")) is None
