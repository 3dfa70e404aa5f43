# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fgc_mm.datasets import DEMO_KINDS, ensure_demo_data
from fgc_mm.datasets.demo import build
from fgc_mm.datasets.demo.digits import load_digits

REPO = Path(__file__).parents[3]
# The quickest kind, for tests of the building itself.
KIND = 'segmentation'


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def run_tool(root: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, REPO / 'tools' / 'make_demo_data.py', '--root', root, *options]
    env = {**os.environ, 'PYTHONPATH': str(REPO)}
    return subprocess.Popen(
        [str(part) for part in command],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make building quick; only this process is told."""
    from fgc_mm.datasets.demo import segmentation

    monkeypatch.setattr(segmentation, 'CITIES', {'train': {'a': 3}, 'val': {'b': 2}})


def test_second_build_by_two_processes_is_byte_identical(demo_root, tmp_path):
    """Both start at once on the same folder: one builds, the other waits, the data is whole."""
    both = [run_tool(tmp_path / 'demo') for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    built = [line for output in outputs for line in output.splitlines() if 'built' in line]
    assert len(built) == len(DEMO_KINDS), outputs
    assert contents(tmp_path / 'demo') == contents(demo_root)


@pytest.mark.parametrize('kind', DEMO_KINDS)
def test_no_digit_is_in_train_and_val(demo_root, kind):
    sources = json.loads((demo_root / kind / 'digits.json').read_text())
    used = {split: {i for ids in sources[split].values() for i in ids} for split in sources}
    assert not used['train'] & used['val']
    splits = load_digits().splits
    for split in ('train', 'val'):
        assert used[split] <= set(splits[split].tolist())
        assert len(used[split]) > 0.3 * len(splits[split])


@pytest.mark.parametrize('kind', DEMO_KINDS)
def test_manifest_lists_every_file(demo_root, kind):
    manifest = json.loads((demo_root / kind / 'manifest.json').read_text())
    there = contents(demo_root / kind)
    there.pop('manifest.json')
    assert manifest['files'] == len(there)
    assert manifest['sizes'] == {Path(k).as_posix(): len(v) for k, v in there.items()}


def test_complete_data_is_left_alone_and_quick(demo_root, capsys):
    before = {p: p.stat().st_mtime_ns for p in demo_root.rglob('*')}
    began = time.perf_counter()
    ensure_demo_data(demo_root)
    assert time.perf_counter() - began < 1
    assert capsys.readouterr().out == ''
    assert {p: p.stat().st_mtime_ns for p in demo_root.rglob('*')} == before


def damage_remove(folder: Path) -> None:
    next(folder.rglob('*_leftImg8bit.png')).unlink()


def damage_truncate(folder: Path) -> None:
    path = next(folder.rglob('*_labelTrainIds.png'))
    path.write_bytes(path.read_bytes()[:20])


def damage_version(folder: Path) -> None:
    manifest = json.loads((folder / 'manifest.json').read_text())
    (folder / 'manifest.json').write_text(json.dumps({**manifest, 'version': 0}))


def damage_manifest(folder: Path) -> None:
    text = (folder / 'manifest.json').read_text()
    (folder / 'manifest.json').write_text(text[: len(text) // 2])


@pytest.mark.parametrize(
    'damage', [damage_remove, damage_truncate, damage_version, damage_manifest]
)
def test_damaged_or_old_folder_is_rebuilt(tmp_path, capsys, few_scenes, damage):
    ensure_demo_data(tmp_path, [KIND])
    whole = contents(tmp_path / KIND)
    damage(tmp_path / KIND)
    capsys.readouterr()
    ensure_demo_data(tmp_path, [KIND])
    assert capsys.readouterr().out.count('built') == 1
    assert contents(tmp_path / KIND) == whole


def test_folder_of_somebody_else_is_kept(tmp_path, capsys, few_scenes):
    (tmp_path / KIND).mkdir()
    (tmp_path / KIND / 'thesis.txt').write_text('years of work')
    ensure_demo_data(tmp_path, KIND)
    assert (tmp_path / f'{KIND}.old-1' / 'thesis.txt').read_text() == 'years of work'
    assert f'{KIND}.old-1' in capsys.readouterr().out
    assert build.is_complete(tmp_path / KIND, KIND)


def test_interrupted_build_leaves_no_folder_and_is_cleared_away(tmp_path, monkeypatch, few_scenes):
    def interrupted(folder: Path) -> dict:
        (folder / 'half.png').write_bytes(b'')
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(build._BUILDERS, KIND, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_demo_data(tmp_path, KIND)
    assert [p.name for p in tmp_path.iterdir()] == [f'.{KIND}.lock']
    # A killed process cannot clear away behind itself: the next one does.
    (tmp_path / f'.{KIND}.building-killed').mkdir()
    ensure_demo_data(tmp_path, KIND)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f'.{KIND}.lock', KIND]


def test_force_builds_again(tmp_path, capsys, few_scenes):
    ensure_demo_data(tmp_path, KIND)
    (tmp_path / KIND / 'extra.txt').write_text('')
    ensure_demo_data(tmp_path, KIND)
    assert (tmp_path / KIND / 'extra.txt').exists()
    ensure_demo_data(tmp_path, KIND, force=True)
    assert not (tmp_path / KIND / 'extra.txt').exists()
    assert capsys.readouterr().out.count('built') == 2


def test_unknown_kind_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"\['depth'\] must be .*classification, detection"):
        ensure_demo_data(tmp_path, ['depth'])
    assert not list(tmp_path.iterdir())
