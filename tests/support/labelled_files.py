"""Small files of labelled text: CSV, and GLUE's official ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_trainer.recipe.task_specs import TextSpec

SENTENCES = ["it rains", "it is wet", "it is dry today", "the cat sat on the mat", "no", "why is it so very wet"]


def write_csv(folder: Path, labels: list[Any]) -> TextSpec:
    rows = [f"{text},{label}\n" for text, label in zip(SENTENCES * 3, labels, strict=False)]
    for file in ("train.csv", "dev.csv"):
        (folder / file).write_text("text,label\n" + "".join(rows), encoding="utf-8")
    files = {"data_dir": str(folder), "train_file": "train.csv", "validation_file": "dev.csv"}
    return TextSpec(name="text", text_columns=["text"], label_column="label", **files)


OFFICIAL = {
    "cola": ("", "gj04\t1\t\tThe more we study verbs, the crazier they get.\ncj99\t0\t*\tAs you eat the most.\n"),
    "sst2": ("sentence\tlabel\n", 'a "bonus \t1\nno movement \t0\n'),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n",
        '1\t70\t71\tAmrozi "said\tHe said\r\n0\t1\t2\tYucaipa owned\tIt sold\r\n',
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n",
        "0\tmain\tMSRvid\t2012\t1\tnone\tnone\tA plane\tAn air plane\t5.000\n"
        "1\tmain\tMSRvid\t2012\t4\tnone\tnone\tA man\tA flute\t3.800\n",
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n",
        "1\t3\t4\tHow do I\u0085read?\tHow to read?\t1\n7\t8\t9\tbroken off here\n2\t5\t6\tWhy?\tWhen?\t0\n",
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tp\tq\tr\ts\tsentence1\tsentence2\tlabel1\tgold_label\n",
        "0\t1\t1e\tfiction\t(\t(\t(\t(\tIt rains\tIt is wet\tneutral\tentailment\n"
        "1\t2\t2c\tfiction\t(\t(\t(\t(\tIt rains\tIt is dry\tneutral\tcontradiction\n",
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n",
        "0\tWhen?\tIn May.\tentailment\n1\tWho?\tIt rains.\tnot_entailment\n",
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel\n",
        "0\tNo weapons.\tWeapons.\tnot_entailment\n1\tA new pope.\tA pope.\tentailment\n",
    ),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n", "0\tI pin it.\tThe pin.\t1\n1\tHe saw.\tShe saw.\t0\n"),
}
