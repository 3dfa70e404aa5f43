# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A training with all that is logged, its events in TensorBoard, and its page in a browser."""

import json
import os
import re
import shutil
import sys

import pytest
import torch
from mmengine.config import Config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fgc_mm.analysis.report_page import flatten
from fgc_mm.analysis.report_runs import find_checkpoint, find_config, published_figures, read_run

PICTURES = f'test_dataloader.dataset.indices={list(range(0, 360, 30))}'.replace(' ', '')
BROWSERS = ('chromium-headless-shell', 'chromium', 'chromium-browser', 'google-chrome')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """Where the one training of this file goes."""
    return tmp_path_factory.mktemp('runs')


@pytest.fixture
def trained(run_tool, short_options, place):
    """Two steps of a coupled network, logged to TensorBoard, and their test."""
    config, folder = 'configs/demo/resnet18_digits_fgc.py', place / 'coupled'
    if folder.is_dir():
        return folder
    own = place / 'with_tensorboard.py'
    backends = "[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]"
    own.write_text(
        f'_base_ = {os.path.abspath(config)!r}\n'
        f"visualizer = dict(type='UniversalVisualizer', vis_backends={backends})\n"
        'default_hooks = dict(logger=dict(interval=1))\n'
    )
    hooks = Config.fromfile(config).custom_hooks
    for hook in hooks:
        if hook.type != 'GatedMACsHook':
            hook.log_interval = 1
        if hook.type == 'FGCHook':
            hook.k = 2
    with open(own, 'a') as file:
        file.write(f'custom_hooks = {hooks!r}\n')
    options = short_options(config, 'train_cfg.val_interval=1', PICTURES)
    code, _, err = run_tool('train', own, '--work-dir', folder, *options)
    assert code == 0, err
    figures = ['--out', folder / 'figures.json', '--work-dir', place / 'test']
    code, _, err = run_tool('test', own, find_checkpoint(folder), *figures, *options)
    assert code == 0, err
    return folder


def test_tensorboard_has_all_that_is_logged(trained):
    (log,) = trained.glob('*/vis_data/scalars.json')
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    events = EventAccumulator(str(log.parent))
    events.Reload()
    tags = set(events.Tags()['scalars'])
    expected = {key for row in logged for key in row} - {'step', 'iter', 'epoch'}
    assert expected <= tags
    gate = 'backbone.gates.layer4-1-conv1'
    for name in (
        *('loss', 'loss_task', 'loss_l0', 'loss_fgc', 'loss_batch_shaping'),
        *('lr', 'accuracy/top1'),
        *('gate/openness', f'gate/openness/{gate}', 'fgc/overlap', f'fgc/overlap/{gate}'),
        *('macs/pruning_ratio', 'macs/backbone_executed_G', 'gates/openness', 'gates/dynamic'),
    ):
        assert name in tags, name
    for name in ('loss', f'gate/openness/{gate}'):
        wanted = [(row['step'], row[name]) for row in logged if name in row]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, pytest.approx(value, rel=1e-5)) for step, value in wanted]


def browser():
    """A headless Chromium and what drives it, or a skip that says what is missing."""
    api = pytest.importorskip('playwright.sync_api', reason='playwright drives the browser')
    path = os.environ.get('FGC_MM_BROWSER') or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(
            f'none of {", ".join(BROWSERS)} is on the PATH: apt-get install '
            'chromium-headless-shell, or name a Chromium by FGC_MM_BROWSER'
        )
    return api, path


def write_page(trained, run_tool, tmp_path):
    """A page of a run with gates, of one without a checkpoint, and of one without logs, too."""
    dense, third = tmp_path / 'dense', tmp_path / 'third'
    without = ['figures.json', '*.pth']
    shutil.copytree(trained, dense, ignore=shutil.ignore_patterns(*without))
    shutil.copytree(trained, third, ignore=shutil.ignore_patterns(*without, 'scalars.json'))
    out = tmp_path / 'page' / 'report.html'
    code, text, err = run_tool('report', trained, dense, third, '--out', out, '--max-layers', 3)
    assert code == 0, err
    assert 'dense: gates are not shown, no checkpoint in' in text
    return out


def test_the_page_needs_nothing_else(trained, run_tool, tmp_path, demo_root):
    html = write_page(trained, run_tool, tmp_path).read_text()
    assert not re.findall(r'(?:src|href)="(?!data:|#)|url\(|@import', html)
    assert 'macs/pruning_ratio' in html and 'layer4.1' in html


def test_the_page_in_a_browser(trained, run_tool, tmp_path, demo_root):
    api, path = browser()
    out = write_page(trained, run_tool, tmp_path)
    with api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=['--no-sandbox'])
        page = chromium.new_page(viewport=dict(width=1200, height=900))
        problems = []
        page.on('console', lambda m: problems.append(m.text) if m.type != 'log' else None)
        page.on('pageerror', lambda error: problems.append(str(error)))
        page.on(
            'request',
            lambda r: None if r.url.startswith(('file:', 'data:')) else problems.append(r.url),
        )
        page.goto(out.as_uri())
        check_tables(page)
        check_layers(page)
        check_hover(page)
        assert page.locator('#training .plot').count() >= 3
        assert page.locator('#alignment .plot').count() == 4
        check_keys(page)
        check_themes(page)
        check_columns(page)
        chromium.close()
    assert problems == []


