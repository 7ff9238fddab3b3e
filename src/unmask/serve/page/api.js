"use strict";

function made(name, text, ...children) {
  const element = document.createElement(name);
  element.append(...written(text), ...children);
  return element;
}

/** A text whose parts in backticks are code. */
const written = (text) => text.split("`").map((part, i) => (i % 2 ? made("code", part) : part));

const table = (rows) => made("table", "", ...rows.map(([name, text]) => made("tr", "", made("th", name), made("td", text))));

/** What a reference such as #/components/schemas/Generate points to. */
function resolved(schema, value) {
  return value.$ref ? value.$ref.slice(2).split("/").reduce((inside, key) => inside[key], schema) : value;
}

function fields(schema, body) {
  const { properties, required = [] } = resolved(schema, body.content["application/json"].schema);
  return table(Object.entries(properties).map(([name, { type, description = "", default: usual }]) => {
    const notes = [type, required.includes(name) ? "required" : "", usual === undefined ? "" : `default ${usual}`];
    return [name, `${description} (${notes.filter(Boolean).join(", ")})`];
  }));
}

function call(schema, method, path, { summary, requestBody, responses }) {
  const section = made("section", "", made("h2", `${method.toUpperCase()} ${path}`), made("p", summary));
  section.className = "call";
  if (requestBody) section.append(made("h3", "Send"), fields(schema, requestBody));
  const answers = Object.entries(responses).map(([code, value]) => [code, resolved(schema, value)]);
  const good = answers[0][1];
  if (good.content) section.append(made("h3", "Get"), fields(schema, good));
  const stream = good.content?.["text/event-stream"];
  if (stream) section.append(made("h3", "Get with stream: true"), made("p", stream.schema.description));
  section.append(made("h3", "Status"), table(answers.map(([code, { description }]) => [code, description])));
  return section;
}

fetch("/openapi.json").then((response) => response.json()).then((schema) => {
  document.getElementById("about").append(...written(schema.info.description));
  document.getElementById("calls").append(...Object.entries(schema.paths).flatMap(([path, calls]) =>
    Object.entries(calls).map(([method, told]) => call(schema, method, path, told))));
});
