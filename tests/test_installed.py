"""The wheel, installed into an environment without the checkout, has all commands, the recipes and the engine files."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.launching import ROOT, WORDS, Done

import ds_trainer
from ds_trainer.models.folders import create_folder, train_tokenizer

MODEL = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL |= {"intermediate_size": 16, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """An environment with the wheel and the libraries of this one, in which a folder has a model and SST-2's files."""
    folder = tmp_path_factory.mktemp("clean")
    for name in ("ds_trainer", "ds_configs"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    python = str(folder / "env" / "bin" / "python")
    wheel = folder / f"ds_trainer-{ds_trainer.__version__}-py3-none-any.whl"
    pip = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    for words in (["-c", build], ["-m", "venv", "--without-pip", str(folder / "env")], pip):
        subprocess.run([sys.executable, *words], cwd=folder / "source", check=True, capture_output=True, timeout=120)
    shutil.rmtree(folder / "source")
    (library,) = (folder / "env" / "lib").glob("python*/site-packages")
    (library / "others.pth").write_text(sysconfig.get_path("purelib"))
    create_folder(MODEL, train_tokenizer([*WORDS.values()] * 5, 64, True), folder / "model", seed=0)
    first, second, *_ = (words.split() for words in WORDS.values())
    rows = [f"{word}\t{label}" for _ in range(8) for label, words in enumerate((first, second)) for word in words]
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return folder


def run(clean: Path, command: str) -> Done:
    """Run a command of the clean environment in its folder."""
    own = {"PATH": f"{clean}/env/bin{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= own | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(shlex.split(command), cwd=clean, env=environment, capture_output=True, text=True, timeout=180)


def test_the_commands_work_without_the_checkout(clean):
    """They are named like the launch scripts; what a run by names has trained is scored; a tuning takes names."""
    launched = {f"ds-{path.stem}" for path in (ROOT / "launch").glob("*.py")}
    assert {path.name for path in (clean / "env" / "bin").glob("ds-*")} == launched
    files = "--recipe sst2_prune_finetuned --deepspeed_config zero2 --model_name_or_path model --data_dir ."
    short = "--set phases.*.max_steps=2"
    for command, said in (
        ("ds-train --help", "usage: ds-train "),
        ("python -c 'import ds_trainer; print(ds_trainer.__file__)'", str(clean / "env")),
        (f"python -m ds_trainer.cli.train {files} {short} --output_dir out", "prune"),
        ("ds-evaluate out/model --recipe out/recipe.json", '"accuracy"'),
        (f"ds-tune {files} --output_dir tuned --phase none", "the phases that train are 'prune'"),
    ):
        done = run(clean, command)
        assert done.returncode == (2 if "none" in command else 0), done.stderr[-4000:]
        assert said in done.stdout + done.stderr
    assert (clean / "out" / "report.html").stat().st_size > 1000


def test_a_python_without_the_packages_is_told_what_to_do(clean):
    """Each missing package is named, and the way out: there is no traceback of an import."""
    (library,) = (clean / "env" / "lib").glob("python*/site-packages")
    call = f"import sys; sys.path.append({str(library)!r}); from ds_trainer.cli.main import main; main('train')"
    done = run(clean, shlex.join(["python", "-S", "-c", call]))
    assert done.returncode == 2
    assert "has no torch, deepspeed, transformers, pydantic, hjson: activate the environment" in done.stderr


def test_the_release_has_one_version():
    """CITATION.cff and the top of CHANGELOG.md tell the version of the package, unless a later one is in the making."""
    parts = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    newest = next(part for part in parts if not part.startswith("Not released")).splitlines()[0]
    version, date = newest.removesuffix(")").split(" (")
    assert version == ds_trainer.__version__ or (
        parts[0].startswith("Not released") and ds_trainer.__version__.endswith(".dev0")
    )
    assert f'\nversion: {version}\ndate-released: "{date}"\n' in (ROOT / "CITATION.cff").read_text()
