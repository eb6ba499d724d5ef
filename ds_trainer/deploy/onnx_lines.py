"""The lines of Python in a model card that answer by an .onnx file, with a tokenizer and onnxruntime alone."""

from collections.abc import Mapping
from typing import Any

from ds_trainer.recipe.jobs import ONNX_FILE

_OPEN = f"""{{imports}}import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
options = onnxruntime.SessionOptions()
options.add_session_config_entry("optimization.disable_specified_optimizers", "SkipLayerNormFusion")
session = onnxruntime.InferenceSession("FOLDER/{ONNX_FILE}", options){{int8}}
"""
_RUN = " = session.run(None, {node.name: tokens[node.name] for node in session.get_inputs()})\n"
_LABELS = 'labels = json.load(open("FOLDER/config.json", encoding="utf-8"))["id2label"]\n'
_NUMPY = 'return_token_type_ids=True, return_tensors="np")\n'
_TEXTS = """texts = ["A text.", "Another one."]  # of a task with two texts: [("a premise", "a hypothesis"), ...]
tokens = tokenizer(texts, padding=True, truncation=True, """
_WORDS = """text = " Each word has a tag ."  # words with a space before each
tokens = tokenizer(text, truncation=True, """
_PAIR = """question, context = "Who came?", "Anna came by train."  # a context that is longer is cut: take it in parts
tokens = tokenizer(question, context, truncation="only_second", return_offsets_mapping=True, """
_MASKED = """tokens = tokenizer(f"It {tokenizer.mask_token} today.", """
_BEGUN = """tokens = tokenizer("Once upon a", """
_SPAN = """scores = numpy.triu(numpy.exp(start[0])[:, None] * numpy.exp(end[0])[None])
outside = [place for place, text in enumerate(tokens.sequence_ids(0)) if text != 1]
scores[outside], scores[:, outside] = 0, 0
first, last = numpy.unravel_index(scores.argmax(), scores.shape)
spans = tokens["offset_mapping"][0]
print(context[spans[first][0] : spans[last][1]])
"""
_TAGS = """for word in re.finditer(r"\\S+", text):
    place = tokens.char_to_token(0, word.start())  # its first piece
    print(word.group(), None if place is None else labels[str(logits[0, place].argmax())])
"""
_WORD = """place = tokens["input_ids"][0].tolist().index(tokenizer.mask_token_id)
print(tokenizer.decode([logits[0, place].argmax()]))
"""
_NEXT = (
    "print(tokenizer.decode([logits[0, -1].argmax()]))  # the next token: the file scores texts, and keeps no cache\n"
)
_CLASS = "print([labels[str(row.argmax())] for row in logits])\n"
_SEVERAL = "print([[labels[str(place)] for place in (row > 0).nonzero()[0]] for row in logits])\n"
_VALUE = "print(logits[:, 0])\n"


_BY_KIND = {
    "ForTokenClassification": ("import json\nimport re\n\n", "LABELS" + _WORDS, "(logits,)", _TAGS),
    "ForQuestionAnswering": ("import numpy\n", _PAIR, "start, end", _SPAN),
    "ForMaskedLM": ("", _MASKED, "(logits,)", _WORD),
}
"""By the end of the name of a model's class: imports, what is tokenised, the outputs, and how they are decoded."""


def onnx_lines(config: Mapping[str, Any], kind: str, int8: str) -> str:
    """Return lines that tokenise, run and decode for a model whose class ends with `kind`.

    FOLDER stands for its folder, and `int8` is a comment behind the file's name.
    """
    # transformers does not write its default, for which the lines need no file
    labels = _LABELS if "id2label" in config else 'labels = {"0": "LABEL_0", "1": "LABEL_1"}\n'
    imports, given, outputs, end = _BY_KIND.get(kind, ("", _BEGUN, "(logits,)", _NEXT))
    if kind == "ForSequenceClassification":
        problem = config.get("problem_type")
        labels = "" if problem == "regression" else labels
        before = "" if config.get("pad_token_id") is not None else "tokenizer.pad_token = tokenizer.eos_token\n"
        imports, given = "import json\n\n" if labels == _LABELS else "", f"{before}LABELS{_TEXTS}"
        end = {"regression": _VALUE, "multi_label_classification": _SEVERAL}.get(str(problem), _CLASS)
    lines = _OPEN.format(imports=imports, int8=int8) + given.replace("LABELS", labels)
    return f"{lines}{_NUMPY}{outputs}{_RUN}{end}"
