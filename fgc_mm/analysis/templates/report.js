'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const tip = document.getElementById('tip');
const layerSelect = document.getElementById('layer');
const NS = 'http://www.w3.org/2000/svg';
// Dark colors of the palettes, brighter on a dark page.
const BRIGHT = { '#332288': '#8c83e0', '#117733': '#3db36b', '#882255': '#d0609a', '#000000': '#bbbbbb', '#0072B2': '#3d9be0' };

// ---------------------------------------------------------------- helpers
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, text) {
  const node = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const isDark = () => document.documentElement.dataset.theme === 'dark';
const shown = (color) => (isDark() && BRIGHT[color]) || color;
const runColor = (n) => shown(data.colors.runs[n % data.colors.runs.length]);
// -1: no class, -2: all classes beyond those with a color.
const classColor = (n) => (n < 0 ? data.colors.other : shown(data.colors.classes[n % data.colors.classes.length]));
// The second ten classes have the same colors, hollow.
const isHollow = (n) => n === -1 || Math.floor(n / data.colors.classes.length) === 1;
const number = (x) => (x === null || x === undefined ? 'unknown' : Number(x.toPrecision(4)).toString());

function card(title, ...children) {
  return el('div', { class: 'card' }, el('h3', {}, title), ...children);
}

function hover(node, content) {
  const move = (event) => {
    const made = content(event);
    if (!made) return hide();
    tip.replaceChildren(...[made].flat());
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - box.height - 8))}px`;
  };
  const hide = () => { tip.hidden = true; };
  node.addEventListener('pointermove', move);
  node.addEventListener('pointerdown', move);
  node.addEventListener('pointerleave', hide);
}

function thumb(run, picture) {
  return el('img', { src: data.thumbs[run.pictures[picture]], alt: `picture ${picture}` });
}

function describe(run, picture) {
  const names = run.present[picture].map((n) => run.classes[n]).join(', ');
  return [thumb(run, picture), `picture ${picture}: ${names}\n${number(run.cost.macs[picture])} · 10⁹ MACs`];
}

function legend(items) {
  return el('div', { class: 'legend' }, ...items.map(([name, color, hollow, dash]) => {
    if (dash !== undefined) {
      const line = svg('svg', { viewBox: '0 0 28 8', class: 'line' });
      line.append(svg('path', { d: 'M0,4H28', stroke: color, 'stroke-width': 2, 'stroke-dasharray': dash }));
      return el('span', {}, line, name);
    }
    const mark = el('b');
    mark.style.background = hollow ? 'none' : color;
    mark.style.border = `2px solid ${color}`;
    return el('span', {}, mark, name);
  }));
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (!isFinite(low)) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

// So that nothing lies on the axes.
const padded = ([low, high]) => [low - 0.04 * (high - low), high + 0.04 * (high - low)];

function ticks([low, high], count = 5) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) found.push(Number(t.toPrecision(10)));
  return found;
}

// ---------------------------------------------------------------- plots
// A plot is drawn for the width it has, so that its text is of one size everywhere.
function plot(make) {
  const node = el('div', { class: 'plot' });
  node.make = make;
  return node;
}

function fit(root) {
  const plots = [...root.querySelectorAll('.plot')], widths = plots.map((node) => node.clientWidth || 460);
  plots.forEach((node, n) => {
    if (node.drawn === widths[n]) return;
    node.drawn = widths[n];
    node.replaceChildren(node.make(widths[n]));
  });
}

// `whole`: axes that count things, where a fraction means nothing.
function frame({ width, x, y, xlabel, ylabel, height = 230, names, label, whole = '' }) {
  const top = 10, right = 12, angle = 60, up = Math.sin(angle * Math.PI / 180);
  const marks = (axis, range, count) => ticks(range, count).filter((t) => !whole.includes(axis) || Number.isInteger(t));
  const left = Math.max(52, 28 + 7 * Math.max(...marks('y', y).map((t) => number(t).length)));
  const bottom = names ? 34 + up * 6.5 * Math.max(...names.map((name) => name.length)) : 40;
  if (names) height += bottom - 40;
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label || `${ylabel} over ${xlabel}` });
  const px = (v) => left + (v - x[0]) / (x[1] - x[0]) * (width - left - right);
  const py = (v) => height - bottom - (v - y[0]) / (y[1] - y[0]) * (height - bottom - top);
  for (const t of marks('y', y)) {
    root.append(svg('line', { class: 'grid', x1: left, x2: width - right, y1: py(t), y2: py(t) }));
    root.append(svg('text', { x: left - 5, y: py(t) + 4, 'text-anchor': 'end' }, number(t)));
  }
  // As many names as have room.
  const every = names ? Math.ceil(14 / (up * Math.abs(px(1) - px(0)))) : 1;
  if (names) names.forEach((name, n) => n % every || root.append(svg('text', { transform: `translate(${px(n) + 4} ${height - bottom + 14}) rotate(-${angle})`, 'text-anchor': 'end' }, name)));
  else for (const t of marks('x', x, Math.max(2, Math.floor(width / 80)))) root.append(svg('text', { x: px(t), y: height - bottom + 15, 'text-anchor': 'middle' }, number(t)));
  root.append(svg('path', { class: 'axis', d: `M${left},${top}V${height - bottom}H${width - right}` }));
  root.append(svg('text', { x: (left + width - right) / 2, y: height - 4, 'text-anchor': 'middle' }, xlabel));
  root.append(svg('text', { transform: `translate(12 ${(height - bottom + top) / 2}) rotate(-90)`, 'text-anchor': 'middle' }, ylabel));
  return { root, px, py, bottom: height - bottom };
}

function lineChart(series, options) {
  const all = series.flatMap((s) => s.points);
  const made = frame({ x: extent(all.map((p) => p[0])), y: options.y || padded(extent(all.map((p) => p[1]))), ...options });
  for (const s of series) {
    const points = s.points.filter((p) => p[1] !== null);
    const path = points.map(([a, b], n) => `${n ? 'L' : 'M'}${made.px(a).toFixed(1)},${made.py(b).toFixed(1)}`).join('');
    made.root.append(svg('path', { d: path, fill: 'none', stroke: s.color, 'stroke-width': s.bold ? 2.4 : 1.3, 'stroke-dasharray': s.dash || 'none' }));
    points.forEach(([a, b], n) => {
      if (!options.dots && points.length > 1) return;
      const star = s.stars && s.stars[n];
      made.root.append(star
        ? svg('text', { x: made.px(a), y: made.py(b) + 6, 'text-anchor': 'middle', style: `fill:${s.color};font-size:18px` }, '★')
        : svg('circle', { cx: made.px(a), cy: made.py(b), r: 3, fill: s.color }));
    });
  }
  hover(made.root, (event) => {
    const box = made.root.getBoundingClientRect();
    const mx = event.clientX - box.left, my = event.clientY - box.top;
    let best = null, near = 30 ** 2;
    for (const s of series) for (const [a, b] of s.points) {
      if (b === null) continue;
      const d = (made.px(a) - mx) ** 2 + (made.py(b) - my) ** 2;
      if (d < near) { near = d; best = [s, a, b]; }
    }
    if (!best) return null;
    const place = options.names ? options.names[best[1]] : `${options.xlabel} ${best[1]}`;
    return `${best[0].name}\n${place}: ${number(best[2])}`;
  });
  return made.root;
}

function scatter(points, colors, options, about, hollow = () => false) {
  const made = frame({ x: padded(extent(points.map((p) => p[0]))), y: padded(extent(points.map((p) => p[1]))), ...options });
  points.forEach((point, n) => {
    const dot = svg('circle', { cx: made.px(point[0]).toFixed(1), cy: made.py(point[1]).toFixed(1), r: 3.2, fill: colors(n), 'fill-opacity': hollow(n) ? 0.1 : 0.8, stroke: hollow(n) ? colors(n) : 'none' });
    dot.dataset.n = n;
    made.root.append(dot);
  });
  hover(made.root, (event) => (event.target.dataset.n === undefined ? null : about(Number(event.target.dataset.n))));
  return made.root;
}

function histogram(values, options) {
  const [low, high] = extent(values), count = Math.min(30, Math.max(5, Math.round(values.length / 8)));
  const bins = new Array(count).fill(0);
  for (const v of values) bins[Math.min(count - 1, Math.floor((v - low) / (high - low) * count))] += 1;
  const made = frame({ x: [low, high], y: [0, Math.max(...bins)], ...options });
  const edge = (n) => low + (high - low) * n / count;
  bins.forEach((size, n) => {
    const bar = svg('rect', { x: made.px(edge(n)) + 0.5, width: Math.max(1, made.px(edge(n + 1)) - made.px(edge(n)) - 1), y: made.py(size), height: made.bottom - made.py(size), fill: options.color });
    hover(bar, () => `${number(edge(n))} to ${number(edge(n + 1))}: ${size} pictures`);
    made.root.append(bar);
  });
  return made.root;
}

function scaleBar(scale, low, high, text, unknown) {
  const bar = el('i', { class: 'ramp' }), parts = [el('span', {}, text), el('span', {}, `${low}`, bar, `${high}`)];
  bar.style.background = `linear-gradient(to right, ${scale.join(', ')})`;
  if (unknown) parts.push(el('span', {}, el('i', { class: 'unknown' }), unknown));
  return el('div', { class: 'scale' }, ...parts);
}

function heatmap(rows, names, { width, scale, low, high, below, across, about, height, text, unknown }) {
  const canvas = el('canvas', { width: Math.max(1, rows[0].length), height: rows.length, role: 'img', 'aria-label': below });
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  rows.forEach((row, r) => row.forEach((value, c) => {
    if (value === null) return; // hatched, as no color could say it
    context.fillStyle = scale[Math.round((value - low) / (high - low) * (scale.length - 1))];
    context.fillRect(c, r, 1, 1);
  }));
  hover(canvas, (event) => {
    const box = canvas.getBoundingClientRect();
    const c = Math.floor((event.clientX - box.left) / box.width * rows[0].length);
    const r = Math.floor((event.clientY - box.top) / box.height * rows.length);
    return rows[r] && c in rows[r] ? about(r, c, rows[r][c]) : null;
  });
  const list = (kind, words) => el('div', { class: kind }, ...words.map((word) => el('span', { title: word }, word)));
  // As many names across as have room.
  const every = Math.ceil(13 * names.length / (width - 70));
  const missing = rows.some((row) => row.includes(null)) && unknown;
  return el('div', { class: 'heat' }, list('names', names), canvas, ...(across ? [list(names.some((name) => name.length > 2) ? 'across upright' : 'across', names.map((name, n) => (n % every ? '' : name)))] : []),
    el('span', { class: 'below' }, below), scaleBar(scale, low, high, text, missing));
}

// ---------------------------------------------------------------- sections
const without = (run, what) => el('p', { class: 'hint' }, run.note || what);

const sections = {
  cost: (run, n) => {
    if (!run.cost) return card(run.name, without(run, 'no gates'));
    const { macs, objects } = run.cost, unit = 'executed MACs of the backbone, 10⁹';
    const pictures = (list) => el('div', { class: 'row' }, ...list.map((p) => gallery(run, p, macs[p].toPrecision(4))));
    const plots = [plot((width) => histogram(macs, { width, xlabel: unit, ylabel: 'pictures', whole: 'y', color: runColor(n) }))];
    if (objects) plots.push(plot((width) => scatter(objects.map((o, p) => [o, macs[p]]), () => runColor(n), { width, xlabel: run.cost.objects_name, ylabel: 'MACs, 10⁹', whole: 'x' }, (p) => describe(run, p))));
    const mean = macs.reduce((a, b) => a + b, 0) / macs.length;
    const rho = run.cost.correlation === null ? '' : `, Spearman's rank correlation with ${run.cost.objects_name} ${number(run.cost.correlation)}`;
    return card(run.name, el('p', { class: 'hint' }, `${macs.length} of ${run.of} pictures of the ${run.split} split, ${run.checkpoint}: mean ${number(mean)} of ${number(run.cost.dense)} · 10⁹ MACs without gates${rho}`),
      el('div', { class: 'pair' }, ...plots), el('h3', {}, 'cheapest'), pictures(run.cost.cheapest), el('h3', {}, 'dearest'), pictures(run.cost.dearest));
  },
  embedding: (run, n, layer) => {
    const found = run.embedding && run.embedding[layer];
    if (!found) return card(run.name, without(run, `no layer ${layer}`));
    const draw = (kind, title) => el('div', {}, el('h3', {}, title), plot((width) => scatter(found[kind], (p) => classColor(run.groups[p]), { width, xlabel: 'UMAP 1', ylabel: 'UMAP 2', height: Math.min(340, width), label: title }, (p) => describe(run, p), (p) => isHollow(run.groups[p]))));
    return card(run.name, el('div', { class: 'pair' }, draw('feature', 'features'), draw('gate', 'gates')), legend(run.group_names.map(([c, name]) => [name, classColor(c), isHollow(c)])));
  },
  frequency: (run, n, layer) => {
    const found = run.frequency && run.frequency[layer];
    if (!found) return card(run.name, without(run, `no layer ${layer}`));
    const names = found.classes.map((c) => run.classes[c]), height = Math.max(90, 15 * names.length);
    const { sequential, diverging } = data.colors;
    return card(`${run.name}: ${number(100 * found.open)} % open`,
      plot((width) => heatmap(found.values, names, { width, scale: sequential, low: 0, high: 1, height, below: 'channels, most often open first', text: 'execution frequency', unknown: 'no picture',
        about: (r, c, value) => `${names[r]}, channel ${found.channels[c]}\nopen for ${value === null ? 'no picture there' : `${number(100 * value)} % (all: ${number(100 * found.overall[c])} %)`}` })),
      el('h3', {}, 'similarity of patterns'),
      plot((width) => heatmap(found.similarity, names, { width, scale: diverging, low: -1, high: 1, height, below: 'class by class', across: true, text: 'cosine', unknown: 'no pattern',
        about: (r, c, value) => `${names[r]} and ${names[c]}: ${number(value)}` })));
  },
  neighbors: (run, n, layer) => {
    const found = run.neighbors && run.neighbors[layer];
    if (!found) return card(run.name, without(run, `no layer ${layer}`));
    return card(run.name, ...found.map(({ query, hits }) => el('div', { class: 'row' }, gallery(run, query, 'query', 'query'), ...hits.map(([p, s]) => gallery(run, p, s)))));
  },
};

