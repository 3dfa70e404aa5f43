# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import json

import pytest

from fgc_mm.analysis.tradeoff import read_figures

TEST = {'accuracy/top1': 98.0, 'macs/pruning_ratio': 40.0}


def test_figures_of_one_test_and_of_a_dial(tmp_path):
    path = tmp_path / 'x.json'
    path.write_text(json.dumps(dict(metrics=TEST)))
    assert read_figures(path) == [TEST]
    path.write_text(json.dumps(dict(points=[dict(metrics=TEST), dict(metrics=TEST)])))
    assert read_figures(path) == [TEST, TEST]


@pytest.mark.parametrize('text', ['{}', '[1]', 'nothing', '{"metrics": {"mIoU": 1}}'])
def test_a_file_that_holds_no_figures(text, tmp_path):
    path = tmp_path / 'x.json'
    path.write_text(text)
    with pytest.raises(ValueError, match=r'holds no figures of tools/test.py'):
        read_figures(path)
