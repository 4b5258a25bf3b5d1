/* Search without a server: a page that was opened from disk may start no worker, so the worker's script runs in a
   hidden frame. The theme knows this arrangement by the name `IFrameWorker`. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      const page = this.frame.contentDocument;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...urls) => {
        for (const url of urls) await this.load(page, url);
      };
      this.load(page, url).then(() => {
        this.ready = true;
        this.waiting.forEach((data) => this.send(data));
      });
    }
    load(page, url) {
      return new Promise((done, failed) => {
        const script = page.createElement("script");
        script.src = url;
        script.onload = done;
        script.onerror = failed;
        page.documentElement.append(script);
      });
    }
    postMessage(data) {
      this.ready ? this.send(data) : this.waiting.push(data);
    }
    send(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
  window.Worker = window.IFrameWorker;
}
