/** Calls the server that serves this page, by paths that are relative: a proxy may put all of them below another one. */

/** An error that the server returned, or a failure to reach the server. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "connection_lost", retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

export class Api {
  /** The API key. The page stores it nowhere else. */
  key = "";

  /** The description of the server's model: `id`, `drafters`, `max_model_len`. */
  async model() {
    return (await (await this.#fetch("v1/models")).json()).data[0];
  }

  #untraced = null; // the key that may not ask for traces

  /** The metrics, in the text format of Prometheus; null if the key may not read them. */
  async metrics() {
    try {
      return await (await this.#fetch("metrics")).text();
    } catch (error) {
      if (error.code === "not_allowed") return null;
      throw error;
    }
  }

  /** The state of the engine: "ok", or a description. */
  async health() {
    try {
      return (await (await fetch("health")).json()).status;
    } catch {
      throw new ApiError("the server does not answer");
    }
  }

  /**
   * The chunks of an answer as they arrive, without the traces of steps if the key may not ask for them. `signal` ends
   * them early, without an error.
   */
  async *chat(body, signal) {
    if (body.speculation?.trace && this.key === this.#untraced) {
      body = { ...body, speculation: { ...body.speculation, trace: false } };
    }
    const options = { include_usage: true };
    const fixed = { stream: true, stream_options: options, separate_reasoning: false }; // tokens are aligned with the text
    const request = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, ...fixed }),
      signal,
    };
    let done = false;
    try {
      for await (const data of events(await this.#fetch("v1/chat/completions", request))) {
        if (done || data === "[DONE]") {
          done = true; // read on to the end of the body, or the browser reports an aborted request
          continue;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, { status: 200, code: chunk.error.code });
        yield chunk;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.code === "not_allowed" && body.speculation?.trace) {
        this.#untraced = this.key;
        yield* this.chat(body, signal);
        return;
      }
      throw error instanceof ApiError ? error : new ApiError("the connection was lost before the answer ended");
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
    let problem = {};
    try {
      problem = (await response.json()).error ?? {};
    } catch {
      // probably a proxy's own page: only the status is known
    }
    throw new ApiError(problem.message ?? `the server answered with status ${response.status}`, {
      status: response.status,
      code: problem.code ?? "unknown",
      retryAfter: Number(response.headers.get("Retry-After")) || null,
    });
  }
}

/** The data of each server-sent event of a response. */
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
