"""Every mistake in a recipe is told before anything is loaded, with its place, what is wrong and what is allowed."""

import math

import pytest

from ds_trainer.recipe.recipe import parse_recipe


def phase(**fields) -> dict:
    return {"phases": [{"max_steps": 1} | fields]}


def technique(**techniques) -> dict:
    return phase(techniques=techniques)


def prune(**fields) -> dict:
    return technique(prune=fields)


def distill(**fields) -> dict:
    return technique(distill={"teacher": "@model"} | fields)


def exits(task=None, **fields) -> dict:
    return technique(exits=fields) | ({"task": task} if task else {})


def cut(**fields) -> dict:
    return phase(cut=fields)


def task(**fields) -> dict:
    return phase() | {"task": fields}


def after_mlm(name: str, **fields) -> dict:
    """A phase of a task after one of masked language modelling."""
    first = {"name": "a", "max_steps": 1, "task": {"name": "mlm"}}
    return {"task": {"name": name}, "phases": [first, {"name": "b", "max_steps": 1} | fields]}


BY_METRIC = {"metric_for_best_model": "accuracy", "eval_steps": 2, "save_steps": 2}
HELD_OUT = {"name": "sst2", "held_out": 0.1}
TAGS = {"name": "ner", "train_file": "train.conll", "validation_file": "dev.conll"}
MISTAKES = [
    (phase(max_stepps=5), 'phases.0.max_stepps: unknown key; did you mean "max_steps"?'),
    (prune(zzz=1), "techniques.prune.zzz: unknown key; known here: block_shape, "),
    ({"phases": [{}]}, "phases.0: neither num_train_epochs nor max_steps is set"),
    ({"phases": [{"num_train_epochs": 0, "shrink": True}]}, "num_train_epochs is 0, and shrink would need training"),
    (phase(warmup_steps=1.5), "warmup_steps: write a whole number, or a fraction of the phase"),
    ({"phases": [{"max_steps": 1}, {"max_steps": 1}]}, 'two phases are named "train"'),
    (phase(start_from="@nope"), 'start_from of phase "train" is "@nope": allowed are "@previous"'),
    (phase(name="model"), 'a phase is named "model", a name of the run folder itself'),
    (phase() | {"model": {"config": {"hidden_size": 3}}}, 'model: config has no "model_type"'),
    (phase(student={"layers": [0], "config": {"model_type": "bert"}}), "student: set layers to copy them, or config"),
    (phase(early_stopping_patience=2), "early_stopping_patience needs metric_for_best_model"),
    (phase(metric_for_best_model="accuracy", eval_steps=2), "metric_for_best_model needs eval_steps, and save_steps"),
    # a phase that ends early, or at its best step, would export a model that is not pruned to the end
    (phase(**BY_METRIC, load_best_model_at_end=True, techniques={"prune": {}}), "with prune would export a step"),
    (task(name="text", text_columns=["a", "b"], label_column="b"), "label_column is b, which is among text_columns"),
    (task(name="token", tokens_column="tags"), "tokens_column and tags_column are both tags"),
    (task(name="mlm", word_mask=0.5), "word_mask + word_keep + word_rand is 0.7"),
    (task(name="mlm", min_seq_length=200), "min_seq_length is 200 and max_seq_length is 128"),
    # techniques that are no objects, whether Python takes them for false or not
    (technique(prune=[1]), "techniques.prune: "),
    (technique(distill=False), "techniques.distill: "),
    (prune(pruning_method="magnitude", regularization="l1", final_lambda=1), "magnitude has none"),
    (prune(pruning_method="l0", global_topk=True), "global_topk goes with topK or magnitude, not with l0"),
    (prune(final_lambda=3), "final_lambda weighs a penalty, and there is none"),
    (prune(regularization="l1"), "regularization is l1 but its weight is missing: set final_lambda"),
    (prune(final_threshold=0.0), "final_threshold is 0.0: topK takes the share to keep"),
    (prune(granularity="heads"), "prune.granularity: known are weight, "),
    (prune(granularity={"*.dense": "neuron"}), 'neuron goes with the key "feed_forward", not with "*.dense"'),
    (prune(granularity={"attention": "head", "*": "weight"}, global_topk=True), "global_topk compares like with like"),
    (prune(mask_init="cut"), 'mask_init "cut" was removed in 0.3: train the zeros of a cut on with keep_zeros'),
    (prune(granularity={"attention": "2:4"}), "2:4 is a granularity of cuts"),
    (distill(), "distill: no term has a weight: set e.g. alpha_distil"),
    (distill(alpha_ce=1), "alpha_ce is set alone: add alpha_distil"),
    (distill(alpha_mlm=1, alpha_distil=1), "alpha_mlm and alpha_distil are both set"),
    (distill(terms=["mse"], alpha_distil=1), 'the term mse but no weight for it: set loss["distill.mse"]'),
    (distill(alpha_distil=1, teacher="@later"), 'techniques.distill.teacher of phase "train" is "@later"'),
    (after_mlm("squad", techniques={"distill": {"teacher": "@a", "alpha_distil": 1}}), "whose model teaches it, of lm"),
    (distill(terms=["attention"]), "the term distill.attention was removed in 0.3: use distill.hidden"),
    (distill(terms=["mse"], alpha_mse=1, cache_teacher={"top_k": 9}), "cache_teacher keeps no logits with top_k"),
    (distill(alpha_distil=1, cache_teacher={"topk": 9}), "cache_teacher: write true, false, or "),
    (exits(layers=[2, 1, 2]), "exits.layers: write numbers from 1 on, each once, from first to last, not [2, 1, 2]"),
    (exits({"name": "sst2"}, target_speedup=1.5), "calibrates its exits, and no training examples are held out"),
    (exits(HELD_OUT, target_speedup=2, max_drop=1), "target_speedup and max_drop are both set"),
    (exits({"name": "squad"}), "has exits, and its task is squad"),
    (exits(TAGS, pooling="mean"), "has exits.pooling, which the heads of ner lack"),
    (exits(criterion="confidence", early_exit_entropy=0.1), 'early_exit_entropy goes with criterion "entropy"'),
    (exits(HELD_OUT, early_exit_entropy=0.1, max_drop=1), "early_exit_entropy is set, and max_drop picks it"),
    (exits(early_exit_confidence=[0.9, 1.1]), "a number from 0 to 1, or a list"),
    *((exits(early_exit_entropy=value), "a number of 0 or more, or a list") for value in ([-0.1], math.inf)),
    (cut(), "cut: nothing says how much to keep"),
    (cut(keep=0.5, target_flops=0.5), "keep and target_flops are set: keep one"),
    (cut(keep=1.0), "cut.keep: Input should be less than 1"),
    (cut(keep=[0.5, 0.2]), "cut.keep: a list was removed in 0.3: write a phase for each share"),
    (cut(target_flops=0.5, uniform=True), "uniform keeps the same share"),
    (cut(target_latency=0.5, granularity="weight"), "target_latency counts what heads and neurons cost"),
    (cut(keep=0.5, method="wanda"), "method wanda scores single weights"),
    (cut(keep=0.5, granularity="weight", min_heads=1), "no heads are cut"),
    (cut(granularity="2:4", keep=0.3), "2:4 keeps half"),
    (cut(keep=0.5, reconstruct={"stps": 9}), 'cut.reconstruct.stps: unknown key; did you mean "steps"?'),
    (cut(layers=0.5, width=0.5, keep=0.5), "layers and width: a cut to sizes of the whole"),
    (cut(layers=0.5, layer_criterion="cosine"), "layer_criterion was removed in 0.3: leave it out"),
    (cut(granularity="model", layers=0.5), 'granularity "model" was removed in 0.3: write sizes'),
    (cut(vocabulary={"keep": "5000"}), 'give "seen", a number of tokens without quotes'),
    (after_mlm("sst2", cut={"keep": 0.5}), '"a", whose model is cut for it, of lm'),
]


@pytest.mark.parametrize(("data", "words"), MISTAKES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_mistake_is_told_in_one_line(data, words):
    with pytest.raises(ValueError) as caught:
        parse_recipe(data)
    (line,) = str(caught.value).splitlines()
    assert words in line


def test_all_mistakes_come_at_once():
    """Mistakes in five places, and two of them in one, give a line each."""
    phases = [{"max_stps": 1}, {"name": "b", "student": {"layers": [0]}, "cut": {"keep": 0.5}}]
    with pytest.raises(ValueError) as caught:
        parse_recipe({"sed": 1, "phases": phases, "task": {"max_seq_length": 0}})
    lines = str(caught.value).splitlines()
    words = ("sed", "max_stps", "max_seq_length", "neither num_train_epochs", "student and cut are both set")
    assert [word for word in words if not any(word in line for line in lines)] == []
    assert all(line.startswith("recipe: phases.1: ") for line in lines[-2:] if "phases.1" in line)
