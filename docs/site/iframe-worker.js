// Browsers start no workers for pages from the disk (file:), so the search runs in a hidden frame there.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data: structuredClone(data) }));
      const script = inside.document.createElement("script");
      script.src = address;
      this.ready = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
      });
      this.ready.catch((event) => this.onerror?.(event));
      inside.document.body.append(script);
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      const copy = inside.structuredClone(data);
      this.ready.then(() => setTimeout(() => inside.onmessage({ data: copy })), () => {});
    }

    terminate() {
      this.frame.remove();
    }
  };
}
