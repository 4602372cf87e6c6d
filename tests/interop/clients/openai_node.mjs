// The official Node client, from the folder that OPENAI_NODE names. Prints what it found as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(process.env.OPENAI_NODE + "/"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const greedy = { model, messages, temperature: 0, max_tokens: 16 };
const found = {};

const whole = await client.chat.completions.create(greedy);
found.whole = whole.choices[0].message.content;
found.usage = whole.usage;

let streamed = "";
const stream = await client.chat.completions.create({ ...greedy, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) found.streamedUsage = chunk.usage;
}
found.streamed = streamed;

const runner = client.chat.completions.stream({ ...greedy });
found.helper = (await runner.finalChatCompletion()).choices[0].message.content;

const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, inhabitants: { type: "integer" } },
  required: ["city", "inhabitants"],
  additionalProperties: false,
};
const structured = await client.chat.completions.create({
  ...greedy,
  max_tokens: 60,
  response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema } },
});
found.structured = JSON.parse(structured.choices[0].message.content);

const called = await client.chat.completions.create({
  ...greedy,
  max_tokens: 80,
  tools: [{ type: "function", function: { name: "look_up", parameters: schema } }],
  tool_choice: { type: "function", function: { name: "look_up" } },
});
const call = called.choices[0].message.tool_calls[0];
found.call = { name: call.function.name, arguments: JSON.parse(call.function.arguments), reason: called.choices[0].finish_reason };

const response = await client.responses.create({ model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 16 });
found.response = response.output_text;
const types = [];
for await (const event of await client.responses.create({ model, input: "Hello", max_output_tokens: 4, stream: true })) types.push(event.type);
found.events = [types[0], types.at(-1)];

found.errors = [];
for (const [options, change] of [
  [{}, { model: "nobody" }],
  [{}, { temperature: -1 }],
  [{ apiKey: "wrong" }, {}],
]) {
  try {
    await client.withOptions(options).chat.completions.create({ ...greedy, ...change });
  } catch (error) {
    found.errors.push([error.constructor.name, error.status, error.code]);
  }
}
console.log(JSON.stringify(found));
