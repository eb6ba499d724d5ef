"""Small data, small recipes, and where the real ones are."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path

import pytest
from support.forked_ranks import ForkServer, warm_server
from support.launching import EXHAUSTIVE, SHARED, WORDS, tag_of

# before torch is imported: tiny models gain nothing from threads, which on a busy machine wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every combination of methods, ZeRO stages, precisions and ranks, and 800 examples a property",
    )


def pytest_configure(config):
    """Tell the modules of tests, and the drivers that they start, whether every combination is run."""
    if config.getoption("--exhaustive"):
        os.environ[EXHAUSTIVE] = "1"
    # pytest-xdist would start with the modules of many tests, which are the short ones
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Start with the modules that take minutes, and skip what needs ../shared where it is not there."""
    items.sort(key=lambda item: item.path.parent.name != "integration")
    if SHARED.is_dir():
        return
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason="../shared is not there"))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Keep tokenised data of all commands apart from the user's own; a recipe's file could not name such a folder."""
    os.environ["DS_TRAINER_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def csv_folder(tmp_path_factory) -> Path:
    """A labelled CSV task, 3 labels, learnable: 240 training rows and 61 (odd, for 2 ranks) to validate.

    In CoNLL files of the same names the words of the labels are tagged; `train.txt` and `validation.txt` have the
    texts, one a line.
    """
    folder = tmp_path_factory.mktemp("csv")
    rng = random.Random(0)
    for name, rows in (("train.csv", 240), ("validation.csv", 61)):
        lines = ["text,kind"]
        for _ in range(rows):
            kind = rng.choice(list(WORDS))
            filler = ["the", "a", "some", "old", "new"]
            words = rng.choices(WORDS[kind].split(), k=2) + rng.choices(filler, k=rng.randint(1, 9))
            rng.shuffle(words)
            lines.append(" ".join(words) + f",{kind}")
        (folder / name).write_text("\n".join(lines) + "\n")
        tagged = [[f"{word}\t{tag_of(word)}" for word in line.split(",")[0].split()] for line in lines[1:]]
        (folder / name).with_suffix(".conll").write_text("\n\n".join("\n".join(rows) for rows in tagged) + "\n")
        texts = [line.partition(",")[0] for line in lines[1:]]
        (folder / name).with_suffix(".txt").write_text("\n".join(texts) + "\n")
    return folder


@pytest.fixture(scope="session")
def tagged_recipe(tiny_recipe, csv_folder) -> dict:
    """The tiny recipe with the CoNLL files of the CSV task."""
    files = {"train_file": "train.conll", "validation_file": "validation.conll"}
    return tiny_recipe | {"task": {"name": "ner", "data_dir": str(csv_folder), "max_seq_length": 32, **files}}


@pytest.fixture(scope="session")
def tiny_recipe(csv_folder) -> dict:
    """Fine-tune and prune a BERT of 2 layers x 32 on the CSV task; a few steps of everything.

    Without the report, whose drawing takes longer than the training: what a run writes there, other runs show.
    """
    common = {"train_batch_size": 16, "learning_rate": 4e-3, "logging_steps": 2, "per_device_eval_batch_size": 8}
    prune = {
        "final_threshold": 0.25,
        "initial_warmup": 0,
        "final_warmup": 0.3,
        "mask_init": "uniform",
        "mask_scale": 0.01,
    }
    return {
        "model": {
            "config": {
                "model_type": "bert",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "max_position_embeddings": 32,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            "tokenizer": {"vocab_size": 128},
        },
        "task": {
            "name": "text",
            "data_dir": str(csv_folder),
            "train_file": "train.csv",
            "validation_file": "validation.csv",
            "text_columns": ["text"],
            "label_column": "kind",
            "max_seq_length": 24,
        },
        "phases": [
            {"name": "finetune", "max_steps": 60, "eval_steps": 30, **common},
            {"name": "prune", "max_steps": 12, "save_steps": 4, "techniques": {"prune": prune}, **common},
        ],
        "report": False,
    }


@pytest.fixture(scope="session")
def taught_recipe(tiny_recipe) -> dict:
    """The tiny recipe with dropout, its second phase pruned and distilled, and logged at every step."""
    recipe = copy.deepcopy(tiny_recipe)
    recipe["model"]["config"] |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    first, second = recipe["phases"]
    first |= {"max_steps": 4, "eval_steps": None}
    second |= {"logging_steps": 1, "eval_steps": 10, "save_total_limit": 3}
    second["techniques"]["distill"] = {"teacher": "@finetune", "alpha_ce": 0.5, "alpha_distil": 0.5}
    return recipe


@pytest.fixture(scope="session")
def words(taught_recipe, tmp_path_factory) -> list[str]:
    """A run whose first phase is short, of which the second is disturbed."""
    from support.killing import EVERY, STEPS, arguments, write

    return arguments(write(tmp_path_factory.mktemp("recipe"), taught_recipe), EVERY, STEPS)


@pytest.fixture(scope="session")
def server() -> ForkServer:
    """Forks the ranks of one run after the other."""
    return warm_server()


@pytest.fixture(scope="session")
def whole(server, words, tmp_path_factory) -> Path:
    """The run that nothing happens to."""
    from support.killing import finish

    output = tmp_path_factory.mktemp("whole") / "out"
    finish(server, output, words)
    return output


@pytest.fixture
def write_json(tmp_path):
    """Write a value as JSON (or text as it is) into the test's folder and give the path."""

    def write(name: str, value) -> str:
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return write
