"""Change one line of the library at a time, and show which changes its tests do not notice.

    python tools/mutate.py [--source CHECKOUT] [--only TEXT] [--output FILE.json]

A mutant is a text that occurs once in `ds_trainer/` and what replaces it: another sign, another bound, swapped
arguments, a line that is gone. Where a later version says it otherwise, that text and what replaces it follow. For each
mutant a copy of the checkout runs the test files that import the changed module, themselves or through `tests/support`,
until one fails. A mutant is "killed" where one does, "survived" where all pass, and "absent" where the checkout does
not have its text. The exit code is 1 where a mutant has survived. With `--source` another checkout is judged by the
same table, so that tests that were deleted can be compared with those before.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MUTANTS = [
    # the loop and the objective
    ("count * world * accumulation / (totals[unit] or 1)", "count * world / (totals[unit] or 1)"),
    ("self.weights[name] * term for name, term", "term for name, term"),
    ("terms |= technique.terms(forward)", "technique.terms(forward)"),
    ("term * forward.shares.get(self.units[name], 1.0)", "term"),
    ("hash((seed, step, distributed.rank()))", "hash((seed, distributed.rank()))"),
    ("draw = 1 + (hash((seed, step))", "draw = 1 + (hash((seed, 0))"),
    ("technique.on_step(step)\n    draw", "pass\n    draw"),
    # batches
    (
        "longest_first.reshape(accumulation, -1, world)[:, :, rank]",
        "longest_first.reshape(accumulation, world, -1)[:, rank]",
    ),
    ("visited[start - first * self.batch_size : end - first * self.batch_size]", "visited[: end - start]"),
    ("np.repeat(order[-1:], -len(order) % world)", "order[:0]"),
    ("order[start : start + size][rank::world]", "order[start : start + size][::world]"),
    # losses
    (
        "return divergence(student, teacher, temperature, kind)",
        "return divergence(teacher, student, temperature, kind)",
    ),
    ("(difference * mask).sum() / mask.sum()", "(difference * mask).mean()"),
    ("(distance * mask).sum() / mask.sum()", "distance.mean()"),
    ("return (1 - share).mul_(share).div_(scores.numel())", "return share.mul_(share).div_(scores.numel())"),
    ("difference.square().sum() / max(1, len(student))", "difference.square().mean()"),
    # optimizer groups and schedules
    (
        "exempt = rule.weight_decay is None and parameter.ndim <= 1",
        "exempt = rule.weight_decay is None and parameter.ndim < 1",
    ),
    ("parameter.requires_grad_(not rule.frozen)", "parameter.requires_grad_(True)"),
    ("0.0 if exempt else base.weight_decay", "base.weight_decay"),
    # masks
    (
        "kept = _zero_where_at_most(values, scores, self.cutoff.threshold)",
        "kept = values * (scores >= self.cutoff.threshold)",
        "_zero_where_at_most(values, scores, self.threshold)",
        "values * (scores >= self.threshold)",
    ),
    ("self.grain.sums(gradient.float() * weight)", "self.grain.sums(gradient.float())"),
    (
        "return (gradient * weight).to(scores.dtype)",
        "return gradient.to(scores.dtype)",
        "gradient * weight if penalty is None",
        "gradient if penalty is None",
    ),
    ("uniform_(eps, 1 - eps, generator=generator)", "uniform_(eps, 1 - eps)"),
    ("ramp = self.threshold / self.spec.final_threshold", "ramp = 1.0"),
    ("round(share * sum(sizes))", "round(share * sum(sizes)) + 1"),
    (
        "count = round(threshold * site.count)",
        "count = int(threshold * site.count)",
        "round(threshold * total)",
        "int(threshold * total)",
    ),
    # exits
    (
        "return total / sum(weights) if",
        "return total if",
        "torch.stack(weighted).sum() / sum(weights)",
        "torch.stack(weighted).sum()",
        "total / sum(layers)",
        "total",
    ),
    (
        "return [*map(float, self.layers), float(depth)] if joint",
        "return [1.0] * (heads + 1) if joint",
        "weights = [*self.layers, self.depth][: len(values)]",
        "weights = [1.0] * len(values)",
        "layer * loss for layer, loss in zip(layers",
        "loss for layer, loss in zip(layers",
    ),
    # distillation
    ("_compared(outcomes.log(), teacher_log.clone(), kind)", "_compared(outcomes.log(), teacher_log, kind)"),
    # cuts
    ("self.products += squared - crossed - crossed.mT", "self.products += squared - crossed"),
    ('self.diagonal -= torch.einsum("agi,agj->gij", row, solved)', "pass"),
    ("costs[~self.kept] = torch.inf", "pass"),
    (
        "column = self.weight[:, places].T - self.solved[:, places].T @ self.columns",
        "column = self.weight[:, places].T",
    ),
    ("torch.linalg.solve(covariance[columns][:, columns], products, left=False)", "weight.double()[:, columns]"),
    (
        "known = np.maximum.accumulate(",
        "known = np.array(",
        "known_losses = np.maximum.accumulate(",
        "known_losses = np.array(",
    ),
    (
        "sums[row, bins:] = best[: _BINS + 1 - bins] + loss",
        "sums[row, bins:] = loss",
        "sums[row, number:] = best[: _BINS + 1 - number] + loss",
        "sums[row, number:] = loss",
    ),
    ("budget -= int(used[name][row])", "pass", "left -= int(used[name][row])", "pass"),
    # checkpoints
    ("count[key] = max(count.get(key, value), value)", "count[key] = value"),
    ("optimizer.update_lp_params()", "pass"),
    ("best and keys[best] > -math.inf", "best"),
    ("for old in [*self._requested()][: -self.keep]:", "for old in [*self._requested()][: -self.keep - 1]:"),
    ("(score if self.greater else -score) if math.isfinite(score)", "(score if self.greater else -score) if True"),
]

BY_OTHERS = {
    "loop": ("test_zero.py", "test_resume.py"),
    "objective": ("test_zero.py",),
    "selection": ("test_prune.py",),
}
"""The tests that run a module without importing it, by the name of the module: by another one, or in processes."""


def chosen(name: str, package: Path) -> tuple[str, str, Path | None]:
    """Return the first text of a mutant that the package holds, what replaces it, and the file; None without one."""
    mutant = next(mutant for mutant in MUTANTS if mutant[0] == name)
    for text, replacement in zip(mutant[::2], mutant[1::2], strict=True):
        if file := place_of(text, package):
            return text, replacement, file
    return name, "", None


def place_of(text: str, package: Path) -> Path | None:
    """Return the file of the package that holds a text, which must occur once; None where none does."""
    files = [path for path in sorted(package.rglob("*.py")) if text in path.read_text()]
    if len(files) > 1 or any(path.read_text().count(text) > 1 for path in files):
        raise SystemExit(f"{text!r} occurs more than once in {package}: make it longer")
    return files[0] if files else None


def tests_of(module: str, tests: Path) -> list[str]:
    """Return the test files that import a module, themselves or through a file of `support`, the smallest first."""
    support = {path.stem for path in (tests / "support").glob("*.py") if f"{module} " in path.read_text() + " "}
    parent, _, leaf = module.rpartition(".")
    names = [f"{module} import", f"{module}\n", *(f"support.{stem} import" for stem in support)]
    chosen = [
        path
        for path in tests.rglob("test_*.py")
        if any(name in (text := path.read_text()) for name in names)
        or f"from {parent} import {leaf}" in text
        or path.name == f"test_{leaf}.py"
        or path.name in BY_OTHERS.get(leaf, ())
    ]
    chosen.sort(key=lambda path: (path.parent.name == "integration", path.stat().st_size))
    return [str(path.relative_to(tests.parent)) for path in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--only", default="", help="mutants with this text alone")
    parser.add_argument("--limit", type=int, default=0, help="the first mutants alone")
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args()
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as aside:
        copy = Path(aside) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
        shutil.copytree(flags.source, copy, ignore=ignored)
        environment = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'tests'}", "OMP_NUM_THREADS": "1"}
        mutants = [mutant for mutant in MUTANTS if flags.only in mutant[0]]
        for name, *_ in mutants[: flags.limit or None]:
            text, replacement, file = chosen(name, copy / "ds_trainer")
            if file is None:
                results[name] = "absent"
                print(f"absent    {name!r}", flush=True)
                continue
            whole, begun = file.read_text(), time.monotonic()
            module = ".".join(file.relative_to(copy).with_suffix("").parts)
            file.write_text(whole.replace(text, replacement))
            tests = tests_of(module, copy / "tests")
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
            code = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False).returncode
            file.write_text(whole)
            results[name] = "survived" if not tests or code in (0, 5) else "killed"
            print(f"{results[name]:9} {text!r} ({module}, {time.monotonic() - begun:.0f} s)", flush=True)
    if flags.output:
        flags.output.write_text(json.dumps(results, indent=2) + "\n")
    counts = {kind: [*results.values()].count(kind) for kind in ("killed", "survived", "absent")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
