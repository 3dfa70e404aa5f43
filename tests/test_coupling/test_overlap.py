# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from fgc_mm.coupling import TurnoverMeter, neighbor_overlap
from fgc_mm.coupling.overlap import shared_entries


def by_sklearn(features, gates, k, queries=None):
    sets = []
    for x in (features, gates):
        found = NearestNeighbors(n_neighbors=k + 1, metric='cosine', algorithm='brute').fit(x)
        near = found.kneighbors(x, return_distance=False)
        sets.append([set(row.tolist()) - {i} for i, row in enumerate(near)])
    chosen = range(len(features)) if queries is None else queries.tolist()
    return float(np.mean([len(sets[0][i] & sets[1][i]) / k for i in chosen]))


@pytest.mark.parametrize('k', [1, 10])
@pytest.mark.parametrize('unit', [False, True])
def test_against_scikit_learn(k, unit):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 6, generator=generator)
    gates = features[:, :4] + 0.5 * torch.randn(300, 4, generator=generator)
    if unit:
        features, gates = (x / x.norm(dim=1, keepdim=True) for x in (features, gates))
    expected = by_sklearn(features.numpy(), gates.numpy(), k)
    assert 0.05 < expected < 0.9
    assert neighbor_overlap(features, gates, k) == pytest.approx(expected, abs=1e-9)
    queries = torch.tensor([3, 8, 250])
    expected = by_sklearn(features.numpy(), gates.numpy(), k, queries)
    assert neighbor_overlap(features, gates, k, queries) == pytest.approx(expected, abs=1e-9)


def test_extremes():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1500, 8, generator=generator)
    assert neighbor_overlap(x, 3 * x, 10) == 1.0
    unrelated = neighbor_overlap(x, torch.randn(1500, 8, generator=generator), 10)
    assert unrelated == pytest.approx(10 / 1499, abs=0.004)
    assert 0.9 < neighbor_overlap(x, x.half(), 10) < 1.0


def test_bad_arguments():
    with pytest.raises(ValueError, match='20 features and 19 gate vectors'):
        neighbor_overlap(torch.rand(20, 3), torch.rand(19, 3), 5)
    with pytest.raises(ValueError, match='from 1 to 19'):
        neighbor_overlap(torch.rand(20, 3), torch.rand(20, 3), 20)


def test_shared_entries_by_hand():
    a = torch.tensor([[1, 2, 3], [4, 5, -1], [7, 8, 9]])
    b = torch.tensor([[3, 9, 1], [-1, 6, 4], [0, 1, 2]])
    assert shared_entries(a, b).tolist() == [2, 1, 0]


def test_turnover_meter():
    meter = TurnoverMeter(100, k=4, watched=100)
    assert math.isnan(meter.compute())
    first = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    meter.update(torch.tensor([10, 20]), first)
    assert math.isnan(meter.compute())  # nobody was seen twice
    meter.update(torch.tensor([20, 10]), torch.tensor([[5, 6, 7, 9], [1, 2, 50, 60]]))
    other = TurnoverMeter(100, k=4, watched=100)
    other.load_state_dict(meter.state_dict())
    for each in (meter, other):
        assert each.compute() == pytest.approx((0.25 + 0.5) / 2)
        assert math.isnan(each.compute())
        each.update(torch.tensor([20]), torch.tensor([[5, 6, 7, 9]]))
        assert each.compute() == 0


def test_turnover_meter_watches_a_fixed_sample():
    meter = TurnoverMeter(1000, k=2, watched=10, seed=1)
    assert meter.last.shape == (10, 2)
    neighbors = torch.arange(2000).view(1000, 2)
    meter.update(torch.arange(1000), neighbors)
    meter.update(torch.arange(1000), neighbors.flip(1))
    assert meter.compute() == 0
    assert torch.equal(meter.chosen, TurnoverMeter(1000, k=2, watched=10, seed=1).chosen)