function gallery(run, picture, text, kind = '') {
  const node = el('figure', { class: kind }, thumb(run, picture), el('figcaption', {}, text));
  hover(node, () => describe(run, picture));
  return node;
}

function alignment() {
  const { rows, panels, k } = data.alignment;
  const layers = [...new Set(rows.map((row) => row.layer))];
  const runs = data.runs.map((run) => run.name).filter((name) => rows.some((row) => row.run === name));
  if (!rows.length) return [el('p', { class: 'hint' }, 'There are no gates to show.')];
  const colors = new Map(data.runs.map((run, n) => [run.name, runColor(n)]));
  const names = legend(runs.map((name) => [name, colors.get(name)]));
  return Object.entries(panels).map(([column, title]) => {
    const series = runs.map((name) => {
      const own = rows.filter((row) => row.run === name);
      return { name, color: colors.get(name), points: own.map((row) => [layers.indexOf(row.layer), row[column]]), stars: own.map((row) => row.coupled) };
    });
    const label = column === 'overlap' ? `${title} @ ${k}` : title;
    return card(label, plot((width) => lineChart(series, { width, names: layers, xlabel: 'layer', ylabel: '0 to 1', y: [0, 1], dots: true, label, x: [0, Math.max(1, layers.length - 1)] })), names.cloneNode(true));
  });
}

