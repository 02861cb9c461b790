"""Tests of the policy: by its cost table no round is slower than plain decoding, except for limited probes."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark import RequestError
from draftmark_speculative.adaptive.budgets import MOST_ROWS, row_budgets
from draftmark_speculative.adaptive.costs import Cost, CostTable
from draftmark_speculative.adaptive.forecast import FIRST_ROUNDS, TRUST_PRIOR, Forecast, grid
from draftmark_speculative.adaptive.policy import UPKEEP_SHARE, Load, Policy, drafted, plain

SECONDS = st.floats(1e-4, 1e-1)


@st.composite
def tables(draw):
    """Draw a cost table of random sizes; more rows do not always take longer."""
    costs = st.builds(Cost, SECONDS, st.floats(0, 1e-6))
    sizes = st.dictionaries(st.integers(1, 64), costs, min_size=1, max_size=4)
    rows = st.dictionaries(st.integers(1, 512), costs, min_size=1, max_size=6)
    return CostTable(draw(sizes), draw(rows), draw(st.just({}) | sizes))


@st.composite
def loads(draw):
    """Draw a `Load`: a number of requests, padded or not, and their KV tokens."""
    live = draw(st.integers(1, 64))
    return Load(live, live + draw(st.integers(0, 8)), draw(st.floats(0, 1e6)))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(table=tables(), load=loads(), chances=st.lists(st.floats(0, 1), max_size=40))
def test_chosen_round_is_never_slower_than_plain(table, load, chances):
    """With any costs and drafts, the chosen round's expected tokens a second are at least plain decoding's."""
    gains = [0.0, *accumulate(sorted(chances, reverse=True))]
    budgets = sorted(table.verify)

    def tokens(budget):
        return load.live + gains[min(max(0, budget - load.live), len(gains) - 1)]

    budget = Policy(table, budgets, 0.0).decide(load, tokens)
    base = plain(table, load)
    seconds = table.speculate(budget, load.padded, load.kv_tokens) if budget else base.seconds
    rate = tokens(budget) / seconds if budget else base.rate
    assert rate >= base.rate
    best = drafted(table, budgets, load, tokens)
    assert best is None or rate >= best.rate or best.seconds <= base.seconds
    if budget is not None:
        assert budget >= load.padded and budget > load.live


@settings(derandomize=True, deadline=None, max_examples=100)
@given(table=tables(), load=loads(), share=st.floats(0, 0.05))
def test_probes_stay_within_their_share(table, load, share):
    """When no draft is ever accepted, the extra time over plain rounds stays within the probe share."""
    budgets = sorted(table.verify)
    policy, base, spent, plainly = Policy(table, budgets, share), plain(table, load), 0.0, 0.0
    for _ in range(400):
        budget = policy.decide(load, lambda budget: float(load.live))
        plainly += base.seconds
        spent += table.speculate(budget, load.padded, load.kv_tokens) if budget else base.seconds
    assert spent <= plainly * (1 + share) * (1 + 1e-9)


def flat(plain_s=1.0, row_s=0.01, drafting_s=0.1):
    """Make a cost table: 1 s for each plain round, 0.01 s more for each row, 0.1 s for drafting."""
    return CostTable({1: Cost(plain_s), 64: Cost(plain_s)}, {1: Cost(1 + row_s), 512: Cost(1 + 512 * row_s)},
                     {1: Cost(drafting_s), 64: Cost(drafting_s)})  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=100)
@given(load=loads(), one=SECONDS, row=st.floats(0, 1e-4), often=st.integers(1, 300))
def test_backlog_reads_stay_within_their_share(load, one, row, often):
    """The time spent on backlogs and probes stays within their shares of the plain rounds' time."""
    table = CostTable({1: Cost(1e-2)}, {64: Cost(1.0)}, {1: Cost(1e-3)}, {1: Cost(one, row)})
    policy, spent, plainly = Policy(table, (64,), 0.005), 0.0, 0.0
    for number in range(1, 601):
        waiting = load.live * (number % often)
        budget = policy.decide(load, lambda budget: float(load.live), waiting)
        base = plain(table, load).seconds
        plainly += base
        if budget:
            spent += table.speculate(budget, load.padded, load.kv_tokens) + table.catch_up(load.padded, waiting) - base
        elif number % often == 0 and policy.keeps_up(load, load.live * often):
            spent += table.catch_up(load.padded, load.live * often)
    assert spent <= plainly * (0.005 + UPKEEP_SHARE) * (1 + 1e-9)


