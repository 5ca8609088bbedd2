// Shows the data of a report. All text of runs goes to the page as text nodes, never as HTML, and dygraphs gets names of
// its own for the series.
(function () {
  'use strict';

  const data = JSON.parse(document.getElementById('data').textContent);
  const runs = data.runs;
  const colours = 10;
  const activities = ['compute', 'wait', 'data', 'save'];

  // --- Elements and texts ---------------------------------------------------------------------------------------------

  /** element('td', {class: 'number'}, 'text', child): attributes whose value is a function are listeners. */
  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {}))
      if (typeof value === 'function') made.addEventListener(name, value);
      else if (value === true) made.setAttribute(name, '');
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
    for (const child of children.flat())
      if (child !== null && child !== undefined) made.append(child);
    return made;
  }

  function drawing(tag, attributes, ...children) {
    const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);
  const isObject = (value) => value !== null && typeof value === 'object' && !Array.isArray(value);
  const listOf = (value) => (Array.isArray(value) ? value : []);

  /** A number with this many digits; "–" for anything else. */
  function numberText(value, digits = 6) {
    if (!isNumber(value)) return '–';
    if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
    return String(Number(value.toPrecision(digits)));
  }

  function durationText(seconds) {
    if (!isNumber(seconds)) return '–';
    if (seconds < 1) return numberText(seconds * 1000, 3) + ' ms';
    if (seconds < 120) return numberText(seconds, 3) + ' s';
    if (seconds < 7200) return numberText(seconds / 60, 3) + ' min';
    if (seconds < 172800) return numberText(seconds / 3600, 3) + ' h';
    return numberText(seconds / 86400, 3) + ' d';
  }

  function bytesText(bytes) {
    if (!isNumber(bytes)) return '–';
    const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
    let unit = 0;
    while (bytes >= 1000 && unit + 1 < units.length) { bytes /= 1000; ++unit; }
    return (unit ? bytes.toFixed(1) : bytes) + ' ' + units[unit];
  }

  const two = (value) => String(value).padStart(2, '0');
  function timeText(unix, withDate = true) {
    if (!isNumber(unix)) return '–';
    const time = new Date(unix * 1000);
    if (Number.isNaN(time.getTime())) return '–';
    const clock = two(time.getHours()) + ':' + two(time.getMinutes()) + ':' + two(time.getSeconds());
    return withDate ? time.getFullYear() + '-' + two(time.getMonth() + 1) + '-' + two(time.getDate()) + ' ' + clock : clock;
  }

  const shareText = (part) => (isNumber(part) ? numberText(part * 100, 3) + ' %' : '–');

  /** The text of any JSON value. */
  function valueText(value) {
    if (typeof value === 'string') return value;
    if (typeof value === 'number') return String(value);
    return value === undefined ? '' : JSON.stringify(value);
  }

  const colourOf = (run) => '--colour: var(--run' + (run % colours) + ')';
  const swatch = (run) => element('span', {class: 'swatch', style: colourOf(run), 'aria-hidden': 'true'});
  const runLabel = (run) => [swatch(run), runs[run].name];
  const stateText = (state) =>
    element('span', {class: 'state state-' + String(state).replace(/[^a-z]/g, '')}, String(state));

  /** columns: [{title, number, long, isWhole}], rows: lists of cells (text or nodes). */
  function table(columns, rows, attributes) {
    const cellClass = (column) => (column.number ? 'number' : column.long ? 'long' : column.isWhole ? 'whole' : null);
    return element('div', {class: 'wide'}, element('table', attributes,
      element('thead', {}, element('tr', {}, columns.map((column) =>
        element('th', {class: cellClass(column), scope: 'col'}, column.title)))),
      element('tbody', {}, rows.map((row) => element('tr', {}, row.map((cell, i) =>
        element('td', {class: cellClass(columns[i])}, cell)))))));
  }

  /** Adds a section to the page and its name to the navigation. */
  function section(id, title) {
    const made = element('section', {id, 'aria-labelledby': id + '-title'}, element('h2', {id: id + '-title'}, title));
    document.getElementById('content').append(made);
    document.getElementById('sections').append(element('a', {href: '#' + id}, title));
    return made;
  }

  // --- What is shown --------------------------------------------------------------------------------------------------

  /** The chosen options, which all charts share. */
  const view = {axis: 'report', smoothing: 0, isLog: false, filter: '', shown: new Set()};
  const axes = {
    report: {title: 'report', text: (x) => numberText(x)},
    step: {title: 'step', text: (x) => numberText(x)},
    hours: {title: 'training time', text: (x) => durationText(x * 3600)},
  };

  function cumulative(differences) {
    let sum = 0;
    return differences.map((difference) => (sum += difference));
  }

  /** Decodes the columns of a curve or a split once. */
  function decode(columns) {
    if (!columns.axes) columns.axes = {
      report: cumulative(columns.report),
      step: cumulative(columns.step),
      hours: cumulative(columns.ms).map((ms) => ms / 3.6e6),
    };
    return columns;
  }

  /** Points [x, value, …] in the order of x; a value of null is a gap. */
  function pointsOf(columns, ...values) {
    const x = decode(columns).axes[view.axis];
    const points = x.map((at, i) => [at, ...values.map((list) => list[i])]);
    return points.every((point, i) => i === 0 || points[i - 1][0] <= point[0])
      ? points : points.sort((one, other) => one[0] - other[0]);
  }

  /** Exponential moving average, without the bias of its beginning; gaps stay. */
  function smoothed(points, weight) {
    let average = 0, count = 0;
    return points.map(([x, value]) => {
      if (!isNumber(value)) return [x, value];
      average = average * weight + (1 - weight) * value;
      return [x, average / (1 - Math.pow(weight, ++count))];
    });
  }

  /** The largest value that dygraphs can draw: its range must be finite, too. */
  const largest = 1e300;

  /** Rows for dygraphs of several lists of points: null where a list has no point, NaN where it has a gap. */
  function merged(lists) {
    const at = lists.map(() => 0), rows = [];
    for (;;) {
      let x = Infinity;
      lists.forEach((list, i) => { if (at[i] < list.length) x = Math.min(x, list[at[i]][0]); });
      if (x === Infinity) return rows;
      rows.push([x, ...lists.map((list, i) => {
        if (at[i] >= list.length || list[at[i]][0] !== x) return null;
        const value = list[at[i]++][1];
        return value === null ? NaN : isNumber(value) ? Math.max(-largest, Math.min(largest, value)) : value;
      })]);
    }
  }

  /** The point whose x is nearest. */
  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle + 1;
      else high = middle;
    }
    return low > 0 && x - points[low - 1][0] <= points[low][0] - x ? points[low - 1] : points[low];
  }

  // --- Charts ---------------------------------------------------------------------------------------------------------

  const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function faint(colour) {
    const [red, green, blue] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    return 'rgba(' + red + ',' + green + ',' + blue + ',0.3)';
  }

  const charts = [];

  /** Zooming with the mouse as in dygraphs, with two fingers on a touch screen; one finger scrolls the page. */
  function interaction() {
    const model = Object.assign({}, Dygraph.defaultInteractionModel);
    for (const name of ['touchstart', 'touchmove', 'touchend']) {
      const original = model[name];
      model[name] = (event, graph, context) => {
        if (event.touches.length > 1 || context.initialTouches) original(event, graph, context);
        if (name === 'touchend' && event.touches.length === 0) context.initialTouches = null;
      };
    }
    return model;
  }

  /** A chart in `holder`. lines() returns [{points, colour, width, dash}]; showAt(x) gets the x of the cursor. */
  class Chart {
    constructor(holder, title, {lines, bars = false, text = numberText, showAt = () => {}}) {
      Object.assign(this, {holder, lines, bars, text, showAt, graph: null, isSeen: false, window: null});
      holder.tabIndex = 0;
      holder.setAttribute('role', 'application');
      holder.setAttribute('aria-label', 'Curve of ' + title + '. The left and right arrow keys move the cursor, ' +
        'plus and minus zoom, 0 shows everything.');
      holder.addEventListener('keydown', (event) => this.key(event));
      charts.push(this);
      observer.observe(holder);
    }

    draw() {
      const lines = this.lines();
      const rows = merged(lines.map((line) => line.points));
      const isLog = view.isLog && !this.bars;
      const canBeDrawn = (value) => Array.isArray(value) || (isNumber(value) && (!isLog || value > 0));
      const hasValues = rows.some((row) => row.slice(1).some(canBeDrawn));
      if (this.graph) this.graph.destroy();
      this.graph = null;
      this.holder.replaceChildren();
      this.holder.classList.toggle('empty', !hasValues);
      this.x = [...new Set(rows.map((row) => row[0]))];
      this.cursor = -1;
      if (!hasValues) {
        this.holder.textContent = !lines.length ? 'No run is shown' : isLog ? 'No values above 0' : 'No finite values';
        return;
      }
      const series = {};
      lines.forEach((line, i) => {
        series['s' + i] = {color: line.colour, strokeWidth: line.width, strokePattern: line.dash || null};
      });
      const colour = styleOf('--line');
      this.graph = new Dygraph(this.holder, rows, {
        labels: ['x', ...lines.map((line, i) => 's' + i)], series, legend: 'never', customBars: this.bars,
        connectSeparatedPoints: true, logscale: isLog, drawPoints: this.x.length <= 60, pointSize: 2,
        highlightCircleSize: 4, xlabel: axes[view.axis].title, xLabelHeight: 16, xRangePad: 4, yRangePad: 8,
        axisLineColor: colour, gridLineColor: styleOf('--grid'), fillAlpha: 0.15, interactionModel: interaction(),
        axes: {
          x: {axisLabelFormatter: (x) => (view.axis === 'hours' ? durationText(x * 3600) : numberText(x, 4))},
          y: {axisLabelFormatter: (y) => this.text(y, 4), axisLabelWidth: 58},
        },
        dateWindow: this.window,
        highlightCallback: (event, x) => this.moveTo(x),
        zoomCallback: () => this.zoomed(),
      });
      if (this.x.length) this.moveTo(this.x[this.x.length - 1]);
    }

    moveTo(x) {
      this.cursor = this.x.indexOf(x);
      this.showAt(x);
    }

    /** All charts have the same x axis, so that they zoom together. */
    zoomed() {
      const window = this.graph.isZoomed('x') ? this.graph.xAxisRange() : null;
      for (const chart of charts) chart.zoomTo(window, chart === this);
    }

    zoomTo(window, isDone) {
      this.window = window;
      if (this.graph && !isDone) this.graph.updateOptions({dateWindow: window, valueRange: null});
    }

    key(event) {
      if (!this.graph || event.ctrlKey || event.metaKey || event.altKey) return;
      const step = event.shiftKey ? 10 : 1;
      if (event.key === 'ArrowLeft') this.select(this.cursor - step);
      else if (event.key === 'ArrowRight') this.select(this.cursor + step);
      else if (event.key === 'Home') this.select(0);
      else if (event.key === 'End') this.select(this.x.length - 1);
      else if (event.key === '+' || event.key === '=') this.scale(0.5);
      else if (event.key === '-') this.scale(2);
      else if (event.key === '0') resetZoom();
      else return;
      event.preventDefault();
    }

    select(index) {
      const at = Math.min(Math.max(index, 0), this.x.length - 1);
      for (let row = 0; row < this.graph.numRows(); ++row)
        if (this.graph.getValue(row, 0) === this.x[at]) { this.graph.setSelection(row); break; }
      this.moveTo(this.x[at]);
    }

    scale(factor) {
      const [from, to] = this.graph.xAxisRange(), [first, last] = this.graph.xAxisExtremes();
      const middle = this.cursor >= 0 ? this.x[this.cursor] : (from + to) / 2;
      const window = [Math.max(first, middle - (middle - from) * factor), Math.min(last, middle + (to - middle) * factor)];
      const isAll = window[0] <= first && window[1] >= last;
      for (const chart of charts) chart.zoomTo(isAll ? null : window, false);
    }
  }

  /** Charts are drawn when they come into sight, since a page may have many. */
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((one) => one.holder === entry.target);
      if (!entry.isIntersecting || !chart || chart.isSeen) continue;
      chart.isSeen = true;
      chart.draw();
    }
  }, {rootMargin: '300px'});

  function redraw() {
    for (const chart of charts) if (chart.isSeen) chart.draw();
  }

  function resetZoom() {
    for (const chart of charts) chart.zoomTo(null, false);
  }

  /** The runs that have this curve and are shown: [{run, curve}]. */
  const shownWith = (group, name) => runs.map((run, i) => ({run: i, curve: run[group][name]}))
    .filter(({run, curve}) => curve && view.shown.has(run));

  /** A card with the runs' curves of one name, and a table of the curves' values at the cursor. */
  function curveCard(group, name, title, text = numberText) {
    const holder = element('div', {class: 'chart'}), values = element('table', {class: 'values'});
    const notes = element('div');
    let points = [];
    const lines = () => {
      points = shownWith(group, name).map(({run, curve}) => ({run, curve, points: pointsOf(curve, curve.value)}));
      showValues();
      return points.flatMap(({run, points}) => {
        const colour = styleOf('--run' + (run % colours)), dash = run >= colours ? [6, 3] : null;
        if (!view.smoothing) return [{points, colour, width: 1.5, dash}];
        return [{points, colour: faint(colour), width: 1}, {points: smoothed(points, view.smoothing), colour, width: 2, dash}];
      });
    };
    function showValues() {
      const withX = axes[view.axis];
      values.replaceChildren(
        element('thead', {}, element('tr', {}, element('th', {scope: 'col'}, 'run'),
          element('th', {class: 'number cursor', scope: 'col'}, 'at ' + withX.title),
          ['last', 'lowest', 'highest'].map((column) => element('th', {class: 'number', scope: 'col'}, column)))),
        element('tbody', {}, points.map(({run, curve}) => element('tr', {'data-run': run},
          element('td', {}, runLabel(run)), element('td', {class: 'number value'}),
          [curve.last, curve.min, curve.max].map((value) =>
            element('td', {class: 'number', title: valueText(value)}, text(value, 4)))))));
      notes.replaceChildren(...points.flatMap(({run, curve}) => curveNotes(run, curve)));
    }
    const showAt = (x) => {
      values.querySelector('.cursor').textContent = 'at ' + axes[view.axis].title + ' ' + axes[view.axis].text(x);
      for (const {run, points: ofRun} of points) {
        const [own, value] = nearest(ofRun, x), cell = values.querySelector('tr[data-run="' + run + '"] .value');
        cell.textContent = (value === null ? 'NaN or infinite' : text(value)) +
          (own === x ? '' : ' (' + axes[view.axis].text(own) + ')');
        cell.title = valueText(value);
        cell.dataset.x = own;
        cell.dataset.value = valueText(value);
      }
    };
    const card = element('div', {class: 'card', 'data-metric': name}, element('h3', {}, title), holder,
      element('div', {class: 'wide'}, values), notes);
    new Chart(holder, title, {lines, text, showAt});
    return card;
  }

  function curveNotes(run, curve) {
    const notes = [];
    if (curve.gaps) notes.push(curve.gaps + ' of ' + curve.count + ' values are NaN or infinite and shown as gaps.');
    if (view.isLog && isNumber(curve.min) && curve.min <= 0) notes.push('Values of 0 and below are not shown on a log scale.');
    if (curve.max > largest || curve.min < -largest) notes.push('Values beyond 1e300 are drawn at 1e300.');
    if (!curve.whole)
      notes.push('Of ' + curve.count + ' values the lowest and the highest of each stretch are shown, ' +
        curve.value.length + ' in all.');
    return notes.map((note) => element('p', {class: 'note'}, runs.length > 1 ? runs[run].name + ': ' + note : note));
  }

  const namesIn = (group) => [...new Set(runs.flatMap((run) => Object.keys(run[group])))].sort();

  // --- Sections -------------------------------------------------------------------------------------------------------

  const lastOf = (run, name) => (run.own[name] ? run.own[name].last : null);

  /** Where a run has come to, from its last point. */
  function progressOf(run) {
    const curves = [...Object.values(run.own), ...Object.values(run.metrics)];
    let last = {report: null, step: null, hours: null};
    for (const curve of curves) {
      const {report, step, hours} = decode(curve).axes, end = report.length - 1;
      if (end >= 0 && (last.report === null || report[end] > last.report))
        last = {report: report[end], step: step[end], hours: hours[end]};
    }
    return last;
  }

  function runNotes(run) {
    const notes = [];
    if (!run.reports) notes.push('It has reported nothing yet.');
    if (run.damaged_lines)
      notes.push(run.damaged_lines + (run.damaged_lines === 1 ? ' line' : ' lines') + ' of result.json cannot be read.');
    const left = listOf(run.left_out);
    if (left.length)
      notes.push('Not drawn, since they are long lists, nested or too many: ' + left.slice(0, 20).join(', ') +
        (left.length > 20 ? ', …' : '') + '.');
    return notes.map((note) => element('p', {class: 'note'}, runs.length > 1 ? run.name + ': ' + note : note));
  }

  function addOverview() {
    const part = section('runs', runs.length === 1 ? 'Run' : 'Runs');
    const boxes = [];
    const rows = runs.map((run, i) => {
      const last = progressOf(run), world = listOf(run.worlds).at(-1), starts = listOf(run.status.starts);
      const box = element('input', {type: 'checkbox', 'aria-label': 'Show ' + run.name, change: () => {
        if (box.checked) view.shown.add(i);
        else view.shown.delete(i);
        redraw();
      }});
      box.checked = view.shown.has(i);
      boxes.push(box);
      return [element('label', {}, box, ' ', runLabel(i)), stateText(run.state), String(run.reports),
        numberText(last.step), durationText(last.hours === null ? null : last.hours * 3600),
        world ? String(world.world_size) : '–', numberText(lastOf(run, 'samples_per_s'), 4),
        starts.length ? String(starts.length) : '–', run.path];
    });
    if (runs.length > 1) {
      const showAll = (isShown) => () => {
        boxes.forEach((box, i) => { box.checked = isShown; view.shown[isShown ? 'add' : 'delete'](i); });
        redraw();
      };
      part.append(element('div', {class: 'controls'},
        element('button', {type: 'button', click: showAll(true)}, 'Show all'),
        element('button', {type: 'button', click: showAll(false)}, 'Show none')));
    }
    part.append(table([{title: 'run'}, {title: 'state'}, {title: 'reports', number: true}, {title: 'step', number: true},
      {title: 'training time', number: true}, {title: 'ranks', number: true}, {title: 'samples/s', number: true},
      {title: 'starts', number: true}, {title: 'folder', long: true}], rows), ...runs.flatMap(runNotes));
  }

  function flattened(value, prefix = '', all = {}) {
    if (isObject(value) && Object.keys(value).length)
      for (const [key, inner] of Object.entries(value)) flattened(inner, prefix ? prefix + '.' + key : key, all);
    else if (prefix) all[prefix] = value;
    return all;
  }

  /** Numbers by size, then texts; empty cells last. */
  function compared(one, other) {
    const isEmpty = (value) => value === null || value === undefined || value === '';
    if (isEmpty(one) || isEmpty(other)) return isEmpty(one) - isEmpty(other);
    if (isNumber(one) && isNumber(other)) return one - other;
    return valueText(one).localeCompare(valueText(other));
  }

  function addSweep(sweep, number) {
    const part = section('sweep' + number, 'Sweep ' + sweep.name);
    const trials = listOf(sweep.trials).filter(isObject);
    const settings = [...new Set(trials.flatMap((trial) => Object.keys(flattened(trial.config))))].sort();
    const columns = ['trial', 'status', 'report', ...(sweep.metric ? [sweep.metric] : []), ...settings];
    const rows = trials.map((trial) => {
      const metrics = isObject(trial.metrics) ? trial.metrics : {}, config = flattened(trial.config);
      return {trial, cells: [trial.trial, trial.status, metrics.training_iteration,
        ...(sweep.metric ? [metrics[sweep.metric]] : []), ...settings.map((name) => config[name])]};
    });
    const body = element('tbody'), heads = [];
    let sorted = sweep.metric ? 3 : 0, isDown = Boolean(sweep.metric) && sweep.mode === 'max';
    function show() {
      rows.sort((one, other) => {
        const [a, b] = [one.cells[sorted], other.cells[sorted]];
        return isDown && isNumber(a) && isNumber(b) ? b - a : compared(a, b) * (isDown && isNumber(a) === isNumber(b) ? -1 : 1);
      });
      body.replaceChildren(...rows.map(({trial, cells}) => element('tr', {}, cells.map((cell, i) => {
        const run = i === 0 ? runs.findIndex((one) => one.path === trial.path) : -1;
        if (i === 0) return element('td', {class: 'whole'}, run >= 0 ? swatch(run) : null, valueText(cell));
        if (i === 1) return element('td', {class: 'whole', title: valueText(trial.error)}, stateText(valueText(cell)));
        return element('td', {class: isNumber(cell) ? 'number' : null, title: valueText(cell)},
          isNumber(cell) ? numberText(cell, 4) : valueText(cell));
      }))));
      heads.forEach((head, i) => head.setAttribute('aria-sort', i !== sorted ? 'none' : isDown ? 'descending' : 'ascending'));
      heads.forEach((head, i) => { head.querySelector('span').textContent = i !== sorted ? '' : isDown ? ' ↓' : ' ↑'; });
    }
    columns.forEach((title, i) => heads.push(element('th', {scope: 'col'}, element('button', {type: 'button', click: () => {
      isDown = sorted === i && !isDown;
      sorted = i;
      show();
    }}, title, element('span', {'aria-hidden': 'true'})))));
    show();
    const failed = trials.filter((trial) => typeof trial.error === 'string' && trial.error);
    part.append(
      element('p', {class: 'note'}, trials.length + (trials.length === 1 ? ' trial' : ' trials') + (sweep.metric
        ? ', compared by ' + sweep.metric + ' (' + (sweep.mode === 'max' ? 'larger' : 'smaller') + ' is better)' : '') + '.'),
      element('div', {class: 'wide'}, element('table', {}, element('thead', {}, element('tr', {}, heads)), body)),
      ...failed.slice(0, 20).map((trial) => element('p', {class: 'problem'}, valueText(trial.trial) + ': ' + trial.error)));
  }

  function addCurves() {
    const part = section('curves', 'Curves'), names = namesIn('metrics');
    const cards = element('div', {class: 'cards'});
    const axis = element('select', {id: 'axis', change: () => {
      view.axis = axis.value;
      for (const chart of charts) chart.window = null;
      redraw();
    }}, Object.entries(axes).map(([key, {title}]) => element('option', {value: key, selected: key === view.axis}, title)));
    const amount = element('output', {}, '0');
    const smoothing = element('input', {id: 'smoothing', type: 'range', min: 0, max: 0.99, step: 0.01, value: 0, input: () => {
      view.smoothing = Number(smoothing.value);
      amount.textContent = smoothing.value;
      redraw();
    }});
    const log = element('input', {id: 'log', type: 'checkbox', change: () => { view.isLog = log.checked; redraw(); }});
    const filter = element('input', {id: 'filter', type: 'search', placeholder: 'part of a name', input: () => {
      const wanted = filter.value.toLowerCase();
      for (const card of cards.children) card.hidden = !card.dataset.metric.toLowerCase().includes(wanted);
    }});
    part.append(element('div', {class: 'controls'},
      element('label', {}, 'x axis', axis), element('label', {}, 'smoothing', smoothing, amount),
      element('label', {}, log, 'log scale'), names.length > 4 ? element('label', {}, 'metric', filter) : null,
      element('button', {type: 'button', click: resetZoom}, 'Show everything')));
    part.append(element('p', {class: 'note on-screen'}, 'Drag over a curve to zoom, double-click to show everything again; on the ' +
      'keyboard the arrows, plus, minus and 0.'));
    for (const name of names) cards.append(curveCard('metrics', name, name));
    part.append(names.length ? cards : element('p', {class: 'note'}, 'No metrics were reported.'));
  }

  /** A bar of shares with a key: parts as [{title, seconds, colour}]. */
  function shareBar(parts) {
    const there = parts.filter(({seconds}) => isNumber(seconds) && seconds > 0);
    const sum = there.reduce((total, {seconds}) => total + seconds, 0);
    if (!(sum > 0)) return [];
    const style = (colour) => '--colour: var(' + colour + ')';
    return [
      element('div', {class: 'bar', role: 'img', 'aria-label': 'shares of the time'}, there.map(({title, seconds, colour}) =>
        element('span', {style: style(colour) + '; width: ' + (seconds / sum) * 100 + '%', title: title + ' ' + durationText(seconds)}))),
      element('div', {class: 'key'}, there.map(({title, seconds, colour}) => element('span', {},
        element('span', {class: 'swatch', style: style(colour)}), title + ' ' + durationText(seconds) + ', ' + shareText(seconds / sum)))),
    ];
  }

  function timeBar(run) {
    const time = run.status.time;
    if (!isObject(time)) return [];
    const of = (key) => (isNumber(time[key]) ? time[key] : 0);
    const useful = of('training_s') - of('repeated_s') - of('data_s') - of('saves_s') - of('late_s');
    return shareBar([
      {title: 'useful', seconds: Math.max(useful, 0), colour: '--run2'},
      {title: 'waiting for data', seconds: of('data_s'), colour: '--run4'},
      {title: 'saving', seconds: of('saves_s'), colour: '--run3'},
      {title: 'waiting for late ranks', seconds: of('late_s'), colour: '--run1'},
      {title: 'repeated after failures', seconds: of('repeated_s'), colour: '--run5'},
      {title: 'starting', seconds: of('starting_s'), colour: '--run6'},
      {title: 'not running', seconds: of('idle_s'), colour: '--run9'},
    ]);
  }

  /** The heading of a run's part of a section; none if there is only one run. */
  const runHeading = (run) => (runs.length > 1 ? [element('h3', {}, runLabel(run))] : []);

  function addTime() {
    const part = section('time', 'Time');
    const cards = element('div', {class: 'cards'});
    const own = {samples_per_s: ['samples/s', numberText], time_this_iter_s: ['time of a report', durationText],
      'memory_bytes.max': ['memory of the rank that has the most', bytesText]};
    for (const [name, [title, text]] of Object.entries(own))
      if (runs.some((run) => run.own[name])) cards.append(curveCard('own', name, title, text));
    part.append(cards.children.length ? cards : element('p', {class: 'note'}, 'Nothing was reported.'));
    runs.forEach((run, i) => {
      const bar = timeBar(run);
      if (bar.length) part.append(...runHeading(i), element('h4', {}, 'Time of the whole run, all starts'), ...bar);
    });
  }

  /** A chart of what the ranks do with their time: median and range of each activity. */
  function splitCard(run, number) {
    const split = decode(run.split), holder = element('div', {class: 'chart'});
    const values = element('table', {class: 'values'});
    const palette = {compute: '--run0', wait: '--run1', data: '--run4', save: '--run3'};
    const has = activities.filter((name) => isObject(split[name]));
    const listed = (name) => pointsOf(split, split[name].min, split[name].median, split[name].max, split[name].max_rank);
    const lines = () => has.map((name) => ({colour: styleOf(palette[name]), width: 1.5,
      points: listed(name).map(([x, min, median, max]) => [x, [min, median, max]])}));
    const showAt = (x) => values.replaceChildren(
      element('thead', {}, element('tr', {}, ['at ' + axes[view.axis].title + ' ' + axes[view.axis].text(x), 'least', 'median', 'most', 'by rank']
        .map((title, i) => element('th', {scope: 'col', class: i ? 'number' : null}, title)))),
      element('tbody', {}, has.map((name) => {
        const [, min, median, max, rank] = nearest(listed(name), x);
        return element('tr', {'data-activity': name},
          element('td', {}, element('span', {class: 'swatch', style: '--colour: var(' + palette[name] + ')'}), name),
          [min, median, max].map((value) => element('td', {class: 'number'}, durationText(value))),
          element('td', {class: 'number'}, rank >= 0 ? String(rank) : '–'));
      })));
    const card = element('div', {class: 'card'}, element('h3', {}, runs.length > 1 ? runLabel(number) : 'Seconds between two reports, over the ranks'),
      holder, element('div', {class: 'wide'}, values), ...shareBar(has.map((name) => ({title: name, seconds: split[name].total, colour: palette[name]}))), slowest(run));
    new Chart(holder, 'the split of time of ' + run.name, {lines, bars: true, text: durationText, showAt});
    return card;
  }

  function slowest(run) {
    const texts = activities.filter((name) => listOf(run.slowest[name]).length).map((name) =>
      name + ': ' + run.slowest[name].slice(0, 3).map(([rank, times]) => 'rank ' + rank + ' (' + times + '×)').join(', '));
    return texts.length ? element('p', {class: 'note'}, 'Most often the longest in ' + texts.join('; ') + '.') : null;
  }

  function addRanks() {
    const split = runs.some((run) => isObject(run.split)), late = runs.some((run) => listOf(run.late).length);
    if (!split && !late) return;
    const part = section('ranks', 'Ranks');
    if (split) {
      const cards = element('div', {class: 'cards'});
      runs.forEach((run, i) => { if (isObject(run.split)) cards.append(splitCard(run, i)); });
      part.append(cards);
    }
    if (!late) return;
    const rows = runs.flatMap((run, i) => listOf(run.late).map((rank) => ({run: i, rank})))
      .sort((one, other) => other.rank.times - one.rank.times);
    part.append(element('h3', {}, 'Late ranks'), table(
      [{title: 'run'}, {title: 'rank', number: true}, {title: 'host'}, {title: 'cause', long: true}, {title: 'reports', number: true},
        {title: 'first', number: true}, {title: 'last', number: true}, {title: 'most behind', number: true}],
      rows.map(({run, rank}) => [element('span', {}, runLabel(run)), String(rank.rank), rank.host, rank.cause, String(rank.times),
        String(rank.first_report), String(rank.last_report), shareText(rank.behind) + ' of a step']), {id: 'late'}));
  }

  /** What took the longest in the traces of a run. */
  function addTraces() {
    if (!runs.some((run) => listOf(run.traces).length)) return;
    const part = section('traces', 'Traces');
    const columns = [{title: 'span'}, {title: 'count', number: true}, {title: 'together', number: true},
      {title: 'longest', number: true}, {title: 'by rank', number: true}, {title: 'after', number: true}];
    const time = (ms) => durationText(ms / 1000);
    runs.forEach((run, i) => {
      if (!listOf(run.traces).length) return;
      part.append(...runHeading(i));
      run.traces.forEach((trace, number) => {
        const waits = listOf(trace.waited_for).map(({rank, ms}) => 'rank ' + rank + ' (' + time(ms) + ')');
        const notes = [valueText(trace.ranks) + (trace.ranks === 1 ? ' rank' : ' ranks') + '. ui.perfetto.dev shows the file.',
          waits.length ? 'The others waited for ' + waits.join(', ') + ', all together.' : '',
          trace.dropped_events > 0 ? numberText(trace.dropped_events) + ' events were left out.' : ''];
        const rows = listOf(trace.spans).map((span) => [valueText(span.name), numberText(span.count), time(span.total_ms),
          time(span.longest_ms), valueText(span.longest_rank), time(span.longest_at_ms)]);
        part.append(element('details', number ? {} : {open: ''}, element('summary', {}, trace.file),
          element('p', {class: 'note'}, notes.filter(Boolean).join(' ')), table(columns, rows)));
      });
    });
  }

  /** The ledgers of live streams: where the samples are, who has waited, and how often each sample was used. */
  function addLive() {
    const fields = {on_its_way: 'on their way', in_memory: 'in the trainer\'s memory', uses_per_sample: 'uses of each sample',
      solver_wait_s: 'solvers waited for room', trainer_wait_s: 'trainer waited for samples', sent: 'sent', used: 'used',
      waiting: 'waiting, never used', validation: 'held out', dropped_by_solver: 'dropped by the solver\'s rule',
      dropped_by_trainer: 'dropped by the trainer', lost: 'lost'};
    const streams = [...new Set(namesIn('own').map((name) => (/^live\.(.+)\.sent$/.exec(name) || [])[1]).filter(Boolean))];
    if (!streams.length) return;
    const part = section('live', 'Live samples');
    for (const stream of streams) {
      const cards = element('div', {class: 'cards'});
      for (const [field, title] of Object.entries(fields)) {
        const name = 'live.' + stream + '.' + field;
        if (runs.some((run) => run.own[name] && (run.own[name].max > 0 || field === 'sent')))
          cards.append(curveCard('own', name, title, field.endsWith('_s') ? durationText : numberText));
      }
      part.append(...(streams.length > 1 ? [element('h3', {}, stream)] : []), cards);
    }
  }

  /** The pictures of session.log_image. */
  function addPictures() {
    if (!runs.some((run) => listOf(run.pictures).length)) return;
    const part = section('pictures', 'Pictures');
    runs.forEach((run, i) => {
      const all = listOf(run.pictures);
      if (!all.length) return;
      part.append(...runHeading(i));
      for (const name of new Set(all.map((picture) => picture.name)))
        part.append(element('h4', {}, name), element('div', {class: 'pictures'}, all.filter((picture) => picture.name === name)
          .map(({step, png}) => element('figure', {}, element('img', {src: 'data:image/png;base64,' + png,
            alt: name + ' at step ' + step}), element('figcaption', {}, 'step ' + numberText(step))))));
    });
  }

  /** Seconds since 1970, from the manifest or else from the row. */
  const savedAt = (checkpoint) => (checkpoint.time ? Date.parse(checkpoint.time) / 1000 : checkpoint.timestamp);

  function checkpointRow(checkpoint) {
    const name = checkpoint.folder + (checkpoint.name ? ' (' + checkpoint.name + ')' : '');
    const saved = timeText(savedAt(checkpoint));
    return [name, stateText(checkpoint.state), numberText(checkpoint.report), numberText(checkpoint.step),
      checkpoint.bytes === undefined ? '–' : bytesText(checkpoint.bytes), durationText(checkpoint.save_s), saved,
      [checkpoint.validation, checkpoint.problem].filter(Boolean).join(' ')];
  }

  function addCheckpoints() {
    if (!runs.some((run) => listOf(run.checkpoints).length)) return;
    const part = section('checkpoints', 'Checkpoints');
    const columns = [{title: 'checkpoint'}, {title: 'state'}, {title: 'report', number: true}, {title: 'step', number: true},
      {title: 'size', number: true}, {title: 'save', number: true}, {title: 'saved at', isWhole: true}, {title: 'notes', long: true}];
    runs.forEach((run, i) => {
      const all = listOf(run.checkpoints).slice().reverse();
      if (!all.length) return;
      const kept = all.filter((checkpoint) => checkpoint.state === 'kept').length;
      part.append(...runHeading(i), element('p', {class: 'note'},
        Math.max(run.checkpoint_count, all.length) + ' saved, ' + kept + ' kept; the newest first. ' +
        'The time of a save is that of the slowest rank, until its next report.'));
      part.append(table(columns, all.slice(0, 10).map(checkpointRow)));
      if (all.length > 10)
        part.append(element('details', {}, element('summary', {}, 'The ' + (all.length - 10) + ' before'),
          table(columns, all.slice(10).map(checkpointRow))));
    });
  }

  /** What a run's time line shows: its starts, or what its rows tell of them. */
  function spansOf(run) {
    const starts = listOf(run.status.starts).filter((start) => isObject(start) && isNumber(start.started));
    if (starts.length) return starts.map((start) => ({from: start.started, to: Math.max(isNumber(start.ended) ? start.ended
      : isNumber(run.status.updated) ? run.status.updated : start.started, start.started), size: start.world_size,
      report: start.first_iteration, step: start.first_step, state: valueText(start.state), error: start.error}));
    return listOf(run.worlds).filter((world) => isNumber(world.from)).map((world) => ({from: world.from,
      to: Math.max(isNumber(world.to) ? world.to : world.from, world.from), size: world.world_size, report: world.report,
      step: world.step, state: 'reported'}));
  }

  function savesOf(run) {
    return listOf(run.checkpoints).map((checkpoint) => ({name: checkpoint.folder, at: savedAt(checkpoint)}))
      .filter(({at}) => isNumber(at));
  }

  const colourOfState = (state) => ({died: '--bad', failed: '--bad', stopped: '--warn'}[state] || '--good');

  function drawTimeline(holder, spans, saves) {
    const width = Math.max(holder.clientWidth, 280), left = 4, right = width - 4;
    const from = Math.min(...spans.map((span) => span.from)), to = Math.max(...spans.map((span) => span.to), from + 1);
    const place = (time) => left + ((Math.min(Math.max(time, from), to) - from) / (to - from)) * (right - left);
    const svg = drawing('svg', {class: 'timeline', viewBox: '0 0 ' + width + ' 64', width, height: 64, role: 'img',
      'aria-label': 'Starts and checkpoints over time; the table has the same'});
    svg.append(drawing('line', {class: 'axis', x1: left, x2: right, y1: 46, y2: 46}));
    for (const span of spans) {
      const x = place(span.from), wide = Math.max(place(span.to) - x, 2);
      svg.append(drawing('rect', {x, y: 8, width: wide, height: 20, rx: 3, style: 'fill: var(' + colourOfState(span.state) + '); fill-opacity: 0.35; stroke: var(' + colourOfState(span.state) + ')'},
        drawing('title', {}, timeText(span.from) + ' to ' + timeText(span.to) + ', ' + valueText(span.size) + ' ranks, ' + span.state)));
      const label = valueText(span.size) + (wide > 110 ? ' ranks, ' + span.state : wide > 55 ? ' ranks' : '');
      if (wide > 12) svg.append(drawing('text', {x: x + 4, y: 22}, label));
    }
    for (const save of saves)
      svg.append(drawing('line', {class: 'save', x1: place(save.at), x2: place(save.at), y1: 33, y2: 43}, drawing('title', {}, save.name)));
    const day = timeText(from).slice(0, 10) === timeText(to).slice(0, 10);
    svg.append(drawing('text', {class: 'soft', x: left, y: 60}, timeText(from)));
    const end = drawing('text', {class: 'soft', x: right, y: 60, 'text-anchor': 'end'}, timeText(to, !day));
    svg.append(end);
    holder.replaceChildren(svg);
  }

  const timelines = [];

  function addTimeline() {
    const all = runs.map(spansOf);
    if (!all.some((spans) => spans.length) && !runs.some((run) => run.error)) return;
    const part = section('timeline', 'Starts and failures');
    part.append(element('p', {class: 'note'}, 'A bar is a start with its number of ranks, a tick a checkpoint.'));
    runs.forEach((run, i) => {
      const spans = all[i];
      if (!spans.length && !run.error) return;
      part.append(...runHeading(i));
      if (spans.length) {
        const holder = element('div');
        part.append(holder);
        timelines.push(() => drawTimeline(holder, spans, savesOf(run)));
        part.append(table([{title: '#', number: true}, {title: 'began', isWhole: true}, {title: 'lasted', number: true}, {title: 'ranks', number: true},
          {title: 'from report', number: true}, {title: 'from step', number: true}, {title: 'state'}, {title: 'error', long: true}],
        spans.map((span, n) => [String(n + 1), timeText(span.from), durationText(span.to - span.from), valueText(span.size),
          numberText(span.report), numberText(span.step), stateText(span.state), span.error ? element('span', {class: 'problem'}, valueText(span.error)) : '']),
        {class: 'starts'}));
      }
      if (run.error) part.append(element('h4', {}, 'The last failure (error.txt)'), element('pre', {}, run.error));
    });
    timelines.forEach((draw) => draw());
  }

  /** Keys of params.json that describe where a run ran rather than what it trains. */
  const environmentKeys = ['muster_version', 'program', 'name', 'hosts', 'num_ranks', 'world_size', 'threads_per_worker',
    'versions', 'environment', 'finished'];

  /** A table with a column for each run, and a switch that leaves out what is the same everywhere. */
  function comparison(part, values) {
    const keys = [...new Set(values.flatMap((all) => Object.keys(all)))].sort();
    const differs = (key) => values.some((all) => valueText(all[key]) !== valueText(values[0][key]));
    const isMany = runs.length > 1;
    const holder = element('div');
    const show = (onlyDifferences) => {
      const shown = onlyDifferences ? keys.filter(differs) : keys;
      holder.replaceChildren(shown.length
        ? table([{title: ''}, ...runs.map((run, i) => ({title: isMany ? element('span', {}, runLabel(i)) : 'value', long: true}))],
          shown.map((key) => [key, ...values.map((all) => valueText(all[key]))]))
        : element('p', {class: 'note'}, 'The runs do not differ.'));
    };
    const box = element('input', {type: 'checkbox', change: () => show(box.checked)});
    box.checked = isMany;
    if (isMany) part.append(element('div', {class: 'controls'}, element('label', {}, box, 'only what differs')));
    part.append(holder);
    show(isMany);
  }

  function addConfiguration() {
    const params = runs.map((run) => (isObject(run.params) ? run.params : {}));
    const chosen = (isWanted) => params.map((all) =>
      flattened(Object.fromEntries(Object.entries(all).filter(([key]) => isWanted(environmentKeys.includes(key))))));
    const settings = section('configuration', 'Configuration');
    comparison(settings, chosen((isEnvironment) => !isEnvironment));
    runs.forEach((run, i) => {
      if (run.params === null) settings.append(element('p', {class: 'note'}, run.name + ' has no params.json that can be read.'));
      else if (!isObject(run.params)) settings.append(element('p', {class: 'note'}, 'params.json of ' + run.name + ' is too long for this page.'));
    });
    const environment = chosen((isEnvironment) => isEnvironment);
    environment.forEach((all, i) => {
      for (const key of ['host', 'pid']) if (runs[i].status[key] !== undefined) all['rank 0 last on ' + key] = runs[i].status[key];
    });
    comparison(section('environment', 'Environment'), environment);
  }

  // --- Light and dark, printing ---------------------------------------------------------------------------------------

  const prefersDark = window.matchMedia('(prefers-color-scheme: dark)');
  const themes = ['automatic', 'light', 'dark'];
  let theme = 'automatic', isPrinting = false;

  function applyTheme() {
    const isDark = !isPrinting && (theme === 'dark' || (theme === 'automatic' && prefersDark.matches));
    document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
    document.documentElement.style.colorScheme = isDark ? 'dark' : 'light';
    document.getElementById('theme').textContent = 'Theme: ' + theme;
    redraw();
  }

  function nextTheme() {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    applyTheme();
  }

  /** Sets the charts to a width that fits on paper, since a canvas does not follow the width of the paper. */
  function setPrinting(isNow) {
    isPrinting = isNow;
    for (const chart of charts) {
      chart.holder.style.width = isNow ? '310px' : '';
      if (isNow) chart.isSeen = true;
    }
    applyTheme();
  }

  function start() {
    const names = runs.map((run) => run.name);
    const title = data.sweeps.length ? data.sweeps.map((sweep) => sweep.name).join(', ') : names.slice(0, 4).join(', ') + (names.length > 4 ? ', …' : '');
    document.title = title + ' – muster report';
    document.getElementById('title').textContent = title;
    document.getElementById('made').textContent = 'Made by muster ' + data.version + ' on ' + timeText(data.made) + '.';
    runs.forEach((run, i) => { if (i < 20) view.shown.add(i); });
    if (runs.every((run) => progressOf(run).step > 0)) view.axis = 'step';
    applyTheme();
    data.sweeps.forEach(addSweep);
    addOverview();
    addCurves();
    addTime();
    addRanks();
    addLive();
    addPictures();
    addTraces();
    addCheckpoints();
    addTimeline();
    addConfiguration();
    document.getElementById('theme').addEventListener('click', nextTheme);
    document.addEventListener('keydown', (event) => {
      const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      if (event.key === 't' && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) nextTheme();
    });
    prefersDark.addEventListener('change', applyTheme);
    window.addEventListener('beforeprint', () => setPrinting(true));
    window.addEventListener('afterprint', () => setPrinting(false));
    window.addEventListener('resize', () => timelines.forEach((draw) => draw()));
  }

  start();
})();