function training() {
  const titles = [...new Set(data.runs.flatMap((run) => Object.keys(run.training)))];
  if (!titles.length) return [el('p', { class: 'hint' }, 'No run has a log of its training.')];
  const several = data.runs.filter((run) => Object.keys(run.training).length).length > 1;
  const dashes = ['none', '6 3', '2 3', '8 3 2 3', '8 3 2 3 2 3'];
  return titles.flatMap((title) => {
    // Runs are compared by what sums up a panel; of one run all curves are there.
    const curves = data.runs.map((run) => (run.training[title] || []).filter((curve) => !several || !curve.detail));
    const kinds = [...new Set(curves.flat().map((curve) => curve.name))];
    if (!kinds.length) return [];
    const look = (name) => dashes[(several ? kinds.indexOf(name) : Math.floor(kinds.indexOf(name) / 10)) % dashes.length];
    const series = data.runs.flatMap((run, n) => curves[n].map((curve) => ({
      name: several ? `${run.name}: ${curve.name}` : curve.name,
      color: several ? runColor(n) : classColor(kinds.indexOf(curve.name) % 10),
      dash: look(curve.name),
      bold: curve.name === 'loss' || curve.name === 'all gates',
      points: curve.points,
    })));
    const chart = plot((width) => lineChart(series, { width, xlabel: 'iteration', ylabel: data.units[title], label: title }));
    if (!several) return card(title, chart, legend(series.map((s) => [s.name, s.color, false, s.dash])));
    const runs = data.runs.map((run, n) => [run.name, runColor(n)]).filter((_, n) => curves[n].length);
    const lines = kinds.length > 1 ? [legend(kinds.map((name) => [name, 'currentColor', false, look(name)]))] : [];
    return card(title, chart, legend(runs), ...lines);
  });
}

