// The live picture: each node with its load, and the latencies of the last minutes. Asked for once a second.

import uPlot from "/page/vendor/uPlot.esm.js";

const PERIOD_MS = 1000;
const at = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const plots = {};

function card(node) {
  const id = `node-${node.address}`;
  let item = at(id);
  if (!item) {
    item = at("node").content.firstElementChild.cloneNode(true);
    item.id = id;
    item.classList.add(node.role);
    item.querySelector(".role").textContent = node.role;
    item.querySelector(".address").textContent = node.address;
  }
  const numUsed = node.num_total_blocks - node.num_free_blocks;
  item.querySelector(".state").textContent = node.is_draining ? "draining" : "";
  item.querySelector(".kv").value = numUsed / node.num_total_blocks;
  item.querySelector(".kv-text").textContent = `${number.format(numUsed)} / ${number.format(node.num_total_blocks)}`;
  item.querySelector(".seats").value = node.num_seats_taken / node.max_num_seqs;
  item.querySelector(".seats-text").textContent = `${node.num_seats_taken} / ${node.max_num_seqs}`;
  item.querySelector(".facts").textContent = facts(node).join(" · ");
  return item;
}

function facts(node) {
  const found = [`queue ${number.format(node.num_queued_tokens)} tokens`];
  if (node.num_leased_blocks) found.push(`${number.format(node.num_leased_blocks)} blocks on their way`);
  if (node.prefill_tokens_per_s) found.push(`prefill ${number.format(node.prefill_tokens_per_s)} tokens/s`);
  if (node.decode_step_s) found.push(`step ${(node.decode_step_s * 1000).toFixed(1)} ms`);
  return [...found, node.connector];
}

function drawNodes(nodes) {
  const order = (node) => (node.role === "prefill" ? "0" : "1") + node.address;
  const cards = nodes.toSorted((a, b) => (order(a) < order(b) ? -1 : 1)).map(card);
  at("nodes").replaceChildren(...cards);
  if (!cards.length) at("nodes").textContent = "No node has joined.";
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

function drawPlot(id, latencies) {
  const now = Date.now() / 1000;
  const ms = (seconds) => (seconds === null ? null : seconds * 1000);
  const data = [
    latencies.map((slice) => now + slice.end_s),
    latencies.map((slice) => ms(slice[`${id}_p50_s`])),
    latencies.map((slice) => ms(slice[`${id}_p99_s`])),
  ];
  if (plots[id]) return plots[id].setData(data);
  const axis = { stroke: () => colour("--dim"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false } };
  const line = (label, name) => ({ label, stroke: () => colour(name), width: 2, spanGaps: true, points: { show: true, size: 4 } });
  const options = {
    width: at(id).clientWidth,
    height: 150,
    series: [{}, line("p50", "--accent"), line("p99", "--second")],
    axes: [axis, { ...axis, size: 55 }],
    scales: { y: { range: (_, min, max) => [0, (max ?? 1) * 1.1] } },
    legend: { show: false },
    cursor: { show: false },
  };
  plots[id] = new uPlot(options, data, at(id));
}

async function refresh() {
  try {
    const response = await fetch("/cluster");
    if (!response.ok) throw new Error(`the router answers ${response.status}`);
    const cluster = await response.json();
    at("waiting").textContent = cluster.num_waiting ? `${cluster.num_waiting} requests wait` : "";
    drawNodes(cluster.nodes);
    drawPlot("ttft", cluster.latencies);
    drawPlot("itl", cluster.latencies);
  } catch (error) {
    at("waiting").textContent = `not reachable: ${error.message}`;
  }
  setTimeout(refresh, document.hidden ? 10 * PERIOD_MS : PERIOD_MS);
}

addEventListener("resize", () => {
  for (const id in plots) plots[id].setSize({ width: at(id).clientWidth, height: 150 });
});
refresh();
