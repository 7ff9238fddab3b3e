"use strict";

const at = (id) => document.getElementById(id);
const PACE = 280; // milliseconds between two steps as they are shown, at least
let models = [], rules = [], running = [];
document.querySelector(".ramp").style.background = `linear-gradient(90deg, ${VIRIDIS})`;

/** One rule of the race: the steps that have come, and the one that is shown. */
class Lane {
  constructor(policy, model) {
    this.root = at("lane").content.firstElementChild.cloneNode(true);
    this.part = (name) => this.root.querySelector(name);
    this.frames = [];
    this.shown = -1;
    this.budget = 1;
    this.answer = null;
    this.abort = new AbortController();
    this.part("h2").textContent = policy;
    this.part(".step").setAttribute("aria-label", `Step of ${policy}`);
    const tokens = this.part(".tokens");
    if (!model.is_text) tokens.classList.add("apart");
    if (model.columns) {
      tokens.classList.add("square");
      tokens.style.setProperty("--columns", model.columns);
    }
    this.part(".step").addEventListener("input", (event) => { this.pause(); this.show(Number(event.target.value)); });
    this.part(".play").addEventListener("click", () => (this.timer ? this.pause() : this.play(true)));
    this.part(".copy").addEventListener("click", () => this.copy());
    at("lanes").append(this.root);
  }

  show(index) {
    const frame = this.frames[index], before = this.frames[index - 1];
    this.shown = index;
    const fresh = (step, i) => before && step !== null && step >= 0 && (before.tokens[i] ?? [])[1] !== step;
    this.part(".tokens").replaceChildren(...frame.tokens.map(([text, step], i) => {
      const token = document.createElement("span");
      token.className = step === null ? "token mask" : step < 0 ? "token given" : "token";
      token.textContent = text;
      if (step >= 0 && step !== null) {
        [token.style.background, token.style.color] = stepColour(step + 1, this.budget);
        token.title = `step ${step + 1}`;
        if (fresh(step, i)) token.classList.add("new");
      }
      return token;
    }));
    const taken = frame.steps;
    this.part(".steps").textContent = taken;
    this.part(".of").textContent = `${taken === 1 ? "step" : "steps"} of at most ${this.budget},`;
    this.part(".passes").textContent = frame.passes;
    this.part(".time").textContent = frame.seconds === undefined ? "" : `${(1000 * frame.seconds).toFixed(0)} ms`;
    const slider = this.part(".step");
    slider.max = this.frames.length - 1;
    slider.value = index;
    slider.setAttribute("aria-valuetext", index ? `after step ${index}` : "before the first step");
    this.part(".at").textContent = `${index} / ${this.frames.length - 1}`;
    if (this.answer && index === this.frames.length - 1) this.end();
  }

  play(again = false) {
    if (again && this.shown >= this.frames.length - 1) this.show(0);
    if (this.timer) return;
    this.part(".play").textContent = "❚❚";
    this.part(".play").setAttribute("aria-label", "Pause");
    this.timer = setInterval(() => {
      if (this.shown < this.frames.length - 1) this.show(this.shown + 1);
      else if (this.answer) this.pause();
    }, PACE);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.part(".play").textContent = "▶";
    this.part(".play").setAttribute("aria-label", "Play again");
    this.settle();
  }

  /** All has come, and nothing is playing. */
  settle() {
    if (this.answer && !this.timer) this.finished?.();
  }

  end() {
    const { valid, command } = this.answer, mark = this.part(".valid");
    if (valid !== null) {
      mark.className = `valid ${valid ? "good" : "bad"}`;
      mark.textContent = valid ? "✓ right" : "✗ not right";
    }
    this.part("code").textContent = command;
    this.part(".repeat").hidden = command === null;
    this.finished?.();
  }

  async copy() {
    const button = this.part(".copy");
    try {
      await navigator.clipboard.writeText(this.answer.command);
      button.textContent = "Copied";
    } catch { // not allowed: it is selected instead
      getSelection().selectAllChildren(this.part("code"));
      button.textContent = "Press Ctrl C";
    }
    setTimeout(() => { button.textContent = "Copy command"; }, 1500);
  }

  /** Resolves when all steps have been shown, or have come while somebody looks at one of them. */
  async write(body) {
    const whole = new Promise((resolve) => { this.finished = resolve; });
    const response = await ask("/v1/generate", { ...body, stream: true }, this.abort.signal);
    for await (const [name, value] of events(response)) {
      if (name === "error") throw new Error(value.error.message);
      if (name === "start") {
        this.budget = value.budget;
        this.part("h2").textContent = value.policy;
        at("question").textContent = value.prompt;
        at("question").hidden = !value.prompt;
        this.frames = [{ ...value, steps: 0, passes: 0 }];
        this.show(0);
        this.play();
      } else if (name === "step") {
        this.frames.push(value);
        this.part(".step").max = this.frames.length - 1;
      } else {
        this.answer = value;
        this.settle();
      }
    }
    await whole;
  }
}

