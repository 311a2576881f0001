// Draws panels of a dashboard from query answers: window.draw({dashboard, answers, from, to, theme}).
import {
  FieldColorModeId,
  FieldType,
  ThresholdsMode,
  createTheme,
  dateTime,
  getDisplayProcessor,
  toDataFrame,
  ThemeContext,
} from "@grafana/data";
import { BarGauge, BigValue, GlobalStyles, PanelChrome, TimeSeries } from "@grafana/ui";
import { createRoot } from "react-dom/client";
import "uplot/dist/uPlot.min.css";

const CELL = 30; // pixels of a row of Grafana's grid
const WIDTH = 1600;

function configOf(panel, name, theme) {
  const { defaults, overrides } = panel.fieldConfig;
  const config = structuredClone(defaults);
  config.displayName = name;
  config.custom = { ...config.custom, axisPlacement: "auto", scaleDistribution: { type: "linear" } };
  for (const { matcher, properties } of overrides) {
    const fits =
      matcher.id === "byName" ? matcher.options === name : new RegExp(matcher.options.slice(1, -1)).test(name);
    for (const { id, value } of fits ? properties : []) {
      if (id.startsWith("custom.")) config.custom[id.slice(7)] = value;
      else config[id] = value;
    }
  }
  return config;
}

function frames(panel, series, theme) {
  return series.map(({ name, points }, index) => {
    const values = points.map(([, value]) => value);
    const [min, max] = [Math.min(...values), Math.max(...values)];
    const field = {
      name,
      type: FieldType.number,
      config: configOf(panel, name, theme),
      values,
      state: { seriesIndex: index, range: { min, max, delta: max - min } },
    };
    const frame = toDataFrame({
      fields: [{ name: "Time", type: FieldType.time, config: {}, values: points.map(([at]) => at * 1000) }, field],
    });
    frame.fields[1].state = field.state;
    frame.fields[1].display = getDisplayProcessor({ field: frame.fields[1], theme });
    frame.fields[0].display = getDisplayProcessor({ field: frame.fields[0], theme });
    return frame;
  });
}

function Stat({ panel, series, width, height, theme }) {
  const each = width / Math.max(series.length, 1);
  return (
    <div style={{ display: "flex" }}>
      {frames(panel, series, theme).map((frame) => {
        const field = frame.fields[1];
        const value = field.display(field.values[field.values.length - 1]);
        if (series.length > 1) value.title = field.name;
        const sparkline = { y: field, x: frame.fields[0] };
        const trend = field.values.length > 2 && panel.options.graphMode === "area" ? sparkline : undefined;
        return (
          <BigValue key={field.name} width={each} height={height} value={value} colorMode="value" graphMode={trend ? "area" : "none"} sparkline={trend} theme={theme} />
        );
      })}
    </div>
  );
}

function Bars({ panel, series, width, height, theme }) {
  const each = height / Math.max(series.length, 1);
  const top = Math.max(...series.map(({ points }) => points[0][1]), 1e-9);
  return series.map((one) => {
    const [frame] = frames(panel, [one], theme);
    const field = frame.fields[1];
    field.config.max ??= top;
    field.config.color = { mode: FieldColorModeId.Fixed, fixedColor: one.colour };
    field.config.thresholds = { mode: ThresholdsMode.Absolute, steps: [{ color: one.colour, value: -Infinity }] };
    field.display = getDisplayProcessor({ field, theme });
    const value = { ...field.display(field.values[0]), title: one.name };
    return (
      <BarGauge key={one.name} width={width} height={each} orientation="horizontal" displayMode="basic" value={value} field={field.config} display={field.display} theme={theme} itemSpacing={2} />
    );
  });
}

