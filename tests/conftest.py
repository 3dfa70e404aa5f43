# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import contextlib
import functools
import importlib
import os
import resource
import sys
from types import SimpleNamespace

import pytest

# Pictures are drawn without a screen; must be set before matplotlib is imported.
os.environ.setdefault('MPLBACKEND', 'agg')


@pytest.fixture(autouse=True)
def no_scope_of_others():
    """A runner leaves its default scope, where nobody finds the classes of the other packages by
    plain name; which test comes next is up to the workers."""
    registry = sys.modules.get('mmengine.registry')
    if registry is not None:
        registry.DefaultScope._instance_dict.clear()


@pytest.fixture(autouse=True)
def no_waiting_for_mmengine():
    """Three quarters of a short run go to laying out the config's text (five times), collecting
    garbage for each dataset and reading the whole model index for a base of a package."""
    loaded = sys.modules.get
    if 'mmengine.runner' in sys.modules and not hasattr(loaded('mmengine.config.utils'), 'quick'):
        importlib.import_module('yapf.yapflib.yapf_api').FormatCode = lambda text, **_: (text, True)
        loaded('mmengine.dataset.base_dataset').gc = SimpleNamespace(collect=lambda: 0)
        utils = loaded('mmengine.config.utils')
        utils.load, utils.quick = functools.cache(utils.load), True


@pytest.fixture
def two_threads():
    """Two threads for PyTorch, whatever other tests have set."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def room_for_files_of():
    """``with room_for_files_of(size)``: who writes more meets a real error of the system."""

    @contextlib.contextmanager
    def limited(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture(scope='session')
def demo_root(tmp_path_factory, worker_id):
    """The demo data, built once and shared by the workers of a test run."""
    from fgc_mm.datasets import ensure_demo_data

    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == 'master' else base.parent) / 'demo'
    ensure_demo_data(root)
    return root