def check_tables(page):
    heads = page.locator('#layer-costs th')
    cells = '#layer-costs tbody tr td:nth-child(4)'
    heads.nth(3).click()
    first = [float(t or 'nan') for t in page.locator(cells).all_inner_texts() if t]
    assert len(first) > 10 and first == sorted(first) and first[0] < first[-1]
    heads.nth(3).click()
    assert [float(t) for t in page.locator(cells).all_inner_texts() if t] == first[::-1]
    assert heads.nth(3).get_attribute('aria-sort') == 'descending'
    shown = page.locator('#results tbody').inner_text()
    assert 'error/top1 %' in shown and 'macs/pruning_ratio %' in shown
    assert 'macs/backbone_executed_G 10⁹' in shown and 'gates/dynamic 0 to 1' in shown


def check_layers(page):
    choices = page.locator('#layer option').all_inner_texts()
    assert len(choices) == 3 and choices[0] == 'layer1.0' and choices[-1] == 'layer4.1'
    places = '#embedding .card:first-child svg >> nth=0 >> circle'
    before = [node.get_attribute('cx') for node in page.locator(places).all()]
    channels = page.locator('#frequency canvas').first.get_attribute('width')
    assert len(before) == 12
    page.select_option('#layer', 'layer1.0')
    after = [node.get_attribute('cx') for node in page.locator(places).all()]
    assert len(after) == 12 and after != before
    assert page.locator('#frequency canvas').first.get_attribute('width') != channels
    assert page.locator('#embedding .chosen').inner_text() == 'layer1.0'
    assert page.locator('#neighbors figure img').count() > 12


def check_hover(page):
    assert page.locator('#tip').is_hidden()
    page.locator('#embedding circle').first.scroll_into_view_if_needed()
    page.locator('#embedding circle').first.hover(force=True)
    assert re.search(r'picture \d+: \d', page.locator('#tip').inner_text())
    page.locator('#frequency canvas').first.hover()
    assert re.search(r'channel \d+\s+open for [\d.]+ %', page.locator('#tip').inner_text())


def check_keys(page):
    """Whatever is told by a color or a dash is said."""
    losses = page.locator('#training .card', has_text='losses')
    runs, lines = losses.locator('.legend').all()
    assert runs.locator('span').all_inner_texts() == ['coupled', 'dense']  # the third has no log
    assert lines.locator('span').all_inner_texts() == [
        *('loss', 'loss_task', 'loss_l0', 'loss_fgc')
    ]
    dashes = [n.get_attribute('stroke-dasharray') for n in lines.locator('path').all()]
    drawn = [n.get_attribute('stroke-dasharray') for n in losses.locator('.plot path').all()]
    assert len(set(dashes)) == 4 and drawn[1:] == [*dashes, *dashes]  # after the axes
    openness = page.locator('#training .card', has_text='openness').locator('.plot text')
    assert openness.last.text_content() == 'share of open channels'
    scales = page.locator('#frequency .scale').all_inner_texts()
    assert [' '.join(text.split()[:2]) for text in scales] == ['execution frequency', 'cosine -11']
    across = page.locator('#frequency .across span').all_inner_texts()
    assert across == [str(digit) for digit in range(10)]


SMALLEST = """Math.min(...[...document.querySelectorAll('svg text')].map((text) => {
  const root = text.ownerSVGElement;
  const scale = root.getBoundingClientRect().width / root.viewBox.baseVal.width;
  return parseFloat(getComputedStyle(text).fontSize) * scale;
}))"""


HIDDEN = """[...document.querySelectorAll('.plot svg')].flatMap((root) => {
  const texts = [...root.querySelectorAll('text')];
  const label = texts.find((text) => /rotate\\(-90/.test(text.getAttribute('transform')));
  const own = label.getBoundingClientRect();
  return texts.filter((text) => {
    const box = text.getBoundingClientRect();
    return text !== label && box.left < own.right && own.left < box.right
      && box.top < own.bottom && own.top < box.bottom;
  }).map((text) => `${label.textContent} on ${text.textContent}`);
})"""


