# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest

from fgc_mm.nets import Gated, GatedResNet
from fgc_mm.runtime.config.files import dicts_in, type_name
from fgc_mm.training import L0Hook


@pytest.mark.parametrize(
    ('kind', 'name'),
    [
        ('L0Hook', 'L0Hook'),
        ('fgc_mm.L0Hook', 'L0Hook'),
        (L0Hook, 'L0Hook'),
        (Gated, 'Gated'),
        (GatedResNet, 'GatedResNet'),
        (None, ''),
    ],
)
def test_the_type_of_a_part(kind, name):
    """New-style configs have the class, or the function, in place of its name."""
    assert type_name(dict(type=kind)) == name


def test_a_part_without_a_type():
    assert type_name({}) == type_name([1]) == type_name(None) == ''


def test_every_dict_with_the_key_that_leads_to_it():
    part = dict(a=[dict(b=1), 2], c=dict(d=(dict(),)))
    found = [key for key, _ in dicts_in(part, 'model')]
    assert found == ['model', 'model.a.0', 'model.c', 'model.c.d.0']
