/** The server that this page came from. */

/** What went wrong, as the server says it, or that it could not be asked. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "connection_lost", retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

export class Api {
  /** Kept here and nowhere else. */
  key = "";

  /** The card of the one model: `id`, `drafters`, `max_model_len`. */
  async model() {
    return (await (await this.#fetch("/v1/models")).json()).data[0];
  }

  /** What Prometheus would be told. */
  async metrics() {
    return (await this.#fetch("/metrics")).text();
  }

  /** "ok", or what is wrong with the engine. */
  async health() {
    try {
      return (await (await fetch("/health")).json()).status;
    } catch {
      throw new ApiError("the server does not answer");
    }
  }

  /** The chunks of an answer as they come. Ends early, and without an error, if `signal` says so. */
  async *chat(body, signal) {
    const options = { include_usage: true };
    const request = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: options }),
      signal,
    };
    let done = false;
    try {
      for await (const data of events(await this.#fetch("/v1/chat/completions", request))) {
        if (done || data === "[DONE]") {
          done = true; // the body is read to its end, or the browser would say that it was broken off
          continue;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, { status: 200, code: chunk.error.code });
        yield chunk;
      }
    } catch (error) {
      if (signal.aborted) return;
      throw error instanceof ApiError ? error : new ApiError("the connection broke off in mid-answer");
    }
    if (!done) throw new ApiError("the connection ended before the answer did");
  }

  async #fetch(path, { headers = {}, signal, ...options } = {}) {
    const authorization = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    let response;
    try {
      response = await fetch(path, { ...options, signal, headers: { ...headers, ...authorization } });
    } catch {
      throw new ApiError("the server does not answer");
    }
    if (response.ok) return response;
    let told = {};
    try {
      told = (await response.json()).error ?? {};
    } catch {
      // a proxy's own page, most likely: the status has to do
    }
    throw new ApiError(told.message ?? `the server answered with status ${response.status}`, {
      status: response.status,
      code: told.code ?? "unknown",
      retryAfter: Number(response.headers.get("Retry-After")) || null,
    });
  }
}

/** The data of server-sent events. */
async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + decoder.decode(value, { stream: true })).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:"));
      if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}
