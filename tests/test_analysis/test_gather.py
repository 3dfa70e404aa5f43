# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What is gathered is looked at before it is drawn."""

import numpy as np
import pytest
from gate_tables import make_table

from fgc_mm.analysis import gather
from fgc_mm.errors import UsageError


def test_a_network_that_diverged_is_named():
    table = make_table(12, 'classification')
    gather._check_finite(table, 'model.pth')
    table.logits[table.layers[1]][3] = np.nan
    with pytest.raises(UsageError, match=f'model.pth: gate {table.layers[1]} gives NaN or Inf'):
        gather._check_finite(table, 'model.pth')
