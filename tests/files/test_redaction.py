"""Secrets are not shown, and nothing else is changed."""

import copy
import time

import pytest

from ds_trainer.cli.command import run_command
from ds_trainer.files.redaction import HIDDEN, redacted
from ds_trainer.ranks.failures import UserError

SECRET = "api_key apiKey WANDB_API_KEY HF_TOKEN token WANDB_TOKEN_PROD HF_TOKEN_2 db_password secretKey credentials"
PLAIN = "tokenizer train/tokens_per_s max_tokens token_type_ids pad_token decoder_start_token_id special_tokens monitor"


@pytest.mark.parametrize("key", SECRET.split())
def test_what_is_under_a_secret_key_is_hidden(key):
    """At any depth, of any type; that there is none is no secret; the given value stays as it is."""
    value = {"a": [{key: "hush"}, {key: {"b": "hush"}}, {key: ["hush"]}, {key: 17}], key: None, "b": {key: False}}
    before = copy.deepcopy(value)
    assert redacted(value) == {"a": [{key: HIDDEN}] * 4, key: None, "b": {key: False}}
    assert value == before


def test_what_only_sounds_like_one_is_shown():
    """A tokenizer's words, and a throughput; also in a command."""
    for key in PLAIN.split():
        value = {key: "[PAD]", "n": {key: 3.5}, "command": f"train.py  --set task.{key}=x --{key} y"}
        assert redacted(value) == value


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("t.py --set comet.api_key=hush --seed 3", f"t.py --set comet.api_key={HIDDEN} --seed 3"),
        ("t.py --set 'comet.api_key=\"hush hush\"' -x", f"t.py --set 'comet.api_key={HIDDEN}' -x"),
        ('t.py --set \'comet={"api_key": "hush", "n": 1}\'', f"""t.py --set 'comet={{"api_key": {HIDDEN}, "n": 1}}'"""),
        ("t.py --hub_token hush --resume", f"t.py --hub_token {HIDDEN} --resume"),
        ("HF_TOKEN=hush t.py --hub_token=hush", f"HF_TOKEN={HIDDEN} t.py --hub_token={HIDDEN}"),
        ("t.py --url https://me:hu@sh@host/x", f"t.py --url https://{HIDDEN}@host/x"),
        ("t.py --url redis://:hush@host", f"t.py --url redis://{HIDDEN}@host"),
        ("t.py 'comet.api_key=hush", f"t.py 'comet.api_key={HIDDEN}"),
        ("t.py --set a.b=1   --x 'y z'", "t.py --set a.b=1   --x 'y z'"),
        ("env=HF_TOKEN=hush", f"env=HF_TOKEN={HIDDEN}"),
    ],
)
def test_a_command_is_shown_without_its_secrets(command, shown):
    """As PATH=JSON, as JSON, as a flag's value, in an address, quoted or not; without any it is left as it is."""
    assert redacted({"command": command}) == {"command": shown}


def test_text_that_is_no_json_is_searched_too():
    """A file cut short, and an address with a query."""
    assert "hush" not in redacted('{"a": {"api_key": "hush\\"hush", "b": ["password=hush", "https://x/?token=hush&n=1"')
    assert redacted("https://host:80/a@b, git@host:x.git") == "https://host:80/a@b, git@host:x.git"


@pytest.mark.parametrize("unit", ["a.", "a is {", "token is {", "k=", "token='", '\\"', '"k":"', "http://", "AB"])
def test_a_long_text_takes_no_longer_than_it_is_long(unit):
    """Many of any unit, in seconds; and a secret behind it is hidden, unless what holds it is already."""
    before = time.process_time()
    text = redacted(unit * 2 * 10**5 + "\napi_key=hush a.token is hush: b")
    assert "hush" not in text
    assert time.process_time() - before < 10


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('comet.api_key is ["hush"]: write text or null', f"comet.api_key is {HIDDEN}"),
        ("comet.api_key is 17: write text", f"comet.api_key is {HIDDEN}: write text"),
        ('comet.api_key is "hush": write text', f"comet.api_key is {HIDDEN}: write text"),
        ("comet.api_key is 'hush', and must be text", f"comet.api_key is {HIDDEN}, and must be text"),
        ('"token": {"a": ["hush]"]}, "n": [3]', f'"token": {HIDDEN}'),
        ("comet.api_key is not a key that is known", "comet.api_key is not a key that is known"),
        ('train_batch_size is "7": write a number', 'train_batch_size is "7": write a number'),
        ("asked with hf_abcdefghijklmnopqrstuvwxyz and", f"asked with {HIDDEN} and"),
        ("the secret is in hf_home, a folder", "the secret is in hf_home, a folder"),
    ],
)
def test_a_message_shows_no_secret(text, shown):
    """What this library's own messages say was found, and keys of services under any name."""
    assert redacted(text) == shown


def test_what_a_secret_variable_holds_is_hidden_wherever_it_is(monkeypatch):
    """Also a part of another; a short value is a word, and stays."""
    monkeypatch.setenv("HF_TOKEN", "hush-hush-hush")
    monkeypatch.setenv("OTHER_API_KEY", "hush-hush-hush-2")
    monkeypatch.setenv("PIN_TOKEN", "fine")
    text = {"a": "failed for hush-hush-hush and hush-hush-hush-2: fine"}
    assert redacted(text) == {"a": f"failed for {HIDDEN} and {HIDDEN}: fine"}


def test_the_error_of_a_command_shows_no_secret(capfd, monkeypatch):
    """Through the command's own end: neither a mistake of the user, nor a traceback."""
    monkeypatch.setenv("HF_TOKEN", "hush-hush-hush")

    def fails(errors):
        raise errors[0]

    errors = (RuntimeError("denied: hush-hush-hush"), 1), (UserError('comet.api_key is ["hush"]'), 2)
    for error, code in errors:
        assert run_command(fails, [error]) == code
        shown = capfd.readouterr().err
        assert HIDDEN in shown
        assert "hush" not in shown
