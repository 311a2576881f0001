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
