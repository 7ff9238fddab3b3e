// The order viewer: what rules write for one prompt, step by step, side by side.
//
//   const viewer = orderViewer(element, {prompt, given, reference, grid, policies});
//   viewer.show(step)             0: before the first step; each rule stays at its last
//   viewer.add(policy, step)      one more step of a rule that is still writing (policy: its index)
//
// prompt     a text above the tokens, or ""
// given      [bool]: the tokens that belong to the prompt; may be [] where none does
// reference  [text]: the right tokens, or null; others are marked where the answer is not valid
// grid       [columns, columns of a box], or [0, 0] where the tokens stand in a line
// policies   [{name, valid: true | false | null (may be set later), drawing: "" | an SVG, shown as an image, steps}]
// steps      [{tokens: [text | null for a mask | 0 as before | [text] the same token, part of another letter now],
//              selector: [percent | null], confidence: [percent | null]}]
//            tokens: after the step; selector (may be missing) and confidence: of the masks before it
//
// All texts are set as text, never as HTML.  Needs colours.js and viewer.css.
"use strict";

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// A box beside the pointer, with lines of text; nothing hides it.
const hover = {
  box: null,
  show(x, y, lines) {
    if (!this.box) {
      this.box = element("div", "hover");
      this.box.setAttribute("role", "tooltip");
      document.body.append(this.box);
      addEventListener("scroll", () => this.hide(), true);
    }
    this.box.replaceChildren(...lines.map((line, i) => element(i ? "span" : "strong", "", line)));
    this.box.hidden = false;
    const {width, height} = this.box.getBoundingClientRect();
    this.box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
    this.box.style.top = `${y + height + 20 > innerHeight ? y - height - 10 : y + 16}px`;
  },
  hide() {
    if (this.box) this.box.hidden = true;
  },
  // While something is pointed at, or after a tap; about(event): the lines, or nothing.
  over(root, about) {
    const tell = (event) => {
      const lines = about(event);
      if (lines?.length) this.show(event.clientX, event.clientY, lines);
      else this.hide();
    };
    root.addEventListener("pointermove", tell);
    root.addEventListener("click", tell);
    root.addEventListener("pointerleave", () => this.hide());
  },
};

