"""The doctor of hostfiles without hosts: which lines are mistakes, and an ssh that is a script.

`tests/integration/test_two_hosts.py` has real hosts.
"""

import re
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.launching import ROOT, environment, free_port

from ds_trainer.cli import doctor, probe
from ds_trainer.cli.doctor import doctor_command, exported_variables, read_doctor_flags, read_hostfile
from ds_trainer.ranks.failures import UserError


def test_a_good_hostfile(tmp_path):
    """Comments, blank lines, users, addresses and Windows line ends; the order is kept; the example is a good one."""
    path = tmp_path / "hosts"
    path.write_bytes(b"# ours\r\n\r\none slots=2\r\n  ann@two\tslots=2  # the old one\n10.0.0.3 slots=16")
    assert [*read_hostfile(path).items()] == [("one", 2), ("ann@two", 2), ("10.0.0.3", 16)]
    assert len(read_hostfile(ROOT / "launch" / "hostfile.example")) == 2


def test_every_bad_line_of_a_hostfile_is_reported_with_its_number(tmp_path):
    """DeepSpeed refuses these lines or misreads them; all are told at once, and none is taken for a flag of ssh."""
    form, name = "is not of the form", "is no host name"
    lines = {"three": form, "three slots=4x": form, "three slots=4 gpus=2": form, "three slots=0": form}
    lines |= {"one slots=2": "one is in another line already", "fe80::1 slots=2": name, "\ufffd slots=1": name}
    lines |= {"-oProxyCommand=true slots=2": name, "a" * 64 + " slots=2": name}
    path = tmp_path / "hosts"
    path.write_text("\n".join(["one slots=2", *lines]))
    with pytest.raises(ValueError) as caught:
        read_hostfile(path)
    for number, (message, part) in enumerate(zip(str(caught.value).split("\n"), lines.values(), strict=True), start=2):
        assert message.startswith(f"line {number}: ")
        assert part in message


def test_a_hostfile_that_names_no_host_is_a_mistake(tmp_path):
    """Never an empty list, with which DeepSpeed would train on this machine alone."""
    (tmp_path / "empty").write_bytes(b"# nothing\n")
    for name, message in (("none", "does not exist"), ("empty", "names no host")):
        with pytest.raises(ValueError, match=message):
            doctor_command(["--hostfile", str(tmp_path / name)])


def test_what_deepspeed_exports_is_exported(tmp_path, monkeypatch):
    """Some of the shell's variables, the project first on PYTHONPATH, the file's; $PATH there is the remote one.

    A line at which DeepSpeed stops, or that swallows the command, is a mistake that shows nothing of the line.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in {"PYTHONPATH": "/x", "UCX_TLS": "tcp", "SECRET": "s"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".deepspeed_env").write_text("PATH=/v/bin:$PATH\nA = b c\n")
    script = exported_variables() + ' echo "$PATH|$A|$PYTHONPATH|$UCX_TLS|$SECRET"'
    done = subprocess.run(["bash", "-c", script], env={"PATH": "/bin"}, capture_output=True, text=True)
    assert done.stdout == f"/v/bin:/bin|b c|{ROOT}:/x|tcp|\n"
    for line in ("", "# B=hunter2", "export C=hunter2"):
        (tmp_path / ".deepspeed_env").write_text(f"A=b\n{line}\n")
        with pytest.raises(UserError, match=r"deepspeed_env, line 2, is not NAME=VALUE") as caught:
            exported_variables()
        assert "hunter2" not in str(caught.value)


def test_ssh_asks_no_question_and_takes_pdshs_flags(monkeypatch):
    """BatchMode, the port, and PDSH_SSH_ARGS_APPEND unless other flags are given."""
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-F config")
    ssh = read_doctor_flags(["--hostfile", "h", "--ssh_port", "2222"]).ssh
    assert {"BatchMode=yes", "-F", "config", "2222"} <= set(ssh)
    assert "-F" not in read_doctor_flags(["--hostfile", "h", "--ssh_args=-v"]).ssh


def test_each_fault_has_a_row_of_its_host_and_a_cure(tmp_path, monkeypatch):
    """Another numpy, another text in the output folder's file, a port that is taken; all else is called well."""

    def ask(ssh, exports, function, request):
        if function != "facts" or ssh[-1] != "two":
            return getattr(probe, function)(request)
        answer = probe.facts(request | {"token": (request["token"][0], "another text")})
        return answer | {"versions": answer["versions"] | {"numpy": "1.0.1"}}

    monkeypatch.setattr(doctor, "_ask", ask)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with socket.create_server(("", 0)) as taken:
        words = ["--hostfile", "h", "--output_dir", str(tmp_path), "--master_addr", "127.0.0.1"]
        flags = read_doctor_flags([*words, "--master_port", str(taken.getsockname()[1])])
        rows = doctor.examine(flags, {"one": 1, "two": 1, "three": 1})
    failed = {(row["check"], row["host"]): (row["found"], row["cure"]) for row in rows if row["result"] != "ok"}
    expected = {
        ("versions", "two"): ("numpy 1.0.1, here", "install the same"),
        ("output folder", "two"): ("is another folder", "NFS"),
        ("master port", "one"): ("Address already in use", "--master_port"),
    }
    assert failed.keys() == expected.keys()
    assert all(part in text for key in expected for part, text in zip(expected[key], failed[key], strict=True))


