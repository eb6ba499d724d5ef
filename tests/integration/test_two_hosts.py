"""`deepspeed --hostfile` over two hosts, a host that goes down, and the doctor of hostfiles."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from support.launching import environment, run_deepspeed
from support.two_hosts import INTERFACE, TwoHosts, missing, processes_in, wait_until

from ds_trainer.ranks import machine

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TIMEOUT = 10
"""Seconds that a rank of the run waits for another."""
NINJA_FOLDER = Path(sys.executable).parent
# the parts of DeepSpeed that are built on first use, by whatever run of the tests comes first
EXTENSIONS = os.environ.get("TORCH_EXTENSIONS_DIR") or str(
    Path.home() / f".cache/torch_extensions/py3{sys.version_info.minor}_cpu"
)
ENVIRONMENT = {
    "PATH": f"{NINJA_FOLDER}:$PATH",
    "TORCH_EXTENSIONS_DIR": EXTENSIONS,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
# ssh then gives a silent host up by itself; TCP would take a quarter of an hour
KEEP_ALIVE = {"PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=5 -o ServerAliveCountMax=2"}
SSH_TIMEOUT = 15


def write_environment(hosts: TwoHosts, **values: str) -> None:
    lines = [f"{name}={value}\n" for name, value in {**ENVIRONMENT, **values}.items()]
    (hosts.home(1) / ".deepspeed_env").write_text("".join(lines))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with TwoHosts(tmp_path_factory.mktemp("hosts")) as pair:
        write_environment(pair)
        yield pair


@pytest.fixture(scope="module")
def recipe_file(tiny_recipe, tmp_path_factory) -> Path:
    """The tiny recipe with dropout, shorter in its first phase, and long enough in its second to be cut off there."""
    finetune, prune = tiny_recipe["phases"]
    model = {**tiny_recipe["model"], "config": {**tiny_recipe["model"]["config"], "hidden_dropout_prob": 0.1}}
    phases = [{**finetune, "max_steps": 10}, {**prune, "max_steps": 40, "save_steps": 10, "logging_steps": 1}]
    path = tmp_path_factory.mktemp("recipe") / "tiny.json"
    path.write_text(json.dumps({**tiny_recipe, "model": model, "phases": phases}))
    return path


def arguments(recipe: Path, output: Path, *more: str) -> list[str]:
    engine = ["--deepspeed_config", "ds_configs/zero2.json"]
    return ["launch/train.py", *engine, "--recipe", str(recipe), "--output_dir", str(output), *more]


@pytest.fixture(scope="module")
def one_host(recipe_file, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("one") / "out"
    done = run_deepspeed(2, *arguments(recipe_file, output))
    assert done.returncode == 0, done.stderr[-4000:]
    return output


@pytest.fixture(scope="module")
def both_hosts(one_host, recipe_file, hosts, tmp_path_factory) -> Path:
    """After `one_host`, which builds what is still to be built."""
    output = tmp_path_factory.mktemp("both") / "out"
    done = hosts.run(1, ["deepspeed", "--hostfile", str(hosts.hostfile), *arguments(recipe_file, output)], KEEP_ALIVE)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "host2: " in done.stderr
    return output


def losses(output: Path) -> dict[tuple[str, int], float]:
    """The training losses by phase and step; of a step that was done twice, the last."""
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return {(r["phase"], r["step"]): r["train/loss"] for r in records if "train/loss" in r}


def weights(output: Path) -> bytes:
    return (output / "model" / "model.safetensors").read_bytes()


def test_two_hosts_train_as_two_ranks_on_one_do(one_host, both_hosts):
    """Every training loss, and the final weights to the last bit, are those of 2 ranks on one host."""
    assert losses(both_hosts) == losses(one_host)
    assert len(losses(both_hosts)) == 45
    assert weights(both_hosts) == weights(one_host)
    (session,) = json.loads((both_hosts / "all_results.json").read_text())["prune"]["trained_on"]
    assert session["hosts"] == {f"host{number}": {machine.device_name(): 1} for number in (1, 2)}


def test_a_tuning_measures_on_both_hosts(both_hosts, recipe_file, hosts, tmp_path):
    """The doctor finds good hosts well before anything is tried; the user's own file is tried on a rank of each.

    The command printed trains there.
    """
    (tmp_path / "space.json").write_text('{"zero_optimization.stage": [1]}')
    files = ["--deepspeed_config", "ds_configs/zero2.json", "--recipe", str(recipe_file)]
    limits = ["--budget", "1s", "--trial_seconds", "0.1s", "--space", str(tmp_path / "space.json")]
    where = ["--hostfile", str(hosts.hostfile), "--output_dir", str(tmp_path / "out")]
    built = {"TORCH_EXTENSIONS_DIR": EXTENSIONS}  # for the trial on one rank, which no launcher gives its environment
    done = hosts.run(1, [sys.executable, "launch/tune.py", *files, *limits, *where], KEEP_ALIVE | built)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (trial,) = map(json.loads, (tmp_path / "out/trials.jsonl").read_text().splitlines())
    assert (trial["outcome"], trial["label"].split(",")[0]) == ("measured", "2 ranks")
    assert "host2: " in (tmp_path / "out/trials/000/output.log").read_text()
    assert f"--hostfile {hosts.hostfile} --module ds_trainer.cli.train" in done.stderr.split("train with:")[1]


@pytest.fixture(scope="module")
def power_cut(both_hosts, recipe_file, hosts, tmp_path_factory):
    """A run whose second host goes down in the middle, unannounced: its end, the seconds that took, what is left."""
    output = tmp_path_factory.mktemp("cut") / "out"
    command = arguments(recipe_file, output, "--timeout", str(TIMEOUT))
    process = hosts.start(1, ["deepspeed", "--hostfile", str(hosts.hostfile), *command], KEEP_ALIVE)
    try:
        saved = output / "checkpoint-20" / "complete.json"
        wait_until(lambda: saved.exists() or process.poll() is not None, "a checkpoint of the second phase", 300)
        assert saved.exists(), process.communicate()
        hosts.cut_link()
        hosts.kill(2)
        start = time.monotonic()
        out, err = process.communicate(timeout=300)
        seconds = time.monotonic() - start
    finally:
        process.kill()
        process.wait()
    left = hosts.processes(1)
    hosts.boot(2)
    return output, process.returncode, seconds, out + err, left


def test_a_run_ends_when_a_host_goes_down(power_cut):
    """Soon after the run's own timeout and ssh's, not with 0, naming the host; and host 1 is left empty."""
    output, code, seconds, text, left = power_cut
    print(f"ended with {code} after {seconds:.1f} s:", *text.splitlines()[-12:], sep="\n")
    assert not (output / "model").exists()
    assert code != 0, text[-3000:]
    assert seconds < max(TIMEOUT, SSH_TIMEOUT) + 45
    assert "host2" in text.rpartition("error: ")[2]
    assert left == {}


@pytest.mark.parametrize("ranks", [2, 1])
def test_one_host_goes_on_where_two_stopped(power_cut, one_host, recipe_file, tmp_path, ranks):
    """`--resume` on one host: as many ranks lose nothing, to the last bit; fewer do every step, and prune as much.

    Their losses differ: each rank draws its own dropout.
    """
    output = tmp_path / "out"
    subprocess.run(["cp", "-r", str(power_cut[0]), str(output)], check=True)
    done = run_deepspeed(ranks, *arguments(recipe_file, output, "--resume"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert losses(output).keys() == losses(one_host).keys()
    if ranks == 2:
        assert losses(output) == losses(one_host)
        assert weights(output) == weights(one_host)
    final = json.loads((output / "all_results.json").read_text())["prune"]
    assert [list(session["hosts"]) for session in final["trained_on"]] == [["host1", "host2"], [socket.gethostname()]]
    assert final["weights"] == json.loads((one_host / "all_results.json").read_text())["prune"]["weights"]


def test_hosts_end_with_the_process_that_made_them(tmp_path):
    """By SIGKILL, with no chance to clean up: no process of either host is left."""
    script = (
        "import signal, sys; from pathlib import Path; from support.two_hosts import TwoHosts\n"
        "with TwoHosts(Path(sys.argv[1])) as hosts:\n"
        "    hosts.start(1, ['sleep', '600'])\n"
        "    print(*hosts.inits.values(), flush=True); signal.pause()"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "hosts")],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    inits = [int(word) for word in maker.stdout.readline().split()]
    spaces = {os.readlink(f"/proc/{pid}/ns/pid") for pid in inits}
    maker.kill()
    maker.communicate()

    assert len(spaces) == 2
    wait_until(lambda: not any(processes_in(space) for space in spaces), "the end of both hosts")


# --- the doctor -----------------------------------------------------------------------------------------------------


def examine(hosts: TwoHosts, *arguments: str, code: int, hostfile: Path | None = None) -> dict[tuple[str, str], dict]:
    """The doctor's rows by check and host, asked on host 1."""
    command = [sys.executable, "launch/doctor.py", "--hostfile", str(hostfile or hosts.hostfile), "--json"]
    done = hosts.run(1, [*command, *arguments])
    assert done.returncode == code, done.stdout + done.stderr
    return {(row["check"], row["host"]): row for row in json.loads(done.stdout)}


