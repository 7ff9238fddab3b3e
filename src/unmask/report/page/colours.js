// The colours of steps, in the report and in the playground.
"use strict";

const VIRIDIS = ["#fde725", "#b5de2b", "#6ece58", "#35b779", "#1f9e89", "#26828e", "#31688e", "#3e4989", "#482878"];

// The colour of step `at` (from 1) of `last`: early is light.  [background, text]
function stepColour(at, last) {
  const place = last > 1 ? Math.min(1, Math.max(0, (at - 1) / (last - 1))) * (VIRIDIS.length - 1) : 0;
  const left = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const mix = [1, 3, 5].map((k) => {
    const [a, b] = [left, left + 1].map((i) => parseInt(VIRIDIS[i].slice(k, k + 2), 16));
    return Math.round(a + (b - a) * (place - left));
  });
  const [r, g, b] = mix.map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return [`rgb(${mix})`, light > 0.18 ? "#0b0b0b" : "#fff"];
}