async function ask(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (at("token").value) headers.authorization = `Bearer ${at("token").value}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...options, headers, signal });
  if (response.ok) return response;
  if (response.status === 401) {
    at("secret").hidden = false;
    at("token").focus();
  }
  throw new Error((await response.json()).error.message);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const [name, data] = block.split("\n");
      yield [name.slice("event: ".length), JSON.parse(data.slice("data: ".length))];
    }
  }
}

const model = () => models.find((one) => one.id === at("model").value);
const keyOf = (policy) => policy.trim().split(/[(:]/)[0];
const price = () => {
  const [low, high] = model().prices;
  return Number((low * (high / low) ** (at("price").value / 100)).toPrecision(2));
};

function body(policy) {
  const own = at("own").checked;
  if (policy === "learned" && model().prices.length) policy = `learned(price=${price()})`;
  const found = { model: model().id, policy, seed: Number(at("seed").value), temperature: Number(at("temperature").value) };
  const fixed = !model().any_steps && rules.find((one) => one.name === keyOf(policy))?.needs_order; // as it was learned
  if (at("steps").value && !fixed) found.steps = Number(at("steps").value);
  return own ? { ...found, prompt: at("prompt").value } : { ...found, example: Number(at("example").value) };
}

function tell(text, failed = false) {
  at("verdict").textContent = text;
  at("verdict").classList.toggle("failed", failed);
}

function stop() {
  const lanes = running;
  running = [];
  for (const lane of lanes) { lane.abort.abort(); lane.pause(); }
  if (lanes.length) tell(lanes.every((lane) => lane.answer) ? verdict(lanes) : "Stopped.");
  at("stop").hidden = true;
}

function verdict(lanes) {
  const parts = lanes.map(({ answer }) => {
    const steps = `${answer.steps} ${answer.steps === 1 ? "step" : "steps"}`;
    return `${answer.policy} wrote ${answer.valid === null ? "it" : answer.valid ? "a right answer" : "a wrong answer"} in ${steps}`;
  });
  return `${parts.join("; ")}.`;
}

async function write() {
  stop();
  const wanted = [at("first").value.trim(), at("second").value.trim()].filter(Boolean);
  if (!wanted.length) { tell("Name a rule to write with.", true); return; }
  at("lanes").replaceChildren();
  at("question").hidden = true;
  at("legend").hidden = false;
  at("ends").hidden = !model().is_text;
  tell("Writing …");
  at("stop").hidden = false;
  const lanes = running = wanted.map((policy) => new Lane(policy, model()));
  try {
    await Promise.all(lanes.map((lane, i) => lane.write(body(wanted[i]))));
    if (running !== lanes) return; // others are written by now
    tell(verdict(lanes));
    at("stop").hidden = true;
  } catch (error) {
    if (error.name === "AbortError") return;
    stop();
    lanes.filter((lane) => !lane.frames.length).forEach((lane) => lane.root.remove());
    tell(error.message, true);
  }
}

function explain() {
  for (const id of ["first", "second"]) {
    const rule = rules.find((one) => one.name === keyOf(at(id).value));
    at(`${id}-help`).textContent = rule ? `${rule.usage}: ${rule.words}` : "";
  }
  const learned = [at("first"), at("second")].some((input) => input.value.trim() === "learned");
  at("priced").hidden = !(model()?.prices.length && learned);
  if (!at("priced").hidden) at("price-shown").textContent = price();
}

function choose() {
  const chosen = model();
  at("rules").replaceChildren(...rules.filter((rule) => chosen.has_order || !rule.needs_order).map((rule) => {
    const option = document.createElement("option");
    option.value = rule.name;
    option.label = rule.usage;
    return option;
  }));
  at("first").value = chosen.has_order ? "learned" : "top-prob";
  at("second").value = chosen.has_order ? "top-prob" : "margin";
  at("steps").value = chosen.steps;
  at("steps").max = chosen.max_steps;
  at("temperature").value = chosen.temperature;
  at("example").max = chosen.examples === null ? "" : chosen.examples - 1;
  at("own").disabled = !chosen.takes_prompts;
  at("prompt").placeholder = chosen.is_text ? "Type a prompt" : `${chosen.length} tokens with spaces between, _ for each to write`;
  explain();
}

async function load() {
  try {
    const [found, listed] = await Promise.all(["/v1/models", "/v1/policies"].map(async (path) => (await ask(path)).json()));
    models = found.data;
    rules = listed.data;
  } catch (error) {
    tell(error.message, true);
    return;
  }
  at("model").replaceChildren(...models.map((one) => new Option(`${one.id} (${one.task})`, one.id)));
  choose();
  tell("Choose two rules and let them write the same thing.");
}

at("model").addEventListener("change", choose);
at("stop").addEventListener("click", stop);
for (const id of ["first", "second", "price"]) at(id).addEventListener("input", explain);
at("token").addEventListener("change", () => { if (!models.length) load(); });
at("another").addEventListener("click", () => {
  at("example").value = Math.floor(Math.random() * (model().examples ?? 10000));
});
for (const radio of document.getElementsByName("source")) {
  radio.addEventListener("change", () => {
    at("typed").hidden = !at("own").checked;
    at("from-task").hidden = at("own").checked;
  });
}
at("form").addEventListener("submit", (event) => { event.preventDefault(); if (models.length) write(); else load(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); at("form").requestSubmit(); }
  if (event.key === "Escape") stop();
});
load();
