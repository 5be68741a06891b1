// Asks the server, and gives its answer as it streams. Knows no page.

/** What the server said instead of an answer, or in the middle of one. */
export class Refusal extends Error {
  /**
   * @param {string} message the server's words
   * @param {{status?: number, code?: string, retryAfter?: string}} [details]
   */
  constructor(message, { status, code, retryAfter } = {}) {
    super(message);
    this.status = status;
    const parts = [[status, code].filter(Boolean).join(" "), message].filter(Boolean);
    this.words = parts.join(": ") + (retryAfter ? ` (again in ${retryAfter} s)` : "");
  }
}

/** Fetch a path beside the page, with the key where there is one; throws a Refusal where the answer is none. */
async function ask(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached.");
  }
  if (!response.ok) throw await refusalOf(response);
  return response;
}

async function refusalOf(response) {
  const { status } = response;
  const retryAfter = response.headers.get("retry-after");
  try {
    const { error } = await response.json();
    return new Refusal(error.message, { status, code: error.code, retryAfter });
  } catch {
    return new Refusal(response.statusText || "The server refused.", { status, retryAfter });
  }
}

/** The models that are served. */
export async function models(key) {
  return (await (await ask("v1/models", key)).json()).data;
}

/** The chunks of a streamed completion, until its end. */
export async function* completion(request, { key, signal }) {
  const response = await ask("v1/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  let isWhole = false;
  for await (const data of events(response.body)) {
    // Reads on to the connection's end: who leaves before has gone away, to the server.
    isWhole = data === "[DONE]";
    if (isWhole) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message, { code: chunk.error.code });
    yield chunk;
  }
  if (!isWhole) throw new Refusal("The connection ended before the answer did.");
}

/** The data of server-sent events; comments and other fields are left out. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
