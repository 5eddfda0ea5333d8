// Appended to the page by test_explore.py: uses it as a reader does, and leaves problems in its title.
const problems = [];
const check = (isTrue, what) => isTrue || problems.includes(what) || problems.push(what);
addEventListener("error", event => check(false, event.message));
const labelled = name => document.querySelector(`[aria-label="${name}"]`);
const focus = control => (control.focus(), control);
const said = id => document.getElementById(id).textContent;

// Keys: a stepper keeps the focus, arrows walk over the ranks, a refusal changes nothing.
focus(labelled("more dp")).click();
check(said("settings").includes("16 ranks"), "a stepper changes the layout");
check(document.activeElement === labelled("more dp"), "a redraw takes the focus away");
labelled("less dp").click();
focus(labelled("more tp")).click();
check(said("status").startsWith("✗ tp_size=4 does not divide num_key_value_heads=2"), "a refusal");
check(said("settings").includes("8 ranks"), "a refusal changes the layout");
focus(document.querySelector("[data-rank='5']"));
for (const [key, rank] of [["ArrowLeft", "4"], ["ArrowUp", "0"], ["ArrowUp", "0"], ["ArrowRight", "1"]]) {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  check(document.activeElement.dataset.rank === rank, `${key} does not lead to rank ${rank}`);
  check(document.activeElement.getAttribute("aria-pressed") === "true", `${key} does not choose`);
}

// A question hides its answer; a wrong and a right one are told apart.
for (const isRight of [false, true]) {
  document.querySelector("[data-ask=who]").click();
  check(!/Σ|its gradient|sum of all gradients/.test(said("ranks") + said("about")), "the answer stands beside the question");
  if (isRight) document.querySelector("[data-rank='3']").click();
  [...document.querySelectorAll("#ask-who button")].find(button => button.textContent === "Check").click();
  check(said("ask-who").startsWith(isRight ? "✓" : "✗"), `an answer is judged: ${said("ask-who")}`);
}

// An address may have any numbers.
location.hash = "#layer=-3&rank=2.5&time=-1&hop=9";
begin();
check(V.layer === 0 && V.rank === 2 && V.time === 0 && V.hop === 3, `the address is taken as ${location.hash}`);

// Every text stands out, from the shape below it or from the background of its element.
function luminance(colour) {
  const [r, g, b] = colour.match(/[\d.]+/g).map(n => n / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function below(element) {
  const { left, top, width, height } = element.getBoundingClientRect();
  for (const at of document.elementsFromPoint(left + width / 2, top + height / 2)) {
    if (at !== element && element.contains(at)) continue;
    const { fill, backgroundColor } = getComputedStyle(at), isShape = at.getAttribute("fill")?.startsWith("var");
    if (isShape || !/^rgba.*, 0\)$/.test(backgroundColor)) return isShape ? fill : backgroundColor;
  }
}
function checkContrast() {
  const isText = node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
  for (const element of document.querySelectorAll("body *:not(script, option, :disabled)")) {
    if (!isText(element) || !element.getClientRects().length) continue;
    const { color, fill } = getComputedStyle(element), pair = [element.tagName === "text" ? fill : color, below(element)];
    if (!pair[1]) continue;
    const [dark, light] = pair.map(luminance).sort((a, b) => a - b), ratio = (light + 0.05) / (dark + 0.05);
    check(ratio >= 4.5, `${element.tagName} "${element.textContent}" has a contrast of ${ratio.toFixed(2)}`);
  }
}

// Any control, in any order.
let seed = 7;
const random = n => (seed = seed * 16807 % 2147483647) % n;
for (let i = 0; i < 40; i++) {
  const controls = document.querySelectorAll("button:enabled, select:enabled, input:enabled");
  const control = controls[random(controls.length)], name = control.getAttribute("aria-label") ?? control.textContent;
  if (control.tagName === "SELECT") control.selectedIndex = random(control.length);
  if (control.type === "range") control.value = random(20);
  control.dispatchEvent(new Event({ SELECT: "change", INPUT: "input" }[control.tagName] ?? "click"));
  if (control.type === "checkbox") control.click();
  const drawn = document.querySelector("main").outerHTML + document.getElementById("bar").outerHTML;
  check(!/NaN|undefined|Infinity|\[object/.test(drawn), `something is not a number after ${name}, ${location.hash}`);
  check(document.documentElement.scrollWidth <= innerWidth, `too wide after ${name}, ${location.hash}`);
}
checkContrast();
// The dark theme, which a browser takes by a setting, follows as another rule.
const sheet = document.styleSheets[0], dark = [...sheet.cssRules].find(rule => rule.media?.mediaText.includes("dark"));
sheet.insertRule(dark.cssRules[0].cssText, sheet.cssRules.length);
check(getComputedStyle(document.body).backgroundColor === "rgb(18, 18, 21)", "it is not dark");
checkContrast();
document.title = JSON.stringify(problems);
