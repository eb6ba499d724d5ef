"""Students made of chosen layers of a larger model, or of a config alone."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ds_trainer.models.folders import save_folder, train_tokenizer
from ds_trainer.models.layers import encoder_layers
from ds_trainer.models.student import create_student
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.technique_specs import StudentSpec

TEXTS = ["ships sail the wide salt sea", "wings and winds lift a bird", "seeds grow roots in worm clay"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
SIZES = {
    "bert": SMALL | {"max_position_embeddings": 32},
    "roberta": SMALL | {"max_position_embeddings": 34, "type_vocab_size": 1},
    "deberta-v2": SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    "modernbert": SMALL | {"local_attention": 4},
    "distilbert": {"dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 24},
    "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32},
    "qwen2": SMALL
    | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
}
SAME_FAMILY = [
    ("bert", "ForPreTraining"),
    ("bert", "ForSequenceClassification"),
    ("roberta", "ForMaskedLM"),
    ("deberta-v2", "ForQuestionAnswering"),
    ("modernbert", "ForMaskedLM"),
    ("distilbert", "ForSequenceClassification"),
    ("gpt2", "LMHeadModel"),
    ("qwen2", "ForCausalLM"),
]
TO_DISTILBERT = ["Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification"]
TO_DISTILBERT += ["ForQuestionAnswering", "ForTokenClassification"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 90, True)


@pytest.fixture
def make_source(tokenizer, tmp_path):
    """Write a model of 4 layers in which no two tensors are equal, biases and norms included."""

    def make(family: str, head: str, **fields) -> Path:
        torch.manual_seed(1)
        ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "cls_token_id", "sep_token_id")}
        ids |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
        labels = {"id2label": {0: "bird", 1: "tool", 2: "tree"}} if head == "ForSequenceClassification" else {}
        sizes = {"vocab_size": len(tokenizer), **ids, **SIZES[family], **labels, **fields}
        config = transformers.AutoConfig.for_model(family, **sizes)
        model = getattr(transformers, type(config).__name__.removesuffix("Config") + head)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if model.can_generate():
            model.generation_config.max_new_tokens = 7
        folder = tmp_path / f"{family}-{head}"
        save_folder(model, tokenizer, folder)
        return folder

    return make


def load(folder: Path):
    """The model as the class its config names, which must not leave or make up any weight."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def outputs_of(model, length: int = 9) -> tuple[torch.Tensor, ...]:
    inputs = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        out = model(input_ids=inputs, attention_mask=torch.ones_like(inputs))
    return tuple(value for value in out.to_tuple() if isinstance(value, torch.Tensor))


def make_student(source: Path, **spec) -> Path:
    target = source.with_name("student")
    create_student(StudentSpec(**spec), source, target, seed=3)
    return target


