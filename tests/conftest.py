# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import os

import pytest

# Pictures are drawn without a screen; must be set before matplotlib is imported.
os.environ.setdefault('MPLBACKEND', 'agg')


@pytest.fixture(scope='session')
def demo_root(tmp_path_factory, worker_id):
    """The demo data, built once and shared by the workers of a test run."""
    from fgc_mm.datasets import ensure_demo_data

    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == 'master' else base.parent) / 'demo'
    ensure_demo_data(root)
    return root