// Buckets from below to above, time from left to right, the more requests the brighter: as Grafana's own panel.
function Heat({ series, range, width, height, theme }) {
  const rows = series
    .map(({ name, points }) => ({ name, bound: name === "+Inf" ? Infinity : Number(name), points: new Map(points) }))
    .sort((one, other) => one.bound - other.bound);
  const times = [...rows[0].points.keys()];
  const step = times.length > 1 ? times[1] - times[0] : 1;
  const counts = rows.map(({ points }, index) =>
    times.map((at) => Math.max(0, points.get(at) - (index ? rows[index - 1].points.get(at) : 0))),
  );
  const last = Math.max(0, counts.findLastIndex((row) => row.some((count) => count > 0)));
  const most = Math.max(...counts.flat(), 1e-9);
  const [left, bottom] = [60, 22];
  const [from, to] = [range.from.valueOf() / 1000, range.to.valueOf() / 1000];
  const x = (at) => left + ((at - from) / (to - from)) * (width - left);
  const high = (height - bottom) / (last + 1);
  const y = (index) => height - bottom - (index + 1) * high;
  const text = { fill: theme.colors.text.primary, fontSize: 12 };
  const ticks = [0.1, 0.3, 0.5, 0.7, 0.9].map((share) => from + share * (to - from));
  return (
    <svg width={width} height={height}>
      {counts.slice(0, last + 1).flatMap((row, index) =>
        row.map((count, place) => (
          <rect key={`${index} ${place}`} x={x(times[place])} y={y(index) + 0.5} width={x(times[place] + step) - x(times[place])} height={high - 1} shapeRendering="crispEdges" fill={theme.visualization.getColorByName("blue")} fillOpacity={Math.sqrt(count / most)} />
        )),
      )}
      {rows.slice(0, last + 1).map(({ name }, index) => (
        <text key={name} x={left - 8} y={y(index) + high / 2 + 4} textAnchor="end" {...text}>{name === "+Inf" ? "more" : `≤ ${name} s`}</text>
      ))}
      {ticks.map((at) => (
        <text key={at} x={x(at)} y={height - 4} textAnchor="middle" {...text}>{new Date(at * 1000).toISOString().slice(11, 19)}</text>
      ))}
    </svg>
  );
}

function Panel({ panel, series, range, theme }) {
  const place = panel.gridPos;
  const width = (WIDTH / 24) * place.w - 8;
  const height = place.h * CELL - 8;
  const style = { position: "absolute", left: (WIDTH / 24) * place.x, top: place.y * CELL };
  return (
    <div style={style}>
      <PanelChrome title={panel.title} description={panel.description} width={width} height={height}>
        {(innerWidth, innerHeight) => {
          const common = { panel, series, theme, width: innerWidth, height: innerHeight };
          if (!series.length) return <p style={{ textAlign: "center" }}>No data</p>;
          if (panel.type === "stat") return <Stat {...common} />;
          if (panel.type === "barchart") return <Bars {...common} />;
          if (panel.type === "heatmap") return <Heat {...common} range={range} />;
          return (
            <TimeSeries frames={frames(panel, series, theme)} timeRange={range} timeZone="utc" width={innerWidth} height={innerHeight} legend={{ displayMode: "list", placement: "bottom", showLegend: true, calcs: [] }} />
          );
        }}
      </PanelChrome>
    </div>
  );
}

window.draw = ({ dashboard, answers, from, to, mode }) => {
  const theme = createTheme({ colors: { mode } });
  const range = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: "", to: "" } };
  const bottom = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  const root = document.getElementById("root");
  document.body.style.cssText = `margin:0;background:${theme.colors.background.canvas};color:${theme.colors.text.primary};font:14px Inter,Roboto,sans-serif`;
  root.style.cssText = `position:relative;width:${WIDTH}px;height:${bottom * CELL}px`;
  createRoot(root).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      {dashboard.panels.map((panel) =>
        panel.type === "row" ? (
          <h3 key={panel.id} style={{ position: "absolute", top: panel.gridPos.y * CELL, margin: "4px 8px", fontSize: 16 }}>
            {panel.title}
          </h3>
        ) : (
          <Panel key={panel.id} panel={panel} series={answers[panel.id]} range={range} theme={theme} />
        ),
      )}
    </ThemeContext.Provider>,
  );
};
