# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import re
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / 'benchmarks' / 'gates.py'


def test_prints_a_row_for_training_and_one_for_evaluation(monkeypatch, capsys):
    options = '--depths 18 --size 64 --batch 2 --repeats 3 --warmup 0 --device cpu'
    monkeypatch.setattr(sys, 'argv', [str(SCRIPT), *options.split()])
    runpy.run_path(str(SCRIPT), run_name='__main__')
    rows = re.findall(
        r'ResNet-18\s+(\w+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)', capsys.readouterr().out
    )
    assert [row[0] for row in rows] == ['training', 'evaluation']
    for _, dense, gated, ratio in rows:
        assert float(dense) > 0 and float(gated) > 0 and 0.1 < float(ratio) < 10
