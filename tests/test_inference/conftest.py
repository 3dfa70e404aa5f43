# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
import torch


@pytest.fixture
def without_gradients():
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
