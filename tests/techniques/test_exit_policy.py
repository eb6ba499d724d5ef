"""Who leaves where: the criteria in closed form, and the same decisions row by row and all at once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exhaustive import exhaustive
from support.exit_models import left_at
from torch import Tensor

from ds_trainer.config.exit_specs import ExitPolicy
from ds_trainer.techniques.exits.policy import RunningPolicy, confidence, entropy

ANSWERS = 3


def says(*answers: int) -> Tensor:
    """(heads, 1, classes): one row, of which each head in turn thinks that it is of this class."""
    return torch.stack([torch.eye(ANSWERS)[[answer]] for answer in answers])


def scores(*values: float) -> Tensor:
    """(heads, 1, 1): one row, to which each head in turn gives this score."""
    return torch.tensor(values)[:, None, None]


def of_probabilities(*shares: float) -> Tensor:
    """(1, classes) logits."""
    return torch.tensor([shares]).log()


def patient(patience: int, *tolerances: float) -> ExitPolicy:
    return ExitPolicy(criterion="patience", patience=patience, thresholds=list(tolerances))


def test_entropy_and_confidence_of_known_distributions():
    """In nats: ln(classes) where all are alike, 0 where one is certain, and of 0.5, 0.25, 0.25 it is 1.5 ln 2."""
    logits = torch.cat([torch.zeros(1, 3), torch.tensor([[500.0, 0.0, 0.0]]), of_probabilities(0.5, 0.25, 0.25)])
    assert entropy(logits).tolist() == pytest.approx([math.log(3), 0.0, 1.5 * math.log(2)], abs=1e-6)
    assert confidence(logits).tolist() == pytest.approx([1 / 3, 1.0, 0.5])
    assert entropy(logits.expand(4, 3, 3)).shape == (4, 3)


@pytest.mark.parametrize("measure", [entropy, confidence])
def test_measures_do_not_depend_on_a_shift_and_are_fp32(measure):
    """Adding 1000 to every logit changes nothing; half precision is widened before it is summed."""
    logits = torch.tensor([[0.5, -1.0, 2.0], [0.0, 0.25, 0.5]])
    torch.testing.assert_close(measure(logits + 1000), measure(logits), atol=1e-4, rtol=0)
    assert measure(logits.bfloat16()).dtype == torch.float64
    assert torch.equal(measure(logits.bfloat16()), measure(logits.bfloat16().float()))


@pytest.mark.parametrize(("criterion", "measure"), [("entropy", entropy), ("confidence", confidence)])
def test_a_sample_at_the_threshold_stays(criterion, measure):
    """Below the entropy, above the confidence: equal is not enough."""
    logits = of_probabilities(0.8, 0.1, 0.1)
    at = float(measure(logits))
    surer = of_probabilities(0.81, 0.1, 0.09)
    decisions = RunningPolicy(ExitPolicy(criterion=criterion, thresholds=[at]))
    assert decisions.sure(0, torch.cat([logits, surer])).tolist() == [False, True]


@pytest.mark.parametrize(("criterion", "never"), [("entropy", 0.0), ("confidence", 1.0)])
def test_nobody_is_sure_beyond_certainty(criterion, never):
    """Entropy 0 and confidence 1 let no sample leave, not one that is certain."""
    policy = ExitPolicy(criterion=criterion, thresholds=[never] * 2)
    certain = torch.tensor([[[500.0, 0.0]], [[0.0, 500.0]], [[500.0, 0.0]]])
    assert left_at(policy, certain).tolist() == [2]


@pytest.mark.parametrize(("criterion", "limits"), [("entropy", [0.1, 0.9, 0.1]), ("confidence", [0.9, 0.6, 0.9])])
def test_each_head_has_its_own_threshold(criterion, limits):
    """A row that every head is as sure of leaves at the one that asks the least."""
    logits = of_probabilities(0.7, 0.2, 0.1).expand(4, 1, 3)  # entropy 0.80
    assert left_at(ExitPolicy(criterion=criterion, thresholds=limits), logits).tolist() == [1]


@pytest.mark.parametrize(
    ("patience", "answers", "leaves"),
    [
        (1, (0, 0, 0, 0), 1),
        (2, (0, 0, 0, 0), 2),
        (3, (0, 0, 0, 0, 0), 3),
        (3, (0, 0, 0, 0), 3),  # the fourth is the own head: there is no other place to leave
        (1, (0, 1, 1, 2), 2),
        (2, (0, 0, 1, 1, 1, 0), 4),  # a disagreement starts the count anew
        (2, (0, 1, 1, 0, 0, 0), 5),
        (1, (0, 1, 2, 0, 1), 4),
        (9, (0, 0, 0, 0), 3),
    ],
)
def test_patience_counts_heads_in_a_row_that_agree_with_the_one_before(patience, answers, leaves):
    """At the earliest patience + 1 heads are asked; where they never agree long enough, the own head answers."""
    assert left_at(patient(patience), says(*answers)).tolist() == [leaves]


@pytest.mark.parametrize(
    ("tolerances", "values", "leaves"),
    [
        ((0.5, 0.5, 0.5), (1.0, 1.25, 1.0, 9.0), 2),
        ((0.5, 0.5, 0.5), (1.0, 1.5, 2.0, 2.0), 3),  # as far as the tolerance is not nearer
        ((0.5, 0.5, 0.5), (-1.0, -1.25, 1.0, 1.0), 3),
        ((9.0, 0.1, 0.5), (1.0, 1.25, 1.5, 9.0), 3),  # the head that agrees is asked, not the one before
        ((0.0, 0.5, 0.1), (1.0, 1.25, 1.2, 9.0), 2),
        ((0.4, 0.4, 0.4), (1.0, 1.3, 1.6, 9.0), 2),  # each with the one before: a drift is no disagreement
    ],
)
def test_scores_agree_within_the_tolerance(tolerances, values, leaves):
    """A regression's patience 2: two heads in a row, each nearer to the one before than its own threshold."""
    assert left_at(patient(2, *tolerances), scores(*values)).tolist() == [leaves]


