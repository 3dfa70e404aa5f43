# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from pathlib import Path

import pytest

from fgc_mm.datasets import ensure_demo_data


@pytest.fixture(scope='session')
def demo_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All demo data, built once; tests only read it."""
    root = tmp_path_factory.mktemp('demo_data')
    ensure_demo_data(root)
    return root
