"""Tokens are cut out of models: embeddings, heads, configs and folders agree, and outputs are those of the whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.launching import run_without_library
from support.tiny_tokenizers import KINDS, SENTENCES, of_class, word_pieces
from support.zeroed import DECODERS, ENCODERS, FAMILIES, empty, model_of, randomised, uneven

from ds_trainer.cuts.vocabulary import cut_vocabulary
from ds_trainer.models.folders import save_folder
from ds_trainer.models.pretrained import load_tokenizer, load_trained
from ds_trainer.models.shrink import shrink

TEXTS = SENTENCES[:2]
ALONE = """
import sys
from pathlib import Path
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

states = {}
for folder in Path(sys.argv[1]).iterdir():
    batch = AutoTokenizer.from_pretrained(folder)(sys.argv[2], return_tensors="pt")
    batch.pop("token_type_ids", None)
    states[folder.name] = AutoModelForSequenceClassification.from_pretrained(folder)(**batch).logits
    assert AutoModel.from_pretrained(folder).get_input_embeddings().num_embeddings < 400
torch.save(states, sys.argv[3])
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_pieces()


def seen(tokenizer: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(" ".join(TEXTS))["input_ids"])


def outputs(model: Any, tokenizer: Any) -> torch.Tensor:
    """The logits for two texts, one after another: none is padded."""
    batches = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    with torch.no_grad():
        return torch.cat([model(input_ids=ids).logits.flatten(0, -2) for ids in batches])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_whole_model(family: str, tokenizer: Any) -> None:
    """Of classifiers, to the bit, and of language models at the tokens that stay; padded embeddings go, too."""
    model = model_of(family, vocab_size=len(tokenizer) + 7)
    smaller, cut = cut_vocabulary(model, tokenizer, seen(tokenizer))
    rows = [tokenizer.get_vocab()[token] for token in sorted(cut.get_vocab(), key=cut.get_vocab().get)]
    before, after = outputs(model, tokenizer), outputs(smaller, cut)
    if family in DECODERS:  # products of another shape may be rounded otherwise
        torch.testing.assert_close(after, before[:, rows], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(after, before)
    assert smaller.config.vocab_size == smaller.get_input_embeddings().num_embeddings == len(cut) < len(tokenizer)
    assert torch.equal(smaller.get_input_embeddings().weight, model.get_input_embeddings().weight[rows])
    assert type(smaller) is type(model)
    assert model.config.vocab_size == len(tokenizer) + 7


def test_a_model_without_a_pooling_layer_keeps_none(tokenizer: Any) -> None:
    """As sentence encoders are kept."""
    config = transformers.BertConfig(vocab_size=len(tokenizer), **FAMILIES["bert"])
    smaller, _ = cut_vocabulary(transformers.BertModel(config, add_pooling_layer=False), tokenizer, seen(tokenizer))
    assert smaller.pooler is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_over_the_vocabulary_are_cut(family: str, tied: bool, tokenizer: Any) -> None:
    """Their matrices, tied to the embeddings or not, and their biases, by whatever names a family gives them."""
    kind = transformers.AutoModelForMaskedLM if family in ENCODERS else transformers.AutoModelForCausalLM
    fields = FAMILIES[family] | {"vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    torch.manual_seed(0)
    model = randomised(kind.from_config(transformers.AutoConfig.for_model(family, **fields)))
    smaller, cut = cut_vocabulary(model, tokenizer, seen(tokenizer))
    rows = [tokenizer.get_vocab()[token] for token in sorted(cut.get_vocab(), key=cut.get_vocab().get)]
    torch.testing.assert_close(outputs(smaller, cut), outputs(model, tokenizer)[:, rows], rtol=1e-6, atol=1e-6)
    shared = smaller.get_output_embeddings().weight is smaller.get_input_embeddings().weight
    assert shared == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert not any(len(tokenizer) in parameter.shape for parameter in smaller.parameters())


def test_configs_name_the_same_tokens_as_before(tokenizer: Any) -> None:
    """By new numbers, in lists as well; tokens that they name stay. The number of a row without a token goes, and one
    that no row had stays."""
    named = tokenizer.get_vocab()
    model = model_of("gpt2", vocab_size=len(tokenizer) + 2, pad_token_id=named["[PAD]"])
    model.config.bos_token_id, model.config.eos_token_id = named["happiness"], 5000
    model.config.sep_token_id = len(tokenizer) + 1
    model.generation_config.eos_token_id = [named["[SEP]"], named["mitten"]]
    model.generation_config.bad_words_ids = [[named["##en"], named["kitten"]], [named["[UNK]"]]]
    smaller, cut = cut_vocabulary(model, tokenizer, [])
    ids = cut.get_vocab()
    assert smaller.config.pad_token_id == ids["[PAD]"]
    assert (smaller.config.bos_token_id, smaller.config.eos_token_id) == (ids["happiness"], 5000)
    assert smaller.config.sep_token_id is None
    assert smaller.generation_config.eos_token_id == [ids["[SEP]"], ids["mitten"]]
    assert smaller.generation_config.bad_words_ids == [[ids["##en"], ids["kitten"]], [ids["[UNK]"]]]
    assert model.config.bos_token_id == named["happiness"]


def test_a_model_that_was_shrunk_before_is_cut(tokenizer: Any, tmp_path: Path) -> None:
    """Layers of uneven sizes come along, into the folder as well."""
    whole = model_of("bert", vocab_size=len(tokenizer))
    model = shrink(empty(whole, uneven(whole)))
    smaller, cut = cut_vocabulary(model, tokenizer, seen(tokenizer))
    save_folder(smaller, cut, tmp_path / "out")
    loaded = load_trained(tmp_path / "out")
    assert loaded.config.shrunk == model.config.shrunk
    torch.testing.assert_close(outputs(loaded.eval(), load_tokenizer(tmp_path / "out")), outputs(model, tokenizer))


def test_folders_are_loaded_without_this_library(tmp_path: Path) -> None:
    """By the auto classes, for every kind of tokenizer and for classes that make theirs anew: logits as before."""
    made = {kind: build() for kind, build in KINDS.items()}
    made |= {name: of_class(name) for name in ("bert", "roberta", "gpt2", "deberta")}
    (tmp_path / "folders").mkdir()
    before = {}
    for name, tokenizer in made.items():
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.unk_token
        model = model_of("bert", vocab_size=len(tokenizer))
        smaller, cut = cut_vocabulary(model, tokenizer, seen(tokenizer))
        save_folder(smaller, cut, tmp_path / "folders" / name)
        files = {path.name for path in (tmp_path / "folders" / name).iterdir()}
        assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        before[name] = outputs(model, tokenizer)[:1]
    done = run_without_library(ALONE, str(tmp_path / "folders"), TEXTS[0], str(tmp_path / "logits.pt"))
    assert done.returncode == 0, done.stderr[-3000:]
    after = torch.load(tmp_path / "logits.pt")
    assert after.keys() == before.keys()
    for name, logits in before.items():
        torch.testing.assert_close(after[name], logits, rtol=1e-6, atol=1e-6)


def test_a_model_that_depends_on_the_numbers_of_tokens_is_refused(tokenizer: Any) -> None:
    """RoBERTa counts positions from the number of its padding token: here it would move, and all positions with it."""
    padding = tokenizer.get_vocab()["mitten"]
    model = model_of("roberta", vocab_size=len(tokenizer), pad_token_id=padding, max_position_embeddings=400)
    with pytest.raises(ValueError, match="RobertaForSequenceClassification computes something else once its tokens"):
        cut_vocabulary(model, tokenizer, seen(tokenizer))


def test_a_model_of_another_tokenizer_is_refused(tokenizer: Any) -> None:
    """It has fewer embeddings than the tokenizer has tokens."""
    with pytest.raises(ValueError, match="they do not belong together"):
        cut_vocabulary(model_of("bert", vocab_size=len(tokenizer) - 1), tokenizer, [])