def test_a_port_is_open_where_somebody_listens():
    """The first host waits for all others; where nobody listens, the caller has the error."""
    request = {"address": "127.0.0.1", "port": free_port(), "callers": 2, "seconds": 2}
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda call: call(request), (probe.listen, probe.connect, probe.connect))] == [{}, {}, {}]
    assert "refused" in probe.connect(request | {"seconds": 0.1})["error"]


FAKE_SSH = """\
    #!/bin/bash
    # a fake ssh, which acts by the name of the host
    host=${@: -2:1} command=${@: -1}
    case $host in
      denied) echo "Permission denied (publickey)." >&2; exit 255 ;;
      silent) exec sleep 600 ;;
      nopython) printf 'bash: python: No such \\xfc file\\n' >&2; exit 127 ;;
      noisy) printf 'gr\\xfc\\xdf \\e[31m\\n' ;;
    esac
    exec bash -c "$command"
"""


@pytest.fixture
def ask(tmp_path):
    """Run launch/doctor.py with a fake ssh."""
    for name, text in (("ssh", FAKE_SSH), ("pdsh", "#!/bin/bash\n")):
        (tmp_path / name).write_text(textwrap.dedent(text))
        (tmp_path / name).chmod(0o755)

    def run(names: list[str], *flags: str) -> tuple[int, list[tuple[str, str]], str]:
        """The exit code, check and host of each row that is not ok, and the whole text."""
        (tmp_path / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names))
        mine = environment()
        mine |= {"PATH": f"{tmp_path}:{mine['PATH']}", "HOME": str(tmp_path)}
        command = [sys.executable, "launch/doctor.py", "--hostfile", str(tmp_path / "hostfile"), *flags]
        done = subprocess.run(command, cwd=ROOT, env=mine, capture_output=True, text=True, timeout=120)
        assert done.stderr == ""
        _, *rows = (re.split(r" {2,}", line) for line in done.stdout.splitlines())
        return done.returncode, [(check, host) for check, host, result, *_ in rows if result != "ok"], done.stdout

    return run


def test_every_kind_of_ssh_failure_is_reported(ask, tmp_path):
    """Refused, silent, without python: each has its reason; a login that prints things does no harm.

    The ports wait until all answer, and nothing is left in the output folder.
    """
    (tmp_path / "out").mkdir()
    flags = ("--output_dir", str(tmp_path / "out"), "--timeout", "5")
    code, faults, text = ask(["denied", "silent", "nopython", "noisy"], *flags)
    assert code == 1
    assert faults == [("ssh", "denied"), ("ssh", "silent"), ("ssh", "nopython"), ("master port", "all")]
    for words in ("Permission denied", "no answer within 5 s", "cannot be started: bash: python: No such"):
        assert words in text
    assert list((tmp_path / "out").iterdir()) == []


def test_one_host_that_is_this_one_needs_no_ssh(ask):
    assert ask(["localhost"], "--master_port", str(free_port()))[:2] == (0, [])
