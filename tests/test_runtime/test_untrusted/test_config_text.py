# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a config's text says, read without running it."""

import pytest
from mmengine.config import Config

from fgc_mm.runtime.untrusted.config_text import plain_values


def test_values_are_read():
    cfg = dict(default_scope='mmdet', model=dict(type='A', sizes=(1, -2.5), deep=[dict(a=None)]))
    assert plain_values(Config(cfg).pretty_text) == cfg
    assert plain_values("model = dict(type='A')\nrest = set([1])") == dict(model=dict(type='A'))


@pytest.mark.parametrize(
    'text',
    ['import os\nmodel = dict()', "model = dict(type=open('x'))", 'model = (', 'a = {{ $X:1 }}'],
)
def test_code_gives_nothing(text):
    assert plain_values(text) == {}
