# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import json

import pytest
import torch

from fgc_mm.sites.origin import filled, outline


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.int16, torch.complex64])
def test_an_example_of_the_outline_of_one(dtype):
    example = dict(picture=torch.ones(1, 3, 4, 4, dtype=dtype), scale=2, more=[torch.ones(5)])
    found = filled(json.loads(json.dumps(outline(example))))
    assert found['scale'] == 2 and found['more'][0].shape == (5,)
    assert found['picture'].shape == (1, 3, 4, 4) and found['picture'].dtype == dtype
    assert not found['picture'].any()
