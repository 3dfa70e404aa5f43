# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest

from fgc_mm.inference.gating_config import with_gating
from fgc_mm.nets import Gated


@pytest.mark.parametrize('kind', ['Gated', 'fgc_mm.Gated', Gated])
def test_sites_of_any_backbone_are_named_by_its_option(kind):
    """Also in a new-style config, which has the function."""
    model = dict(backbone=dict(type=kind, backbone=dict(type='ResNet', depth=18)))
    left = dict(widths={'layer1.0.conv1': 7}, sites=['layer1.0.conv1'])
    with_gating(model, dict(backbone=left))
    assert (
        model['backbone']['sites'] == ['layer1.0.conv1'] and 'gated_blocks' not in model['backbone']
    )
    assert model['backbone']['widths'] == {'layer1.0.conv1': 7}
