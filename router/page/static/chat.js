// The chat: a conversation kept in this page, answers streamed by /v1/chat/completions.

import { marked } from "/page/vendor/marked.esm.js";
import DOMPurify from "/page/vendor/purify.es.mjs";
import { eventData } from "/page/sse.js";
import { Timing } from "/page/timing.js";

const at = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
let conversation = []; // {role, content}
let running = null; // AbortController of the answer that is being written

async function loadModels() {
  const response = await fetch("/v1/models");
  if (!response.ok) return showError(await describe(response));
  for (const { id } of (await response.json()).data) at("model").add(new Option(id, id));
}

function addMessage(role, content) {
  const item = at("message").content.firstElementChild.cloneNode(true);
  item.classList.add(role);
  item.querySelector(".role").textContent = role;
  item.querySelector(".text").textContent = content;
  at("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function showError(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
  if (message) at("messages").scrollTop = at("messages").scrollHeight; // it has taken room
}

async function describe(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `${response.status} ${response.statusText}`;
}

function requestBody() {
  const system = at("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const body = {
    model: at("model").value,
    messages,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const name of NUMBERS) if (at(name).value !== "") body[name] = Number(at(name).value);
  return body;
}

// Only what is complete enough to be worth it is drawn: once a frame, and never scripts or remote pictures.
function painter(item) {
  let text = "";
  let thoughts = "";
  let isDue = false;
  const paint = () => {
    isDue = false;
    const messages = at("messages");
    const isAtEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 80;
    item.querySelector(".thoughts").hidden = !thoughts;
    item.querySelector(".thoughts div").textContent = thoughts;
    item.querySelector(".text").innerHTML = DOMPurify.sanitize(marked.parse(text), { FORBID_TAGS: ["img", "style", "form"] });
    if (isAtEnd) messages.scrollTop = messages.scrollHeight;
  };
  return (allText, allThoughts) => {
    text = allText;
    thoughts = allThoughts;
    if (!isDue) requestAnimationFrame(paint);
    isDue = true;
  };
}

async function answer() {
  const mine = conversation; // a new chat may begin before this answer has ended
  running = new AbortController();
  setBusy(true);
  const item = addMessage("assistant", "");
  item.classList.add("waiting");
  const facts = item.querySelector(".facts");
  const paint = painter(item);
  const timing = new Timing();
  let text = "";
  let thoughts = "";
  let id = null;
  let wasCut = false;
  let ending = "the connection was lost";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(requestBody()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await describe(response));
    for await (const data of eventData(response)) {
      if (data === "[DONE]") {
        ending = wasCut ? "cut at max_tokens" : "";
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      id ??= chunk.id;
      text += chunk.choices[0]?.delta?.content ?? "";
      thoughts += chunk.choices[0]?.delta?.reasoning_content ?? "";
      wasCut ||= chunk.choices[0]?.finish_reason === "length";
      if (chunk.usage) timing.tokens(chunk.usage.completion_tokens);
      facts.textContent = timing.describe();
      paint(text, thoughts);
    }
  } catch (error) {
    ending = error.name === "AbortError" ? "stopped" : "";
    if (!ending) showError(error.message);
  }
  running = null;
  item.classList.remove("waiting");
  if (text) mine.push({ role: "assistant", content: text });
  else if (!id) item.remove();
  facts.textContent = [timing.describe(), await servedBy(id), ending].filter(Boolean).join(" · ");
  if (!running) setBusy(false);
}

async function servedBy(id) {
  if (!id) return "";
  const response = await fetch(`/cluster?answer=${encodeURIComponent(id)}`).catch(() => null);
  const nodes = response?.ok ? (await response.json()).served_by : [];
  return nodes.length ? `by ${nodes.join(" → ")}` : "";
}

function setBusy(isBusy) {
  at("send").disabled = isBusy;
  at("stop").disabled = !isBusy;
  at("messages").ariaBusy = isBusy; // read out when it is whole
  if (!isBusy) at("prompt").focus();
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = at("prompt").value.trim();
  if (!content || running) return;
  at("prompt").value = "";
  showError("");
  // A turn that got no answer is asked again together with the new one.
  const last = conversation.at(-1);
  if (last?.role === "user") last.content += `\n${content}`;
  else conversation.push({ role: "user", content });
  addMessage("user", content);
  answer();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  at("messages").replaceChildren();
  showError("");
  at("prompt").focus();
});

loadModels();