def failed(rows: dict[tuple[str, str], dict]) -> set[tuple[str, str]]:
    return {key for key, row in rows.items() if row["result"] == "FAILED"}


def test_the_doctor_finds_every_fault_of_a_host(hosts, tmp_path):
    """Many at once on host 2, each in its own row with its cure, and nothing else is called wrong."""
    fake = hosts.scratch / "numpy.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0.1\n")
    real = next(f.locate().parent for f in metadata.files("numpy") if f.name == "METADATA")
    hidden = [path for path in ("/usr/bin/ninja", "/usr/local/bin/ninja") if Path(path).exists()]
    mounts = [["--bind", str(fake), str(real)], ["-t", "tmpfs", "tmpfs", str(tmp_path)]]
    mounts += [["--bind", "/dev/null", path] for path in hidden]
    for words in mounts:
        assert hosts.run(2, ["mount", *words]).returncode == 0
    hosts.write_hosts_file(2, "debian")
    listen = "import socket, time; s = socket.create_server(('', 29500)); print('up', flush=True); time.sleep(600)"
    listener = hosts.start(1, [sys.executable, "-c", listen])
    assert listener.stdout.readline() == "up\n"
    (hosts.home(1) / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\n\n")
    try:
        rows = examine(hosts, "--output_dir", str(tmp_path / "out"), code=1)
    finally:
        listener.kill()
        listener.communicate()
        hosts.write_hosts_file(2, "good")
        write_environment(hosts)
        for words in mounts:
            assert hosts.run(2, ["umount", words[-1]]).returncode == 0
    told = {
        (".deepspeed_env", "this one"): ("line 2 is not NAME=VALUE", "one NAME=VALUE a line"),
        ("versions", "host2"): (f"numpy 1.0.1, here {metadata.version('numpy')}", "pip install"),
        ("own name", "host2"): ("host2 is 127.0.1.1", f"GLOO_SOCKET_IFNAME={INTERFACE}"),
        ("build tools", "host2"): ("no ninja", f"PATH={NINJA_FOLDER}:$PATH"),
        ("output folder", "host2"): ("is another folder", "NFS"),
        ("master port", "host1"): ("29500: Address already in use", "--master_port"),
    }
    # host 1's ssh sessions have no ninja either, unless Debian's is there
    assert failed(rows) - {("build tools", "host1")} == told.keys()
    for key, (found, cure) in told.items():
        assert found in rows[key]["found"]
        assert cure in rows[key]["cure"]
    assert rows["all-reduce", "host2"] == {
        "check": "all-reduce",
        "host": "host2",
        "result": "skipped",
        "found": "master port failed",
        "cure": "",
    }


def test_the_doctor_finds_a_host_without_sshd(hosts):
    """ssh's own reason and the cure; what needs ssh is skipped and says so; the other host is still looked at."""
    hosts.stop_sshd(2)
    try:
        rows = examine(hosts, code=1)
    finally:
        hosts.start_sshd(2)
    assert failed(rows) == {("ssh", "host2")}
    assert "Connection refused" in rows["ssh", "host2"]["found"]
    assert "start sshd" in rows["ssh", "host2"]["cure"]
    assert rows["versions", "host2"]["found"] == "ssh failed"
    assert rows["versions", "host1"]["result"] == "ok"
    assert rows["all-reduce", "host1"]["found"] == "ssh failed on host2"


def test_the_doctor_finds_debians_own_name(hosts, tmp_path):
    """With 127.0.1.1 on both hosts the all-reduce fails for real, within the time limit; the interface cures both.

    Then every check is ok, the all-reduce went over the hosts' own network, and nothing is left in the output folder.
    """
    for host in (1, 2):
        hosts.write_hosts_file(host, "debian")
    try:
        rows = examine(hosts, "--timeout", "10", code=1)
        write_environment(hosts, GLOO_SOCKET_IFNAME=INTERFACE)
        cured = examine(hosts, "--output_dir", str(tmp_path / "new"), code=0)
    finally:
        write_environment(hosts)
        for host in (1, 2):
            hosts.write_hosts_file(host, "good")
    both = {("own name", "host1"), ("own name", "host2"), ("all-reduce", "host1"), ("all-reduce", "host2")}
    assert failed(rows) == both
    assert all("GLOO_SOCKET_IFNAME=" in rows[key]["cure"] for key in both)
    assert all(f"GLOO_SOCKET_IFNAME={INTERFACE}" in rows["own name", host]["cure"] for host in ("host1", "host2"))
    assert {row["result"] for row in cured.values()} == {"ok"}
    for host in (1, 2):
        assert f"gloo, from {hosts.addresses[host]} on {INTERFACE}" in cured["all-reduce", f"host{host}"]["found"]
    checks = {check for check, _ in cured}
    assert checks >= {"ssh", "python", "versions", "project", "own name", "build tools", "output folder", "master port"}
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_ends_when_the_link_goes_in_the_all_reduce(hosts):
    """The link is cut when host 2's rank has started: FAILED within the time limit, and host 1 is left empty."""
    command = [sys.executable, "launch/doctor.py", "--hostfile", str(hosts.hostfile), "--json", "--timeout", "12"]
    doctor = hosts.start(1, command)
    try:
        wait_until(lambda: any(" all_reduce " in line for line in hosts.processes(2).values()), "host 2's rank", 60)
        hosts.cut_link()
        start = time.monotonic()
        out, err = doctor.communicate(timeout=60)
        seconds = time.monotonic() - start
    finally:
        doctor.kill()
        doctor.wait()
        hosts.mend_link()
    rows = {(row["check"], row["host"]): row for row in json.loads(out)}
    assert failed(rows) == {("all-reduce", "host1"), ("all-reduce", "host2")}, err
    assert re.search(r"not responding|no answer within 12 s", rows["all-reduce", "host2"]["found"])
    assert seconds < 40  # 12 + 5 by design
    assert doctor.returncode == 1
    wait_until(lambda: not hosts.processes(1), "the end of host 1's rank")
    wait_until(lambda: not hosts.processes(2), "the end of host 2's rank", 15)


def test_the_doctor_ends_with_a_missing_hostfile(hosts, tmp_path):
    """FAILED, with a mistake's exit code, and told that DeepSpeed would have trained on this machine alone."""
    rows = examine(hosts, code=2, hostfile=tmp_path / "none")
    assert failed(rows) == {("hostfile", "all")}
    assert "train on this machine alone" in rows["hostfile", "all"]["found"]