def check_columns(page):
    """Three runs side by side, or one under the other on a phone; nothing too small to read."""
    for width, beside in ((1200, True), (700, True), (360, False)):
        page.set_viewport_size(dict(width=width, height=740))
        page.evaluate('new Promise((done) => setTimeout(done, 100))')  # it draws anew
        cards = page.locator('#embedding .card').all()
        boxes = [card.bounding_box() for card in cards]
        assert len(boxes) == 3 and len({box['y' if beside else 'x'] for box in boxes}) == 1
        assert len({box['x' if beside else 'y'] for box in boxes}) == 3
        assert page.evaluate(SMALLEST) > 11
        assert page.evaluate(HIDDEN) == []
        whole = page.evaluate('document.documentElement.scrollWidth')
        assert whole <= width, 'one would have to scroll the page sideways'
    # On the phone, the names of the layers stay while the figures of the runs are scrolled.
    cells = page.locator('#layer-costs tbody tr').first.locator('td').all()
    name, value = cells[0].bounding_box()['x'], cells[2].bounding_box()['x']
    page.evaluate("document.querySelector('#layer-costs').parentElement.scrollLeft = 60")
    assert cells[0].bounding_box()['x'] == name
    assert cells[2].bounding_box()['x'] == pytest.approx(value - 60, abs=1)


def check_themes(page):
    color = 'getComputedStyle(document.body).backgroundColor'
    light = page.evaluate(color)
    page.locator('#theme').click()
    assert page.evaluate(color) != light
    page.emulate_media(color_scheme='dark')
    page.reload()
    assert page.evaluate(color) != light
    page.emulate_media(color_scheme='light')
    page.reload()
    assert page.evaluate(color) == light


def test_without_the_extra(run_tool, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'jinja2', None)
    code, _, err = run_tool('report', tmp_path)
    assert code == 2 and "pip install 'fgc-mm[analysis]'" in err


def test_the_figures_of_the_paper():
    (fgc, other) = published_figures('configs/paper/resnet20_fgc_cifar10')
    assert 'the paper' in fgc['source'] and fgc['metrics']['Top 1 Error'] == 7.91
    assert other['metrics']['Pruning Ratio'] == 57.4
    # A name that fits two configs says of which each figure is.
    both = published_figures('faster_rcnn_r50_fgc_voc')
    assert any('short/' in found['source'] for found in both)
    assert any('the paper' in found['source'] for found in both)
    only = published_figures('configs/short/faster_rcnn_r50_fgc_voc')
    assert only and all('the paper' not in found['source'] for found in only)
    assert published_figures('nothing_of_the_kind') == []


def test_a_slimmed_network_beside_its_origin(trained, run_tool, short_options, tmp_path):
    """tools/slim.py writes into the work dir by default; the report is still about the run."""
    folder = tmp_path / 'coupled'
    shutil.copytree(trained, folder)
    (own,) = folder.glob('*.py')
    options = short_options('resnet18_digits', PICTURES)
    logs = ['--work-dir', tmp_path / 'logs']
    code, _, err = run_tool('slim', own, folder / 'epoch_1.pth', *logs, *options)
    assert code == 0 and (folder / f'{own.stem}_slim.py').is_file(), err
    (folder / 'last_checkpoint').unlink()  # as of a folder that was copied in parts
    run = read_run(folder)
    assert run.config_name.endswith(own.stem) and run.checkpoint.name == 'epoch_1.pth'
    code, text, err = run_tool('report', folder, '--max-images', 4, '--max-layers', 1)
    assert code == 0 and 'gates are not shown' not in text, text + err
    own.unlink()  # a folder with nothing else is about the slimmed one
    (folder / 'epoch_1.pth').unlink()
    assert find_config(folder).stem == f'{own.stem}_slim'
    assert find_checkpoint(folder).name == 'epoch_1_slim.pth'


def test_hooks_are_compared_by_type():
    one = dict(custom_hooks=[dict(type='L0Hook', rho=1), dict(type='GatedMACsHook')], lr=[1, 2])
    more = dict(one, custom_hooks=[dict(type='FGCHook', k=5), *one['custom_hooks']])
    a, b = flatten(one), flatten(more)
    assert {key for key in b if a.get(key) != b[key]} == {
        'custom_hooks',
        'custom_hooks.FGCHook.type',
        'custom_hooks.FGCHook.k',
    }
    assert b['custom_hooks'] == 'FGCHook, L0Hook, GatedMACsHook'
    twice = flatten([dict(type=int, a=1), dict(type='x.Y', a=2), dict(type=int, a=3)], 'p')
    assert (twice['p.int.a'], twice['p.Y.a'], twice['p.int 2.a']) == ('1', '2', '3')
    assert flatten([[1], [2]], 'p') == {'p.0': '[1]', 'p.1': '[2]'}


def test_the_last_checkpoint(tmp_path):
    for name in ('epoch_1.pth', 'epoch_2.pth', 'epoch_2.banks.pth'):
        torch.save({}, tmp_path / name)
    (tmp_path / 'last_checkpoint').write_text('/elsewhere/epoch_1.pth')
    assert find_checkpoint(tmp_path).name == 'epoch_1.pth'
    (tmp_path / 'last_checkpoint').unlink()
    os.utime(tmp_path / 'epoch_1.pth', (0, 0))
    assert find_checkpoint(tmp_path).name == 'epoch_2.pth'