def test_drafting_resumes_only_if_it_repays_catching_up():
    """The policy resumes drafting only if the gain over a few rounds repays the cost of catching up."""
    table = CostTable({8: Cost(1.0)}, {16: Cost(1.0)}, {8: Cost(0.1)}, {8: Cost(1.0, 0.1)})
    policy, load = Policy(table, (16,), 0.0), Load(8, 8, 0)
    assert policy.decide(load, lambda budget: 9.0, 0) == 16
    assert policy.decide(load, lambda budget: 9.0, 70) is None
    assert policy.decide(load, lambda budget: 14.0, 70) == 16


def test_probe_resumes_drafts_that_pay_again():
    """With worthless drafts, rounds are plain except for a few probes; a successful probe resumes drafting."""
    policy, load = Policy(flat(), (8, 16, 32), 0.01), Load(4, 4, 0)
    rounds = [policy.decide(load, lambda budget: 4.0) for _ in range(200)]
    probes = [budget for budget in rounds if budget]
    assert 0 < len(probes) < 15
    assert policy.decide(load, lambda budget: float(budget)) == 32


def test_costly_rows_get_a_smaller_budget():
    """The policy picks smaller budgets for the same drafts as rows get costlier, and in the end plain decoding."""
    gains = [0.0, *accumulate([0.8] * 4 + [0.3] * 4 + [0.1] * 8)]
    tokens = lambda budget: 4 + gains[budget - 4]  # noqa: E731
    for row_s, budget in ((0.001, 20), (0.1, 8), (0.5, None)):
        assert Policy(flat(2.0, row_s), (8, 12, 20), 0).decide(Load(4, 4, 0), tokens) == budget


def test_long_contexts_favour_drafts():
    """With long contexts drafts pay at lower acceptance, because a round reads the KV once for all its rows."""
    table = CostTable({8: Cost(1.0, 1e-5)}, {32: Cost(2.5, 1e-5)})
    policy, tokens = Policy(table, (32,), 0), lambda budget: 16.0
    assert policy.decide(Load(8, 8, 0), tokens) is None
    assert policy.decide(Load(8, 8, 1e6), tokens) == 32


@pytest.mark.parametrize("load", [Load(64, 64, 0), Load(40, 64, 0), Load(32, 32, 0)])
def test_a_batch_that_no_budget_holds_decodes_plainly(load):
    """A batch decodes plainly if no budget has rows for its padded requests and at least one draft."""
    policy = Policy(flat(), (8, 16, 32), 0.01)
    assert policy.start(load) is None
    assert policy.decide(load, lambda budget: 1e9) is None


def test_first_round_has_the_largest_budget():
    """The first round has the largest budget, if this budget has a row for each request."""
    policy = Policy(flat(), (2, 3, 8, 16), 0.01)
    assert [policy.start(Load(n, n, 0)) for n in (1, 2, 15, 16)] == [16, 16, 16, None]


def test_costs_are_interpolated_and_extrapolated():
    """The cost table interpolates between sizes and extrapolates in proportion; KV costs are added."""
    table = CostTable({2: Cost(1.0, 0.5), 4: Cost(3.0, 0.5)}, {8: Cost(1.0)})
    assert [table.decode(n, 0) for n in (1, 2, 3, 4, 8)] == [1, 1, 2, 3, 6]
    assert table.decode(3, 2) == 3
    assert table.speculate(8, 4, 100) == 1