function draw(changed) {
  const layer = layerSelect ? layerSelect.value : '';
  for (const node of document.querySelectorAll('.chosen')) node.textContent = layer;
  for (const holder of document.querySelectorAll('[data-chart]')) {
    const kind = holder.dataset.chart;
    if (changed === 'layer' && !['embedding', 'frequency', 'neighbors'].includes(kind)) continue;
    const cards = kind === 'alignment' ? alignment() : kind === 'training' ? training() : data.runs.map((run, n) => sections[kind](run, n, layer));
    holder.replaceChildren(...cards);
    fit(holder);
  }
}

// ---------------------------------------------------------------- tables
function sortBy(table, column, head) {
  const body = table.tBodies[0], down = head.getAttribute('aria-sort') === 'ascending';
  const key = (row) => {
    const cell = row.cells[column];
    if (!cell) return '';
    const text = cell.dataset.sort ?? cell.textContent.trim();
    return text !== '' && !isNaN(text) ? Number(text) : text;
  };
  const rows = [...body.rows].map((row) => [key(row), row]);
  // Empty cells stay at the end, either way.
  rows.sort(([a], [b]) => {
    if (a === '' || b === '') return (a === '') - (b === '');
    const order = typeof a === 'number' && typeof b === 'number' ? a - b : String(a).localeCompare(String(b));
    return down ? -order : order;
  });
  for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  body.append(...rows.map(([, row]) => row));
}

for (const table of document.querySelectorAll('table.sortable')) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.tabIndex = 0;
    head.addEventListener('click', () => sortBy(table, column, head));
    head.addEventListener('keydown', (event) => { if (event.key === 'Enter') sortBy(table, column, head); });
  });
}

// ---------------------------------------------------------------- page
function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? 'dark' : 'light';
  draw();
}
document.getElementById('theme').addEventListener('click', () => setTheme(!isDark()));
addEventListener('resize', () => fit(document));
if (layerSelect) layerSelect.addEventListener('change', () => draw('layer'));
const system = matchMedia('(prefers-color-scheme: dark)');
system.addEventListener('change', () => setTheme(system.matches));
setTheme(system.matches);