@pytest.mark.parametrize(("family", "head"), SAME_FAMILY)
def test_layers_of_any_family_are_copied_with_all_around_them(family, head, make_source):
    """Every tensor of the file equals its source's to the bit, layers by their new places, and none is left over.

    Layers keep their kind of attention. A student of every layer computes what its source does, to the bit.
    """
    source = make_source(family, head)
    target = make_student(source, layers=[0, 3])
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    teacher = load(source)
    stem = next(iter(encoder_layers(teacher))).removesuffix("0")
    moved = {}
    for name, weight in before.items():
        index = name.removeprefix(stem).partition(".")[0] if name.startswith(stem) else "0"
        if index in ("0", "3"):
            moved[name.replace(f"{stem}3.", f"{stem}1.")] = weight
    assert after.keys() == moved.keys()
    assert all(torch.equal(after[name], moved[name]) for name in after)
    student = load(target)
    assert type(student) is type(teacher)
    assert student.config.id2label == teacher.config.id2label
    assert not student.can_generate() or student.generation_config.max_new_tokens == 7
    assert len(encoder_layers(student)) == student.config.num_hidden_layers == 2
    if types := getattr(teacher.config, "layer_types", None):
        assert student.config.layer_types == [types[0], types[3]] != types[:2]
    assert (target / "tokenizer.json").is_file()
    whole = load(make_student(source, layers=[0, 1, 2, 3]))
    for found, expected in zip(outputs_of(whole), outputs_of(teacher), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("head", TO_DISTILBERT)
def test_distilbert_computes_as_bert_with_its_layers(head, make_source):
    """On texts of one segment, to 1e-5, with an activation that is not the default; from the saved tokenizer too.

    A classifier's layers are copied, and compute otherwise: DistilBERT has a ReLU between them, where BERT has a tanh.
    """
    dropouts = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.4}
    source = make_source("bert", head, hidden_act="gelu_new", **dropouts)
    target = make_student(source, layers=[1, 3], model_type="distilbert")
    student, teacher = load(target), load(source)
    layers = teacher.base_model.encoder.layer
    teacher.base_model.encoder.layer = torch.nn.ModuleList([layers[1], layers[3]])
    config = student.config
    assert config.architectures == ["DistilBert" + head.replace("PreTraining", "MaskedLM")]
    assert (config.dropout, config.attention_dropout, config.seq_classif_dropout) == (0.2, 0.3, 0.4)
    if head == "ForSequenceClassification":
        for copy, own in (
            (student.pre_classifier, teacher.bert.pooler.dense),
            (student.classifier, teacher.classifier),
        ):
            assert torch.equal(copy.weight, own.weight)
            assert torch.equal(copy.bias, own.bias)
        student, teacher = student.base_model, teacher.base_model
    for found, expected in zip(outputs_of(student), outputs_of(teacher), strict=False):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    inputs = transformers.AutoTokenizer.from_pretrained(target)(TEXTS, padding=True, return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        found, expected = student(**inputs)[0], teacher(**inputs)[0]
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "head", "spec", "message"),
    [
        ("bert", "Model", {"layers": [0, 4]}, r"\[0, 4\].* has 4 layers, name some of 0 to 3"),
        ("bert", "Model", {"layers": [2, 1]}, "in rising order"),
        ("roberta", "ForMaskedLM", {"layers": [0], "model_type": "distilbert"}, "is a RobertaForMaskedLM"),
        ("bert", "ForNextSentencePrediction", {"layers": [0], "model_type": "distilbert"}, "with 1e-12: BertModel, "),
        ("modernbert", "ForMaskedLM", {"layers": [1, 2]}, "keep layer 0 as the first.*model.layers.0.attn_norm.weight"),
        ("bert", "Model", {"config": {"model_type": "bert", "vocab_size": 20}}, "vocab_size is 20, .* tokens"),
        ("bert", "Model", {"config": {"model_type": "bert", "hidden_size": "x"}}, "config: .*hidden_size"),
    ],
)
def test_what_cannot_be_made_is_refused(family, head, spec, message, make_source):
    """The message says what was found and what is allowed, and nothing is written."""
    source = make_source(family, head)
    with pytest.raises(UserError, match=f"(?s){message}"):
        make_student(source, **spec)
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_a_source_that_is_no_whole_model_is_refused(make_source):
    """Without a weight, or of an unknown architecture; and where DistilBERT computes otherwise."""
    source = make_source("bert", "Model", layer_norm_eps=1e-5)
    with pytest.raises(UserError, match="layer_norm_eps 1e-05"):
        make_student(source, layers=[0], model_type="distilbert")
    weights, config = source / "model.safetensors", source / "config.json"
    whole = load_file(weights)
    save_file({name: w for name, w in whole.items() if "layer.3.output.dense" not in name}, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"no whole BertModel: .*encoder\.layer\.3"):
        make_student(source, layers=[0])
    config.write_text(config.read_text().replace('"BertModel"', '"BertForRhymes"'))
    with pytest.raises(UserError, match="'BertForRhymes', which transformers does not know"):
        make_student(source, layers=[0])


def test_a_config_alone_gives_random_weights_from_the_seed(make_source, tokenizer):
    """The same seed gives the same weights, another one others; tokenizer and vocabulary are the source's."""
    source = make_source("bert", "ForSequenceClassification")
    spec = StudentSpec(config={"model_type": "electra", **SMALL, "num_hidden_layers": 1})
    folders = [source.with_name(name) for name in ("one", "two", "three")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        create_student(spec, source, folder, seed)
    first, second, third = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embeddings.word_embeddings.weight"], third["embeddings.word_embeddings.weight"])
    assert transformers.AutoModel.from_pretrained(folders[0]).config.vocab_size == len(tokenizer)
    assert transformers.AutoTokenizer.from_pretrained(folders[0]).get_vocab() == tokenizer.get_vocab()
