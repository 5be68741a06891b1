// Vercel's ai, with its provider for servers like OpenAI's.
import { createRequire } from "node:module";

const from = createRequire(`${process.env.MODULES}/`);
const { generateObject, generateText, jsonSchema, streamText, tool } = from("ai");
const { createOpenAICompatible } = from("@ai-sdk/openai-compatible");

const [url, name, asked] = process.argv.slice(2);
const { prompts, question, schema } = JSON.parse(asked);
const provider = createOpenAICompatible({
  name: "outrider", baseURL: `${url}/v1`, apiKey: "any", supportsStructuredOutputs: true,
});
const limits = { model: provider(name), maxOutputTokens: 512, temperature: 0, maxRetries: 0 };

const { text } = await generateText({ ...limits, prompt: question });
let streamed = "";
for await (const part of streamText({ ...limits, prompt: question }).textStream) streamed += part;
const people = [];
for (const prompt of prompts) {
  people.push((await generateObject({ ...limits, prompt, schema: jsonSchema(schema) })).object);
}
const called = [];
for (const prompt of prompts) {
  const answer = await generateText({
    ...limits, prompt, toolChoice: "required",
    tools: { person: tool({ description: "Keep a person", inputSchema: jsonSchema(schema) }) },
  });
  called.push(answer.toolCalls[0].input);
}
console.log(JSON.stringify({ text, streamed, people, called }));