function orderViewer(root, data) {
  const count = data.policies.length;
  const lanes = data.policies.map((policy, i) => new Lane(policy, data, i));
  let step = 0, timer = 0;

  const play = element("button", "play");
  const slider = element("input");
  Object.assign(slider, {type: "range", min: 0, step: 1});
  slider.setAttribute("aria-label", "step");
  const told = element("output", "told");
  const legend = element("p", "key");
  const controls = element("div", "controls");
  controls.append(play, slider, told);
  const race = element("div", "lanes");
  race.append(...lanes.map((lane) => lane.box));
  const chips = element("div", "chips");
  if (count > 1) {
    lanes.forEach((lane) => {
      const chip = element("button", "chip", lane.policy.name);
      chip.onclick = () => {
        lane.box.hidden = !lane.box.hidden;
        chip.setAttribute("aria-pressed", !lane.box.hidden);
      };
      chips.append(chip);
      lane.chip = chip;
    });
  }
  const prompt = element("p", "prompt", data.prompt);
  prompt.hidden = !data.prompt;
  if (data.prompt.length > 400) prompt.tabIndex = 0; // it may scroll
  const reading = element("p", "unseen");
  reading.setAttribute("aria-live", "polite");
  root.classList.add("viewer");
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "order viewer: arrow keys change the step, space plays");
  root.replaceChildren(chips, prompt, race, controls, legend, reading);
  lanes.forEach((lane, i) => {
    if (lane.chip) lane.box.hidden = i > 1;
    lane.chip?.setAttribute("aria-pressed", !lane.box.hidden);
  });

  const last = () => Math.max(...lanes.map((lane) => lane.steps.length));

  function key() {
    const end = last(), marks = [];
    legend.replaceChildren(element("span", "", "revealed at step"));
    const shown = end <= 12 ? end : 12;
    for (let i = 0; i < shown; i++) marks.push(end <= 12 ? i + 1 : Math.round(1 + (i * (end - 1)) / (shown - 1)));
    const bar = element("span", "scale");
    for (const at of marks) {
      const mark = element("span", "", at);
      [mark.style.background, mark.style.color] = stepColour(at, end);
      bar.append(mark);
    }
    legend.append(bar);
    const filled = lanes.some((lane) => lane.steps.some((one) => one.selector));
    const signs = [filled
      ? ["masked, as full as the selector's probability of revealing it now", "token mask sample", "·"]
      : ["masked", "token mask", "·"]];
    if (data.given.some(Boolean)) signs.push(["given", "token given", "a"]);
    if (data.reference) signs.push(["not as in the reference", "token differs", "a"]);
    if (lanes.some((lane) => lane.steps.at(-1)?.tokens.includes("░"))) signs.push(["end of sequence", "token", "░"]);
    if (lanes.some((lane) => lane.again)) signs.push(["masked again, or written again", "token mask again", "↺"]);
    for (const [text, className, sign] of signs) {
      const entry = element("span", "sign");
      entry.append(element("span", className, sign), text);
      legend.append(entry);
    }
  }

  function show(to) {
    step = Math.max(0, Math.min(to, last()));
    slider.max = last();
    slider.value = step;
    told.textContent = step ? `step ${step} of ${last()}` : `before step 1 of ${last()}`;
    lanes.forEach((lane) => lane.show(step, last()));
    reading.textContent = `${told.textContent}. ${lanes.filter((lane) => !lane.box.hidden).map((lane) => lane.read()).join(". ")}`;
    if (step === last()) stop();
  }

  function stop() {
    clearTimeout(timer);
    timer = 0;
    play.textContent = "▶ Play";
  }

  function start() {
    if (step === last()) show(0);
    play.textContent = "❚❚ Pause";
    const next = () => {
      timer = setTimeout(next, Math.max(30, Math.min(900, 6000 / last())));
      show(step + 1);
    };
    timer = setTimeout(next, 350);
  }

  const toggle = () => (timer ? stop() : start());
  play.onclick = toggle;
  slider.oninput = () => { stop(); show(Number(slider.value)); };
  root.onkeydown = (event) => {
    const to = {ArrowRight: step + 1, ArrowLeft: step - 1, Home: 0, End: last()}[event.key];
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (to !== undefined) {
      stop();
      show(to);
    } else if (event.key === " " && event.target.tagName !== "BUTTON") toggle();
    else return;
    event.preventDefault();
  };
  hover.over(race, ({target}) => lanes.find((lane) => lane.cells.includes(target))?.about(Number(target.dataset.at)));
  stop();
  key();
  show(last());

  return {
    show,
    stop,
    add(policy, one) {
      const live = step === last();
      lanes[policy].add(one);
      key();
      show(live ? last() : step);
    },
  };
}

// One rule: its canvas after every step, and the cells that show one of them.
class Lane {
  constructor(policy, data) {
    this.policy = policy;
    this.data = data;
    this.steps = [];
    this.again = false; // whether something was masked again or written twice
    this.now = 0;
    this.box = element("div", "lane");
    const head = element("p", "head"), title = element("strong", "", policy.name);
    this.outcome = element("span", "outcome");
    head.append(title, this.outcome);
    this.field = element("div", data.grid[0] ? "tokens square" : "tokens");
    if (data.grid[0]) this.square(...data.grid);
    this.cells = [];
    this.box.append(head, this.field);
    if (policy.drawing) {
      this.drawing = element("img", "drawing");
      this.drawing.alt = "the molecule";
      this.drawing.src = `data:image/svg+xml,${encodeURIComponent(policy.drawing)}`;
      this.box.append(this.drawing);
    }
    this.make(data.given.length || policy.steps[0]?.tokens.length || 0);
    policy.steps.forEach((step) => this.add(step));
  }

  // since: the step of a token's last change, 0 if given; times: how often it was written
  add(step) {
    const before = this.steps.at(-1), size = step.tokens.length, {given} = this.data;
    const since = new Uint16Array(size), times = new Uint16Array(size);
    const tokens = step.tokens.map((token, p) => (token === 0 ? before.tokens[p] : Array.isArray(token) ? token[0] : token));
    tokens.forEach((token, p) => {
      const [was, count, text] = before ? [before.since[p], before.times[p], before.tokens[p]] : [0, 0, null];
      const changed = token !== null && !given[p] && text !== token && !Array.isArray(step.tokens[p]);
      since[p] = changed ? this.steps.length + 1 : was;
      times[p] = count + changed;
      if (times[p] > 1 || (token === null && times[p])) this.again = true;
    });
    this.steps.push({...step, tokens, since, times});
    if (!this.cells.length) this.make(size);
  }