@pytest.mark.parametrize(("plain_", "cost"), [({}, Cost(1)), ({0: Cost(1)}, Cost(1)), ({1: Cost(1)}, Cost(0))])
def test_invalid_cost_table_is_rejected(plain_, cost):
    """A cost table without sizes, for zero requests, or with zero seconds raises an error."""
    with pytest.raises(RequestError, match=r"cost"):
        CostTable(plain_, {8: cost})


@pytest.mark.parametrize(("reqs", "nodes"), [(1, 5), (8, 16), (64, 5), (256, 16), (1, 2)])
def test_budgets_ascend_in_small_steps(reqs, nodes):
    """Each budget is at most 1.5 times the one before (or one more), from two rows to the largest useful number."""
    found = row_budgets(reqs, nodes)
    assert found == tuple(sorted(set(found))) and found[0] == 2
    assert found[-1] == min(reqs * nodes, max(MOST_ROWS, 2 * reqs))
    assert all(b <= max(a + 1, 1.5 * a) for a, b in pairwise(found))


def test_forecast_follows_reports_and_acceptance():
    """A new forecast expects one token a request. Later it follows the reports, scaled by the accepted share."""
    forecast = Forecast(grid(4))
    assert forecast.tokens(8, 4) == 4
    for _ in range(400):
        forecast.learn([1 + 0.5 * (p - 1) for p in forecast.points], 8, 4, 5.0)
    assert forecast.known and FIRST_ROUNDS < 400
    share = (6 + TRUST_PRIOR) / (12 + TRUST_PRIOR)
    assert forecast.trust == pytest.approx(share), "the last 6 rounds expected 12 drafts, and 6 were accepted"
    assert forecast.tokens(8, 4) == pytest.approx(4 + 2 * forecast.trust)
    assert forecast.tokens(99, 4) == pytest.approx(4 + 6 * forecast.trust), "beyond the last point it is constant"


def test_one_round_of_a_large_batch_changes_the_forecast():
    """A successful probe of a large batch raises the forecast at once; two rounds without acceptance lower it."""
    forecast = Forecast(grid(4))
    points = len(forecast.points)
    for _ in range(5):
        forecast.learn([1.0] + [1.1] * (points - 1), 128, 64, 64 * 1.1)
    assert forecast.tokens(128, 64) == pytest.approx(64 * 1.1)
    forecast.learn([1.0] + [1.1] * (points - 1), 128, 64, 64 * 1.8)
    assert forecast.tokens(128, 64) > 64 * 1.2
    for _ in range(2):
        forecast.learn([1.0] + [1.5] * (points - 1), 128, 64, 64)
    assert forecast.tokens(128, 64) < 64 * 1.2
    few = Forecast(grid(4))
    for drafts in (16.0, 16.0, 16.0):
        few.learn([1.0] + [1.1] * (points - 1), 32, 16, drafts + 1.6)
    few.age(60)
    few.learn([1.0] + [1.1] * (points - 1), 32, 16, 16 * 1.8)
    assert few.trust > 3, "old evidence does not outweigh a successful probe"


def test_one_bad_round_of_one_request_changes_little():
    """A bad round of one request barely lowers the forecast; a bad round of a large batch counts for one half."""
    promised = []
    for requests in (1, 64):
        forecast = Forecast(grid(4))
        for sure in (*[0.5] * 12, 0.0):
            forecast.learn([1 + sure * (p - 1) for p in forecast.points], 4 * requests, requests, 2.5 * requests)
        promised.append(forecast._at(forecast._values, 4.0))
    assert promised[0] > 2.3 and promised[1] == pytest.approx(1.75)


@pytest.mark.parametrize("nodes", [2, 3, 5, 16, 48])
def test_the_grid_ends_with_the_draft_shape(nodes):
    """The numbers of rows per request in a report start at one and end at all nodes of the draft shape."""
    points = grid(nodes)
    assert points[0] == 1 and points[-1] == nodes and list(points) == sorted(set(points))
