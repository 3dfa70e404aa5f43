# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which checkpoints belong to a model."""

import pytest

from fgc_mm.errors import CheckpointError
from fgc_mm.evaluation.checkpoint_fit import check_fit


def test_one_tensor_of_another_shape_is_another_network(toy):
    model = toy.task()
    state = model.state_dict()
    check_fit(model, dict(state_dict=state), 'whole.pth')
    key = 'backbone.layer1.0.conv1.weight'
    narrow = {**state, key: state[key][:3]}
    with pytest.raises(CheckpointError, match=r'other shape 1: backbone\.layer1\.0\.conv1'):
        check_fit(model, dict(state_dict=narrow), 'narrow.pth')


def test_gates_and_a_few_more_or_less_are_left_to_mmengine(toy):
    model = toy.task()
    state = model.state_dict()
    dense = {key: value for key, value in state.items() if 'gate' not in key}
    check_fit(model, dense, 'dense.pth')
    del dense['head.bias']
    check_fit(model, dense, 'without_bias.pth')
    half = dict(list(dense.items())[: len(dense) // 2])
    with pytest.raises(CheckpointError, match='does not belong to this config'):
        check_fit(model, half, 'half.pth')