@pytest.mark.parametrize("regression", [False, True])
def test_rows_that_are_not_kept_are_forgotten(regression):
    """After `keep` the counts of the rows that stay are theirs, in their order."""
    said = torch.cat([scores(0.0, 0.0, 0.0), scores(0.0, 1.0, 0.0), scores(0.0, 0.0, 0.0)], dim=1)
    logits = said if regression else torch.nn.functional.one_hot(said.long().squeeze(-1), 2).float()
    decisions = RunningPolicy(patient(2, *[0.5] * 3 * regression))
    assert not decisions.sure(0, logits[0]).any()
    assert not decisions.sure(1, logits[1]).any()
    kept = torch.tensor([2, 1])
    decisions.keep(kept)
    assert decisions.sure(2, logits[2][kept]).tolist() == [True, False]


def test_keeping_before_the_first_head_is_no_error():
    """There is nothing to forget: entropy and confidence remember nothing at all."""
    for policy in (patient(1), ExitPolicy(criterion="entropy", thresholds=[1.0])):
        decisions = RunningPolicy(policy)
        decisions.keep(torch.tensor([0]))
        assert decisions.sure(0, torch.zeros(2, 3)).shape == (2,)


def online(policy: ExitPolicy, logits: Tensor) -> list[int]:
    """Where the rows of a batch leave, if those who leave are gone for the next head."""
    decisions, last = RunningPolicy(policy), len(logits) - 1
    there = torch.arange(logits.shape[1])
    left = [last] * logits.shape[1]
    for head in range(last):
        sure = decisions.sure(head, logits[head][there])
        for row in there[sure].tolist():
            left[row] = head
        decisions.keep((~sure).nonzero().squeeze(1))
        there = there[~sure]
        if not len(there):
            break
    return left


@st.composite
def cases(draw) -> tuple[ExitPolicy, Tensor, list[list[int]]]:
    """A policy, all heads' logits, and the rows dealt to batches in any order."""
    heads, rows = draw(st.integers(2, 6)), draw(st.integers(1, 8))
    criterion = draw(st.sampled_from(["entropy", "confidence", "patience"]))
    regression = criterion == "patience" and draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(heads, rows, 1 if regression else 3, generator=generator) * draw(st.sampled_from([0.1, 1, 5]))
    most = 1.0 if criterion == "confidence" else 1.2
    limits = st.lists(st.floats(0, most), min_size=heads - 1, max_size=heads - 1)
    thresholds = [] if criterion == "patience" and not regression else draw(limits)
    patience = draw(st.integers(1, 3)) if criterion == "patience" else None
    policy = ExitPolicy(criterion=criterion, thresholds=thresholds, patience=patience)
    order = draw(st.permutations(range(rows)))
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
    return policy, logits, [order[a:b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]


@given(cases())
@settings(max_examples=300 if exhaustive() else 75, deadline=None)
def test_decisions_while_running_are_those_made_afterwards(case):
    """In any batches, in any order, with those who leave gone, each row leaves where `exit_heads` says."""
    policy, logits, batches = case
    expected = left_at(policy, logits).tolist()
    for rows in batches:
        assert online(policy, logits[:, rows]) == [expected[row] for row in rows]


@given(cases())
@settings(max_examples=200 if exhaustive() else 50, deadline=None)
def test_decisions_are_those_of_the_papers_words(case):
    """One row at a time, in plain Python: the first head whose answer is sure, or the own one."""
    policy, logits, _ = case
    found = left_at(policy, logits).tolist()
    for row, where in enumerate(found):
        assert where == by_the_paper(policy, logits[:, row])


def by_the_paper(policy: ExitPolicy, logits: Tensor) -> int:
    agreed = 0
    for head in range(len(logits) - 1):
        shares = logits[head].softmax(-1)
        if policy.criterion == "entropy" and float(entropy(logits[head])) < torch.tensor(policy.thresholds[head]):
            return head
        if policy.criterion == "confidence" and float(shares.max()) > torch.tensor(policy.thresholds[head]):
            return head
        if policy.criterion == "patience" and head:
            one, two = logits[head - 1], logits[head]
            near = abs(two - one) < policy.thresholds[head] if logits.shape[-1] == 1 else one.argmax() == two.argmax()
            agreed = agreed + 1 if near else 0
            if agreed >= policy.patience:
                return head
    return len(logits) - 1


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=6), st.sampled_from(["entropy", "confidence"]))
@settings(deadline=None)
def test_a_single_row_is_decided_as_in_a_batch(row, criterion):
    """The shorter way of one row: the same answer just below its own measure and just above."""
    logits = torch.tensor([row])
    at = float((entropy if criterion == "entropy" else confidence)(logits))
    for limit in (at - 1e-9, at + 1e-9):
        decisions = RunningPolicy(ExitPolicy(criterion=criterion, thresholds=[max(limit, 0.0)]))
        assert decisions.one_is_sure(0, logits) == bool(decisions.sure(0, logits))


def test_a_single_row_is_patient_too():
    """Asked head by head, its streak is remembered."""
    decisions = RunningPolicy(patient(2))
    assert [decisions.one_is_sure(head, logits) for head, logits in enumerate(says(1, 1, 1))] == [False, False, True]
