// The script of the playground in Node, on a stand-in for the page's elements and for the server: node page.js PLAYGROUND
"use strict";
const assert = require("assert"), fs = require("fs");

class Element {
  constructor(more = {}) {
    Object.assign(this, {style: {}, classList: new Set(), children: [], own: "", value: "", checked: true, options: []}, more);
    this.classList.remove = this.classList.delete; this.classList.contains = this.classList.has;
  }
  append(child) {
    this.children.push(child);
    if (child instanceof Choice) { this.options.push(child); this.value ||= child.value; }
  }
  set textContent(text) { this.own = text; this.children = []; }
  get textContent() { return this.own + this.children.map(child => child.textContent).join(""); }
}
class Choice extends Element { constructor(text, value) { super({value, disabled: false}); } }

const page = {prompt: new Element({value: "why"}), length: new Element({value: "12"})};
const environment = {
  document: {getElementById: id => page[id] ??= new Element(), createElement: () => new Element(), documentElement: new Element()},
  Option: Choice, matchMedia: () => ({matches: false}), fetch: (...asked) => server(...asked),
};
const script = fs.readFileSync(process.argv[2], "utf8").match(/<script>([\s\S]*)<\/script>/)[1];
const ask = new Function(...Object.keys(environment), `${script}; return ask;`)(...Object.values(environment));
let server;

const token = (content, value, more) => ({choices: [{delta: {content}, uncertainty: {tokens: {gate_entropy: [value]},
  layers: {layers: [1], signals: {gate_entropy: [[value]]}, experts: [[[0, 1]]]}, ...more}}]});
const events = [{choices: [{delta: {role: "assistant", content: ""}}]}, token("a", 1), token("b", 2, {sequence: {mean_gate_entropy: 1.5}}),
  {choices: [{delta: {content: "c"}, uncertainty: null}]}];

(async () => {
  server = async () => new Response('{"error":"Unauthorized"}', {status: 401});
  await ask();
  assert.equal(page.said.textContent, "The server wants an API key (401).");
  page.key.value = "k";
  await ask();
  assert.equal(page.said.textContent, "The server refuses this API key (401).");

  const asked = [];  // a chat; the run has one signal, and not the one that is chosen at first
  server = async (path, how) => {
    asked.push({path, key: how.headers.authorization, body: how.body && JSON.parse(how.body)});
    return new Response(path === "v1/models" ? '{"data":[{"id":"tiny"}]}' : events.map(one => `data: ${JSON.stringify(one)}\n\n`).join(""));
  };
  assert.equal(page.signal.value, "novelty");
  await ask();
  assert.equal(page.answer.textContent, "abc");
  assert.equal(page.said.textContent, "mean gate entropy 1.500");
  assert.equal(page.signal.value, "gate_entropy");
  assert.deepEqual(page.signal.options.filter(option => !option.disabled).map(option => option.value), ["gate_entropy"]);
  assert.deepEqual(asked.map(one => [one.path, one.key]), [["v1/models", "Bearer k"], ["v1/chat/completions", "Bearer k"]]);
  assert.deepEqual(asked[1].body.messages, [{role: "user", content: "why"}]);

  page.chat.checked = false;
  page.key.value = "";
  await ask();
  assert.deepEqual([asked[3].path, asked[3].key, asked[3].body.prompt], ["v1/completions", undefined, "why"]);
  for (const [body, status, said] of [["<html>", 503, "The server answers 503"], ['{"error":{"message":"too long"}}', 400, "too long"]]) {
    server = async () => new Response(body, {status});
    await ask();
    assert.equal(page.said.textContent, said);
  }
  console.log("as it should be");
})();