  // A square of columns x columns cells, with a gap between its boxes.
  square(columns, box) {
    const tracks = Array(columns / box).fill(`repeat(${box}, 1fr)`).join(" 3px ");
    Object.assign(this.field.style, {gridTemplateColumns: tracks, gridTemplateRows: tracks, maxWidth: `${columns * 2.8}rem`});
  }

  make(size) {
    const [columns, box] = this.data.grid, made = document.createDocumentFragment();
    for (let p = 0; p < size; p++) {
      const cell = element("span", "token");
      cell.dataset.at = p;
      if (columns)
        [cell.style.gridColumn, cell.style.gridRow] = [p % columns, Math.floor(p / columns)].map((i) => 1 + i + Math.floor(i / box));
      made.append(cell);
      this.cells.push(cell);
    }
    this.field.append(made);
    this.field.classList.toggle("few", size <= 48);
    if (size > 48) this.field.tabIndex = 0; // it may scroll
  }

  show(step, last) {
    const now = this.now = Math.min(step, this.steps.length), canvas = this.steps[now - 1], next = this.steps[now];
    const done = now === this.steps.length && step >= now, {reference, given} = this.data;
    this.cells.forEach((cell, p) => {
      const isGiven = given[p], token = isGiven ? (this.steps[0]?.tokens[p] ?? "") : canvas ? canvas.tokens[p] : null;
      const names = ["token"];
      let text = token, colours = ["", ""], full = "";
      if (token === null) {
        names.push("mask");
        text = "·";
        if (canvas && canvas.times[p]) {
          names.push("again");
          text = "↺";
        }
        const sure = next?.selector?.[p];
        if (sure != null) full = `${sure}%`;
      } else if (isGiven) names.push("given");
      else {
        colours = stepColour(canvas.since[p], last);
        if (canvas.times[p] > 1) names.push("again");
        if (this.policy.valid !== true && reference && reference[p] !== token) names.push("differs");
      }
      if (token === "░") names.push("end");
      if (token && token.includes("\n")) {
        names.push("line");
        text = token.replaceAll("\n", "↵");
        if (cell.nextSibling?.tagName !== "BR") cell.after(element("br"));
      }
      const look = [names.join(" "), text, ...colours, full].join("\u0001");
      if (look === cell.look) return;
      cell.look = look;
      cell.className = names.join(" ");
      cell.textContent = text;
      [cell.style.background, cell.style.color] = colours;
      cell.style.setProperty("--full", full || "0%");
    });
    const {valid} = this.policy;
    const verdict = !done || valid === null || valid === undefined ? "" : valid ? "✓ valid" : "✗ not valid";
    this.outcome.textContent = `${verdict ? `${verdict}, ` : ""}${now} step${now === 1 ? "" : "s"}`;
    this.outcome.className = `outcome ${!verdict ? "" : valid ? "good" : "bad"}`;
    if (this.drawing) this.drawing.classList.toggle("pale", !done);
  }

  read() {
    const canvas = this.steps[this.now - 1];
    return `${this.policy.name}: ${canvas ? canvas.tokens.slice(0, 200).map((token) => token ?? "mask").join("") : "all masked"}`;
  }

  // What the hover box says of a position.
  about(p) {
    const canvas = this.steps[this.now - 1], {given, reference} = this.data;
    const token = given[p] ? (this.steps[0]?.tokens[p] ?? "") : canvas ? canvas.tokens[p] : null;
    const lines = [`position ${p + 1}: ${token === null ? "masked" : token === "░" ? "end of sequence" : JSON.stringify(token)}`];
    if (given[p]) return [...lines, "given"];
    const at = token === null ? this.now : canvas.since[p] - 1, said = this.steps[at];
    if (token !== null) lines.push(`revealed at step ${at + 1}`);
    if (canvas && canvas.times[p] > (token === null ? 0 : 1))
      lines.push(token === null ? "masked again" : `written ${canvas.times[p]} times`);
    const [sure, chosen] = [said?.confidence?.[p], said?.selector?.[p]];
    const when = token === null ? "now" : "then";
    if (chosen != null) lines.push(`selector: ${chosen}% to reveal it ${when}`);
    if (sure != null) lines.push(`denoiser: ${sure}% sure ${when}`);
    if (token !== null && reference && reference[p] !== token) lines.push(`reference: ${JSON.stringify(reference[p])}`);
    return lines;
  }
}
