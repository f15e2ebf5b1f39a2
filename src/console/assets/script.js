// Refreshes parts of a page while it is visible, and shows events as they come. Pages work without it.
"use strict";

(() => {
  const REFRESH_MS = 2000;
  const RETRY_MS = 5000;
  const EVENT_ROWS_MAX = 200;

  const say = (text) => {
    const status = document.querySelector("[data-status]");
    if (status && status.textContent !== text) status.textContent = text;
  };

  // Elements that can have the focus: links, except those of treemaps, which the tables repeat, and tables that scroll.
  const focusable = (part) => [...part.querySelectorAll('a:not([tabindex="-1"]), .scroll')];
  const nameOf = (element) => element.getAttribute("href") || element.getAttribute("aria-label");

  // The positions of scrolled tables and the focus survive a refresh. Rows move, so a link is found by its address.
  const replace = (part, text) => {
    const positions = [...part.querySelectorAll(".scroll")].map((table) => [table.scrollLeft, table.scrollTop]);
    const focused = focusable(part).find((element) => element === document.activeElement);
    part.innerHTML = text;
    [...part.querySelectorAll(".scroll")].forEach((table, at) => {
      if (positions[at]) [table.scrollLeft, table.scrollTop] = positions[at];
    });
    const target = focused && focusable(part).find((element) => nameOf(element) === nameOf(focused));
    if (target) target.focus({ preventScroll: true });
  };

  const pauseButton = (changed) => {
    const button = document.querySelector("[data-pause]");
    let paused = false;
    if (button) {
      button.addEventListener("click", () => {
        paused = !paused;
        button.textContent = paused ? "Continue" : "Pause";
        changed(paused);
      });
    }
    return () => paused;
  };

  const live = (part) => {
    const isPaused = pauseButton((paused) => say(paused ? "Paused" : "Live"));
    let shown = null;
    const refresh = async () => {
      if (document.hidden || isPaused()) return true;
      try {
        const response = await fetch(part.dataset.live, { credentials: "same-origin" });
        if (response.status === 401) {
          location.reload();
          return false;
        }
        const text = await response.text();
        // A failure is an alert, which would be read aloud each time that it is inserted.
        if (text !== shown) replace(part, text);
        shown = text;
        say(response.ok ? "Live" : "");
      } catch (error) {
        say("The page does not answer.");
      }
      return !(part.dataset.until && part.querySelector("[data-complete]"));
    };
    const loop = async () => {
      if (await refresh()) setTimeout(loop, REFRESH_MS);
    };
    setTimeout(loop, REFRESH_MS / 2);
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) refresh();
    });
  };

  const events = (part) => {
    const rows = part.querySelector("tbody");
    let source = null;
    // The revision up to which changes were received.
    let revision = "";
    let retry = null;
    const close = () => {
      clearTimeout(retry);
      if (source) source.close();
      source = null;
    };
    const open = () => {
      source = new EventSource(part.dataset.events + (revision && "&after=" + revision));
      source.addEventListener("open", () => say("Waiting for events"));
      source.addEventListener("begin", (message) => {
        revision = message.lastEventId;
      });
      source.addEventListener("rows", (message) => {
        revision = message.lastEventId;
        rows.insertAdjacentHTML("afterbegin", message.data);
        while (rows.rows.length > EVENT_ROWS_MAX) rows.deleteRow(-1);
        say("Receiving events");
      });
      source.addEventListener("failed", (message) => {
        close();
        say("The watch has ended: " + new DOMParser().parseFromString(message.data, "text/html").body.textContent);
      });
      source.addEventListener("error", (error) => {
        if (error.target.readyState === EventSource.CLOSED) refused();
        else say("Connecting");
      });
    };
    // EventSource connects again only after a stream has ended. It does not expose the status
    // of a response that is not a stream, so that one is requested again.
    const refused = async () => {
      close();
      try {
        const request = new AbortController();
        const response = await fetch(part.dataset.events, { credentials: "same-origin", signal: request.signal });
        if (response.status === 401) {
          location.reload();
          return;
        }
        if (response.ok) request.abort();
        else say(await response.text());
      } catch (error) {
        say("The page does not answer.");
      }
      retry = setTimeout(update, RETRY_MS);
    };
    // A browser has six connections to a site, so a page that nobody sees must not keep one.
    const update = () => {
      if (isPaused() || document.hidden) {
        close();
        say("Paused");
      } else if (!source) {
        open();
      }
    };
    const isPaused = pauseButton(update);
    update();
    document.addEventListener("visibilitychange", update);
    window.addEventListener("pagehide", close);
    // Also when the browser shows the page again as it was left.
    window.addEventListener("pageshow", update);
  };

  const part = document.querySelector("[data-live]");
  if (part) live(part);
  const stream = document.querySelector("[data-events]");
  if (stream) events(stream);
})();
