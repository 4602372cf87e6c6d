// Server-sent events of a streamed POST, one `data` at a time. Ends with the stream, however it is cut.

export async function* eventData(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data: "));
        if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
