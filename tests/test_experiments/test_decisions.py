# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""experiments/decisions.py: other decisions in place of a network's own."""

from pathlib import Path

import decisions as bench
import numpy as np
import pytest
import torch
from gate_tables import LAYERS, make_table
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from fgc_mm.errors import UsageError

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize('within', [True, False])
def test_every_picture_gets_the_decisions_of_another_one(within):
    classes = np.array([0, 1, 0, 2, 1, 0, 1])
    partner = bench.exchanged(classes, np.random.default_rng(0), within)
    assert sorted(partner) == list(range(7))
    alone = classes == 2  # the only one of its class
    moved = partner != np.arange(7)
    assert moved[~alone].all() if within else moved.all()
    assert not within or (classes[partner] == classes).all()


def test_static_opens_as_many_channels_the_most_used():
    table = make_table()
    masks = bench.decisions(table, 'static', seed=0)
    for name in LAYERS:
        own, alike = table.mask[name], masks[name]
        assert (alike == alike[0]).all() and alike.shape == own.shape
        assert alike[0].sum() == round(own.sum(axis=1).mean())
        often = own.mean(axis=0)
        assert often[alike[0] == 1].min() >= often[alike[0] == 0].max(initial=0)
    everything = bench.decisions(table, 'open', seed=0)
    assert all(mask.all() for mask in everything.values())
    assert bench.decisions(table, 'own', seed=0) is None


def test_exchange_keeps_what_is_open_over_all():
    table = make_table()
    for policy in ('class', 'other'):
        masks = bench.decisions(table, policy, seed=0)
        for name in LAYERS:
            assert (masks[name].mean(axis=0) == table.mask[name].mean(axis=0)).all()
    by_class = bench.decisions(table, 'class', seed=0)[LAYERS[-1]]
    for c in range(3):
        chosen = table.main_class == c
        assert sorted(map(tuple, by_class[chosen])) == sorted(
            map(tuple, table.mask[LAYERS[-1]][chosen])
        )


@pytest.fixture
def network(demo_checkpoint, demo_root, tmp_path):
    """``network(count, *lines)``: a config of a few pictures with these lines, and weights."""
    checkpoint, config = tmp_path / 'gated.pth', tmp_path / 'small.py'

    def make(count, *lines):
        data = f"dict(indices={count}, data_root='{demo_root}/classification/')"
        text = [
            f"_base_ = '{PROJECT}/configs/demo/resnet18_digits_gated.py'",
            f"demo_data = dict(root='{demo_root}')",
            f'test_dataloader = dict(batch_size=16, sampler=dict(shuffle=True), dataset={data})',
        ]
        config.write_text('\n'.join([*text, *lines]) + '\n')
        demo_checkpoint('resnet18_digits_gated', checkpoint)
        return str(config), str(checkpoint)

    return make


def test_a_network_under_every_policy(network):
    """Its own decisions, imposed, give its own figures: they are those of the right pictures."""
    rows = bench.measure(*network(40), [-2, -1], [0, 1])
    parts = ('coupled blocks', 'all blocks')
    assert [(row['part'], row['policy']) for row in rows] == [
        (part, policy) for part in parts for policy in bench.POLICIES
    ]
    by = {(row['part'], row['policy']): row for row in rows}
    for part in parts:
        own, imposed = by[part, 'own'], by[part, 'imposed']
        assert imposed['values'] == own['values']
        assert imposed['saved'] == pytest.approx(own['saved'], abs=1e-6)
        assert len(by[part, 'other']['values']) == 2 and len(own['values']) == 1
    # The blocks before the exchanged ones decide as before; with all of them the cost is the same.
    assert by['all blocks', 'other']['saved'] == pytest.approx(own['saved'], abs=1e-6)
    assert by['all blocks', 'open']['saved'] < 0.5 < by['coupled blocks', 'open']['saved']
    text = bench.show({'gated': rows})
    assert text.count('\n') == 3 and '% saved)' in text


def test_gates_that_scale_are_refused(network):
    gate = "dict(type='FBSGate')"
    config, checkpoint = network(4, f'model = dict(backbone=dict(gate={gate}))')
    cfg = Config.fromfile(config)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model)
    torch.save(dict(state_dict=model.state_dict()), checkpoint)
    with pytest.raises(UsageError, match='scale what they leave open'):
        bench.measure(config, checkpoint, [-1], [0])


def test_unknown_layers(network):
    with pytest.raises(UsageError, match=r"^--layers: 'layer9' names no block"):
        bench.measure(*network(4), ['layer9'], [0])
