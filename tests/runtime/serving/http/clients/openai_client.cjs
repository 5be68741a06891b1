// What openai's client for Node makes of a server; prints an object of JSON.
// When it has printed "block" it waits for a line, behind which the server is full.
const OpenAI = require("openai");

const [base, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: key });

async function main() {
  const found = { models: [] };
  for await (const one of await client.models.list()) found.models.push(one.id);
  const model = found.models[0];
  const completion = await client.completions.create({
    model, prompt: "Hello", max_tokens: 3, temperature: 0, logprobs: 1, echo: true,
  });
  found.completion = {
    text: completion.choices[0].text,
    tokens: completion.choices[0].logprobs.tokens,
    usage: completion.usage,
  };
  const asked = { model, messages: [{ role: "user", content: "Hello" }], temperature: 0 };
  const stream = await client.chat.completions.create({
    ...asked, max_completion_tokens: 4, stream: true, stream_options: { include_usage: true },
  });
  found.streamed = "";
  for await (const one of stream) {
    found.streamed += one.choices[0]?.delta?.content ?? "";
    if (one.usage) found.last = [one.choices.length, one.usage.completion_tokens];
  }
  const calls = {
    not_found: () => client.completions.create({ model: "other", prompt: "Hello" }),
    bad_field: () => client.completions.create({ model, prompt: "Hello", temperature: 2.5 }),
    no_key: () => new OpenAI({ baseURL: `${base}/v1`, apiKey: "wrong" }).models.list(),
  };
  for (const [name, call] of Object.entries(calls)) {
    try {
      await call();
    } catch (error) {
      found[name] = [error.constructor.name, error.status, error.code, error.param];
    }
  }
  try {
    const endless = await client.completions.create(
      { model, prompt: "Hello", max_tokens: 1_000_000, stream: true, ignore_eos: true },
      { headers: { "x-request-timeout-ms": "1000" } },
    );
    for await (const _ of endless);
  } catch (error) {
    found.mid_stream = [error.constructor.name, error.code, error.message];
  }
  console.log("block");
  await new Promise((resolve) => process.stdin.once("data", resolve));
  process.stdin.destroy();
  // Refused until a slot is free; the client comes back when it is told to.
  const patient = { maxRetries: 50 };
  const again = await client.completions.create({ model, prompt: "Hello", max_tokens: 2 }, patient);
  found.retried = again.usage.completion_tokens;
  console.log(JSON.stringify(found));
}

main();
