# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Starting from, and going on from, checkpoints of an earlier version."""

import pytest
import torch.nn as nn
from gated_resnets import gated_resnet

from fgc_mm.errors import CheckpointError
from fgc_mm.gates import find_gates
from fgc_mm.training.new_gates_hook import NewGatesHook


class Run:
    """What the hook asks of a runner."""

    def __init__(self, model, resume):
        self.model, self._resume = model, resume


@pytest.fixture
def model():
    model = nn.Module()
    model.backbone = gated_resnet(18, base_channels=8)
    return model


def of_earlier(model):
    state = {}
    for name, value in model.state_dict().items():
        block, _, rest = name.removeprefix('backbone.gates.').partition('-conv1.')
        old = f'backbone.{block.replace("-", ".")}.gate1.{rest}' if rest else name
        state[old] = value + 1
    return state


def test_gates_of_an_earlier_version_are_not_new(model, caplog):
    checkpoint = dict(state_dict=of_earlier(model), optimizer={})
    wanted = {name: value + 1 for name, value in model.state_dict().items()}
    NewGatesHook().after_load_checkpoint(Run(model, resume=False), checkpoint)
    model.load_state_dict(checkpoint['state_dict'])
    assert len(find_gates(model)) == 8
    assert all((value == wanted[name]).all() for name, value in model.state_dict().items())


def test_their_training_cannot_be_resumed(model):
    """The optimizer would give the momentum of one parameter to another."""
    checkpoint = dict(state_dict=of_earlier(model), optimizer={})
    with pytest.raises(CheckpointError, match=r'--resume: .* earlier version .* load_from='):
        NewGatesHook().after_load_checkpoint(Run(model, resume=True), checkpoint)
