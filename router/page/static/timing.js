// What one answer took, as its reader saw it.

export class Timing {
  constructor() {
    this.startMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.numTokens = 0;
  }

  // `numTokens` in all, so far.
  tokens(numTokens) {
    if (numTokens <= this.numTokens) return;
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.numTokens = numTokens;
  }

  describe() {
    if (this.firstMs === null) return "";
    const facts = [`TTFT ${(this.firstMs - this.startMs).toFixed(0)} ms`];
    if (this.lastMs > this.firstMs) {
      const gapMs = (this.lastMs - this.firstMs) / (this.numTokens - 1);
      facts.push(`ITL ${gapMs.toFixed(1)} ms`, `${(1000 / gapMs).toFixed(1)} tokens/s`);
    }
    return [...facts, `${this.numTokens} tokens`].join(" · ");
  }
}
