// Search without a server: a browser gives no Worker to a page that is opened as a file, so the search runs in a hidden
// frame instead, which answers like one.
(function () {
  if (location.protocol !== "file:") return;
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      var outer = this;
      var frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = function (data) {
        outer.dispatchEvent(new MessageEvent("message", { data: data }));
      };
      this.inside.importScripts = function () {
        return Promise.all(Array.from(arguments, function (one) { return load(frame, one); }));
      };
      this.ready = load(frame, url);
    }

    postMessage(data) {
      var inside = this.inside;
      this.ready.then(function () {
        inside.dispatchEvent(new MessageEvent("message", { data: data }));
      });
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  }

  function load(frame, url) {
    return new Promise(function (done, failed) {
      var script = frame.contentDocument.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      script.onload = function () { done(); };
      script.onerror = failed;
      frame.contentDocument.body.append(script);
    });
  }

  window.IFrameWorker = IFrameWorker; // the search looks for this name
  window.Worker = IFrameWorker;
})();
