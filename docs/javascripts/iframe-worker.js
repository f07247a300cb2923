// Search in pages that are opened from a folder. Browsers start no worker at a file:// address, so
// the worker's script runs in a hidden frame and exchanges the same messages with the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #started;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      this.#started = new Promise((resolve) => {
        this.#frame.addEventListener("load", () => {
          const inside = this.#frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = url;
          script.addEventListener("load", () => resolve(inside));
          inside.document.head.append(script);
        }, { once: true });
      });
      document.body.append(this.#frame);
    }

    postMessage(data) {
      this.#started.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
